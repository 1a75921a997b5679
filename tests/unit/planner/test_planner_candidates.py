"""What the search may choose from against what the engine itself takes, and its bounds where they are exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from shardwise.config.errors import ConfigError
from shardwise.layout.zero_stages import Placement
from shardwise.planner.candidates import (
    ParallelismCandidate,
    PlacementCandidate,
    SearchSpace,
    candidates,
    divisors,
    placements,
    strategy_at,
)
from shardwise.planner.compact_layout import CompactLayout
from shardwise.planner.configs import config_of
from shardwise.planner.hardware import Cluster, find_gpu
from shardwise.planner.job import ModelShape, PlanJob, Strategy
from shardwise.schedule.formulas import least_bubble_share
from shardwise.schedule.pipelines import RECIPES
from shardwise.schedule.simulate import OpTimes, PipelineSimulator
from shardwise.train.setup import check_job

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=768,
    vocab_size=1024,
    name="small",
)
PLAIN: dict[str, tuple[Any, ...]] = {"recompute": ("none",), "schedule": ("1f1b",), "transport": ("ring",)}


def job_of(num_gpus: int, global_batch: int) -> PlanJob:
    cluster = Cluster(gpu=find_gpu("h100"), num_gpus=num_gpus, gpus_per_node=4, nic_bytes_per_s=50e9)
    return PlanJob(shape=SHAPE, seq_len=2048, global_batch=global_batch, cluster=cluster)


def is_run(job: PlanJob, strategy: Strategy) -> bool:
    """Whether the engine takes it."""
    try:
        check_job(config_of(job, strategy), strategy.num_ranks)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(("num_gpus", "global_batch"), [(4, 4), (6, 12), (8, 8)])
def test_every_mesh_that_the_engine_runs_is_a_candidate(num_gpus: int, global_batch: int) -> None:
    job = job_of(num_gpus, global_batch)
    expected = set()
    for tp, cp, pp in product(divisors(num_gpus), repeat=3):
        num_data_ranks, left = divmod(num_gpus, tp * cp * pp)
        if left or num_data_ranks == 0 or global_batch % num_data_ranks:
            continue
        each_batch = global_batch // num_data_ranks
        split = Strategy(pp=pp, dp_shard=num_data_ranks, cp=cp, tp=tp, sequence_parallel=tp > 1)
        if is_run(job, replace(split, num_micro_batches=each_batch)):
            expected |= {
                (pp, num_data_ranks, cp, tp, tp > 1, size, each_batch // size) for size in divisors(each_batch)
            }
    found = [
        (
            each.pp,
            each.num_data_ranks,
            each.cp,
            each.tp,
            each.sequence_parallel,
            each.micro_size,
            each.num_micro_batches,
        )
        for each in candidates(job, SearchSpace(pins={**PLAIN, "heads_over": (None,)}))
    ]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_every_way_to_split_sequences_that_the_engine_runs_is_a_candidate() -> None:
    job = job_of(4, 4)
    ways = product(("ring", "all-gather", "ulysses"), (None, 2, 4))
    base = Strategy(cp=4, num_micro_batches=4)
    expected = {(how, team) for how, team in ways if is_run(job, replace(base, transport=how, heads_over=team))}
    pins = {"cp": (4,), "recompute": ("none",), "micro_size": (1,)}
    every = set()
    for teams in ({}, {"heads_over": (None, 2, 4)}):
        space = SearchSpace(pins={**pins, **teams})
        every |= {(each.transport, each.heads_over) for each in candidates(job, space) if each.tp == 1}
    # A team of all is Ulysses, which has a name of its own.
    assert every == {(how, team) for how, team in expected if team != 4}


def test_every_schedule_that_the_engine_runs_is_a_candidate() -> None:
    job = job_of(2, 4)
    names = [name for name, recipe in RECIPES.items() if recipe.least_bubble_share]
    base = Strategy(pp=2, num_micro_batches=4)
    expected = {
        (name, num)
        for name, num in product(names, (1, 2, 3))
        if is_run(job, replace(base, schedule=name, virtual_stages=num))
    }
    expected -= {(name, 1) for name in names if RECIPES[name].is_v_shaped}  # 2, by its other name
    space = SearchSpace(pins={"pp": (2,), "micro_size": (1,), "recompute": ("none",)})
    assert {(each.schedule, each.virtual_stages) for each in candidates(job, space)} == expected


def kind_of(
    folded: CompactLayout, candidate: ParallelismCandidate, placement: PlacementCandidate, base: Strategy
) -> tuple[object, ...]:
    """What makes the engine's layout another one."""
    strategy = strategy_at(candidate, placement, base)
    layout = folded.rank(strategy).layout
    roles = (layout.stage.params, layout.stage.grads, layout.stage.optimizer)
    gathers_once = layout.pipeline is None or roles[0] is not Placement.SHARD or layout.pipeline.gathers_once
    is_split = Placement.SHARD in roles and placement.dp_shard * candidate.cp > 1
    return (roles if is_split else None), (placement.dp_shard if is_split else 0), gathers_once or not is_split


@pytest.mark.parametrize(("pp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_placement_that_is_another_layout_is_tried_once(pp: int, cp: int) -> None:
    job = job_of(4 * pp * cp, 4)
    pins: dict[str, tuple[Any, ...]] = {"pp": (pp,), "cp": (cp,), "tp": (1,), "micro_size": (1,), **PLAIN}
    (candidate, *_) = candidates(job, SearchSpace(pins={**pins, "heads_over": (None,)}))
    space, folded = SearchSpace(offloads=False), CompactLayout(job)
    every = {
        kind_of(folded, candidate, PlacementCandidate(stage, dp_shard, gather, *["device"] * 4), space.base)
        for stage, dp_shard, gather in product(range(4), (1, 2, 4), ("batch", "micro-batch"))
    }
    found = [kind_of(folded, candidate, placement, space.base) for placement in placements(job, space, candidate)]
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
