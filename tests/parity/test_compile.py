"""Compiled blocks on two ranks equal one plain process in float64, without a graph break or a late compilation.

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

pytestmark = pytest.mark.begin

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


def make_steps(options: dict[str, Any], num_ranks: int) -> list[list[list[Any]]]:
    lengths, num_micro_batches = options["step_lengths"], options["accumulation"]
    case = CASES[options["case"]]
    batches = make_batches(case, num_steps=len(lengths), world_size=num_ranks, num_micro_batches=num_micro_batches)
    return [
        [[crop(batch, seq_len) for batch in rank] for rank in step]
        for step, seq_len in zip(batches, lengths, strict=True)
    ]


def train_compiled(rank: int, world_size: int, options: dict[str, Any]) -> Compiled:
    torch._dynamo.reset()
    counters.clear()
    overrides = {
        "zero": {"stage": options["stage"]},
        "recompute": {"mode": options["recompute"], "every": options["every"]},
        "compile": {"enabled": True, "backend": options["backend"]},
    }
    case = CASES[options["case"]]
    model = case.build(torch.float64, seed=rank)
    losses, norms, num_graphs = [], [], []
    with initialize(model, make_config(options["accumulation"], overrides), loss_fn=case.loss) as engine:
        for step, eval_length in zip(make_steps(options, world_size), options["eval_lengths"], strict=True):
            result = engine.train_step(step[rank])
            losses.append(result.loss)
            norms.append(result.grad_norm)
            after_step = counters["stats"]["unique_graphs"]
            engine.eval_step([crop(case.batch(7, 2, torch.float64), eval_length)])
            num_graphs.append((after_step, counters["stats"]["unique_graphs"]))
    num_breaks = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Compiled(Trace(losses, norms, {}, parameters), num_graphs, num_breaks)


def check(ranks: WorkerPool, options: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """Hold the ranks' training against one process's; return the numbers of graphs, by rank."""
    defaults = {"case": "odd-shapes", "backend": "aot_eager", "every": 1}
    options = {**defaults, "step_lengths": STEP_LENGTHS, "eval_lengths": EVAL_LENGTHS, **options}
    case, steps = CASES[options["case"]], make_steps(options, 2)
    reference = train_reference(case.build(torch.float64), every_rank(steps), case.loss, make_optimizer)
    expected = Trace(reference.losses, reference.grad_norms, {}, reference.parameters)
    results = ranks(2).run(train_compiled, options)
    for result in results:
        check_parity(result.trace, expected)
        assert result.num_breaks == 0
    return [result.num_graphs for result in results]


def is_quick(options: dict[str, Any]) -> bool:
    """Stages 0, 1 and 2 gather no parameters, so they compile the same: one of them shows each recomputation."""
    return options["stage"] in (0, 3) or (options["recompute"], options["accumulation"]) == ("none", 1)


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", cover(FACTORS, quick=is_quick))
def test_compiled_blocks_equal_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    for num_graphs in check(ranks, options):
        # Training, evaluation, and each once more for all lengths but the first, however many blocks there are.
        assert num_graphs == [(1, 2), (2, 3), (4, 4), (4, 4), (4, 4)]


@pytest.mark.full
def test_blocks_of_which_every_second_is_recomputed(ranks: WorkerPool) -> None:
    for num_graphs in check(ranks, {"stage": 3, "recompute": "full", "every": 2, "accumulation": 1}):
        assert num_graphs == [(2, 4), (4, 6), (8, 8), (8, 8), (8, 8)]


@pytest.mark.full
def test_compiled_attention_equals_one_process(ranks: WorkerPool) -> None:
    for num_graphs in check(ranks, {"case": "transformer", "stage": 3, "recompute": "selective", "accumulation": 2}):
        assert num_graphs[2:] == [(4, 4), (4, 4), (4, 4)]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
@pytest.mark.parametrize("recompute", ["selective", pytest.param("none", marks=pytest.mark.full)])
def test_inductor_equals_one_process(ranks: WorkerPool, recompute: str) -> None:
    options = {"case": "transformer", "backend": "inductor", "stage": 3, "recompute": recompute, "accumulation": 2}
    for num_graphs in check(ranks, {**options, "step_lengths": [SEQ_LEN] * 3, "eval_lengths": [SEQ_LEN] * 3}):
        assert num_graphs == [(1, 2), (2, 2), (2, 2)]
