"""Whether two checkouts train to the same bits, in each kind of layout, and continue an old checkpoint to the same.

Each layout trains the same small decoder by `shardwise train` with both checkouts: losses, gradient norms, held-out
losses and the tensors of the last checkpoint are compared bit for bit. Then both continue a checkpoint of the first.
It measures no time.

    git worktree add ../before HEAD~20
    python benchmarks/same_numbers.py ../before . --json same_numbers.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

TRAINING = (
    *("run.seed=3", "run.sample_tokens=0", "run.eval_batches=2", "run.device=cpu", "run.num_procs=2"),
    *("model.num_layers=4", "model.hidden_size=64", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_size=128"),
    *("data.path=text.txt", "data.seq_len=64", "data.tokenizer=bytes", "batch.micro_size=2", "batch.accumulation=4"),
    *("checkpoint.path=checkpoints", "checkpoint.every=5", "checkpoint.keep_last=0", "run.num_threads=1"),
)
NUMBERS = ("step", "loss", "count", "grad_norm", "lr", "skipped", "eval_loss")
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Run:
    """A layout and what sets it."""

    name: str
    keys: tuple[str, ...]


RUNS = (
    *(Run(f"stage {stage}", (f"zero.stage={stage}",)) for stage in range(4)),
    Run("stage 3, recompute", ("zero.stage=3", "recompute.mode=full")),
    Run("stage 3, fp32", ("zero.stage=3", "precision.param=fp32")),
    Run("tp 2", ("mesh.tp=2",)),
    Run("tp 2, sequence parallel", ("mesh.tp=2", "tensor.sequence_parallel=true")),
    Run("pp 2, 1f1b", ("mesh.pp=2",)),
    Run("pp 2, zb-v, stage 3", ("mesh.pp=2", "pipeline.schedule=zb-v", "pipeline.virtual_stages=2", "zero.stage=3")),
    Run("cp 2, ring", ("mesh.cp=2",)),
    Run("cp 2, ulysses", ("mesh.cp=2", "context.transport=ulysses")),
    Run("host tier", ("zero.stage=3", "tiers.params=host", "tiers.grads=host", "tiers.optimizer=host")),
    Run("NVMe tier", ("zero.stage=3", "tiers.params=nvme", "tiers.optimizer=nvme", "tiers.nvme_path=nvme")),
    Run("int8 states", ("precision.states=int8",)),
    Run("int8 gathers, int8 sums", ("zero.stage=3", "precision.gather=int8", "precision.reduce=int8")),
    Run("Muon", ("optimizer.name=muon", "zero.stage=3")),
)


@dataclass(frozen=True)
class Outcome:
    """How the two runs of a layout compare; `differences` names what is not equal."""

    name: str
    num_losses: int
    num_tensors: int
    differences: tuple[str, ...]


def train(checkout: Path, folder: Path, run: Run, num_steps: int, resume: Path | None = None) -> None:
    """Train in an empty folder with the sources of a checkout. RuntimeError with what it wrote where it fails."""
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("".join(f"def double_{n}(x):\n    return {2 * n} * x\n\n" for n in range(2000)))
    (folder / "nvme").mkdir()
    command = [sys.executable, "-m", "shardwise", "train", *TRAINING, *run.keys, f"run.steps={num_steps}"]
    command += ["--resume", str(resume)] if resume is not None else []
    environ = os.environ | {"PYTHONPATH": str(checkout / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    if ended.returncode:
        raise RuntimeError(f"{checkout}, {run.name}: exit {ended.returncode}\n{(ended.stdout + ended.stderr)[-2000:]}")


def numbers(folder: Path) -> list[Mapping[str, object]]:
    """What the run's log has for each step, but for times, memory and slow ranks."""
    (log,) = folder.glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [{name: line.get(name) for name in NUMBERS} for line in lines]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, by file and name."""
    newest = max((folder / "checkpoints").glob("step-*"))
    found = {}
    for path in sorted(newest.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update({f"{path.name}:{name}": file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


def differences(before: Path, after: Path) -> list[str]:
    """Names what the two runs do not have in common, to the bit."""
    first, second = numbers(before), numbers(after)
    named = [f"step {index + 1}" for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]]
    named += [f"{len(first)} steps, {len(second)} steps"] if len(first) != len(second) else []
    left, right = tensors(before), tensors(after)
    named += sorted(left.keys() ^ right.keys())
    return named + [name for name in left.keys() & right.keys() if not is_same(left[name], right[name])]


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, shape and bytes (NaN equals itself)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)))


def compare(before: Path, after: Path, folder: Path, run: Run, num_steps: int) -> list[Outcome]:
    """Train by both, then let both continue the middle checkpoint of the first."""
    for name, checkout in (("before", before), ("after", after)):
        train(checkout, folder / name, run, num_steps)
    old = folder / "before" / "checkpoints" / f"step-{num_steps // 2:08d}"
    for name, checkout in (("before", before), ("after", after)):
        train(checkout, folder / f"{name}-continued", run, num_steps, resume=old)
    outcomes = []
    for suffix, words in (("", ""), ("-continued", ", old checkpoint continued")):
        pair = folder / f"before{suffix}", folder / f"after{suffix}"
        count = len(numbers(pair[0])), len(tensors(pair[0]))
        outcomes.append(Outcome(run.name + words, *count, tuple(differences(*pair))))
    return outcomes


def main() -> int:
    """Compare all layouts, or those whose names have a word; 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--only", default="", help="a word of the layouts' names")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    table = Table("layout", "steps", "tensors", "differs")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as temporary:
        for index, run in enumerate(run for run in RUNS if options.only in run.name):
            console.print(run.name, highlight=False)
            folder = Path(temporary) / str(index)
            outcomes += compare(options.before.resolve(), options.after.resolve(), folder, run, options.steps)
    for outcome in outcomes:
        shown = ", ".join(outcome.differences[:3]) or "nothing"
        table.add_row(outcome.name, str(outcome.num_losses), str(outcome.num_tensors), shown)
    console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return int(any(outcome.differences for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
