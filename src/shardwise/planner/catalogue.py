"""The devices that are for sale, by name, from `catalogue.toml`, each figure with its source.

>>> gpu("h100").memory_bytes / 2**30
80.0
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardwise.planner.hardware import Gpu

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        each.name: each
        for each in (
            Gpu(
                name="a100-80",
                memory_bytes=80 * 2**30,
                memory_bytes_per_s=2.039e12,
                peak_flops_per_s={"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
                ceiling_flops_per_s={"bf16": 271.2e12},
                link_bytes_per_s=300e9,
                host_bytes_per_s=31e9,
                nic_bytes_per_s=25e9,
                num_cores=108,
            ),
            Gpu(
                name="h100",
                memory_bytes=80 * 2**30,
                memory_bytes_per_s=3.35e12,
                peak_flops_per_s={"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12, "fp32": 67e12},
                ceiling_flops_per_s={"bf16": 794.5e12, "fp8": 1402.6e12},
                link_bytes_per_s=450e9,
                host_bytes_per_s=55e9,
                nic_bytes_per_s=50e9,
                num_cores=132,
            ),
        )
    }
)


def gpu(name: str) -> Gpu:
    """The device of that name."""
    return GPUS[name]
