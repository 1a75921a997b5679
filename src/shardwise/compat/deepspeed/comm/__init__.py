"""Offer `deepspeed.comm`: torch's collectives by their own names, and the start of the process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp as ReduceOp

from shardwise.launch.process_group import ensure_process_group


def init_distributed(
    dist_backend: str | None = None, *args: Any, timeout: timedelta = timedelta(minutes=30), **options: Any
) -> None:
    """Join the process group where there is none; the launcher's environment names its ranks, MPI's and Slurm's too.

    Of the arguments, which are those of DeepSpeed, only `timeout` counts.
    """
    ensure_process_group("cuda" if torch.cuda.is_available() else "cpu", timeout.total_seconds())


def get_local_rank() -> int:
    """Return the rank among those of this machine."""
    return dist.get_node_local_rank(fallback_rank=0)


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def __getattr__(name: str) -> Any:
    return getattr(dist, name)  # the others have the same names and arguments
