"""This module has the back ends of `shardwise.comm.collectives.Comm`: gloo, NCCL, and one that moves nothing.

A simulated communicator is one of the two over an object that stands for `torch.distributed` and does nothing, so that
it counts and allocates as the real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.collectives import AsyncWork, Comm, CommResources, RankPlace
from shardwise.comm.mesh import DOWN, UP, Mesh
from shardwise.comm.records import CommError
from shardwise.comm.store import PatientStore
from shardwise.config.errors import ConfigError
from shardwise.layout.mesh_shape import RING_BYTES, MeshShape
from shardwise.runtime.device import StreamName, device_of_backends, kind_of
from shardwise.runtime.precision import SCRATCH_NUMEL
from shardwise.runtime.torch_private import abort_backend, is_fake

_NEVER_SENT: Final = 2**31 - 1  # a tag
# The name since torch 2.13, and the one before, which then warns at each call.
_GATHER: Final = ("all_gather_single", "all_gather_into_tensor")
_SCATTER: Final = ("reduce_scatter_single", "reduce_scatter_tensor")
# More rows are summed in one call: each of them alone would cost more than the sum.
_MAX_ROWS: Final = 64


class GlooComm(Comm):
    """Runs collectives over gloo: the host starts them and waits for them."""

    waits_on_host = True

    def all_gather(self, full: Tensor, name: str, stream: StreamName | None = "gather") -> AsyncWork:
        if self.world_size == 1:
            return AsyncWork()
        numel, own = full.numel() // self.world_size, self.own_slice(full)
        with self.launch(self._count("all_gather", name, full, passes=1)) as started:
            # Each rank starts with its right-hand neighbour, so that not all ranks send to the same one first.
            for distance in self._distances:
                to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
                filled = full[source * numel : (source + 1) * numel]
                started.add(self._c10d.isend(own, group=self._group, group_dst=to))
                started.add(self._c10d.irecv(filled, group=self._group, group_src=source))
        return started.as_work()

    def reduce_scatter(self, source: Tensor, out: Tensor, *, accumulate: bool, name: str) -> AsyncWork:
        """Exchange slices, then sum them in fp32 or wider; see `Comm.reduce_scatter`."""
        if self.world_size == 1:
            return _scatter_alone(source, out, accumulate)
        received = self._pool.acquire(source.numel(), source.dtype)

        # gloo's threads only move bytes: the sum runs on the thread that waits. So a reduction is summed when it is
        # waited for, see [Note: Two reductions at a time].
        def finish() -> None:
            sum_chunks(out, received.view(self.world_size, -1), accumulate)
            self._pool.release(received)

        with self.launch(self._count("reduce_scatter", name, source, passes=1), finish=finish) as started:
            started.add(self._c10d.all_to_all_single(received, source, group=self._group, async_op=True))
        return started.as_work()

    def start_sum(self, source: Tensor, out: Tensor, name: str, stream: StreamName | None) -> AsyncWork:
        """Start a sum; what is narrower than fp32 is summed in fp32. See `Comm.start_sum`."""
        is_small = out.numel() * out.element_size() < RING_BYTES or out.dtype.itemsize < 4
        if is_small and self.world_size == 2:
            return self._start_sum_of_two(source, out, name)
        if out is not source:
            out.copy_(source)
        if self.world_size == 1:
            return AsyncWork()
        if out.dtype.itemsize >= 4:
            return self._reduce_in_place(out, dist.ReduceOp.SUM, name, stream)
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
        """Start a sum of two ranks: each sends all it has, which is faster here and as many bytes as in a ring."""
        is_in_place = out is source
        received = self._pool.acquire(out.numel(), out.dtype) if is_in_place else out

        def finish() -> None:
            torch.add(source, received, out=out)  # rounds once, and a + b is b + a
            if is_in_place:
                self._pool.release(received)

        with self.launch(self._count("all_reduce", name, source, passes=2), finish=finish) as started:
            started.add(self._c10d.isend(source, group=self._group, group_dst=1 - self.rank))
            started.add(self._c10d.irecv(received, group=self._group, group_src=1 - self.rank))
        return started.as_work()

    def scatter_sum(self, source: Tensor, out: Tensor, name: str, stream: StreamName | None) -> AsyncWork:
        if self.world_size != 2:
            return self.reduce_scatter(source, out, accumulate=False, name=name)
        slices = source.chunk(2)
        call = self._count("reduce_scatter", name, source, passes=1)
        with self.launch(call, finish=partial(out.add_, slices[self.rank])) as started:
            started.add(self._c10d.isend(slices[1 - self.rank], group=self._group, group_dst=1 - self.rank))
            started.add(self._c10d.irecv(out, group=self._group, group_src=1 - self.rank))
        return started.as_work()

    def hang_up(self) -> None:
        """End all messages of the group, those too that other ranks wait for."""
        if self._group is None:
            return
        for peer in set(range(self.world_size)) - {self.rank}:
            # A receive whose time is over closes all connections of the group; where one is closed already, it fails.
            with suppress(RuntimeError):
                never = dist.irecv(torch.empty(1), group=self._group, group_src=peer, tag=_NEVER_SENT)
                if never is not None:
                    never.wait(timedelta(milliseconds=1))


class NcclComm(Comm):
    """Runs collectives in the order of streams, by NCCL or another device's; the host does not wait for them."""

    waits_on_host = False

    def all_gather(self, full: Tensor, name: str, stream: StreamName | None = "gather") -> AsyncWork:
        if self.world_size == 1:
            return AsyncWork()
        # `full` is the output, and this rank's slice of it the input: NCCL gathers in place, so nothing is copied
        # before or after.
        own = self.own_slice(full)
        with self.launch(self._count("all_gather", name, full, passes=1), stream) as started:
            _named(self._c10d, *_GATHER)(full, own, group=self._group)
        return started.as_work()

    def reduce_scatter(self, source: Tensor, out: Tensor, *, accumulate: bool, name: str) -> AsyncWork:
        """Sum natively in fp32 or wider; exchange what is narrower and sum it here. See `Comm.reduce_scatter`."""
        if self.world_size == 1:
            return _scatter_alone(source, out, accumulate)
        # [Note: Leases on a side stream]
        # The pool marks the end of a buffer's use on the stream that is current when it is released. These are leased
        # and released inside the side stream's context, so the next user of the memory waits for the sum, on whatever
        # stream it is; the compute stream does not wait for it here.
        with self.launch(self._count("reduce_scatter", name, source, passes=1), "reduce") as started:
            if source.dtype.itemsize >= 4:
                summed = self._pool.acquire(out.numel(), source.dtype)
                _named(self._c10d, *_SCATTER)(summed, source, group=self._group)
                sum_chunks(out, summed.unsqueeze(0), accumulate)
            else:
                summed = self._pool.acquire(source.numel(), source.dtype)
                self._c10d.all_to_all_single(summed, source, group=self._group)
                sum_chunks(out, summed.view(self.world_size, -1), accumulate)
            self._pool.release(summed)
        return started.as_work()

    def start_sum(self, source: Tensor, out: Tensor, name: str, stream: StreamName | None) -> AsyncWork:
        """Start a sum in the tensors' own dtype; see `Comm.start_sum`."""
        if out is not source:
            out.copy_(source)
        if self.world_size == 1:
            return AsyncWork()
        return self._reduce_in_place(out, dist.ReduceOp.SUM, name, stream)

    def scatter_sum(self, source: Tensor, out: Tensor, name: str, stream: StreamName | None) -> AsyncWork:
        with self.launch(self._count("reduce_scatter", name, source, passes=1), stream) as started:
            _named(self._c10d, *_SCATTER)(out, source, group=self._group)
        return started.as_work()

    def hang_up(self) -> None:
        """Abort what runs on this rank's device; the watchdogs of other ranks do so on theirs."""
        if self._group is not None:
            with suppress(RuntimeError):  # its back end has ended already, or is not the device's own
                abort_backend(self._group, self.device)

    def _in_stream(self, works: list[dist.Work]) -> list[dist.Work]:
        """Make the current stream wait for messages, which NCCL runs on a stream of its own: it keeps their order."""
        for work in works:
            work.wait()
        return []


