"""Real runs of the local launcher of which one process gets a signal at a named moment, and what becomes of them.

A rank that comes to the moment notes that and waits until the signal was sent: so nothing depends on how fast the
machine is. `python -m harness.stops` in the folder `tests` takes all stops and prints their table, in half an hour.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.waiting import PATIENCE_S, is_running, wait_until
from shardwise.checkpoint.commit import read_manifest, step_folders, step_of
from shardwise.checkpoint.manifest import StoredTensor

SIGNALS = ("STOP", "KILL", "TERM", "INT", "HUP")
VICTIMS = ("0", "1", "launcher")
PHASES = ("start", "rendezvous", "first step", "steady step", "save", "final save", "evaluation", "end")
NUM_STEPS, SAVE_EVERY = 6, 2
TIMEOUT_S, WATCHDOG_S = 10.0, 3.0
# In which a run is to have ended, the time-out past.
MARGIN_S = 10.0

TEXT = "".join(f"def double_{number}(x):\n    return {2 * number} * x\n\n" for number in range(400))

# Python runs this in each rank before anything else; it patches what the phases are calls of when that is imported.
SITE = """
import importlib.abc, importlib.machinery, os, sys, time
from pathlib import Path

def pause(phase):
    folder, rank = Path(os.environ["STOPS_FOLDER"]), os.environ["RANK"]
    if phase == os.environ["STOPS_PHASE"] and os.environ["STOPS_VICTIM"] in (rank, "launcher"):
        (folder / f"coming-{rank}").write_text(str(os.getpid()))
        (folder / f"coming-{rank}").rename(folder / f"here-{rank}")
        while not (folder / "sent").exists():
            time.sleep(0.01)

def before(owner, name, phase):
    real = getattr(owner, name)
    def call(*args, **kwargs):
        pause(phase(*args) if callable(phase) else phase)
        return real(*args, **kwargs)
    setattr(owner, name, call)

LAST = int(os.environ.get("STOPS_LAST", 0))
PATCHES = {
    "shardwise.launch.process_group": lambda m: (before(m, "meet", "rendezvous"), before(m, "leave", "end")),
    "shardwise.train.loop": lambda m: (
        before(m.Trainer, "_take_step", lambda t: {0: "first step", 4: "steady step"}.get(t.engine.num_steps)),
        before(m.Trainer, "evaluate", "evaluation"),
    ),
    "shardwise.checkpoint.async_saver": lambda m: before(
        m._Save, "begin", lambda s, step, _: "final save" if step == LAST else "save"
    ),
}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), PATCHES[name](module))
        return spec

if "RANK" in os.environ and "STOPS_FOLDER" in os.environ:
    sys.meta_path.insert(0, Finder())
    for name in PATCHES.keys() & sys.modules.keys():  # where the interpreter does not begin empty
        PATCHES[name](sys.modules[name])
    pause("start")
"""


@dataclass(frozen=True)
class Stop:
    """A signal to one process at one moment."""

    signum: str
    victim: str
    phase: str

    def __str__(self) -> str:
        return f"{self.signum}-{self.victim}-{self.phase.replace(' ', '-')}"


@dataclass(frozen=True)
class Stopped:
    """What became of a run.

    Attributes:
        took_s: from the signal to the end of the last process.
        exit_code: of the launcher.
        said: by the launcher, and by the ranks in their logs.
        committed: steps of the whole checkpoints, newest first; before the signal, and in the end.
        leftovers: processes that still ran.
    """

    took_s: float
    exit_code: int
    said: str
    committed: tuple[list[int], list[int]]
    leftovers: int

    def names(self, victim: str) -> bool:
        """Whether the end names the victim; a run that has come to its own end meanwhile need not."""
        if self.exit_code == 0 and NUM_STEPS in self.committed[1]:
            return True
        if victim == "launcher":
            who = "the launcher (died|has been stopped)|SIG(TERM|INT|HUP): the ranks stop"
        else:
            how = "was stopped|was asked to|killed by|exited with|does not answer|has shown no progress"
            who = rf"rank {victim} ({how})"
        return re.search(who, self.said) is not None


def all_stops() -> Iterator[Stop]:
    for phase, victim, signum in itertools.product(PHASES, VICTIMS, SIGNALS):
        yield Stop(signum, victim, phase)


def settings(save_every: int = SAVE_EVERY) -> list[str]:
    return [
        *("model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=1"),
        *("model.ffn_size=64", "data.path=text.txt", "data.seq_len=16", "data.tokenizer=bytes", "batch.micro_size=8"),
        *("run.device=cpu", "run.num_procs=2", f"run.steps={NUM_STEPS}", "run.eval_batches=1", "run.sample_tokens=0"),
        *(f"run.timeout_s={TIMEOUT_S}", f"run.watchdog_s={WATCHDOG_S}", "zero.stage=3"),
        *("checkpoint.path=ck", f"checkpoint.every={save_every}", "checkpoint.keep_last=100"),
    ]


def start(folder: Path, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start `shardwise train` in a folder; what it says goes to `said`."""
    (folder / "text.txt").write_text(TEXT)
    with (folder / "said").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "shardwise", "train", *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )


