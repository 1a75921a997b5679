"""A state shard is what a rank holds of a state that a checkpoint keeps, and says which part of it this rank writes.

The engine lists its state shards; a checkpoint writes from them and reads into them, and knows nothing else of an
engine.

A weight of 3 x 4 under ZeRO-3 over two ranks: rank 1 holds, and writes, its last 4 elements.

>>> import torch
>>> from shardwise.runtime.state_shards import TensorFlatState
>>> from shardwise.layout.slicing import Chunk, Rect
>>> pieces = (Chunk(Rect((2, 0), (3, 4)), 0),)
>>> held = StateShard("weight", (), "param", (3, 4), TensorFlatState(torch.zeros(4)), pieces, written=pieces)
>>> held.num_written_bytes
16
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeGuard

from shardwise.layout.slicing import Chunk

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# The state that every parameter has: its values, in the most precise dtype that the rank keeps them in.
PARAM: Final = "param"

Kind = Literal["parameter", "buffer", "rank"]


@dataclass(frozen=True)
class StateShard:
    """Describes one state of one parameter or buffer on this rank.

    Attributes:
        name: the first of its fully qualified names, as the unmodified model has it.
        aliases: the others, where it is tied.
        state: `param`, or the optimizer's name of it, such as `exp_avg`.
        flat: the state where it is stored: on any device, in host memory or in a file; a load writes into it.
        pieces: rectangles of the whole tensor in `flat`; what no piece covers is padding.
        written: the pieces that this rank writes in a save. Over all ranks they cover the whole tensor once.
        kind: a parameter; a buffer of the model; or a state of this rank alone, such as that of its generators.
    """

    name: str
    aliases: tuple[str, ...]
    state: str
    global_shape: tuple[int, ...]
    flat: FlatState
    pieces: tuple[Chunk, ...]
    written: tuple[Chunk, ...]
    kind: Kind = "parameter"
    trainable: bool = True

    @property
    def num_written_bytes(self) -> int:
        """Return the bytes that this rank writes of it."""
        return sum(piece.rect.numel for piece in self.written) * self.flat.dtype.itemsize


@dataclass(frozen=True)
class ScalarState:
    """Holds a state of a parameter that is one number, such as Adam's `step`, the same on every rank that holds it.

    Attributes:
        dtype: of its 0-d tensor, such as `float32`; `int` or `float` for a Python number.
    """

    name: str
    state: str
    value: float
    dtype: str


class FlatState(Protocol):
    """A flat state is 1-D, and parts of it are read and written."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the elements."""

    @property
    def tensor(self) -> Tensor | None:
        """Return all of it, if it is stored on the device or in host memory; None for a file's."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop), 1-D: a view if they are in memory, a copy in host memory of a file's."""

    def write(self, start: int, values: Tensor) -> None:
        """Replace the elements from `start` on by `values`, 1-D, on any device and of any dtype."""

    def part(self, start: int, stop: int) -> FlatState:
        """Return the elements [start, stop) as a flat state of their own, without a copy."""


class TensorFlatState:
    """Makes a 1-D tensor a `FlatState`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.tensor.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the elements."""
        return self.tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop), a view."""
        return self.tensor[start:stop]

    def write(self, start: int, values: Tensor) -> None:
        """Replace the elements from `start` on."""
        self.tensor[start : start + values.numel()].copy_(values)

    def part(self, start: int, stop: int) -> FlatState:
        """Return the elements [start, stop), over the same memory."""
        return TensorFlatState(self.tensor[start:stop])


@dataclass(frozen=True)
class FlatSlice:
    """Is the elements [start, stop) of a `FlatState`, for states that cannot be sliced in memory."""

    whole: FlatState
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def tensor(self) -> Tensor | None:
        whole = self.whole.tensor
        return None if whole is None else whole[self.start : self.stop]

    def read(self, start: int, stop: int) -> Tensor:
        return self.whole.read(self.start + start, self.start + stop)

    def write(self, start: int, values: Tensor) -> None:
        self.whole.write(self.start + start, values)

    def part(self, start: int, stop: int) -> FlatState:
        return FlatSlice(self.whole, self.start + start, self.start + stop)


def is_flat(value: object) -> TypeGuard[FlatState]:
    """Say whether a state is flat: neither a number nor a plain tensor."""
    return isinstance(value, TensorFlatState | FlatSlice)
