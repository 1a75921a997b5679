"""Recipes by which people have reported Muon to go wrong under sharding elsewhere give one process's numbers here."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor

from harness.models import CASES
from harness.pool import WorkerPool
from shardwise import init, initialize
from shardwise.layout.matrices import held_ranges
from shardwise.optim.muon import orthogonalize
from shardwise.zero import matrix_step

transformers = pytest.importorskip("transformers")

LLAMA: Final = {
    "hidden_size": 256, "intermediate_size": 344, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
Q_PROJ: Final = "model.layers.0.self_attn.q_proj.weight"


def train_llama(
    rank: int, world_size: int, num_layers: int, num_steps: int, sections: dict[str, Any], builds_sharded: bool
) -> tuple[Tensor, int]:
    """Train on one batch of all ranks; return the change of a weight, and this rank's calls of Newton-Schulz."""
    calls = []

    def counted(matrix: Tensor) -> Tensor:
        calls.append(matrix.shape)
        return orthogonalize(matrix)

    torch.manual_seed(0)
    with init() if builds_sharded else nullcontext():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=num_layers, **LLAMA))
    tokens = torch.arange(32).view(1, 32)
    optimizer = {"name": "muon", "lr": 0.05, "momentum": 0.95, "weight_decay": 0.0}
    config = {"run": {"device": "cpu"}, "optimizer": optimizer, **sections}
    with mock.patch.object(matrix_step, "orthogonalize", counted), initialize(model, config) as engine:
        before = engine.read(Q_PROJ, "master" if "precision" in sections else "param")
        for _ in range(num_steps):
            engine.train_step({"input_ids": tokens, "labels": tokens})
        after = engine.read(Q_PROJ, "master" if "precision" in sections else "param")
        assert before is not None
        assert after is not None
        return after - before, len(calls)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_update_does_not_depend_on_the_degree_of_tensor_parallelism(ranks: WorkerPool, stage: int) -> None:
    """A shard was orthogonalized, which is 39 % off (DeepSpeed, issue 8437)."""
    sections = {"zero": {"stage": stage}, "mesh": {"tp": 2}}
    (split, _), _ = ranks(2).run(train_llama, 1, 1, sections, False)
    (whole, _), *_ = ranks(1).run(train_llama, 1, 1, {"zero": {"stage": stage}}, False)
    assert (split - whole).norm() <= 1e-4 * whole.norm()


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (0, {"param": "fp32"}),
        (0, {"param": "bf16"}),
        (1, {"param": "bf16"}),
        (1, {"param": "bf16", "accumulate": "fp32", "reduce": "fp32"}),
        (2, {"param": "bf16"}),
        (3, {"param": "bf16"}),
    ],
)
def test_matrices_are_orthogonalized_in_every_stage_and_precision(
    ranks: WorkerPool, stage: int, precision: dict[str, str]
) -> None:
    """Stage 0, and bf16 with sums in fp32, stepped as SGD (DeepSpeed, pull request 8442)."""
    sections = {"zero": {"stage": stage}, "precision": precision}
    if precision["param"] == "fp32":
        del sections["precision"]
    found = ranks(2).run(train_llama, 1, 1, sections, False)
    assert sum(num_calls for _, num_calls in found) == 7


@pytest.mark.parametrize("builds_sharded", [False, True])
def test_a_model_that_is_built_sharded_has_its_matrices(ranks: WorkerPool, builds_sharded: bool) -> None:
    """Inside `zero.Init` parameters passed for vectors, so that AdamW stepped all (DeepSpeed, pull request 8438)."""
    found = ranks(2).run(train_llama, 2, 6, {"zero": {"stage": 3}}, builds_sharded)
    assert sum(num_calls for _, num_calls in found) == 84


def step_once(rank: int, world_size: int, stage: int) -> tuple[dict[str, Tensor], set[str]]:
    """Return the masters after one step, and the matrices that lie on both sides of a border between ranks."""
    case = CASES["transformer"]
    torch.manual_seed(0)
    config = {
        "run": {"device": "cpu"}, "zero": {"stage": stage}, "optimizer": {"name": "muon", "lr": 0.05},
    }  # fmt: skip
    with initialize(case.build(torch.float64), config, loss_fn=case.loss) as engine:
        engine.train_step([case.batch(1 + rank, 2, torch.float64)])
        crossing = {
            place.name
            for group in engine.layout.groups
            if group.is_matrix
            for place in group.params
            if len(held_ranges(group, place, is_whole=False)) > 1
        }
        names = [place.name for group in engine.layout.groups for place in group.params]
        return {name: value for name in names if (value := engine.read(name)) is not None}, crossing


def test_a_matrix_across_a_border_gets_the_whole_gradient(ranks: WorkerPool) -> None:
    """It was orthogonalized before its gradient was reduced, otherwise on each rank (DeepSpeed, issue 7807)."""
    (whole, crossing), *_ = ranks(3).run(step_once, 0)
    assert crossing
    for stage in (1, 2, 3):
        for masters, _ in ranks(3).run(step_once, stage):
            for name, value in masters.items():
                torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-12)