def _named(c10d: Any, name: str, former: str) -> Any:
    return getattr(c10d, name, None) or getattr(c10d, former)


def sum_chunks(total: Tensor, chunks: Tensor, accumulate: bool) -> None:
    """Sum the rows of `chunks` [n, s] into `total` [s] in fp32 or wider for any dtypes.

    The order is the same in every call: that of the ranks where these are few. The rows are summed first, and then,
    with `accumulate`, the old value of `total` is added: so the bits are those of a sum that is made here and added
    elsewhere.
    """
    wide = total.dtype if total.dtype.itemsize >= 4 else torch.float32
    if total.device.type != "cpu" or chunks.shape[0] > _MAX_ROWS:
        summed = chunks[0] if chunks.shape[0] == 1 else chunks.sum(0, dtype=wide)
        _put(summed, total, accumulate)
        return
    scratch = torch.empty(min(SCRATCH_NUMEL, total.numel()), dtype=wide)
    if is_fake(total):  # as in `add_widened` (`runtime/precision.py`)
        total.copy_(chunks[0])
        return
    for start in range(0, total.numel(), SCRATCH_NUMEL):
        block = total[start : start + SCRATCH_NUMEL]
        rows = chunks[:, start : start + block.numel()].unbind(0)
        summed = block if total.dtype == wide and not accumulate else scratch[: block.numel()]
        summed.copy_(rows[0])
        for row in rows[1:]:
            summed.add_(row)
        if summed is not block:
            _put(summed, block, accumulate)


