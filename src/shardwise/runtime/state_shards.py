"""What a rank holds of the states that a checkpoint keeps, and which part of it this rank is the one to write.

The engine lists its holdings; a checkpoint writes from them and reads into them, and knows nothing else of an engine.

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
    """One state of one parameter or buffer on this rank.

    Attributes:
        name: the first of its fully qualified names, as the unmodified model has it.
        aliases: the others, where it is tied.
        state: `param`, or the optimizer's name of it, such as `exp_avg`.
        global_shape: of the whole tensor.
        flat: the state where it rests, on any device, in the memory of the host or in a file; a load writes into it.
        pieces: rectangles of the whole tensor in `flat`; what no piece covers is padding.
        written: the pieces that this rank writes in a save. Over all ranks they cover the whole tensor once.
        kind: a parameter; a buffer of the model; or what is this rank's alone, such as the state of its generators.
        trainable: whether the parameter has gradients.
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
        """Bytes that this rank writes of it."""
        return sum(piece.rect.numel for piece in self.written) * self.flat.dtype.itemsize


@dataclass(frozen=True)
class ScalarState:
    """A state of a parameter that is one number, such as Adam's `step`, the same on every rank that holds it.

    Attributes:
        name: of the parameter.
        state: the optimizer's name of it.
        value: of it.
        dtype: of its 0-d tensor, such as `float32`; `int` or `float` of a Python number.
    """

    name: str
    state: str
    value: float
    dtype: str


class FlatState(Protocol):
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

    def part(self, start: int, stop: int) -> FlatState:
        """The elements [start, stop) as a flat state of their own, without a copy."""


class TensorFlatState:
    """A 1-D tensor as a `FlatState`."""

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

    def part(self, start: int, stop: int) -> FlatState:
        """The elements [start, stop), over the same memory."""
        return TensorFlatState(self.tensor[start:stop])


@dataclass(frozen=True)
class FlatSlice:
    """The elements [start, stop) of a `FlatState`, for those that cannot be sliced in memory."""

    whole: FlatState
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

    def part(self, start: int, stop: int) -> FlatState:
        """The elements [start, stop) of the part."""
        return FlatSlice(self.whole, self.start + start, self.start + stop)


def is_flat(value: object) -> TypeGuard[FlatState]:
    """Whether a state is flat: neither a number nor a plain tensor."""
    return isinstance(value, TensorFlatState | FlatSlice)
