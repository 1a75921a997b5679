"""Every schedule over stages, with ZeRO, tensor parallelism and tied weights, equals one plain process, in float64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from harness.combinations import cover
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.refusals import refusal_of
from harness.tensor import DEEP_MODELS, make_case, train_split, train_whole
from harness.time_outs import fail_after
from harness.training import make_config, merge_ranks
from shardwise import initialize
from shardwise.schedule import RECIPES

NUM_STEPS = 2

FACTORS = {
    "schedule": sorted(RECIPES),
    "pp": [2, 4],
    "num_micro_batches": ["1", "p", "2p + 1"],
    "model": list(DEEP_MODELS),
}


@functools.cache
def reference(model: str, num_data_ranks: int, num_micro_batches: int) -> Trace:
    return train_whole(model, num_data_ranks, num_micro_batches, NUM_STEPS)


def check(ranks: WorkerPool, model: str, num_ranks: int, num_micro_batches: int, overrides: dict[str, Any]) -> None:
    mesh = overrides["mesh"]
    traces = ranks(num_ranks).run(train_split, model, overrides, num_micro_batches, NUM_STEPS)
    num_data_ranks = num_ranks // mesh["pp"] // mesh.get("tp", 1)
    check_parity(merge_ranks(traces), reference(model, num_data_ranks, num_micro_batches))


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", cover(FACTORS))
def test_a_schedule_equals_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    pp, schedule = options["pp"], options["schedule"]
    num_micro_batches = {"1": 1, "p": pp, "2p + 1": 2 * pp + 1}[options["num_micro_batches"]]
    virtual_stages = RECIPES[schedule].min_virtual_stages
    overrides = {
        "mesh": {"pp": pp},
        "pipeline": {"schedule": schedule, "virtual_stages": virtual_stages},
    }
    check(ranks, options["model"], pp, num_micro_batches, overrides)


def evaluate_odd_length(rank: int, world_size: int) -> tuple[str, str]:
    """How an evaluation refuses a sequence that does not divide, in a pipeline of sequence-parallel ranks."""
    case = make_case("decoder")
    settings = {"mesh": {"pp": 2, "tp": 2}, "tensor": {"sequence_parallel": True}, "run": {"timeout_s": 60.0}}
    engine = initialize(case.build(torch.float64), make_config(1, settings), loss_fn=case.loss)
    tokens = torch.ones(1, 7, dtype=torch.int64)
    fail_after(engine.comm.comm_log, 5.0)
    return refusal_of(lambda: engine.eval_step([(tokens, tokens)]))


def test_what_one_stage_refuses_the_others_hear(ranks: WorkerPool) -> None:
    refusals = ranks(4).run(evaluate_odd_length)
    assert [code for code, _ in refusals[:2]] == ["tp-divides-tokens"] * 2, refusals
    assert [code for code, _ in refusals[2:]] == ["collective-failed"] * 2, refusals
    assert all("sequence length 7 " in message for _, message in refusals), refusals
    assert all("has failed: ConfigError: " in message for _, message in refusals[2:]), refusals
