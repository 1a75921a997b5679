"""Give parameters the attributes that scripts read of DeepSpeed's stage-3 parameters, such as `ds_id`, `ds_shape`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn


class ZeroParamType(Enum):
    """Says how ranks share a parameter; here it is always by slices."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """Says whether a parameter is whole."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark(parameter: nn.Parameter, number: int, num_ranks: int, is_kept_whole: bool = False) -> None:
    """Set the attributes of a parameter of which each rank holds a slice.

    `ds_tensor` has the size of a slice and no values: those are the engine's, which lays its slices out otherwise.

    Args:
        parameter: which is not whole, unless `is_kept_whole`.
        is_kept_whole: it is small, and whole on every rank.
    """
    numel = parameter.numel()
    size = -(-numel // num_ranks)
    rank = dist.get_rank() % num_ranks if dist.is_initialized() else 0
    tensor = torch.empty(size, dtype=parameter.dtype, device="meta")
    tensor.__dict__.update(ds_numel=size, status=ZeroParamStatus.AVAILABLE, final_location=None)
    parameter.__dict__.update(
        ds_id=number,
        ds_param_type=ZeroParamType.PARTITIONED,
        ds_shape=torch.Size(parameter.shape),
        ds_numel=numel,
        ds_tensor=tensor,
        ds_secondary_tensor=None,
        ds_status=ZeroParamStatus.AVAILABLE if is_kept_whole else ZeroParamStatus.NOT_AVAILABLE,
        ds_persist=is_kept_whole,
        ds_active_sub_modules=set(),
        ds_process_group=dist.group.WORLD if dist.is_initialized() else None,
        ds_zero_partition_rank=rank,
        ds_zero_partition_world_size=num_ranks,
        is_external_param=False,
        partition_numel=functools.partial(int, size),
        padding_size=functools.partial(int, size * num_ranks - numel),
    )


@contextmanager
def shown_as_whole(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let `ds_status` say inside that the parameters are whole."""
    before = {
        parameter: parameter.__dict__["ds_status"] for parameter in parameters if "ds_status" in parameter.__dict__
    }
    for parameter in before:
        parameter.__dict__["ds_status"] = ZeroParamStatus.AVAILABLE
    try:
        yield
    finally:
        for parameter, status in before.items():
            if "ds_status" in parameter.__dict__:
                parameter.__dict__["ds_status"] = status
