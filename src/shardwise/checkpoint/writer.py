"""Writes what a rank has to save into one safetensors file, straight from its storage.

From host memory the file is written without a copy, from a GPU through one small pinned buffer, from a state in a file
through reads of a few MiB; nothing is ever copied whole. A helper thread computes the checksums during the writing, and
another one reads such files ahead.

>>> import tempfile, torch
>>> from shardwise.runtime.state_shards import TensorFlatState
>>> from shardwise.layout.slicing import Chunk, Rect
>>> half = (Chunk(Rect((2, 0), (4, 3)), 0),)
>>> held = StateShard("up.weight", (), "exp_avg", (4, 3), TensorFlatState(torch.zeros(6)), half, half)
>>> with tempfile.TemporaryDirectory() as folder:
...     part = write_state_shards(Path(folder), "rank-00001-of-00002.safetensors", [held], [])
>>> part.num_bytes, part.tensors[0].states["exp_avg"].pieces[0].rect == half[0].rect
(152, True)
"""

from __future__ import annotations

import errno
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from shardwise.checkpoint.commit import named_errors
from shardwise.checkpoint.file_ranges import Span, read_spans
from shardwise.checkpoint.manifest import (
    BLOCK_BYTES,
    RankManifest,
    StoredChunk,
    StoredState,
    StoredTensor,
    entry_key,
    merge_parts,
)
from shardwise.checkpoint.safetensors_io import TensorHeader, dtype_name, encode_header
from shardwise.layout.slicing import Chunk, Rect, stack
from shardwise.runtime.device import kind_of
from shardwise.runtime.pinned_memory import memory_of
from shardwise.runtime.state_shards import ScalarState, StateShard

# The most that one call writes, in bytes and in buffers; the kernel takes 1024 buffers.
_BATCH_BYTES: Final = 4 * BLOCK_BYTES
_BATCH_BUFFERS: Final = 512
# Pages are written back to the disk in steps of this size while the next ones are written, not all in the fsync.
_WRITE_BACK_BYTES: Final = 32 * BLOCK_BYTES


def write_state_shards(
    folder: Path,
    file: str,
    state_shards: Sequence[StateShard],
    numbers: Sequence[ScalarState],
    progress: Callable[[int], None] = lambda _: None,
) -> RankManifest:
    """Write the pieces that this rank is to write into one new file, and sync it.

    Args:
        folder: where to write it; it exists.
        file: the name of the new file. A rank that has nothing to write makes none.
        state_shards: what the rank holds; several may be parts of one state.
        numbers: states that are one number, of parameters among the state shards; only the result has them.
        progress: called now and then with how many more bytes have been written.

    Returns:
        The place of each piece in the file, with the checksums.

    Raises:
        CheckpointError: the file cannot be written, or a dtype has no name in it.
    """
    jobs = [
        _WriteJob.of(state_shard, rect, pieces)
        for state_shard in state_shards
        for rect, pieces in stack(state_shard.written)
    ]
    header, offsets = encode_header([job.entry for job in jobs])
    num_bytes = max((offset + job.num_bytes for job, offset in zip(jobs, offsets, strict=True)), default=0)
    if jobs:
        in_file = sorted(zip(offsets, jobs, strict=True), key=lambda pair: pair[0])
        _write_file(folder / file, header, [job for _, job in in_file], num_bytes, progress)
    pieces_of: dict[int, list[StoredChunk]] = {}
    for job, offset in zip(jobs, offsets, strict=True):
        pieces_of.setdefault(id(job.state_shard), []).append(StoredChunk(job.rect, file, offset, tuple(job.crcs)))
    tensors = [
        _stored(state_shard, {state_shard.state: StoredState(dtype_name(state_shard.flat.dtype), tuple(pieces))})
        for state_shard in state_shards
        # A tensor without elements has no pieces, but must still be in the manifest.
        if (pieces := pieces_of.get(id(state_shard), [])) or not math.prod(state_shard.global_shape)
    ]
    tensors += _stored_numbers(state_shards, numbers)
    merged, _ = merge_parts([RankManifest("", 0, (tensor,)) for tensor in tensors])
    return RankManifest(file if jobs else "", num_bytes, merged)


def _stored(state_shard: StateShard, states: dict[str, StoredState]) -> StoredTensor:
    names = (state_shard.name, state_shard.aliases, state_shard.global_shape)
    return StoredTensor(*names, states, state_shard.kind, state_shard.trainable)


def _stored_numbers(state_shards: Sequence[StateShard], numbers: Sequence[ScalarState]) -> Iterator[StoredTensor]:
    by_name = {state_shard.name: state_shard for state_shard in state_shards}
    for number in numbers:
        is_python = number.dtype in ("int", "float")
        dtype = number.dtype if is_python else dtype_name(getattr(torch, number.dtype))
        yield _stored(by_name[number.name], {number.state: StoredState(dtype, value=number.value)})


