"""What a cluster is made of: devices, links, hosts, and what has been measured of them. Values only.

Speeds are in bytes or FLOPs a second, in one direction of a link, of one device. `catalogue` has the ones for sale,
`profile` what a machine was measured to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from shardwise.planner.profile import Profile

CPU: Final = "cpu"
"""The name of a rank's share of a host, where that is what it computes on."""
GIB: Final = 2**30


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What is fitted to published runs: at most these three numbers for each device, and none for a source.

    Attributes:
        matmul_share: of the measured ceiling that large matrix products reach in training.
        memory_share: of the device's memory bandwidth that element-wise kernels reach.
        network_share: of a link's bandwidth that collectives reach while a model trains.
    """

    matmul_share: float = 0.8
    memory_share: float = 0.7
    network_share: float = 0.7


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device, by its data sheet; a field that is not known is 0 or missing.

    Attributes:
        name: such as `h100`.
        memory_bytes: that a process can use in all.
        memory_bytes_per_s: of its own memory.
        peak_flops_per_s: dense, by dtype of the matrix product: fp32, tf32, fp16, bf16, fp8, fp4.
        ceiling_flops_per_s: of the best matrix product that was measured, by dtype; where one is missing, the share of
            the peak that another dtype reached holds.
        link_bytes_per_s: to the devices of its domain (NVLink and the like), of all links; 0 where there is none.
        link_domain: devices that such links join.
        has_pairwise_links: whether each link leads to one other device, so that few ranks reach only some of them.
        host_bytes_per_s: of its way to the host's memory.
        nic_bytes_per_s: of its share of the network, as it is usually built.
        num_cores: streaming multiprocessors, compute units.
        price_per_hour: in dollars, of one device rented; 0 where none is known.
        fitted: to published runs.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]
    ceiling_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    link_bytes_per_s: float = 0.0
    link_domain: int = 8
    has_pairwise_links: bool = False
    host_bytes_per_s: float = 0.0
    nic_bytes_per_s: float = 0.0
    num_cores: int = 0
    price_per_hour: float = 0.0
    fitted: Fitted = Fitted()

    @property
    def is_cpu(self) -> bool:
        """Whether it is no device of its own but a rank's share of the host."""
        return self.name == CPU


@dataclass(frozen=True, kw_only=True)
class Host:
    """The machine around the devices, shared by all of them."""

    memory_bytes: float = 1e12
    memory_bytes_per_s: float = 2e11
    num_cores: int = 64
    nvme_read_bytes_per_s: float = 0.0
    nvme_write_bytes_per_s: float = 0.0
    nvme_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices of one kind in nodes of one kind.

    Attributes:
        gpus_per_node: that share a host.
        nic_bytes_per_s: a device's share of its node's network.
        profile: what was measured here; where it has a table, that is asked first.
    """

    gpu: Gpu
    num_gpus: int
    gpus_per_node: int
    nic_bytes_per_s: float
    host: Host = Host()
    profile: Profile | None = None
