"""Describes this machine as a cluster, with its measured speeds or, without those, its GPUs' data sheets.

It imports torch, which `shardwise.cli.plan` does not before it knows that the question is right.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shardwise.config.resolve import ConfigError
from shardwise.launch.local import default_num_ranks
from shardwise.planner.hardware import CPU, Cluster, cluster_of, known_gpu
from shardwise.planner.profile import find_profile


def this_machine(folder: Path, num_ranks: int | None = None) -> Cluster:
    """Return this machine with all of its GPUs, or with as many processes as `shardwise train` starts.

    Args:
        folder: the folder that profiles are kept in.
        num_ranks: the number of ranks instead; None for that default.

    Raises:
        ConfigError: the machine was not measured, and has no GPU that the catalogue knows.
    """
    if not torch.cuda.is_available():
        ranks = num_ranks or default_num_ranks("cpu")
        profile = find_profile(folder, CPU, ranks)
        if profile is None:
            raise ConfigError(
                "machine-not-measured",
                "this machine has no GPU and was not measured; run shardwise doctor --calibrate, or plan for another "
                "by --cluster h100:8",
            )
        return cluster_of(profile, ranks)
    name, ranks = torch.cuda.get_device_name(0), num_ranks or torch.cuda.device_count()
    profile = find_profile(folder, name, ranks)
    if profile is not None:
        return cluster_of(profile, ranks)
    gpu = known_gpu(name)
    if gpu is None:
        raise ConfigError(
            "device-not-measured",
            f"{name} is no device that the planner knows; run shardwise doctor --calibrate to measure it",
        )
    return Cluster(gpu=gpu, num_gpus=ranks, gpus_per_node=ranks, nic_bytes_per_s=gpu.nic_bytes_per_s)
