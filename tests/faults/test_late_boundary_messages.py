"""Messages where the device takes its own time, as with NCCL: side streams that are late, and hosts that run ahead.

Both ends are in this process. A stream that receives makes that of the sender run, as far as it must.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.late_streams import LateDevice
from shardwise.comm.p2p import P2PChannel
from shardwise.comm.records import RECEIVE, SEND, CommLog
from shardwise.pipeline.boundary_messages import P2PDirection, Receiver, Sender
from shardwise.runtime.streams import P2PStreamKey, Streams

CPU = torch.device("cpu")


class Delivery:
    """A receive on the host."""

    def __init__(self, mail: deque[Tensor], buffer: Tensor) -> None:
        self._mail = mail
        self._buffer = buffer

    def wait(self, timeout: Any) -> None:
        self._buffer.view(-1).copy_(self._mail.popleft())


class NearLinks:
    """Links between two ranks of this process; with a device, as those of NCCL, else as those of gloo."""

    moves_nothing = False
    world_size = 2

    def __init__(self, rank: int, mail: deque[Tensor], device: LateDevice | None = None) -> None:
        self.rank = rank
        self.waits_on_host = device is None
        self._mail = mail
        self._device = device

    def send(self, buffer: Tensor, to: int, tag: int = 0) -> list[Any]:
        if self._device is None:
            self._mail.append(buffer.clone().view(-1))
            return []
        held = weakref.ref(buffer)

        def run() -> None:
            tensor = held()
            assert tensor is not None, "freed before it was sent"
            self._mail.append(tensor.clone().view(-1))

        self._device.current.enqueue(run)
        return []

    def receive(self, buffer: Tensor, source: int, tag: int = 0) -> list[Any]:
        if self._device is None:
            return [Delivery(self._mail, buffer)]
        device, held = self._device, weakref.ref(buffer)

        def run() -> None:
            sender = device._streams[P2PStreamKey(SEND, 1)]  # type: ignore[index]
            while not self._mail:
                assert sender.num_done < len(sender.queue), "what is received is not sent"
                sender.run_until(sender.num_done + 1)
            target, sent = held(), self._mail.popleft()
            assert target is not None, "freed before it was received"
            assert sent.numel() == target.numel(), "sent and received are of different sizes"
            device._copy(target.view(-1), sent)

        device.current.enqueue(run)
        return []


class LateEnds:
    """Two ways from rank 0 to rank 1, over one pair of streams; `comm_logs` of both ranks."""

    def __init__(self, device: LateDevice) -> None:
        self.comm_logs = [CommLog(rank) for rank in range(2)]
        tensors, lines = deque[Tensor](), [deque[Any](), deque[Any]()]
        self.outboxes: list[Sender] = []
        self.inboxes: list[Receiver] = []
        for index in range(2):
            headers, texts = deque[Tensor](), deque[Tensor]()
            for rank in range(2):
                comm_log, mails = self.comm_logs[rank], ((headers, None), (texts, None), (tensors, device))
                pipes = [
                    P2PChannel(
                        NearLinks(rank, mail, late),  # type: ignore[arg-type]
                        comm_log.open_pipe("pp", (0, 1), f"way {index}.{place}"),
                        (0, 1),
                        0,
                        CPU,
                        5.0,
                        Streams(CPU),
                        comm_log,
                    )
                    for place, (mail, late) in enumerate(mails)
                ]
                way = P2PDirection(f"way {index}", *pipes, lines[rank])
                if rank == 0:
                    self.outboxes.append(Sender(way))
                else:
                    self.inboxes.append(Receiver(way, (), None))


def make_value(rng: random.Random, size: int) -> list[Tensor]:
    return [torch.full((size, 2), rng.random()), torch.full((size + 1,), rng.randrange(99)).expand(2, size + 1)]


def runs_of(rng: random.Random, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Which way, and the size: mostly the same a few times."""
    return [(rng.randrange(2), size) for size in sizes for _ in range(rng.randrange(1, 7))]


@pytest.mark.parametrize("seed", range(5))
def test_late_streams_change_no_value(seed: int) -> None:
    rng = random.Random(seed)
    with LateDevice().installed() as device:
        ends = LateEnds(device)
        plan = runs_of(rng, [3, 4, 3, 5, 5, 1, 3])
        values = [make_value(rng, size) for _, size in plan]
        sent: list[Any] = []
        posted: list[Any] = []
        num_checked = 0
        while num_checked < len(plan):
            fate = rng.random()
            if fate < 0.4 and len(sent) < len(plan):
                sent.append(ends.outboxes[plan[len(sent)][0]].send([each.clone() for each in values[len(sent)]]))
            elif fate < 0.8 and len(posted) < len(plan):
                posted.append(ends.inboxes[plan[len(posted)][0]].post())
            elif num_checked < min(len(posted), len(sent)):
                received = posted[num_checked].wait()
                assert all(map(torch.equal, received, values[num_checked]))
                num_checked += 1
        for each in sent:
            each.wait()
            assert each.is_done()


def test_host_runs_ahead_and_the_watchdog_sees_what_is_enqueued() -> None:
    with LateDevice().installed() as device:
        ends = LateEnds(device)
        for comm_log in ends.comm_logs:
            comm_log.explain = lambda call: None
        sent = ends.outboxes[0].send([torch.ones(2)])
        receive = ends.inboxes[0].post()
        received_before = device._streams[P2PStreamKey(SEND, 1)].num_done  # type: ignore[index]
        assert received_before == 0
        assert not sent.is_done()
        assert receive.wait()[0].tolist() == [1.0, 1.0]
        assert sent.is_done()
        assert not device.host_waits
        assert [call.op for call, _ in ends.comm_logs[0].enqueued] == [SEND]
        assert [call.op for call, _ in ends.comm_logs[1].enqueued] == [RECEIVE]
        assert ends.comm_logs[0].enqueued[0][1].is_reached()
