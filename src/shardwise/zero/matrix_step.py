"""Step matrices whole under sharding: momentum stays with the pieces, and one owner orthogonalizes each matrix.

In each round every rank advances the momentum of its pieces, sends what follows from it to the matrices' owners, and
gets back the part of each update that belongs to its piece. All that ranks do to pieces is element by element, and a
matrix is put together from the same numbers in every layout, so the layout does not change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.comm.collectives import Comm
from shardwise.comm.mesh import CommGroups
from shardwise.layout.matrices import OwnedMatrix, assign_owners, held_ranges, matrices_of, rounds_of
from shardwise.layout.slicing import Chunk, Rect, intersect
from shardwise.runtime.muon import advance_momentum, apply_update, compute_dtype, orthogonalize, update_scale
from shardwise.runtime.state_shards import FlatState
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.stored_state import ParamPiece

Options = Mapping[str, Any]

# Elements of the matrices that one rank steps in a round: it holds them, and their updates, at the same time.
ROUND_NUMEL: Final = 2**26


@dataclass(frozen=True)
class HeldPart:
    """Describe what one rank has of a matrix: the elements [start, stop) of its local tensor.

    Attributes:
        rank: in the group of the ranks that share matrices.
        tp_index: in its tensor-parallel group.
        start: the first element.
        stop: the element after the last.
        is_sent: whether it sends them to the owner, which else has them, or gets them from others.
    """

    rank: int
    tp_index: int
    start: int
    stop: int
    is_sent: bool


@dataclass(frozen=True)
class MatrixPieces:
    """Bundles what a step does to this rank's pieces.

    Attributes:
        gradient_of: returns the final gradient of a piece, on the device, which may be overwritten.
        momentum_of: returns where the momentum of a piece is stored.
        options_of: returns the options of a piece; None for a piece that is not stepped.
    """

    gradient_of: Callable[[ParamPiece], Tensor]
    momentum_of: Callable[[ParamPiece], FlatState]
    options_of: Callable[[ParamPiece], Options | None]


class MatrixStep:
    """Steps the groups of matrices of one rank.

    Args:
        groups: all of the engine's groups with gradients, the same on each rank that shares them.
        pieces: what this rank holds of the parameters.
        comms: the engine's groups of ranks.
    """

    def __init__(self, groups: Sequence[ParamGroup], pieces: Sequence[ParamPiece], comms: CommGroups) -> None:
        assert comms.matrices is not None, "an optimizer of matrices has a group of ranks for them"
        self._comm: Comm = comms.matrices
        self._tp, self._tp_index = comms.tensor.world_size, comms.tensor.rank
        self._groups = groups
        self._pieces = {piece.name: piece for piece in pieces if piece.group.spec.is_matrix}
        owned = assign_owners([group.spec for group in groups], self._tp)
        self._rounds = rounds_of(owned, ROUND_NUMEL)

    def step(self, used: Mapping[str, bool], parts: MatrixPieces) -> None:
        """Take one step. All ranks that share matrices call it.

        Args:
            used: whether each parameter, by name, got a gradient on some rank; the others stay.
            parts: what is done to this rank's pieces.
        """
        for each in self._rounds:
            if matrices := [matrix for matrix in each if used[matrix.place.name]]:
                self._step_round(matrices, parts)

    def _step_round(self, matrices: Sequence[OwnedMatrix], parts: MatrixPieces) -> None:
        dtype = {matrix.place.name: self._wire_dtype(matrix) for matrix in matrices}
        ahead = {
            matrix.place.name: self._advance(piece, parts).to(dtype[matrix.place.name])
            for matrix in matrices
            if (piece := self._pieces.get(matrix.place.name)) is not None
        }
        mine = [matrix for matrix in matrices if matrix.owner == self._comm.rank]
        received = self._bring(matrices, ahead, dtype)
        updates = {}
        for matrix in mine:
            whole = self._assemble(matrix, received.pop(matrix.place.name), dtype[matrix.place.name])
            updates[matrix.place.name] = _orthogonalized(matrix, whole)
        del received, ahead
        scales = {matrix.place.name: _scale_of(matrix) for matrix in matrices}
        for name, update in self._return(matrices, updates, dtype):
            piece = self._pieces[name]
            if (options := parts.options_of(piece)) is not None:
                _apply(piece, update, scales[name], options)

    def _wire_dtype(self, matrix: OwnedMatrix) -> torch.dtype:
        return compute_dtype(self._groups[matrix.group].master.dtype, self._comm.device)

    def _advance(self, piece: ParamPiece, parts: MatrixPieces) -> Tensor:
        options, gradient, stored = parts.options_of(piece), parts.gradient_of(piece), parts.momentum_of(piece)
        if options is None:
            return gradient
        kept = stored.read(0, stored.numel)
        momentum = kept.to(gradient.device, gradient.dtype)
        ahead = advance_momentum(momentum, gradient, options["momentum"])
        if momentum is not kept or stored.tensor is None:
            stored.write(0, momentum)
        return ahead

    def _parts(self, matrix: OwnedMatrix) -> Iterator[HeldPart]:
        """Yield what each rank has of a matrix, in the order of ranks."""
        group, place = self._groups[matrix.group], matrix.place
        is_whole = group.shard_stop - group.shard_start == group.spec.padded_numel
        owner_shard, owner_tp = divmod(matrix.owner, self._tp)
        for shard, (start, stop) in held_ranges(group.spec, place, is_whole).items():
            for tp_index in range(self._tp):
                is_copy = (is_whole and shard != owner_shard) or (place.split.is_whole and tp_index != owner_tp)
                yield HeldPart(shard * self._tp + tp_index, tp_index, start, stop, not is_copy)

    def _bring(
        self, matrices: Sequence[OwnedMatrix], ahead: Mapping[str, Tensor], dtype: Mapping[str, torch.dtype]
    ) -> dict[str, list[tuple[HeldPart, Tensor]]]:
        """Send this rank's parts to the owners; return the parts of the matrices that it owns."""
        sends: dict[int, list[Tensor]] = {}
        receives: dict[int, list[Tensor]] = {}
        found: dict[str, list[tuple[HeldPart, Tensor]]] = {}
        for matrix in matrices:
            name, is_mine = matrix.place.name, matrix.owner == self._comm.rank
            for part in self._parts(matrix) if is_mine or name in ahead else ():
                if not part.is_sent:
                    continue
                if is_mine:
                    values = ahead.get(name) if part.rank == self._comm.rank else None
                    if values is None:
                        values = torch.empty(part.stop - part.start, dtype=dtype[name], device=self._comm.device)
                        receives.setdefault(part.rank, []).append(values)
                    found.setdefault(name, []).append((part, values))
                elif part.rank == self._comm.rank:
                    sends.setdefault(matrix.owner, []).append(ahead[name])
        self._comm.exchange(sends, receives, "momentum of matrices").wait()
        return found

    def _return(
        self, matrices: Sequence[OwnedMatrix], updates: Mapping[str, Tensor], dtype: Mapping[str, torch.dtype]
    ) -> list[tuple[str, Tensor]]:
        """Send each rank its part of the updates of the matrices that this one owns; return this rank's parts."""
        sends: dict[int, list[Tensor]] = {}
        receives: dict[int, list[Tensor]] = {}
        own: list[tuple[str, Tensor]] = []
        for matrix in matrices:
            name, is_mine = matrix.place.name, matrix.owner == self._comm.rank
            for part in self._parts(matrix) if is_mine or name in self._pieces else ():
                if part.rank == self._comm.rank:
                    if is_mine:
                        own.append((name, self._cut(matrix, updates[name], part)))
                        continue
                    values = torch.empty(part.stop - part.start, dtype=dtype[name], device=self._comm.device)
                    receives.setdefault(matrix.owner, []).append(values)
                    own.append((name, values))
                elif is_mine:
                    sends.setdefault(part.rank, []).append(self._cut(matrix, updates[name], part))
        self._comm.exchange(sends, receives, "updates of matrices").wait()
        return own

    def _assemble(self, matrix: OwnedMatrix, received: Sequence[tuple[HeldPart, Tensor]], dtype: torch.dtype) -> Tensor:
        whole = torch.zeros(matrix.place.global_shape, dtype=dtype, device=self._comm.device)
        for part, values in received:
            for chunk in _chunks(matrix, part, owned_only=not matrix.place.split.is_whole):
                _view(whole, chunk).copy_(_flat(values, chunk))
        return whole

    def _cut(self, matrix: OwnedMatrix, update: Tensor, part: HeldPart) -> Tensor:
        """Return the part of an update that a rank has, 1-D as it has it; zero where that is padding."""
        if matrix.place.split.is_whole:
            return update.view(-1)[part.start : part.stop]
        values = update.new_zeros(part.stop - part.start)
        for chunk in _chunks(matrix, part, owned_only=False):
            _flat(values, chunk).copy_(_view(update, chunk))
        return values


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


def _apply(piece: ParamPiece, update: Tensor, scale: float, options: Options) -> None:
    """Write a piece's update into the master, which may be stored off the device."""
    master = piece.group.master
    values = master.read(piece.start, piece.stop)
    apply_update(values, update.to(values.device), scale, options)
    if master.tensor is None:
        master.write(piece.start, values)


def _chunks(matrix: OwnedMatrix, part: HeldPart, *, owned_only: bool) -> tuple[Chunk, ...]:
    return intersect(matrix.place.split.local(part.tp_index, owned_only=owned_only), part.start, part.stop)


def _flat(values: Tensor, chunk: Chunk) -> Tensor:
    return values[chunk.local_offset : chunk.local_stop].view(chunk.rect.shape)


def _view(whole: Tensor, chunk: Chunk) -> Tensor:
    return whole[chunk.rect.slices_in(Rect.whole(tuple(whole.shape)))]
