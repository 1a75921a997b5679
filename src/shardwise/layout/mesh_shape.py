"""The shape of the mesh says which coordinate each rank has on named axes, and which ranks share a group.

It is integers only: the process groups are made in `shardwise.comm.mesh`. Axes stand in the order `pp, dp_replicate,
dp_shard, cp, tp`; the last varies fastest, so the ranks of one tp group are neighbours. Four ranks as
dp_shard=2 x tp=2:

              tp 0   tp 1
    dp_shard 0   0      1      tensor-parallel groups (0, 1) and (2, 3)
    dp_shard 1   2      3      ZeRO shard groups      (0, 2) and (1, 3)

>>> mesh = MeshShape(dp_shard=2, tp=2)
>>> mesh.coordinate(2)
Coordinate(pp=0, dp_replicate=0, dp_shard=1, cp=0, tp=0)
>>> mesh.groups_along(SHARD_AXES)
((0, 2), (1, 3))
>>> mesh.ranks_along(("tp",), rank=3)
(2, 3)

Experts see the same ranks a second time: `ep` of them, neighbours, hold different experts, and ZeRO shards each expert
over the ranks that remain. On that mesh, `experts`, ep is in the place of tp, and all that is true of tp is true of it:

>>> MeshShape(dp_shard=2, tp=2, ep=4).experts
MeshShape(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=4, ep=1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Final, NamedTuple

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import MeshConfig


class Coordinate(NamedTuple):
    """Hold a rank's index along each axis."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0


AXES: Final = Coordinate._fields

# What sets of axes are for. Ranks that differ along pp, cp and tp only get identical micro-batches.
SHARD_AXES: Final = ("dp_shard", "cp")  # ZeRO shards states over these
REPLICA_AXES: Final = ("dp_replicate",)  # ranks along these hold the same shard
GRADIENT_AXES: Final = ("dp_replicate", "dp_shard", "cp")  # gradients are averaged over these
DATA_AXES: Final = ("dp_replicate", "dp_shard")  # micro-batches differ along these
CONTEXT_AXES: Final = ("cp",)  # each sample's tokens are split over these
TENSOR_AXES: Final = ("tp",)  # layers' matrices are split over these
PIPELINE_AXES: Final = ("pp",)  # the model's stages are placed along these

# From here on gloo's own all-reduce of fp32 among two ranks is as fast as sending all and adding.
RING_BYTES: Final = 2**20


