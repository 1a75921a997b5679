"""Hangs, deaths and divergences: each ends in one clear line, and the watchdog tells what every rank does."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.killed_ranks import refusal_after_a_kill
from harness.pool import WorkerPool
from harness.refusals import refusal_of, refused
from harness.time_outs import answers_may_be_late, fail_after
from harness.training import make_config
from harness.waiting import PATIENCE_S, wait_until
from shardwise import Engine, initialize
from shardwise.checkpoint.manifest import agreed
from shardwise.comm.agreement import Agreement
from shardwise.comm.backends import ProcessGroupFactory
from shardwise.comm.mesh import CommGroups, Mesh, connect, open_store
from shardwise.comm.records import Collective, CollectiveNote, CommLog
from shardwise.comm.store import PatientStore, StoreSilentError
from shardwise.comm.watchdog import RankReport, Watchdog, diagnose, render, watch
from shardwise.config.resolve import RunConfig
from shardwise.construction.scan import build_layout
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import Event, Streams
from shardwise.runtime.timeline import Timeline

pytestmark = pytest.mark.usefixtures("warm_python")

# How long others are silently waited for: longer than a machine may stall; and for ranks that come.
SILENT_S, TIMEOUT_S = 2.0, 60.0
# In which a call times out: after it has been reported.
SHORT_S = 2 * SILENT_S
# For an answer that never comes.
NO_ANSWER_S = 0.2
CPU = torch.device("cpu")
RUN = {"device": "cpu", "timeout_s": TIMEOUT_S, "watchdog_s": SILENT_S}


class Stack(nn.Module):
    """Blocks of equal size; `skipped` is passed over, and each block first does `pause`."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up = nn.Linear(width, width)
            self.pause: Callable[[], object] = lambda: None

        def forward(self, x: Tensor) -> Tensor:
            self.pause()
            return torch.tanh(self.up(x))

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stack.Block(width) for _ in range(4))
        self.skipped: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index == self.skipped else block(x)
        return x


@contextmanager
def entered(comm_log: CommLog, call: Collective) -> Iterator[None]:
    comm_log.begin(call)
    yield
    comm_log.end()


def make(model: nn.Module, stage: int = 3, num_shards: int | None = None, **run: Any) -> Engine:
    config = make_config(1, {"zero": {"stage": stage}, "mesh": {"dp_shard": num_shards}, "run": {**RUN, **run}})
    return initialize(model, config, loss_fn=lambda output, _: (output.square().sum(), output.numel()))


def batch() -> Tensor:
    return torch.ones(2, 8, dtype=torch.float64)


def make_comms() -> CommGroups:
    """The groups of an engine that checks its collectives, without the engine."""
    run = {**RUN, "check_collectives": True}
    config = make_config(1, {"run": run}).resolve(dist.get_world_size())
    layout = build_layout(nn.Linear(1, 1), config)
    network = ProcessGroupFactory(Mesh(layout.mesh, TIMEOUT_S), open_store())
    return connect(network, layout.mesh, config, CPU, Streams(CPU), BufferPool(CPU))


class Records(logging.Handler):
    """What the library logs, from warnings on; `on_message` is called after each."""

    def __init__(self, on_message: Callable[[], object]) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self._on_message = on_message
        logging.getLogger("shardwise").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self._on_message()


# Before a collective starts


def diverge(rank: int, world_size: int, kind: str) -> tuple[str, str]:
    """Two equal collectives, then one that differs on rank 1."""
    shards = make_comms().shards
    for name in ("blocks.0", "blocks.1"):
        shards.all_gather(torch.zeros(world_size * 4), name).wait()
    odd = rank == 1
    full = torch.zeros(world_size * (8 if odd and kind == "size" else 4))
    full = full.bfloat16() if odd and kind == "dtype" else full
    if odd and kind == "op":
        return refusal_of(lambda: shards.reduce_scatter(full, full[:4], accumulate=False, name="blocks.2"))
    return refusal_of(lambda: shards.all_gather(full, "blocks.3" if odd and kind == "order" else "blocks.2"))


