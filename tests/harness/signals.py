"""Chains of real runs of `shardwise train` that get signals at random moments, each leg resumed where the last ended.

Moments are drawn from a seed: a step, a save, the start or the end, and a delay after it. A rank's disk is made slow,
so that much of a run is a save. `python -m harness.signals` in the folder `tests` takes chains over all layouts and
prints how many signals were tried, and what was lost, hung or not equal, by layout and signal.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.forked_runs import ForkedRun, Nursery
from harness.hf_folders import make_folder
from harness.stops import TEXT, children, tensors_of
from harness.waiting import PATIENCE_S, is_running, wait_until
from shardwise.checkpoint.commit import step_folders, step_of
from shardwise.checkpoint.find import survey
from shardwise.checkpoint.manifest import StoredTensor

NUM_STEPS, SAVE_EVERY = 48, 2
TIMEOUT_S, WATCHDOG_S = 10.0, 3.0
# In which a run is to have ended, the time-out past; a busy machine makes processes that end slower.
MARGIN_S = 40.0
TARGETS = ("0", "1", "launcher", "all")

# What each flush to a rank's disk takes.
SLOW_DISK_S = 0.02

_SHAPE = (
    *("model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=2", "model.ffn_size=64"),
    *("data.tokenizer=bytes",),
)
_LORA = ("model.path=llama", "lora.rank=2", "zero.stage=2")
_HOST = tuple(f"tiers.{kind}=host" for kind in ("params", "grads", "optimizer"))
_NVME = (*(f"tiers.{kind}=nvme" for kind in ("params", "grads", "optimizer")), "tiers.nvme_path=swap")

LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "stage3": (*_SHAPE, "zero.stage=3"),
    "stage3-sync": (*_SHAPE, "zero.stage=3", "checkpoint.background=false"),
    "tp2": (*_SHAPE, "mesh.tp=2"),
    "pp2": (*_SHAPE, "mesh.pp=2", "batch.accumulation=2"),
    "lora": _LORA,
    "host": (*_SHAPE, "zero.stage=3", *_HOST),
    "nvme": (*_SHAPE, "zero.stage=3", *_NVME),
}


@dataclass(frozen=True)
class Shot:
    """A signal at a random moment.

    Attributes:
        signum: its name.
        target: a rank, the launcher, or all three processes.
        moment: what is waited for first: "start", "step", "save" or "end".
        after_steps: steps of this leg before it, of "step" and "save".
        delay_s: after that.
        wakes_after_s: when SIGCONT follows; None where nothing does.
    """

    signum: str
    target: str
    moment: str
    after_steps: int
    delay_s: float
    wakes_after_s: float | None = None

    def __str__(self) -> str:
        wakes = "" if self.wakes_after_s is None else f", SIGCONT {self.wakes_after_s:.2f} s later"
        return f"{self.signum} to {self.target} at {self.moment} {self.after_steps} + {self.delay_s:.3f} s{wakes}"

    @property
    def kind(self) -> str:
        """Of the table: a process that is woken in time only pauses."""
        return "STOP, CONT" if self.wakes_after_s is not None else self.signum


@dataclass
class Judged:
    """What became of a chain: its shots, and lines on all that is not as promised, by kind."""

    layout: str
    sent: list[Shot] = field(default_factory=list)
    faults: dict[str, list[str]] = field(default_factory=dict)
    took_s: list[float] = field(default_factory=list)

    def blame(self, kind: str, text: str) -> None:
        self.faults.setdefault(kind, []).append(text)


def drawn(layout: str, seed: int, num_legs: int) -> list[list[Shot]]:
    """The shots of a chain, by leg; the last of a leg is to end it."""
    draw = random.Random(f"{layout} {seed}")
    legs = []
    for leg in range(num_legs):
        shots = []
        if draw.random() < 0.5:
            target, after = draw.choice(TARGETS), draw.randint(1, 2)
            shots.append(Shot("STOP", target, "step", after, draw.uniform(0, 0.1), draw.uniform(0.2, 2.0)))
        moment = "end" if leg == num_legs - 1 else draw.choices(("start", "step", "save"), (1, 5, 4))[0]
        signum = draw.choices(("KILL", "TERM", "STOP"), (10, 7, 3))[0]
        target = draw.choice(TARGETS[:3] if signum == "STOP" else TARGETS)
        delay_s = draw.uniform(0, {"start": 6.0, "step": 0.1, "save": 0.15, "end": 1.0}[moment])
        shots = [] if moment == "start" else shots
        shots.append(Shot(signum, target, moment, draw.randint(3, 6), delay_s))
        legs.append(shots)
    return legs


def settings(layout: str, path: str | None, every: int = SAVE_EVERY) -> list[str]:
    return [
        *LAYOUTS[layout],
        *("data.path=text.txt", "data.seq_len=16", "data.cache_dir=cache", "batch.micro_size=4"),
        *("run.device=cpu", "run.num_procs=2", f"run.steps={NUM_STEPS}", "run.eval_batches=1", "run.sample_tokens=0"),
        *(f"run.timeout_s={TIMEOUT_S}", f"run.watchdog_s={WATCHDOG_S}", "run.sinks=['jsonl']"),
        *(f"checkpoint.every={every}", "checkpoint.keep_last=0", "checkpoint.export=false"),
        *([] if path is None else [f"checkpoint.path={path}"]),
    ]


class Place:
    """A folder of runs, with their data."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self.folder, self._nursery = folder, nursery
        folder.mkdir(parents=True)
        (folder / "text.txt").write_text(TEXT)

    def start(self, arguments: Sequence[str], name: str, slow_disk_s: float = SLOW_DISK_S) -> ForkedRun:
        """Start `shardwise train`; what it says goes to the file of this name."""
        return self._nursery.start(["train", *arguments], self.folder, self.folder / name, slow_disk_s)

    def runs(self) -> list[Path]:
        return sorted((each for each in (self.folder / "runs").glob("2*")), key=lambda each: each.stat().st_ctime_ns)

    def roots(self) -> list[Path]:
        return [each for each in (self.folder / "ck", *(run / "checkpoints" for run in self.runs())) if each.is_dir()]

    def checkpoints(self) -> list[Path]:
        return [each for root in self.roots() for each in step_folders(root)]

    def announced(self) -> list[int]:
        """The steps that a run has said to have saved."""
        return sorted({int(step) for text in self.logs() for step in re.findall(r"of step (\d+) committed", text)})

    def logs(self) -> list[str]:
        return [path.read_text(errors="replace") for run in self.runs() for path in sorted(run.glob("rank-*.log"))]


