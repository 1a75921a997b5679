"""Which memory each group's states rest in: device, host or NVMe, as the config says, with a share kept on the device.

A share is whole groups, taken in the order in which the forward runs them, as they fit: their gradients come last in
the backward and their parameters are needed first in the next forward, so they are the ones that could hide the least.

>>> from shardwise.layout.groups import GroupSpec, ParamSpec
>>> groups = [GroupSpec(name, name, (ParamSpec("w", (), (8,), 0),), True, 1, 1) for name in ("root", "0", "1", "2")]
>>> config = TiersConfig(optimizer="host", optimizer_on_device=0.5)
>>> [group.tiers.optimizer for group in assign_tiers(groups, config)]
['device', 'device', 'host', 'host']
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwise.config import Tier, TiersConfig
from shardwise.layout.groups import GroupSpec, GroupTiers


def assign_tiers(groups: Sequence[GroupSpec], config: TiersConfig) -> tuple[GroupSpec, ...]:
    """The groups, each with the tiers of its states.

    Args:
        groups: in forward order.
        config: a tier for each state, and the share of it, by elements, that stays on the device: at most so much.
    """
    trainable = [group for group in groups if group.trainable]
    sharded = [group for group in groups if not group.is_replicated]
    params = _chosen(sharded, config.params, config.params_on_device)
    grads = _chosen(trainable, config.grads, config.grads_on_device)
    optimizer = _chosen(trainable, config.optimizer, config.optimizer_on_device)
    return tuple(replace(each, tiers=GroupTiers(params(each), grads(each), optimizer(each))) for each in groups)


def assign_tiers_by_rank(
    groups: Sequence[GroupSpec], config: TiersConfig, rank_of: Callable[[GroupSpec], int]
) -> tuple[GroupSpec, ...]:
    """`assign_tiers` for what each rank of a pipeline holds: shares are of its own states.

    Args:
        groups: of all ranks.
        config: as there.
        rank_of: the rank that holds a group, the first of several.
    """
    ranks = sorted({rank_of(group) for group in groups})
    own = {rank: [group for group in groups if rank_of(group) == rank] for rank in ranks}
    assigned = {each.name: each for rank in ranks for each in assign_tiers(own[rank], config)}
    return tuple(assigned[group.name] for group in groups)


def _chosen(groups: Sequence[GroupSpec], tier: Tier, share: float) -> Callable[[GroupSpec], Tier]:
    away: set[str] = set()
    room = round(share * sum(group.padded_numel for group in groups))
    for group in groups:
        if group.padded_numel <= room:
            room -= group.padded_numel
        else:
            away.add(group.name)
    return lambda group: tier if group.name in away else "device"
