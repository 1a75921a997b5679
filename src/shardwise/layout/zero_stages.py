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

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import TiersConfig


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
    """

    params: Placement
    grads: Placement
    optimizer: Placement

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


def effective_stage(
    stage: int, num_shards: int, tiers: TiersConfig | None = None, *, is_scheduled: bool = False
) -> ZeroStage:
    """Return the table's row; stage 0's where one rank holds everything on its device and there is nothing to shard.

    Gradients that are stored off the device are shards, in stage 1 too: whole ones would be n times the bytes to move.
    In a pipeline stage 2 is stage 1: gradients are whole until they are reduced, once, after the last micro-batch.

    Args:
        tiers: tier of each state; None for the device.
        is_scheduled: a pipeline schedule runs the stages.

    >>> effective_stage(1, 4, TiersConfig(grads="host")) == STAGES[2]
    True
    >>> effective_stage(3, 1) == STAGES[0], effective_stage(3, 1, TiersConfig(params="host")) == STAGES[3]
    (True, True)
    """
    tiers = tiers or TiersConfig()
    if tiers.grads != "device" and stage == 1:
        return STAGES[2]
    if is_scheduled and stage == 2 and tiers.grads == "device":
        stage = 1
    is_away = {tiers.params, tiers.grads, tiers.optimizer} != {"device"}
    return STAGES[stage if num_shards > 1 or is_away else 0]


def secondary_ranks(given: int, num_shards: int, stage: ZeroStage) -> int:
    """Return how many ranks `zero.secondary_shard` has share; 0 where all would, or the stage gathers nothing for use.

    Raises:
        ConfigError: they do not divide the shard group.
    """
    return node_ranks(given, num_shards) if stage.unshard_for_use else 0


def node_ranks(given: int, num_shards: int) -> int:
    """Return the ranks of the shard group on a node, from `zero.secondary_shard`; 0 for one node or none given.

    Raises:
        ConfigError: they do not divide the shard group.
    """
    if given >= num_shards:
        return 0
    if given and num_shards % given:
        legal = ", ".join(str(each) for each in range(1, num_shards) if num_shards % each == 0)
        raise ConfigError(
            "secondary-shard-divides",
            f"zero.secondary_shard={given} does not divide the {num_shards} ranks that share the parameters; "
            f"take one of {legal}",
        )
    return given
