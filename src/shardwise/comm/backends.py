"""These back ends of `shardwise.comm.collectives.Comm` run the raw collectives of one group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.records import CommError
from shardwise.layout.mesh_shape import MeshShape

# From here on gloo's own all-reduce of fp32 among two ranks is as fast as sending all and adding.
RING_BYTES: Final = 2**20


class CommBackend(Protocol):
    """Gives the ranks of one group, and the raw collectives among them, each of which starts at once.

    Attributes:
        rank: of this process in the group.
        world_size: of the group.
        waits_on_host: the host waits for the works that a collective returns (gloo); otherwise collectives run in the
            order of the current stream (NCCL) and there are none.
        moves_nothing: the other ranks are not there, and tensors have no values.
    """

    rank: int
    world_size: int
    waits_on_host: bool
    moves_nothing: bool

    def all_gather(self, full: Tensor) -> list[dist.Work]:
        """Fill `full` [n * s] with every rank's slice."""

    def all_to_all(self, received: Tensor, source: Tensor) -> list[dist.Work]:
        """Send slice i of `source` [n * s] to rank i, and receive its data into slice i of `received` [n * s]."""

    def exchange(self, received: Tensor, source: Tensor) -> list[dist.Work]:
        """Send `source` [s] to the other of two ranks, and receive what it sends into `received` [s]."""

    def exchange_all(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> list[dist.Work]:
        """Send tensors to other ranks and receive from them, all at once; by rank, contiguous and not empty.

        All ranks of the group call it, those too that send and receive nothing.
        """

    def reduce_scatter(self, out: Tensor, source: Tensor) -> list[dist.Work]:
        """Sum `source` [n * s] over the ranks in the dtype on the wire; leave this rank's slice in `out` [s]."""

    def all_reduce(self, buffer: Tensor, op: dist.ReduceOp.RedOpType) -> list[dist.Work]:
        """Reduce in place, in the dtype on the wire."""

    def broadcast(self, buffer: Tensor) -> list[dist.Work]:
        """Give every rank what rank 0 of the group holds."""

    def send(self, buffer: Tensor, to: int, tag: int = 0) -> list[dist.Work]:
        """Send a contiguous tensor, not empty, to rank `to` of the group, whose receives of this tag take it in order.

        On NCCL tags have no effect, and messages from one rank to another are taken in order.

        Args:
            buffer: must not change until the message is sent.
            to: rank of the group.
            tag: of the message.
        """

    def receive(self, buffer: Tensor, source: int, tag: int = 0) -> list[dist.Work]:
        """Receive into a contiguous tensor, as large as what `source` sends.

        Args:
            buffer: is filled.
            source: rank of the group.
            tag: of the message.
        """

    def hang_up(self) -> None:
        """End all messages of the group, which others may wait for: on gloo those fail at once, and so do later ones.

        On NCCL they wait until their time-out.
        """

    def read(self, values: Tensor, known: Sequence[float]) -> list[float]:
        """Return the numbers of a reduced vector on the host; `known` are this rank's own values of its last ones."""


class CommFactory(Protocol):
    """Makes the back ends of an engine's groups of ranks.

    Attributes:
        rank: of this process in the world.
        store: through which ranks exchange text outside of collectives; None where there is one process.
        examples: where other ranks are simulated, what each stage of a pipeline receives, by stage; None where they are
            real, or there is no pipeline.
    """

    rank: int
    store: dist.Store | None
    examples: Mapping[int, Any] | None

    def backend(self, axes: tuple[str, ...], use: str) -> CommBackend:
        """Make the back end of the ranks that differ from this one along `axes` only; each use has its communicator."""

    def backend_among(self, axes: tuple[str, ...], indices: tuple[int, ...], use: str) -> CommBackend | None:
        """Make a back end for some of those ranks; None where this rank is none of them.

        Args:
            axes: axes of the mesh along which the ranks differ.
            indices: of the ranks along these axes, ascending.
            use: what the collectives are for; each use has its communicator.
        """

    def close(self) -> None:
        """Free what was made."""


def check_exchange(
    sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], rank: int, world_size: int
) -> None:
    """Check that each tensor of an exchange can be sent to or received from another rank.

    Args:
        sends: tensors to send, by rank of the group.
        receives: tensors to fill, by rank of the group.
        rank: of this process in the group.
        world_size: of the group.

    Raises:
        ValueError: a tensor has no element, is not contiguous, or is for no other rank of the group.
    """
    for peer, tensors in (*sends.items(), *receives.items()):
        if peer == rank or not 0 <= peer < world_size:
            raise ValueError(f"rank {rank} of {world_size} exchanges nothing with rank {peer}; name another rank")
        if not all(each.numel() and each.is_contiguous() for each in tensors):
            raise ValueError(f"a tensor between ranks {rank} and {peer} is empty or strided; leave it out or copy it")