@dataclass
class _WriteJob:
    """Describes one entry of the file: a rectangle, and the spans of the state's bytes that contain it row-major.

    `crcs` fills as blocks are written.
    """

    state_shard: StateShard
    rect: Rect
    entry: TensorHeader
    spans: tuple[Span, ...]
    crcs: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, state_shard: StateShard, rect: Rect, pieces: Sequence[Chunk]) -> _WriteJob:
        item = state_shard.flat.dtype.itemsize
        spans: list[Span] = []
        for piece in pieces:
            start, stop = piece.local_offset * item, piece.local_stop * item
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
        key = entry_key(state_shard.name, state_shard.global_shape, state_shard.state, rect)
        entry = TensorHeader(key, dtype_name(state_shard.flat.dtype), rect.shape)
        return cls(state_shard, rect, entry, tuple(spans))

    @property
    def num_bytes(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def blocks(self) -> Iterator[list[Span]]:
        """Yield the spans of each `BLOCK_BYTES` of the entry."""
        block: list[Span] = []
        free_bytes = BLOCK_BYTES
        for start, stop in self.spans:
            while stop - start >= free_bytes:
                yield [*block, (start, start + free_bytes)]
                block, start, free_bytes = [], start + free_bytes, BLOCK_BYTES
            if start < stop:
                block.append((start, stop))
                free_bytes -= stop - start
        if block:
            yield block


@dataclass(frozen=True)
class _ShardBlock:
    job: _WriteJob
    spans: list[Span]
    num_bytes: int

    @property
    def tensor(self) -> Tensor | None:
        """Return the state's tensor; None where it is stored in a file."""
        return self.job.state_shard.flat.tensor


def _batches(jobs: Sequence[_WriteJob]) -> Iterator[list[_ShardBlock]]:
    batch: list[_ShardBlock] = []
    num_bytes = 0
    for job in jobs:
        for spans in job.blocks():
            block = _ShardBlock(job, spans, sum(stop - start for start, stop in spans))
            if num_bytes + block.num_bytes > _BATCH_BYTES or len(batch) == _BATCH_BUFFERS:
                yield batch
                batch, num_bytes = [], 0
            batch.append(block)
            num_bytes += block.num_bytes
    yield batch


class _WriteBuffer:
    """Brings blocks into host memory that can be written; contiguous host memory needs no copy."""

    def __init__(self) -> None:
        self._pinned: Tensor | None = None

    def load(self, batch: Sequence[_ShardBlock]) -> list[memoryview]:
        """Return the bytes of each block; they are valid until the next call."""
        found: list[memoryview] = []
        place = 0
        for _, same_job in groupby(batch, key=lambda block: id(block.job)):
            blocks = list(same_job)
            tensor = blocks[0].tensor
            if tensor is not None and tensor.device.type != "cpu":
                for block in blocks:
                    found.append(self._pin(tensor, block, place))
                    place += block.num_bytes
                continue
            # One read for all blocks of an entry that follow one another in the state.
            memory = read_spans(blocks[0].job.state_shard, [span for block in blocks for span in block.spans])
            for block in blocks:
                found.append(memory[: block.num_bytes])
                memory = memory[block.num_bytes :]
        return found

    def _pin(self, tensor: Tensor, block: _ShardBlock, place: int) -> memoryview:
        """Copy a block from a GPU to a place in the pinned buffer, and return its bytes there."""
        if self._pinned is None:
            self._pinned = torch.empty(_BATCH_BYTES, dtype=torch.uint8, pin_memory=kind_of(tensor.device).pins)
        staged = self._pinned[place : place + block.num_bytes]
        source = tensor.detach().view(torch.uint8)
        parts = [source[start:stop] for start, stop in block.spans]
        staged.copy_(parts[0] if len(parts) == 1 else torch.cat(parts))
        return memory_of(staged)


def _loaded(jobs: Sequence[_WriteJob], helpers: ThreadPool) -> Iterator[tuple[list[_ShardBlock], list[memoryview]]]:
    """Yield the batches with their bytes, valid until the next; files are read while the batch before is written."""
    staging = _WriteBuffer()
    ahead: AsyncResult[list[memoryview]] | None = None
    for batch, following in pairwise(chain(_batches(jobs), [[]])):
        buffers = staging.load(batch) if ahead is None else ahead.get()
        is_in_files = bool(following) and all(block.tensor is None for block in following)
        ahead = helpers.apply_async(staging.load, (following,)) if is_in_files else None
        yield batch, buffers


def _write_file(
    path: Path, header: bytes, jobs: Sequence[_WriteJob], num_bytes: int, progress: Callable[[int], None]
) -> None:
    # No executor of `concurrent.futures`: it takes no work once the main thread has ended, while a save goes on.
    # These threads choose no device: they run torch's ops alone, each of which chooses that of its tensors.
    with (
        named_errors("write", path, "write-refused"),
        path.open("xb", buffering=0) as file,
        ThreadPool(2) as helpers,
    ):
        descriptor = file.fileno()
        _reserve(descriptor, num_bytes)
        end, written_back = _write(descriptor, [memoryview(header)]), 0
        for batch, buffers in _loaded(jobs, helpers):
            crcs = helpers.apply_async(lambda buffers: [zlib.crc32(buffer) for buffer in buffers], (buffers,))
            written = _write(descriptor, buffers)
            for block, crc in zip(batch, crcs.get(), strict=True):
                block.job.crcs.append(crc)
            end += written
            progress(written)
            if end - written_back >= _WRITE_BACK_BYTES:
                # On Linux this advice starts the write-back of dirty pages and does not wait for it. It is at least as
                # fast as sync_file_range, which Python lacks, and as direct I/O, which needs aligned copies.
                os.posix_fadvise(descriptor, written_back, end - written_back, os.POSIX_FADV_DONTNEED)
                written_back = end
        os.fsync(descriptor)


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Allocate the file's blocks before anything is written, so that a full disk shows at once."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some file systems cannot
            raise


def _write(descriptor: int, buffers: Sequence[memoryview]) -> int:
    """Write all of the buffers; a call may write less than it was given."""
    total = sum(map(len, buffers))
    left = list(buffers)
    while left:
        written = os.writev(descriptor, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
    return total
