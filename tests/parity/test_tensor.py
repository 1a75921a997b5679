"""Every model under tensor and sequence parallelism, with ZeRO and recomputation, equals one plain process, in float64.

Dropout is on: keyed draws make the masks of every layout those of one process.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.combinations import cover
from harness.pool import WorkerPool
from harness.reference import Trace, call_model, check_parity
from harness.tensor import MICRO_SIZE, MODELS, make_case, step_batches, train_split, train_whole
from harness.training import make_config, merge_ranks
from shardwise import initialize
from shardwise.dropout import KeyedDraws, key_dropouts
from shardwise.runtime.float64 import float64_throughout

pytest.importorskip("transformers")

FACTORS = {
    "model": MODELS,
    "tp": [2, 4],
    "sequence_parallel": [False, True],
    "stage": [0, 1, 2, 3],
    "recompute": ["none", "full", "selective"],
    "num_data_ranks": [1, 2],
}


def fits(options: dict[str, Any]) -> bool:
    """Four ranks are enough for both axes to have two, and for tp to exceed the KV heads."""
    return options["tp"] * options["num_data_ranks"] <= 4


@functools.cache
def reference(model: str, num_data_ranks: int) -> Trace:
    return train_whole(model, num_data_ranks)


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", cover(FACTORS, fits))
def test_a_split_model_equals_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    overrides = {
        "mesh": {"tp": options["tp"]},
        "tensor": {"sequence_parallel": options["sequence_parallel"]},
        "zero": {"stage": options["stage"]},
        "recompute": {"mode": options["recompute"]},
    }
    num_ranks = options["tp"] * options["num_data_ranks"]
    traces = ranks(num_ranks).run(train_split, options["model"], overrides)
    check_parity(merge_ranks(traces), reference(options["model"], options["num_data_ranks"]))


@pytest.mark.parametrize("model", MODELS)
def test_masks_follow_the_number_of_the_sample(model: str) -> None:
    """What the parity stands on: all that can drop does, and by the sample's number."""
    losses = [loss_of(model, first) for first in (0, 0, 8)]
    assert losses[0] == losses[1]
    assert (losses[0] == losses[2]) == (model == "decoder")  # which has no dropout


def loss_of(model: str, first: int) -> float:
    """Of one batch whose samples have the numbers from `first` on."""
    case = make_case(model)
    module, batch = case.build(torch.float64), step_batches(case, 0, 1)[0]
    draws = KeyedDraws(0)
    key_dropouts(module, draws)
    with float64_throughout(), draws.at(step=0, micro_batch=0, first_sample=first, num_samples=MICRO_SIZE):
        output = call_model(module, batch, case.loss)
    return (case.loss(output, batch)[0] if case.loss else output["loss"]).item()


def sample(rank: int, world_size: int) -> float:
    """A loss without gradients, in training mode."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.5))
    plan = {"0": "column", "1": "dropout dim=-1", "2": "row"}
    config = make_config(1, {"mesh": {"tp": world_size}})
    with initialize(model, config, plan=plan, loss_fn=lambda y, _: y.square().mean()) as engine, torch.no_grad():
        return float(engine(torch.ones(4, 8)))


def test_ranks_drop_the_same_without_gradients(ranks: WorkerPool) -> None:
    one, other = ranks(2).run(sample)
    assert one == other


class Loose(nn.Module):
    """A block whose column layers are in no region: each gathers the sequence by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.LayerNorm(8), *(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # [b, s, features]
        x_norm = self.norm(x)
        return x + self.down(self.gate(x_norm).sigmoid() * self.up(x_norm))


def train_loose(rank: int, world_size: int) -> list[Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(Loose(), Loose(), nn.LayerNorm(8)).double()
    plan = {"*.gate": "column", "*.up": "column", "*.down": "row", "?": "stack x"}
    batch = torch.linspace(-1, 1, 2 * 4 * 8, dtype=torch.float64).sin().view(2, 4, 8)
    sections = {"mesh": {"tp": world_size}, "tensor": {"sequence_parallel": world_size > 1}}
    with initialize(model, make_config(1, sections), plan=plan, loss_fn=lambda y, _: y.exp().mean()) as engine:
        engine.backward(engine(batch))
        return [engine.read(name, "grad") for name, _ in model.named_parameters()]


def test_columns_outside_of_regions_gather_the_sequence(ranks: WorkerPool) -> None:
    expected = ranks(1).run(train_loose)[0]
    for found in ranks(2).run(train_loose):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
