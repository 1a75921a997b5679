"""Compiled blocks on two ranks equal one process in float64, without a graph break, and compile no more once warm.

Dynamo's own counters are read here, and only here.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from harness.combinations import cover
from harness.models import CASES, SEQ_LEN, every_rank, make_batches
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity, train_reference
from harness.training import make_config, make_optimizer
from shardwise import initialize

CASE = CASES["transformer"]
STEP_LENGTHS = (SEQ_LEN, SEQ_LEN, 7, SEQ_LEN, 5)
EVAL_LENGTHS = (SEQ_LEN, 7, 5, 7, SEQ_LEN)

FACTORS = {"stage": [0, 1, 2, 3], "recompute": ["none", "full", "selective"], "accumulation": [1, 2]}


@dataclass(frozen=True)
class Compiled:
    """What a rank saw: its training, the number of graphs after each step and the evaluation that follows it."""

    trace: Trace
    num_graphs: list[tuple[int, int]]
    num_breaks: int


def crop(batch: dict[str, Tensor], seq_len: int) -> dict[str, Tensor]:
    return {name: tensor[:, :seq_len].contiguous() for name, tensor in batch.items()}


def make_steps(num_ranks: int, num_micro_batches: int) -> list[list[list[Any]]]:
    batches = make_batches(CASE, num_steps=len(STEP_LENGTHS), world_size=num_ranks, num_micro_batches=num_micro_batches)
    return [
        [[crop(batch, seq_len) for batch in rank] for rank in step]
        for step, seq_len in zip(batches, STEP_LENGTHS, strict=True)
    ]


def train_compiled(rank: int, world_size: int, options: dict[str, Any]) -> Compiled:
    torch._dynamo.reset()
    counters.clear()
    overrides = {
        "zero": {"stage": options["stage"]},
        "recompute": {"mode": options["recompute"], "every": options.get("every", 1)},
        "compile": {"enabled": True, "backend": options.get("backend", "aot_eager")},
    }
    model = CASE.build(torch.float64, seed=rank)
    losses, norms, num_graphs = [], [], []
    with initialize(model, make_config(options["accumulation"], overrides), loss_fn=CASE.loss) as engine:
        for step, eval_length in zip(make_steps(world_size, options["accumulation"]), EVAL_LENGTHS, strict=True):
            result = engine.train_step(step[rank])
            losses.append(result.loss)
            norms.append(result.grad_norm)
            after_step = counters["stats"]["unique_graphs"]
            engine.eval_step([crop(CASE.batch(7, 2, torch.float64), eval_length)])
            num_graphs.append((after_step, counters["stats"]["unique_graphs"]))
    num_breaks = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Compiled(Trace(losses, norms, {}, parameters), num_graphs, num_breaks)


def check(ranks: WorkerPool, options: dict[str, Any], num_kinds: int = 1) -> None:
    steps = make_steps(2, options["accumulation"])
    reference = train_reference(CASE.build(torch.float64), every_rank(steps), CASE.loss, make_optimizer)
    expected = Trace(reference.losses, reference.grad_norms, {}, reference.parameters)
    for result in ranks(2).run(train_compiled, options):
        check_parity(result.trace, expected)
        assert result.num_breaks == 0
        # Training, evaluation, and each once more for all other lengths: three graphs or four, however many blocks.
        assert result.num_graphs[0] == (num_kinds, 2 * num_kinds)
        assert result.num_graphs[1][0] == 2 * num_kinds
        assert result.num_graphs[2] == result.num_graphs[-1] == (4 * num_kinds, 4 * num_kinds)


@pytest.mark.parametrize("options", cover(FACTORS))
def test_compiled_blocks_equal_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    check(ranks, options)


def test_blocks_of_which_every_second_is_recomputed(ranks: WorkerPool) -> None:
    check(ranks, {"stage": 3, "recompute": "full", "every": 2, "accumulation": 1}, num_kinds=2)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
def test_inductor_equals_one_process(ranks: WorkerPool) -> None:
    check(ranks, {"stage": 3, "recompute": "selective", "accumulation": 2, "backend": "inductor"})
