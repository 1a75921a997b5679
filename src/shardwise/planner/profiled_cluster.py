"""Turn the profile of a machine into a cluster that the planner prices jobs on.

>>> from shardwise.planner.profile import MatmulTime
>>> product = MatmulTime(dtype="fp32", m=512, n=512, k=512, seconds=0.01)
>>> profile = Profile(device="cpu", num_ranks=2, num_threads=1, memory_bytes=8e9, matmuls=(product,))
>>> cluster = cluster_of(profile)
>>> cluster.gpu.name, cluster.num_gpus, cluster.gpu.memory_bytes
('cpu', 2, 4000000000.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from shardwise.config.resolve import ConfigError
from shardwise.planner.hardware import CPU, Cluster, FittedConstants, GpuSpec, Host, known_gpu
from shardwise.planner.profile import Profile

_UNKNOWN_BYTES_PER_S: Final = 1e9


def cluster_of(profile: Profile, num_ranks: int | None = None) -> Cluster:
    """Return the machine of a profile as a cluster.

    Args:
        profile: what was measured there.
        num_ranks: that a job will have; by default those that were measured.

    Raises:
        ConfigError: not even a matrix product was measured, so that nothing is known of a device.
    """
    ranks = num_ranks or profile.num_ranks
    gpu = _cpu(profile, ranks) if profile.device == CPU else _gpu(profile)
    host = Host(
        memory_bytes=profile.host_memory_bytes or profile.memory_bytes,
        memory_bytes_per_s=2 * profile.copy_bytes_per_s("host", "host") * profile.num_ranks
        or Host().memory_bytes_per_s,
        num_cores=profile.num_threads * profile.num_ranks,
        nvme_read_bytes_per_s=profile.disk_read_bytes_per_s * profile.num_ranks,
        nvme_write_bytes_per_s=profile.disk_write_bytes_per_s * profile.num_ranks,
    )
    nic = gpu.link_bytes_per_s if profile.device == CPU else gpu.nic_bytes_per_s
    return Cluster(gpu=gpu, num_gpus=ranks, gpus_per_node=ranks, nic_bytes_per_s=nic, host=host, profile=profile)


def reached_flops_per_s(profile: Profile) -> Mapping[str, float]:
    """Return the rate of the best product that was measured, by dtype."""
    reached: dict[str, float] = {}
    for each in profile.matmuls:
        reached[each.dtype] = max(reached.get(each.dtype, 0.0), 2.0 * each.m * each.n * each.k / each.seconds)
    return reached


def _cpu(profile: Profile, num_ranks: int) -> GpuSpec:
    """Describe a rank's share of the host as a device; its measured rates are reached in full."""
    reached = reached_flops_per_s(profile)
    if not reached:
        raise ConfigError("profile-no-products", "the profile has no matrix product; run shardwise doctor --calibrate")
    copied = profile.copy_bytes_per_s("host", "host") or profile.stream_bytes_per_s or _UNKNOWN_BYTES_PER_S
    return GpuSpec(
        name=CPU,
        memory_bytes=profile.memory_bytes / num_ranks,
        memory_bytes_per_s=profile.stream_bytes_per_s or copied,
        peak_flops_per_s=reached,
        ceiling_flops_per_s=reached,
        link_bytes_per_s=_link_bytes_per_s(profile),
        link_domain=num_ranks,
        host_bytes_per_s=copied,
        nic_bytes_per_s=_link_bytes_per_s(profile),
        num_cores=profile.num_threads,
        fitted=FittedConstants(matmul_share=1.0, memory_share=1.0, network_share=1.0),
    )


def _gpu(profile: Profile) -> GpuSpec:
    """Return the catalogue's device with what was measured of it; an unknown device has only what was measured."""
    reached = reached_flops_per_s(profile)
    stream = profile.stream_bytes_per_s
    known = known_gpu(profile.device)
    if known is None:
        if not reached:
            raise ConfigError(
                "device-not-measured",
                f"{profile.device} is not known and was not measured; run shardwise doctor --calibrate",
            )
        known = GpuSpec(
            name=profile.device,
            memory_bytes=profile.memory_bytes,
            memory_bytes_per_s=stream or _UNKNOWN_BYTES_PER_S,
            peak_flops_per_s=reached,
            link_domain=profile.num_ranks,
            fitted=FittedConstants(matmul_share=0.9, memory_share=1.0, network_share=0.9),
        )
    return replace(
        known,
        memory_bytes=profile.memory_bytes or known.memory_bytes,
        ceiling_flops_per_s={**known.ceiling_flops_per_s, **reached},
        link_bytes_per_s=_link_bytes_per_s(profile) if profile.collectives else known.link_bytes_per_s,
        host_bytes_per_s=profile.copy_bytes_per_s("host", "device") or known.host_bytes_per_s,
    )


def _link_bytes_per_s(profile: Profile) -> float:
    """Return what each rank sends a second, as a ring, in the best all-gather; else the speed of a copy."""
    gathers = [each for each in profile.collectives if each.op == "all_gather"]
    if not gathers:
        return profile.copy_bytes_per_s("host", "host") or _UNKNOWN_BYTES_PER_S
    return max(each.num_bytes * (each.num_ranks - 1) / each.num_ranks / each.seconds for each in gathers)
