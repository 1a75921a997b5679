"""Links over a process group of torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm_books import CommError

_NEVER_SENT: Final = 2**31 - 1  # a tag


class GroupLinks:
    """Links over a process group.

    Args:
        group: the ranks that communicate.
        device: where the tensors lie.
    """

    moves_nothing = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.waits_on_host = not (dist.get_backend(group) == "nccl" or device.type == "cuda")
        self._group = group
        self._device = device
        self._is_connected = self.waits_on_host

    def all_gather(self, full: Tensor) -> list[dist.Work]:
        """Fill `full` [n * s]: natively on NCCL, by sends and receives on gloo."""
        slices = full.chunk(self.world_size)
        if not self.waits_on_host:
            dist.all_gather_into_tensor(full, slices[self.rank], group=self._group)
            return []
        works = []
        # Each rank starts with its right-hand neighbour, so that no rank is everybody's first.
        for distance in range(1, self.world_size):
            to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            works += _works(dist.isend(slices[self.rank], group=self._group, group_dst=to))
            works += _works(dist.irecv(slices[source], group=self._group, group_src=source))
        return works

    def all_to_all(self, received: Tensor, source: Tensor) -> list[dist.Work]:
        """Exchange slices of equal length."""
        return self._works(dist.all_to_all_single(received, source, group=self._group, async_op=self.waits_on_host))

    def exchange(self, received: Tensor, source: Tensor) -> list[dist.Work]:
        """A send and a receive; on gloo only."""
        other = 1 - self.rank
        return [
            *_works(dist.isend(source, group=self._group, group_dst=other)),
            *_works(dist.irecv(received, group=self._group, group_src=other)),
        ]

    def exchange_all(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> list[dist.Work]:
        """As bytes and in one batch, so that on NCCL no order of sends and receives deadlocks."""
        if not self._is_connected:
            # NCCL makes a communicator with the first batch, in which all ranks must take part: not all might.
            dist.all_reduce(torch.zeros(1, dtype=torch.uint8, device=self._device), group=self._group)
            self._is_connected = True
        batch = []
        for distance in range(1, self.world_size):
            to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            for op, peer, buffers in ((dist.isend, to, sends), (dist.irecv, source, receives)):
                moved = map(_bytes_of, buffers.get(peer, ()))
                batch += [dist.P2POp(op, each, group=self._group, group_peer=peer) for each in moved]
        return self._in_stream(dist.batch_isend_irecv(batch)) if batch else []

    def reduce_scatter(self, out: Tensor, source: Tensor) -> list[dist.Work]:
        """Sum in the dtype on the wire."""
        return self._works(dist.reduce_scatter_tensor(out, source, group=self._group, async_op=self.waits_on_host))

    def all_reduce(self, buffer: Tensor, op: dist.ReduceOp.RedOpType) -> list[dist.Work]:
        """Reduce in place."""
        return self._works(dist.all_reduce(buffer, op=op, group=self._group, async_op=self.waits_on_host))

    def broadcast(self, buffer: Tensor) -> list[dist.Work]:
        """Send from the group's rank 0."""
        source = dist.get_global_rank(self._group, 0)
        return self._works(dist.broadcast(buffer, source, group=self._group, async_op=self.waits_on_host))

    def send(self, buffer: Tensor, to: int, tag: int = 0) -> list[dist.Work]:
        """As bytes, so that any dtype travels. `isend` and not a batch, whose communicator is the whole group's."""
        return self._in_stream(_works(dist.isend(_bytes_of(buffer), group=self._group, group_dst=to, tag=tag)))

    def receive(self, buffer: Tensor, source: int, tag: int = 0) -> list[dist.Work]:
        """Of the sender's bytes, into the buffer's own memory."""
        return self._in_stream(_works(dist.irecv(_bytes_of(buffer), group=self._group, group_src=source, tag=tag)))

    def hang_up(self) -> None:
        """On gloo end all messages of the group, and those that others wait for."""
        if dist.get_backend(self._group) != "gloo":
            return
        for peer in set(range(self.world_size)) - {self.rank}:
            # A receive whose time is over closes all connections of the group; where one is closed already, it fails.
            with suppress(RuntimeError):
                never = dist.irecv(torch.empty(1), group=self._group, group_src=peer, tag=_NEVER_SENT)
                _works(never)[0].wait(timedelta(milliseconds=1))

    def read(self, values: Tensor, known: Sequence[float]) -> list[float]:
        """The numbers of a reduced vector, on the host."""
        return values.tolist()

    def _works(self, work: dist.Work | None) -> list[dist.Work]:
        return _works(work) if self.waits_on_host else []

    def _in_stream(self, works: list[dist.Work]) -> list[dist.Work]:
        """NCCL runs messages on a stream of its own: let the current one wait, so that they are in its order."""
        if self.waits_on_host:
            return works
        for work in works:
            work.wait()
        return []


def _bytes_of(buffer: Tensor) -> Tensor:
    """A contiguous tensor's memory [b], as uint8."""
    return buffer.view(-1).view(torch.uint8)


def _works(work: dist.Work | None) -> list[dist.Work]:
    if work is None:
        raise CommError("this process is not in the group of the collective; build the mesh on every rank")
    return [work]
