"""Our decoder with experts, and lists of feed-forwards that are stacked, equal one plain process, in float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from harness.combinations import combination_id, pairwise
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.tensor import CLIP_NORM, expert_decoder, train_on_mesh, train_plainly
from harness.training import merge_ranks

NUM_STEPS = 3
FACTORS = {
    "num_ranks": [2, 4],
    "ep": [1, 2, 4],
    "stage": [0, 1, 2, 3],
    "tp": [1, 2],
    "cp": [1, 2],
    "pp": [1, 2],
    "sequence_parallel": [False, True],
    "accumulation": [1, 2],
    "recompute": ["none", "full", "selective"],
    "num_shared_experts": [0, 2],
    "router_bias": [False, True],
}
MODEL_KEYS = ("num_shared_experts", "router_bias")


def fits(options: dict[str, Any]) -> bool:
    num_ranks = options["num_ranks"] // options["pp"]
    is_legal = options["tp"] * options["cp"] <= num_ranks and num_ranks % options["ep"] == 0
    return is_legal and (options["tp"] > 1 or not options["sequence_parallel"])


def train(rank: int, world_size: int, options: dict[str, Any], num_micro_batches: int, overrides: Any) -> Trace:
    case = expert_decoder(**options)
    return train_on_mesh(rank, case, overrides, case.loss, num_micro_batches, NUM_STEPS)


@functools.cache
def reference(options: tuple[tuple[str, Any], ...], num_data_ranks: int, num_micro_batches: int) -> Trace:
    return train_plainly(expert_decoder(**dict(options)), num_data_ranks, num_micro_batches, NUM_STEPS, CLIP_NORM)


@pytest.mark.quick(4)
@pytest.mark.parametrize("options", pairwise(FACTORS, fits), ids=combination_id)
def test_our_decoders_experts_equal_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    mesh = {axis: options[axis] for axis in ("ep", "tp", "cp", "pp")}
    overrides = {
        "mesh": mesh,
        "zero": {"stage": options["stage"]},
        "tensor": {"sequence_parallel": options["sequence_parallel"]},
        "recompute": {"mode": options["recompute"]},
        "pipeline": {"schedule": "1f1b"},
    }
    num_data_ranks = options["num_ranks"] // math.prod(mesh[axis] for axis in ("tp", "cp", "pp"))
    shape = {key: options[key] for key in MODEL_KEYS}
    traces = ranks(options["num_ranks"]).run(train, shape, options["accumulation"], overrides)
    check_parity(merge_ranks(traces), reference((*shape.items(),), num_data_ranks, options["accumulation"]))
