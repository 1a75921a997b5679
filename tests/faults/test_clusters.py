"""What `shardwise launch` writes is run: by stand-ins for Slurm, and on two hosts that are network namespaces."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.paths import SOURCE
from harness.waiting import PATIENCE_S, num_lines, wait_until
from shardwise.cli.main import main
from shardwise.cli.plan import start_words
from shardwise.planner.hardware import parse_cluster

pytestmark = pytest.mark.begin

# Takes steps for as long as the file `go-on` is there, 5 at least; rank 1 kills itself once where `death` is asked for.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
import shardwise

torch.set_num_threads(1)
run = {"device": "cpu", "timeout_s": 15.0, "watchdog_s": 5.0}
config = {"zero": {"stage": 3}, "optimizer": {"name": "sgd"}, "run": run}
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
rank = os.environ["RANK"]
with shardwise.initialize(model, config, loss_fn=lambda output, batch: output.square().mean()) as engine:
    while engine.num_steps < 5 or Path("go-on").exists():
        result = engine.train_step([torch.ones(2, 8)])
        with open(f"steps-{rank}", "a") as file:
            print(result.step, os.uname().nodename, engine.comm.world_size, file=file)
        if "death" in sys.argv and rank == "1" and result.step == 3 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
Path(f"done-{rank}").touch()
"""
SBATCH = """#!{python}
import argparse, os, re, subprocess, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "time", "open-mode", "signal"):
    parser.add_argument("--" + name)
for name in ("exclusive", "requeue"):
    parser.add_argument("--" + name, action="store_true")
lines = open(sys.argv[1]).read().splitlines()
assert lines[0] == "#!/bin/bash"
asked = parser.parse_args([line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")])
assert asked.requeue and re.fullmatch(r"B:TERM@\\d+", asked.signal) and asked.ntasks_per_node == "1"
environ = dict(os.environ, SLURM_JOB_ID=str(os.getpid()), SLURM_JOB_NODELIST="n[1-2]", FAKE_NODES=asked.nodes)
os.execve("/bin/bash", ["bash", *sys.argv[1:]], environ)
"""
SRUN = """#!{python}
import argparse, os, signal, subprocess, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--kill-on-bad-exit", type=int)
parser.add_argument("--cpu-bind", choices=["none"])
parser.add_argument("command", nargs=argparse.REMAINDER)
command = parser.parse_args().command
tasks = []
signal.signal(signal.SIGTERM, lambda signum, frame: [task.send_signal(signum) for task in tasks])
for task in range(int(os.environ["FAKE_NODES"])):
    place = dict(SLURM_PROCID=str(task), SLURM_NODEID=str(task), SLURM_LOCALID="0", SLURM_STEP_ID="0")
    tasks.append(subprocess.Popen(command, env=dict(os.environ, **place)))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/sh
if [ "$1 $2" = "show hostnames" ]; then echo localhost; else echo "$*" >> scontrol.log; fi
"""
SQUEUE = """#!/bin/sh
cat state
"""
# Enters the namespace that stands for a host, with its host name; /etc/netns gives it an /etc/hosts of its own.
SSH = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do case "$1" in -o|-p) shift 2;; *) shift;; esac; done
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; exec sh -c "$1"' "$host" "$*"
"""


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a folder with the script and the stand-ins, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE, "ssh": SSH}.items():
        (programs / name).write_text(text.format(python=sys.executable))
        (programs / name).chmod(0o755)
    torchrun = programs / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in launched}
    path = f"{programs}{os.pathsep}{inherited['PATH']}"
    return inherited | {"PATH": path, "PYTHONPATH": str(SOURCE.parent), "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def start(environ: Mapping[str, str], *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def launch(environ: Mapping[str, str], *options: str) -> subprocess.Popen[str]:
    return start(environ, sys.executable, "-m", "shardwise.cli", "launch", *options)


def finish(process: subprocess.Popen[str], timeout_s: float = PATIENCE_S) -> str:
    """What a process wrote, once it has ended."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        process.terminate()
        pytest.fail(f"still running:\n{process.communicate()[0]}")


@pytest.mark.full
def test_the_line_of_a_plan_joins_its_nodes(environ: dict[str, str]) -> None:
    words = start_words(Path("my.toml"), parse_cluster("h100:2x1"), is_here=False)
    line = re.search(r"by (torchrun .*? -m shardwise train) my.toml", words)
    assert line is not None
    line = line[1].replace("-m shardwise train", "train.py").replace("NODE0:29500", f"127.0.0.1:{free_port()}")
    for node in [start(environ, "sh", "-c", line) for _ in range(2)]:
        written = finish(node)
        assert node.returncode == 0, written
    assert [Path(f"done-{rank}").exists() for rank in range(2)] == [True, True]


