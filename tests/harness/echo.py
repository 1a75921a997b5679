"""Links to ranks that are echoes of this one, used as NCCL's are, so that one GPU shows what streams and events do.

NCCL cannot put two ranks on one GPU. The others hold what this rank holds: their part of each collective is computed
from it, after a long kernel. What does not wait for it reads what was there before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout.mesh_shape import MeshShape


class EchoLinks:
    """Links to ranks that hold what this one holds; used as NCCL's are."""

    waits_on_host = moves_nothing = False

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def all_gather(self, full: Tensor) -> list[dist.Work]:
        slices = full.view(self.world_size, -1)
        linger(full)
        slices.copy_(slices[self.rank].clone())
        return []

    def all_to_all(self, received: Tensor, source: Tensor) -> list[dist.Work]:
        linger(source)
        received.view(self.world_size, -1).copy_(source.view(self.world_size, -1)[self.rank])
        return []

    def reduce_scatter(self, out: Tensor, source: Tensor) -> list[dist.Work]:
        linger(source)
        out.copy_(source.view(self.world_size, -1)[self.rank] * self.world_size)
        return []

    def exchange_all(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> list[dist.Work]:
        """Others send what this rank sends, over and over where they have more to send."""
        sent = [tensor.view(-1) for tensors in sends.values() for tensor in tensors]
        for tensors in receives.values():
            for tensor in tensors:
                linger(tensor)
                pool = torch.cat([each for each in sent if each.dtype == tensor.dtype] or [tensor.new_full((1,), 0.5)])
                tensor.view(-1).copy_(pool.repeat(-(-tensor.numel() // pool.numel()))[: tensor.numel()])
        return []

    def all_reduce(self, buffer: Tensor, op: dist.ReduceOp.RedOpType) -> list[dist.Work]:
        linger(buffer)
        if op == dist.ReduceOp.SUM:
            buffer.mul_(self.world_size)
        return []

    def broadcast(self, buffer: Tensor) -> list[dist.Work]:
        return []

    def read(self, values: Tensor, known: Sequence[float]) -> list[float]:
        return values.tolist()


class EchoNetwork:
    """A network around one rank of a mesh."""

    store = None

    def __init__(self, mesh: MeshShape, rank: int) -> None:
        self.rank, self._mesh = rank, mesh

    def links(self, axes: tuple[str, ...], use: str) -> EchoLinks:
        return EchoLinks(self._mesh.index_along(axes, self.rank), self._mesh.size_along(axes))

    def close(self) -> None:
        pass


def linger(like: Tensor) -> None:
    """Keep the current stream of a GPU busy, for longer than the host takes to enqueue a layer."""
    if like.is_cuda:
        x = torch.ones(2048, 2048, device=like.device, dtype=torch.float64)
        x @ x