@dataclass(frozen=True)
class MeshShape:
    """Hold the number of ranks along each axis.

    Attributes:
        ep: ranks among which experts are divided; it divides `dp_shard * cp * tp`, and is none of `AXES`.

    Raises:
        ConfigError: an axis holds less than one rank, or `ep` does not divide.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip((*AXES, "ep"), (*self.sizes, self.ep), strict=True):
            if size < 1:
                raise ConfigError("mesh-axis-empty", f"mesh.{axis}={size} holds no rank; every axis holds at least 1")
        if self.num_model_ranks % self.ep:
            raise ConfigError(
                "ep-divides-mesh",
                f"mesh.ep={self.ep} does not divide the {self.num_model_ranks} ranks of mesh.dp_shard * cp * tp; "
                f"nearest legal: {nearest_divisors(self.num_model_ranks, self.ep)}",
            )

    @classmethod
    def from_config(cls, config: MeshConfig) -> MeshShape:
        """Read the mesh section of a resolved config.

        Raises:
            ConfigError: the config is not resolved.
        """
        if config.dp_shard is None or config.dp_replicate is None:
            raise ConfigError(
                "config-not-resolved",
                "mesh.dp_shard and dp_replicate are not known yet; call config.resolve(world_size) first",
            )
        return cls(config.pp, config.dp_replicate, config.dp_shard, config.cp, config.tp, config.ep)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the ranks along each of `AXES`, in their order."""
        return self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the whole mesh."""
        return math.prod(self.sizes)

    @property
    def num_model_ranks(self) -> int:
        """Return the number of ranks that hold one replica of one stage."""
        return self.dp_shard * self.cp * self.tp

    @property
    def divides_experts(self) -> bool:
        """Say whether experts are placed by a mesh of their own; otherwise both meshes are equal."""
        return self.ep > 1 or self.tp > 1

    @cached_property
    def experts(self) -> MeshShape:
        """Return the mesh as experts see it, whose tp axis is ep; its ranks are the same."""
        return MeshShape(self.pp, self.dp_replicate, self.num_model_ranks // self.ep, 1, self.ep)

    @property
    def num_data_ranks(self) -> int:
        """Return how many different micro-batches the mesh computes at a time.

        >>> MeshShape(dp_replicate=2, dp_shard=2, tp=2).num_data_ranks
        4
        """
        return self.size_along(DATA_AXES)

    def data_index(self, rank: int) -> int:
        """Return which of the `num_data_ranks` micro-batches `rank` computes.

        >>> [MeshShape(dp_shard=2, tp=2).data_index(rank) for rank in range(4)]
        [0, 0, 1, 1]
        """
        return self.index_along(DATA_AXES, rank)

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of `rank`.

        Raises:
            ValueError: the mesh holds no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not on the mesh; its {self.world_size} ranks count from 0")
        indices = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            indices.append(index)
        return Coordinate(*reversed(indices))

    def rank_of(self, coordinate: Coordinate) -> int:
        """Return the rank at `coordinate`.

        >>> MeshShape(dp_shard=2, tp=2).rank_of(Coordinate(dp_shard=1))
        2

        Raises:
            ValueError: an index is outside its axis.
        """
        rank = 0
        for axis, index, size in zip(AXES, coordinate, self.sizes, strict=True):
            if not 0 <= index < size:
                raise ValueError(f"{axis} index {index} is not on the mesh; {axis}={size} counts from 0")
            rank = rank * size + index
        return rank

    def size_along(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks of one group along `axes`."""
        return math.prod(self._sizes_within(axes))

    def index_along(self, axes: tuple[str, ...], rank: int) -> int:
        """Return the position of `rank` in its group along `axes`; along `SHARD_AXES`, the index of its shard."""
        return self.ranks_along(axes, rank).index(rank)

    def ranks_along(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Return the group of `rank` along `axes`: the ranks with its coordinate on all other axes, in rank order.

        >>> MeshShape(dp_shard=2, cp=2, tp=2).ranks_along(SHARD_AXES, rank=3)
        (1, 3, 5, 7)

        Raises:
            ValueError: the mesh holds no such rank or axis.
        """
        group = self._rank_0_group(axes)
        first = self.rank_of(self.coordinate(rank)._replace(**dict.fromkeys(axes, 0)))
        return tuple(first + offset for offset in group)

    def groups_along(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return all groups along `axes`; every rank is in exactly one.

        >>> MeshShape(dp_shard=2, tp=2).groups_along(("tp",))
        ((0, 1), (2, 3))
        """
        group = self._rank_0_group(axes)
        firsts = self._rank_0_group(tuple(axis for axis in AXES if axis not in axes))
        return tuple(tuple(first + offset for offset in group) for first in firsts)

    def _rank_0_group(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return rank 0's group; ranks are linear in coordinates, so any group is this one plus its own first rank."""
        ranges = map(range, self._sizes_within(axes))
        return tuple(self.rank_of(Coordinate(*indices)) for indices in product(*ranges))

    def _sizes_within(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the size of every axis, with 1 for those that are not among `axes`."""
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f"{axis!r} is not an axis of the mesh; axes are {', '.join(AXES)}")
        return tuple(size if axis in axes else 1 for axis, size in zip(AXES, self.sizes, strict=True))


def nearest_divisors(number: int, wanted: int) -> str:
    """Return the divisors of `number` next to `wanted`, as text.

    >>> nearest_divisors(12, 5)
    '4, 6'
    """
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below = [divisor for divisor in divisors if divisor < wanted][-1:]
    return ", ".join(map(str, below + [divisor for divisor in divisors if divisor > wanted][:1]))


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a rank that a world does not have."""
    if not 0 <= rank < world_size:
        raise ConfigError(
            "rank-out-of-range", f"rank {rank} is not in a world of {world_size}; give 0 to {world_size - 1}"
        )
