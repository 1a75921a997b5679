"""A message between two ranks of a pipeline is counted and named as collectives are (`shardwise.comm.collectives`).

A pipe carries messages from one rank to one other, in one order. On gloo its tag distinguishes it from the other pipes
of those ranks, and the host waits for its messages. On NCCL there are no tags; the pipes from one rank to another share
a communicator, which no other ranks and no messages of the other direction use, and a stream: so they wait for each
other alone, and run at the same time as the computation. torch makes such a communicator of two ranks for `isend` and
`irecv`, one for each process group, where the default group was made without a `device_id`. A batch of them would run
over the communicator of the whole group, in which all work waits in one line. With one communicator for each direction
between two ranks, no order of sends and receives deadlocks, so none need be posted together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.collectives import AsyncWork, Comm, CommFactory, CommResources
from shardwise.comm.mesh import DOWN, HOST, UP
from shardwise.comm.records import RECEIVE, SEND, Collective, CommLog, RankGroup
from shardwise.layout.mesh_shape import PIPELINE_AXES, MeshShape
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.streams import Event, P2PStreamKey, Streams

Move = Callable[[Tensor, int, int], list[dist.Work]]


class P2PTransfer(AsyncWork):
    """Holds tensors under way until they are sent or received; `wait` works as for any `AsyncWork`.

    Args:
        wait: waits for all of them; None where there is nothing to wait for.
        comm_log: of the engine.
        done: the event after them on the device; None where the host waits (gloo), which cannot query.
    """

    def __init__(self, wait: Callable[[], None] | None, comm_log: CommLog, done: Event | None = None) -> None:
        super().__init__(wait)
        self._comm_log = comm_log
        self._done = done

    @property
    def is_on_device(self) -> bool:
        """Say whether the device moves them, and not the host."""
        return self._done is not None

    def is_done(self) -> bool:
        """Say whether to wait for it would hold up neither the host nor the compute stream."""
        return self._wait is None or (self._done is not None and self._done.is_reached())


class P2PChannel:
    """Is one end of a pipe: `send` at its source, `receive` at its destination, equally often and in the same order.

    Args:
        backend: of the ranks of the pipeline.
        group: the pipe in the comm log.
        ends: source and destination, as ranks of the back end.
        tag: of this pipe among those with the same ends.
        device: of the tensors.
        timeout_s: seconds; a message on gloo that waits longer fails.
        streams: side streams on CUDA.
        comm_log: of the engine.
    """

    def __init__(
        self,
        backend: Comm,
        group: RankGroup,
        ends: tuple[int, int],
        tag: int,
        device: torch.device,
        timeout_s: float,
        streams: Streams,
        comm_log: CommLog,
    ) -> None:
        self.device = device
        self.comm_log = comm_log
        self.moves_nothing = backend.is_simulated
        self._backend = backend
        self._group = group
        self._peer = ends[1] if backend.rank == ends[0] else ends[0]
        self._tag = tag
        self._timeout = timedelta(seconds=timeout_s)
        self._streams = streams

    def send(self, buffers: Sequence[Tensor], name: str) -> P2PTransfer:
        """Start to send tensors, each a message; returns at once.

        Args:
            buffers: contiguous; must not change until they are sent. Empty ones are not sent.
            name: for counts and messages, the same at both ends.
        """
        return self._start(SEND, buffers, name, self._backend.post_send)

    def receive(self, buffers: Sequence[Tensor], name: str) -> P2PTransfer:
        """Start to fill tensors of the sizes that the other end sends; returns at once. Arguments as for `send`."""
        return self._start(RECEIVE, buffers, name, self._backend.post_receive)

    def _start(self, op: Literal["send", "receive"], buffers: Sequence[Tensor], name: str, move: Move) -> P2PTransfer:
        moved = [buffer for buffer in buffers if buffer.numel() > 0]
        calls = [self.comm_log.add_message(op, name, self._group, buffer) for buffer in moved]
        starts = [partial(move, buffer, self._peer, self._tag) for buffer in moved]
        if not calls:
            return P2PTransfer(None, self.comm_log)
        if self._backend.waits_on_host:
            works = [self.comm_log.guarded(call, start) for call, start in zip(calls, starts, strict=True)]
            return P2PTransfer(partial(self._wait_on_host, calls, works, moved), self.comm_log)
        with self._streams.side_stream(P2PStreamKey(op, self._peer)):
            for call, start in zip(calls, starts, strict=True):
                self.comm_log.guarded(call, start)
            done = Event.record(self.device)
        self.comm_log.enqueue(calls[-1], done)
        # The memory came from the compute stream and goes back to it, after that has waited for the side stream.
        return P2PTransfer(partial(_wait_in_stream, done, moved), self.comm_log, done)

    def _wait_on_host(self, calls: Sequence[Collective], works: Sequence[list[dist.Work]], held: list[Tensor]) -> None:
        for call, started in zip(calls, works, strict=True):
            self.comm_log.guarded(call, partial(self._wait_for, started))
        held.clear()

    def _wait_for(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            work.wait(self._timeout)


class P2PChannels:
    """Opens this rank's pipes to the ranks that differ from it along the pipeline's axis; all of them make this object.

    Args:
        comm_factory: makes the back ends.
        shape: of the mesh.
        device: of the activations.
        timeout_s: seconds; a message on gloo that waits longer fails.
        streams: side streams on CUDA.
        comm_log: of the engine.
    """

    def __init__(
        self,
        comm_factory: CommFactory,
        shape: MeshShape,
        device: torch.device,
        timeout_s: float,
        streams: Streams,
        comm_log: CommLog,
    ) -> None:
        self.device = device
        self.examples = comm_factory.examples
        self._ranks = shape.ranks_along(PIPELINE_AXES, comm_factory.rank)
        axis, pool = "+".join(PIPELINE_AXES), BufferPool(torch.device("cpu"))
        on_host = CommResources(torch.device("cpu"), timeout_s, streams, pool, comm_log)
        on_device = CommResources(device, timeout_s, streams, pool, comm_log)
        self._host = comm_factory.comm(PIPELINE_AXES, HOST, on_host, axis)
        is_cuda = device.type == "cuda"
        self._down = comm_factory.comm(PIPELINE_AXES, DOWN, on_device, axis) if is_cuda else self._host
        self._up = comm_factory.comm(PIPELINE_AXES, UP, on_device, axis) if is_cuda else self._host
        self._timeout_s = timeout_s
        self._streams = streams
        self._comm_log = comm_log
        self._lines: dict[tuple[int, int], deque[Any]] = {}

    @property
    def moves_nothing(self) -> bool:
        """Say whether the other ranks are simulated."""
        return self._host.is_simulated

    @property
    def rank(self) -> int:
        """Return the rank of this process along the pipeline's axis."""
        return self._host.rank

    def open(self, ends: tuple[int, int], name: str, tag: int, on_host: bool = False) -> P2PChannel:
        """Open a pipe, which both ends do; each rank opens all of its own in the order of their tags.

        Args:
            ends: source and destination, as ranks along the pipeline's axis; this rank is one of them.
            name: that no other pipe of this rank has.
            tag: that no other pipe of the mesh has.
            on_host: for tensors on the host, also where the device is CUDA.
        """
        backend = self._host if on_host else self._backend(ends)
        group = self._comm_log.open_pipe("+".join(PIPELINE_AXES), (self._ranks[ends[0]], self._ranks[ends[1]]), name)
        device = torch.device("cpu") if on_host else self.device
        pipe = P2PChannel(backend, group, ends, tag, device, self._timeout_s, self._streams, self._comm_log)
        if not (on_host or backend.waits_on_host or backend.is_simulated) and ends not in self._lines:
            self._lines[ends] = deque()
            # The host waits while NCCL makes a communicator: now, in an order that all ranks share, and never later.
            token = torch.zeros(1, dtype=torch.uint8, device=device)
            (pipe.send if ends[0] == backend.rank else pipe.receive)([token], "connect").wait()
        return pipe

    def hang_up(self) -> None:
        """Make all ranks that wait for a message of this pipeline fail at once."""
        self._host.hang_up()

    def line(self, ends: tuple[int, int]) -> deque[Any]:
        """Return the line of those that receive over pipes with these ends: one for all pipes where the back end has no
        tags.
        """
        if self._backend(ends).waits_on_host:
            return deque()
        return self._lines.setdefault(ends, deque())

    def _backend(self, ends: tuple[int, int]) -> Comm:
        return self._down if ends[0] < ends[1] else self._up


def _wait_in_stream(done: Event, held: list[Tensor]) -> None:
    done.wait()
    held.clear()
