"""Reads checkpoints without an engine, and checks every byte of one.

File after file is read in small buffers, so that a checkpoint of any size needs the memory of a few blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor

from shardwise.checkpoint.commit import is_of_deepspeed, read_manifest, wrong_size
from shardwise.checkpoint.manifest import (
    BLOCK_BYTES,
    ITEM_BYTES,
    MANIFEST_NAME,
    CheckpointError,
    DamagedError,
    Manifest,
    StoredChunk,
    StoredTensor,
    entry_key,
)
from shardwise.checkpoint.reader import ChunkReader
from shardwise.checkpoint.safetensors_io import FileTensor, named_dtype, read_header
from shardwise.config.errors import printable
from shardwise.layout.slicing import Chunk, Rect, flat_range_to_rects
from shardwise.runtime.state_shards import FlatSlice, FlatState, StateShard

# Elements in memory at once: whole blocks of any dtype, and so many that the cost of each call does not count.
CHUNK_NUMEL: Final = 2 * BLOCK_BYTES

# Called with how many bytes of how many are done.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Damage:
    """Describes a fault: the name of the file, and what is wrong with it, in words."""

    file: str
    what: str

    def __str__(self) -> str:
        return printable(self.what)


@dataclass(frozen=True)
class Verification:
    """Holds the result of reading all of a checkpoint.

    Attributes:
        manifest: None where it cannot be read; then no file was read.
        num_read_bytes: bytes of files that were read.
    """

    manifest: Manifest | None
    damages: tuple[Damage, ...]
    num_read_bytes: int = 0


@dataclass(frozen=True)
class NamedChunk:
    """Names a piece with its tensor and state: one entry of a safetensors file."""

    tensor: StoredTensor
    state: str
    piece: StoredChunk

    @property
    def dtype(self) -> str:
        return self.tensor.states[self.state].dtype

    @property
    def num_bytes(self) -> int:
        """Return its bytes in the file."""
        return self.piece.rect.numel * ITEM_BYTES[self.dtype]

    @property
    def stop(self) -> int:
        """Return the offset after its last byte."""
        return self.piece.offset + self.num_bytes

    @property
    def key(self) -> str:
        return entry_key(self.tensor.name, self.tensor.shape, self.state, self.piece.rect)


def entries_by_file(manifest: Manifest) -> dict[str, list[NamedChunk]]:
    """Return the entries of each file, in the order of their bytes."""
    by_file: dict[str, list[NamedChunk]] = {file: [] for file in manifest.files}
    for tensor in manifest.tensors:
        for name, state in tensor.states.items():
            for piece in state.pieces:
                by_file.setdefault(piece.file, []).append(NamedChunk(tensor, name, piece))
    for entries in by_file.values():
        entries.sort(key=lambda entry: entry.piece.offset)
    return by_file


def verify(folder: Path, progress: Progress | None = None) -> Verification:
    """Read all of a checkpoint once, in the order of its bytes, and compare it with its manifest.

    Args:
        progress: called with how many bytes of how many are done; None for no calls.

    Raises:
        CheckpointError: a newer version has written it, or DeepSpeed, whose files have no checksums.
    """
    if is_of_deepspeed(folder):
        raise CheckpointError(
            "deepspeed-no-checksums",
            f"{folder} is DeepSpeed's and has no checksums; load it, and save one of ours, which has",
        )
    try:
        manifest = read_manifest(folder, checks_files=False)
    except DamagedError as error:
        return Verification(None, (_damage(MANIFEST_NAME, error),))
    meter = ByteMeter(sum(manifest.files.values()), progress)
    damages: list[Damage] = []
    with ChunkReader(folder) as reader:
        for file, entries in entries_by_file(manifest).items():
            damages += _check_file(folder / file, manifest, entries, reader, meter)
    return Verification(manifest, tuple(damages), meter.num_done_bytes)


def _damage(file: str, error: Exception) -> Damage:
    """Return the fault that an error names, without what would help a load."""
    return Damage(file, str(error).rpartition("; ")[0])


@dataclass
class ByteMeter:
    """Counts bytes, and reports them to `progress`."""

    num_bytes: int
    progress: Progress | None
    num_done_bytes: int = 0

    def advance(self, num_bytes: int) -> None:
        self.num_done_bytes += num_bytes
        if self.progress is not None:
            self.progress(self.num_done_bytes, self.num_bytes)


def _check_file(
    path: Path, manifest: Manifest, entries: Sequence[NamedChunk], reader: ChunkReader, meter: ByteMeter
) -> Iterator[Damage]:
    try:
        wrong = wrong_size(path, manifest)
    except OSError as error:
        wrong = f"{path} cannot be read: {error.strerror}"
    if wrong:
        yield Damage(path.name, wrong)
        return
    yield from _check_header(path, entries)
    meter.advance(min((entry.piece.offset for entry in entries), default=manifest.files[path.name]))
    for entry in entries:
        for block, damage in enumerate(reader.damages(entry.tensor, entry.state, entry.piece)):
            meter.advance(min(BLOCK_BYTES, entry.num_bytes - block * BLOCK_BYTES))
            if damage is not None:
                yield _damage(path.name, damage)


def _check_header(path: Path, entries: Sequence[NamedChunk]) -> Iterator[Damage]:
    """Yield where the file's own header, which other readers of safetensors use, differs from the manifest."""
    try:
        found = {each.start: each for each in read_header(path, len(entries)) if each.start < each.stop}
    except CheckpointError as error:
        yield _damage(path.name, error)
        return
    known = {
        entry.piece.offset: FileTensor(
            entry.key, entry.dtype, entry.piece.rect.shape, entry.piece.offset, entry.stop, entry.piece.file
        )
        for entry in entries
    }
    for start in sorted(found.keys() | known.keys()):
        if found.get(start) != known.get(start):
            here, there = (
                f"{each[start].name}, {each[start].dtype} of shape {each[start].shape}" if start in each else "nothing"
                for each in (found, known)
            )
            yield Damage(path.name, f"{path}: its own header has {here}, the manifest {there}")


