"""Run collectives on tensors of any shape over a tensor-parallel group, out of place, and wait for them.

They are `Comm`'s, so they are counted and named; this module adds the shape arithmetic. Concatenation and slices are
along one dim; ranks hold equal slices. Over tp=2 of a 2x2 mesh, ranks (0, 1) form one group and (2, 3) another.

On NCCL they run on the current stream, because nothing could overlap with them. Only a collective that is started
before its use runs on a side stream, where no gather of parameters and no reduction of gradients is queued.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.comm.collectives import Comm
from shardwise.config.errors import ConfigError
from shardwise.runtime.device import StreamName


def all_reduce(comm: Comm, x: Tensor, name: str) -> Tensor:
    """Return the sum of `x` over `comm`, counted as `name`: equal bits on all ranks; gloo sums in fp32 or wider."""
    x = x.contiguous()
    summed = torch.empty_like(x)
    comm.start_sum(x.view(-1), summed.view(-1), name, stream=None).wait()
    return summed


def maximum(comm: Comm, x: Tensor, name: str) -> Tensor:
    """Return the element-wise maximum of `x` over the ranks of `comm`; counted as `name`."""
    largest = x.clone(memory_format=torch.contiguous_format)
    comm.max_in_place(largest.view(-1), name)
    return largest


def all_gather(comm: Comm, x: Tensor, dim: int, name: str) -> Tensor:
    """Return the tensors `x` of the ranks of `comm`, concatenated along `dim` in rank order; counted as `name`."""
    return start_all_gather(comm, x, dim, name, stream=None)()


def start_all_gather(
    comm: Comm, x: Tensor, dim: int, name: str, stream: StreamName | None = "tensor"
) -> Callable[[], Tensor]:
    """Start `all_gather` and return a function that waits for it and returns the result.

    Args:
        dim: along which the slices are concatenated.
        stream: the side stream on NCCL; None for the current stream.
    """
    n, dim = comm.world_size, dim % x.dim()
    shape = (*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])
    # Where all dims before `dim` have size 1, the slices arrive in place; autograd must not get a view.
    arrives_in_place = math.prod(x.shape[:dim]) == 1
    gathered = x.new_empty(shape if arrives_in_place else (n, *x.shape))
    gathered.view(n, *x.shape)[comm.rank].copy_(x)
    pending = comm.all_gather(gathered.view(-1), name, stream)

    def finish() -> Tensor:
        pending.wait()
        return gathered if arrives_in_place else gathered.movedim(0, dim).reshape(shape)

    return finish


def reduce_scatter(comm: Comm, x: Tensor, dim: int, name: str) -> Tensor:
    """Return this rank's slice along `dim` of the sum over the ranks.

    Args:
        x: the summand, of the whole length.

    Raises:
        ConfigError: the dim does not divide evenly.
    """
    n, dim = comm.world_size, dim % x.dim()
    if x.shape[dim] % n:
        below = x.shape[dim] // n * n
        raise ConfigError(
            "tp-divides-tokens",
            f"{name}: length {x.shape[dim]} does not divide by tp={n}; nearest: {below}, {below + n}",
        )
    slices = x.unflatten(dim, (n, -1)).movedim(dim, 0).contiguous()  # [n, ..., length / n, ...]
    out = torch.empty_like(slices[0])
    comm.scatter_sum(slices.view(-1), out.view(-1), name, stream=None).wait()
    return out
