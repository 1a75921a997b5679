"""The scripts of examples/ run as a user runs them: as programs, at toy size, on one rank or under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from harness.paths import ROOT

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
    "rl_loop": (1, ("--steps", "12")),
    "three_d": (2, ("--tp", "1", "--steps", "3")),
}
PATIENCE_S: Final = 240


def run(name: str, folder: Path, num_ranks: int, *arguments: str) -> str:
    """Run a script in an empty folder, and return what it printed."""
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


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", RUNS)
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    num_ranks, arguments = RUNS[name]
    output = run(name, tmp_path, num_ranks, *arguments)
    losses, num_steps = losses_of(output), int(arguments[-1])
    assert list(losses) == list(range(1, num_steps + 1))
    if name == "rl_loop":  # whose loss is no measure of what it learns
        rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", output)]
        assert rewards[-1] > 2 * rewards[0]
    else:
        assert losses[num_steps] < losses[1]
    if name == "lora":
        check_adapter(tmp_path)


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


def test_a_fine_tuning_goes_on_where_it_was(tmp_path: Path) -> None:
    """A run of 12 steps that is started again, from its checkpoint of step 10, prints the same losses."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first = losses_of(run("finetune_hf", tmp_path, 1, "--steps", "12", "--out", "out"))
    (exported,) = tmp_path.glob("out/model-*")
    exported.rename(tmp_path / "first")
    again = losses_of(run("finetune_hf", tmp_path, 1, "--steps", "12", "--out", "out"))
    assert again == {step: first[step] for step in (11, 12)}
    weights = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "first", exported)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert AutoTokenizer.from_pretrained(exported).decode([5, 6])
