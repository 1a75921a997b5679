"""The scripts of examples/ run at toy size: one of them as a program, the others in ranks that are there already.

A program imports torch and transformers for seconds, in each of its ranks; under torchrun the others run with `--full`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Final
from unittest.mock import patch

import pytest

from harness.paths import ROOT
from harness.pool import WorkerPool

pytest.importorskip("transformers")
EXAMPLES: Final = ROOT / "examples"
# Ranks and arguments of each; what needs several ranks to show anything has them.
RUNS: Final = {
    "finetune_hf": (2, ("--steps", "4")),
    "from_deepspeed_config": (1, (str(EXAMPLES / "ds_config.json"), "--steps", "2")),
    "long_context": (2, ("--steps", "3")),
    "lora": (2, ("--steps", "6")),
    "one_gpu_giant": (1, ("--steps", "4")),
    "pretrain": (1, ("--steps", "4")),
    "rl_loop": (1, ("--folder", "runs/rl", "--steps", "40")),
    "three_d": (2, ("--tp", "1", "--steps", "3")),
}
PATIENCE_S: Final = 240


def run_in_ranks(ranks: WorkerPool, name: str, folder: Path, num_ranks: int, *arguments: str) -> str:
    """Run a script in an empty folder on ranks of the pool, and return what all of them printed."""
    ranks(1).run(make_toys, folder)
    return "".join(ranks(num_ranks).run(run_here, name, folder, arguments))


def make_toys(rank: int, world_size: int, folder: Path) -> None:
    """Make what the scripts take: where ranks have met before they do, transformers writes models on rank 0 alone."""
    make_toy = runpy.run_path(str(EXAMPLES / "toy.py"))["make_toy"]
    make_toy(folder / "runs" / "toy")
    make_toy(folder / "runs" / "toy-4", num_layers=4)


def run_here(rank: int, world_size: int, name: str, folder: Path, arguments: tuple[str, ...]) -> str:
    """Run a script in this process, which has met the others, and return what it printed."""
    path, before = EXAMPLES / f"{name}.py", Path.cwd()
    sys.path.insert(0, str(EXAMPLES))  # as Python does for a program
    os.chdir(folder)
    try:
        with (
            patch.object(sys, "argv", [str(path), "--toy", *arguments]),
            contextlib.redirect_stdout(io.StringIO()) as said,
        ):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        os.chdir(before)
    return said.getvalue()


def run(name: str, folder: Path, num_ranks: int, *arguments: str) -> str:
    """Run a script as a program in an empty folder, and return what it printed."""
    start = [sys.executable]
    if num_ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [*start, str(EXAMPLES / f"{name}.py"), "--toy", *arguments],
        cwd=folder,
        env={**os.environ, **own, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks; a kill would leave them running
        process.wait()
        raise
    assert process.returncode == 0, output[-2000:] + errors[-4000:]
    return output


def losses_of(output: str) -> dict[int, float]:
    """Return the loss of each step that a script printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)(?:/\d+ |:).*?loss (-?[\d.]+)", output)}


def test_every_script_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*RUNS, "toy"}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", RUNS)
def test_an_example_trains(ranks: WorkerPool, name: str, tmp_path: Path) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    num_ranks, arguments = RUNS[name]
    check(name, run_in_ranks(ranks, name, tmp_path, num_ranks, *arguments), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_an_example_trains_as_a_program(name: str, tmp_path: Path) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    num_ranks, arguments = RUNS[name]
    check(name, run(name, tmp_path, num_ranks, *arguments), tmp_path)


def check(name: str, output: str, folder: Path) -> None:
    """Judge a script by the losses, or the rewards, that it printed, and by what it has left in its folder."""
    arguments = RUNS[name][1]
    losses, num_steps = losses_of(output), int(arguments[-1])
    if name == "rl_loop":  # whose loss is no measure of what it learns
        check_rewards(folder / "runs" / "rl", num_steps)
        return
    assert list(losses) == list(range(1, num_steps + 1))
    assert losses[num_steps] < losses[1]
    if name == "lora":
        check_adapter(folder)


def check_rewards(folder: Path, num_steps: int) -> None:
    """The policy learns, and what it is trained with are the probabilities that it sampled with."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["values"]["reward"] for line in lines]
    assert len(rewards) == num_steps
    assert sum(rewards[-10:]) > 3 * sum(rewards[:10])
    assert all(line["values"]["token_mult_prob_error"] < 1.001 for line in lines)
    assert "values/reward" in (folder / "report.html").read_text()


def check_adapter(folder: Path) -> None:
    """Load the adapter onto the base model: it has all of it, and it was trained (PEFT's B begins at 0)."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "runs" / "toy")
    adapted = PeftModel.from_pretrained(base, str(folder / "runs" / "adapter"))
    trained = [each for name, each in adapted.named_parameters() if "lora_B" in name]
    assert len(trained) == 4
    assert all(each.any() for each in trained)


@pytest.mark.full
def test_three_axes_train_on_eight_processes(tmp_path: Path) -> None:
    losses = losses_of(run("three_d", tmp_path, 8))
    assert losses[3] < losses[1]


@pytest.mark.usefixtures("warm_python")
def test_a_fine_tuning_goes_on_where_it_was(ranks: WorkerPool, tmp_path: Path) -> None:
    """A program of 12 steps whose script is started again, from its checkpoint of step 10, prints the same losses."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first = losses_of(run("finetune_hf", tmp_path, 1, "--steps", "12", "--out", "out"))
    (exported,) = tmp_path.glob("out/model-*")
    exported.rename(tmp_path / "first")
    again = losses_of(run_in_ranks(ranks, "finetune_hf", tmp_path, 1, "--steps", "12", "--out", "out"))
    assert again == {step: first[step] for step in (11, 12)}
    weights = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "first", exported)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert AutoTokenizer.from_pretrained(exported).decode([5, 6])