def run_whole(folder: Path) -> dict[int, list[StoredTensor]]:
    """By step, what a run to which nothing happens saves after each of its steps."""
    launcher = start(folder, settings(save_every=1))
    assert launcher.wait(3 * PATIENCE_S) == 0, (folder / "said").read_text()
    return {step: stored(folder, step) for step in committed(folder)}


def stored(folder: Path, step: int) -> list[StoredTensor]:
    """What a checkpoint has of the model, with the checksums of all values: of equal steps it is equal."""
    return tensors_of(folder / "ck" / f"step-{step:08d}")


def tensors_of(checkpoint: Path) -> list[StoredTensor]:
    """What a checkpoint has, as `stored`."""
    return [
        replace(
            tensor,
            states={
                name: replace(state, pieces=tuple(replace(piece, offset=0) for piece in state.pieces))
                for name, state in tensor.states.items()
            },
        )
        for tensor in read_manifest(checkpoint).tensors
        if tensor.kind != "rank"  # generators, which no run seeds equally
    ]


def run_stopped(stop: Stop, folder: Path) -> Stopped:
    """Start a run, send the signal at the moment, and wait for the end of all processes."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    environ = {
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "STOPS_FOLDER": str(folder),
        "STOPS_PHASE": stop.phase,
        "STOPS_VICTIM": stop.victim,
        "STOPS_LAST": str(NUM_STEPS),
    }
    launcher = start(folder, settings(), environ)
    pids: list[int] = []
    try:
        here = [f"here-{rank}" for rank in ("01" if stop.victim == "launcher" else stop.victim)]
        assert wait_until(lambda: all((folder / name).exists() for name in here)), (folder / "said").read_text()
        pids = children(launcher.pid)
        victim = launcher.pid if stop.victim == "launcher" else int((folder / here[0]).read_text())
        before = committed(folder)
        os.kill(victim, getattr(signal, f"SIG{stop.signum}"))
        sent_s = time.monotonic()
        (folder / "sent").touch()
        if (stop.signum, stop.victim) == ("STOP", "launcher"):
            wait_until(lambda: not any(map(is_running, pids)))
            took_s = time.monotonic() - sent_s
            os.kill(victim, signal.SIGCONT)
            exit_code = launcher.wait(PATIENCE_S)
        else:
            exit_code = launcher.wait(PATIENCE_S)
            wait_until(lambda: not any(map(is_running, pids)), 5.0)
            took_s = time.monotonic() - sent_s
        leftovers = sum(map(is_running, pids))
    finally:
        for pid in (*pids, launcher.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()
    logs = [path.read_text(errors="replace") for path in sorted(folder.glob("runs/2*/rank-*.log"))]
    said = "\n".join([(folder / "said").read_text(errors="replace"), *logs])
    return Stopped(took_s, exit_code, said, (before, committed(folder)), leftovers)


def resume(folder: Path) -> list[int]:
    """Go on with the same command, and return the steps that are committed in the end."""
    launcher = start(folder, [*settings(), "--resume", "auto"])
    assert launcher.wait(3 * PATIENCE_S) == 0, (folder / "said").read_text()
    return committed(folder)


def differing(folder: Path, whole: Mapping[int, list[StoredTensor]]) -> list[int]:
    """The steps whose checkpoint holds another bit than that of the run to which nothing happened."""
    return [step for step in committed(folder) if stored(folder, step) != whole[step]]


def committed(folder: Path) -> list[int]:
    root = folder / "ck"
    return [step_of(each) for each in step_folders(root)] if root.exists() else []


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found]


def judged(stop: Stop, folder: Path, whole: Mapping[int, list[StoredTensor]]) -> str:
    """What became of it, in a line that begins with ok where all is as promised."""
    folder.mkdir()
    try:
        end = run_stopped(stop, folder)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return f"BAD {stop!s:28} {type(error).__name__} {str(error)[-600:]!r}"
    lost = sorted(set(end.committed[0]) - set(end.committed[1]))
    bad = differing(folder, whole)
    is_named = end.names(stop.victim)
    is_fine = is_named and not (lost or bad or end.leftovers or end.took_s > TIMEOUT_S + MARGIN_S)
    if is_fine:
        shutil.rmtree(folder)
    return (
        f"{'ok ' if is_fine else 'BAD'} {stop!s:28} {end.took_s:5.1f} s, code {end.exit_code:4}, named {is_named!s:5}, "
        f"committed {end.committed[1]}, lost {lost}, other bits {bad}, left running {end.leftovers}"
    )


def main() -> None:
    """Take all stops, or those whose names hold one of the arguments, and print what became of each."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, the runs would ignore it too
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    top = Path(tempfile.mkdtemp(prefix="stops-"))
    (top / "whole").mkdir()
    whole = run_whole(top / "whole")
    wanted = [stop for stop in all_stops() if not sys.argv[1:] or any(part in str(stop) for part in sys.argv[1:])]
    with ThreadPoolExecutor(int(os.environ.get("STOPS_JOBS", "1"))) as pool:
        for line in pool.map(lambda stop: judged(stop, top / str(stop), whole), wanted):
            print(line, flush=True)


if __name__ == "__main__":
    main()
