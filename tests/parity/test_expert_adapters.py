"""Adapters of divided experts go out to PEFT's folders, merged into hub names too, and come in from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.hf_folders import make_folder, read_weights
from harness.pool import WorkerPool
from harness.refusals import refused
from shardwise import initialize
from shardwise.config.resolve import Config
from shardwise.train.job_model import HuggingFaceModel

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep 2": (2, {"mesh": {"ep": 2}}),
    "tp 2, ep 2": (2, {"mesh": {"tp": 2, "ep": 2}}),
    "stage 3, ep 2": (4, {"mesh": {"ep": 2}, "zero": {"stage": 3}}),
}
TARGETS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
GLOBAL_SIZE, NUM_STEPS = 4, 2
Seen = tuple[list[float], dict[str, Tensor]]


def config_of(base: Path, layout: dict[str, Any], num_ranks: int, targets: list[str] = TARGETS) -> Config:
    num_data_ranks = num_ranks // layout.get("mesh", {}).get("tp", 1)
    values: dict[str, Any] = {
        "model": {"path": str(base)},
        "lora": {"rank": 2, "targets": targets},
        "batch": {"micro_size": 1, "accumulation": GLOBAL_SIZE // num_data_ranks},
        "optimizer": {"lr": 0.1, "weight_decay": 0.0},
        "precision": {"param": "fp32"},
        "run": {"device": "cpu"},
    }
    return Config.from_dict(values | layout)


def batches(step: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(4, 288, (GLOBAL_SIZE, 12), generator=torch.Generator().manual_seed(step))
    return [{"input_ids": each, "labels": each} for each in tokens.split(1)]


def run(engine: Any, rank: int) -> Seen:
    mesh = engine.layout.mesh
    place, stride = mesh.data_index(rank), mesh.num_data_ranks
    losses = [engine.train_step(batches(step)[place::stride]).loss for step in range(NUM_STEPS)]
    losses.append(engine.eval_step(batches(9)[place::stride]).loss)
    names = [name for name, each in engine.model.named_parameters() if each.requires_grad]
    return losses, {name: engine.read(name) for name in names}


def train(rank: int, world_size: int, base: Path, out: Path, layout: dict[str, Any]) -> Seen:
    """Train adapters as the command does, and write them."""
    model = HuggingFaceModel.open(config_of(base, layout, world_size))
    with model.initialize(model.config.resolve(world_size)) as engine:
        seen = run(engine, rank)
        model.export(engine, out)
    return seen


def go_on(rank: int, world_size: int, base: Path, adapter: Path, layout: dict[str, Any]) -> tuple[float, Seen]:
    """Train the adapters of a folder, as a script does."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(whole, adapter, is_trainable=True)
    with initialize(model, config_of(base, layout, world_size)) as engine:
        mesh = engine.layout.mesh
        first = engine.eval_step(batches(9)[mesh.data_index(rank) :: mesh.num_data_ranks]).loss
        return first, run(engine, rank)


def loss_of(model: Any) -> float:
    with torch.no_grad():
        return float(torch.stack([model.eval()(**batch).loss for batch in batches(9)]).mean())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_of_experts_go_out_and_come_in(ranks: WorkerPool, tmp_path: Path, layout: str) -> None:
    base, (num_ranks, sections) = make_folder("mixtral", tmp_path / "base"), LAYOUTS[layout]
    ((expected, _),) = ranks(1).run(train, base, tmp_path / "one", {})
    for losses, _ in (seen := ranks(num_ranks).run(train, base, tmp_path / "out", sections)):
        assert losses == pytest.approx(expected, rel=1e-5)
    whole = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(whole, tmp_path / "out", is_trainable=True)
    own = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert own.keys() == seen[0][1].keys()
    assert sum(".experts." in name for name in own) == 2 * 4
    for name, value in own.items():
        assert value.equal(seen[0][1][name]), name
    assert loss_of(model) == pytest.approx(expected[-1], rel=1e-5)

    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert loss_of(merged) == pytest.approx(expected[-1], rel=1e-5)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert loss_of(plain) != pytest.approx(expected[-1], rel=1e-3)
    stored = read_weights(tmp_path / "merged")
    assert stored.keys() == read_weights(base).keys()
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in stored

    ((first, expected_again),) = ranks(1).run(go_on, base, tmp_path / "out", {})
    assert first == pytest.approx(expected[-1], rel=1e-5)
    for first, (losses, _) in ranks(num_ranks).run(go_on, base, tmp_path / "out", sections):
        assert first == pytest.approx(expected[-1], rel=1e-5)
        assert losses == pytest.approx(expected_again[0], rel=1e-5)


def test_targets_that_are_nothing_are_refused(tmp_path: Path) -> None:
    base = make_folder("mixtral", tmp_path / "base")
    with refused("lora-targets", "experts.nothing"):
        HuggingFaceModel.open(config_of(base, {}, 1, ["experts.nothing"])).skeleton()


def test_the_commands_all_linear_adapts_experts_too(tmp_path: Path) -> None:
    base = make_folder("mixtral", tmp_path / "base")
    named, every = (
        HuggingFaceModel.open(config_of(base, {}, 1, targets)).skeleton() for targets in (TARGETS[1:], ["all-linear"])
    )
    own = {name for name, each in named.named_parameters() if each.requires_grad}
    assert own
    assert own <= {name for name, each in every.named_parameters() if each.requires_grad}
