"""Step matrices whole under sharding: momentum stays with the pieces, and one owner orthogonalizes each matrix.

In each round every rank advances the momentum of its pieces, sends what follows from it to the matrices' owners, and
gets back the part of each update that belongs to its piece. All that ranks do to pieces is element by element, and a
matrix is put together from the same numbers in every layout, so the layout does not change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from shardwise.comm.mesh import CommGroups
from shardwise.layout.matrices import OwnedMatrix, assign_owners, matrices_of, rounds_of
from shardwise.layout.slicing import Rect
from shardwise.optim.elementwise import in_lists
from shardwise.optim.muon import (
    advance_momenta,
    apply_updates,
    compute_dtype,
    orthogonalize,
    update_scale,
)
from shardwise.optim.rules import MOMENTUM
from shardwise.zero.group_step import GroupStep, HostUpdate, OptimizerUpdate, Options, OptionsOf, StateKeeper
from shardwise.zero.owner_exchange import OwnerExchange
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.stored_state import ParamPiece

# Elements of the matrices that one rank steps in a round: it holds them, and their updates, at the same time.
ROUND_NUMEL: Final = 2**26


class MatrixStep(GroupStep):
    """Steps the groups of matrices of one rank.

    Args:
        groups: with gradients, all on one mesh, the same on each rank that shares them.
        pieces: what this rank holds of the parameters.
        keepers: what keeps the momentum of each group of matrices.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        pieces: Sequence[ParamPiece],
        keepers: Mapping[ParamGroup, StateKeeper],
        comms: CommGroups,
    ) -> None:
        assert comms.matrices is not None, "an optimizer of matrices has a group of ranks for them"
        self._comm = comms.matrices
        self._groups = groups
        self._keepers = keepers
        self._piece_of = {piece.name: piece for piece in pieces if piece.group in keepers}
        self._exchange = OwnerExchange(groups, self._piece_of, self._comm)
        owned = assign_owners([group.spec for group in groups])
        self._rounds = rounds_of(owned, ROUND_NUMEL)

    def step(self, update: OptimizerUpdate) -> list[HostUpdate]:
        # What is stored off the device is brought there, and written back.
        mean_of = update.means()
        # [Note: All ranks take all rounds]
        # A round is two exchanges of all ranks, those too that own and hold nothing of it. Its matrices follow from the
        # specs, and from `used`, on which the ranks have agreed: so none leaves out a round that another takes.
        for owned in self._rounds:
            if matrices := [matrix for matrix in owned if update.used[matrix.place.name]]:
                self._step_round(matrices, mean_of, update.options_of)
        for group in self._keepers:  # of which no parameter was used
            update.gradients.pop(group, None)
        return []

    def show(self, update: OptimizerUpdate) -> None:
        update.hooks.refuse()

    def _step_round(
        self, matrices: Sequence[OwnedMatrix], mean_of: Callable[[ParamPiece], Tensor], options_of: OptionsOf
    ) -> None:
        dtype = {matrix.place.name: self._wire_dtype(matrix) for matrix in matrices}
        pieces = [piece for matrix in matrices if (piece := self._piece_of.get(matrix.place.name)) is not None]
        options = {piece.name: options_of(piece) for piece in pieces}
        ahead = {piece.name: mean_of(piece).to(dtype[piece.name]) for piece in pieces if options[piece.name] is None}
        gradients = ((mean_of(piece), piece, chosen) for piece in pieces if (chosen := options[piece.name]) is not None)
        for rows in in_lists(gradients):
            for (_, piece, _), values in zip(rows, self._advance(rows), strict=True):
                ahead[piece.name] = values.to(dtype[piece.name])
        of_name = {matrix.place.name: matrix for matrix in matrices}
        brought = self._exchange.bring(matrices, ahead, dtype, "momentum of matrices")
        updates = {name: _orthogonalized(of_name[name], whole) for name, whole in brought}
        del brought, ahead
        scales = {matrix.place.name: _scale_of(matrix) for matrix in matrices}
        received = self._exchange.give_back(matrices, updates, dtype, "updates of matrices")
        for parts in in_lists(
            (update, self._piece_of[name], scales[name], chosen)
            for name, update in received
            if (chosen := options[name]) is not None
        ):
            _apply(parts)

    def _wire_dtype(self, matrix: OwnedMatrix) -> torch.dtype:
        return compute_dtype(self._groups[matrix.group].master.dtype, self._comm.device)

    def _advance(self, rows: Sequence[tuple[Tensor, ParamPiece, Options]]) -> Sequence[Tensor]:
        """Write the momenta of pieces by their gradients; return what follows from both."""
        gradients, pieces, options = zip(*rows, strict=True)
        stored = [self._keepers[piece.group].flat_state(piece, MOMENTUM) for piece in pieces]
        before = [state.read(0, state.numel) for state in stored]
        momenta = [values.to(like.device, like.dtype) for values, like in zip(before, gradients, strict=True)]
        aheads = advance_momenta(momenta, list(gradients), [chosen["momentum"] for chosen in options])
        for state, values, momentum in zip(stored, before, momenta, strict=True):
            if momentum is not values or state.tensor is None:
                state.write(0, momentum)
        return aheads


def _orthogonalized(matrix: OwnedMatrix, whole: Tensor) -> Tensor:
    """Return a parameter's update before `_scale_of`: each matrix that it is made of is orthogonalized by itself."""
    rects = matrices_of(matrix.place)
    if len(rects) == 1:
        return orthogonalize(whole).contiguous()
    update, scale = torch.empty_like(whole), _scale_of(matrix)
    for rect in rects:
        where = rect.slices_in(Rect.whole(matrix.place.global_shape))
        update[where] = orthogonalize(whole[where]) * (update_scale(rect.shape) / scale)
    return update


def _scale_of(matrix: OwnedMatrix) -> float:
    """Return the scale of a parameter's update; what is sent has no scale, since a narrow dtype would round that."""
    return max(update_scale(rect.shape) for rect in matrices_of(matrix.place))


def _apply(rows: Sequence[tuple[Tensor, ParamPiece, float, Options]]) -> None:
    """Write updates of pieces, each with its scale, into the masters, which may be stored off the device."""
    masters = [piece.group.master.read(piece.start, piece.stop) for _, piece, *_ in rows]
    pairs = zip(masters, rows, strict=True)
    apply_updates((values, update.to(values.device), scale, options) for values, (update, _, scale, options) in pairs)
    for values, (_, piece, *_) in zip(masters, rows, strict=True):
        if piece.group.master.tensor is None:
            piece.group.master.write(piece.start, values)
