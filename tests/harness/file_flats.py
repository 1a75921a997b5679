"""A flat state in a plain file that keeps a book of what is read of it and written to it, and of how much is out."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardwise.runtime.state_shards import FlatSlice, FlatState


@dataclass
class Book:
    """Bytes of each read and write, in order; and those that were read and are not given back, now and at most."""

    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    out: int = 0
    peak: int = 0

    def lend(self, values: np.ndarray) -> None:
        self.reads.append(values.nbytes)
        self.out += values.nbytes
        self.peak = max(self.peak, self.out)
        weakref.finalize(values, self.take_back, values.nbytes).atexit = False

    def take_back(self, num_bytes: int) -> None:
        self.out -= num_bytes


@dataclass(frozen=True)
class FileFlat:
    """All of a file, as elements of a dtype."""

    path: Path
    dtype: torch.dtype
    book: Book
    tensor: None = None

    @property
    def numel(self) -> int:
        return self.path.stat().st_size // self.dtype.itemsize

    def read(self, start: int, stop: int) -> Tensor:
        assert 0 <= start < stop <= self.numel
        item_bytes = self.dtype.itemsize
        values = np.fromfile(self.path, np.uint8, (stop - start) * item_bytes, offset=start * item_bytes)
        self.book.lend(values)
        return torch.from_numpy(values).view(self.dtype)

    def write(self, start: int, values: Tensor) -> None:
        assert 0 <= start <= start + values.numel() <= self.numel
        raw = values.detach().to(self.dtype).contiguous().view(torch.uint8).numpy().tobytes()
        self.book.writes.append(len(raw))
        with self.path.open("r+b") as file:
            file.seek(start * self.dtype.itemsize)
            file.write(raw)

    def part(self, start: int, stop: int) -> FlatState:
        return FlatSlice(self, start, stop)

    def whole(self) -> Tensor:
        """All of it, not in the book."""
        values = torch.empty(self.numel, dtype=self.dtype)
        values.view(torch.uint8).copy_(torch.from_numpy(np.fromfile(self.path, np.uint8)))
        return values


def make_files(folder: Path) -> Callable[[Tensor], FileFlat]:
    """A function that puts a tensor into a new file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)

    def put(values: Tensor) -> FileFlat:
        path = folder / f"{len(list(folder.iterdir())):04d}.swap"
        path.write_bytes(values.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        return FileFlat(path, values.dtype, Book())

    return put
