"""Hybrid sharding equals one plain process, in float64, however backwards and steps fall."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.combinations import cover
from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.training import make_config, merge_ranks, own_gradients, reference_trace, train_engine
from shardwise import initialize

NUM_STEPS = 2
CASE = "transformer"


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "options",
    cover(
        {
            "stage": [0, 1, 2, 3],
            "mesh": [(2, 2), (2, 1), (3, 1), (2, 3)],
            "accumulation": [1, 3],
            "lockstep": [False, True],
            "overlap": [True, False],
        }
    ),
)
def test_hybrid_sharding_equals_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    num_replicas, num_shards = options["mesh"]
    zero = {"stage": options["stage"], "lockstep": options["lockstep"], "overlap": options["overlap"]}
    overrides = {"zero": zero, "mesh": {"dp_shard": num_shards}, "optimizer": {"clip_norm": 0.05}}
    world_size = num_replicas * num_shards
    traces = ranks(world_size).run(train_engine, CASE, options["accumulation"], NUM_STEPS, overrides)
    actual = merge_ranks(traces, num_holders=1 if options["stage"] == 0 else num_shards)
    check_parity(actual, reference_trace(CASE, world_size, options["accumulation"], NUM_STEPS, 0.05))


def train_untidily(rank: int, world_size: int, stage: int, way: str) -> Trace:
    """Three backwards a step, where the config says four, or two; or the last one, or all, without reduction."""
    case = CASES[CASE]
    num_announced = {"early": 4, "late": 2, "no_sync first": 3, "no_sync": 3}[way]
    config = make_config(num_announced, {"zero": {"stage": stage}, "mesh": {"dp_shard": 2}})
    batches = make_batches(case, num_steps=NUM_STEPS, world_size=world_size, num_micro_batches=3)
    model = case.build(torch.float64)
    engine = initialize(model, config, loss_fn=case.loss)
    losses, norms, gradients = [], [], {}
    for step in batches:
        for number, batch in enumerate(step[rank]):
            if way == "no_sync" or (way == "no_sync first" and number < 2):
                with engine.no_sync():
                    engine.backward(engine(batch))
            else:
                engine.backward(engine(batch))
        gradients = own_gradients(engine)
        result = engine.step(partial=way == "early")
        losses.append(result.loss)
        norms.append(result.grad_norm)
    scale = engine.parts.losses.normaliser / result.count
    with engine.gathered():
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.close()
    return Trace(losses, norms, {name: gradient * scale for name, gradient in gradients.items()}, parameters)


@pytest.mark.parametrize("way", ["early", "late", "no_sync first", "no_sync"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_may_come_at_any_time(ranks: WorkerPool, stage: int, way: str) -> None:
    actual = merge_ranks(ranks(4).run(train_untidily, stage, way), num_holders=1 if stage == 0 else 2)
    check_parity(actual, reference_trace(CASE, 4, 3, NUM_STEPS, None))
