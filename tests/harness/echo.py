"""Communicators to ranks that are echoes of this one, so that one GPU, or a virtual one, shows what streams do.

NCCL cannot put two ranks on one GPU. The others hold what this rank holds: their part of each collective is computed
from it, after a long kernel on a real GPU. What does not wait for it reads what was there before. `NcclComm` itself
runs, over functions that stand for `torch.distributed`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.backends import NcclComm, SimulatedFactory
from shardwise.comm.collectives import AsyncWork, Comm, CommResources, RankPlace
from shardwise.comm.loss import LossAccumulator
from shardwise.layout.mesh_shape import MeshShape
from shardwise.layout.param_groups import GroupSpec

# As bytes of any floating dtype it is a number below one.
FROM_NOWHERE = 0x3F


@dataclass(frozen=True)
class EchoOp:
    """Used as `dist.P2POp`."""

    op: Callable[..., Any]
    tensor: Tensor
    group: None = None
    group_peer: int = 0


class EchoWork:
    """Used as the work of a message: NCCL runs those on a stream of its own."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self, timeout: Any = None) -> None:
        if self._event is not None:
            self._event.wait()

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()


class EchoC10d:
    """Used as `torch.distributed` among a rank and its echoes."""

    ReduceOp = dist.ReduceOp
    P2POp = EchoOp

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self._rank, self._world_size = rank, world_size
        self._messages = torch.cuda.Stream(device) if device.type == "cuda" else None

    def all_gather_into_tensor(self, full: Tensor, own: Tensor, group: None = None) -> None:
        linger(full)
        full.view(self._world_size, -1).copy_(own.clone().view(1, -1))

    def reduce_scatter_tensor(self, out: Tensor, source: Tensor, group: None = None) -> None:
        linger(source)
        out.copy_(source.view(self._world_size, -1)[self._rank] * self._world_size)

    def all_to_all_single(
        self, received: Tensor, source: Tensor, received_sizes: Any = None, sent_sizes: Any = None, **_: Any
    ) -> None:
        linger(source)
        if received_sizes is None:
            received.view(self._world_size, -1).copy_(source.view(self._world_size, -1)[self._rank].view(1, -1))
        else:
            repeat_into(received, source)

    def all_reduce(self, buffer: Tensor, op: Any = dist.ReduceOp.SUM, **_: Any) -> None:
        linger(buffer)
        if op == dist.ReduceOp.SUM:
            buffer.mul_(self._world_size)

    def broadcast(self, buffer: Tensor, **_: Any) -> None:
        linger(buffer)

    def isend(self, tensor: Tensor, **_: Any) -> EchoWork:
        return self.batch_isend_irecv([EchoOp(self.isend, tensor)])[0]

    def irecv(self, tensor: Tensor, **_: Any) -> EchoWork:
        return self.batch_isend_irecv([EchoOp(self.irecv, tensor)])[0]

    def batch_isend_irecv(self, batch: Sequence[EchoOp]) -> list[EchoWork]:
        """Others send what this rank sends in the batch, in its order, over and over where they have more to send."""
        if self._messages is None:
            self._move(batch)
            return [EchoWork(None)]
        self._messages.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._messages):
            self._move(batch)
            return [EchoWork(self._messages.record_event())]

    def _move(self, batch: Sequence[EchoOp]) -> None:
        sent = [entry.tensor for entry in batch if entry.op == self.isend]
        for index, entry in enumerate(entry for entry in batch if entry.op == self.irecv):
            linger(entry.tensor)
            repeat_into(entry.tensor, sent[index % len(sent)] if sent else None)


class EchoComm(NcclComm):
    """NCCL's communicator of a rank and its echoes."""

    def __init__(self, place: RankPlace, resources: CommResources) -> None:
        super().__init__(place, resources, None, EchoC10d(place.rank, place.world_size, resources.device))
        self.is_simulated, self._distances = False, range(1, place.world_size)  # the echoes' tensors have values


class NeverOne(int):
    """A number of ranks that equals no number, so that nothing is left out where there is one rank alone."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


@cache
def lone_group(use: str, world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of one rank; of all engines, since NCCL takes seconds to make one. It ends with the world's."""
    return dist.new_group([0], group_desc=f"tests {use}")


class LoneComm(NcclComm):
    """NCCL's communicator of one rank alone, which calls NCCL where the library leaves a collective out."""

    @contextmanager
    def _as_of_many(self) -> Iterator[None]:
        self.world_size = NeverOne(1)
        try:
            yield
        finally:
            self.world_size = 1

    def all_gather(self, *args: Any, **kwargs: Any) -> AsyncWork:
        with self._as_of_many():
            return super().all_gather(*args, **kwargs)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> AsyncWork:
        with self._as_of_many():
            return super().reduce_scatter(*args, **kwargs)

    def start_sum(self, *args: Any, **kwargs: Any) -> AsyncWork:
        with self._as_of_many():
            return super().start_sum(*args, **kwargs)

    def all_reduce(self, *args: Any, **kwargs: Any) -> AsyncWork:
        with self._as_of_many():
            return super().all_reduce(*args, **kwargs)


class LoneFactory:
    """Makes communicators of one rank alone that call NCCL each time."""

    store = None
    examples: Mapping[int, Any] | None = None
    rank = 0

    def comm(self, axes: tuple[str, ...], use: str, resources: CommResources, axis: str) -> Comm:
        world = dist.group.WORLD
        assert world is not None, "the test has joined a process group"
        return LoneComm(RankPlace(0, 1, axis, (0,)), resources, lone_group(use, world))

    def comm_among(self, axes: tuple[str, ...], indices: tuple[int, ...], use: str, *others: Any) -> Comm | None:
        return self.comm(axes, use, *others)

    def close(self) -> None:
        pass


def one_rank_shards() -> AbstractContextManager[Any]:
    """Let what one rank holds alone be a shard, which is gathered and released: the library keeps it whole."""
    return mock.patch.object(GroupSpec, "is_stored_whole", property(lambda group: group.is_replicated))


class EchoFactory(SimulatedFactory):
    """Makes the communicators around one rank of a mesh, by NCCL's functions."""

    def __init__(self, mesh: MeshShape, rank: int) -> None:
        super().__init__(mesh, rank, "nccl")

    def comm_at(self, place: RankPlace, resources: CommResources) -> Comm:
        return EchoComm(place, resources)


def cancel_deviations(losses: LossAccumulator) -> None:
    """Let the ranks of a tensor-parallel group have one loss: echoes add up what would cancel between ranks."""
    has_one_loss = losses.deviation
    losses.deviation = lambda: torch.zeros_like(has_one_loss())  # type: ignore[method-assign]


def repeat_into(out: Tensor, source: Tensor | None) -> None:
    """Fill a tensor with the values of another, over and over; without one, with a number below one."""
    if source is None:
        out.view(-1).view(torch.uint8).fill_(FROM_NOWHERE)
        return
    num_repeats = -(-out.numel() // max(1, source.numel()))
    out.view(-1).copy_(source.reshape(-1).repeat(num_repeats)[: out.numel()])


def linger(like: Tensor) -> None:
    """Keep the current stream of a real GPU busy, for longer than the host takes to enqueue a layer."""
    if like.is_cuda and torch.version.cuda is not None:
        x = torch.ones(2048, 2048, device=like.device, dtype=torch.float64)
        x @ x
