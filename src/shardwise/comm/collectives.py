"""Collectives are counted by axis, and each has a number and a name; `shardwise.comm.backends` alone calls torch's.

Gradients are summed in fp32 or wider for any wire dtype. gloo sums in the dtype on the wire, and moves twice a
reduce-scatter's bytes; NCCL sums in the dtype on the wire too. So a reduction whose wire is narrower than fp32, and any
reduction on gloo, is an all-to-all with a local sum; NCCL's native collectives carry the others. gloo's all-gather is
slower than the same bytes point to point (`benchmarks/primitives.py`), so there it is sends and receives; and so is a
small or narrow sum of two ranks' activations. NCCL sums activations natively, in their own dtype, as Megatron-LM does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.backends import RING_BYTES, AsyncWork, CommBackend, CommFactory, ProcessGroupBackend, check_exchange
from shardwise.comm.consistency import CallCheck
from shardwise.comm.mesh import DOWN, HOST, UP, Mesh
from shardwise.comm.records import Collective, CommError, CommLog, MissingRankError
from shardwise.comm.store import PatientStore
from shardwise.config.resolve import Config, ConfigError
from shardwise.layout.mesh_shape import (
    CONTEXT_AXES,
    GRADIENT_AXES,
    PIPELINE_AXES,
    REPLICA_AXES,
    SHARD_AXES,
    TENSOR_AXES,
    MeshShape,
)
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.precision import sum_chunks
from shardwise.runtime.streams import Event, StreamName, Streams


class ProcessGroupFactory:
    """Makes back ends over the mesh's process groups, and has this engine's part of their store.

    Args:
        mesh: with the process groups.
        device: of the tensors that are sent.
        store: this engine's part of the process group's; None where there is one rank.
    """

    examples: Mapping[int, Any] | None = None

    def __init__(self, mesh: Mesh, device: torch.device, store: dist.Store | None = None) -> None:
        self.rank = mesh.rank
        self.store = store
        self._mesh = mesh
        self._device = device

    def backend(self, axes: tuple[str, ...], use: str) -> CommBackend:
        """Make a back end over the process group of `axes`.

        Raises:
            ConfigError: it would carry messages of a pipeline that wait for each other in a circle.
        """
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        if bound is not None and use in (DOWN, UP) and self._mesh.shape.size_along(axes) > 2:
            raise ConfigError(
                "process-group-device-id",
                f"device_id={bound} of the process group lets all messages among the ranks of a pipeline wait in one "
                "line, where they deadlock; call init_process_group without device_id, or let shardwise start it",
            )
        return ProcessGroupBackend(self._mesh.group(axes, use), torch.device("cpu") if use == HOST else self._device)

    def backend_among(self, axes: tuple[str, ...], indices: tuple[int, ...], use: str) -> CommBackend | None:
        """Make a back end over the process group, of this `use`, of the ranks along `axes` with these `indices`."""
        group = self._mesh.group_among(axes, indices, use)
        return None if group is None else ProcessGroupBackend(group, self._device)

    def close(self) -> None:
        """Destroy the process groups, and end the thread that asks the store."""
        self._mesh.close()
        if isinstance(self.store, PatientStore):
            self.store.close()


class Comm:
    """Runs counted collectives among the ranks of one group.

    Args:
        backend: runs the raw collectives among those ranks.
        axis: their name in counts and messages, such as `dp_shard`.
        device: of the tensors.
        timeout_s: seconds; a collective on gloo that waits longer fails.
        streams: side streams on CUDA.
        pool: receive buffers come from here.
        comm_log: shared by the engine's groups; None for one of its own.
        ranks: of the world, in the order of the group; None where the group is the world.
    """

    def __init__(
        self,
        backend: CommBackend,
        axis: str,
        device: torch.device,
        timeout_s: float,
        streams: Streams,
        pool: BufferPool,
        comm_log: CommLog | None = None,
        ranks: tuple[int, ...] | None = None,
    ) -> None:
        self.rank = backend.rank
        self.world_size = backend.world_size
        self.axis = axis
        self.device = device
        self.is_simulated = backend.moves_nothing
        self.comm_log = comm_log or CommLog(backend.rank)
        self._group = self.comm_log.open_group(axis, ranks or tuple(range(backend.world_size)))
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._streams = streams
        self._pool = pool

    def all_gather(self, full: Tensor, name: str, stream: StreamName | None = "gather") -> AsyncWork:
        """Fill `full` [n * s] with every rank's slice; this rank's own slice is in it already.

        Args:
            full: of any dtype.
            name: for counts and messages.
            stream: the side stream on which it runs on NCCL; None for the current stream.
        """
        if self.world_size == 1:
            return AsyncWork(None)
        call = self._count("all_gather", name, full, passes=1)
        start = partial(self._backend.all_gather, full)
        return self._start(call, start) if self._backend.waits_on_host else self._enqueue(stream, call, start)

    def reduce_scatter(self, source: Tensor, out: Tensor, *, accumulate: bool, name: str) -> AsyncWork:
        """Sum `source` [n * s] over the ranks and leave this rank's slice in `out` [s].

        Args:
            source: in the wire dtype; must not change until the collective is waited for.
            out: in the dtype of the accumulator; may be this rank's slice of `source`'s storage.
            accumulate: add to what `out` holds.
            name: for counts and messages.
        """
        if self.world_size == 1:
            if out.untyped_storage() is not source.untyped_storage():
                sum_chunks(out, source.unsqueeze(0), accumulate)
            return AsyncWork(None)
        call = self._count("reduce_scatter", name, source, passes=1)
        if not self._backend.waits_on_host:
            return self._enqueue("reduce", call, lambda: self._native_reduce_scatter(source, out, accumulate))
        received = self._pool.acquire(source.numel(), source.dtype)

        def finish() -> None:
            sum_chunks(out, received.view(self.world_size, -1), accumulate)
            self._pool.release(received)

        return self._start(call, lambda: self._backend.all_to_all(received, source), finish)

    def all_reduce(self, buffer: Tensor, wire_dtype: torch.dtype, name: str) -> AsyncWork:
        """Sum `buffer` [n * s] over the ranks in place, sent as `wire_dtype`; all ranks get equal bits.

        Args:
            buffer: fp32 or wider.
            wire_dtype: in which it is sent.
            name: for counts and messages.
        """
        if self.world_size == 1:
            return AsyncWork(None)
        if wire_dtype == buffer.dtype:
            return self._start_in_place(buffer, dist.ReduceOp.SUM, name, "reduce")
        wire = self._pool.acquire(buffer.numel(), wire_dtype)
        wire.copy_(buffer)
        own = self._own_slice(buffer)
        reduced = self.reduce_scatter(wire, own, accumulate=False, name=name)

        def gather() -> AsyncWork:
            self._own_slice(wire).copy_(own)
            gathered = self.all_gather(wire, name)

            def finish() -> None:
                gathered.wait()
                buffer.copy_(wire)
                self._pool.release(wire)

            return AsyncWork(finish)

        return AsyncWork(reduced.wait, gather)

    def sum_in_place(self, buffer: Tensor, name: str) -> None:
        """Sum `buffer` [n] over the ranks, sent in its dtype: equal bits on all; on gloo it sums in fp32 or wider."""
        self.start_sum(buffer, buffer, name, stream=None).wait()

    def start_sum(self, source: Tensor, out: Tensor, name: str, stream: StreamName | None) -> AsyncWork:
        """Start to put into `out` [n] the sum of `source` [n] over the ranks; it sums as `sum_in_place` does.

        Args:
            source: must not change until the collective is waited for.
            out: of the same dtype; may be `source` itself.
            name: for counts and messages.
            stream: as for `all_gather`.
        """
        is_small = out.numel() * out.element_size() < RING_BYTES or out.dtype.itemsize < 4
        if is_small and self.world_size == 2 and self._backend.waits_on_host:
            return self._start_sum_of_two(source, out, name)
        if out is not source:
            out.copy_(source)
        if self.world_size == 1:
            return AsyncWork(None)
        if out.dtype.itemsize >= 4 or not self._backend.waits_on_host:
            return self._start_in_place(out, dist.ReduceOp.SUM, name, stream)
        wide = self._pool.acquire(-(-out.numel() // self.world_size) * self.world_size, torch.float32)
        wide[: out.numel()].copy_(out)
        wide[out.numel() :].zero_()
        summed = self.all_reduce(wide, out.dtype, name)

        def finish() -> None:
            summed.wait()
            out.copy_(wide[: out.numel()])
            self._pool.release(wide)

        return AsyncWork(finish)

    def _start_sum_of_two(self, source: Tensor, out: Tensor, name: str) -> AsyncWork:
        """Start a sum of two ranks on gloo: each sends all it has, which is faster there and as many bytes as in a
        ring.
        """
        call = self._count("all_reduce", name, source, passes=2)
        is_in_place = out is source
        received = self._pool.acquire(out.numel(), out.dtype) if is_in_place else out

        def finish() -> None:
            torch.add(source, received, out=out)  # rounds once, and a + b is b + a
            if is_in_place:
                self._pool.release(received)

        return self._start(call, partial(self._backend.exchange, received, source), finish)

    def scatter_sum(self, source: Tensor, out: Tensor, name: str, stream: StreamName | None) -> AsyncWork:
        """Start to put into `out` [s] this rank's slice of the sum of `source` [n * s]; it sums as `sum_in_place` does.

        Args:
            source: must not change until the collective is waited for.
            out: of the same dtype, and other storage.
            name: for counts and messages.
            stream: as for `all_gather`.
        """
        if self._backend.waits_on_host and self.world_size != 2:
            return self.reduce_scatter(source, out, accumulate=False, name=name)
        call = self._count("reduce_scatter", name, source, passes=1)
        if not self._backend.waits_on_host:
            return self._enqueue(stream, call, partial(self._backend.reduce_scatter, out, source))
        slices = source.chunk(2)
        start = partial(self._backend.exchange, out, slices[1 - self.rank])
        return self._start(call, start, partial(out.add_, slices[self.rank]))

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
            name: for counts and messages.
            stream: as for `all_gather`.

        Raises:
            ValueError: a tensor has no element, is not contiguous, or belongs to no other rank of the group.
        """
        check_exchange(sends, receives, self.rank, self.world_size)
        if self.world_size == 1:
            return AsyncWork(None)
        num_bytes = sum(each.numel() * each.element_size() for tensors in sends.values() for each in tensors)
        call = self._checked(self.comm_log.add_exchange(name, self._group, num_bytes))
        start = partial(self._backend.exchange_all, sends, receives)
        if self._backend.waits_on_host:
            return self._start(call, start)
        moved = self._enqueue(stream, call, start)
        held = [each for tensors in (*sends.values(), *receives.values()) for each in tensors]

        def finish() -> None:
            moved.wait()
            held.clear()  # their memory goes back to the compute stream, which now waits for the side stream

        return AsyncWork(finish)

    def max_in_place(self, buffer: Tensor, name: str) -> None:
        """Replace `buffer` [n] by the element-wise maximum over the ranks."""
        if self.world_size > 1:
            self._start_in_place(buffer, dist.ReduceOp.MAX, name, stream=None).wait()

    def _start_in_place(
        self, buffer: Tensor, op: dist.ReduceOp.RedOpType, name: str, stream: StreamName | None
    ) -> AsyncWork:
        call = self._count("all_reduce", name, buffer, passes=2)
        start = partial(self._backend.all_reduce, buffer, op)
        return self._start(call, start) if self._backend.waits_on_host else self._enqueue(stream, call, start)

    def sum_scalars(self, values: Tensor, name: str, known: Sequence[float] = ()) -> list[float]:
        """Sum a small fp64 vector over the ranks and return it on the host.

        Args:
            values: on the device; reduced in place where `known` is empty.
            name: for counts and messages.
            known: numbers of the host, summed too and returned after the values.
        """
        return self._start_scalars(values, known, dist.ReduceOp.SUM, name)()

    def start_sum_scalars(self, values: Tensor, name: str) -> Callable[[], list[float]]:
        """Start to sum a small fp64 vector in place; return the function that waits for the sums.

        On CUDA it waits for them alone, not for what is enqueued after them.
        """
        return self._start_scalars(values, (), dist.ReduceOp.SUM, name)

    def max_scalars(self, values: Tensor, name: str, known: Sequence[float] = ()) -> list[float]:
        """Return the element-wise maximum of a small fp64 vector over the ranks, on the host.

        Args:
            values: as for `sum_scalars`.
            name: for counts and messages.
            known: as for `sum_scalars`.
        """
        return self._start_scalars(values, known, dist.ReduceOp.MAX, name)()

    def broadcast(self, buffer: Tensor, name: str) -> None:
        """Give every rank what rank 0 of the group holds."""
        call = self._count("broadcast", name, buffer, passes=1)
        self._start(call, lambda: self._backend.broadcast(buffer)).wait()

    def _own_slice(self, full: Tensor) -> Tensor:
        numel = full.numel() // self.world_size
        return full[self.rank * numel : (self.rank + 1) * numel]

    def _native_reduce_scatter(self, source: Tensor, out: Tensor, accumulate: bool) -> None:
        if source.dtype.itemsize >= 4:
            summed = self._pool.acquire(out.numel(), source.dtype)
            self._backend.reduce_scatter(summed, source)
            sum_chunks(out, summed.unsqueeze(0), accumulate)
        else:
            summed = self._pool.acquire(source.numel(), source.dtype)
            self._backend.all_to_all(summed, source)
            sum_chunks(out, summed.view(self.world_size, -1), accumulate)
        self._pool.release(summed)

    def _start_scalars(
        self, values: Tensor, known: Sequence[float], op: dist.ReduceOp.RedOpType, name: str
    ) -> Callable[[], list[float]]:
        if known:
            given = torch.tensor(known, dtype=values.dtype, pin_memory=self.device.type == "cuda")
            values = torch.cat([values, given.to(values.device, non_blocking=True)])
        call = self._count("all_reduce_scalars", name, values, passes=2)
        reduced = self._start(call, lambda: self._backend.all_reduce(values, op))
        found, there = values, Event(None)
        if self.device.type == "cuda":
            reduced.wait()  # the stream waits, not the host
            found = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            found.copy_(values, non_blocking=True)
            there = Event.record(self.device)
        if not self._backend.waits_on_host:
            self.comm_log.enqueue(call, there)

        def read() -> list[float]:
            reduced.wait()
            self.comm_log.begin(call)  # on CUDA, here the host waits
            try:
                there.wait_on_host()
                return self._backend.read(found, known)
            finally:
                self.comm_log.end()

        return read

    def _count(self, op: str, name: str, buffer: Tensor, passes: int) -> Collective:
        return self._checked(self.comm_log.add(op, name, self._group, buffer, passes))

    def _checked(self, call: Collective) -> Collective:
        if self.comm_log.check is not None and self.world_size > 1:
            self.comm_log.begin(call)
            try:
                self.comm_log.check(call)
            except MissingRankError as error:
                raise CommError(error.code, f"{error}; {self.comm_log.cause(call)}") from None
            finally:
                self.comm_log.end()
        return call

    def _start(
        self, call: Collective, start: Callable[[], list[dist.Work]], finish: Callable[[], object] | None = None
    ) -> AsyncWork:
        """Start works that the host waits for (gloo), then `finish` on the calling thread."""
        works = self.comm_log.guarded(call, start)

        def wait() -> None:
            self.comm_log.guarded(call, lambda: self._wait(works))
            if finish is not None:
                finish()

        return AsyncWork(wait)

    def _wait(self, works: list[dist.Work]) -> None:
        for work in works:
            work.wait(self._timeout)

    def _enqueue(self, stream: StreamName | None, call: Collective, run: Callable[[], object]) -> AsyncWork:
        """Enqueue a collective and what follows it (NCCL); the host never waits."""
        with self._streams.side_stream(stream):
            self.comm_log.guarded(call, run)
            if stream is None and not self.comm_log.is_watched:
                return AsyncWork(None)
            done = Event.record(self.device)
        self.comm_log.enqueue(call, done)
        return AsyncWork(None if stream is None else done.wait)


