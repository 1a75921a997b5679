"""Messages where the device takes its own time, as with NCCL: side streams that are late, and hosts that run ahead.

Both ends are in this process. A stream that receives makes that of the sender run, as far as it must.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import defaultdict, deque
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.late_streams import LateDevice
from shardwise.comm.backends import NcclComm
from shardwise.comm.collectives import CommResources, Launch, RankPlace
from shardwise.comm.p2p import P2PChannel
from shardwise.comm.records import RECEIVE, SEND, CommLog
from shardwise.pipeline.boundary import Key, RemoteEnd
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import P2PStreamKey, Streams

CPU = torch.device("cpu")


class Delivery:
    """A receive on the host."""

    def __init__(self, mail: deque[Tensor], buffer: Tensor) -> None:
        self._mail = mail
        self._buffer = buffer

    def wait(self, timeout: Any) -> None:
        self._buffer.view(-1).copy_(self._mail.popleft())


class NearComm(NcclComm):
    """Connects two ranks of this process; with a device as NCCL does, else as gloo does."""

    def __init__(self, rank: int, mail: deque[Tensor], comm_log: CommLog, device: LateDevice | None = None) -> None:
        resources = CommResources(CPU, 5.0, Streams(CPU), BufferPool(CPU), comm_log)
        super().__init__(RankPlace(rank, 2, "pp"), resources, None)
        self.waits_on_host = device is None
        self._mail = mail
        self._device = device

    def post_send(self, buffer: Tensor, to: int, tag: int = 0) -> list[Any]:
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

    def post_receive(self, buffer: Tensor, source: int, tag: int = 0) -> list[Any]:
        if self._device is None:
            return [Delivery(self._mail, buffer)]
        device, held = self._device, weakref.ref(buffer)

        def run() -> None:
            sender = device._streams[P2PStreamKey(SEND, self.rank)]  # type: ignore[index]
            while not self._mail:
                assert sender.num_done < len(sender.queue), "what is received is not sent"
                sender.run_until(sender.num_done + 1)
            target, sent = held(), self._mail.popleft()
            assert target is not None, "freed before it was received"
            assert sent.numel() == target.numel(), "sent and received are of different sizes"
            device._copy(target.view(-1), sent)

        device.current.enqueue(run)
        return []


Mails = defaultdict[Any, deque[Tensor]]


class NearChannels:
    """Opens the channels of one of two ranks: tensors of one direction share a device's stream."""

    def __init__(self, rank: int, comm_log: CommLog, mails: Mails, device: LateDevice) -> None:
        self.rank = rank
        self._comm_log = comm_log
        self._mails = mails
        self._device = device

    def open(self, ends: tuple[int, int], name: str, tag: int, on_host: bool = False) -> P2PChannel:
        mail, device = self._mails[tag if on_host else ends], None if on_host else self._device
        comm = NearComm(self.rank, mail, self._comm_log, device)
        return P2PChannel(comm, self._comm_log.open_pipe("pp", ends, name), ends, tag)


class LateEnds:
    """Both ends of two boundaries from rank 0 to rank 1, over one pair of streams; `comm_logs` of both ranks."""

    def __init__(self, device: LateDevice) -> None:
        self.comm_logs = [CommLog(rank) for rank in range(2)]
        mails: Mails = defaultdict(deque)
        channels = [NearChannels(rank, comm_log, mails, device) for rank, comm_log in enumerate(self.comm_logs)]
        self.before = [RemoteEnd(channels[0], index, (0, 1)) for index in range(2)]  # type: ignore[arg-type]
        self.after = [RemoteEnd(channels[1], index, (0, 1)) for index in range(2)]  # type: ignore[arg-type]

    def begin_step(self, keys: list[list[Key]]) -> None:
        for index, each in enumerate(keys):
            self.before[index].begin_step(each)
            self.after[index].begin_step(each)


def make_value(rng: random.Random, size: int) -> list[Tensor]:
    return [torch.full((size, 2), rng.random()), torch.full((size + 1,), rng.randrange(99)).expand(2, size + 1)]