class AsyncWork:
    """Is a collective under way; `wait` makes its result usable on the current stream, and may be called again.

    Args:
        wait: waits for the collective; None where there is nothing to wait for.
        then: starts a second collective on the result of the first, and returns that one; None for no second one.
    """

    def __init__(self, wait: Callable[[], None] | None, then: Callable[[], AsyncWork] | None = None) -> None:
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

    def __del__(self) -> None:
        """Wait for a collective that is not waited for otherwise, such as one of a dropped engine: it must end.

        gloo cancels a receive whose work is dropped, and what the other rank has sent goes to the next one.
        """
        if self._wait is not None:
            with suppress(Exception):
                self._wait()

    def wait(self) -> None:
        """Finish all collectives."""
        self.advance()
        if self._second is not None:
            self._second.wait()


_NEVER_SENT: Final = 2**31 - 1  # a tag


class ProcessGroupBackend:
    """Runs collectives over a process group.

    Args:
        group: the ranks that communicate.
        device: of the tensors.
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
        # Each rank starts with its right-hand neighbour, so that not all ranks send to the same one first.
        for distance in range(1, self.world_size):
            to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            works += _works(dist.isend(slices[self.rank], group=self._group, group_dst=to))
            works += _works(dist.irecv(slices[source], group=self._group, group_src=source))
        return works

    def all_to_all(self, received: Tensor, source: Tensor) -> list[dist.Work]:
        """Exchange slices of equal length."""
        return self._works(dist.all_to_all_single(received, source, group=self._group, async_op=self.waits_on_host))

    def exchange(self, received: Tensor, source: Tensor) -> list[dist.Work]:
        """Start a send and a receive; on gloo only."""
        other = 1 - self.rank
        return [
            *_works(dist.isend(source, group=self._group, group_dst=other)),
            *_works(dist.irecv(received, group=self._group, group_src=other)),
        ]

    def exchange_all(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> list[dist.Work]:
        """Exchange tensors as bytes and in one batch, so that on NCCL no order of sends and receives deadlocks."""
        if not self._is_connected:
            # NCCL makes a communicator with the first batch, in which all ranks must take part; some might not.
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
        """Send the tensor as bytes, which works for any dtype. It uses `isend` and not a batch, whose communicator is
        the whole group's.

        Args:
            buffer: contiguous.
            to: rank of the group.
            tag: of the message.
        """
        return self._in_stream(_works(dist.isend(_bytes_of(buffer), group=self._group, group_dst=to, tag=tag)))

    def receive(self, buffer: Tensor, source: int, tag: int = 0) -> list[dist.Work]:
        """Receive the sender's bytes into the buffer's own memory.

        Args:
            buffer: contiguous.
            source: rank of the group.
            tag: of the message.
        """
        return self._in_stream(_works(dist.irecv(_bytes_of(buffer), group=self._group, group_src=source, tag=tag)))

    def hang_up(self) -> None:
        """End, on gloo, all messages of the group, those too that other ranks wait for."""
        if dist.get_backend(self._group) != "gloo":
            return
        for peer in set(range(self.world_size)) - {self.rank}:
            # A receive whose time is over closes all connections of the group; where one is closed already, it fails.
            with suppress(RuntimeError):
                never = dist.irecv(torch.empty(1), group=self._group, group_src=peer, tag=_NEVER_SENT)
                _works(never)[0].wait(timedelta(milliseconds=1))

    def read(self, values: Tensor, known: Sequence[float]) -> list[float]:
        """Return the numbers of a reduced vector on the host."""
        return values.tolist()

    def _works(self, work: dist.Work | None) -> list[dist.Work]:
        return _works(work) if self.waits_on_host else []

    def _in_stream(self, works: list[dist.Work]) -> list[dist.Work]:
        """Make the current stream wait for messages, which NCCL runs on a stream of its own: it keeps their order."""
        if self.waits_on_host:
            return works
        for work in works:
            work.wait()
        return []


def _bytes_of(buffer: Tensor) -> Tensor:
    """View a contiguous tensor's memory as uint8 [b]."""
    return buffer.view(-1).view(torch.uint8)


