"""Collectives are counted by axis, and each has a number and a name; `Comm` is the only caller of torch's.

Gradients are summed in fp32 or wider for any wire dtype. gloo sums in the dtype on the wire, and moves twice a
reduce-scatter's bytes; NCCL sums in the dtype on the wire too. So a reduction whose wire is narrower than fp32, and any
reduction on gloo, is an all-to-all with a local sum; NCCL's native collectives carry the others. gloo's all-gather is
slower than the same bytes point to point (`benchmarks/primitives.py`), so there it is sends and receives; and so is a
small or narrow sum of two ranks' activations. NCCL sums activations natively, in their own dtype, as Megatron-LM does.

`Comm` is what all back ends share: it counts, numbers, names and launches. `shardwise.comm.backends` has gloo's and
NCCL's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.records import Collective, CommError, CommLog, MissingRankError
from shardwise.layout.mesh_shape import MeshShape
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import Event, P2PStreamKey, StreamName, Streams, kind_of

if TYPE_CHECKING:
    from shardwise.comm.tokens import TokenExchange


class AsyncWork:
    """Is a collective under way; `wait` makes its result usable on the current stream, and may be called again.

    Args:
        wait: waits for the collective; None where there is nothing to wait for.
        then: starts a second collective on the result of the first, and returns that one; None for no second one.
    """

    def __init__(self, wait: Callable[[], None] | None = None, then: Callable[[], AsyncWork] | None = None) -> None:
        self._wait = wait
        self._then = then
        self._second: AsyncWork | None = None

    def advance(self) -> None:
        """Finish the collective that is under way and start the one that follows it, if there is one."""
        if self._second is not None:
            self._second.advance()
            return
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()
        if self._then is not None:
            then, self._then = self._then, None
            self._second = then()

    def wait(self) -> None:
        """Finish all collectives."""
        self.advance()
        if self._second is not None:
            self._second.wait()

    def followed_by(self, end: Callable[[], object]) -> AsyncWork:
        """Return this work with `end` after the last of its collectives; it advances as it would alone."""

        def finish() -> None:
            self.wait()
            end()

        return AsyncWork(self.advance, lambda: AsyncWork(finish))


@dataclass(frozen=True)
class ScalarSum:
    """Holds a few numbers that are reduced over the ranks.

    Attributes:
        on_device: fp64, 1-D; right for what is enqueued after it.
        read: returns them on the host, which waits until the device has come to them; not for what is enqueued later.
    """

    on_device: Tensor
    read: Callable[[], list[float]]


class Launch:
    """Is a collective that a back end is starting: it collects what the host waits for.

    Attributes:
        works: torch's, of gloo; none where collectives run in the order of a stream.
        wait: waits for the collective, once it is started; None where there is nothing to wait for.
        done: the event after it on the device; None on gloo, and where nothing waits.
    """

    def __init__(self) -> None:
        self.works: list[dist.Work] = []
        self.done: Event | None = None
        self.wait: Callable[[], None] | None = None

    def add(self, *works: dist.Work | None) -> None:
        """Wait for torch's `works` too; None is over already."""
        self.works += [work for work in works if work is not None]

    def as_work(self) -> AsyncWork:
        """Return the collective, which is under way."""
        return AsyncWork(self.wait)


