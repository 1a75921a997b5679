"""Reads any rectangles of a stored tensor into a rank's own memory, and checks what it reads.

The wanted pieces need not be the stored pieces. Of each stored piece only the blocks with wanted elements are read,
each once, and checked. A block that is wanted whole and unchanged is read straight to its place.

>>> import tempfile, torch
>>> from shardwise.checkpoint.writer import write_state_shards
>>> from shardwise.runtime.state_shards import TensorFlatState
>>> from shardwise.runtime.state_shards import StateShard
>>> whole = (Chunk(Rect.whole((2, 3)), 0),)
>>> held = StateShard("up.weight", (), "param", (2, 3), TensorFlatState(torch.arange(6.0)), whole, whole)
>>> with tempfile.TemporaryDirectory() as folder:
...     part = write_state_shards(Path(folder), "rank-00000-of-00001.safetensors", [held], [])
...     column = torch.zeros(2, dtype=torch.bfloat16)
...     with ChunkReader(Path(folder)) as reader:
...         reader.read(part.tensors[0], "param", [Chunk(Rect((0, 1), (2, 2)), 0)], column)
>>> column
tensor([1., 4.], dtype=torch.bfloat16)
"""

from __future__ import annotations

import math
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import (
    BLOCK_BYTES,
    CheckpointError,
    DamagedError,
    StoredChunk,
    StoredTensor,
)
from shardwise.checkpoint.safetensors_io import named_dtype
from shardwise.config.untrusted_files import UntrustedFileError, open_regular, parse_json
from shardwise.layout.slicing import Chunk, LocalTensor, Rect, flat_range_to_rects, overlap, rect_to_flat_ranges, stack
from shardwise.runtime.device import kind_of
from shardwise.runtime.pinned_memory import memory_of
from shardwise.runtime.state_shards import PARAM

# The file may also come from elsewhere, such as a download.
_FIX: Final = "use an older checkpoint, or get the file again"
_OLDER: Final = "use an older checkpoint"
# The most that one call reads, and the size of the buffer.
_CHUNK_BYTES: Final = 4 * BLOCK_BYTES
# Without checksums, gaps of up to this size between wanted bytes are read and dropped rather than skipped.
_MAX_GAP_BYTES: Final = 2**16
_MAX_OPEN_FILES: Final = 64