def take_step(ends: LateEnds, rng: random.Random, sizes: list[list[int]]) -> None:
    """Send values of these sizes over both boundaries, in one order; the other end posts and takes at its pace."""
    ends.begin_step([[(True, ((size % 3,),)) for size in each] for each in sizes])  # which does not tell 2 and 5 apart
    plan = [index for index, each in enumerate(sizes) for _ in each]
    rng.shuffle(plan)
    turns = [(index, plan[:place].count(index)) for place, index in enumerate(plan)]
    values = [make_value(rng, sizes[index][micro_batch]) for index, micro_batch in turns]
    num_sent = num_posted = num_taken = 0
    while num_taken < len(turns):
        fate = rng.random()
        if fate < 0.4 and num_sent < len(turns):
            index, micro_batch = turns[num_sent]
            ends.before[index].send(micro_batch, [each.clone() for each in values[num_sent]])
            num_sent += 1
        elif fate < 0.8 and num_posted < len(turns):
            index, micro_batch = turns[num_posted]
            ends.after[index].post(micro_batch, lambda: None)
            num_posted += 1
        elif num_taken < min(num_posted, num_sent):
            index, micro_batch = turns[num_taken]
            assert all(map(torch.equal, ends.after[index].take(micro_batch), values[num_taken]))
            num_taken += 1
    for end in ends.before:
        end.finish()


@pytest.mark.parametrize("seed", range(5))
def test_late_streams_change_no_value(seed: int) -> None:
    rng = random.Random(seed)
    with LateDevice().installed() as device:
        ends = LateEnds(device)
        for _ in range(8):
            take_step(ends, rng, [[rng.choice([2, 2, 2, 3, 5]) for _ in range(rng.randrange(1, 5))] for _ in range(2)])


def test_host_runs_ahead_and_the_watchdog_sees_what_is_enqueued() -> None:
    with LateDevice().installed() as device:
        ends = LateEnds(device)
        for comm_log in ends.comm_logs:
            comm_log.explain = lambda call: None
        take_step(ends, random.Random(0), [[2], [2]])
        assert not ends.comm_logs[0].enqueued  # nothing is agreed: all is sent from host to host
        ends.begin_step([[(True, ((2,),))], [(True, ((2,),))]])
        ends.before[0].send(0, make_value(random.Random(1), 2))
        ends.after[0].post(0, lambda: None)
        sending = device._streams[P2PStreamKey(SEND, 1)]  # type: ignore[index]
        assert sending.num_done == 0
        assert ends.after[0].take(0)[0].shape == (2, 2)
        assert sending.num_done > 0
        assert not device.host_waits
        assert {call.op for call, _ in ends.comm_logs[0].enqueued} == {SEND}
        assert {call.op for call, _ in ends.comm_logs[1].enqueued} == {RECEIVE}
        assert ends.comm_logs[0].enqueued[0][1].is_reached()


def agreed_ends(device: LateDevice) -> LateEnds:
    """Ends that have agreed on values of size 2, at the beginning of a step of two micro-batches."""
    ends = LateEnds(device)
    take_step(ends, random.Random(0), [[2], [2]])
    ends.begin_step([[(True, ((2,),))] * 2] * 2)
    return ends


def test_what_has_left_is_held_no_longer_than_to_the_next_send() -> None:
    """Gradients would be until the end of the step: nothing comes back for them."""
    with LateDevice(num_asks=0).installed() as device:
        ends = agreed_ends(device)
        value = make_value(random.Random(1), 2)
        sent = weakref.ref(value[0].untyped_storage())
        ends.before[0].send(0, value)
        del value
        assert sent() is not None
        ends.before[0].send(1, make_value(random.Random(2), 2))
        assert sent() is None
        for micro_batch in range(2):
            ends.after[0].post(micro_batch, lambda: None)
            ends.after[0].take(micro_batch)
        ends.before[0].finish()


def num_launches() -> int:
    gc.collect()
    return sum(isinstance(each, Launch) for each in gc.get_objects())


def test_a_message_is_over_once_its_gradient_is_there() -> None:
    """On gloo a communicator holds what it has launched until that has been waited for."""
    with LateDevice(num_asks=10**9).installed() as device:
        ends = agreed_ends(device)
        before, after = ends.before[0], ends.after[0]
        num_before = num_launches()
        for micro_batch in range(2):
            before.send(micro_batch, make_value(random.Random(micro_batch), 2))
            after.post(micro_batch, lambda: None)
            after.take(micro_batch)
            after.send(micro_batch, make_value(random.Random(micro_batch), 2))
            before.post(micro_batch, lambda: None)
            before.take(micro_batch)
        after.finish()
        assert num_launches() == num_before
