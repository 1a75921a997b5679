"""What a pipeline has done equals what was planned: its actions, its bytes at rest, and its bytes on the wire."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.pool import WorkerPool
from harness.tensor import make_case, step_batches
from harness.training import make_config
from harness.wire_bytes import WireBytes, ring_equivalent_bytes
from shardwise import Engine, Layout, initialize
from shardwise.comm.records import Collective
from shardwise.layout.mesh_shape import SHARD_AXES
from shardwise.runtime.memory_tracker import Category
from shardwise.schedule import RECIPES

Sections = dict[str, dict[str, Any]]
NUM_MICRO_BATCHES = 3
HOST = {"optimizer": "host", "grads": "host", "params": "host"}
STATES: dict[str, tuple[int, Sections]] = {
    # number of ranks, sections; stage 0 is tried with every schedule
    "sharded-optimizer": (4, {"zero": {"stage": 1}}),
    "sharded-virtual": (4, {"zero": {"stage": 1}, "pipeline": {"schedule": "interleaved", "virtual_stages": 2}}),
    "gathered-once": (4, {"zero": {"stage": 3}, "pipeline": {"schedule": "zb-v", "virtual_stages": 2}}),
    "gathered-each-time": (4, {"zero": {"stage": 3}, "pipeline": {"gather": "micro-batch", "schedule": "zb-h1"}}),
    "optimizer-on-host": (2, {"tiers": {"optimizer": "host"}, "zero": {"stage": 1}}),
    "all-on-host": (
        2,
        {"tiers": HOST, "zero": {"stage": 3}, "pipeline": {"schedule": "interleaved", "virtual_stages": 2}},
    ),
}


def make_engine(rank: int, sections: Sections, model: str) -> Engine:
    case = make_case(model)
    config = make_config(NUM_MICRO_BATCHES, {"mesh": {"pp": 2}, **sections})
    return initialize(case.build(torch.float64, seed=rank), config, loss_fn=case.loss)


def batches_of(rank: int, world_size: int, step: int) -> list[Any]:
    num_data_ranks = world_size // 2
    return step_batches(make_case("deep"), step, num_data_ranks, NUM_MICRO_BATCHES)[
        rank % num_data_ranks :: num_data_ranks
    ]


Trace = tuple[list[str], list[tuple[float, float]]]


def trace(rank: int, world_size: int, sections: Sections) -> tuple[list[str], list[Trace]]:
    """The planned actions, and those of two steps, between which there are evaluations."""
    traces = []
    with make_engine(rank, sections, "deep-tied") as engine:
        planned = [str(action) for action in engine.runner.schedule.ranks[engine.layout.pipeline.index]]
        for step in range(2):
            batches = batches_of(rank, world_size, step)
            engine.eval_step(batches[:2])
            engine.train_step(batches)
            engine.eval_step(batches[:1])
            timed = engine.timeline
            traces.append(([str(each.action) for each in timed], [(each.start_s, each.end_s) for each in timed]))
    return planned, traces


def check_trace(planned: list[str], traces: list[Trace]) -> None:
    last_s = 0.0
    for actions, times in traces:
        assert actions == planned
        for action, (start_s, end_s) in zip(actions, times, strict=True):
            assert start_s >= last_s, action
            assert end_s >= start_s, action
            last_s = start_s if "RECV" in action else end_s  # a receive goes on after the next actions begin


@pytest.mark.parametrize("schedule", RECIPES)
def test_what_is_executed_is_what_was_planned(ranks: WorkerPool, schedule: str) -> None:
    sections = {"pipeline": {"schedule": schedule, "virtual_stages": RECIPES[schedule].min_virtual_stages}}
    for planned, traces in ranks(2).run(trace, sections):
        check_trace(planned, traces)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", list(STATES))
def test_gathers_and_reductions_are_executed_as_planned(ranks: WorkerPool, name: str) -> None:
    num_ranks, sections = STATES[name]
    for planned, traces in ranks(num_ranks).run(trace, sections):
        check_trace(planned, traces)


# Bytes. Of bf16 parameters, so that parameters, gradients and states have elements of different sizes.

PIPELINE, DATA = "pp", ("dp_shard", "dp_replicate", "dp_replicate+dp_shard")
VALUE_BYTES = 2 * 12 * 16 * 2  # samples, positions, features, bytes of each
V = {"schedule": "zb-v", "virtual_stages": 2}
BYTES: dict[str, tuple[int, str, Sections]] = {
    # number of ranks, model, sections
    "0": (4, "deep-tied", {"zero": {"stage": 0}}),
    "0-untied": (4, "deep", {"zero": {"stage": 0}, "pipeline": {"schedule": "zb-h1"}}),
    "1": (4, "deep-tied", {"zero": {"stage": 1}}),
    "1-hybrid": (8, "deep-tied", {"zero": {"stage": 1}, "mesh": {"pp": 2, "dp_replicate": 2}}),
    "2": (4, "deep", {"zero": {"stage": 2}, "pipeline": V}),
    "2-fp32-on-the-wire": (4, "deep-tied", {"zero": {"stage": 2}, "precision": {"param": "bf16", "reduce": "fp32"}}),
    "3": (4, "deep-tied", {"zero": {"stage": 3}}),
    "3-V": (4, "deep-tied", {"zero": {"stage": 3}, "pipeline": V}),
    "3-each-micro-batch": (4, "deep-tied", {"zero": {"stage": 3}, "pipeline": {"gather": "micro-batch"}}),
    "3-each-micro-batch-split": (
        4,
        "deep",
        {"zero": {"stage": 3}, "pipeline": {"gather": "micro-batch", "schedule": "zb-h1"}},
    ),
}


@dataclass(frozen=True)
class Measured:
    """What one rank saw in its second step: bytes by role at rest, by axis and name on the wire."""

    layout: Layout
    shard: int
    at_rest: dict[str, int]
    sent: dict[tuple[str, str, str], int]
    wire_bytes: Fraction


def measure(rank: int, world_size: int, model: str, sections: Sections) -> Measured:
    batch = step_batches(make_case(model), 0, 1, 1)[0]
    at_rest: dict[str, int] = {}
    sent: Counter[tuple[str, str, str]] = Counter()
    with make_engine(rank, {"precision": {"param": "bf16"}, **sections}, model) as engine:
        engine.train_step([batch] * NUM_MICRO_BATCHES)
        own_add, comm_log = engine.comm.comm_log.add, engine.comm.comm_log

        def measure_states() -> None:
            engine.parts.sharding.finish()
            live = engine.memory.snapshot().live_bytes
            scalars = [value for state in engine.optimizer.state.values() for value in state.values()]
            at_rest["param"], at_rest["grad"] = live[Category.PARAMETERS], live[Category.GRADIENTS]
            at_rest["optimizer"] = live[Category.OPTIMIZER] - sum(
                each.nbytes for each in scalars if isinstance(each, Tensor) and each.dim() == 0
            )

        def add(*args: Any, **kwargs: Any) -> Collective:
            call = own_add(*args, **kwargs)
            sent[call.axis, call.op, call.name] += call.wire_bytes
            return call

        engine.parts.state.before_update, comm_log.add = measure_states, add  # type: ignore[method-assign]
        with WireBytes() as wire:
            engine.train_step([batch] * NUM_MICRO_BATCHES)
        del comm_log.add
        layout = engine.layout
    shard = layout.mesh.index_along(SHARD_AXES, rank)
    return Measured(layout, shard, at_rest, dict(sent), ring_equivalent_bytes(wire.calls))


@pytest.mark.parametrize("name", list(BYTES))
def test_bytes_are_those_of_the_layout(ranks: WorkerPool, name: str) -> None:
    num_ranks, model, sections = BYTES[name]
    for rank, measured in enumerate(ranks(num_ranks).run(measure, model, sections)):
        layout, sent = measured.layout, measured.sent
        assert measured.at_rest == layout.bytes_at_rest(measured.shard)
        by_op = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), 0)
        messages: Counter[str] = Counter()
        for (axis, op, what), num_bytes in sent.items():
            if (axis in DATA and op in by_op) or "tied" in what:
                by_op[op] += num_bytes
            elif axis == PIPELINE:
                messages[what] += num_bytes
            else:
                assert op.endswith("scalars"), (axis, op, what)
        # A sum in bf16 is a reduce-scatter and an all-gather.
        assert sum(by_op.values()) == sum(layout.bytes_on_wire(NUM_MICRO_BATCHES).values())
        has_tied = any("tied" in what for _, _, what in sent)
        assert has_tied == any(len(layout.holders(group)) > 1 for group in layout.groups)
        pipeline = layout.pipeline
        assert pipeline is not None
        values = {}
        for stage in range(pipeline.num_stages - 1):
            if (stage in pipeline.held) != (stage + 1 in pipeline.held):
                way = "values" if stage in pipeline.held else "gradients"
                # One message each, with a word of 8 bytes: the second step sends what the first has.
                values[f"stage {stage} to {stage + 1} {way}"] = NUM_MICRO_BATCHES * (VALUE_BYTES + 8)
        assert {what: num for what, num in messages.items() if num} == values
        assert int(measured.wire_bytes) == sum(sent.values()), rank