@dataclass(frozen=True)
class _StoredState:
    """Gives a rectangle of a stored state, row-major, to the writer as a state that is in a file."""

    reader: ChunkReader
    stored: StoredTensor
    state: str
    rect: Rect

    tensor: ClassVar[None] = None

    @property
    def numel(self) -> int:
        return self.rect.numel

    @property
    def dtype(self) -> torch.dtype:
        return named_dtype(self.stored.states[self.state].dtype)

    def read(self, start: int, stop: int) -> Tensor:
        target = torch.empty(stop - start, dtype=self.dtype)
        self.reader.read(self.stored, self.state, flat_range_to_rects(self.rect, start, stop), target)
        return target

    def write(self, start: int, values: Tensor) -> None:
        raise NotImplementedError("a committed checkpoint is read only; write a new one")

    def part(self, start: int, stop: int) -> FlatState:
        return FlatSlice(self, start, stop)


def stored_shards(part: Sequence[tuple[StoredTensor, Rect]], reader: ChunkReader) -> list[StateShard]:
    """Return the states of some rectangles of stored tensors as what one rank writes; they are read when written."""
    shards = []
    for stored, rect in part:
        names, whole = (stored.name, stored.aliases), (Chunk(rect, 0),)
        for state in (name for name, each in stored.states.items() if each.value is None):
            flat = _StoredState(reader, stored, state, rect)
            shards.append(StateShard(*names, state, stored.shape, flat, whole, whole, stored.kind, stored.trainable))
    return shards


def read_chunks(reader: ChunkReader, tensor: StoredTensor, state: str, rect: Rect) -> Iterator[Tensor]:
    """Yield the elements of a rectangle, row-major, as 1-D tensors of `CHUNK_NUMEL` elements; the last may be shorter.

    Args:
        rect: the rectangle of the whole tensor.
    """
    flat = _StoredState(reader, tensor, state, rect)
    for start in range(0, rect.numel, CHUNK_NUMEL):
        yield flat.read(start, min(start + CHUNK_NUMEL, rect.numel))
