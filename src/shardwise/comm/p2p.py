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

import torch
from torch import Tensor
from torch.distributed import Work

from shardwise.comm.collectives import Comm, CommFactory, CommResources, Launch
from shardwise.comm.mesh import DOWN, HOST, UP
from shardwise.comm.records import RECEIVE, SEND, CommLog, RankGroup
from shardwise.layout.mesh_shape import PIPELINE_AXES, MeshShape
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import End, P2PStreamKey, Streams, kind_of


class P2PTransfer:
    """Holds tensors under way until they are sent or received. Keep it until it has been waited for.

    gloo cancels a receive whose work is dropped, and what the other rank has sent goes to the next one.
    """

    # [Note: A message's memory]
    # A message is sent or received on a stream of its own, of which the allocator knows nothing, see [Note: Tensors
    # that a side stream uses]. So the transfer holds the tensors, and lets them go in `wait`, which also makes the
    # current stream wait for the message. To wait for what has been sent costs nothing once it has left: `is_done` says
    # so where the device can tell.
    def __init__(self, launches: Sequence[Launch] = (), held: list[Tensor] | None = None) -> None:
        self._launches = launches
        self._held = held or []

    def wait(self) -> None:
        """Make the tensors usable on the current stream; may be called again."""
        launches, self._launches = self._launches, ()
        for launch in launches:
            launch.as_work().wait()
        self._held.clear()  # memory of the compute stream, which now waits for the side stream

    def is_done(self) -> bool:
        """Say whether to wait for it would hold up neither the host nor the compute stream; gloo cannot know."""
        return all(launch.done is not None and launch.done.is_reached() for launch in self._launches)


class P2PChannel:
    """Is one end of a channel: `send` at its source, `receive` at its destination, equally often and in one order.

    Args:
        comm: of the ranks of the pipeline.
        group: the channel in the comm log.
        ends: source and destination, as ranks of `comm`.
        tag: of this channel among those with the same ends.
    """

    def __init__(self, comm: Comm, group: RankGroup, ends: tuple[int, int], tag: int) -> None:
        self.device = comm.device
        self.comm_log = comm.comm_log
        self.moves_nothing = comm.is_simulated
        self.waits_on_host = comm.waits_on_host
        self._comm = comm
        self._group = group
        self._peer = ends[1] if comm.rank == ends[0] else ends[0]
        self._tag = tag

    def send(self, buffers: Sequence[Tensor], name: str) -> P2PTransfer:
        """Start to send tensors, each a message; returns at once.

        Args:
            buffers: contiguous; must not change until they are sent. Empty ones are not sent.
            name: for counts and messages, the same at both ends.
        """
        return self._start(SEND, self._comm.post_send, buffers, name)

    def receive(self, buffers: Sequence[Tensor], name: str) -> P2PTransfer:
        """Start to fill tensors of the sizes that the other end sends; returns at once. Arguments as for `send`."""
        return self._start(RECEIVE, self._comm.post_receive, buffers, name)

    def _start(
        self, op: End, post: Callable[[Tensor, int, int], list[Work]], buffers: Sequence[Tensor], name: str
    ) -> P2PTransfer:
        launches, moved = [], [buffer for buffer in buffers if buffer.numel() > 0]
        for buffer in moved:
            call = self.comm_log.add_message(op, name, self._group, buffer)
            with self._comm.launch(call, P2PStreamKey(op, self._peer)) as launch:
                launch.add(*post(buffer, self._peer, self._tag))
            launches.append(launch)
        return P2PTransfer(launches, moved)


class P2PChannels:
    """Opens this rank's channels to the ranks that differ from it along the pipeline's axis; all make this object.

    Args:
        timeout_s: seconds; a message on gloo that waits longer fails.
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
        axis, cpu = "+".join(PIPELINE_AXES), torch.device("cpu")
        on_host = CommResources(cpu, timeout_s, streams, BufferPool(cpu), comm_log)
        self._host = self._down = self._up = comm_factory.comm(PIPELINE_AXES, HOST, on_host, axis)
        if kind_of(device).is_in_stream_order:
            on_device = CommResources(device, timeout_s, streams, BufferPool(device), comm_log)
            self._down = comm_factory.comm(PIPELINE_AXES, DOWN, on_device, axis)
            self._up = comm_factory.comm(PIPELINE_AXES, UP, on_device, axis)
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
            on_host: for tensors on the host, also where the device is a GPU.
        """
        # NCCL runs the messages of one communicator one after the other: with one for both directions, two ranks that
        # send to each other at the same time would wait for ever.
        comm = self._host if on_host else self._down if ends[0] < ends[1] else self._up
        group = self._comm_log.open_pipe("+".join(PIPELINE_AXES), (self._ranks[ends[0]], self._ranks[ends[1]]), name)
        channel = P2PChannel(comm, group, ends, tag)
        if not (on_host or channel.waits_on_host or channel.moves_nothing) and ends not in self._connected:
            self._connected.add(ends)
            # The host waits while NCCL makes a communicator: now, in an order that all ranks share, and never later.
            token = torch.zeros(1, dtype=torch.uint8, device=self.device)
            (channel.send if ends[0] == comm.rank else channel.receive)([token], "connect").wait()
        return channel

    def hang_up(self) -> None:
        """Make all ranks that wait for a message of this pipeline fail at once."""
        for comm in dict.fromkeys((self._host, self._down, self._up)):
            comm.hang_up()
