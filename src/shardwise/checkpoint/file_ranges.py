"""Reads states, which are in memory or in files, by parts: in few large runs, each small enough for memory.

A part of a fused matrix that is split by columns is thousands of separate rows. They are not read from a file one by
one: the bytes between near rows are read too, and dropped.

>>> import torch
>>> from shardwise.layout.slicing import Rect
>>> held = StateShard("up", (), "param", (8,), TensorFlatState(torch.arange(8, dtype=torch.uint8)), (), ())
>>> bytes(read_spans(held, [(1, 3), (5, 6), (6, 8)])).hex()
'0102050607'
>>> rows = [Chunk(Rect((row, 4), (row + 1, 8)), 4 * row) for row in range(3)]
>>> for window in windows(rows, max_numel=8):
...     print(window.start, window.stop, [str(piece.rect) for piece in window.pieces])
0 8 ['[0:1, 4:8]', '[1:2, 4:8]']
8 12 ['[2:3, 4:8]']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import BLOCK_BYTES, CheckpointError
from shardwise.layout.slicing import Chunk, flat_range_to_rects
from shardwise.runtime.pinned_memory import memory_of
from shardwise.runtime.state_shards import FlatState, StateShard, TensorFlatState

# The most that one read for a save takes.
RUN_BYTES: Final = 4 * BLOCK_BYTES
# The most that one read or write of a part of a state takes: so large that only a few of a checkpoint's blocks cross
# from one part to the next, and are read twice.
WINDOW_BYTES: Final = 16 * BLOCK_BYTES
# A disk reads a gap of this size about as fast as it begins another read.
MAX_GAP_BYTES: Final = 2**16

Span = tuple[int, int]


def read_spans(state_shard: StateShard, spans: Sequence[Span]) -> memoryview:
    """Return the bytes of some spans of a state, one span after the other; of one in host memory without a copy.

    Args:
        state_shard: the state, stored in host memory or in a file, or in codes anywhere.
        spans: ranges of bytes from its start, each of whole elements and of at most `RUN_BYTES`.

    Raises:
        CheckpointError: that file cannot be read.
    """
    item_bytes = state_shard.flat.dtype.itemsize
    found: list[memoryview] = []
    for run in _runs(spans):
        first, last = run[0][0], run[-1][1]
        memory = memory_of(_read(state_shard, first // item_bytes, last // item_bytes).view(torch.uint8))
        if sum(stop - start for start, stop in run) < last - first:
            found += [memory[start - first : stop - first] for start, stop in run]
        else:
            found.append(memory)
    return found[0] if len(found) == 1 else memoryview(b"".join(found))


def _read(state_shard: StateShard, start: int, stop: int) -> Tensor:
    try:
        return state_shard.flat.read(start, stop).detach().cpu()  # codes on a GPU are decoded there
    except OSError as error:  # otherwise it would look like an error of the disk that is written to
        raise CheckpointError(
            "state-file-unreadable",
            f"{state_shard.name} {state_shard.state} cannot be read from the file that stores it: {error}; go on from "
            "the last checkpoint",
        ) from error


def _runs(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Yield groups of spans that one read takes: near one another, and together at most `RUN_BYTES`."""
    run: list[Span] = []
    for start, stop in spans:
        if run and not (0 <= start - run[-1][1] <= MAX_GAP_BYTES and stop - run[0][0] <= RUN_BYTES):
            yield run
            run = []
        run.append((start, stop))
    if run:
        yield run


@dataclass(frozen=True)
class FileRange:
    """Names the elements [start, stop) of a state, and the pieces that they are, offsets counted from `start`."""

    start: int
    stop: int
    pieces: tuple[Chunk, ...]


def windows(pieces: Sequence[Chunk], max_numel: int) -> Iterator[FileRange]:
    """Cut pieces into windows of at most `max_numel` elements over the state, in its order, with no gap in a window."""
    inside: list[Chunk] = []
    start = stop = 0
    for piece in sorted(pieces, key=lambda piece: piece.local_offset):
        at = piece.local_offset
        while at < piece.local_stop:
            if inside and (at > stop or at - start >= max_numel):
                yield FileRange(start, stop, tuple(inside))
                inside = []
            start = start if inside else at
            stop = min(piece.local_stop, start + max_numel)
            rects = flat_range_to_rects(piece.rect, at - piece.local_offset, stop - piece.local_offset)
            inside += [rect.shifted(at - start) for rect in rects]
            at = stop
    if inside:
        yield FileRange(start, stop, tuple(inside))


def windows_of(flat: FlatState, pieces: Sequence[Chunk]) -> Iterator[FileRange]:
    """Yield windows of at most `WINDOW_BYTES` through which pieces of a state in a file are read or written."""
    return windows(pieces, WINDOW_BYTES // flat.dtype.itemsize)


def written_parts(state_shard: StateShard) -> Iterator[StateShard]:
    """Yield what this rank writes of a state: all at once from memory; from a file by parts, each read into memory.

    Raises:
        CheckpointError: a file that stores it cannot be read.
    """
    if state_shard.flat.tensor is not None:
        yield state_shard
        return
    for window in windows_of(state_shard.flat, state_shard.written):
        values = TensorFlatState(_read(state_shard, window.start, window.stop))
        yield replace(state_shard, flat=values, pieces=window.pieces, written=window.pieces)
