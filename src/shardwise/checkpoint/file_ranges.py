"""Reads states that are stored in files by parts: in few large runs, each small enough for memory.

A rank's flat state may hold thousands of separate rows, as of a matrix that is split by columns. They are not read from
a file one by one: the bytes between near rows are read too, and dropped.

>>> import torch
>>> from shardwise.layout.slicing import Rect
>>> held = StateShard("up", (), "param", (8,), TensorFlatState(torch.arange(8, dtype=torch.uint8)), (), ())
>>> bytes(read_spans(held, [(1, 3), (5, 6), (6, 8)])).hex()
'0102050607'
>>> rows = [Chunk(Rect((row, 4), (row + 1, 8)), 12 * row) for row in range(3)]
>>> for window in windows(rows, max_numel=20, max_gap=8):
...     print(window.start, window.stop, [str(piece.rect) for piece in window.pieces])
0 16 ['[0:1, 4:8]', '[1:2, 4:8]']
24 28 ['[2:3, 4:8]']
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


def in_file(state_shard: StateShard) -> bool:
    """Say whether a state is stored in a file, not in memory."""
    return state_shard.flat.tensor is None


def read_spans(state_shard: StateShard, spans: Sequence[Span]) -> memoryview:
    """Return the bytes of some spans of a state, one span after the other.

    Args:
        state_shard: the state, stored in a file.
        spans: ranges of bytes from its start, each of whole elements and of at most `RUN_BYTES`.

    Raises:
        CheckpointError: that file cannot be read.
    """
    item_bytes = state_shard.flat.dtype.itemsize
    found: list[memoryview | bytes] = []
    for run in _runs(spans):
        first, last = run[0][0], run[-1][1]
        memory = memory_of(_read(state_shard, first // item_bytes, last // item_bytes).view(torch.uint8))
        if sum(stop - start for start, stop in run) < last - first:
            found.append(b"".join([memory[start - first : stop - first] for start, stop in run]))
        else:
            found.append(memory)
    return memoryview(found[0] if len(found) == 1 else b"".join(found))


def _read(state_shard: StateShard, start: int, stop: int) -> Tensor:
    try:
        return state_shard.flat.read(start, stop)
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
    """Names the elements [start, stop) of a state, and the pieces in them, offsets counted from `start`."""

    start: int
    stop: int
    pieces: tuple[Chunk, ...]

    @property
    def has_gaps(self) -> bool:
        """Say whether some of its elements are in no piece."""
        return sum(piece.rect.numel for piece in self.pieces) < self.stop - self.start


def windows(pieces: Sequence[Chunk], max_numel: int, max_gap: int) -> Iterator[FileRange]:
    """Cut pieces into windows over the state, in its order; a long piece is cut into several.

    Args:
        pieces: of one tensor; they do not overlap in the state.
        max_numel: the most elements of a window.
        max_gap: the most elements between two pieces of a window that are in no piece.
    """
    inside: list[Chunk] = []
    start = stop = 0
    for piece in sorted(pieces, key=lambda piece: piece.local_offset):
        at = piece.local_offset
        while at < piece.local_stop:
            if inside and (at - stop > max_gap or at - start >= max_numel):
                yield FileRange(start, stop, tuple(inside))
                inside = []
            start = start if inside else at
            stop = min(piece.local_stop, start + max_numel)
            rects = flat_range_to_rects(piece.rect, at - piece.local_offset, stop - piece.local_offset)
            inside += [each.shifted(at - start) for each in rects]
            at = stop
    if inside:
        yield FileRange(start, stop, tuple(inside))


def windows_of(flat: FlatState, pieces: Sequence[Chunk]) -> Iterator[FileRange]:
    """Yield windows of at most `WINDOW_BYTES` through which pieces of a state in a file are read or written."""
    item_bytes = flat.dtype.itemsize
    return windows(pieces, WINDOW_BYTES // item_bytes, MAX_GAP_BYTES // item_bytes)


def written_parts(state_shard: StateShard) -> Iterator[StateShard]:
    """Yield what this rank writes of a state: all at once from memory; from a file by parts, each read into memory.

    Raises:
        CheckpointError: a file that stores it cannot be read.
    """
    if not in_file(state_shard):
        yield state_shard
        return
    for window in windows_of(state_shard.flat, state_shard.written):
        values = TensorFlatState(_read(state_shard, window.start, window.stop))
        yield replace(state_shard, flat=values, pieces=window.pieces, written=window.pieces)
