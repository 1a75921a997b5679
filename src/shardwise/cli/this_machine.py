"""Read which cluster a command is about: one by name or file, or this machine with its measured speeds.

A machine that was not measured has the data sheet's of its GPUs.
"""

from __future__ import annotations

import os

from shardwise.config.errors import ConfigError
from shardwise.launch.environment import cache_folder
from shardwise.launch.local import default_num_ranks
from shardwise.planner.hardware import CPU, Cluster, Host, cluster_of, known_gpu, parse_cluster
from shardwise.planner.profile import find_profile
from shardwise.report.console import progress
from shardwise.report.planned import HERE


def read_cluster(text: str | None, num_ranks: int | None = None) -> Cluster:
    """Return the cluster that `--cluster` names; None, and "here" of a plan's file, are this machine.

    Args:
        num_ranks: of this machine; None for all of its GPUs, or as many processes as `shardwise train` starts.

    Raises:
        ConfigError: there is none of that name, or this machine was not measured and the catalogue has no such GPU.
    """
    if text is not None and text != HERE:
        return parse_cluster(text)
    with progress("starting torch"):
        from shardwise.runtime.device import choose_kind, current_device, device_name

        row = choose_kind("auto")
        name = CPU if row.is_cpu else device_name(current_device(row))
        ranks = num_ranks or default_num_ranks("auto")
    profile = find_profile(cache_folder(os.environ), name, ranks)
    if profile is not None:
        return cluster_of(profile, ranks)
    gpu = None if row.is_cpu else known_gpu(name)
    if gpu is not None:
        memory = Host(memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return Cluster(gpu=gpu, num_gpus=ranks, gpus_per_node=ranks, nic_bytes_per_s=gpu.nic_bytes_per_s, host=memory)
    raise ConfigError(
        "machine-not-measured",
        f"this machine's {name} is not in the planner's catalogue and was not measured; run shardwise doctor "
        "--calibrate, or plan for another by --cluster h100:8",
    )
