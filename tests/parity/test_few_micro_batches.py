"""A rank that is simulated with few micro-batches holds and sends what all of them make it hold and send."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from harness.models import CASES, make_batches
from harness.tensor import MICRO_SIZE, make_case
from harness.training import Overrides, make_config
from shardwise import Config, simulate
from shardwise.comm.loss import LossFn
from shardwise.schedule import RECIPES
from shardwise.verify.few_micro_batches import RankFigures, rank_figures
from shardwise.verify.simulate import RankJob


def compare(
    model: nn.Module, loss_fn: LossFn | None, batch: Any, config: Any, world_size: int, rank: int
) -> RankFigures:
    given = config if isinstance(config, Config) else Config.from_dict(config)
    job = RankJob(model, given.resolve(world_size), lambda: batch, rank, loss_fn)
    figures = rank_figures(job)
    full = simulate(model, config, lambda: batch, loss_fn=loss_fn, rank=rank, world_size=world_size)
    assert figures.layout == full.layout
    assert figures.at_rest == full.at_rest.live_bytes
    assert figures.peak == full.peak.peak_live_bytes
    assert figures.wire_bytes == full.wire_bytes
    assert figures.num_calls == Counter((call.axis, call.op) for call in full.calls)
    return figures


def compare_pipeline(schedule: str, num_micro_batches: int, rank: int, overrides: Overrides) -> RankFigures:
    case = make_case("deep")
    pipeline = {"schedule": schedule, "virtual_stages": RECIPES[schedule].min_virtual_stages}
    pipeline |= overrides.get("pipeline", {})
    sections = {"mesh": {"pp": 4}, "zero": {"stage": 1}, **overrides, "pipeline": pipeline}
    batch = case.batch(0, MICRO_SIZE, torch.float64)
    config = make_config(num_micro_batches, sections)
    return compare(case.build(torch.float32), case.loss, batch, config, 8, rank)


@pytest.mark.parametrize("rank", [0, 2, 6])
# The most is reached in another micro-batch by each: of the quick one, soon.
@pytest.mark.parametrize(
    "schedule", [pytest.param(each, marks=() if each == "1f1b" else pytest.mark.full) for each in sorted(RECIPES)]
)
def test_a_pipeline_holds_most_once_it_is_full(schedule: str, rank: int) -> None:
    figures = compare_pipeline(schedule, 10, rank, {})
    by_hand = {"naive": 3, "1f1b": max(3, 5 - rank // 2), "zb-h1": 5, "zb-h2": 8, "zb-v": 9 - (rank > 0)}
    by_hand |= {"gpipe": 10, "interleaved": 10}
    assert figures.num_simulated == by_hand.get(schedule, figures.num_simulated)


@pytest.mark.full
def test_rounds_of_an_interleaved_schedule_repeat() -> None:
    assert compare_pipeline("interleaved", 16, 2, {}).num_simulated == 12


@pytest.mark.parametrize(
    "overrides",
    [
        {"zero": {"stage": 3}},
        {"zero": {"stage": 3}, "pipeline": {"gather": "micro-batch"}},
        {"zero": {"stage": 3}, "run": {"device": "cuda"}, "recompute": {"mode": "full"}},
        {"mesh": {"pp": 4, "tp": 2}, "tensor": {"sequence_parallel": True}, "precision": {"param": "bf16"}},
        {"mesh": {"pp": 4, "cp": 2}, "precision": {"param": "bf16"}},
        {"zero": {"stage": 2}, "tiers": {"grads": "host", "optimizer": "host"}},
    ],
)
@pytest.mark.parametrize(
    ("schedule", "rank"), [("1f1b", 2), ("1f1b", 4), ("1f1b", 6), ("zb-v", 2), ("zb-h1", 4), ("interleaved", 2)]
)
def test_what_a_pipeline_is_combined_with_repeats_too(schedule: str, rank: int, overrides: Overrides) -> None:
    num_micro_batches = {"interleaved": 16, "zb-v": 10}.get(schedule, 6)
    assert compare_pipeline(schedule, num_micro_batches, rank, overrides).num_simulated < num_micro_batches


@pytest.mark.parametrize(
    "overrides",
    [
        {"zero": {"stage": 0}},
        {"zero": {"stage": 1}, "precision": {"param": "bf16"}},
        {"zero": {"stage": 2}, "run": {"device": "cuda"}},
        {"zero": {"stage": 3}},
        {"zero": {"stage": 3}, "recompute": {"mode": "full"}, "mesh": {"tp": 2}},
        {"zero": {"stage": 3}, "tiers": {"params": "host", "grads": "host", "optimizer": "host"}},
    ],
)
@pytest.mark.parametrize("num_micro_batches", [2, 5])
def test_micro_batches_without_a_pipeline_repeat(overrides: Overrides, num_micro_batches: int) -> None:
    case = CASES["transformer"] if "mesh" not in overrides else make_case("decoder")
    if case.name == "transformer":
        (batch,) = make_batches(case, num_steps=1, world_size=1, num_micro_batches=1)[0][0]
    else:
        batch = case.batch(0, MICRO_SIZE, torch.float64)
    config = make_config(num_micro_batches, overrides)
    figures = compare(case.build(torch.float32), case.loss, batch, config, 4, 1)
    assert figures.num_simulated == min(num_micro_batches, 3)
