"""Bring the parts of whole tensors to the ranks that own them, and the parts of what these make of them back.

A tensor is put together from the same numbers in every layout. Where each rank has all of a tensor, its owner has it
too, and nothing is sent to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.collectives import Comm
from shardwise.layout.matrices import OwnedMatrix, held_ranges
from shardwise.layout.slicing import Chunk, Rect, intersect
from shardwise.zero.param_group import ParamGroup


@dataclass(frozen=True)
class HeldPart:
    """Describe what one rank has of a tensor: the elements [start, stop) of its local tensor.

    Attributes:
        rank: in the group of the ranks that share tensors.
        is_sent: whether it sends them to the owner, which else has them, or gets them from others.
    """

    rank: int
    tp_index: int
    start: int
    stop: int
    is_sent: bool


class OwnerExchange:
    """Sends parts of tensors to their owners and back.

    Args:
        groups: all of the engine's groups with gradients, the same on each rank that shares them.
        held: the names of the parameters of which this rank holds a piece.
        comm: the ranks that share tensors: along the axes of shards and, fastest, of those with other parts.
    """

    def __init__(self, groups: Sequence[ParamGroup], held: Collection[str], comm: Comm) -> None:
        self._groups = groups
        self._held = frozenset(held)
        self._comm = comm

    def _parts(self, matrix: OwnedMatrix) -> Iterator[HeldPart]:
        """Yield what each rank has of a tensor, in the order of ranks."""
        group, place = self._groups[matrix.group], matrix.place
        is_whole = group.shard_stop - group.shard_start == group.spec.padded_numel
        owner_shard, owner_tp = divmod(matrix.owner, matrix.num_parts)
        for shard, (start, stop) in held_ranges(group.spec, place, is_whole).items():
            for tp_index in range(matrix.num_parts):
                is_copy = (is_whole and shard != owner_shard) or (place.split.is_whole and tp_index != owner_tp)
                yield HeldPart(shard * matrix.num_parts + tp_index, tp_index, start, stop, not is_copy)

    def bring(
        self, matrices: Sequence[OwnedMatrix], own: Mapping[str, Tensor], dtype: Mapping[str, torch.dtype], what: str
    ) -> Iterator[tuple[str, Tensor]]:
        """Send this rank's parts to the owners; yield the whole tensors that it owns, each with its name.

        Args:
            matrices: the tensors, in one order on all ranks.
            own: this rank's parts, 1-D, by name.
        """
        sends: dict[int, list[Tensor]] = {}
        receives: dict[int, list[Tensor]] = {}
        parts_of: dict[str, list[tuple[HeldPart, Tensor]]] = {}
        for matrix in matrices:
            name, is_mine = matrix.place.name, matrix.owner == self._comm.rank
            for part in self._parts(matrix) if is_mine or name in own else ():
                if not part.is_sent:
                    continue
                if is_mine:
                    values = own.get(name) if part.rank == self._comm.rank else None
                    if values is None:
                        values = torch.empty(part.stop - part.start, dtype=dtype[name], device=self._comm.device)
                        receives.setdefault(part.rank, []).append(values)
                    parts_of.setdefault(name, []).append((part, values))
                elif part.rank == self._comm.rank:
                    sends.setdefault(matrix.owner, []).append(own[name])
        # Parts have no names on the wire: each end lists those of the other in the order of `matrices`.
        self._comm.exchange(sends, receives, what).wait()
        for matrix in matrices:
            if matrix.owner == self._comm.rank:
                yield matrix.place.name, self._assemble(matrix, parts_of.pop(matrix.place.name), dtype)

    def give_back(
        self, matrices: Sequence[OwnedMatrix], made: Mapping[str, Tensor], dtype: Mapping[str, torch.dtype], what: str
    ) -> list[tuple[str, Tensor]]:
        """Send each rank its part of what this one has made of its tensors; return this rank's parts, 1-D.

        Args:
            made: whole tensors by name, of those that this rank owns.
        """
        sends: dict[int, list[Tensor]] = {}
        receives: dict[int, list[Tensor]] = {}
        own: list[tuple[str, Tensor]] = []
        for matrix in matrices:
            name, is_mine = matrix.place.name, matrix.owner == self._comm.rank
            for part in self._parts(matrix) if is_mine or name in self._held else ():
                if part.rank == self._comm.rank:
                    if is_mine:
                        own.append((name, self._cut(matrix, made[name], part)))
                        continue
                    values = torch.empty(part.stop - part.start, dtype=dtype[name], device=self._comm.device)
                    receives.setdefault(matrix.owner, []).append(values)
                    own.append((name, values))
                elif is_mine:
                    sends.setdefault(part.rank, []).append(self._cut(matrix, made[name], part))
        self._comm.exchange(sends, receives, what).wait()
        return own

    def _assemble(
        self, matrix: OwnedMatrix, received: Sequence[tuple[HeldPart, Tensor]], dtype: Mapping[str, torch.dtype]
    ) -> Tensor:
        whole = torch.zeros(matrix.place.global_shape, dtype=dtype[matrix.place.name], device=self._comm.device)
        for part, values in received:
            for chunk in _chunks(matrix, part, owned_only=not matrix.place.split.is_whole):
                _view(whole, chunk).copy_(_flat(values, chunk))
        return whole

    def _cut(self, matrix: OwnedMatrix, made: Tensor, part: HeldPart) -> Tensor:
        """Return the part of a tensor that a rank has, 1-D as it has it; zero where that is padding."""
        if matrix.place.split.is_whole:
            return made.view(-1)[part.start : part.stop]
        values = made.new_zeros(part.stop - part.start)
        for chunk in _chunks(matrix, part, owned_only=False):
            _flat(values, chunk).copy_(_view(made, chunk))
        return values


def _chunks(matrix: OwnedMatrix, part: HeldPart, *, owned_only: bool) -> tuple[Chunk, ...]:
    return intersect(matrix.place.split.local(part.tp_index, owned_only=owned_only), part.start, part.stop)


def _flat(values: Tensor, chunk: Chunk) -> Tensor:
    return values[chunk.local_offset : chunk.local_stop].view(chunk.rect.shape)


def _view(whole: Tensor, chunk: Chunk) -> Tensor:
    return whole[chunk.rect.slices_in(Rect.whole(tuple(whole.shape)))]
