"""Messages between two ranks of a pipeline, counted and named as collectives are (`shardwise.comm`).

A pipe carries from one rank to one other, in one order. On gloo it is told from the others of those ranks by its tag,
and the host waits for its messages. On NCCL there are no tags; the pipes from one rank to another share a communicator,
which no other ranks and no messages of the other direction use, and a stream: so they wait for each other alone, and
run beside the computation. torch makes such a communicator of two ranks for `isend` and `irecv`, in each process group
anew, where the default group was made without a `device_id`. A batch of them would run over the communicator of the
whole group, in which all that it holds waits in one line; and with each direction between two ranks on its own, no
order of sends and receives deadlocks, so none need be posted together.
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

from shardwise.comm_books import RECEIVE, SEND, Call, CommBooks, RankGroup
from shardwise.layout.mesh_shape import PIPELINE_AXES, MeshShape
from shardwise.links import Links, Network
from shardwise.mesh import DOWN, HOST, UP
from shardwise.pending import Pending
from shardwise.streams import Event, PipeLane, Streams

Move = Callable[[Tensor, int, int], list[dist.Work]]


class Transfer(Pending):
    """Tensors on their way, held until they are through; `wait` as for any pending.

    Args:
        wait: for all of them.
        books: of the engine.
        done: the event behind them on the device; None where the host waits (gloo), which cannot ask.
    """

    def __init__(self, wait: Callable[[], None] | None, books: CommBooks, done: Event | None = None) -> None:
        super().__init__(wait)
        self._books = books
        self._done = done

    @property
    def is_on_device(self) -> bool:
        """Whether the device moves them, and not the host."""
        return self._done is not None

    def __del__(self) -> None:
        """As any pending, but when the connections have failed each of many would wait for its own diagnosis."""
        if not self._books.has_failed:
            super().__del__()

    def is_done(self) -> bool:
        """Whether to wait for it would hold up nothing, neither the host nor the compute stream."""
        return self._wait is None or (self._done is not None and self._done.is_reached())


class PipeComm:
    """One end of a pipe: `send` at its source, `receive` at its destination, as often and in the same order.

    Args:
        links: to the ranks of the pipeline.
        group: the pipe in the books.
        ends: source and destination, as ranks of the links.
        tag: of this pipe among those with the same ends.
        device: where the tensors lie.
        timeout_s: a message on gloo that waits longer fails.
        streams: side streams on CUDA.
        books: of the engine.
    """

    def __init__(
        self,
        links: Links,
        group: RankGroup,
        ends: tuple[int, int],
        tag: int,
        device: torch.device,
        timeout_s: float,
        streams: Streams,
        books: CommBooks,
    ) -> None:
        self.device = device
        self.books = books
        self.moves_nothing = links.moves_nothing
        self._links = links
        self._group = group
        self._peer = ends[1] if links.rank == ends[0] else ends[0]
        self._tag = tag
        self._timeout = timedelta(seconds=timeout_s)
        self._streams = streams

    def send(self, buffers: Sequence[Tensor], name: str) -> Transfer:
        """Start to send tensors, each a message; returns at once.

        Args:
            buffers: contiguous; must not change until they are through. Empty ones are no messages.
            name: for counts and messages, the same at both ends.
        """
        return self._start(SEND, buffers, name, self._links.send)

    def receive(self, buffers: Sequence[Tensor], name: str) -> Transfer:
        """Start to fill tensors of the sizes that the other end sends; returns at once. Arguments as for `send`."""
        return self._start(RECEIVE, buffers, name, self._links.receive)

    def _start(self, op: Literal["send", "receive"], buffers: Sequence[Tensor], name: str, move: Move) -> Transfer:
        moved = [buffer for buffer in buffers if buffer.numel() > 0]
        calls = [self.books.add_message(op, name, self._group, buffer) for buffer in moved]
        starts = [partial(move, buffer, self._peer, self._tag) for buffer in moved]
        if not calls:
            return Transfer(None, self.books)
        if self._links.waits_on_host:
            works = [self.books.guarded(call, start) for call, start in zip(calls, starts, strict=True)]
            return Transfer(partial(self._wait_on_host, calls, works, moved), self.books)
        with self._streams.lane(PipeLane(op, self._peer)):
            for call, start in zip(calls, starts, strict=True):
                self.books.guarded(call, start)
            done = Event.record(self.device)
        self.books.enqueue(calls[-1], done)
        # The memory came from the compute stream and goes back to it: not before that has waited for the lane.
        return Transfer(partial(_wait_in_stream, done, moved), self.books, done)

    def _wait_on_host(self, calls: Sequence[Call], works: Sequence[list[dist.Work]], held: list[Tensor]) -> None:
        for call, started in zip(calls, works, strict=True):
            self.books.guarded(call, partial(self._wait_for, started))
        held.clear()

    def _wait_for(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            work.wait(self._timeout)


class Pipes:
    """This rank's pipes to the others that differ from it along the pipeline's axis; all of them make this alike.

    Args:
        network: where links come from.
        shape: of the mesh.
        device: where activations lie.
        timeout_s: a message on gloo that waits longer fails.
        streams: side streams on CUDA.
        books: of the engine.
    """

    def __init__(
        self,
        network: Network,
        shape: MeshShape,
        device: torch.device,
        timeout_s: float,
        streams: Streams,
        books: CommBooks,
    ) -> None:
        self.device = device
        self.examples = network.examples
        self._ranks = shape.ranks_along(PIPELINE_AXES, network.rank)
        self._host = network.links(PIPELINE_AXES, HOST)
        is_cuda = device.type == "cuda"
        self._down = network.links(PIPELINE_AXES, DOWN) if is_cuda else self._host
        self._up = network.links(PIPELINE_AXES, UP) if is_cuda else self._host
        self._timeout_s = timeout_s
        self._streams = streams
        self._books = books
        self._lines: dict[tuple[int, int], deque[Any]] = {}

    @property
    def moves_nothing(self) -> bool:
        """Whether the other ranks are simulated."""
        return self._host.moves_nothing

    @property
    def rank(self) -> int:
        """Of this process along the pipeline's axis."""
        return self._host.rank

    def open(self, ends: tuple[int, int], name: str, tag: int, on_host: bool = False) -> PipeComm:
        """Open a pipe, which both ends do; each rank opens all of its own in the order of their tags.

        Args:
            ends: source and destination, as ranks along the pipeline's axis; this rank is one of them.
            name: that no other pipe of this rank has.
            tag: that no other pipe of the mesh has.
            on_host: for what lies on the host, also beside CUDA.
        """
        links = self._host if on_host else self._links(ends)
        group = self._books.open_pipe("+".join(PIPELINE_AXES), (self._ranks[ends[0]], self._ranks[ends[1]]), name)
        device = torch.device("cpu") if on_host else self.device
        pipe = PipeComm(links, group, ends, tag, device, self._timeout_s, self._streams, self._books)
        if not (on_host or links.waits_on_host or links.moves_nothing) and ends not in self._lines:
            self._lines[ends] = deque()
            # The host waits while NCCL makes a communicator: now, in an order that all ranks share, and never later.
            token = torch.zeros(1, dtype=torch.uint8, device=device)
            (pipe.send if ends[0] == links.rank else pipe.receive)([token], "connect").wait()
        return pipe

    def hang_up(self) -> None:
        """Let all who wait for a message among these ranks fail at once."""
        self._host.hang_up()

    def line(self, ends: tuple[int, int]) -> deque[Any]:
        """Where those wait who receive over pipes with these ends: one line where the links know no tags."""
        if self._links(ends).waits_on_host:
            return deque()
        return self._lines.setdefault(ends, deque())

    def _links(self, ends: tuple[int, int]) -> Links:
        return self._down if ends[0] < ends[1] else self._up


def _wait_in_stream(done: Event, held: list[Tensor]) -> None:
    done.wait()
    held.clear()