class ChunkReader:
    """Reads pieces from the files of one folder; a context manager, since it keeps files open."""

    def __init__(self, folder: Path) -> None:
        self.num_read_bytes = 0
        self._folder = folder
        self._files: dict[str, int] = {}
        self._buffers: dict[bool, Tensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
        self._buffers.clear()

    def read(self, tensor: StoredTensor, state: str, pieces: Sequence[Chunk], target: Tensor) -> None:
        """Fill pieces of a local tensor, casting to its dtype.

        Args:
            pieces: the wanted ones, each a rectangle of the whole tensor at an offset of `target`.
            target: 1-D and contiguous, of any dtype, on any device.

        Raises:
            DamagedError: a file is missing, ends early, or does not match its checksums.
            CheckpointError: the checkpoint does not have all of these pieces, or has one number in their place.
        """
        label = f"{tensor.name} {state}"
        stored = tensor.states.get(state)
        if stored is None:
            raise CheckpointError(
                "elements-missing", f"{self._folder.name} has no {label}; load a checkpoint that has it"
            )
        wanted = [box for rect, parts in stack(pieces) for box in _boxes(rect, parts, target.detach())]
        sources = {piece.rect: piece for piece in stored.pieces}
        # As the offset of a wanted piece stands its index in `wanted`.
        copies = overlap([Chunk(rect, 0) for rect in sources], [Chunk(box.rect, i) for i, box in enumerate(wanted)])
        missing = [box.rect.numel for box in wanted]
        meet: dict[Rect, list[_Box]] = {}
        for copy in copies:
            missing[copy.destination.local_offset] -= copy.rect.numel
            meet.setdefault(copy.source.rect, []).append(wanted[copy.destination.local_offset].cut(copy.rect))
        for box, num_elements in zip(wanted, missing, strict=True):
            if num_elements:
                raise CheckpointError(
                    "elements-missing",
                    f"{self._folder.name} lacks {num_elements} elements of {box.rect} of {label}, which has shape "
                    f"{tensor.shape}; load a checkpoint that has all of it",
                )
        for rect in sorted(meet, key=lambda rect: (sources[rect].file, sources[rect].offset)):
            self._read_source(_ChunkSource.of(sources[rect], stored.dtype, label), meet[rect])

    def damages(self, tensor: StoredTensor, state: str, piece: StoredChunk) -> Iterator[DamagedError | None]:
        """Read all of a stored piece, and yield for each of its blocks what is wrong with it; None where nothing is."""
        source = _ChunkSource.of(piece, tensor.states[state].dtype, f"{tensor.name} {state}")
        memory = memory_of(self._buffer(torch.device("cpu")))
        for start in range(0, source.num_bytes, BLOCK_BYTES):
            try:
                self._fetch(source, start, memory[: min(BLOCK_BYTES, source.num_bytes - start)])
            except DamagedError as error:
                yield error  # what comes after a bad sector may be readable
            else:
                yield None

    def _read_source(self, source: _ChunkSource, boxes: list[_Box]) -> None:
        """Read the boxes from one stored piece, which contains all of them."""
        if source.piece.is_transposed:
            boxes = [box.transposed() for box in boxes]
        extents = []
        ranges: list[tuple[int, int]] = []
        for box in boxes:
            found = source.byte_ranges(box.rect)
            extents.append((found[0][0], found[-1][1]))
            if len(found) == 1 and source.is_like(box):
                found = self._read_in_place(source, *found[0], box.view)
            ranges += found
        chunks = source.chunks(ranges)
        starts = [start for start, _ in chunks]
        in_chunks: list[list[_Box]] = [[] for _ in chunks]
        for box, (first, last) in zip(boxes, extents, strict=True):
            for place in range(max(bisect_right(starts, first) - 1, 0), bisect_left(starts, last)):
                in_chunks[place].append(box)
        for (start, stop), some in zip(chunks, in_chunks, strict=True):
            self._read_chunk(source, start, stop, some)

    def _read_in_place(self, source: _ChunkSource, start: int, stop: int, view: Tensor) -> list[tuple[int, int]]:
        """Read the whole blocks of a range into the memory of `view`; return the ranges left over at its ends."""
        first, last = source.whole_blocks(start, stop)
        if first >= last:
            return [(start, stop)]
        memory = memory_of(view)
        for at in range(first, last, _CHUNK_BYTES):
            self._fetch(source, at, memory[at - start : min(at + _CHUNK_BYTES, last) - start])
        return [(low, high) for low, high in ((start, first), (last, stop)) if low < high]

    def _read_chunk(self, source: _ChunkSource, start: int, stop: int, boxes: Sequence[_Box]) -> None:
        """Read a range of bytes of a stored piece, and copy the elements in it to the boxes."""
        device = boxes[0].view.device
        buffer = self._buffer(device)[: stop - start]
        self._fetch(source, start, memory_of(buffer))
        values = buffer.view(source.dtype).to(device)
        have = flat_range_to_rects(source.rect, start // source.item_bytes, stop // source.item_bytes)
        for copy in overlap(have, [Chunk(box.rect, place) for place, box in enumerate(boxes)]):
            box = boxes[copy.destination.local_offset]
            rows = values[copy.source.local_offset : copy.source.local_stop].view(copy.source.rect.shape)
            box.cut(copy.rect).view.copy_(rows[copy.rect.slices_in(copy.source.rect)])

    def _buffer(self, device: torch.device) -> Tensor:
        is_pinned = kind_of(device).pins
        if is_pinned not in self._buffers:
            self._buffers[is_pinned] = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        return self._buffers[is_pinned]

    def _fetch(self, source: _ChunkSource, start: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes of a stored piece from `start` on, and check them."""
        where = f"{self._folder.name}/{source.piece.file}"
        descriptor, num_read = self._open(source.piece.file), 0
        while num_read < len(memory):
            at = source.piece.offset + start + num_read
            try:
                num_more = os.preadv(descriptor, [memory[num_read:]], at)
            except OSError as error:
                raise DamagedError(
                    "file-unreadable", f"{where}: {source.label} cannot be read at byte {at}: {error.strerror}; {_FIX}"
                ) from error
            if not num_more:
                raise DamagedError(
                    "file-ends-early",
                    f"{where} ends at byte {at}, within {source.label}, which goes on to byte "
                    f"{source.piece.offset + source.num_bytes}; {_FIX}",
                )
            num_read += num_more
        self.num_read_bytes += num_read
        if not source.piece.crcs:
            return
        for low in range(0, len(memory), BLOCK_BYTES):
            block = memory[low : low + BLOCK_BYTES]
            if zlib.crc32(block) != source.piece.crcs[(start + low) // BLOCK_BYTES]:
                at = source.piece.offset + start + low
                raise DamagedError(
                    "checksum-differs",
                    f"{where}: {source.label} does not match its checksum at bytes {at} to {at + len(block)}; {_FIX}",
                )

    def _open(self, file: str) -> int:
        if file not in self._files:
            if len(self._files) == _MAX_OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            try:
                self._files[file] = open_regular(self._folder / file, self._folder)
            except OSError as error:
                raise DamagedError(
                    "file-unreadable", f"{self._folder.name}/{file} cannot be opened: {error.strerror}; {_FIX}"
                ) from error
        return self._files[file]


def read_json(folder: Path, stored: StoredTensor, what: str) -> Any:
    """Return the values that a checkpoint stores as a tensor of bytes, the text of JSON.

    Args:
        stored: the tensor, as the manifest has it.

    Raises:
        CheckpointError: it is no such text.
    """
    where = f"{folder}: {what}"
    if PARAM not in stored.states or stored.states[PARAM].dtype != "U8" or stored.states[PARAM].value is not None:
        raise CheckpointError("not-json", f"{where} is not stored as text; {_OLDER}")
    text = torch.empty(math.prod(stored.shape), dtype=torch.uint8)
    with ChunkReader(folder) as reader:
        reader.read(stored, PARAM, LocalTensor.whole(stored.shape).pieces, text)
    try:
        return parse_json(text.numpy().tobytes().decode(), where, _OLDER)
    except UntrustedFileError as error:
        raise CheckpointError(error.code, str(error)) from None
    except UnicodeDecodeError:
        raise CheckpointError("not-utf8", f"{where} is not UTF-8 text; {_OLDER}") from None


@dataclass(frozen=True)
class _Box:
    """Names a wanted rectangle, and the memory for it in its shape."""

    rect: Rect
    view: Tensor

    def cut(self, rect: Rect) -> _Box:
        """Return the part of the box for a rectangle within its own."""
        return _Box(rect, self.view[rect.slices_in(self.rect)])

    def transposed(self) -> _Box:
        return _Box(_transposed(self.rect), self.view.t())


def _boxes(rect: Rect, parts: Sequence[Chunk], target: Tensor) -> list[_Box]:
    """Return the memory of stacked pieces: one box if they are equally spaced, else one for each."""
    shape, part = rect.shape, parts[0].rect.shape
    steps = {after.local_offset - before.local_offset for before, after in pairwise(parts)}
    # The pieces follow one another along the first `num_dims`: each has one index of these, and all of the other dims.
    num_dims = next(dim for dim in range(len(shape) + 1) if part[dim:] == shape[dim:])
    are_equal = {each.rect.shape for each in parts} == {part} and math.prod(part[:num_dims]) == 1
    if len(steps) == 1 and are_equal and (step := min(steps)) > 0:
        strides = [step * math.prod(shape[dim + 1 : num_dims]) for dim in range(num_dims)]
        strides += [math.prod(shape[dim + 1 :]) for dim in range(num_dims, len(shape))]
        offset = target.storage_offset() + parts[0].local_offset
        return [_Box(rect, target.as_strided(shape, strides, offset))]
    return [_Box(each.rect, target[each.local_offset : each.local_stop].view(each.rect.shape)) for each in parts]


@dataclass(frozen=True)
class _ChunkSource:
    """A stored piece as bytes: they are `rect` row-major, a rectangle of the transposed tensor where that is stored."""

    piece: StoredChunk
    rect: Rect
    dtype: torch.dtype
    label: str

    @classmethod
    def of(cls, piece: StoredChunk, dtype: str, label: str) -> _ChunkSource:
        rect = _transposed(piece.rect) if piece.is_transposed else piece.rect
        return cls(piece, rect, named_dtype(dtype), label)

    @property
    def item_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.rect.numel * self.item_bytes

    def byte_ranges(self, rect: Rect) -> list[tuple[int, int]]:
        """Return the byte ranges of the elements of a part of it; small gaps are within a range."""
        # With checksums, a gap that is smaller than a block contains no whole block.
        max_gap_bytes = BLOCK_BYTES - 1 if self.piece.crcs else _MAX_GAP_BYTES
        ranges = rect_to_flat_ranges(rect, self.rect, max_gap_bytes // self.item_bytes)
        return [(start * self.item_bytes, stop * self.item_bytes) for start, stop in ranges]

    def is_like(self, box: _Box) -> bool:
        """Say whether a box has the same bytes in memory as in the file, in one contiguous range."""
        start, stop = next(rect_to_flat_ranges(box.rect, self.rect))
        return (
            stop - start == box.rect.numel
            and box.view.is_contiguous()
            and box.view.dtype == self.dtype
            and box.view.device.type == "cpu"
        )

    def whole_blocks(self, start: int, stop: int) -> tuple[int, int]:
        """Return the part of a range that is whole blocks; all of it where there are no checksums."""
        if not self.piece.crcs:
            return start, stop
        return -(
            -start // BLOCK_BYTES
        ) * BLOCK_BYTES, stop if stop == self.num_bytes else stop // BLOCK_BYTES * BLOCK_BYTES

    def chunks(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the ranges to read, in order: rounded out to checkable blocks, each at most as long as the buffer."""
        unit = BLOCK_BYTES if self.piece.crcs else 1
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            start, stop = start // unit * unit, min(-(-stop // unit) * unit, self.num_bytes)
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((start, stop))
        return [
            (low, min(low + _CHUNK_BYTES, stop)) for start, stop in joined for low in range(start, stop, _CHUNK_BYTES)
        ]


def _transposed(rect: Rect) -> Rect:
    return Rect(rect.start[::-1], rect.stop[::-1])