def _put(summed: Tensor, total: Tensor, accumulate: bool) -> None:
    """Replace `total` by a sum, or add that in its dtype, the wider or equal one, and round once."""
    if accumulate and summed.dtype.itemsize > total.dtype.itemsize:
        total.copy_(summed + total)
    elif accumulate:
        total.add_(summed)
    else:
        total.copy_(summed)


def _scatter_alone(source: Tensor, out: Tensor, accumulate: bool) -> AsyncWork:
    if out.untyped_storage() is not source.untyped_storage():
        sum_chunks(out, source.unsqueeze(0), accumulate)
    return AsyncWork()


def process_group_comm(
    group: dist.ProcessGroup, axis: str, resources: CommResources, ranks: tuple[int, ...] = ()
) -> Comm:
    """Return a communicator over a process group.

    Args:
        axis: their name in counts and messages, such as `dp_shard`.
        ranks: of the world, in the order of the group; empty where the group is the world.

    Raises:
        CommError: this process is not in the group.
    """
    rank = dist.get_rank(group)
    if rank < 0:
        raise CommError("rank-outside-group", "this process is not in the group; build the mesh on every rank")
    place = RankPlace(rank, dist.get_world_size(group), axis, ranks)
    return _class_for(kind_of(resources.device).backend)(place, resources, group)


def world_comm(timeout_s: float) -> Comm:
    """Return the communicator of the world's process group, without an engine.

    Args:
        timeout_s: seconds; a collective on gloo that waits longer fails.
    """
    world = dist.group.WORLD
    assert world is not None, "the caller has joined a process group"
    device = device_of_backends(dist.get_backend_config(world))
    return process_group_comm(world, "init", CommResources.alone(device, timeout_s))


def simulated_comm(place: RankPlace, resources: CommResources, backend: str) -> Comm:
    """Return a communicator whose other ranks are not there: no data moves, and every collective is over at once.

    Args:
        place: of the one rank that is there.
        backend: c10d's name, as which it counts and allocates.
    """
    return _class_for(backend)(place, resources, None, SimulatedC10d())