@dataclass(frozen=True)
class CommResources:
    """Bundles what the communicators of one engine share.

    Attributes:
        timeout_s: seconds; a collective on gloo that waits longer fails.
    """

    device: torch.device
    timeout_s: float
    streams: Streams
    pool: BufferPool
    comm_log: CommLog

    @classmethod
    def alone(cls, device: torch.device, timeout_s: float, pool: BufferPool | None = None) -> CommResources:
        """Return the resources of a communicator that belongs to no engine.

        Args:
            timeout_s: seconds; a collective on gloo that waits longer fails.
            pool: receive buffers come from here; None for a pool of its own.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        return cls(device, timeout_s, Streams(device), pool or BufferPool(device), CommLog(rank))


@dataclass(frozen=True)
class RankPlace:
    """Says where this process is among the ranks that communicate.

    Attributes:
        rank: of this process in the group.
        axis: the ranks' name in counts and messages, such as `dp_shard`.
        ranks: of the world, in the order of the group; empty where the group is the world.
    """

    rank: int
    world_size: int
    axis: str
    ranks: tuple[int, ...] = ()


class CommFactory(Protocol):
    """Makes the communicators of an engine's groups of ranks.

    Attributes:
        rank: of this process in the world.
        store: through which ranks exchange text outside of collectives; None where there is one process.
        examples: where other ranks are simulated, what each stage of a pipeline receives, by stage; None where they are
            real, or there is no pipeline.
    """

    rank: int
    store: dist.Store | None
    examples: Mapping[int, Any] | None

    def comm(self, axes: tuple[str, ...], use: str, resources: CommResources, axis: str) -> Comm:
        """Connect the ranks that differ from this one along `axes` only; each use has its communicator.

        Args:
            axis: the name in counts and messages.
        """

    def comm_among(
        self, axes: tuple[str, ...], indices: tuple[int, ...], use: str, resources: CommResources, axis: str
    ) -> Comm | None:
        """Connect some of those ranks; None where this rank is none of them.

        Args:
            axes: axes of the mesh along which the ranks differ.
            indices: of the ranks along these axes, ascending.
            use: what the collectives are for; each use has its communicator.
            axis: the name in counts and messages.
        """

    def on_mesh(self, shape: MeshShape) -> CommFactory:
        """Return the factory for the same ranks on a mesh of another shape; what either makes, both have."""

    def close(self) -> None:
        """Free what was made."""


class Comm(ABC):
    """Runs counted collectives among the ranks of one group; a back end says how each of them moves its data.

    Collectives that the host waits for belong to it from their start until they have been waited for.

    Args:
        place: of this process in the group.
        group: of torch; None where the other ranks are simulated.
        c10d: has the functions of `torch.distributed`; another object simulates them.

    Attributes:
        waits_on_host: the host waits for collectives (gloo); otherwise they run in the order of a stream (NCCL).
        is_simulated: the other ranks are not there, and tensors have no values.
        token_exchange: moves rows between ranks in the place of c10d, if it is not None.
    """

    waits_on_host: bool

    def __init__(
        self, place: RankPlace, resources: CommResources, group: dist.ProcessGroup | None, c10d: Any = dist
    ) -> None:
        self.rank = place.rank
        self.world_size = place.world_size
        self.axis = place.axis
        self.device = resources.device
        self._kind = kind_of(resources.device)
        self.is_simulated = c10d is not dist
        self.comm_log = resources.comm_log
        self.comm_log.comms.add(self)
        self._ranks = self.comm_log.open_group(place.axis, place.ranks or tuple(range(place.world_size)))
        self._group = group
        self._c10d = c10d
        self._timeout = timedelta(seconds=resources.timeout_s)
        self._streams = resources.streams
        self._pool = resources.pool
        self._in_flight: set[Launch] = set()
        self.token_exchange: TokenExchange | None = None
        self._is_connected = self.waits_on_host
        # Simulated ranks are not addressed one by one: there may be thousands.
        self._distances = range(1, 1 if self.is_simulated else place.world_size)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Return torch's group of these ranks, for programs that ask for it."""
        return self._group

    def register_token_exchange(self, exchange: TokenExchange | None) -> None:
        """Let a function move rows between ranks in the place of c10d; None for c10d again."""
        self.token_exchange = exchange

    @abstractmethod
    def all_gather(self, full: Tensor, name: str, stream: StreamName | None = "gather") -> AsyncWork:
        """Fill `full` [n * s] with every rank's slice; this rank's own slice is in it already.

        Args:
            stream: the side stream on which it runs on NCCL; None for the current stream.
        """

    @abstractmethod
    def reduce_scatter(self, source: Tensor, out: Tensor, *, accumulate: bool, name: str) -> AsyncWork:
        """Sum `source` [n * s] over the ranks and leave this rank's slice in `out` [s].

        Args:
            source: in the wire dtype; must not change until the collective is waited for.
            out: in the dtype of the accumulator; may be this rank's slice of `source`'s storage.
        """

    @abstractmethod
    def start_sum(self, source: Tensor, out: Tensor, name: str, stream: StreamName | None) -> AsyncWork:
        """Start to put into `out` [n] the sum of `source` [n] over the ranks; it sums as `sum_in_place` does.

        Args:
            source: must not change until the collective is waited for.
            out: of the same dtype; may be `source` itself.
        """

    @abstractmethod
    def scatter_sum(self, source: Tensor, out: Tensor, name: str, stream: StreamName | None) -> AsyncWork:
        """Start to put into `out` [s] this rank's slice of the sum of `source` [n * s]; it sums as `sum_in_place` does.

        Args:
            source: must not change until the collective is waited for.
            out: of the same dtype, and other storage.
        """

    def post_send(self, buffer: Tensor, to: int, tag: int = 0) -> list[dist.Work]:
        """Send a contiguous tensor, not empty, to rank `to` of the group, whose receives of this tag take it in order.

        It is sent as bytes, which works for any dtype, and counted by its caller. It is no batch: on NCCL that would
        run over the communicator of the whole group.

        Args:
            buffer: must not change until the message is sent.
            tag: of the message; it has no effect on NCCL, where messages from one rank to another are taken in order.
        """
        work = self._c10d.isend(_bytes_of(buffer), group=self._group, group_dst=to, tag=tag)
        return self._in_stream([] if work is None else [work])

    def post_receive(self, buffer: Tensor, source: int, tag: int = 0) -> list[dist.Work]:
        """Receive into a contiguous tensor, as large as what `source` sends."""
        work = self._c10d.irecv(_bytes_of(buffer), group=self._group, group_src=source, tag=tag)
        return self._in_stream([] if work is None else [work])

    def post_all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: list[int] | None, sent_sizes: list[int] | None
    ) -> dist.Work | None:
        """Send each rank its part of a contiguous tensor; sizes are bytes by rank, None for equal ones."""
        operands = (_bytes_of(received), _bytes_of(sent), received_sizes, sent_sizes)
        return self._c10d.all_to_all_single(*operands, group=self._group, async_op=self.waits_on_host)

    @abstractmethod
    def hang_up(self) -> None:
        """End all messages of the group, which others may wait for: on gloo those fail at once, and so do later ones.

        On NCCL they wait until their time-out.
        """

    def all_reduce(self, buffer: Tensor, wire_dtype: torch.dtype, name: str, wire: Tensor | None = None) -> AsyncWork:
        """Sum `buffer` [n * s] over the ranks in place, sent as `wire_dtype`; all ranks get equal bits.

        Args:
            wire: of the pool, with what this rank sends, if that is not in `buffer`; it is released.
        """
        if self.world_size == 1:
            return AsyncWork()
        if wire_dtype == buffer.dtype:
            return self._reduce_in_place(buffer, dist.ReduceOp.SUM, name, "reduce")
        if wire is None:
            wire = self._pool.acquire(buffer.numel(), wire_dtype)
            wire.copy_(buffer)
        # Two collectives, as one all-reduce would sum in the dtype on the wire. Here the sum is in fp32 or wider. It is
        # rounded once, to be sent, and each rank takes the rounded values of its own slice too: so all have equal bits.
        reduced = self.reduce_scatter(wire, self.own_slice(buffer), accumulate=False, name=name)
        return AsyncWork(reduced.wait, partial(self.gather_sum, buffer, wire, name))

    def gather_sum(self, buffer: Tensor, wire: Tensor, name: str) -> AsyncWork:
        """Fill `buffer` [n * s] with every rank's slice, sent in the dtype of `wire`: the end of an all-reduce.

        Args:
            buffer: has this rank's slice, which is rounded too, so that all ranks get equal bits.
            wire: of the pool, as many elements; it is released.
        """
        self.own_slice(wire).copy_(self.own_slice(buffer))
        gathered = self.all_gather(wire, name)

        def finish() -> None:
            gathered.wait()
            buffer.copy_(wire)
            self._pool.release(wire)

        return AsyncWork(finish)

    def swap_rows(
        self,
        peers: Sequence[int],
        row_bytes: int,
        write: Callable[[Tensor], None],
        read: Callable[[Tensor], None],
        name: str,
    ) -> AsyncWork:
        """Start to send some ranks of the group a row of bytes each, and to receive one from each: part of a
        reduce-scatter whose wire is encoded.

        All ranks of the group call it at the same time, each with the peers that name it.

        Args:
            peers: ranks of the group, ascending, this one among them.
            write: fills the rows [p, row_bytes] to send; on NCCL it runs on the side stream of reductions.
            read: takes the rows that came, in the order of `peers`.
        """
        # Leased and released on the side stream: see [Note: Leases on a side stream].
        with self._streams.side_stream("reduce"):
            sent, received = (self._pool.acquire(len(peers) * row_bytes, torch.uint8) for _ in range(2))
            rows = received.view(len(peers), row_bytes)
            write(sent.view(len(peers), row_bytes))

            def finish() -> None:
                read(rows)
                self._pool.release(sent)
                self._pool.release(received)

            call = self.checked(self.comm_log.add_rows("reduce_scatter", name, self._ranks, rows))
            sizes = None  # equal ones
            if len(peers) < self.world_size:
                sizes = [row_bytes if rank in peers else 0 for rank in range(self.world_size)]
            with self.launch(call, "reduce", finish=finish) as started:
                started.add(self.post_all_to_all(received, sent, sizes, sizes))
                if not self.waits_on_host:
                    finish()
        return started.as_work()

    def sum_in_place(self, buffer: Tensor, name: str) -> None:
        """Sum `buffer` [n] over the ranks, sent in its dtype: equal bits on all; on gloo it sums in fp32 or wider."""
        self.start_sum(buffer, buffer, name, stream=None).wait()

    def exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        receives: Mapping[int, Sequence[Tensor]],
        name: str,
        stream: StreamName | None = "context",
    ) -> AsyncWork:
        """Start to send tensors to other ranks and to receive from them; all ranks call it, those too with nothing.

        Args:
            sends: by rank of the group, without this one: contiguous tensors of any dtype, none of them empty. They
                must not change until the exchange is waited for.
            receives: tensors to fill, by the rank that sends them: as many, as large and in the same order.

        Raises:
            ValueError: a tensor has no element, is not contiguous, or belongs to no other rank of the group.
        """
        self._check_exchange(sends, receives)
        if self.world_size == 1:
            return AsyncWork()
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensors in sends.values() for tensor in tensors)
        call = self.count_exchange(name, num_bytes)
        held = [tensor for tensors in (*sends.values(), *receives.values()) for tensor in tensors]
        with self.launch(call, stream) as started:
            if not self._is_connected:
                # NCCL makes a communicator with the first batch, in which all ranks must take part; some might not.
                self._c10d.all_reduce(torch.zeros(1, dtype=torch.uint8, device=self.device), group=self._group)
                self._is_connected = True
            batch = []
            for distance in self._distances:
                to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
                for op, peer, buffers in ((self._c10d.isend, to, sends), (self._c10d.irecv, source, receives)):
                    moved = map(_bytes_of, buffers.get(peer, ()))
                    batch += [self._c10d.P2POp(op, payload, group=self._group, group_peer=peer) for payload in moved]
            # One batch, so that on NCCL no order of sends and receives deadlocks.
            started.add(*(self._in_stream(self._c10d.batch_isend_irecv(batch)) if batch else ()))
        # [Note: Tensors that a side stream uses]
        # torch gives memory out again in the order of the stream on which it was made, and knows of no reader on
        # another one. So what a side stream reads or writes is held here until the compute stream waits for the event
        # after it. `record_stream` would hold it until the device has come so far and torch asks it, so that peaks
        # of memory would depend on timing.
        wait = started.wait
        if wait is None or self.waits_on_host:  # torch's works hold the tensors
            return AsyncWork(wait)

        def finish() -> None:
            wait()
            held.clear()  # the compute stream now waits for the side stream

        return AsyncWork(finish)

    def max_in_place(self, buffer: Tensor, name: str) -> None:
        """Replace `buffer` [n] by the element-wise maximum over the ranks."""
        if self.world_size > 1:
            self._reduce_in_place(buffer, dist.ReduceOp.MAX, name, stream=None).wait()

    def sum_scalars(self, values: Tensor, name: str, known: Sequence[float] = ()) -> list[float]:
        """Sum a small fp64 vector over the ranks and return it on the host.

        Args:
            values: on the device; reduced in place where `known` is empty.
            known: numbers of the host, summed too and returned after the values.
        """
        return self.start_sum_of_scalars(values, name, known).read()

    def start_sum_of_scalars(self, values: Tensor, name: str, known: Sequence[float] = ()) -> ScalarSum:
        """Start what `sum_scalars` does; the device may use the sums before the host reads them."""
        return self._reduce_scalars(values, known, dist.ReduceOp.SUM, name)

    def max_scalars(self, values: Tensor, name: str, known: Sequence[float] = ()) -> list[float]:
        """Return the element-wise maximum of a small fp64 vector over the ranks, on the host."""
        return self.start_max_of_scalars(values, name, known).read()

    def start_max_of_scalars(self, values: Tensor, name: str, known: Sequence[float] = ()) -> ScalarSum:
        """Start what `max_scalars` does; the host may read them later."""
        return self._reduce_scalars(values, known, dist.ReduceOp.MAX, name)

    def broadcast(self, buffer: Tensor, name: str, source: int = 0) -> None:
        """Give every rank what one rank holds."""
        call = self._count("broadcast", name, buffer, passes=1)
        with self.launch(call) as started:
            started.add(self._c10d.broadcast(buffer, group=self._group, group_src=source, async_op=self.waits_on_host))
        started.as_work().wait()

    def drain(self) -> None:
        """Wait for what is under way, or leave it where the connections have failed; its results are not used.

        gloo cancels a receive whose work is dropped, and gives what the other rank has sent to the next receive.
        """
        while self._in_flight:
            launch = self._in_flight.pop()
            if launch.wait is not None and not self.comm_log.has_failed:
                with suppress(CommError):
                    launch.wait()

    # [Note: A collective belongs to its communicator]
    # gloo cancels a receive whose work is dropped, and gives what the other rank has sent to the next receive. After an
    # exception there may be no caller left that waits for a collective, and its data would end in another tensor. So a
    # launch stays in `_in_flight` from its start until it has been waited for, and `drain` waits for those that are
    # left before the connection is used again. On NCCL the order of the stream does this.
    @contextmanager
    def launch(
        self,
        call: Collective,
        stream: StreamName | P2PStreamKey | None = None,
        finish: Callable[[], object] | None = None,
    ) -> Iterator[Launch]:
        """Start the collective of the context: all of them pass here, whatever they are and whatever moves them.

        Args:
            stream: the side stream for it, where it runs in the order of streams; None for the current one.
            finish: runs once the host has waited for it (gloo).
        """
        started = Launch()
        if self.waits_on_host:
            with self.comm_log.running(call):
                yield started
            started.wait = partial(self._wait, call, started, finish)
            self._in_flight.add(started)
            return
        with self._streams.side_stream(stream):
            with self.comm_log.running(call):
                yield started
            if stream is None and not self.comm_log.is_watched:
                return
            started.done = Event.record(self.device)
        self.comm_log.enqueue(call, started.done)
        started.wait = None if stream is None else started.done.wait

    def _wait(self, call: Collective, started: Launch, finish: Callable[[], object] | None) -> None:
        self._in_flight.discard(started)
        works, started.works, started.wait = started.works, [], None  # torch's works hold the tensors
        with self.comm_log.running(call):
            for work in works:
                work.wait(self._timeout)
        if finish is not None:
            finish()

    def _reduce_in_place(
        self, buffer: Tensor, op: dist.ReduceOp.RedOpType, name: str, stream: StreamName | None
    ) -> AsyncWork:
        with self.launch(self._count("all_reduce", name, buffer, passes=2), stream) as started:
            started.add(self._c10d.all_reduce(buffer, op=op, group=self._group, async_op=self.waits_on_host))
        return started.as_work()

    def own_slice(self, full: Tensor) -> Tensor:
        """Return this rank's slice of `full` [n * s]."""
        numel = full.numel() // self.world_size
        return full[self.rank * numel : (self.rank + 1) * numel]

    def _reduce_scalars(
        self, values: Tensor, known: Sequence[float], op: dist.ReduceOp.RedOpType, name: str
    ) -> ScalarSum:
        if known:
            given = torch.tensor(known, dtype=values.dtype, pin_memory=self._kind.pins)
            values = torch.cat([values, given.to(values.device, non_blocking=True)])
        call = None
        if self.world_size > 1:  # one rank needs no communicator
            call = self._count("all_reduce_scalars", name, values, passes=2)
            # The host needs these numbers: they decide on the step. So one collective sends them, together with what
            # the host knows already, and the host waits for the device once.
            with self.launch(call) as started:
                started.add(self._c10d.all_reduce(values, op=op, group=self._group, async_op=self.waits_on_host))
            started.as_work().wait()  # on a device the stream waits, not the host
        read = self.comm_log.start_read(values, self.device, call)
        if self.is_simulated:  # any step succeeds with ones, and other ranks are taken to have what is known
            ones = [1.0] * (values.numel() - len(known)) + [float(number) for number in known]
            return ScalarSum(values, lambda: ones)
        return ScalarSum(values, read)

    def count_exchange(self, name: str, num_bytes: int) -> Collective:
        """Count an exchange in which this rank sends so many bytes to others."""
        return self.checked(self.comm_log.add_exchange(name, self._ranks, num_bytes))

    def _count(self, op: str, name: str, buffer: Tensor, passes: int) -> Collective:
        return self.checked(self.comm_log.add(op, name, self._ranks, buffer, passes))

    def checked(self, call: Collective) -> Collective:
        """Return a counted call once the other ranks are known to begin the same one, where that is checked."""
        if self.comm_log.check is not None and self.world_size > 1:
            self.comm_log.begin(call)
            try:
                self.comm_log.check(call)
            except MissingRankError as error:
                raise CommError(error.code, f"{error}; {self.comm_log.cause(call)}") from None
            finally:
                self.comm_log.end()
        return call

    def _in_stream(self, works: list[dist.Work]) -> list[dist.Work]:
        """Return the works that the host waits for; make the current stream wait for the others."""
        return works

    def _check_exchange(self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]) -> None:
        for peer, tensors in (*sends.items(), *receives.items()):
            if peer == self.rank or not 0 <= peer < self.world_size:
                raise ValueError(
                    f"rank {self.rank} of {self.world_size} exchanges nothing with rank {peer}; name another rank"
                )
            if not all(tensor.numel() and tensor.is_contiguous() for tensor in tensors):
                raise ValueError(
                    f"a tensor between ranks {self.rank} and {peer} is empty or strided; leave it out or copy it"
                )


def _bytes_of(buffer: Tensor) -> Tensor:
    """View a contiguous tensor's memory as uint8 [b]."""
    return buffer.view(buffer.numel()).view(torch.uint8)  # -1 would be no size where there is no element