@dataclass(frozen=True)
class CommGroups:
    """Holds an engine's groups of ranks; groups of the same ranks are one object, unless they need two communicators.

    On a 2x2 mesh, dp_replicate=2 x dp_shard=2, rank 1's `data` are all four ranks, its `shards` (0, 1) and its
    `replicas` (1, 3). With dp_shard=2 x cp=2, its `shards` are all four and its `context` is (0, 1).

    Attributes:
        data: the ranks that average gradients.
        shards: the ranks that share the sharded states.
        reductions: the same ranks as `shards`; on CUDA over a communicator of its own.
        replicas: the ranks that hold the same shard.
        tensor: the ranks that share a layer's matrices.
        context: the ranks that share each sample's tokens; over a communicator of its own.
        model: `data` and `tensor` together: all that hold parts of the same stages of the model.
        pipeline: the ranks with the other stages, at the same place of their meshes.
        all: `model` and `pipeline` together: all that take the same optimizer step.
        tied: the ranks of `pipeline` that hold a parameter which is tied across a cut, by their ranks there.
    """

    data: Comm
    shards: Comm
    reductions: Comm
    replicas: Comm
    tensor: Comm
    context: Comm
    model: Comm
    pipeline: Comm
    all: Comm
    tied: Mapping[tuple[int, ...], Comm]


