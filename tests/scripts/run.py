"""Run public scripts through the `deepspeed` shim on two CPU ranks, and on one plain process, and compare each loss.

    python tests/scripts/run.py CLONES [--only trl] [--zero zero3] [--precision fp32] [--json FILE]

CLONES is a folder with clones of transformers, accelerate, peft and DeepSpeedExamples. A script's losses must equal
those of one process without DeepSpeed that has the ranks' batches: to 1e-6 in float32 and to 1e-3 in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness.local_hub import make_hub
from scripts.catalogue import NUM_RANKS, SCRIPTS, ZERO, Job, Script

ROOT: Final = Path(__file__).parents[2]
RECORD: Final = Path(__file__).with_name("record.py")
TOLERANCE: Final = {"fp32": 1e-6, "bf16": 1e-3}
PATIENCE_S: Final = 300


@dataclass(frozen=True)
class Outcome:
    """What one run of a script gave: losses by step, norms where it logs them, or why it failed."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Row:
    """A script in one setting, beside the plain one."""

    script: str
    zero: str
    precision: str
    passed: bool
    loss_difference: float | None
    norm_difference: float | None
    outcome: Outcome
    plain: Outcome


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment with one thread, no network, no GPU, and the library's sources."""
    own = {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_DISABLE_RICH": "1",
    }
    return {**os.environ, **own, **more}


def as_deepspeed(command: Sequence[str]) -> list[str]:
    """Return a command whose processes find the shim under the name of DeepSpeed."""
    return [sys.executable, "-m", "shardwise", "run", "--as-deepspeed", "--", *command]


def torchrun(num_ranks: int) -> list[str]:
    """Return what starts a script on ranks of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]


def launcher(job: Job, script: Script) -> list[str]:
    """Return what starts the ranks of a job."""
    if "--accelerate" not in script.options:
        return torchrun(NUM_RANKS)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--main_process_port=0"]
    config = f"--deepspeed_config_file={job.output / 'deepspeed.json'}"
    return [*launch, f"--num_processes={NUM_RANKS}", "--num_machines=1", "--mixed_precision=no", config]


def run_script(script: Script, path: Path, job: Job) -> Outcome:
    """Run a script once."""
    job.output.mkdir(parents=True)
    command = [str(RECORD), f"--to={job.output}", *script.options]
    command += [*([] if job.zero else ["--plain"]), str(path), *script.arguments(job)]
    command = as_deepspeed([*launcher(job, script), *command]) if job.zero else [sys.executable, *command]
    environ = environment(HF_HOME=str(job.output / "cache"))
    if "--accelerate" in script.options and not job.zero:
        environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if job.precision == "bf16" else "no"
        environ["ACCELERATE_USE_CPU"] = "true"
    start = time.perf_counter()
    with (job.output / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=job.output, env=environ, stdout=log, stderr=log)
        try:
            status = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            status = None
    seconds = time.perf_counter() - start
    error = "" if status == 0 else f"did not end in {PATIENCE_S} s" if status is None else reason(job.output / "log")
    return Outcome(tuple(read_losses(job, script)), tuple(read_norms(job.output)), seconds, error)


def reason(log: Path) -> str:
    """Return the first line of a log that names an exception."""
    lines = log.read_text(errors="replace").splitlines()
    named = [line for line in lines if re.search(r"^(\[rank\d\]: ?)?[\w.]+(Error|Exception|Interrupt)\b", line)]
    return next(iter(named or lines[-1:]), "failed without a word")[:300]


def read_losses(job: Job, script: Script) -> Iterator[float]:
    """Yield the loss of each step: the mean over ranks, over a step's micro-batches the sum or the mean."""
    files = sorted(job.output.glob("losses-*"))
    ranks = [[float(line) for line in file.read_text().split()] for file in files]
    means = [sum(losses) / len(ranks) for losses in zip(*ranks, strict=False)]
    group = 1 if script.steps and job.zero else script.accumulation
    for first in range(0, len(means) - group + 1, group):
        total = sum(means[first : first + group])
        yield total / group if script.mean else total


def read_norms(folder: Path) -> Iterator[float]:
    """Yield the gradients' norms that a Trainer wrote down."""
    states = sorted(folder.glob("out/**/trainer_state.json"))
    if states:
        yield from (row["grad_norm"] for row in json.loads(states[-1].read_text())["log_history"] if "grad_norm" in row)


def difference(these: Sequence[float], those: Sequence[float]) -> float | None:
    """Return the largest difference, relative where values are above 1, or None where there is nothing to compare."""
    if not those or len(these) != len(those):
        return None
    return max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(these, those, strict=True))


def tolerance(precision: str, losses: Sequence[float]) -> float:
    """Return how much losses may differ: the spacing of numbers where a script computes its loss in bfloat16."""
    is_coarse = precision == "bf16" and all(torch.tensor(loss).bfloat16().item() == loss for loss in losses)
    return 2**-8 if is_coarse else TOLERANCE[precision]


def compare(name: str, job: Job, outcome: Outcome, plain: Outcome) -> Row:
    assert job.zero is not None
    losses = difference(outcome.losses, plain.losses)
    passed = not outcome.error and losses is not None and losses <= tolerance(job.precision, plain.losses)
    norms = difference(outcome.norms, plain.norms)
    return Row(name, job.zero, job.precision, passed, losses, norms, outcome, plain)


def run_all(clones: Path, work: Path, wanted: Mapping[str, Any]) -> Iterator[Row]:
    """Run every script that is wanted and found."""
    hub = make_hub(work / "hub")
    for name, script in SCRIPTS.items():
        path = script.find(clones)
        if not any(part in name for part in wanted["only"]):
            continue
        if path is None:
            print(f"{name}: no {script.path}", flush=True)
            continue
        for precision in (each for each in script.precisions if each in wanted["precision"]):
            place = work / name.replace(" ", "-") / precision
            plain = run_script(script, path, Job(hub, place / "plain", None, precision))
            print(
                f"{name:30}{precision:6}{'plain':15}{plain.seconds:6.0f} s  {plain.error or plain.losses}", flush=True
            )
            for zero in (each for each in script.settings if each in wanted["zero"]):
                job = Job(hub, place / zero, zero, precision)
                yield compare(name, job, run_script(script, path, job), plain)


def describe(row: Row) -> str:
    """Return a row of the table."""
    word = "ok" if row.passed else "FAILS"
    said = f"{row.script:30}{row.precision:6}{row.zero:15}{row.outcome.seconds:6.0f} s  {word:6}"
    for name, value in (("loss", row.loss_difference), ("norm", row.norm_difference)):
        said += f" {name} {value:8.1e}" if value is not None else f" {name} {'-':8}"
    return f"{said}  {row.outcome.error}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="scripts whose names have it")
    parser.add_argument("--zero", nargs="+", choices=list(ZERO), default=list(ZERO))
    parser.add_argument("--precision", nargs="+", choices=list(TOLERANCE), default=list(TOLERANCE))
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--work", type=Path, help="keep what runs write here")
    given = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for row in run_all(given.clones.resolve(), (given.work or Path(temporary)).resolve(), vars(given)):
            rows.append(row)
            print(describe(row), flush=True)
            if given.json:
                given.json.write_text(json.dumps([asdict(each) for each in rows], indent=1))
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows) - failed} equal, {failed} not")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
