"""Collectives: the only place that calls them. Each is counted by axis, and carries a number and a name.

Gradients are summed in fp32 or wider, whatever travels. gloo sums in the dtype on the wire, and moves twice a
reduce-scatter's bytes; NCCL sums in the dtype on the wire too. So a reduction whose wire is narrower than fp32, and any
reduction on gloo, is an all-to-all with a local sum; NCCL's native collectives carry the others. gloo's all-gather is
slower than the same bytes point to point (`benchmarks/primitives.py`), so there it is sends and receives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.pool import BufferPool
from shardwise.precision import sum_chunks
from shardwise.streams import Event, LaneName, Streams

Result = TypeVar("Result")


class CommError(RuntimeError):
    """A collective failed; the message says which rank waited in which collective."""


@dataclass(frozen=True)
class Call:
    """One collective of this rank: its number counts up over all collectives of one `Comm`."""

    number: int
    op: str
    name: str
    axis: str
    num_ranks: int
    dtype: torch.dtype
    wire_bytes: int

    def __str__(self) -> str:
        return f"{self.op} #{self.number} of {self.name} over {self.axis} ({self.num_ranks} ranks)"


@dataclass
class Count:
    """Calls and bytes of one op on one axis."""

    num_calls: int = 0
    wire_bytes: int = 0


class Pending:
    """A collective under way; `wait` makes its result usable on the current stream, and may be called again."""

    def __init__(self, wait: Callable[[], None] | None) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Finish the collective; a second call does nothing."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()


class Comm:
    """Counted collectives over one process group.

    Args:
        group: the ranks that communicate.
        axis: their name in counts and messages, such as `dp_shard`.
        device: where the tensors lie.
        timeout_s: a collective on gloo that waits longer fails.
        streams: side streams on CUDA.
        pool: receive buffers come from here.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        axis: str,
        device: torch.device,
        timeout_s: float,
        streams: Streams,
        pool: BufferPool,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.axis = axis
        self.device = device
        self.counts: dict[tuple[str, str], Count] = {}
        self.recent: deque[Call] = deque(maxlen=32)
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        self._streams = streams
        self._pool = pool
        self._is_nccl = dist.get_backend(group) == "nccl" or device.type == "cuda"
        self._num_calls = 0

    def all_gather(self, full: Tensor, name: str) -> Pending:
        """Fill `full` [n * s] with every rank's slice; this rank's own slice stands in it already."""
        call = self._count("all_gather", name, full, passes=1)
        if self._is_nccl:
            return self._enqueue("gather", call, lambda: self._native_all_gather(full))
        return self._start(call, lambda: self._exchange_slices(full))

    def reduce_scatter(self, source: Tensor, out: Tensor, *, accumulate: bool, name: str) -> Pending:
        """Sum `source` [n * s] over the ranks and leave this rank's slice in `out` [s].

        Args:
            source: in the dtype that travels; must not change until the collective is waited for.
            out: in the dtype of the accumulator; may be this rank's slice of `source`'s storage.
            accumulate: add to what `out` holds.
            name: for counts and messages.
        """
        call = self._count("reduce_scatter", name, source, passes=1)
        if self._is_nccl:
            return self._enqueue("reduce", call, lambda: self._native_reduce_scatter(source, out, accumulate))
        received = self._pool.acquire(source.numel(), source.dtype)

        def finish() -> None:
            sum_chunks(out, received.view(self.world_size, -1), accumulate)
            self._pool.release(received)

        return self._start(call, lambda: [self._all_to_all(received, source)], finish)

    def all_reduce(self, buffer: Tensor, wire_dtype: torch.dtype, name: str) -> Pending:
        """Sum `buffer` [n * s], fp32 or wider, over the ranks in place, carrying `wire_dtype`; all get equal bits."""
        if self.world_size == 1:
            return Pending(None)
        if wire_dtype == buffer.dtype:
            call = self._count("all_reduce", name, buffer, passes=2)
            if self._is_nccl:
                return self._enqueue("reduce", call, lambda: dist.all_reduce(buffer, group=self._group))
            return self._start(call, lambda: [_work(dist.all_reduce(buffer, group=self._group, async_op=True))])
        wire = self._pool.acquire(buffer.numel(), wire_dtype)
        wire.copy_(buffer)
        own = self._own_slice(buffer)
        reduced = self.reduce_scatter(wire, own, accumulate=False, name=name)

        def finish() -> None:
            reduced.wait()
            self._own_slice(wire).copy_(own)
            self.all_gather(wire, name).wait()
            buffer.copy_(wire)
            self._pool.release(wire)

        return Pending(finish)

    def sum_scalars(self, values: Tensor, name: str) -> Tensor:
        """Sum a small fp64 vector over the ranks and return it on the host."""
        return self._reduce_scalars(values, dist.ReduceOp.SUM, name)

    def max_scalars(self, values: Tensor, name: str) -> Tensor:
        """The element-wise maximum of a small fp64 vector over the ranks, on the host."""
        return self._reduce_scalars(values, dist.ReduceOp.MAX, name)

    def broadcast(self, buffer: Tensor, name: str) -> None:
        """Give every rank what rank 0 of the group holds."""
        call = self._count("broadcast", name, buffer, passes=1)
        source = dist.get_global_rank(self._group, 0)
        self._start(call, lambda: [_work(dist.broadcast(buffer, source, group=self._group, async_op=True))]).wait()

    def _own_slice(self, full: Tensor) -> Tensor:
        return full.chunk(self.world_size)[self.rank]

    def _native_all_gather(self, full: Tensor) -> None:
        dist.all_gather_into_tensor(full, self._own_slice(full), group=self._group)

    def _native_reduce_scatter(self, source: Tensor, out: Tensor, accumulate: bool) -> None:
        if source.dtype.itemsize >= 4:
            summed = self._pool.acquire(out.numel(), source.dtype)
            dist.reduce_scatter_tensor(summed, source, group=self._group)
            sum_chunks(out, summed.unsqueeze(0), accumulate)
        else:
            summed = self._pool.acquire(source.numel(), source.dtype)
            dist.all_to_all_single(summed, source, group=self._group)
            sum_chunks(out, summed.view(self.world_size, -1), accumulate)
        self._pool.release(summed)

    def _exchange_slices(self, full: Tensor) -> list[dist.Work]:
        slices = full.chunk(self.world_size)
        works = []
        # Each rank starts with its right-hand neighbour, so that no rank is everybody's first.
        for distance in range(1, self.world_size):
            to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            works.append(_work(dist.isend(slices[self.rank], group=self._group, group_dst=to)))
            works.append(_work(dist.irecv(slices[source], group=self._group, group_src=source)))
        return works

    def _all_to_all(self, received: Tensor, source: Tensor) -> dist.Work:
        return _work(dist.all_to_all_single(received, source, group=self._group, async_op=True))

    def _reduce_scalars(self, values: Tensor, op: dist.ReduceOp.RedOpType, name: str) -> Tensor:
        call = self._count("all_reduce_scalars", name, values, passes=2)
        self._start(call, lambda: [_work(dist.all_reduce(values, op=op, group=self._group, async_op=True))]).wait()
        return values.cpu()

    def _count(self, op: str, name: str, buffer: Tensor, passes: int) -> Call:
        """Book a collective that sends `passes` times (n - 1)/n of the buffer from each rank, as a ring does."""
        wire_bytes = passes * buffer.numel() * buffer.element_size() * (self.world_size - 1) // self.world_size
        self._num_calls += 1
        call = Call(self._num_calls, op, name, self.axis, self.world_size, buffer.dtype, wire_bytes)
        self.recent.append(call)
        count = self.counts.setdefault((self.axis, op), Count())
        count.num_calls += 1
        count.wire_bytes += wire_bytes
        return call

    def _start(
        self, call: Call, start: Callable[[], list[dist.Work]], finish: Callable[[], None] | None = None
    ) -> Pending:
        """Start works that the host waits for (gloo), then `finish` on the calling thread."""
        works = self._guarded(call, start)

        def wait() -> None:
            self._guarded(call, lambda: self._wait(works))
            if finish is not None:
                finish()

        return Pending(wait)

    def _wait(self, works: list[dist.Work]) -> None:
        for work in works:
            # A timeout would make NCCL's wait block the host; NCCL's own watchdog covers it.
            if self._is_nccl:
                work.wait()
            else:
                work.wait(self._timeout)

    def _enqueue(self, lane: LaneName, call: Call, run: Callable[[], object]) -> Pending:
        """Enqueue a collective and what follows it on a side stream (NCCL); the host never waits."""
        with self._streams.lane(lane):
            self._guarded(call, run)
            done = Event.record(self.device)
        return Pending(done.wait)

    def _guarded(self, call: Call, run: Callable[[], Result]) -> Result:
        try:
            return run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = (str(error).splitlines() or ["no reason given"])[0]
            raise CommError(
                f"rank {self.rank} failed in {call}: {reason}; another rank died, hangs or runs other code: see its log"
            ) from error


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise CommError("this process is not in the group of the collective; build the mesh on every rank")
    return work
