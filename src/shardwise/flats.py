"""A flat state wherever it rests: in memory, or in a file.

Checkpoints, reads and writes by name go through `Flat`, so that they need not know of tiers.

>>> import torch
>>> flat = MemoryFlat(torch.arange(6.0))
>>> part = flat.part(2, 5)
>>> part.write(1, torch.tensor([30, 40]))
>>> part.numel, flat.read(0, 6).tolist()
(3, [0.0, 1.0, 2.0, 30.0, 40.0, 5.0])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Flat(Protocol):
    """A 1-D state of which parts are read and written."""

    @property
    def numel(self) -> int:
        """Elements."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""

    @property
    def tensor(self) -> Tensor | None:
        """All of it, where it lies in the memory of the device or of the host; None for a file's."""

    def read(self, start: int, stop: int) -> Tensor:
        """The elements [start, stop), 1-D: a view where they lie in memory, a copy in host memory of a file's."""

    def write(self, start: int, values: Tensor) -> None:
        """Replace the elements from `start` on by `values`, 1-D, on any device and of any dtype."""

    def part(self, start: int, stop: int) -> Flat:
        """The elements [start, stop) as a flat state of their own, without a copy."""


class MemoryFlat:
    """A 1-D tensor as a `Flat`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def numel(self) -> int:
        """Elements."""
        return self.tensor.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """The elements [start, stop), a view."""
        return self.tensor[start:stop]

    def write(self, start: int, values: Tensor) -> None:
        """Replace the elements from `start` on."""
        self.tensor[start : start + values.numel()].copy_(values)

    def part(self, start: int, stop: int) -> Flat:
        """The elements [start, stop), over the same memory."""
        return MemoryFlat(self.tensor[start:stop])


@dataclass(frozen=True)
class FlatPart:
    """The elements [start, stop) of a `Flat`, for those that cannot be sliced in memory."""

    whole: Flat
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.whole.dtype

    @property
    def tensor(self) -> Tensor | None:
        """The part in memory, if the whole lies there."""
        whole = self.whole.tensor
        return None if whole is None else whole[self.start : self.stop]

    def read(self, start: int, stop: int) -> Tensor:
        """The elements [start, stop) of the part."""
        return self.whole.read(self.start + start, self.start + stop)

    def write(self, start: int, values: Tensor) -> None:
        """Replace the elements from `start` of the part on."""
        self.whole.write(self.start + start, values)

    def part(self, start: int, stop: int) -> Flat:
        """The elements [start, stop) of the part."""
        return FlatPart(self.whole, self.start + start, self.start + stop)


def is_flat(value: object) -> TypeGuard[Flat]:
    """Whether a state is flat: neither a number nor a plain tensor."""
    return isinstance(value, MemoryFlat | FlatPart)
