"""Experts that lie one by one in a list train over several ranks once they are stacked, as the list does in one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from harness.listed_experts import in_stacks, listed, stack
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.refusals import refused
from harness.tensor import CLIP_NORM, train_on_mesh, train_plainly
from harness.training import make_config, merge_ranks

NUM_STEPS = 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep 2": (2, {"mesh": {"ep": 2}, "zero": {"stage": 2}}),
    "ep 2, stage 3": (4, {"mesh": {"ep": 2}, "zero": {"stage": 3}}),
    "ep 4, recomputed": (4, {"mesh": {"ep": 4}, "recompute": {"mode": "full"}}),
    "pp 2, ep 2": (4, {"mesh": {"pp": 2, "ep": 2}, "pipeline": {"schedule": "1f1b"}}),
}
NAMES = {
    "**.experts.gate_up_proj": {"stored": ("**.experts.#.w1.weight", "**.experts.#.w3.weight"), "dim": 1},
    "**.experts.down_proj": "**.experts.#.w2.weight",
}


def train(rank: int, world_size: int, num_micro_batches: int, overrides: Any) -> Trace:
    case = listed(is_stacked=True)
    return train_on_mesh(rank, case, overrides, case.loss, num_micro_batches, NUM_STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stacked_experts_train_as_the_list_in_one_process(ranks: WorkerPool, layout: str) -> None:
    num_ranks, overrides = LAYOUTS[layout]
    num_data_ranks = num_ranks // overrides["mesh"].get("pp", 1)
    expected = train_plainly(listed(is_stacked=False), num_data_ranks, 2, NUM_STEPS, CLIP_NORM)
    expected = replace(expected, parameters=in_stacks(expected.parameters))
    check_parity(merge_ranks(ranks(num_ranks).run(train, 2, overrides)), expected)


def ask_for_a_list(rank: int, world_size: int) -> None:
    case = listed(is_stacked=False)
    with refused("ep-without-experts", "mesh.ep=2", "ListedModel", "shardwise.models.Experts.stacked"):
        shardwise.initialize(case.make(), make_config(1, {"mesh": {"ep": 2}}), loss_fn=case.loss)


def test_a_list_of_experts_is_refused_with_the_way_to_stack_it(ranks: WorkerPool) -> None:
    ranks(2).run(ask_for_a_list)


def stack_slices(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    """Read a folder of listed experts into a stacked model, which is built in slices, and write it again."""
    case = listed(is_stacked=True)
    with shardwise.init():
        model = stack(listed(is_stacked=False).build(torch.float32, seed=rank))
    with shardwise.initialize(model, make_config(1, {"mesh": {"ep": 2}}), loss_fn=case.loss) as engine:
        built = {name: engine.read(name) for name, _ in model.named_parameters()}
        engine.import_weights(folder / "listed", names=NAMES)
        engine.export_weights(folder / "again", names=NAMES)
    return built


def test_a_list_built_in_slices_is_stacked_and_has_the_names_of_its_folder(ranks: WorkerPool, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    stored = listed(is_stacked=False).build(torch.float32, seed=7).state_dict()
    (tmp_path / "listed").mkdir()
    save_file(stored, tmp_path / "listed" / "model.safetensors")
    built = ranks(2).run(stack_slices, tmp_path)[1]
    expected = in_stacks(listed(is_stacked=False).build(torch.float32, seed=0).state_dict())
    assert built.keys() == expected.keys()
    assert all(built[name].equal(expected[name]) for name in built)
    (written,) = (tmp_path / "again").glob("*.safetensors")
    again = load_file(written)
    assert again.keys() == stored.keys()
    assert all(again[name].equal(stored[name]) for name in stored)
