"""The ends of a parameter's part that are cut where no vector ends, stepped with the bits of the whole.

Torch's kernels round an element by whether it lies in a vector or in the rest behind the last one. A chunk ends where
the file's blocks do, in the middle of a parameter's vectors. The few elements at such an end are stepped in a frame: a
copy in which they lie as in the whole parameter, with zeros where their neighbours are.

>>> import torch
>>> whole = torch.arange(200.0)
>>> piece = StepPiece({}, whole[100:200], whole[100:200], {}, 0, False, None)
>>> direct, frames = framed(piece, 100, is_end=True)
>>> [(each.master[0].item(), each.master.numel()) for each in direct]
[(128.0, 72)]
>>> [(each.framed.master.numel(), each.offset) for each in frames]    # elements 100 to 128 behind 36 others
[(64, 36)]
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardwise.tiers.blocks import CUT_NUMEL, StepPiece


@dataclass(frozen=True)
class Frame:
    """A few elements among zeros.

    Attributes:
        piece: the elements where they rest.
        framed: the copy that is stepped.
        offset: of the elements in the copy.
    """

    piece: StepPiece
    framed: StepPiece
    offset: int

    @classmethod
    def around(cls, piece: StepPiece, offset: int, numel: int) -> Frame:
        """A copy of `numel` elements that has those of `piece` at `offset`."""

        def put(values: Tensor) -> Tensor:
            copy = values.new_zeros(numel)
            copy[offset : offset + values.numel()] = values
            return copy

        states = {name: put(state) for name, state in piece.states.items()}
        copy = StepPiece(
            piece.options, put(piece.master), put(piece.grad), states, piece.step, piece.is_first, param=None
        )
        return cls(piece, copy, offset)

    def put_back(self) -> None:
        """Take the elements over, once the copy is stepped."""
        own = slice(self.offset, self.offset + self.piece.master.numel())
        self.piece.master.copy_(self.framed.master[own])
        for name, state in self.piece.states.items():
            state.copy_(self.framed.states[name][own])
        if self.piece.param is not None:
            self.piece.param.copy_(self.piece.master)


def framed(piece: StepPiece, position: int, is_end: bool) -> tuple[list[StepPiece], list[Frame]]:
    """What of a part can be stepped where it is, and frames for the rest.

    Args:
        piece: a part of a parameter.
        position: of its first element in the parameter.
        is_end: whether it ends where the parameter does.
    """
    numel = piece.master.numel()
    before = position % CUT_NUMEL
    head = min(numel, -position % CUT_NUMEL)
    tail = numel if is_end else max(head, numel - (position + numel) % CUT_NUMEL)
    frames = []
    if head:
        ends_in_head = is_end and head == numel
        frames.append(Frame.around(piece.part(0, head), before, before + head if ends_in_head else CUT_NUMEL))
    if tail < numel:
        frames.append(Frame.around(piece.part(tail, numel), 0, CUT_NUMEL))
    direct = [piece.part(head, tail)] if head < tail else []
    return direct, frames
