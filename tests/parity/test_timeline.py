"""A real run is a run of the generated schedule: the same actions, in an order that the dependencies allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.training import make_config
from harness.zero_schedules import data_parallel_step
from shardwise import initialize
from shardwise.layout.zero_stages import STAGES, ZeroStage
from shardwise.runtime.timeline import Timeline
from shardwise.schedule import Action, ActionKind, TimedAction, insert_offload, verify

CASE = "untied-transformer"
GROUPS = ("root", "blocks.0", "blocks.1", "blocks.2")


def record(
    rank: int, world_size: int, stage: int, num_micro_batches: int, tiers: dict[str, Any] | None = None
) -> tuple[TimedAction, ...]:
    case = CASES[CASE]
    batches = make_batches(case, num_steps=2, world_size=world_size, num_micro_batches=num_micro_batches)
    config = make_config(num_micro_batches, {"zero": {"stage": stage}, "tiers": tiers or {}})
    engine = initialize(case.build(torch.float64), config, loss_fn=case.loss)
    for step in batches:
        engine.train_step(step[rank])
    return engine.timeline


def generated(
    stage: ZeroStage, num_micro_batches: int, fetched: Sequence[str] = (), evicted: Sequence[str] = ()
) -> Counter[Action]:
    schedule = data_parallel_step(
        GROUPS,
        num_micro_batches,
        unshard_for_use=stage.unshard_for_use,
        reduce_each_backward=stage.reduce_each_backward,
        unshard_after_step=stage.unshard_after_step,
    )
    schedule = insert_offload(schedule, fetched, evicted)
    verify(schedule)
    # The optimizer steps all groups in one action.
    steps = {Action(ActionKind.STEP, group=group) for group in GROUPS}
    return Counter([action for action in schedule.ranks[0] if action not in steps] + [Action(ActionKind.STEP)])


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_run_takes_the_actions_of_the_schedule(ranks: WorkerPool, stage: int, num_micro_batches: int) -> None:
    for timeline in ranks(2).run(record, stage, num_micro_batches):
        assert Counter(timed.action for timed in timeline) == generated(STAGES[stage], num_micro_batches)
        assert all(timed.start_s <= timed.end_s for timed in timeline)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_run_with_tiers_takes_the_actions_of_the_lowered_schedule(
    ranks: WorkerPool, tmp_path: Path, num_micro_batches: int
) -> None:
    tiers = {"params": "host", "grads": "nvme", "optimizer": "host", "nvme_path": str(tmp_path)}
    expected = generated(STAGES[3], num_micro_batches, GROUPS, GROUPS)
    assert expected[Action(ActionKind.FETCH, group="blocks.0")] == 2 * num_micro_batches
    for timeline in ranks(2).run(record, 3, num_micro_batches, tiers):
        assert Counter(timed.action for timed in timeline) == expected


def test_communication_is_issued_ahead(ranks: WorkerPool) -> None:
    """On the CPU overlap shows in the order of issue, not in wall time."""
    timeline = ranks(2).run(record, 3, 1)[0]
    spans: dict[str, list[TimedAction]] = {}
    for timed in timeline:
        spans.setdefault(str(timed.action), []).append(timed)
    for_forward, for_backward = spans["0UNSHARD[blocks.1]"]
    assert for_forward.start_s < spans["0F0[blocks.0]"][0].start_s
    assert for_backward.start_s < spans["0B0[blocks.2]"][0].end_s
    reduce = spans["0REDUCE[blocks.2]"][0]
    assert reduce.start_s < spans["0B0[blocks.1]"][0].start_s < reduce.end_s


def test_a_step_that_ends_amid_a_schedule_is_recorded_to_the_schedules_end() -> None:
    timeline = Timeline(rank=0)
    timeline.is_scheduled = True
    with timeline.perform(Action.parse("0STEP")):
        timeline.close_step()
    with timeline.perform(Action.parse("0UNSHARD")):
        pass
    assert timeline.last_step == ()
    timeline.close_step()
    assert [str(timed.action) for timed in timeline.last_step] == ["0STEP", "0UNSHARD"]


def test_an_action_that_raises_is_over() -> None:
    timeline = Timeline(rank=0)
    with pytest.raises(ZeroDivisionError), timeline.perform(Action.parse("0F0")):
        raise ZeroDivisionError
    timeline.close_step()
    assert [str(timed.action) for timed in timeline.last_step] == ["0F0"]
