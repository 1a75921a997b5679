"""Ranks that run different blocks: with `zero.lockstep` they train as one process does, or the error is clear."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.combinations import cover
from harness.models import ModelCase, ResidualBlock
from harness.pool import RankError, WorkerPool
from harness.reference import Trace, check_parity, train_reference
from harness.training import make_config, make_optimizer, merge_ranks, own_gradients, reference_trace, train_engine
from shardwise import backward, initialize

NUM_STEPS = 3
NUM_BLOCKS = 5
WIDTH = 6


class Skipping(nn.Module):
    """Runs block i only where the i-th flag of the batch is set; backwards where `in_reverse`.

    Where it `peeks`, the last block's bias is used before all blocks, if the first block runs.
    """

    def __init__(self, in_reverse: bool = False, peeks: bool = False) -> None:
        super().__init__()
        self.peeks = peeks
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(NUM_BLOCKS))
        self._order = range(NUM_BLOCKS)[:: -1 if in_reverse else 1]

    def forward(self, x: Tensor, flags: list[bool]) -> Tensor:
        x = self.stem(x)
        if self.peeks and flags[0]:
            x = x + self.blocks[-1].second.bias
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


def full_batch(step: int, rank: int, micro: int) -> dict[str, Any]:
    """All ranks run everything."""
    return batch(step, rank, 2)


CASE = ModelCase("skipping", Skipping, batch, None)
PEEKING = ModelCase("peeking", partial(Skipping, peeks=True), batch, None)
REVERSED = ModelCase("reversed", partial(Skipping, in_reverse=True), full_batch, None)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), output.numel()


def train(rank: int, world_size: int, num_micro_batches: int, overrides: Any, case: ModelCase = CASE) -> Trace:
    model = case.build(torch.float64, seed=rank)
    engine = initialize(model, make_config(num_micro_batches, overrides), loss_fn=loss)
    losses, norms, gradients = [], [], {}
    for step in range(NUM_STEPS):
        for micro in range(num_micro_batches):
            engine.backward(engine(case.batch(step, rank, micro)))
        engine.eval_step([case.batch(step, rank, 0)])
        gradients = own_gradients(engine)
        result = engine.step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
    scale = engine.parts.losses.normaliser / result.count
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
            "lockstep": [True, "auto"],
        }
    ),
)
def test_ranks_may_skip_different_blocks(ranks: WorkerPool, options: dict[str, Any]) -> None:
    num_ranks, accumulation = options["num_ranks"], options["accumulation"]
    overrides = {
        "zero": {"stage": options["stage"], "lockstep": options["lockstep"], "overlap": options["overlap"]},
        "recompute": {"mode": options["recompute"]},
        "run": {"timeout_s": 60.0},
    }
    check(ranks, num_ranks, accumulation, overrides)


def check(ranks: WorkerPool, num_ranks: int, accumulation: int, overrides: Any, case: ModelCase = CASE) -> None:
    actual = merge_ranks(ranks(num_ranks).run(train, accumulation, overrides, case))
    batches = [
        [case.batch(step, rank, micro) for rank in range(num_ranks) for micro in range(accumulation)]
        for step in range(NUM_STEPS)
    ]
    expected = train_reference(case.build(torch.float64), batches, loss, make_optimizer)
    check_parity(actual, expected)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_that_come_late_on_one_rank_count(ranks: WorkerPool, accumulation: int) -> None:
    """The bias is used before its block: its gradient comes after the block's have been reduced."""
    check(ranks, 2, accumulation, {"zero": {"stage": 2, "lockstep": True}}, PEEKING)


def train_in_reverse(rank: int, world_size: int) -> None:
    config = make_config(1, {"zero": {"stage": 3, "lockstep": True}, "run": {"timeout_s": 60.0}})
    engine = initialize(Skipping(in_reverse=True).double(), config, loss_fn=loss)
    engine.train_step([batch(0, 0, 2)])


def test_blocks_out_of_order_are_refused(ranks: WorkerPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(train_in_reverse)
    assert caught.value.code == "block-order"
    assert all(value in str(caught.value) for value in ("blocks.3", "blocks.4", "zero.lockstep=false"))


AUTO = {"zero": {"stage": 3, "lockstep": "auto"}, "run": {"timeout_s": 60.0}}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_auto_follows_a_model_that_leaves_module_order(ranks: WorkerPool, accumulation: int) -> None:
    check(ranks, 2, accumulation, AUTO, REVERSED)
    actual = merge_ranks(ranks(2).run(train_engine, "reused-blocks", accumulation, NUM_STEPS, AUTO))
    check_parity(actual, reference_trace("reused-blocks", 2, accumulation, NUM_STEPS, None))


def train_beside_calls(rank: int, world_size: int, calls: bool) -> list[float]:
    """Between steps, all ranks call a block by itself where `calls`."""
    model, losses = CASE.build(torch.float64), []
    with initialize(model, make_config(1, AUTO), loss_fn=loss) as engine:
        for step in range(NUM_STEPS):
            losses.append(engine.train_step([batch(step, rank, 0)]).loss)
            if calls:
                with torch.no_grad():
                    model.blocks[1](torch.ones(1, WIDTH, dtype=torch.float64))
    return losses


def test_a_block_called_by_itself_leaves_auto_in_lockstep(ranks: WorkerPool) -> None:
    """Each rank runs other blocks in each step: without lockstep they would not meet."""
    assert ranks(2).run(train_beside_calls, True) == ranks(2).run(train_beside_calls, False)


def train_on_two_forwards(rank: int, world_size: int, lockstep: Any) -> tuple[list[float], int]:
    """Losses, and how often gradients were reduced; groups are stepped in the backward, once they are reduced."""
    overrides = {**AUTO, "zero": {"stage": 3, "lockstep": lockstep}, "tiers": {"optimizer": "host"}}
    with initialize(CASE.build(torch.float64), make_config(1, overrides), loss_fn=loss) as engine:
        losses = []
        for step in range(NUM_STEPS):
            first, second = (full_batch(step, rank, micro) for micro in range(2))
            backward(loss(engine.model(**first), first)[0] + loss(engine.model(**second), second)[0], [engine])
            losses.append(engine.step().loss)
        counts = engine.comm.comm_log.counts
        return losses, sum(count.num_calls for (_, op), count in counts.items() if op == "reduce_scatter")


def test_auto_follows_a_backward_through_two_forwards(ranks: WorkerPool) -> None:
    assert ranks(2).run(train_on_two_forwards, "auto") == ranks(2).run(train_on_two_forwards, False)
