"""Check whether what ranks hold fits into the memories of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shardwise.config.resolve import Tier
from shardwise.planner.hardware import Cluster
from shardwise.planner.results import MemoryEstimate

USUAL_MARGIN: Final = 0.06
"""Share of a device's memory that is kept free: what no estimate sees, such as fragments and other processes."""


@dataclass(frozen=True)
class MissingMemory:
    """Say how many bytes a memory lacks.

    Attributes:
        tier: which memory.
        missing_bytes: of a device, or of a node's other memory.
        pipeline_rank: the rank that lacks most.
    """

    tier: Tier
    missing_bytes: float
    pipeline_rank: int


def usable_bytes(cluster: Cluster, margin_share: float) -> float:
    """Return the bytes of a device's memory, without the share `margin_share` that stays free."""
    return cluster.gpu.memory_bytes * (1 - margin_share)


def held_on_node(memory: MemoryEstimate, cluster: Cluster, tier: Tier) -> float:
    """Return the bytes of the tier `host` or `nvme` that a node's ranks hold, if all hold as much as the fullest."""
    return max(rank.elsewhere.get(tier, 0.0) for rank in memory.ranks) * cluster.gpus_per_node


def missing_on_node(memory: MemoryEstimate, cluster: Cluster, margin_share: float) -> float:
    """Return the bytes that all memories of a node lack together; the arguments are those of `missing_memory`."""
    device = max(0.0, memory.worst.peak_bytes - usable_bytes(cluster, margin_share)) * cluster.gpus_per_node
    return device + sum(max(0.0, held_on_node(memory, cluster, tier) - size) for tier, size in _of_node(cluster))


def missing_memory(memory: MemoryEstimate, cluster: Cluster, margin_share: float) -> MissingMemory | None:
    """Return what is missing, of the device first; None where all fits.

    A node's ranks share its host memory and disks; the share `margin_share` of a device's memory is to stay free.
    """
    missing = memory.worst.peak_bytes - usable_bytes(cluster, margin_share)
    if missing > 0:
        return MissingMemory("device", missing, memory.worst.pipeline_rank)
    for tier, size in _of_node(cluster):
        missing = held_on_node(memory, cluster, tier) - size
        if missing > 0:
            fullest = max(memory.ranks, key=lambda rank: rank.elsewhere.get(tier, 0.0))
            return MissingMemory(tier, missing, fullest.pipeline_rank)
    return None


def _of_node(cluster: Cluster) -> tuple[tuple[Tier, float], ...]:
    return ("host", cluster.host.memory_bytes), ("nvme", cluster.host.nvme_bytes)