def metrics(run: Path) -> dict[int, tuple[float, ...]]:
    """By step, what the run's file of metrics has that no clock changes."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    except OSError:
        return {}
    rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return {row["step"]: (row["loss"], row["count"], row["grad_norm"], row["lr"]) for row in rows}


@dataclass(frozen=True)
class Whole:
    """A run to which nothing happens: by step, what it saves, and its metrics."""

    saved: Mapping[int, list[StoredTensor]]
    metrics: Mapping[int, tuple[float, ...]]
    model: Path | None


def run_whole(layout: str, folder: Path, nursery: Nursery) -> Whole:
    place = Place(folder, nursery)
    model = make_folder("llama", folder / "llama") if "model.path=llama" in LAYOUTS[layout] else None
    launcher = place.start(settings(layout, "ck", every=1), "said", slow_disk_s=0.0)
    assert launcher.wait(3 * PATIENCE_S) == 0, (folder / "said").read_text()
    saved = {step_of(each) or 0: tensors_of(each) for each in place.checkpoints()}
    assert sorted(saved) == list(range(1, NUM_STEPS + 1))
    return Whole(saved, metrics(place.runs()[-1]), model)


class Chain:
    """One run that is stopped and resumed until it is at its end."""

    def __init__(self, layout: str, seed: int, folder: Path, whole: Whole, nursery: Nursery) -> None:
        self.layout, self.seed, self.whole = layout, seed, whole
        self.place = Place(folder, nursery)
        if whole.model is not None:
            shutil.copytree(whole.model, folder / whole.model.name)
        self.path = "ck" if seed % 2 else None  # or into the run's own folder
        self.judged = Judged(layout)
        self._arguments = settings(layout, self.path)
        self._num_legs = 0
        self._resumed_from: set[int] = set()

    def run(self, num_legs: int) -> Judged:
        for shots in drawn(self.layout, self.seed, num_legs):
            if self._leg(shots) == 0:
                break
        else:
            for _ in range(2):  # a run that is stopped at its end may have another start to make
                if self._leg([]) == 0:
                    break
        self._judge_end()
        return self.judged

    def _leg(self, shots: Sequence[Shot]) -> int:
        """Start, shoot, wait for the end, and choose how to go on; return the exit code."""
        name, self._num_legs = f"said-{self._num_legs}", self._num_legs + 1
        runs, due = set(self.place.runs()), max(self.place.announced(), default=0)
        launcher = self.place.start(self._arguments, name)
        pids: list[int] = []
        shown = 0
        try:
            for shot in shots:
                run, pids = self._await(shot, launcher, runs, due)
                if launcher.poll() is not None:
                    break
                shown = max(metrics(run), default=0) if run is not None else 0
                self._shoot(shot, launcher.pid, pids)
            code = self._await_end(launcher, pids, shots[-1] if shots else None, name)
        finally:
            for pid in (*pids, launcher.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            launcher.wait()
        said = (self.place.folder / name).read_text(errors="replace")
        self._judge_leg(shots, code, said, runs, due, shown, name)
        self._go_on(said)
        return code

    def _await(self, shot: Shot, launcher: ForkedRun, runs: set[Path], due: int) -> tuple[Path | None, list[int]]:
        """Wait for the moment of a shot; return the run's folder and the ranks' processes."""
        if not self._wait(lambda: len(children(launcher.pid)) >= 2, launcher):
            return None, []
        pids = children(launcher.pid)
        run = next(each for each in self.place.runs() if each not in runs)
        if shot.moment in ("step", "save"):
            goal = min(due + shot.after_steps, NUM_STEPS - 1)
            self._wait(lambda: max(metrics(run), default=0) >= goal, launcher)
        root = run / "checkpoints" if self.path is None or self._saves_into(run) else self.place.folder / self.path
        if shot.moment == "save":
            self._wait(lambda: any(root.glob("step-*.partial")), launcher)
        if shot.moment == "end":
            self._wait(lambda: max(metrics(run), default=0) >= NUM_STEPS - 2, launcher)
        time.sleep(shot.delay_s)
        return run, pids

    def _saves_into(self, run: Path) -> bool:
        return json.loads((run / "config.json").read_text())["checkpoint"]["path"] is None

    def _wait(self, condition: Callable[[], bool], launcher: ForkedRun) -> bool:
        deadline_s = time.monotonic() + PATIENCE_S
        while launcher.poll() is None and time.monotonic() < deadline_s:
            with suppress(OSError):
                if condition():
                    return True
            time.sleep(0.002)
        return False

    def _shoot(self, shot: Shot, launcher: int, pids: Sequence[int]) -> None:
        victims = {"launcher": [launcher], "all": [launcher, *pids]}.get(shot.target) or [pids[int(shot.target)]]
        number = getattr(signal, f"SIG{shot.signum}")
        self.judged.sent.append(shot)
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if shot.wakes_after_s is not None:
            time.sleep(shot.wakes_after_s)
            for pid in victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _await_end(self, launcher: ForkedRun, pids: Sequence[int], shot: Shot | None, name: str) -> int:
        start_s = time.monotonic()
        limit_s = TIMEOUT_S + MARGIN_S if shot is not None else 3 * PATIENCE_S
        if shot is not None and (shot.signum, shot.target) == ("STOP", "launcher"):
            if not wait_until(lambda: not any(map(is_running, pids)), limit_s):
                self.judged.blame("hung", f"{name}: {shot}: the ranks of a stopped launcher still run")
            with suppress(ProcessLookupError):
                os.kill(launcher.pid, signal.SIGCONT)
        try:
            code = launcher.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.judged.blame("hung", f"{name}: {shot}: the launcher still runs after {limit_s:.0f} s")
            return 1
        if not wait_until(lambda: not any(map(is_running, pids)), 5.0):
            self.judged.blame("hung", f"{name}: {shot}: ranks still run after the launcher's end")
        if shot is not None:
            self.judged.took_s.append(time.monotonic() - start_s)
        return code

    def _judge_leg(
        self, shots: Sequence[Shot], code: int, said: str, runs: set[Path], due: int, shown: int, name: str
    ) -> None:
        """Look at what a leg has said and left."""
        text = f"{name}: {', '.join(map(str, shots)) or 'no signal'}: code {code}"
        logs = [
            path.read_text(errors="replace")
            for run in self.place.runs()
            if run not in runs
            for path in sorted(run.glob("rank-*.log"))
        ]
        whole = {step_of(each.folder) for root in self.place.roots() for each in survey(root) if not each.damage}
        if missing := set(self.place.announced()) - whole:
            self.judged.blame("lost", f"{text}: announced, and not there: {sorted(missing)}")
        found = re.findall(r"resumed from \S+ at step (\d+)", "\n".join(logs))
        self._resumed_from.update(map(int, found))
        if found and int(found[0]) < due:
            self.judged.blame("lost", f"{text}: resumed from step {found[0]} where {due} was announced")
        if any("Traceback (most recent call last)" in each for each in (said, *logs)):
            self.judged.blame("traceback", f"{text}:\n{said[-1500:]}")
        last = shots[-1] if shots else None
        if last is None:
            if code:
                self.judged.blame("refused", f"{text}:\n{said[-1500:]}")
        elif last.signum == "TERM" and last.moment != "start":
            if code not in (0, 143):
                self.judged.blame("code", f"{text}, not 143:\n{said[-1500:]}")
            elif shown and max(whole, default=0) < shown:
                self.judged.blame("lost", f"{text}: step {shown} was shown, saved is {max(whole, default=0)}")
        elif last.signum == "STOP" and code != 0:
            dead = "the launcher (died|has been stopped)|or the launcher's, is stopped"
            who = dead if last.target == "launcher" else rf"rank {last.target} "
            if not re.search(who, "\n".join((said, *logs))):
                self.judged.blame("unnamed", f"{text}:\n{said[-1500:]}")
        is_silent = last is not None and last.signum == "KILL" and last.target in ("launcher", "all")
        if code and not is_silent and "to go on" not in said and "nothing was saved" not in said:
            self.judged.blame("no way on", f"{text}:\n{said[-1500:]}")

    def _go_on(self, said: str) -> None:
        """Take the line that was printed; where there is none, the same command with `--resume auto`."""
        line = re.search(r"to go on from \S+: shardwise train (.*)", said)
        if line is not None and self.seed % 4 in (0, 3):
            self._arguments = shlex.split(line.group(1))
        else:
            self._arguments = [*settings(self.layout, self.path), "--resume", "auto"]

    def _judge_end(self) -> None:
        """Compare all that was saved and recorded with the run to which nothing happened."""
        saved = self.place.checkpoints()
        if NUM_STEPS not in {step_of(each) for each in saved}:
            self.judged.blame("not finished", f"the last of {len(saved)} is {max(map(step_of, saved), default=0)}")
        for each in saved:
            if tensors_of(each) != self.whole.saved[step_of(each) or 0]:
                self.judged.blame("other bits", str(each.relative_to(self.place.folder)))
        for run in self.place.runs():
            rows = metrics(run)
            if odd := [step for step, row in rows.items() if row != self.whole.metrics[step]]:
                self.judged.blame("other bits", f"{run.name}/metrics.jsonl: steps {odd}")
        # A step is recorded after its save, so a run that dies in a save lacks that step.
        missing = set(range(1, NUM_STEPS + 1)) - metrics(self.place.runs()[-1]).keys() - self._resumed_from
        if missing:
            self.judged.blame("metrics", f"the last run's lack the steps {sorted(missing)}")
        # The next run cleans the folder that it saves into.
        left = [] if len(self.place.roots()) > 1 else list(self.place.roots()[0].glob("*.partial"))
        left += [each for each in (self.place.folder / "swap").rglob("*") if each.is_file()]
        if left:
            self.judged.blame("left", ", ".join(str(each.relative_to(self.place.folder)) for each in left))


def table(chains: Sequence[Judged]) -> str:
    """By layout and signal how many were sent, and by layout what was not as promised."""
    sent = Counter((chain.layout, shot.kind) for chain in chains for shot in chain.sent)
    kinds = ("KILL", "TERM", "STOP", "STOP, CONT")
    lines = [f"{'layout':12} {'  '.join(kinds)}  all  slowest s"]
    for layout in LAYOUTS:
        counts = [sent[layout, kind] for kind in kinds]
        slowest = max((took_s for chain in chains if chain.layout == layout for took_s in chain.took_s), default=0.0)
        numbers = "  ".join(f"{count:{len(kind)}}" for kind, count in zip(kinds, counts, strict=True))
        lines.append(f"{layout:12} {numbers}  {sum(counts):3}  {slowest:9.1f}")
    faults = Counter(kind for chain in chains for kind, texts in chain.faults.items() for _ in texts)
    return "\n".join([*lines, f"all: {sum(sent.values())}; not as promised: {dict(faults) or 'nothing'}"])


def main() -> None:
    """Take chains of all layouts, or of those named, with seeds from the first argument on: FIRST LAST LEGS [LAYOUT]"""
    first, last, num_legs = map(int, sys.argv[1:4])
    top = Path(tempfile.mkdtemp(prefix="signals-"))
    layouts = sys.argv[4:] or list(LAYOUTS)
    with Nursery() as nursery:
        _campaign(nursery, top, layouts, range(first, last + 1), num_legs)


def _campaign(nursery: Nursery, top: Path, layouts: Sequence[str], seeds: Sequence[int], num_legs: int) -> None:
    wholes = {layout: run_whole(layout, top / f"whole-{layout}", nursery) for layout in layouts}

    def take(job: tuple[str, int]) -> Judged:
        layout, seed = job
        folder = top / f"{layout}-{seed}"
        judged = Chain(layout, seed, folder, wholes[layout], nursery).run(num_legs)
        print(f"{time.strftime('%T')} {layout} {seed}: {len(judged.sent)} signals, {judged.faults or 'ok'}", flush=True)
        if not judged.faults:
            shutil.rmtree(folder)
        return judged

    jobs = [(layout, seed) for seed in seeds for layout in layouts]
    with ThreadPoolExecutor(int(os.environ.get("SIGNALS_JOBS", "1"))) as pool:
        chains = list(pool.map(take, jobs))
    print(f"in {top}\n{table(chains)}")


if __name__ == "__main__":
    main()
