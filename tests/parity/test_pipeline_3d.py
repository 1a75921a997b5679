"""Pipeline, data and tensor parallelism together equal one plain process, in float64.

Meshes are named by their sizes: pp, dp_replicate, dp_shard, tp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest

from harness.combinations import Combination, combination_id, cover
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.tensor import CLIP_NORM, train_split, train_whole
from harness.training import merge_ranks
from shardwise.schedule import RECIPES

NUM_STEPS = 2
MESHES = {
    "2x1x2x1": {"pp": 2, "dp_shard": 2},
    "2x2x2x1": {"pp": 2, "dp_replicate": 2, "dp_shard": 2},
    "2x1x2x2": {"pp": 2, "dp_shard": 2, "tp": 2},
    "2x1x1x2": {"pp": 2, "tp": 2},
}

FACTORS = {
    "stage": [0, 1, 2, 3],
    "model": ["shallow", "shallow-tied"],
    "accumulation": [1, 4],
    "clip_norm": [None, CLIP_NORM],
}


@functools.cache
def reference(model: str, num_data_ranks: int, num_micro_batches: int, clip_norm: float | None) -> Trace:
    return train_whole(model, num_data_ranks, num_micro_batches, NUM_STEPS, clip_norm)


def pipeline_of(schedule: str) -> dict[str, Any]:
    return {"schedule": schedule, "virtual_stages": RECIPES[schedule].min_virtual_stages}


def check(ranks: WorkerPool, mesh_name: str, options: Combination, **sections: Any) -> None:
    mesh = MESHES[mesh_name]
    num_ranks = math.prod(mesh.values())
    clip_norm = options.get("clip_norm", CLIP_NORM)
    overrides = {
        "mesh": mesh,
        "zero": {"stage": options["stage"]},
        "optimizer": {"clip_norm": clip_norm},
        "pipeline": pipeline_of(options.get("schedule", "1f1b")),
        "tensor": {"sequence_parallel": options.get("sequence_parallel", False)},
        **sections,
    }
    model, num_micro_batches = options["model"], options["accumulation"]
    traces = ranks(num_ranks).run(train_split, model, overrides, num_micro_batches, NUM_STEPS)
    num_data_ranks = num_ranks // mesh["pp"] // mesh.get("tp", 1)
    check_parity(merge_ranks(traces), reference(model, num_data_ranks, num_micro_batches, clip_norm))


@pytest.mark.parametrize("options", cover({**FACTORS, "schedule": ["1f1b", "interleaved", "zb-v"]}))
def test_stages_that_shard_equal_one_process(ranks: WorkerPool, options: Combination) -> None:
    check(ranks, "2x1x2x1", options)


@pytest.mark.parametrize("schedule", RECIPES)
def test_stages_that_gather_for_each_micro_batch_equal_one_process(ranks: WorkerPool, schedule: str) -> None:
    model = "shallow" if schedule in ("gpipe", "zb-h1") else "shallow-tied"
    options = {"stage": 3, "model": model, "accumulation": 3}
    check(ranks, "2x1x2x1", options, pipeline=pipeline_of(schedule) | {"gather": "micro-batch"})


def rows(*values: tuple[int, str, int, bool], full: Sequence[tuple[int, str, int, bool]] = ()) -> Any:
    names = ("stage", "model", "accumulation", "sequence_parallel")
    options = [dict(zip(names, row, strict=True)) for row in (*values, *full)]
    marks = [()] * len(values) + [pytest.mark.full] * len(full)
    params = [pytest.param(each, marks=mark) for each, mark in zip(options, marks, strict=True)]
    return pytest.mark.parametrize("options", params, ids=combination_id)


@rows((1, "shallow", 2, False), (2, "shallow-tied", 1, False), (3, "shallow-tied", 2, False))
def test_replicas_of_shards_of_stages_equal_one_process(ranks: WorkerPool, options: Combination) -> None:
    check(ranks, "2x2x2x1", options)


@rows(
    (3, "shallow-tied", 1, True), full=[(0, "shallow", 3, True), (2, "shallow-tied", 4, True), (3, "shallow", 4, False)]
)
def test_split_stages_equal_one_process(ranks: WorkerPool, options: Combination) -> None:
    check(ranks, "2x1x1x2", options)


@rows(
    (0, "shallow", 1, False), full=[(1, "shallow-tied", 4, True), (2, "shallow", 2, True), (3, "shallow-tied", 2, True)]
)
def test_three_dimensions_equal_one_process(ranks: WorkerPool, options: Combination) -> None:
    check(ranks, "2x1x2x2", options)
