"""The ZeRO stages are a table of placements, from which follows when collectives run.

A stage says how parameters, gradients and optimizer states are stored over the shard group. A change of placement is a
collective: shard to replicate is an all-gather, partial to shard a reduce-scatter, partial to replicate an all-reduce.

>>> [STAGES[stage].unshard_for_use for stage in range(4)]
[False, False, False, True]
>>> [STAGES[stage].reduce_each_backward for stage in range(4)]
[False, False, True, True]
>>> [STAGES[stage].unshard_after_step for stage in range(4)]
[False, True, True, False]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Final

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import TiersConfig, ZeroConfig


class Placement(Enum):
    """Say how a tensor is placed on the ranks of one mesh axis."""

    REPLICATE = "replicate"
    SHARD = "shard"
    PARTIAL = "partial"


@dataclass(frozen=True)
class ZeroStage:
    """Hold the placements of stored states over the shard group (Rajbhandari et al. 2020, arXiv 1910.02054, section 5).

    Attributes:
        params: placement of the parameters between their uses.
        grads: placement of the gradients while micro-batches accumulate; partial means full and not yet reduced.
        optimizer: placement of the master parameters and the optimizer's states.
        secondary_shard: ranks, next to each other, that keep what they have gathered once more among them; 0 for none.
        node_size: ranks of the shard group on a node, neighbours in it; 1 where they are unknown.
    """

    params: Placement
    grads: Placement
    optimizer: Placement
    secondary_shard: int = 0
    node_size: int = 1

    @cached_property
    def unshard_for_use(self) -> bool:
        """Say whether parameters are gathered before each use and released after it."""
        return self.params is Placement.SHARD

    @cached_property
    def reduce_each_backward(self) -> bool:
        """Say whether gradients are reduced in every backward, not only in the last one before the step."""
        return self.grads is Placement.SHARD

    @cached_property
    def unshard_after_step(self) -> bool:
        """Say whether the step updates a shard of parameters that are stored whole, so they are gathered after it."""
        return self.optimizer is Placement.SHARD and self.params is Placement.REPLICATE


STAGES: Final[tuple[ZeroStage, ...]] = (
    ZeroStage(params=Placement.REPLICATE, grads=Placement.PARTIAL, optimizer=Placement.REPLICATE),
    ZeroStage(params=Placement.REPLICATE, grads=Placement.PARTIAL, optimizer=Placement.SHARD),
    ZeroStage(params=Placement.REPLICATE, grads=Placement.SHARD, optimizer=Placement.SHARD),
    ZeroStage(params=Placement.SHARD, grads=Placement.SHARD, optimizer=Placement.SHARD),
)


_ON_DEVICE: Final = TiersConfig()


def effective_stage(
    zero: ZeroConfig, num_shards: int, tiers: TiersConfig | None = None, *, is_scheduled: bool = False
) -> ZeroStage:
    """Return the row of `zero.stage` as it is over so many ranks; stage 0's where one holds all on its device.

    Gradients that are stored off the device are shards, in stage 1 too: whole ones would be n times the bytes to move.
    In a pipeline stage 2 is stage 1: gradients are whole until they are reduced, once, after the last micro-batch.

    Args:
        tiers: tier of each state; None for the device.
        is_scheduled: a pipeline schedule runs the stages.

    Raises:
        ConfigError: `zero.secondary_shard` does not divide the shard group.

    >>> effective_stage(ZeroConfig(stage=1), 4, TiersConfig(grads="host")) == STAGES[2]
    True
    >>> [effective_stage(ZeroConfig(stage=3), 1, TiersConfig(params=tier)) for tier in ("device", "host")] == [
    ...     STAGES[0], STAGES[3]
    ... ]
    True
    >>> effective_stage(ZeroConfig(stage=3, secondary_shard=2), 4).secondary_shard
    2
    """
    tiers, number = tiers or _ON_DEVICE, zero.stage
    if tiers.grads != "device" and number == 1:
        number = 2
    if is_scheduled and number == 2 and tiers.grads == "device":
        number = 1
    is_away = {tiers.params, tiers.grads, tiers.optimizer} != {"device"}
    stage = STAGES[number if num_shards > 1 or is_away else 0]
    near = zero.secondary_shard
    if not near or near >= num_shards:
        return stage
    if num_shards % near:
        legal = ", ".join(str(number) for number in range(1, num_shards) if num_shards % number == 0)
        raise ConfigError(
            "secondary-shard-divides",
            f"zero.secondary_shard={near} does not divide the {num_shards} ranks that share the parameters; "
            f"take one of {legal}",
        )
    is_kept = stage.unshard_for_use and tiers.params == "device"
    return replace(stage, secondary_shard=near if is_kept else 0, node_size=near)
