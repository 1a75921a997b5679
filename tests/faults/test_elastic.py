"""Runs under a real torchrun that restarts its ranks: killed, hung or asked to stop, they come to their end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.waiting import PATIENCE_S, num_lines, wait_until

pytestmark = [pytest.mark.begin, pytest.mark.usefixtures("warm_python")]

TEXT = "".join(f"def double_{number}(x):\n    return {2 * number} * x\n\n" for number in range(400))

# Arguments: how rank VICTIM dies, and in how many attempts.
USER_SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
import shardwise

torch.set_num_threads(1)
how, num_deaths, victim = sys.argv[1], int(sys.argv[2]), sys.argv[3]
run = {"device": "cpu", "timeout_s": 60.0 if how == "kill" else 20.0}
config = {"zero": {"stage": 3}, "optimizer": {"name": "sgd"}, "run": run}
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
rank = os.environ["RANK"]
with shardwise.initialize(model, config, loss_fn=lambda output, batch: output.square().mean()) as engine:
    for _ in range(5):
        result = engine.train_step([torch.ones(2, 8)])
        if result.step == 3 and rank == victim and len(list(Path().glob("death-*"))) < num_deaths:
            Path(f"death-{time.time_ns()}").touch()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
Path(f"done-{rank}").write_text(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {result.step}")
"""

# `shardwise train`, and a note of each rank's exit code, which torchrun does not tell.
TRAIN_SCRIPT = """
import os, sys
from pathlib import Path
from shardwise.cli import main as cli

end = os._exit
os._exit = lambda code: (Path(f"exit-{os.environ['RANK']}").write_text(str(code)), end(code))
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""

# `shardwise train`, in which rank VICTIM dies before a step; arguments as above, and how many steps it has taken then.
MORTAL_TRAIN_SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from shardwise import Engine; from shardwise.cli import main as cli

how, num_deaths, victim, num_steps = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
train_step = Engine.train_step

def die_or_train(engine, batches):
    is_its_turn = os.environ["RANK"] == victim and engine.num_steps >= num_steps
    if is_its_turn and len(list(Path().glob("death-*"))) < num_deaths:
        Path(f"death-{time.time_ns()}").touch()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    return train_step(engine, batches)

Engine.train_step = die_or_train
sys.exit(cli.main(["train", *sys.argv[5:]]))
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "script.py").write_text(USER_SCRIPT)
    (tmp_path / "train.py").write_text(TRAIN_SCRIPT)
    (tmp_path / "mortal_train.py").write_text(MORTAL_TRAIN_SCRIPT)
    (tmp_path / "text.txt").write_text(TEXT)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3", "--monitor-interval=0.1", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(agents: list[subprocess.Popen[str]]) -> list[str]:
    """What the agents wrote, once all have come to a good end."""
    try:
        written = [agent.communicate(timeout=2 * PATIENCE_S)[0] for agent in agents]
    except subprocess.TimeoutExpired:
        for agent in agents:
            agent.terminate()  # its ranks end with it
        pytest.fail("still running:\n" + "\n".join(agent.communicate()[0] for agent in agents))
    assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(written)
    return written


def rendezvous(kind: str) -> list[str]:
    port = free_port()
    return {
        "standalone": ["--standalone"],
        "static": ["--master-addr=127.0.0.1", f"--master-port={port}"],
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=one"],
    }[kind]


def done() -> list[str]:
    """By rank: how often its machine's agent counted a restart, and the last step."""
    return [Path(f"done-{rank}").read_text() for rank in range(2)]


# What is quick of it: the test below of a killed rank whose run goes on from its last save.
@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "num_deaths", "num_tries"),
    [("standalone", 1, 1), *((kind, 2, 3) for kind in ("standalone", "static", "c10d"))],
)
def test_a_killed_rank_costs_a_restart(kind: str, num_deaths: int, num_tries: int) -> None:
    """torch's own env:// rendezvous hangs in most such restarts: it reads the addresses of the dead attempt."""
    for _ in range(num_tries):
        for path in (*Path().glob("death-*"), *Path().glob("done-*")):
            path.unlink()
        finish([torchrun(*rendezvous(kind), "--nproc-per-node=2", "script.py", "kill", str(num_deaths), "1")])
        assert done() == [f"{num_deaths} 5"] * 2


@pytest.mark.full
@pytest.mark.parametrize("kind", ["c10d", "static"])
@pytest.mark.parametrize("victim", [0, 1])
def test_machines_that_count_restarts_differently_meet(kind: str, victim: int) -> None:
    where = rendezvous(kind)
    nodes = [["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", *where] for node in range(2)]
    finish([torchrun(*node, "script.py", "kill", "2", str(victim)) for node in nodes])
    counts = [text.split()[0] for text in done()]
    assert [text.split()[1] for text in done()] == ["5", "5"]
    # Under c10d the other machine's agent sees a change of members, which is no restart.
    assert (counts[0] == counts[1]) == (kind == "static")


@pytest.mark.full
def test_a_rank_that_hangs_costs_the_time_out_and_a_restart() -> None:
    (written,) = finish([torchrun("--standalone", "--nproc-per-node=2", "script.py", "sleep", "1", "1")])
    assert done() == ["1 5", "1 5"]
    assert re.search(
        r"CommError: rank 0 failed in all_gather #\d+ of unshard \S+ over dp_shard \(2 ranks\): "
        r"rank 1 has not started all_gather #\d+ of unshard \S+: it is at script.py:\d+ in <module>",
        written,
    )


def train_settings(num_steps: int) -> list[str]:
    return [
        *("model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=1"),
        *("model.ffn_size=64", "data.path=text.txt", "data.seq_len=16", "data.tokenizer=bytes"),
        *("batch.micro_size=8", "run.device=cpu", f"run.steps={num_steps}", "run.eval_batches=1"),
        "run.sample_tokens=0",
    ]


