"""Collectives on tensors of any shape among the ranks of a tensor-parallel group: out of place, and waited for.

They are `Comm`'s, so they are counted and named; this is their shape arithmetic. Concatenation and slices are along one
dim; ranks hold equal slices. Over tp=2 of a 2x2 mesh, ranks (0, 1) and (2, 3) talk among themselves.

On NCCL they run on the current stream, as nothing could overtake them; only what is started ahead of its use runs
beside it, in a lane where no gather of parameters and no reduction of gradients is queued.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.comm.collectives import Comm
from shardwise.runtime.streams import LaneName


def all_reduce(comm: Comm, x: Tensor, name: str) -> Tensor:
    """The sum over the ranks, equal bits on all of them, in the dtype of `x`; summed in fp32 or wider on gloo."""
    x = x.contiguous()
    summed = torch.empty_like(x)
    comm.start_sum(x.view(-1), summed.view(-1), name, lane=None).wait()
    return summed


def maximum(comm: Comm, x: Tensor, name: str) -> Tensor:
    """The element-wise maximum over the ranks."""
    largest = x.clone(memory_format=torch.contiguous_format)
    comm.max_in_place(largest.view(-1), name)
    return largest


def all_gather(comm: Comm, x: Tensor, dim: int, name: str) -> Tensor:
    """The ranks' tensors, concatenated along `dim` in rank order."""
    return start_all_gather(comm, x, dim, name, lane=None)()


def start_all_gather(
    comm: Comm, x: Tensor, dim: int, name: str, lane: LaneName | None = "tensor"
) -> Callable[[], Tensor]:
    """Start `all_gather`, in `lane` on NCCL; what is returned waits for it and gives the result."""
    n, dim = comm.world_size, dim % x.dim()
    shape = (*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])
    # Where nothing lies before the dim, the slices arrive in place; and what autograd gets must not be a view.
    arrives_in_place = math.prod(x.shape[:dim]) == 1
    gathered = x.new_empty(shape if arrives_in_place else (n, *x.shape))
    gathered.view(n, *x.shape)[comm.rank].copy_(x)
    pending = comm.all_gather(gathered.view(-1), name, lane)

    def finish() -> Tensor:
        pending.wait()
        return gathered if arrives_in_place else gathered.movedim(0, dim).reshape(shape)

    return finish


def reduce_scatter(comm: Comm, x: Tensor, dim: int, name: str) -> Tensor:
    """This rank's slice along `dim` of the sum over the ranks.

    Raises:
        ValueError: the dim does not divide evenly.
    """
    n, dim = comm.world_size, dim % x.dim()
    if x.shape[dim] % n:
        below = x.shape[dim] // n * n
        raise ValueError(f"{name}: length {x.shape[dim]} does not divide by tp={n}; nearest: {below}, {below + n}")
    slices = x.unflatten(dim, (n, -1)).movedim(dim, 0).contiguous()  # [n, ..., length / n, ...]
    out = torch.empty_like(slices[0])
    comm.scatter_sum(slices.view(-1), out.view(-1), name, lane=None).wait()
    return out
