"""Price one collective over ranks of a cluster: by what was measured there, else by links, hops and bytes.

A group spans levels: devices that links join (NVLink), devices of a node (PCIe), nodes (network). A ring over all of
them crosses each level's border as often as it must, and moves through it what the level's ranks share; the slowest
level bounds it, since data flows through all of them at once.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

from shardwise.config.errors import ConfigError
from shardwise.planner.hardware import Cluster

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
OPS: Final = get_args(Op)

CALL_S: Final = 8e-6
"""Seconds of any collective before its first byte moves: a kernel's launch, and ranks that wait for each other."""
LINK_HOP_S: Final = 2e-6
PCIE_HOP_S: Final = 4e-6
NETWORK_HOP_S: Final = 8e-6
"""Seconds of one hop of a ring, between the latencies that NCCL 2.18's tuning table assumes for its protocols LL128 and
simple: 1.9 and 3.4 us over NVLink, 2.5 and 5.7 over PCIe, 4 and 14 over a network."""
COLLISIONS: Final = 0.05
"""By how much longer data takes over a network for each doubling of the nodes: more ways through it meet, and each
waits for the slowest. ZeRO-3 of 175 B parameters took a third longer on 512 A100 than on 128 (DeepSpeed on Azure)."""
PCIE_SHARE: Final = 0.5
"""Share of the way to the host that devices without links reach through its memory: each byte goes up and down."""
PLAIN_NIC_BYTES_PER_S: Final = 1.25e9
PLAIN_HOST_BYTES_PER_S: Final = 16e9
"""Bandwidths where the data sheet names none: Ethernet of 10 Gb/s, PCIe 3 x16."""

