"""What a rank holds of the states that a checkpoint keeps, and which part of it this rank is the one to write.

The engine lists its holdings; a checkpoint writes from them and reads into them, and knows nothing else of an engine.

A weight of 3 x 4 under ZeRO-3 over two ranks: rank 1 holds, and writes, its last 4 elements.

>>> import torch
>>> from shardwise.flats import MemoryFlat
>>> from shardwise.layout.pieces import Piece, Rect
>>> pieces = (Piece(Rect((2, 0), (3, 4)), 0),)
>>> held = Holding("weight", (), "param", (3, 4), MemoryFlat(torch.zeros(4)), pieces, written=pieces)
>>> held.num_written_bytes
16
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from shardwise.layout.pieces import Piece

if TYPE_CHECKING:
    # Whoever reads a manifest needs no torch.
    from shardwise.flats import Flat

# The state that every parameter has: its values, in the most precise dtype that the rank keeps them in.
PARAM: Final = "param"

Kind = Literal["parameter", "buffer", "rank"]


@dataclass(frozen=True)
class Holding:
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
    flat: Flat
    pieces: tuple[Piece, ...]
    written: tuple[Piece, ...]
    kind: Kind = "parameter"
    trainable: bool = True

    @property
    def num_written_bytes(self) -> int:
        """Bytes that this rank writes of it."""
        return sum(piece.rect.numel for piece in self.written) * self.flat.dtype.itemsize


@dataclass(frozen=True)
class HeldNumber:
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
