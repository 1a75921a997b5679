"""A message between two ranks of a pipeline is counted and named as collectives are (`shardwise.comm.collectives`).

A channel carries messages from one rank to one other, in one order. On gloo its tag distinguishes it from the other
channels of those ranks, and the host waits for its messages. On NCCL there are no tags; the channels from one rank to
another share a communicator, which no other ranks and no messages of the other direction use, and a stream: so they
wait for each other alone, and run at the same time as the computation. torch makes such a communicator of two ranks for
`isend` and `irecv`, one for each process group, where the default group was made without a `device_id`. A batch of them
would run over the communicator of the whole group, in which all work waits in one line. With one communicator for each
direction between two ranks, no order of sends and receives deadlocks, so none need be posted together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.backends import CommBackend, CommFactory
from shardwise.comm.mesh import DOWN, HOST, UP
from shardwise.comm.records import RECEIVE, SEND, Collective, CommLog, RankGroup
from shardwise.layout.mesh_shape import PIPELINE_AXES, MeshShape
from shardwise.runtime.streams import Event, P2PStreamKey, Streams

_Move = Callable[[Tensor, int, int], list[dist.Work]]


class P2PTransfer:
    """Holds tensors under way until they are sent or received. Keep it until it has been waited for.

    gloo cancels a receive whose work is dropped, and what the other rank has sent goes to the next one.

    Args:
        wait: waits for all of them; None where there is nothing to wait for.
        done: the event after them on the device; None where the host waits (gloo), which cannot query.
    """

    def __init__(self, wait: Callable[[], None] | None, done: Event | None = None) -> None:
        self._wait = wait
        self._done = done

    def wait(self) -> None:
        """Make the tensors usable on the current stream; may be called again."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()

    def is_done(self) -> bool:
        """Say whether to wait for it would hold up neither the host nor the compute stream."""
        return self._wait is None or (self._done is not None and self._done.is_reached())


class P2PChannel:
    """Is one end of a channel: `send` at its source, `receive` at its destination, equally often and in one order.

    Args:
        backend: of the ranks of the pipeline.
        group: the channel in the comm log.
        ends: source and destination, as ranks of the back end.
        tag: of this channel among those with the same ends.
        device: of the tensors.
        timeout_s: seconds; a message on gloo that waits longer fails.
        streams: side streams on CUDA.
        comm_log: of the engine.
    """

    def __init__(
        self,
        backend: CommBackend,
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
        self.moves_nothing = backend.moves_nothing
        self.waits_on_host = backend.waits_on_host
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
        return self._start(SEND, self._backend.send, buffers, name)

    def receive(self, buffers: Sequence[Tensor], name: str) -> P2PTransfer:
        """Start to fill tensors of the sizes that the other end sends; returns at once. Arguments as for `send`."""
        return self._start(RECEIVE, self._backend.receive, buffers, name)

    def _start(self, op: Literal["send", "receive"], move: _Move, buffers: Sequence[Tensor], name: str) -> P2PTransfer:
        moved = [buffer for buffer in buffers if buffer.numel() > 0]
        if not moved:
            return P2PTransfer(None)
        is_on_device = not self.waits_on_host
        started: list[tuple[Collective, list[dist.Work]]] = []
        with self._streams.side_stream(P2PStreamKey(op, self._peer)) if is_on_device else nullcontext():
            for buffer in moved:
                call = self.comm_log.add_message(op, name, self._group, buffer)
                with self.comm_log.guard(call):
                    started.append((call, move(buffer, self._peer, self._tag)))
            done = Event.record(self.device) if is_on_device else None
        if done is None:
            return P2PTransfer(partial(self._wait_on_host, started, moved))
        self.comm_log.enqueue(started[-1][0], done)
        # The memory came from the compute stream and goes back to it, after that has waited for the side stream.
        return P2PTransfer(partial(_wait_in_stream, done, moved), done)

    def _wait_on_host(self, started: Sequence[tuple[Collective, list[dist.Work]]], held: list[Tensor]) -> None:
        for call, works in started:
            with self.comm_log.guard(call):
                for work in works:
                    work.wait(self._timeout)
        held.clear()


class P2PChannels:
    """Opens this rank's channels to the ranks that differ from it along the pipeline's axis; all make this object.

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
        self._host = comm_factory.backend(PIPELINE_AXES, HOST)
        is_cuda = device.type == "cuda"
        self._down = comm_factory.backend(PIPELINE_AXES, DOWN) if is_cuda else self._host
        self._up = comm_factory.backend(PIPELINE_AXES, UP) if is_cuda else self._host
        self._timeout_s = timeout_s
        self._streams = streams
        self._comm_log = comm_log
        self._connected: set[tuple[int, int]] = set()

    @property
    def rank(self) -> int:
        """Return the rank of this process along the pipeline's axis."""
        return self._host.rank

    def open(self, ends: tuple[int, int], name: str, tag: int, on_host: bool = False) -> P2PChannel:
        """Open a channel, which both ends do; each rank opens all of its own in the order of their tags.

        Args:
            ends: source and destination, as ranks along the pipeline's axis; this rank is one of them.
            name: that no other channel of this rank has.
            tag: that no other channel of the mesh has.
            on_host: for tensors on the host, also where the device is CUDA.
        """
        backend = self._host if on_host else self._down if ends[0] < ends[1] else self._up
        group = self._comm_log.open_pipe("+".join(PIPELINE_AXES), (self._ranks[ends[0]], self._ranks[ends[1]]), name)
        device = torch.device("cpu") if on_host else self.device
        channel = P2PChannel(backend, group, ends, tag, device, self._timeout_s, self._streams, self._comm_log)
        if not (on_host or channel.waits_on_host or channel.moves_nothing) and ends not in self._connected:
            self._connected.add(ends)
            # The host waits while NCCL makes a communicator: now, in an order that all ranks share, and never later.
            token = torch.zeros(1, dtype=torch.uint8, device=device)
            (channel.send if ends[0] == backend.rank else channel.receive)([token], "connect").wait()
        return channel

    def hang_up(self) -> None:
        """Make all ranks that wait for a message of this pipeline fail at once."""
        self._host.hang_up()


def _wait_in_stream(done: Event, held: list[Tensor]) -> None:
    done.wait()
    held.clear()