_TRAVERSALS: Final[Mapping[str, int]] = MappingProxyType({"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1})

_Table = list[tuple[float, float]]  # bytes and seconds, ascending


@dataclass(frozen=True)
class NetworkLevel:
    """Describe one level of the network that a group spans.

    Attributes:
        num_ranks: how many this level joins: devices of a domain, domains of a node, or nodes.
        bytes_per_s: what each device sends over it.
        hop_s: the latency of a message, whatever its size.
    """

    num_ranks: int
    bytes_per_s: float
    hop_s: float


class NetworkModel:
    """Time collectives on one cluster, and keep the times that were asked for.

    Args:
        cluster: devices, links, and what was measured.
        collisions: by what share data takes longer over its network for each doubling of the nodes.
    """

    def __init__(self, cluster: Cluster, collisions: float = COLLISIONS) -> None:
        self.cluster = cluster
        self._collisions = collisions
        self._known: dict[tuple[str, float, int, int], float] = {}
        self._levels: dict[tuple[int, int], tuple[NetworkLevel, ...]] = {}
        self._tables = _read_tables(cluster)
        gpu = cluster.gpu
        share, pcie = gpu.fitted.network_share, PCIE_SHARE * (gpu.host_bytes_per_s or PLAIN_HOST_BYTES_PER_S)
        nic = cluster.nic_bytes_per_s or PLAIN_NIC_BYTES_PER_S
        domain = max(1, gpu.link_domain if gpu.link_bytes_per_s else 1)
        self._tiers = (
            (domain, share * gpu.link_bytes_per_s, LINK_HOP_S),
            (max(domain, cluster.gpus_per_node), share * pcie, PCIE_HOP_S),
            (math.inf, share * nic, NETWORK_HOP_S),
        )

    def collective_s(self, op: Op, num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        """Return the seconds of one collective.

        A ring gathers or scatters in n - 1 hops, each rank sending (n - 1) / n of the buffer, and sums in twice that
        (Patarasuk and Yuan 2009); a sum of few bytes goes up and down a tree over the nodes instead. An all-to-all
        sends each peer its n-th.

        Args:
            num_bytes: of the whole buffer; what each rank has before an all-to-all, what is sent.
            num_ranks: of the group; a send goes to the next one of so many, and the slowest counts.
            stride: how far apart in rank order the group's ranks stand.

        Raises:
            ConfigError: no such op.
        """
        if op not in OPS:
            raise ConfigError("unknown-collective", f"op={op!r} is no collective; legal: {', '.join(OPS)}")
        if num_ranks <= 1 or num_bytes <= 0:
            return 0.0
        key = (op, num_bytes, num_ranks, stride)
        if key not in self._known:
            measured = self._measured_s(*key)
            self._known[key] = self._modelled_s(*key) if measured is None else measured
        return self._known[key]

    def levels(self, num_ranks: int, stride: int) -> tuple[NetworkLevel, ...]:
        """Return the levels that a group spans, the innermost first, without those that join nothing."""
        key = (num_ranks, stride)
        if key in self._levels:
            return self._levels[key]
        levels, left, width = [], num_ranks, stride
        for index, (size, bytes_per_s, hop_s) in enumerate(self._tiers):
            most = left if math.isinf(size) else max(1, int(size) // width)
            num_groups = math.ceil(left / min(left, most))
            joined = math.ceil(left / num_groups)  # evenly, where a domain is not a whole number of groups
            if joined > 1:
                levels.append(NetworkLevel(joined, bytes_per_s * self._reached_share(index, joined), hop_s))
            left, width = num_groups, width * joined
        self._levels[key] = tuple(levels)
        return self._levels[key]

    def _reached_share(self, tier: int, num_ranks: int) -> float:
        """Return the share of a device's links that leads to ranks of the group, or that collisions leave."""
        gpu = self.cluster.gpu
        if tier == len(self._tiers) - 1:
            return 1 / (1 + self._collisions * math.log2(num_ranks))
        if tier > 0 or not gpu.has_pairwise_links:
            return 1.0
        return (num_ranks - 1) / (gpu.link_domain - 1)

    def _modelled_s(self, op: str, num_bytes: float, num_ranks: int, stride: int) -> float:
        levels = self.levels(num_ranks, stride)
        if op == "send":
            outermost = levels[-1]
            return CALL_S + outermost.hop_s + num_bytes / outermost.bytes_per_s
        inside, moved_s, hops_s, tree_s = 1, 0.0, 0.0, 0.0
        for level in levels:
            outside = num_ranks / (inside * level.num_ranks)
            if op == "all_to_all":  # of what each rank sends, what ends in this level
                sent = num_bytes * inside * (level.num_ranks - 1) / num_ranks
                hops_s = max(hops_s, level.hop_s)
            else:
                sent = num_bytes * (level.num_ranks - 1) / level.num_ranks / inside
                hops_s += (level.num_ranks - 1) * outside * level.hop_s
                num_hops = level.num_ranks - 1 if inside == 1 else math.ceil(math.log2(level.num_ranks))
                tree_s += num_hops * level.hop_s
            moved_s = max(moved_s, sent / level.bytes_per_s)
            inside *= level.num_ranks
        if op == "all_to_all":
            return CALL_S + hops_s + moved_s
        if op == "all_reduce":
            hops_s = min(hops_s, tree_s)
        return CALL_S + _TRAVERSALS[op] * (hops_s + moved_s)

    def _measured_s(self, op: str, num_bytes: float, num_ranks: int, stride: int) -> float | None:
        """Scale the table of the nearest number of ranks where the group is within a node, as in the table."""
        tables = self._tables.get(op)
        if not tables or stride * num_ranks > self.cluster.gpus_per_node:
            return None
        nearest = min(tables, key=lambda ranks: (abs(math.log(ranks / num_ranks)), ranks))
        scale = 1.0 if op == "send" else (1 - 1 / num_ranks) / (1 - 1 / nearest)
        return scale * _interpolated(tables[nearest], num_bytes)


def _read_tables(cluster: Cluster) -> dict[str, dict[int, _Table]]:
    """Return the measured tables by op and number of ranks; a larger buffer is never faster, whatever was measured."""
    tables: dict[str, dict[int, _Table]] = {}
    for row in sorted(cluster.measured.collectives, key=lambda row: (row.num_bytes, row.seconds)):
        if row.num_ranks > 1 and row.num_bytes > 0:
            table = tables.setdefault(row.op, {}).setdefault(row.num_ranks, [])
            table.append((row.num_bytes, max(row.seconds, table[-1][1] if table else 0.0)))
    return tables


def _interpolated(table: _Table, num_bytes: float) -> float:
    """Interpolate log-log; below the first point take its seconds, above the last its bytes a second."""
    index = bisect_left(table, (num_bytes, 0.0))
    if index == 0:
        return table[0][1]
    if index == len(table):
        return table[-1][1] * num_bytes / table[-1][0]
    (low, low_s), (high, high_s) = table[index - 1], table[index]
    share = math.log(num_bytes / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(low_s) + share * math.log(high_s))
