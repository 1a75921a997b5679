"""Our decoder with experts, and lists of feed-forwards that are stacked, equal one plain process, in float64."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.combinations import combination_id, pairwise
from harness.expert_layouts import EXPERT_FACTORS, fits_ranks, num_data_ranks, sections_of
from harness.hf_folders import read_weights
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.tensor import CLIP_NORM, batches_of, expert_decoder, train_on_mesh, train_plainly
from harness.training import make_config, merge_ranks
from shardwise import initialize

NUM_STEPS = 2
FACTORS = {"num_ranks": [2, 4], **EXPERT_FACTORS, "num_shared_experts": [0, 2], "router_bias": [False, True]}
MODEL_KEYS = ("num_shared_experts", "router_bias")
# A layer of shared experts after the others makes a recomputation gather their rows again.
GATHERED_AGAIN = {key: values[0] for key, values in FACTORS.items()}
GATHERED_AGAIN |= {"tp": 2, "recompute": "selective", "num_shared_experts": 2}


def train(rank: int, world_size: int, options: dict[str, Any], num_micro_batches: int, overrides: Any) -> Trace:
    case = expert_decoder(**options)
    return train_on_mesh(rank, case, overrides, case.loss, num_micro_batches, NUM_STEPS)


@functools.cache
def reference(options: tuple[tuple[str, Any], ...], num_data_ranks: int, num_micro_batches: int) -> Trace:
    return train_plainly(expert_decoder(**dict(options)), num_data_ranks, num_micro_batches, NUM_STEPS, CLIP_NORM)


@pytest.mark.quick(4)
@pytest.mark.parametrize("options", [*pairwise(FACTORS, fits_ranks), GATHERED_AGAIN], ids=combination_id)
def test_our_decoders_experts_equal_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    overrides = sections_of(options)
    shape = {key: options[key] for key in MODEL_KEYS}
    traces = ranks(options["num_ranks"]).run(train, shape, options["accumulation"], overrides)
    check_parity(merge_ranks(traces), reference((*shape.items(),), num_data_ranks(options), options["accumulation"]))


def command(folder: Path, *words: str) -> str:
    """What `shardwise train` says."""
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", *words, f"run.dir={folder}", f"data.cache_dir={folder}/cache"],
        env={**os.environ, "COLUMNS": "120"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_of(run: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records}


@pytest.mark.usefixtures("warm_python")
def test_the_command_trains_a_preset_of_experts_and_resumes_it_in_another_layout(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the number {number} comes after {number - 1}" for number in range(600)))
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "expert_size": 24}
    common = [f"model.{key}={value}" for key, value in sizes.items()] + ["run.num_threads=1", "run.sample_tokens=0"]
    common += ["model.preset=tiny-moe", f"data.path={text}", "data.seq_len=32", "run.device=cpu", "run.num_procs=2"]
    common += ["precision.param=fp64", "batch.micro_size=2", "run.eval_batches=1", "scheduler.name=constant"]
    command(tmp_path, *common, "mesh.ep=2", "run.steps=3", "run.name=first", "checkpoint.every=3")
    command(tmp_path, *common, "run.steps=4", "run.name=whole", "zero.stage=3", "checkpoint.every=4")
    (first,), (whole,) = tmp_path.glob("*-first"), tmp_path.glob("*-whole")
    command(tmp_path, "--resume", str(first), *common, "mesh.ep=1", "run.steps=4", "run.name=again")
    (again,) = tmp_path.glob("*-again")
    assert losses_of(first) | losses_of(again) == pytest.approx(losses_of(whole), rel=1e-9)


def export(rank: int, world_size: int, folder: Path, again: Path) -> dict[str, Tensor]:
    """Write what divided experts are after a step, read it in another layout and write that."""
    case = expert_decoder(router_bias=False)
    config = make_config(1, {"mesh": {"ep": 2}, "zero": {"stage": 3}, "precision": {"param": "fp32"}})
    with initialize(case.build(torch.float32), config, loss_fn=case.loss) as engine:
        engine.train_step(batches_of(engine, case, 0, 1))
        engine.export_weights(folder)
        values = {name: engine.read(name) for name, _ in engine.model.named_parameters()}
    with initialize(case.build(torch.float32, seed=3), {"mesh": {"tp": 2, "ep": 2}}, loss_fn=case.loss) as engine:
        engine.import_weights(folder)
        engine.export_weights(again)
    return values


def test_divided_experts_are_exported_as_a_mixtral_and_read_back(ranks: WorkerPool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    values = ranks(2).run(export, tmp_path / "out", tmp_path / "again")[0]
    ours = expert_decoder(router_bias=False).build(torch.float32)
    ours.load_state_dict(values)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == "MixtralForCausalLM"
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens))
    stored, again = read_weights(tmp_path / "out"), read_weights(tmp_path / "again")
    assert "model.layers.2.block_sparse_moe.experts.3.w1.weight" in stored
    assert stored.keys() == again.keys()
    assert all(again[name].equal(value) for name, value in stored.items())
