"""Messages between two ranks: what arrives, what is counted, what is held, and what is said when a peer is gone."""

from __future__ import annotations

import time
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from harness.pool import WorkerPool
from harness.refusals import refusal_of, refused
from harness.time_outs import answers_may_be_late, fail_after
from shardwise.comm.backends import ProcessGroupFactory
from shardwise.comm.collectives import CommResources
from shardwise.comm.consistency import divergence
from shardwise.comm.mesh import Mesh, open_store
from shardwise.comm.p2p import P2PChannels
from shardwise.comm.records import RECEIVE, SEND, CommLog
from shardwise.comm.watchdog import watch
from shardwise.config.resolve import RunConfig
from shardwise.layout.mesh_shape import MeshShape
from shardwise.runtime.device import Streams
from shardwise.runtime.timeline import Timeline

CPU = torch.device("cpu")
EVERY_DTYPE = [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


def make_pipes(
    shape: MeshShape, timeout_s: float = 20.0, comm_log: CommLog | None = None
) -> tuple[P2PChannels, CommLog]:
    network = ProcessGroupFactory(Mesh(shape, timeout_s))
    comm_log = comm_log or CommLog(network.rank)
    return P2PChannels(network, shape, CPU, timeout_s, Streams(CPU), comm_log), comm_log


def send_to_neighbours(rank: int, world_size: int) -> tuple[list[list[float]], dict[str, tuple[int, int]], list[str]]:
    """Each rank of a ring sends to both others, and posts its receives late and in another order of pipes."""
    pipes, comm_log = make_pipes(MeshShape(pp=world_size))
    all_ends = [(a, b) for a in range(world_size) for b in range(world_size) if a != b]
    mine = {ends: pipes.open(ends, f"pipe {ends}", tag) for tag, ends in enumerate(all_ends) if rank in ends}
    sent = [
        pipe.send([torch.full((2, 2), 10.0 * rank + index), torch.empty(0)], f"message {index}")
        for ends, pipe in mine.items()
        if ends[0] == rank
        for index in range(3)
    ]
    time.sleep(0.05 * rank)
    posted = []
    for ends in [ends for ends in mine if ends[1] == rank][::-1]:
        buffers = [torch.empty(2, 2) for _ in range(3)]
        posted += [(mine[ends].receive([buffer], f"message {i}"), buffer) for i, buffer in enumerate(buffers)]
    for transfer, _ in posted:
        transfer.wait()
    for transfer in sent:
        transfer.wait()
    counts = {op: (count.num_calls, count.wire_bytes) for (_, op), count in comm_log.counts.items()}
    return [buffer[0].tolist() for _, buffer in posted], counts, [str(call) for call in comm_log.recent]


def test_messages_arrive_in_order_and_are_counted_once(ranks: WorkerPool) -> None:
    results = ranks(3).run(send_to_neighbours)
    for rank, (received, counts, names) in enumerate(results):
        others = [other for other in range(3) if other != rank][::-1]
        assert received == [[10.0 * other + index] * 2 for other in others for index in range(3)]
        assert counts == {"send": (6, 6 * 16), "receive": (6, 0)}
        assert names[0] == "send #1 of message 0 over pp (2 ranks)"
        assert names[-1] == "receive #12 of message 2 over pp (2 ranks)"


def send_every_dtype(rank: int, world_size: int) -> list[bool]:
    pipes, _ = make_pipes(MeshShape(pp=2))
    pipe = pipes.open((0, 1), "pipe", 3)
    tensors = [torch.arange(4).to(torch.float32).to(dtype) for dtype in EVERY_DTYPE]
    buffers = tensors if rank == 0 else [torch.zeros_like(tensor) for tensor in tensors]
    (pipe.send if rank == 0 else pipe.receive)(buffers, "all").wait()
    return [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(tensors, buffers, strict=True)]


def test_every_dtype_is_sent(ranks: WorkerPool) -> None:
    assert ranks(2).run(send_every_dtype) == [[True] * len(EVERY_DTYPE)] * 2


def hold_until_done(rank: int, world_size: int) -> tuple[bool, ...]:
    """The receiver comes late: what the sender has let go of is held until then, and no longer."""
    pipes, _ = make_pipes(MeshShape(pp=2))
    pipe = pipes.open((0, 1), "pipe", 0)
    if rank == 1:
        dist.barrier()  # to which the other comes once it has seen that nothing is through
        first = torch.zeros(1000)
        pipe.receive([first], "kept").wait()
        return (bool((first == 7).all()),)
    tensor = torch.full((1000,), 7.0)
    gone = weakref.ref(tensor)
    transfer = pipe.send([tensor], "kept")
    del tensor
    was_held, was_done = gone() is not None, transfer.is_done()
    dist.barrier()
    transfer.wait()
    transfer.wait()
    return was_held, was_done, gone() is None, transfer.is_done()


def test_tensors_are_held_until_they_are_through(ranks: WorkerPool) -> None:
    assert ranks(2).run(hold_until_done) == [(True, False, True, True), (True,)]


def wait_for_the_late(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 1 of a pair is busy elsewhere; the other's error says where."""
    store = open_store()
    comm_log = CommLog(rank)
    pipes, _ = make_pipes(MeshShape(pp=2), comm_log=comm_log)
    pipe = pipes.open((0, 1), "pipe", 0)
    watchdog = watch(store, comm_log, Timeline(rank), RunConfig(watchdog_s=0.5, timeout_s=20.0), CPU)
    assert store is not None
    assert watchdog is not None
    try:
        if rank == 0:
            pipe.send([torch.ones(4)], "first").wait()
            idle_while_the_other_waits(store)
            return "", ""
        pipe.receive([torch.ones(4)], "first").wait()
        fail_after(comm_log, 1.5)
        with answers_may_be_late():
            refusal = refusal_of(lambda: pipe.receive([torch.ones(4)], "second").wait())
        store.set("reported", "")
        return refusal
    finally:
        watchdog.close()


def idle_while_the_other_waits(store: dist.Store) -> None:
    while not store.check(["reported"]):
        time.sleep(0.01)


def test_watchdog_knows_messages(ranks: WorkerPool) -> None:
    code, text = ranks(2).run(wait_for_the_late)[1]
    assert code == "collective-failed"
    assert text.startswith(
        "rank 1 failed in receive #2 of second over pp (2 ranks): rank 0 has not started receive #2 of second"
    )
    assert "in idle_while_the_other_waits" in text
    assert "after send #1 of first" in text


def test_two_ends_of_a_message_are_no_divergence() -> None:
    """They are at one position of a pipe, and ranks with more pipes than others agree on the groups opened later."""
    notes = {}
    for rank, op in enumerate((SEND, RECEIVE, RECEIVE)):
        comm_log = CommLog(rank)
        if rank < 2:
            pipe = comm_log.open_pipe("pp", (0, 1), "pipe")
            notes[rank] = comm_log.add_message(op, "hidden", pipe, torch.zeros(4)).note()
        assert comm_log.open_group("dp_shard", (0, 1, 2)).key == "0.0"
    assert divergence(notes) == ""
    assert notes[0].group == notes[1].group
    with pytest.raises(ValueError, match="'twice'"):
        [comm_log.open_pipe("pp", (0, 1), "twice") for _ in range(2)]


def test_a_bound_device_is_refused_where_messages_would_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it torch runs all messages of a group over one communicator, in one line."""
    mesh = SimpleNamespace(rank=1, shape=MeshShape(pp=3))
    monkeypatch.setattr(
        "shardwise.comm.backends.dist.group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id="cuda:1"))
    )
    with refused("process-group-device-id", "device_id=cuda:1"):
        ProcessGroupFactory(mesh).comm(("pp",), "down", CommResources.alone(CPU, 1.0), "pp")  # type: ignore[arg-type]