def connect(
    comm_factory: CommFactory,
    shape: MeshShape,
    config: Config,
    device: torch.device,
    streams: Streams,
    pool: BufferPool,
    ties: Collection[tuple[int, ...]] = (),
) -> CommGroups:
    """Make an engine's groups of ranks, with a common comm log; all ranks do so together.

    Args:
        comm_factory: makes the back ends.
        shape: of the mesh.
        config: resolved.
        device: of the tensors.
        streams: side streams on CUDA.
        pool: receive buffers come from here.
        ties: ranks of the pipeline that hold a parameter together; of all such parameters.
    """
    made: dict[tuple[tuple[str, ...], str], Comm] = {}
    comm_log = CommLog(comm_factory.rank)
    if config.run.check_collectives and comm_factory.store is not None:
        comm_log.check = CallCheck(comm_factory.store, comm_factory.rank, config.run.timeout_s)

    def connect_over(backend: CommBackend, axes: tuple[str, ...], ranks: tuple[int, ...]) -> Comm:
        return Comm(backend, "+".join(axes), device, config.run.timeout_s, streams, pool, comm_log, ranks)

    def over(axes: tuple[str, ...], use: str = "gather") -> Comm:
        live = tuple(axis for axis in axes if shape.size_along((axis,)) > 1)
        if (live, use) not in made:
            ranks = shape.ranks_along(live, comm_factory.rank)
            made[live, use] = connect_over(comm_factory.backend(axes, use), live or axes[:1], ranks)
        return made[live, use]

    # On NCCL one communicator would run gathers and reductions one after the other.
    reductions = over(SHARD_AXES, "reduce" if device.type == "cuda" else "gather")
    tied: dict[tuple[int, ...], Comm] = {}
    for holders in sorted(ties):
        stages = shape.ranks_along(PIPELINE_AXES, comm_factory.rank)
        if len(holders) == len(stages):
            tied[holders] = over(PIPELINE_AXES)
        else:  # all ranks make these groups, in this order
            backend = comm_factory.backend_among(PIPELINE_AXES, holders, "tied")
            if backend is not None:
                tied[holders] = connect_over(backend, PIPELINE_AXES, tuple(stages[index] for index in holders))
    cell = (*GRADIENT_AXES, *TENSOR_AXES)
    return CommGroups(
        data=over(GRADIENT_AXES),
        shards=over(SHARD_AXES),
        reductions=reductions,
        replicas=over(REPLICA_AXES),
        tensor=over(TENSOR_AXES),
        context=over(CONTEXT_AXES, "context" if shape.cp > 1 else "gather"),
        model=over(cell),
        pipeline=over(PIPELINE_AXES),
        all=over((*PIPELINE_AXES, *cell)),
        tied=tied,
    )


def comm_over(group: dist.ProcessGroup | None, timeout_s: float) -> Comm:
    """Make the collectives of a process group that is there already, without an engine.

    Args:
        group: None for the world's.
        timeout_s: seconds; a collective on gloo that waits longer fails.
    """
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None, "the caller has joined a process group"
    device = torch.device("cuda" if "nccl" in dist.get_backend_config(chosen) else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    ranks = tuple(dist.get_process_group_ranks(chosen))
    backend, streams = ProcessGroupBackend(chosen, device), Streams(device, overlap=False)
    return Comm(backend, "init", device, timeout_s, streams, BufferPool(device), ranks=ranks)