OTHERS = "ranks 0, 2 at all_gather #3 of blocks.2 (12 x fp32 over dp_shard)"
DIVERGENCES = {
    "order": "all_gather #3 of blocks.3 (12 x fp32 over dp_shard)",
    "op": "reduce_scatter #3 of blocks.2 (12 x fp32 over dp_shard)",
    "size": "all_gather #3 of blocks.2 (24 x fp32 over dp_shard)",
    "dtype": "all_gather #3 of blocks.2 (12 x bf16 over dp_shard)",
}


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_divergence_is_named_before_the_collective_starts(ranks: WorkerPool, kind: str) -> None:
    refusals = ranks(3).run(diverge, kind)
    assert len(set(refusals)) == 1
    code, message = refusals[0]
    assert code == "collectives-differ"
    assert f"rank 1 is at {DIVERGENCES[kind]}, {OTHERS}" in message


def skip_a_block(rank: int, world_size: int, check: bool) -> tuple[str, str]:
    model = Stack().double()
    engine = make(model, check_collectives=check)
    engine.train_step([batch()])
    model.skipped = 2 if rank == 1 else None
    fail_after(engine.comm.comm_log, SHORT_S)
    store = open_store()
    assert store is not None
    with answers_may_be_late():
        refusal = refusal_of(lambda: engine.train_step([batch()]))
        store.set(f"refused/{rank}", "")  # until then the other may ask this rank's watchdog
        store.wait([f"refused/{other}" for other in range(world_size)])
        return refusal


def test_check_mode_names_the_block_that_one_rank_skips(ranks: WorkerPool) -> None:
    first, second = ranks(2).run(skip_a_block, True)
    assert first == second
    assert first[0] == "collectives-differ"
    assert re.match(r"rank 1 is at all_gather #\d+ of .* blocks\.\d .*, rank 0 at all_gather #\d+ of", first[1])


def train_checked(rank: int, world_size: int, check: bool) -> tuple[list[float], int]:
    engine = make(Stack().double(), num_shards=2, check_collectives=check)
    store = engine.parts.comm_factory.store
    before = store.num_keys()
    losses = [engine.train_step([batch() * (1 + rank)]).loss for _ in range(3)]
    engine.comm.sum_scalars(torch.zeros(1, dtype=torch.float64), "meet")
    grown = store.num_keys() - before
    dist.barrier()
    engine.close()
    return losses, grown


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_checked_training_is_the_same_and_leaves_nothing_in_the_store(ranks: WorkerPool, num_ranks: int) -> None:
    checked, plain = ranks(num_ranks).run(train_checked, True), ranks(num_ranks).run(train_checked, False)
    assert [losses for losses, _ in checked] == [losses for losses, _ in plain]
    # What is being compared at the moment: the notes, a verdict, and who has read it.
    assert all(grown <= num_ranks + 2 for _, grown in checked)


def come_late(rank: int, world_size: int) -> tuple[str, str]:
    shards = make_comms().shards
    if rank == 1:
        return "", ""
    fail_after(shards.comm_log, 1.0)
    return refusal_of(lambda: shards.all_gather(torch.zeros(4), "blocks.0"))


def test_a_rank_that_does_not_come_to_a_check_is_named(ranks: WorkerPool) -> None:
    code, message = ranks(2).run(come_late)[0]
    assert code == "rank-missing"
    assert all(value in message for value in ("rank 1", "all_gather #1 of blocks.0", "1 s"))


# At initialize


def build_differently(rank: int, world_size: int, kind: str) -> tuple[str, str]:
    odd = rank == 1
    model = Stack(9 if odd and kind == "shape" else 8)
    if kind == "buffer":
        model.register_buffer("positions", torch.zeros(3 if odd else 2))
    if kind == "missing" and not odd:
        model.blocks.append(Stack.Block(8))
    if kind == "order" and odd:
        up = model.blocks[3].up
        weight = up.weight
        del up.weight
        up.weight = weight  # after the bias
    if kind == "frozen" and odd:
        model.blocks[1].requires_grad_(False)
    stage = 2 if odd and kind == "config" else 3
    own = {"name": f"rank{rank}", "dir": f"runs{rank}", "num_threads": 1 + rank}
    return refusal_of(lambda: make(model.double(), stage, **own).close())


