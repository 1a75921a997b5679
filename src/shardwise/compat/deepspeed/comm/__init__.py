"""Offer `deepspeed.comm`: torch's collectives by their own names, and the start of the process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import ReduceOp as ReduceOp
from torch.distributed.device_mesh import init_device_mesh

from shardwise.compat.deepspeed.finder import answers
from shardwise.config.errors import ConfigError
from shardwise.launch.process_group import ensure_process_group, join_named
from shardwise.runtime.device import choose_kind

_OF_TORCH: Final = MappingProxyType(
    {
        "allgather_fn": "all_gather_into_tensor",
        "reduce_scatter_fn": "reduce_scatter_tensor",
        "inference_all_reduce": "all_reduce",
    }
)
_answer = answers(__name__)


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
    """Join the process group where there is none; the launcher's environment names its ranks, MPI's and Slurm's too.

    The arguments are those of DeepSpeed. `init_method`, `rank` and `world_size` count where the environment says no
    ranks, or others; the backend follows from the device.

    Raises:
        ConfigError: `dist_init_required` is False, and there is no process group.
    """
    if dist_init_required is False and not dist.is_initialized():
        raise ConfigError(
            "process-group-missing",
            "dist_init_required=False says that a process group is there, and none is; call "
            "deepspeed.init_distributed() before, or leave dist_init_required out",
        )
    device = choose_kind("auto").name
    seconds = timeout.total_seconds()
    if (rank >= 0 and world_size > 0) or init_method not in (None, "env://"):
        join_named(init_method, rank, world_size, device, seconds)
    else:
        ensure_process_group(device, seconds)


def get_local_rank() -> int:
    """Return the rank among those of this machine."""
    return dist.get_node_local_rank(fallback_rank=0)


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the ranks of a group, in its order."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the rank in the world of a rank of a group."""
    process_group: Any = group or dist.group.WORLD
    return dist.get_global_rank(process_group, group_rank)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Return torch's mesh of the ranks; all ranks make it together."""
    init_distributed()
    return init_device_mesh(choose_kind("auto").name, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Say where to find what ranks send: the engine counts it; the arguments are those of DeepSpeed."""
    print("communication is counted by the engine: engine.inner.comm.comm_log, and `shardwise simulate` before a run")
    return {} if return_dict else None


def configure(*args: Any, **options: Any) -> None:
    """Do nothing: the engine counts what ranks send; the arguments are those of DeepSpeed."""


def has_all_reduce_coalesced() -> bool:
    """Say whether torch has it."""
    return hasattr(dist, "all_reduce_coalesced")


def has_reduce_scatter_tensor() -> bool:
    """Return True: torch has it."""
    return True


has_all_gather_into_tensor = has_reduce_scatter_tensor


def __getattr__(name: str) -> Any:
    # The others have the same names and arguments; what torch has no word for is answered by DeepSpeed's name.
    of_torch = _OF_TORCH.get(name, name)
    return _answer(name) if name.startswith("__") or not hasattr(dist, of_torch) else getattr(dist, of_torch)
