"""Every stage, accumulation, clipping and recomputation on 1 to 4 ranks equals one plain process, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from harness.combinations import cover
from harness.models import CASES
from harness.pool import WorkerPool
from harness.reference import check_parity
from harness.training import merge_ranks, reference_trace, train_engine

NUM_STEPS = 3

FACTORS = {
    "stage": [0, 1, 2, 3],
    "num_ranks": [1, 2, 3, 4],
    "accumulation": [1, 4],
    "clip_norm": [None, 0.05],
    "recompute": ["none", "full", "selective"],
}


def check(ranks: WorkerPool, case_name: str, options: dict[str, Any]) -> None:
    num_ranks, stage = options["num_ranks"], options["stage"]
    overrides = {
        "zero": {"stage": stage, "overlap": options.get("overlap", True)},
        "optimizer": {"clip_norm": options["clip_norm"]},
        "recompute": {"mode": options["recompute"], "every": options.get("every", 1)},
    }
    traces = ranks(num_ranks).run(train_engine, case_name, options["accumulation"], NUM_STEPS, overrides)
    actual = merge_ranks(traces, num_holders=1 if stage == 0 else None)
    expected = reference_trace(case_name, num_ranks, options["accumulation"], NUM_STEPS, options["clip_norm"])
    check_parity(actual, expected)


@pytest.mark.quick(5)
@pytest.mark.parametrize("options", cover(FACTORS))
def test_stage_equals_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    check(ranks, "transformer", options)


MODEL_FACTORS = {
    "case": sorted(set(CASES) - {"transformer"}),
    "stage": [0, 1, 2, 3],
    "num_ranks": [2, 3],
    "accumulation": [1, 2],
    "clip_norm": [0.05],
    "recompute": ["none", "full"],
}


def is_quick(options: dict[str, Any]) -> bool:
    """Stages 0 and 1 keep a block's parameters and gradients whole: three models show what is odd for them."""
    return options["stage"] >= 2 or options["case"] in ("odd-shapes", "unused-parameters", "frozen-parameters")


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", cover(MODEL_FACTORS, quick=is_quick))
def test_odd_models_equal_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    check(ranks, options["case"], options)


def test_replicated_frozen_parameters_equal_one_process(ranks: WorkerPool) -> None:
    overrides = {"zero": {"stage": 3, "replicate_frozen": True}}
    traces = ranks(2).run(train_engine, "frozen-parameters", 2, NUM_STEPS, overrides)
    check_parity(merge_ranks(traces), reference_trace("frozen-parameters", 2, 2, NUM_STEPS, None))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_recompute_of_every_second_block(ranks: WorkerPool, stage: int) -> None:
    check(
        ranks,
        "transformer",
        {"stage": stage, "num_ranks": 2, "accumulation": 1, "clip_norm": None, "recompute": "full", "every": 2},
    )