def test_slurm_trains_and_queues_a_preempted_job_again(environ: dict[str, str]) -> None:
    small = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=1"]
    small += ["model.ffn_size=64", "data.path=text.txt", "data.seq_len=16", "data.tokenizer=bytes", "run.device=cpu"]
    small += ["run.steps=100000", "run.sample_tokens=0", "checkpoint.path=ck", "--resume", "auto"]
    Path("text.txt").write_text("".join(f"def double_{n}(x):\n    return {2 * n} * x\n\n" for n in range(400)))
    Path("state").write_text("RUNNING\n")
    job = launch(
        environ, "--on", "slurm", "--nodes", "2", "--gpus", "1", "--submit", "--", "shardwise", "train", *small
    )
    try:
        assert wait_until(lambda: num_lines("runs/2*/metrics.jsonl") >= 3)
    finally:
        (batch,) = children_of(job.pid)  # sbatch became the batch script's shell
        os.kill(batch, signal.SIGTERM)
        written = finish(job)
    assert "requeue " in Path("scontrol.log").read_text(), written
    (saved,) = Path("ck").glob("step-*")
    assert int(saved.name.removeprefix("step-")) == num_lines("runs/2*/metrics.jsonl")
    (folder,) = Path("runs").glob("2*")
    assert len(list(folder.glob("rank-*.log"))) == 2


@pytest.mark.parametrize(("state", "ending"), [("RUNNING", "exit 0"), ("COMPLETING", "exit 1"), ("RUNNING", "exit 1")])
def test_slurm_queues_nothing_again_that_ended_or_was_cancelled(
    state: str, ending: str, environ: dict[str, str], tmp_path: Path
) -> None:
    """With `exit 1` and RUNNING it is queued again where a signal came, and only there."""
    Path("state").write_text(f"{state}\n")
    # A shell's trap may miss a signal that comes just before its `wait`; one that is blocked and waited for is not.
    waits = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); pathlib.Path('started').touch()"
    waits += f"; signal.sigtimedwait([signal.SIGTERM], 60); sys.{ending.replace(' ', '(')})"
    (tmp_path / "bin" / "srun").write_text(f"#!{sys.executable}\nimport pathlib, signal, sys\n{waits}\n")
    assert main(["launch", "--on", "slurm", "--gpus", "1", "-o", "job.sh", "--", "train.py"]) == 0
    job = start(environ, "sbatch", "job.sh")
    assert wait_until(lambda: Path("started").exists())
    job.send_signal(signal.SIGTERM)
    finish(job)
    assert Path("scontrol.log").exists() == ((state, ending) == ("RUNNING", "exit 1"))


def test_ray_trains_on_two_of_its_nodes(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.train.torch")
    assert main(["launch", "--on", "ray", "--nodes", "2", "--gpus", "1", "-o", "job.py", "--", "train.py"]) == 0
    cluster = "ray.init(num_cpus=2, num_gpus=2, include_dashboard=False)\ntrainer = "
    Path("job.py").write_text(Path("job.py").read_text().replace("trainer = ", cluster))
    job = start(environ, sys.executable, "job.py")
    written = finish(job, 2 * PATIENCE_S)
    assert job.returncode == 0, written
    assert [line.split()[2] for line in Path("steps-1").read_text().splitlines()] == ["2"] * 5


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces that one cable connects."""

    first: str
    second: str

    @property
    def both(self) -> str:
        return f"{self.first},{self.second}"

    def pull_the_cable(self) -> None:
        ip("-n", self.second, "link", "set", "cable", "down")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    names = [f"sw{os.getpid()}{end}" for end in "ab"]
    try:
        ip("netns", "add", names[0])
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces need root")
    folders = [Path("/etc/netns") / name for name in names]
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, (name, folder) in enumerate(zip(names, folders, strict=True), 1):
            for command in (["addr", "add", f"10.213.0.{number}/24", "dev", "cable"], ["link", "set", "cable", "up"]):
                ip("-n", name, *command)
            ip("-n", name, "link", "set", "lo", "up")
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n10.213.0.1 {names[0]}\n10.213.0.2 {names[1]}\n")
        yield Hosts(*names)
    finally:
        for name, folder in zip(names, folders, strict=True):
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            for pid in found.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            (folder / "hosts").unlink(missing_ok=True)
            if folder.is_dir():
                folder.rmdir()


@pytest.mark.full  # `test_two_hosts_by_ssh` joins them, and `test_elastic.py` outlives a rank
def test_two_hosts_join_and_outlive_a_killed_rank(environ: dict[str, str], hosts: Hosts) -> None:
    options = ["--hosts", hosts.both, "--gpus", "1", "--max-restarts", "2", "--submit"]
    written = finish(process := launch(environ, *options, "--", "train.py", "death"))
    assert process.returncode == 0, written
    steps = [[line.split() for line in Path(f"steps-{rank}").read_text().splitlines()] for rank in range(2)]
    assert Path("died").exists()
    assert [[int(step) for step, _, _ in each][-5:] for each in steps] == [[1, 2, 3, 4, 5]] * 2
    assert {name for each in steps for _, name, _ in each} == {hosts.first, hosts.second}
    assert {world_size for each in steps for _, _, world_size in each} == {"2"}


@pytest.mark.full
def test_a_host_that_is_cut_off_is_named(environ: dict[str, str], hosts: Hosts) -> None:
    Path("go-on").touch()
    process = launch(environ, "--hosts", hosts.both, "--gpus", "1", "--submit", "--", "train.py")
    try:
        assert wait_until(lambda: num_lines("steps-0") > 3)
    finally:
        hosts.pull_the_cable()
        written = finish(process, 2 * PATIENCE_S)
    assert process.returncode != 0
    assert re.search(r"CommError: rank 0 failed in .*rank 1", written), written