def _class_for(backend: str) -> type[GlooComm | NcclComm]:
    return GlooComm if backend == "gloo" else NcclComm


class SimulatedC10d:
    """Stands for `torch.distributed` among ranks that are not there: its functions return at once and move nothing."""

    def __getattr__(self, name: str) -> Any:
        """Return a function that does nothing."""
        return _no_work

    @staticmethod
    def batch_isend_irecv(batch: Any) -> list[dist.Work]:
        """Return no works."""
        return []


def _no_work(*args: Any, **kwargs: Any) -> None:
    pass


class ProcessGroupFactory:
    """Makes communicators over the mesh's process groups, and has this engine's part of their store.

    Args:
        device: of the tensors that are sent.
        store: this engine's part of the process group's; None where there is one rank.
    """

    examples: Mapping[int, Any] | None = None

    def __init__(self, mesh: Mesh, store: dist.Store | None = None) -> None:
        self.rank = mesh.rank
        self.store = store
        self._mesh = mesh

    def comm(self, axes: tuple[str, ...], use: str, resources: CommResources, axis: str) -> Comm:
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        if bound is not None and use in (DOWN, UP) and self._mesh.shape.size_along(axes) > 2:
            raise ConfigError(
                "process-group-device-id",
                f"device_id={bound} of the process group lets all messages among the ranks of a pipeline wait in one "
                "line, where they deadlock; call init_process_group without device_id, or let shardwise start it",
            )
        ranks = self._mesh.shape.ranks_along(axes, self.rank)
        return process_group_comm(self._mesh.group(axes, use), axis, resources, ranks)

    def comm_among(
        self, axes: tuple[str, ...], indices: tuple[int, ...], use: str, resources: CommResources, axis: str
    ) -> Comm | None:
        group = self._mesh.group_among(axes, indices, use)
        if group is None:
            return None
        along = self._mesh.shape.ranks_along(axes, self.rank)
        return process_group_comm(group, axis, resources, tuple(along[index] for index in indices))

    def on_mesh(self, shape: MeshShape) -> ProcessGroupFactory:
        return ProcessGroupFactory(self._mesh.reshaped(shape), self.store)

    def close(self) -> None:
        """Destroy the process groups, and end the thread that asks the store."""
        self._mesh.close()
        if isinstance(self.store, PatientStore):
            self.store.close()


class SimulatedFactory:
    """Makes simulated communicators around one rank of a mesh.

    Args:
        examples: what the stages of a pipeline receive; see `CommFactory`.
    """

    def __init__(self, mesh: MeshShape, rank: int, backend: str, examples: Mapping[int, Any] | None = None) -> None:
        self.rank = rank
        self.store: dist.Store | None = None
        self.examples = examples
        self._mesh = mesh
        self._backend = backend

    def comm(self, axes: tuple[str, ...], use: str, resources: CommResources, axis: str) -> Comm:
        ranks = self._mesh.ranks_along(axes, self.rank)
        return self.comm_at(RankPlace(self._mesh.index_along(axes, self.rank), len(ranks), axis, ranks), resources)

    def comm_among(
        self, axes: tuple[str, ...], indices: tuple[int, ...], use: str, resources: CommResources, axis: str
    ) -> Comm | None:
        index, along = self._mesh.index_along(axes, self.rank), self._mesh.ranks_along(axes, self.rank)
        if index not in indices:
            return None
        ranks = tuple(along[position] for position in indices)
        return self.comm_at(RankPlace(indices.index(index), len(indices), axis, ranks), resources)

    def on_mesh(self, shape: MeshShape) -> Self:
        other = copy(self)
        other._mesh = shape
        return other

    def comm_at(self, place: RankPlace, resources: CommResources) -> Comm:
        """Make the communicator of a place; a subclass may make one of another kind."""
        return simulated_comm(place, resources, self._backend)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
