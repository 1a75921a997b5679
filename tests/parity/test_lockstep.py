"""Ranks that run different blocks: with `zero.lockstep` they train as one process does, or the error is clear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.combinations import cover
from harness.models import ModelCase, ResidualBlock
from harness.pool import RankError, WorkerPool
from harness.reference import Trace, check_parity, train_reference
from harness.training import make_config, make_optimizer, merge_ranks, own_gradients
from shardwise import initialize

NUM_STEPS = 3
NUM_BLOCKS = 5
WIDTH = 6


class Skipping(nn.Module):
    """Runs block i only where the i-th flag of the batch is set; backwards where `in_reverse`."""

    def __init__(self, in_reverse: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(NUM_BLOCKS))
        self._order = range(NUM_BLOCKS)[:: -1 if in_reverse else 1]

    def forward(self, x: Tensor, flags: list[bool]) -> Tensor:
        x = self.stem(x)
        for index in self._order:
            if flags[index]:
                x = self.blocks[index](x)
        return x  # [B, WIDTH]


def batch(step: int, rank: int, micro: int) -> dict[str, Any]:
    """Rank 0 skips what rank 1 runs, rank 2 skips all; the third micro-batch runs everything."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    x = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
    flags = [[(index + rank + step) % 2 == 0 and rank != 2 for index in range(NUM_BLOCKS)], [True] * NUM_BLOCKS]
    return {"x": x, "flags": flags[micro == 2]}


CASE = ModelCase("skipping", Skipping, batch, None)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), output.numel()


def train(rank: int, world_size: int, num_micro_batches: int, overrides: Any) -> Trace:
    model = CASE.build(torch.float64, seed=rank)
    engine = initialize(model, make_config(num_micro_batches, overrides), loss_fn=loss)
    losses, norms, gradients = [], [], {}
    for step in range(NUM_STEPS):
        for micro in range(num_micro_batches):
            engine.backward(engine(batch(step, rank, micro)))
        engine.eval_step([batch(step, rank, 0)])
        gradients = own_gradients(engine)
        result = engine.step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
    scale = engine.step_context.losses.normaliser / result.count
    with engine.gathered():
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.close()
    return Trace(losses, norms, {name: gradient * scale for name, gradient in gradients.items()}, parameters)


@pytest.mark.parametrize(
    "options",
    cover(
        {
            "stage": [1, 2, 3],
            "num_ranks": [2, 3],
            "accumulation": [1, 3],
            "recompute": ["none", "full"],
            "overlap": [True, False],
        }
    ),
)
def test_ranks_may_skip_different_blocks(ranks: WorkerPool, options: dict[str, Any]) -> None:
    num_ranks, accumulation = options["num_ranks"], options["accumulation"]
    overrides = {
        "zero": {"stage": options["stage"], "lockstep": True, "overlap": options["overlap"]},
        "recompute": {"mode": options["recompute"]},
        "run": {"timeout_s": 60.0},
    }
    actual = merge_ranks(ranks(num_ranks).run(train, accumulation, overrides))
    batches = [
        [batch(step, rank, micro) for rank in range(num_ranks) for micro in range(accumulation)]
        for step in range(NUM_STEPS)
    ]
    expected = train_reference(CASE.build(torch.float64), batches, loss, make_optimizer)
    check_parity(actual, expected)


def train_in_reverse(rank: int, world_size: int) -> None:
    config = make_config(1, {"zero": {"stage": 3, "lockstep": True}, "run": {"timeout_s": 60.0}})
    engine = initialize(Skipping(in_reverse=True).double(), config, loss_fn=loss)
    engine.train_step([batch(0, 0, 2)])


def test_blocks_out_of_order_are_refused(ranks: WorkerPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(train_in_reverse)
    assert caught.value.code == "block-order"
    assert all(value in str(caught.value) for value in ("blocks.3", "blocks.4", "zero.lockstep=false"))