def _works(work: dist.Work | None) -> list[dist.Work]:
    if work is None:
        raise CommError(
            "rank-outside-group", "this process is not in the group of the collective; build the mesh on every rank"
        )
    return [work]


Backend = Literal["gloo", "nccl"]


class SimulatedBackend:
    """Stands for ranks that are not there: no data moves, and every collective is over at once.

    Args:
        rank: in the group.
        world_size: of the group.
        backend: gloo or nccl, as which `Comm` treats it.
    """

    moves_nothing = True

    def __init__(self, rank: int, world_size: int, backend: Backend) -> None:
        self.rank = rank
        self.world_size = world_size
        self.waits_on_host = backend == "gloo"

    def all_gather(self, full: Tensor) -> list[dist.Work]:
        """Leave `full` as it is."""
        return []

    def all_to_all(self, received: Tensor, source: Tensor) -> list[dist.Work]:
        """Leave `received` as it is."""
        return []

    def exchange(self, received: Tensor, source: Tensor) -> list[dist.Work]:
        """Leave `received` as it is."""
        return []

    def exchange_all(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> list[dist.Work]:
        """Leave what is received as it is."""
        return []

    def reduce_scatter(self, out: Tensor, source: Tensor) -> list[dist.Work]:
        """Leave `out` as it is."""
        return []

    def all_reduce(self, buffer: Tensor, op: dist.ReduceOp.RedOpType) -> list[dist.Work]:
        """Leave `buffer` as it is."""
        return []

    def broadcast(self, buffer: Tensor) -> list[dist.Work]:
        """Leave `buffer` as it is."""
        return []

    def send(self, buffer: Tensor, to: int, tag: int = 0) -> list[dist.Work]:
        """Do nothing: the message is dropped. The arguments `buffer`, `to` and `tag` have no effect."""
        return []

    def receive(self, buffer: Tensor, source: int, tag: int = 0) -> list[dist.Work]:
        """Leave `buffer` as it is. The arguments `source` and `tag` have no effect."""
        return []

    def hang_up(self) -> None:
        """Do nothing: no rank waits."""

    def read(self, values: Tensor, known: Sequence[float]) -> list[float]:
        """Return ones, with which any step succeeds, and `known` as it is: other ranks are taken to have the same."""
        return [1.0] * (values.numel() - len(known)) + [float(number) for number in known]


class SimulatedFactory:
    """Makes simulated back ends around one rank of a mesh.

    Args:
        mesh: of all ranks.
        rank: that is real.
        backend: as for `SimulatedBackend`.
        examples: what the stages of a pipeline receive; see `CommFactory`.
    """

    def __init__(self, mesh: MeshShape, rank: int, backend: Backend, examples: Mapping[int, Any] | None = None) -> None:
        self.rank = rank
        self.store: dist.Store | None = None
        self.examples = examples
        self._mesh = mesh
        self._backend = backend

    def backend(self, axes: tuple[str, ...], use: str) -> SimulatedBackend:
        """Make a back end along `axes`, for any use."""
        return SimulatedBackend(self._mesh.index_along(axes, self.rank), self._mesh.size_along(axes), self._backend)

    def backend_among(self, axes: tuple[str, ...], indices: tuple[int, ...], use: str) -> SimulatedBackend | None:
        """Make a back end for the ranks along `axes` with these `indices`, for any `use`."""
        index = self._mesh.index_along(axes, self.rank)
        return SimulatedBackend(indices.index(index), len(indices), self._backend) if index in indices else None

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
