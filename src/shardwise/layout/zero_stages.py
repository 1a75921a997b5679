"""ZeRO stages as a table of placements; when collectives run follows from it.

A stage says where parameters, gradients and optimizer states rest over the shard group. Changing a placement is a
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
from typing import Final

from shardwise.config.resolve import TiersConfig


class Placement(Enum):
    """How a tensor lies on the ranks of one mesh axis."""

    REPLICATE = "replicate"
    SHARD = "shard"
    PARTIAL = "partial"


@dataclass(frozen=True)
class ZeroStage:
    """Placements at rest, over the shard group (Rajbhandari et al. 2020, arXiv 1910.02054, section 5).

    Attributes:
        params: of the parameters between their uses.
        grads: of the gradients while micro-batches accumulate; partial means full and not yet reduced.
        optimizer: of the master parameters and the optimizer's states.
    """

    params: Placement
    grads: Placement
    optimizer: Placement

    @property
    def unshard_for_use(self) -> bool:
        """Parameters are gathered before each use and released after it."""
        return self.params is Placement.SHARD

    @property
    def reduce_each_backward(self) -> bool:
        """Gradients are reduced in every backward, not only in the last one before the step."""
        return self.grads is Placement.SHARD

    @property
    def unshard_after_step(self) -> bool:
        """The step updates a shard of parameters that rest whole, so they are gathered after it."""
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
    """The table's row; stage 0's where one rank holds everything on its device and there is nothing to shard.

    Gradients that rest off the device are shards, in stage 1 too: whole ones would be n times the bytes to move.
    In a pipeline (`is_scheduled`) stage 2 is stage 1: gradients are whole until they are reduced, once, behind the last
    micro-batch.

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
