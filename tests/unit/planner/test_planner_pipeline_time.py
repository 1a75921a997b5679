"""Times of pipelines: as `simulate` gives them, however few of the micro-batches are simulated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.planner.pipeline_time import PipelineSpan, PipelineTimes, StageTimes, span_of
from shardwise.schedule import (
    Action,
    ActionKind,
    Schedule,
    insert_transfers,
    makespan_s,
    pipeline_step,
    placement_of,
    rank_span_s,
    simulate,
)

SHAPES = [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-h2", 1)]
SHAPES.append(("zb-v", 2))
EVEN = StageTimes(forward_s=1.0, backward_input_s=1.1, backward_weight_s=0.7)


def stage_times(low: float, high: float) -> st.SearchStrategy[StageTimes]:
    seconds = st.floats(min_value=low, max_value=high)
    return st.builds(StageTimes, forward_s=seconds, backward_input_s=seconds, backward_weight_s=seconds)


def simulated(schedule: Schedule, stages: list[StageTimes], transfer_s: float) -> tuple[float, list[float]]:
    def cost(rank: int, action: Action) -> float:
        stage = stages[action.stage]
        return {
            ActionKind.FORWARD: stage.forward_s,
            ActionKind.BACKWARD: stage.backward_input_s + stage.backward_weight_s,
            ActionKind.BACKWARD_INPUT: stage.backward_input_s,
            ActionKind.BACKWARD_WEIGHT: stage.backward_weight_s,
            ActionKind.SEND: transfer_s,
        }.get(action.kind, 0.0)

    timed = simulate(insert_transfers(schedule), cost)
    return makespan_s(timed), [rank_span_s(timed, rank) for rank in range(len(schedule.ranks))]


@pytest.mark.parametrize(("name", "virtual_stages"), SHAPES)
@given(st.data())
def test_a_schedule_takes_as_long_as_its_simulation_says(name: str, virtual_stages: int, data: st.DataObject) -> None:
    num_ranks, num_micro_batches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    num_stages = placement_of(name, num_ranks, virtual_stages).num_stages
    stages = data.draw(st.lists(stage_times(0.5, 2.0), min_size=num_stages, max_size=num_stages))
    transfer_s = data.draw(st.floats(min_value=0.0, max_value=0.4))
    schedule = pipeline_step(name, num_ranks, num_micro_batches, virtual_stages)
    step_s, rank_spans_s = simulated(schedule, stages, transfer_s)
    span = span_of(schedule, stages, transfer_s)
    assert span.step_s == pytest.approx(step_s, rel=1e-12)
    assert span.rank_spans_s == pytest.approx(rank_spans_s, rel=1e-12)
    work = [num_micro_batches * sum(stages[each].total_s for each in {a.stage for a in row}) for row in schedule.ranks]
    assert span.busy_s == pytest.approx(work, rel=1e-12)


@pytest.mark.parametrize(("name", "virtual_stages"), SHAPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("num_micro_batches", [60, 75, 83])
@pytest.mark.parametrize("transfer_s", [0.0, 0.09])
def test_of_many_micro_batches_few_tell_exactly(
    name: str, virtual_stages: int, num_ranks: int, num_micro_batches: int, transfer_s: float
) -> None:
    num_stages = placement_of(name, num_ranks, virtual_stages).num_stages
    slow = StageTimes(forward_s=1.3, backward_input_s=1.2, backward_weight_s=0.9)
    for stages in ([EVEN] * num_stages, [slow, *[EVEN] * (num_stages - 1)], [*[EVEN] * (num_stages - 1), slow]):
        counted = PipelineTimes().span(name, num_ranks, virtual_stages, num_micro_batches, stages, transfer_s)
        whole = span_of(pipeline_step(name, num_ranks, num_micro_batches, virtual_stages), stages, transfer_s)
        assert counted.step_s == pytest.approx(whole.step_s, rel=1e-9)
        assert counted.rank_spans_s == pytest.approx(whole.rank_spans_s, rel=1e-9)
        assert counted.busy_s == pytest.approx(whole.busy_s, rel=1e-9)


def test_thousands_of_micro_batches_over_many_stages_build_no_schedule_of_them() -> None:
    times = PipelineTimes()
    span = times.span("1f1b", 64, 1, 1_000_000, [EVEN] * 64)
    assert span.step_s == pytest.approx((1_000_000 + 63) * EVEN.total_s)
    assert span.bubble_rate == pytest.approx(63 / 1_000_063)


def test_other_times_than_stages_are_refused() -> None:
    with refused("stage-times-count", "3 stages", "4"):
        PipelineTimes().span("interleaved", 2, 2, 4, [EVEN] * 3)


def test_a_bubble_is_the_share_that_ranks_stand_still_on_average_of_the_longest_span() -> None:
    assert PipelineSpan(step_s=12.0, rank_spans_s=(10.0, 8.0), busy_s=(4.0, 8.0)).bubble_rate == pytest.approx(0.4)
