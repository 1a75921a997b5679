"""Blocks say which rectangles of a whole parameter are in a rank's range of a flat buffer, and who sends them to whom.

A rank gets a parameter from its own replica: from each shard of it where parameters are stored as shards, else from the
ranks at its own place along the data axes; and of what several ranks of tensor parallelism hold, from the first.

Rank 1 of two has the right half of a (4, 6) matrix, and ZeRO gives it the last 5 of the half's 12 elements:

>>> from shardwise.layout.tp_sharding import FusedPart, ParamSplit
>>> param = ParamSpec("w", (), (4, 3), 0, ParamSplit((4, 6), degree=2, dim=1, parts=(FusedPart(6),)))
>>> [(block.offset, str(block.box), str(block.rect)) for block in blocks_of(param, (7, 12), tp_index=1)]
[(7, '[2:3, 1:3]', '[2:3, 4:6]'), (9, '[3:4, 0:3]', '[3:4, 3:6]')]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import add, sub

from shardwise.layout.mesh_shape import SHARD_AXES, Coordinate, MeshShape
from shardwise.layout.param_groups import GroupSpec, ParamSpec
from shardwise.layout.slicing import Rect, flat_range_to_rects

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Block:
    """Places a rectangle of a whole parameter in a group's flat buffer.

    Attributes:
        offset: the first element of `box`, whose elements are contiguous there.
        box: a rectangle of the rank's local tensor.
        inside: the part of it that is `rect`: without padding, and without what another rank sends.
        rect: the same elements in the whole parameter.
    """

    offset: int
    box: Rect
    inside: Rect
    rect: Rect


def blocks_of(param: ParamSpec, held: Range, tp_index: int, *, owned_only: bool = True) -> Iterator[Block]:
    """Yield what a rank has of a parameter in the range `held` of the flat buffer, in the buffer's order.

    Args:
        tp_index: the rank's index in its tensor-parallel group.
        owned_only: leave out what the rank holds but another one of that group owns.
    """
    low, high = max(held[0] - param.offset, 0), min(held[1] - param.offset, param.numel)
    if low >= high:
        return
    shares = [share for share in param.split.shares(tp_index) if not owned_only or share.is_owned_by(tp_index)]
    for box in flat_range_to_rects(Rect.whole(param.shape), low, high):
        for share in shares:
            inside = box.rect.intersect(share.target)
            if inside is not None:
                shift = tuple(map(sub, share.source.start, share.target.start))
                rect = Rect(tuple(map(add, inside.start, shift)), tuple(map(add, inside.stop, shift)))
                yield Block(param.offset + low + box.local_offset, box.rect, inside, rect)


@dataclass(frozen=True)
class GroupRoutes:
    """Says from which ranks each rank gets the parameters of a group.

    Attributes:
        mesh: on which the group is placed.
        holders: the ranks of the pipeline that hold the group.
        is_whole: every rank that holds it has all of the flat buffer; otherwise its shard.
    """

    group: GroupSpec
    mesh: MeshShape
    holders: tuple[int, ...]
    is_whole: bool

    def sends(self, param: ParamSpec, source: Coordinate, receiver: Coordinate) -> bool:
        """Say whether a rank sends what it has of a parameter to another one, or to itself."""
        stage = receiver.pp if receiver.pp in self.holders else self.holders[0]
        if source.pp != stage or source.dp_replicate != receiver.dp_replicate:
            return False
        if self.is_whole and (source.dp_shard, source.cp) != (receiver.dp_shard, receiver.cp):
            return False
        return not param.split.is_whole or source.tp == receiver.tp

    def held(self, rank: Coordinate) -> Range:
        """Return the range of the flat buffer that a rank has."""
        return (0, self.group.padded_numel) if self.is_whole else self.group.shard_range(self._shard(rank))

    def written(self, rank: Coordinate) -> Range:
        """Return the range that a rank has, so that those of all ranks with the same `tp` are the buffer once."""
        if rank.pp != self.holders[0]:
            return 0, 0
        return self.group.written_range(self._shard(rank), rank.dp_replicate)

    def _shard(self, rank: Coordinate) -> int:
        return self.mesh.index_along(SHARD_AXES, self.mesh.rank_of(rank))