DIFFERENCES = {
    "equal": "",
    "shape": "rank 1 has blocks.0.up.weight of shape (9, 9), rank 0 (8, 8)",
    "buffer": "rank 1 has buffer positions of shape (3,), rank 0 (2,)",
    "missing": "rank 1 has no blocks.4.up.weight, rank 0 has it",
    "frozen": "rank 1 has blocks.1.up.weight with requires_grad False, rank 0 True",
    "order": "rank 1 has blocks.3.up.bias as parameter 6, rank 0 blocks.3.up.weight",
    "config": "rank 1 has zero.stage=2, rank 0 3",
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_ranks_that_built_differently_learn_what_differs(ranks: WorkerPool, kind: str) -> None:
    first, second = ranks(2).run(build_differently, kind)
    assert first == second
    assert first[0] == ("" if kind == "equal" else "setups-differ")
    assert DIFFERENCES[kind] in first[1]


# While it hangs


def stay_away(store: dist.Store) -> None:
    while not store.check(["reported"]):
        time.sleep(0.01)


def hang(rank: int, world_size: int, times_out: bool) -> tuple[tuple[str, str], list[str]]:
    """Rank 1 stays in a block's forward until another has reported that, or has failed; others wait for it."""
    store = open_store()
    assert store is not None
    records = Records(lambda: times_out or store.set("reported", ""))
    model = Stack().double()
    engine = make(model)
    engine.train_step([batch()])
    if rank == 1:

        def pause() -> None:
            stay_away(store)
            time.sleep(0.0 if times_out else SILENT_S / 2)  # in which it could be reported again
            fail_after(engine.comm.comm_log, 0.1 if times_out else TIMEOUT_S)

        model.blocks[2].pause = pause
        return refusal_of(lambda: engine.train_step([batch()])), records.messages
    fail_after(engine.comm.comm_log, SHORT_S if times_out else TIMEOUT_S)
    with answers_may_be_late():
        refusal = refusal_of(lambda: engine.train_step([batch()]))
    store.set("reported", "")
    return refusal, [each for each in records.messages if "in stay_away" in each.splitlines()[0]]


def test_a_rank_that_hangs_in_user_code_is_reported_once_with_its_line(ranks: WorkerPool) -> None:
    answers = ranks(3).run(hang, False)
    assert [code for (code, _), _ in answers] == [""] * 3
    reports = [reports for _, reports in answers]
    assert [len(each) for each in reports] == [1, 0, 0]
    headline, *lines = reports[0][0].splitlines()
    first_line, pausing_line = (each.__code__.co_firstlineno for each in (stay_away, Stack.Block.forward))
    assert headline.startswith("shardwise: rank 0 is in all_gather #")
    place = rf"test_watchdog.py:({first_line + 1}|{first_line + 2}) in stay_away"
    assert re.search(rf"it is at {place}, \d+ s after all_gather #", headline)
    assert any(re.match(r"  ranks 0, 2: in all_gather #\d+ .* for \d+ s", each) for each in lines)
    assert any(f"test_watchdog.py:{pausing_line + 1} in forward" in each for each in lines if each.startswith("      "))
    assert any("last actions: " in each and "0UNSHARD[blocks.1]" in each for each in lines)


def test_a_collective_that_times_out_says_who_is_late(ranks: WorkerPool) -> None:
    ((code, message), reports), _ = ranks(2).run(hang, True)
    assert code == "collective-failed"
    assert message.startswith("rank 0 failed in all_gather #")
    assert "rank 1 has not started all_gather #" in message
    assert re.search(r"it is at test_watchdog.py:\d+ in stay_away", message)
    assert "\n" not in message
    assert len(reports) == 1


def test_without_checks_the_watchdog_names_the_first_divergence(ranks: WorkerPool) -> None:
    refusals = ranks(2).run(skip_a_block, False)
    assert any(
        "rank 1 is at all_gather #" in message and ", rank 0 at all_gather #" in message for _, message in refusals
    )


def die(rank: int) -> Callable[[], Any]:
    engine = make(Stack().double())
    engine.train_step([batch()])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return lambda: engine.train_step([batch()])


def test_a_killed_rank_is_named_by_those_that_live() -> None:
    code, message = refusal_after_a_kill(die, NO_ANSWER_S)
    assert code == "collective-failed"
    assert message.startswith("rank 0 failed in ")
    assert "rank 1 does not answer: it died, was stopped or hangs in native code; rank 0 waits for it in " in message


# The thread


def watched(store: dist.Store, rank: int, patience_s: float = 0.2) -> tuple[CommLog, Watchdog]:
    comm_log = CommLog(rank)
    return comm_log, Watchdog(store, comm_log, Timeline(rank), 2, patience_s, CPU)


def gather(comm_log: CommLog) -> Collective:
    group = comm_log.open_group("dp_shard", (0, 1)) if not comm_log.recent else comm_log.recent[-1].group
    return comm_log.add("all_gather", f"blocks.{comm_log.num_calls}", group, torch.zeros(8), passes=1)


@pytest.mark.parametrize("kind", ["hash", "file", "prefix"])
def test_two_watchdogs_meet_over_any_store(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2) if kind == "file" else dist.HashStore()
    store = dist.PrefixStore("part", store) if kind == "prefix" else store
    (comm_log, own), (others, other) = watched(store, 0), watched(store, 1)
    with answers_may_be_late(), entered(comm_log, gather(comm_log)):
        assert wait_until(lambda: bool(caplog.messages))
    assert len(caplog.messages) == 1
    assert "rank 1 has not started all_gather #1 of blocks.0: it is at " in caplog.messages[0]
    own.close()
    other.close()
    assert others.num_calls == 0
    assert wait_until(lambda: not any(each.name == "shardwise-watchdog" for each in threading.enumerate()))


@contextmanager
def held_store() -> Iterator[tuple[dist.Store, subprocess.Popen[str]]]:
    """A store that another process holds."""
    with subprocess.Popen([sys.executable, "-c", STORE_HOST], stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            yield dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False), host
        finally:
            host.kill()


STORE_HOST = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_silent_store_hides_neither_where_a_rank_waits_nor_the_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Its host is stopped, as when rank 0's process is: torch's own requests would never return."""
    with held_store() as (store, host), patch("shardwise.comm.watchdog._ANSWER_S", NO_ANSWER_S):
        comm_log, watchdog = watched(store, 0)
        call = gather(comm_log)
        host.send_signal(signal.SIGSTOP)
        with entered(comm_log, call):
            assert wait_until(lambda: bool(caplog.messages))
            assert "rank 0 is in all_gather #1 of blocks.0" in caplog.messages[0]
            assert "the store has not answered" in caplog.messages[0]
            assert "the store has not answered" in str(watchdog.explain(call))
        host.send_signal(signal.SIGCONT)
        assert wait_until(lambda: store.check(["num_alarms"]))
        watchdog.close()


def test_requests_to_a_silent_store_end_and_a_store_that_comes_back_is_heard() -> None:
    with held_store() as (store, host):
        patient = PatientStore(store, 1.0, "part")
        patient.set("key", "value")
        host.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: is_stopped(host.pid))
        with refused("store-silent", "1 s"):
            patient.get("key")
        agreement = Agreement(patient, (0, 1), 1, timeout_s=1.0)
        with refused("store-silent", "ranks 0, 1", "the door"):
            agreement.compare("the door", "", lambda notes: "")
        with refused("store-gone"):
            agreed(agreement.run("write", lambda: ""))
        host.send_signal(signal.SIGCONT)
        assert wait_until(lambda: is_answered(patient))


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def is_answered(store: PatientStore) -> bool:
    try:
        return store.get("key") == b"value"
    except StoreSilentError:
        return False


def test_a_rank_that_was_stopped_itself_has_not_waited_meanwhile() -> None:
    """It comes back to a collective that is old by the clock, but was not held up."""
    comm_log, watchdog = watched(dist.HashStore(), 0, patience_s=100.0)
    with entered(comm_log, gather(comm_log)):
        assert watchdog._waited_s(comm_log.inside) == 0.0
        later_s = time.monotonic() + 1000.0
        with patch("shardwise.runtime.clock.time.monotonic", lambda: later_s):
            assert 0.0 < watchdog._waited_s(comm_log.inside) <= 2.0
    watchdog.close()


def test_a_report_whose_wait_is_over_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The other rank never answers, so the report comes a second after the alarm."""
    store = dist.HashStore()
    comm_log, watchdog = watched(store, 0)
    with entered(comm_log, gather(comm_log)):
        assert wait_until(lambda: store.check(["num_answers/1"]))
    assert wait_until(lambda: not store.check(["answer/1/0"]))  # the report has read it
    assert not caplog.messages
    watchdog.close()


def test_a_rank_that_has_only_just_entered_its_collective_does_not_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The lowest rank that is held up reports; rank 0 would have to wait for 50 s to be one."""
    store = dist.HashStore()
    (comm_log, own), (others, other) = watched(store, 0, patience_s=100.0), watched(store, 1)
    with answers_may_be_late(), entered(comm_log, gather(comm_log)), entered(others, gather(others)):
        assert wait_until(lambda: bool(caplog.messages))
    assert [message.splitlines()[0].partition(" is in ")[0] for message in caplog.messages] == ["shardwise: rank 1"]
    own.close()
    other.close()


def test_a_rank_that_closed_its_engine_is_not_taken_for_dead() -> None:
    store = dist.HashStore()
    (comm_log, own), (_others, other) = watched(store, 0), watched(store, 1)
    other.close()
    call = gather(comm_log)
    with entered(comm_log, call), patch("shardwise.comm.watchdog._ANSWER_S", NO_ANSWER_S):
        assert own.explain(call) == "rank 1 has closed its engine; rank 0 waits for it in all_gather #1 of blocks.0"
    own.close()


def test_the_thread_ends_with_records_that_are_gone() -> None:
    comm_log, _ = watched(dist.HashStore(), 0)
    del comm_log
    gc.collect()
    assert wait_until(lambda: not any(each.name == "shardwise-watchdog" for each in threading.enumerate()))


def test_no_watchdog_where_it_has_no_use() -> None:
    comm_log, timeline = CommLog(), Timeline(0)
    assert watch(None, comm_log, timeline, RunConfig(), CPU) is None
    assert watch(dist.HashStore(), comm_log, timeline, RunConfig(watchdog_s=0.0), CPU) is None
    assert comm_log.explain is None


class HungUp:
    """A communicator that notes that it was hung up."""

    num_calls = 0

    def hang_up(self) -> None:
        self.num_calls += 1


def test_what_the_device_waits_for_ends_after_a_failure_elsewhere() -> None:
    store = dist.HashStore()
    (comm_log, own), (_, other) = watched(store, 0, patience_s=2.0), watched(store, 1)
    comm = HungUp()
    comm_log.comms.add(comm)
    comm_log.enqueue(gather(comm_log), Event(Unreached()))
    assert not wait_until(lambda: comm_log.has_failed, timeout_s=1.2)  # the rank may only be late
    other.note_failure("ValueError: no such batch")
    assert wait_until(lambda: comm.num_calls > 0)
    assert comm_log.has_failed
    own.close()
    other.close()


def test_what_the_host_waits_for_is_left_to_its_connections() -> None:
    store = dist.HashStore()
    (comm_log, own), (_, other) = watched(store, 0), watched(store, 1)
    comm = HungUp()
    comm_log.comms.add(comm)
    other.note_failure("ValueError: no such batch")
    with entered(comm_log, gather(comm_log)):
        assert not wait_until(lambda: comm_log.has_failed, timeout_s=0.5)
    assert comm.num_calls == 0
    own.close()
    other.close()


LIVE_THREAD = """
import time, torch, torch.distributed as dist
from shardwise.comm.records import CommLog
from shardwise.runtime.timeline import Timeline
from shardwise.comm.watchdog import Watchdog
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
comm_log = CommLog()
watchdog = Watchdog(store.clone(), comm_log, Timeline(0), 2, 0.001, torch.device("cpu"))
time.sleep(0.2)
"""


def test_the_interpreter_ends_cleanly_with_a_live_thread() -> None:
    done = subprocess.run([sys.executable, "-c", LIVE_THREAD], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")


class Unreached:
    """A CUDA event that the device has not come to."""

    def query(self) -> bool:
        return False


def test_on_cuda_the_oldest_unfinished_collective_counts_since_it_became_the_oldest() -> None:
    comm_log, watchdog = watched(dist.HashStore(), 0, patience_s=100.0)
    first, second, third = gather(comm_log), gather(comm_log), gather(comm_log)
    for call, done in ((first, Event(None)), (second, Event(Unreached())), (third, Event(None))):
        comm_log.enqueue(call, done)
    moment = watchdog._moment(comm_log)
    assert moment is not None
    assert moment.call is second
    assert watchdog._moment(comm_log) == moment
    comm_log.enqueued[0] = (second, Event(None))
    with entered(comm_log, third):  # the host waits, but the device goes on
        assert watchdog._moment(comm_log) is None
    watchdog.close()


# The diagnosis


def note(op: str = "all_gather", name: str = "blocks.0", position: int = 5, group: str = "0.0") -> CollectiveNote:
    return CollectiveNote(position, op, name, "dp_shard", group, position, 64, "bf16")


def report(
    rank: int, inside: CollectiveNote | None = None, members: tuple[int, ...] = (0, 1), begun: int = 5
) -> RankReport:
    recent = () if inside is None else (inside,)
    return RankReport(rank, "host", 1, inside, 9.0, members, {"0.0": begun}, recent, 9.0)


def test_ranks_in_different_collectives_of_one_group_have_diverged() -> None:
    other = note("reduce_scatter", "blocks.3")
    assert diagnose({0: report(0, note()), 1: report(1, other)}).startswith(
        "rank 1 is at reduce_scatter #5 of blocks.3 (64 x bf16 over dp_shard), rank 0 at all_gather #5 of blocks.0"
    )


def test_exchanges_of_one_name_have_not_diverged_whatever_each_rank_sends() -> None:
    def inside(rank: int, name: str) -> CollectiveNote:
        comm_log = CommLog(rank)
        return comm_log.add_exchange(name, comm_log.open_group("cp", (0, 1)), 10 * rank).note()

    text = diagnose({rank: report(rank, inside(rank, "keys")) for rank in range(2)})
    assert "the network or a device is stuck, or only slow" in text
    text = diagnose({rank: report(rank, inside(rank, ("keys", "grads")[rank])) for rank in range(2)})
    assert text.startswith("rank 1 is at exchange #1 of grads (10 bytes sent over cp), rank 0 at exchange #1 of keys (")


def test_the_first_of_several_divergences_is_named() -> None:
    earlier = (note(name="blocks.1", position=3), note(name="blocks.2", position=3))
    reports = {rank: replace(report(rank, note()), recent=(earlier[rank], note())) for rank in range(2)}
    assert diagnose(reports).startswith("rank 1 is at all_gather #3 of blocks.2")


def test_a_chain_of_waiting_groups_leads_to_the_rank_that_waits_for_none() -> None:
    """Rank 0 waits for 1 in their shard group, 1 for 3 among the replicas, and 3 computes."""
    replicas = note("all_reduce", "blocks.1", position=2, group="1.1")
    reports = {
        0: report(0, note()),
        1: report(1, replicas, members=(1, 3)),
        2: report(2, note(group="0.2"), members=(2, 3)),
        3: replace(report(3, begun=4), place="train.py:31 in load"),
    }
    assert diagnose(reports).startswith(
        "rank 3 has not started all_reduce #2 of blocks.1: it is at train.py:31 in load"
    )
    assert "rank 0" not in diagnose(reports)
    assert "rank 1" not in diagnose(reports)


def test_nothing_is_blamed_where_all_are_in_the_same_collective() -> None:
    text = diagnose({0: report(0, note()), 1: report(1, note())})
    assert "the network or a device is stuck, or only slow" in text


def test_the_report_has_a_line_for_each_state_and_the_culprit_first() -> None:
    reports = {rank: report(rank, note(), members=(0, 1, 2, 3)) for rank in (0, 1)} | {2: report(2, begun=4), 3: None}
    lines = render(reports, 0).splitlines()
    assert lines[1] == "  ranks 0, 1: in all_gather #5 of blocks.0 (64 x bf16 over dp_shard) for 9 s"
    assert lines[3] == "  rank 3: no answer; it died, was stopped or hangs in native code"
    assert lines[4].startswith("  on rank 2, process 1 on host")
    assert lines[0].count("does not answer") == 1


def test_a_report_is_sent_whole() -> None:
    whole = replace(report(0, note()), actions=("0UNSHARD[a] 3 ms",), stack=("a.py:1 in f",))
    assert RankReport.from_json(whole.to_json()) == whole
    assert RankReport.from_json(report(1).to_json()) == report(1)
