"""What the search may choose from against what the engine itself takes, and its bounds where they are exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, ResolvedConfig
from shardwise.layout.zero_stages import Placement
from shardwise.models.shape import ModelShape
from shardwise.planner.candidates import (
    SearchSpace,
    candidates,
    divisors,
    placements,
)
from shardwise.planner.folded_layout import FoldedLayouts
from shardwise.planner.hardware import Cluster, find_gpu
from shardwise.planner.job import BASE, PlanJob, changed, num_data_ranks, world_size
from shardwise.planner.request import base_of, written
from shardwise.schedule.formulas import least_bubble_share
from shardwise.schedule.pipelines import RECIPES
from shardwise.schedule.simulate import OpTimes, PipelineSimulator
from shardwise.train.setup import check_job

SHAPE = ModelShape(
    num_layers=4, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, ffn_size=768, vocab_size=1024, name="small"
)  # fmt: skip
PLAIN: dict[str, tuple[Any, ...]] = {
    "recompute.mode": ("none",),
    "pipeline.schedule": ("1f1b",),
    "context.transport": ("ring",),
}


def job_of(num_gpus: int, global_batch: int) -> PlanJob:
    cluster = Cluster(gpu=find_gpu("h100"), num_gpus=num_gpus, gpus_per_node=4, nic_bytes_per_s=50e9)
    return PlanJob(shape=SHAPE, seq_len=2048, global_batch=global_batch, cluster=cluster)


def is_run(job: PlanJob, config: ResolvedConfig) -> bool:
    """Whether the engine takes it."""
    try:
        check_job(written(job, config), world_size(config))
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(("num_gpus", "global_batch"), [(4, 4), (6, 12), (8, 8)])
def test_every_mesh_that_the_engine_runs_is_a_candidate(num_gpus: int, global_batch: int) -> None:
    job = job_of(num_gpus, global_batch)
    expected = set()
    for tp, cp, pp in product(divisors(num_gpus), repeat=3):
        data_ranks, left = divmod(num_gpus, tp * cp * pp)
        if left or data_ranks == 0 or global_batch % data_ranks:
            continue
        each_batch = global_batch // data_ranks
        mesh = {"mesh.pp": pp, "mesh.dp_shard": data_ranks, "mesh.cp": cp, "mesh.tp": tp}
        split = changed(BASE, {**mesh, "tensor.sequence_parallel": tp > 1})
        if is_run(job, changed(split, {"batch.accumulation": each_batch})):
            expected |= {(pp, data_ranks, cp, tp, tp > 1, size, each_batch // size) for size in divisors(each_batch)}
    found = [
        (
            each.mesh.pp,
            num_data_ranks(each),
            each.mesh.cp,
            each.mesh.tp,
            each.tensor.sequence_parallel,
            each.batch.micro_size,
            each.batch.accumulation,
        )
        for each in candidates(job, SearchSpace(pins={**PLAIN, "context.heads_over": (None,)}))
    ]
    assert len(found) == len(set(found))
    assert set(found) == expected


@pytest.mark.parametrize("key", ["precision.states=int8", "precision.gather=int8", "precision.reduce=int4"])
def test_no_candidate_cuts_the_blocks_of_codes(key: str) -> None:
    job = job_of(4, 4)
    uneven = replace(job, shape=replace(SHAPE, ffn_size=3 * 256), base=base_of(Config().override([key])))
    space = SearchSpace(pins={**PLAIN, "mesh.pp": (1,), "mesh.cp": (1,)})
    sizes = {each.mesh.tp for each in candidates(uneven, space)}
    assert sizes == {each.mesh.tp for each in candidates(uneven, space) if is_run(uneven, each)} == {1}
    assert len({each.mesh.tp for each in candidates(job, space)}) > 1


def test_every_way_to_split_sequences_that_the_engine_runs_is_a_candidate() -> None:
    job = job_of(4, 4)
    ways = product(("ring", "all-gather", "ulysses"), (None, 2, 4))
    base = changed(BASE, {"mesh.cp": 4, "batch.accumulation": 4})
    expected = {
        (how, team)
        for how, team in ways
        if is_run(job, changed(base, {"context.transport": how, "context.heads_over": team}))
    }
    pins = {"mesh.cp": (4,), "recompute.mode": ("none",), "batch.micro_size": (1,)}
    every = set()
    for teams in ({}, {"context.heads_over": (None, 2, 4)}):
        space = SearchSpace(pins={**pins, **teams})
        whole = [each.context for each in candidates(job, space) if each.mesh.tp == 1]
        every |= {(context.transport, context.heads_over) for context in whole}
    # A team of all is Ulysses, which has a name of its own.
    assert every == {(how, team) for how, team in expected if team != 4}


def test_every_schedule_that_the_engine_runs_is_a_candidate() -> None:
    job = job_of(2, 4)
    names = [name for name, recipe in RECIPES.items() if recipe.least_bubble_share]
    base = changed(BASE, {"mesh.pp": 2, "batch.accumulation": 4})
    expected = {
        (name, num)
        for name, num in product(names, (1, 2, 3))
        if is_run(job, changed(base, {"pipeline.schedule": name, "pipeline.virtual_stages": num}))
    }
    expected -= {(name, 1) for name in names if RECIPES[name].is_v_shaped}  # 2, by its other name
    space = SearchSpace(pins={"mesh.pp": (2,), "batch.micro_size": (1,), "recompute.mode": ("none",)})
    pipelines = [each.pipeline for each in candidates(job, space)]
    assert {(pipeline.schedule, pipeline.virtual_stages) for pipeline in pipelines} == expected


def kind_of(folded: FoldedLayouts, config: ResolvedConfig) -> tuple[object, ...]:
    """What makes the engine's layout another one."""
    layout = folded.rank(config).layout
    roles = (layout.stage.params, layout.stage.grads, layout.stage.optimizer)
    gathers_once = layout.pipeline is None or roles[0] is not Placement.SHARD or layout.pipeline.gathers_once
    is_split = Placement.SHARD in roles and config.mesh.dp_shard * config.mesh.cp > 1
    return (roles if is_split else None), (config.mesh.dp_shard if is_split else 0), gathers_once or not is_split


