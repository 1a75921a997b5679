"""`engine.preempted`: a signal to one rank stops all of them after the same step, with a whole checkpoint of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.paths import SOURCE
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.waiting import PATIENCE_S, num_lines, wait_until
from shardwise import Engine, initialize

pytestmark = [pytest.mark.begin, pytest.mark.usefixtures("warm_python")]

CONFIG = {"zero": {"stage": 3}, "optimizer": {"name": "sgd"}, "run": {"device": "cpu", "timeout_s": 60.0}}
LONGEST_S = 0.3


def make() -> Engine:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return initialize(model, CONFIG, loss_fn=lambda output, batch: output.square().mean())


def preempt_often(rank: int, world_size: int, num_times: int, folder: Path) -> list[tuple[int, int, int, int]]:
    """Train, evaluate and save until preempted, many times; of each: who, its steps at the signal, taken and loaded."""
    found = []
    draws = random.Random(7)  # the same on all ranks
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGUSR1)}
    with make() as engine:
        for number in range(num_times):
            victim, delay_s = draws.randrange(2), draws.uniform(0, LONGEST_S)
            signum = draws.choice([signal.SIGTERM, signal.SIGUSR1])
            engine.watch_preemption()
            at_signal: list[int] = []

            def interrupt(signum: int = signum, at_signal: list[int] = at_signal) -> None:
                at_signal.append(engine.num_steps)
                os.kill(os.getpid(), signum)

            engine.eval_step([torch.ones(2, 64)])  # another round: none is asked yet
            assert not engine.preempted
            timer = threading.Timer(delay_s, interrupt)
            if rank == victim:
                timer.start()
            root = folder / str(number)
            while not engine.preempted:
                engine.train_step([torch.randn(2, 64)])
                if engine.num_steps % 5 == 0 and not engine.preempted:
                    engine.eval_step([torch.ones(2, 64)])
                if engine.num_steps % 7 == 0 and not engine.preempted:
                    engine.save(root, wait=False, keep_last=2)
            last = engine.finish_saves()
            if last is None or last.parent != root.resolve() or last.name != f"step-{engine.num_steps:08d}":
                engine.save(root, keep_last=2)
            report = engine.load(root)
            assert not report.damaged
            found.append((victim, *(at_signal or [-1]), engine.num_steps, report.step))
    for name, handler in before.items():
        signal.signal(name, handler)
    return found


@pytest.mark.parametrize("num_times", [20, pytest.param(100, marks=pytest.mark.full)])
def test_one_of_two_ranks_is_signalled_at_any_moment(num_times: int, ranks: WorkerPool, tmp_path: Path) -> None:
    by_rank = ranks(2).run(preempt_often, num_times, tmp_path)
    assert len(by_rank[0]) == len(by_rank[1]) == num_times
    lags = []
    for first, second in zip(*by_rank, strict=True):
        victim, _, taken, loaded = first
        assert (victim, taken, loaded) == (second[0], *second[2:])
        assert taken == loaded
        lags.append(taken - (first, second)[victim][1])
    # An evaluation agrees too; a step that had agreed before the signal is followed by one more.
    assert {0, 1, 2} >= set(lags)
    assert {victim for victim, *_ in by_rank[0]} == {0, 1}


def test_it_costs_no_collective(ranks: WorkerPool) -> None:
    """The step's own agreement, which sums loss, count and norm, has it."""
    assert ranks(2).run(count_agreements) == [1, 1]


def count_agreements(rank: int, world_size: int) -> int:
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGUSR1)}
    with make() as engine:
        engine.watch_preemption()
        numbers = []
        for _ in range(2):
            engine.train_step([torch.ones(2, 64)])
            counts = engine.comm.comm_log.counts
            numbers.append(sum(count.num_calls for (_, op), count in counts.items() if op == "all_reduce_scalars"))
    for name, handler in before.items():
        signal.signal(name, handler)
    return numbers[1] - numbers[0]


def test_refusals() -> None:
    with make() as engine:
        with refused("signal-unknown", "SIGNONE"):
            engine.watch_preemption(["SIGNONE"])
        errors = []
        thread = threading.Thread(target=lambda: errors.append(refused_elsewhere(engine)))
        thread.start()
        thread.join()
        assert errors == [True]


def refused_elsewhere(engine: Engine) -> bool:
    with refused("signals-off-main", "main thread"):
        engine.watch_preemption()
    return True


# The first attempt trains until it is preempted, the second ten steps more.
SCRIPT = """
import os, sys
from pathlib import Path
import torch
import shardwise

torch.set_num_threads(1)
config = {"zero": {"stage": 3}, "optimizer": {"name": "sgd"}, "run": {"device": "cpu"}}
model = torch.nn.Linear(8, 8)
with shardwise.initialize(model, config, loss_fn=lambda output, batch: output.square().mean()) as engine:
    engine.watch_preemption()
    Path(f"pid-{engine.comm.rank}").write_text(str(os.getpid()))
    last = engine.load("ck").step + 10 if Path("ck").exists() else 10**9
    with open(f"steps-{engine.comm.rank}", "a", buffering=1) as file:
        while engine.num_steps < last:
            engine.train_step([torch.ones(2, 8)])
            print(engine.num_steps, file=file)
            if engine.preempted:
                engine.save("ck")
                sys.exit(143)
    engine.save("done")
"""


def test_a_preempted_job_goes_on_in_its_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE.parent)}
    agent = subprocess.Popen(
        [*command, "train.py"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert wait_until(lambda: num_lines("steps-1") > 3)
        os.kill(int(Path("pid-1").read_text()), signal.SIGUSR1)
        written, _ = agent.communicate(timeout=PATIENCE_S)
    finally:
        agent.kill()
    assert agent.returncode == 0, written
    steps = [[int(line) for line in Path(f"steps-{rank}").read_text().split()] for rank in range(2)]
    assert steps[0] == steps[1] == list(range(1, len(steps[0]) + 1))
    (saved,) = Path("ck").glob("step-*")
    assert int(saved.name.removeprefix("step-")) == len(steps[0]) - 10
