"""Offer `deepspeed.comm`: torch's collectives by their own names, and the start of the process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp as ReduceOp

from shardwise.launch.process_group import ensure_process_group


def init_distributed(  # noqa: PLR0913  DeepSpeed's arguments
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = timedelta(minutes=30),
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group where there is none; the arguments are those of DeepSpeed.

    All but `timeout` say nothing here: the launcher's environment names the ranks, of MPI and Slurm too.
    """
    ensure_process_group("cuda" if torch.cuda.is_available() else "cpu", timeout.total_seconds())


def get_local_rank() -> int:
    """Return the rank among those of this machine."""
    return dist.get_node_local_rank(fallback_rank=0)


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def is_available() -> bool:
    """Say whether torch can connect ranks."""
    return dist.is_available()


def __getattr__(name: str) -> Any:
    return getattr(dist, name)  # the others have the same names and arguments
