"""States of divided experts: every optimizer, tier and codec steps them as one rank does, and any layout loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.tensor import batches_of, mixture, train_on_mesh
from harness.training import make_config, merge_ranks
from shardwise import initialize

pytest.importorskip("transformers")

NUM_STEPS = 3
# Each expert's matrices are whole numbers of blocks of codes.
WIDE = {"hidden_size": 32, "intermediate_size": 64, "num_local_experts": 4}


def train(rank: int, world_size: int, num_micro_batches: int, overrides: Any) -> Trace:
    return train_on_mesh(rank, mixture(**WIDE), overrides, None, num_micro_batches, NUM_STEPS)


VARIANTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "muon": ({"ep": 2}, {"optimizer": {"name": "muon"}, "zero": {"stage": 2}}),
    "muon, sharded beside": ({"ep": 2, "tp": 2}, {"optimizer": {"name": "muon"}, "zero": {"stage": 3}}),
    "host": ({"ep": 2}, {"tiers": {"optimizer": "host", "grads": "host", "params": "host"}, "zero": {"stage": 3}}),
    "kept whole": ({"ep": 2}, {"zero": {"stage": 3, "keep_whole_below": 5000}}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_of_divided_experts_are_those_of_one_rank(ranks: WorkerPool, variant: str) -> None:
    mesh, overrides = VARIANTS[variant]
    num_ranks, num_data_ranks = 4, 4 // mesh.get("tp", 1)
    (expected,) = ranks(1).run(train, num_data_ranks, overrides)
    found = merge_ranks(ranks(num_ranks).run(train, 1, {**overrides, "mesh": mesh}))
    check_parity(found, expected)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (1, {}),
    "ep 2": (2, {"mesh": {"ep": 2}, "zero": {"stage": 2}}),
    "ep 4": (4, {"mesh": {"ep": 4}, "zero": {"stage": 1}}),
    "ep 2, stage 3": (4, {"mesh": {"ep": 2}, "zero": {"stage": 3}}),
    "tp 2, ep 4": (4, {"mesh": {"tp": 2, "ep": 4}, "zero": {"stage": 3}}),
    "pp 2": (2, {"mesh": {"pp": 2}}),
}


def save(rank: int, world_size: int, root: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    case = mixture(**WIDE)
    with initialize(case.build(torch.float32, seed=0), make_config(1, overrides)) as engine:
        engine.train_step(batches_of(engine, case, 0, 1))
        engine.save(root)
        return states_of(engine)


def load(rank: int, world_size: int, root: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    case = mixture(**WIDE)
    with initialize(case.build(torch.float32, seed=1), make_config(1, overrides)) as engine:
        engine.load(root)
        return states_of(engine)


def states_of(engine: Any) -> dict[str, Any]:
    names = engine.layout.trained_names
    return {f"{name} {key}": engine.read(name, key) for name in names for key in ("param", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("target", sorted(LAYOUTS))
@pytest.mark.parametrize("source", ["ep 2, stage 3", "ep 4", "whole"])
def test_any_layout_loads_divided_experts_bit_for_bit(
    ranks: WorkerPool, tmp_path: Path, source: str, target: str
) -> None:
    check_loads(ranks, tmp_path, source, target, {})


def pass_on(rank: int, world_size: int, root: Path, out: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    case = mixture(**WIDE)
    with initialize(case.build(torch.float32, seed=1), make_config(1, overrides)) as engine:
        engine.load(root)
        engine.save(out)
        return states_of(engine)


CHAINS = {
    "ep 4, one rank, ep 2": ("ep 4", "whole", "ep 2"),
    "stage 3 with ep 2, pp 2 without, ep 4": ("ep 2, stage 3", "pp 2", "ep 4"),
}


# `test_dropin_experts.py` goes from experts on many ranks to one, too.
@pytest.mark.parametrize(
    "chain", [pytest.param(each, marks=() if "pp" in each else pytest.mark.full) for each in CHAINS]
)
def test_resumes_in_turn_keep_every_bit(ranks: WorkerPool, tmp_path: Path, chain: str) -> None:
    first, *others = CHAINS[chain]
    sections: dict[str, Any] = {"precision": {"param": "fp32"}}
    num_ranks, overrides = LAYOUTS[first]
    saved = ranks(num_ranks).run(save, tmp_path / "0", {**overrides, **sections})[0]
    for number, name in enumerate(others):
        num_ranks, overrides = LAYOUTS[name]
        folders = tmp_path / str(number), tmp_path / str(number + 1)
        for found in ranks(num_ranks).run(pass_on, *folders, {**overrides, **sections}):
            assert found.keys() == saved.keys()
            assert all(found[key].equal(saved[key]) for key in saved)


@pytest.mark.parametrize("target", ["ep 2, stage 3", "whole"])
def test_codes_of_divided_experts_are_those_of_any_layout(ranks: WorkerPool, tmp_path: Path, target: str) -> None:
    """What is decoded and encoded again has the same bits where blocks begin at the same elements."""
    check_loads(ranks, tmp_path, "ep 4", target, {"precision": {"param": "fp32", "states": "int8"}})


def check_loads(ranks: WorkerPool, root: Path, source: str, target: str, sections: dict[str, Any]) -> None:
    sections = {"precision": {"param": "fp32"}, **sections}
    num_ranks, overrides = LAYOUTS[source]
    saved = ranks(num_ranks).run(save, root, {**overrides, **sections})[0]
    num_ranks, overrides = LAYOUTS[target]
    for found in ranks(num_ranks).run(load, root, {**overrides, **sections}):
        assert found.keys() == saved.keys()
        assert all(found[key].equal(saved[key]) for key in saved)