def wait_for_step(number: int) -> None:
    assert wait_until(lambda: num_lines("runs/2*/metrics.jsonl") >= number), f"no step {number}"


def taken_steps() -> list[tuple[int, float]]:
    """Step and loss, of one run after the other."""
    lines = [line for path in sorted(Path("runs").glob("2*/metrics.jsonl")) for line in path.open()]
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def saving(every: int, *more: str) -> list[str]:
    return ["--resume", "auto", "checkpoint.path=ck", f"checkpoint.every={every}", "checkpoint.background=false", *more]


def run_mortal(*how: str, num_steps: int, more: list[str], nproc: int = 2, max_restarts: int = 3) -> str:
    (written,) = finish(
        [
            torchrun(
                "--standalone",
                f"--nproc-per-node={nproc}",
                f"--max-restarts={max_restarts}",
                *("mortal_train.py", *how, *train_settings(num_steps), *more),
            )
        ]
    )
    return written


def test_a_killed_rank_costs_the_steps_since_the_last_save() -> None:
    written = run_mortal("kill", "1", "1", "8", num_steps=12, more=saving(5))
    assert "checkpoint.path=ck has no checkpoint yet; the run starts afresh" in written
    assert "resumed from step 5 of ck" in written
    steps = taken_steps()
    assert [step for step, _ in steps] == [*range(1, 9), *range(1, 13)]
    assert dict(steps[:8]) | dict(steps[8:]) == dict(steps[8:]) | dict(steps[:8]), "what was taken twice came out equal"


@pytest.mark.full
@pytest.mark.parametrize("victim", ["0", "1"])
@pytest.mark.parametrize("background", ["true", "false"])
def test_a_run_that_is_killed_three_times_ends_like_one_that_is_not(victim: str, background: str) -> None:
    """Each attempt dies at its first step beyond the eighth, however much of it was saved by then."""
    more = ["checkpoint.every=3", f"checkpoint.background={background}"]
    run_mortal("kill", "0", victim, "8", num_steps=12, more=[*more, "checkpoint.path=whole", "run.dir=whole-runs"])
    (path,) = Path("whole-runs").glob("2*/metrics.jsonl")
    whole = {record["step"]: record["loss"] for record in map(json.loads, path.open())}
    run_mortal("kill", "3", victim, "8", num_steps=12, more=[*more, "checkpoint.path=ck", "--resume", "auto"])
    steps = taken_steps()
    assert len(list(Path().glob("death-*"))) == 3
    assert all(whole[step] == loss for step, loss in steps)
    assert steps[-1][0] == 12
    assert {step for step, _ in steps} == set(range(1, 13))


@pytest.mark.full
def test_a_hung_rank_costs_the_time_out_and_the_steps_since_the_last_save() -> None:
    start_s = time.monotonic()
    patience = ["run.timeout_s=20", "run.watchdog_s=5"]
    written = run_mortal("sleep", "1", "1", "8", num_steps=12, more=[*saving(5), *patience])
    assert "resumed from step 5 of ck" in written
    assert [step for step, _ in taken_steps()] == [*range(1, 9), *range(6, 13)]
    assert time.monotonic() - start_s < 180, "no save that cannot finish is waited for"


@pytest.mark.full
def test_fewer_ranks_go_on_with_the_same_global_batch() -> None:
    fp64 = ["precision.param=fp64"]
    run_mortal("kill", "0", "1", "8", num_steps=12, more=[*fp64, "run.dir=whole-runs"])
    (path,) = Path("whole-runs").glob("2*/metrics.jsonl")
    whole = {record["step"]: record["loss"] for record in map(json.loads, path.open())}
    agent = torchrun(
        *("--standalone", "--nproc-per-node=2", "--max-restarts=0", "mortal_train.py", "kill", "1", "1", "8"),
        *(*train_settings(12), *saving(5), *fp64),
    )
    agent.communicate(timeout=2 * PATIENCE_S)
    assert agent.returncode == 1
    written = run_mortal("kill", "1", "1", "8", num_steps=12, more=[*saving(5), *fp64], nproc=1)
    assert "resumed from step 5 of ck" in written
    assert "global batch 16 = 8 samples a micro-batch x 2 accumulation x 1 data-parallel ranks" in written
    assert [step for step, _ in taken_steps()] == [*range(1, 9), *range(6, 13)]
    for step, loss in taken_steps():
        assert loss == pytest.approx(whole[step], rel=1e-9)


@pytest.mark.full
def test_sigterm_to_the_agent_ends_all_ranks_after_the_same_step() -> None:
    agent = torchrun("--standalone", "--nproc-per-node=2", "train.py", *train_settings(100_000))
    try:
        wait_for_step(3)
    finally:
        agent.send_signal(signal.SIGTERM)
        written, _ = agent.communicate(timeout=PATIENCE_S)
    assert [Path(f"exit-{rank}").read_text() for rank in range(2)] == ["143", "143"], written
    assert re.search(r"stopped +at step \d+ of 100000 by SIGTERM", written)
    (folder,) = Path("runs").glob("2*")
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == [f"step-{len(taken_steps()):08d}"]


def test_sigterm_ends_a_rank_that_waits_for_one_that_never_comes() -> None:
    """It would not hear the signal before `run.timeout_s`, and the agent would kill it after 30 s only."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise.cli", "train", *train_settings(3)],
        env=os.environ | place | {"MASTER_PORT": str(store.port)},
    )
    try:
        store.wait(["hello/1"], timedelta(seconds=PATIENCE_S))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGTERM
    finally:
        process.kill()