@pytest.mark.parametrize(("pp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_placement_that_is_another_layout_is_tried_once(pp: int, cp: int) -> None:
    job = job_of(4 * pp * cp, 4)
    pins: dict[str, tuple[Any, ...]] = {"mesh.pp": (pp,), "mesh.cp": (cp,), "mesh.tp": (1,), **PLAIN}
    (candidate, *_) = candidates(
        job, SearchSpace(pins={**pins, "batch.micro_size": (1,), "context.heads_over": (None,)})
    )
    space, folded = SearchSpace(offloads=False), FoldedLayouts(job)
    every = {
        kind_of(
            folded,
            changed(
                candidate,
                {
                    "zero.stage": stage,
                    "mesh.dp_shard": dp_shard,
                    "mesh.dp_replicate": 4 // dp_shard,
                    "pipeline.gather": gather,
                },
            ),
        )
        for stage, dp_shard, gather in product(range(4), (1, 2, 4), ("batch", "micro-batch"))
    }
    found = [kind_of(folded, changed(candidate, placement)) for placement in placements(job, space, candidate)]
    assert set(found) == every
    assert len(found) == len(every)


@pytest.mark.parametrize("virtual_stages", [1, 2, 4])
@pytest.mark.parametrize(("pp", "num_micro_batches"), [(2, 2), (4, 4), (4, 8), (3, 12)])
def test_the_bound_of_1f1b_and_of_interleaved_is_what_they_wait(
    pp: int, num_micro_batches: int, virtual_stages: int
) -> None:
    name = "1f1b" if virtual_stages == 1 else "interleaved"
    stages = [OpTimes(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)] * (pp * virtual_stages)
    span = PipelineSimulator().span(name, pp, virtual_stages, num_micro_batches, stages)
    waits = span.step_s / span.busy_s[0] - 1
    assert least_bubble_share(name, pp, num_micro_batches, virtual_stages) == pytest.approx(waits)


@pytest.mark.parametrize(
    ("name", "num_micro_batches"),
    [
        *(("zb-h1", each) for each in (1, 2, 3, 4)),
        *(("zb-h2", each) for each in (1, 2, 3, 4)),
        ("zb-v", 1),
        ("zb-v", 2),
    ],
)
def test_the_bound_of_zero_bubble_schedules_is_most_of_what_they_wait(name: str, num_micro_batches: int) -> None:
    pp, virtual_stages = 4, 2 if name == "zb-v" else 1
    stages = [OpTimes(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)] * (pp * virtual_stages)
    span = PipelineSimulator().span(name, pp, virtual_stages, num_micro_batches, stages)
    waits = span.step_s / span.busy_s[0] - 1
    assert least_bubble_share(name, pp, num_micro_batches, virtual_stages) > 0.5 * waits
