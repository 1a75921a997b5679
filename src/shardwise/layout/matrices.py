"""This module says which rank steps which of the parameters that an optimizer (Muon) steps as whole matrices.

A matrix has one owner among the ranks that share its elements: along the axes of ZeRO's shards and of tensor
parallelism. The owners are chosen so that all have about as much to compute, over all groups together.

>>> from shardwise.layout.param_groups import GroupSpec, ParamSpec
>>> shapes = {"up": (64, 16), "down": (16, 64), "out": (16, 16)}
>>> places = tuple(ParamSpec(name, (), shape, 1024 * index) for index, (name, shape) in enumerate(shapes.items()))
>>> group = GroupSpec("block:matrix", "block", places, True, num_ranks=2, num_shards=2, is_matrix=True)
>>> {each.place.name: each.owner for each in assign_owners([group])}
{'up': 0, 'down': 1, 'out': 0}
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.layout.param_groups import GroupSpec, ParamSpec
from shardwise.layout.slicing import Rect
from shardwise.optim.rules import NUM_ITERATIONS


def matrices_of(place: ParamSpec) -> tuple[Rect, ...]:
    """Return the parts of a parameter that are a matrix, or a stack of them, each.

    >>> from shardwise.layout.facts import FusedDim
    >>> [str(rect) for rect in matrices_of(ParamSpec("qkv", (), (12, 4), 0, fused=FusedDim(0, (8, 2, 2))))]
    ['[0:8, 0:4]', '[8:10, 0:4]', '[10:12, 0:4]']
    """
    shape, fused = place.global_shape, place.fused
    if fused is None:
        return (Rect.whole(shape),)
    parts, start = [], 0
    for size in fused.sizes:
        low = tuple(start if dim == fused.dim else 0 for dim in range(len(shape)))
        high = tuple(start + size if dim == fused.dim else length for dim, length in enumerate(shape))
        parts.append(Rect(low, high))
        start += size
    return tuple(parts)


def newton_schulz_flops(shape: Sequence[int]) -> int:
    """Return the operations to orthogonalize a matrix, or a stack of them.

    With m <= n an iteration multiplies m x n by n x m, m x m by m x m, and m x m by m x n.
    """
    *stack, rows, columns = shape
    m, n = min(rows, columns), max(rows, columns)
    return NUM_ITERATIONS * math.prod(stack) * (4 * m * m * n + 2 * m**3)


@dataclass(frozen=True)
class OwnedMatrix:
    """Name a parameter that one rank steps whole.

    Attributes:
        group: the index of its group among those given.
        owner: the rank, counted along the axes of shards and, fastest, of those with other parts.
        num_parts: ranks with other parts of it, before ZeRO shards them.
    """

    group: int
    place: ParamSpec
    owner: int
    num_parts: int = 1


def assign_owners(groups: Sequence[GroupSpec]) -> tuple[OwnedMatrix, ...]:
    """Return the parameters of the groups of matrices, in order, each with its owner.

    The one that needs most is assigned first, to the rank that has least so far. Experts are a stack of matrices, of
    which a rank's own are a whole one.

    Args:
        groups: all on one pipeline rank; equal on every rank of a shard group.
    """
    found = [
        (index, replace(place, over_tp=None) if group.is_experts else place)
        for index, group in enumerate(groups)
        if group.is_matrix and group.trainable
        for place in group.params
        if place.numel
    ]
    num_parts = {index: 1 if groups[index].is_experts else groups[index].num_parts for index, _ in found}
    flops = [sum(newton_schulz_flops(rect.shape) for rect in matrices_of(place)) for _, place in found]
    num_owners = max((groups[index].num_shards * num_parts[index] for index, _ in found), default=1)
    loads = [(0, owner) for owner in range(num_owners)]
    owners: dict[int, int] = {}
    for number in sorted(range(len(found)), key=lambda number: -flops[number]):
        load, owner = heapq.heappop(loads)
        owners[number] = owner
        heapq.heappush(loads, (load + flops[number], owner))
    return tuple(
        OwnedMatrix(index, place, owners[number], num_parts[index]) for number, (index, place) in enumerate(found)
    )


def assign_whole(
    groups: Sequence[GroupSpec], names: Collection[str], kept: Mapping[str, int], *, at_one: bool
) -> tuple[OwnedMatrix, ...]:
    """Return the named parameters, in order, each with the rank that steps it whole; it has its states, too.

    Args:
        names: of the parameters that are stepped.
        kept: the owners of parameters that have one already.
        at_one: whether the first rank owns all, since the update of each depends on the others.
    """
    found = [
        (index, place)
        for index, group in enumerate(groups)
        if group.trainable
        for place in group.params
        if place.name in names and place.numel
    ]
    num_owners = max((groups[index].num_shards * groups[index].num_parts for index, _ in found), default=1)
    num_owners = 1 if at_one else num_owners
    numel_of = {place.name: math.prod(place.global_shape) for _, place in found}
    loads = dict.fromkeys(range(num_owners), 0)
    owners = {name: kept[name] for name in numel_of if name in kept}
    for name, owner in owners.items():
        loads[owner] += numel_of[name]
    for name in sorted(numel_of.keys() - owners.keys(), key=lambda name: (-numel_of[name], name)):
        owners[name] = min(loads, key=lambda owner: (loads[owner], owner))
        loads[owners[name]] += numel_of[name]
    return tuple(OwnedMatrix(index, place, owners[place.name], groups[index].num_parts) for index, place in found)


def rounds_of(owned: Sequence[OwnedMatrix], most_numel: int) -> tuple[tuple[OwnedMatrix, ...], ...]:
    """Cut a step into rounds, in each of which no owner has more elements than `most_numel`, or one parameter.

    Args:
        owned: in the order in which they are stepped.
        most_numel: bounds the memory of a round.
    """
    rounds: list[tuple[OwnedMatrix, ...]] = []
    current: list[OwnedMatrix] = []
    numels: dict[int, int] = {}
    for each in owned:
        numel = math.prod(each.place.global_shape)
        if numels.get(each.owner, 0) + numel > most_numel and each.owner in numels:
            rounds.append(tuple(current))
            current, numels = [], {}
        current.append(each)
        numels[each.owner] = numels.get(each.owner, 0) + numel
    return (*rounds, tuple(current)) if current else tuple(rounds)


def held_ranges(group: GroupSpec, place: ParamSpec, is_whole: bool) -> Mapping[int, tuple[int, int]]:
    """Return by shard the range of a parameter's local tensor that its holder has; shards without any are left out.

    Args:
        is_whole: whether each rank of the shard group has all of it.
    """
    if is_whole:
        return dict.fromkeys(range(group.num_shards), (0, place.numel))
    first, last = place.offset // group.shard_numel, (place.offset + place.numel - 1) // group.shard_numel
    return {
        shard: (
            max(0, shard * group.shard_numel - place.offset),
            min(place.numel, (shard + 1) * group.shard_numel - place.offset),
        )
        for shard in range(first, last + 1)
    }
