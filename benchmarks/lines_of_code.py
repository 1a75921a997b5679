"""Count the lines of four tasks, written for Shardwise and for Accelerate with DeepSpeed, and run all of them.

    python benchmarks/lines_of_code.py
    python benchmarks/lines_of_code.py --deepspeed /path/to/python    # one that has DeepSpeed, for the pipeline

The scripts are in `lines/`. A line counts if code stands on it: not blank lines, comments and docstrings. Both sides
have one style (ruff format, 120 columns), the same model, data and settings. Each runs on two CPU ranks. Accelerate
refuses DeepSpeed on CPUs, so its scripts run by `shardwise run --as-deepspeed`, after a statement that is not counted.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
LINES: Final = Path(__file__).parent / "lines"
NUM_STEPS: Final = 12
SIDES: Final = ("shardwise", "accelerate")
TASKS: Final = {
    "finetune": "fine-tune under ZeRO-3: accumulation, schedule, evaluation, checkpoints, resumption, export",
    "lora": "LoRA on a base model under ZeRO-3, the adapters saved",
    "evaluate": "the loss over a data set under ZeRO-3",
    "pipeline": "train in two pipeline stages, with a checkpoint",
}
# Accelerate takes one process alone for a machine without GPUs unless it is said so before.
ON_CPU: Final = (
    "import runpy, sys; from accelerate import PartialState; PartialState(cpu=True); sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
NO_CODE: Final = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)


def count_lines(source: str) -> int:
    """Return the number of lines with code on them.

    >>> count_lines("'''A docstring.'''\\n\\nx = [  # a comment\\n    1,\\n]\\n# another\\n")
    3
    """
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def command_of(task: str, side: str, python: str, arguments: Sequence[str]) -> list[str]:
    """Return what runs one script on two ranks."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(LINES / f"{task}_{side}.py")
    if side == "shardwise":
        return [sys.executable, *ranks, script, *arguments]
    if python != sys.executable:
        return [python, *ranks, script, *arguments]
    started = ["--no-python", sys.executable, "-c", ON_CPU, script] if task != "pipeline" else [script]
    return [python, "-m", "shardwise", "run", "--as-deepspeed", "--", python, *ranks, *started, *arguments]


def run(command: Sequence[str]) -> dict[str, float]:
    """Run a script, and return the losses that it prints, by step or "held-out".

    Raises:
        RuntimeError: with its output, where it fails.
    """
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **own, "PYTHONPATH": str(ROOT / "src"), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = re.findall(r"^(?:step (\d+): |(held-out) )loss ([\d.]+)", done.stdout, re.M)
    return {step or word: float(loss) for step, word, loss in found}


def run_task(task: str, side: str, python: str, folder: Path) -> dict[str, float]:
    """Run one side of a task; fine-tuning is stopped after ten steps, and started again.

    Raises:
        RuntimeError: it fails, or does not go on where it was.
    """
    out = folder / f"{task}-{side}"
    losses = {}
    for num_steps in (NUM_STEPS - 2, NUM_STEPS) if task == "finetune" else (NUM_STEPS,):
        losses |= (last := run(command_of(task, side, python, [str(folder / "toy"), str(out), str(num_steps)])))
    if task == "finetune" and set(last) != {str(NUM_STEPS - 1), str(NUM_STEPS), "held-out"}:
        raise RuntimeError(f"{side} did not go on from step {NUM_STEPS - 2}: {last}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", default=sys.executable, help="a Python with DeepSpeed, for the pipeline")
    parser.add_argument("--count", action="store_true", help="count only, run nothing")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / "examples"))
    from toy import make_toy

    figures = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not given.count:
            make_toy(folder / "toy")
        print("| task | Shardwise | Accelerate + DeepSpeed | last losses |\n|---|---|---|---|")
        for task, what in TASKS.items():
            lines = {
                side: count_lines((LINES / f"{task}_{side}.py").read_text()) for side in ("shardwise", "accelerate")
            }
            losses = {}
            for side in () if given.count else lines:
                python = given.deepspeed if (task, side) == ("pipeline", "accelerate") else sys.executable
                losses[side] = run_task(task, side, python, folder)
            figures[task] = {"lines": lines, "losses": losses}
            last = ", ".join(f"{list(each.values())[-1]:.3f}" for each in losses.values())
            print(f"| {what} | {lines['shardwise']} | {lines['accelerate']} | {last} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
