"""Times of pipelines: as `simulate` gives them for the whole schedule, however few of the micro-batches are run."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.schedule import (
    RECIPES,
    Action,
    insert_transfers,
    makespan_s,
    pipeline_step,
    pipelines,
    placement_of,
    rank_span_s,
    simulate,
)
from shardwise.schedule.pipelines import ScheduleRows
from shardwise.schedule.simulate import OpTimes, PipelineSimulator, PipelineSpan

SHAPES = [(name, recipe.min_virtual_stages) for name, recipe in RECIPES.items()]
SHAPES += [("interleaved", 3), ("gpipe", 2)]
EVEN = OpTimes(1.0, 1.1, 0.7)
SLOW = OpTimes(1.3, 1.2, 0.9)
SECONDS = st.floats(min_value=0.5, max_value=2.0)


def whole(name: str, num_ranks: int, virtual: int, num_micro_batches: int, stages: list[OpTimes]) -> PipelineSpan:
    """The same from the general simulator, with a SEND and a RECEIVE for each transfer."""

    def cost(rank: int, action: Action) -> float:
        return stages[action.stage].of(action.kind)

    schedule = pipeline_step(name, num_ranks, num_micro_batches, virtual)
    timed = simulate(insert_transfers(schedule), cost)
    return PipelineSpan(
        step_s=makespan_s(timed),
        rank_spans_s=tuple(rank_span_s(timed, rank) for rank in range(num_ranks)),
        busy_s=tuple(sum(cost(rank, each) for each in row) for rank, row in enumerate(schedule.ranks)),
    )


def assert_equal_spans(one: PipelineSpan, other: PipelineSpan) -> None:
    assert one.step_s == pytest.approx(other.step_s, rel=1e-9)
    assert one.rank_spans_s == pytest.approx(other.rank_spans_s, rel=1e-9)
    assert one.busy_s == pytest.approx(other.busy_s, rel=1e-9)


@pytest.mark.quick(5)
@pytest.mark.parametrize(("name", "virtual_stages"), SHAPES)
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_a_pipeline_takes_as_long_as_the_simulation_of_its_whole_schedule(
    name: str, virtual_stages: int, data: st.DataObject
) -> None:
    num_ranks = data.draw(st.integers(1, 5))
    num_micro_batches = data.draw(st.one_of(st.integers(1, 9), st.integers(4 * num_ranks, 14 * num_ranks)))
    num_stages = placement_of(name, num_ranks, virtual_stages).num_stages
    times = st.builds(OpTimes, SECONDS, SECONDS, SECONDS, st.floats(0.0, 0.4))
    stages = data.draw(
        st.one_of(
            st.lists(times, min_size=num_stages, max_size=num_stages),
            st.tuples(times, times).map(lambda ends: [*[ends[0]] * (num_stages - 1), ends[1]]),
        )
    )
    span = PipelineSimulator().span(name, num_ranks, virtual_stages, num_micro_batches, stages)
    assert_equal_spans(span, whole(name, num_ranks, virtual_stages, num_micro_batches, stages))


@pytest.mark.quick(20)
@pytest.mark.parametrize(("name", "virtual_stages"), SHAPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_micro_batches", [60, 83])
@pytest.mark.parametrize("transfer_s", [0.0, 0.09])
def test_a_slow_end_and_rounds_that_are_not_full_change_nothing(
    name: str, virtual_stages: int, num_ranks: int, num_micro_batches: int, transfer_s: float
) -> None:
    num_stages = placement_of(name, num_ranks, virtual_stages).num_stages
    even, slow = (dataclasses.replace(each, transfer_s=transfer_s) for each in (EVEN, SLOW))
    for stages in ([slow, *[even] * (num_stages - 1)], [*[even] * (num_stages - 1), slow]):
        span = PipelineSimulator().span(name, num_ranks, virtual_stages, num_micro_batches, stages)
        assert_equal_spans(span, whole(name, num_ranks, virtual_stages, num_micro_batches, stages))


@pytest.mark.parametrize(("name", "virtual_stages"), [each for each in SHAPES if each[0] != "gpipe"])
def test_a_million_micro_batches_cost_no_more_than_a_few(name: str, virtual_stages: int) -> None:
    num_stages = placement_of(name, 8, virtual_stages).num_stages
    simulator = PipelineSimulator()
    stages = [*[EVEN] * (num_stages - 1), SLOW]
    few, more, many = (simulator.span(name, 8, virtual_stages, num, stages) for num in (800, 808, 1_000_000))
    round_s = more.step_s - few.step_s
    assert many.step_s == pytest.approx(few.step_s + (1_000_000 - 800) / 8 * round_s, rel=1e-9)
    assert max(many.busy_s) == pytest.approx(1_000_000 * (SLOW.total_s + (virtual_stages - 1) * EVEN.total_s))


def test_a_rank_that_falls_back_slowly_is_followed_until_it_decides() -> None:
    """The last rank takes longer by a little, and is the slowest only once the first ones' lead is used up."""
    stages = [OpTimes(1.0, 1.0, 1.0, 0.4)] * 3 + [OpTimes(1.0, 1.0, 1.05, 0.4)]
    span = PipelineSimulator().span("interleaved", 2, 2, 400, stages)
    assert_equal_spans(span, whole("interleaved", 2, 2, 400, stages))


def test_other_times_than_stages_are_refused() -> None:
    with refused("stage-times-count", "3 stages", "4"):
        PipelineSimulator().span("interleaved", 2, 2, 4, [EVEN] * 3)


def test_a_recipe_that_can_never_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def crossed(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> ScheduleRows:
        rows = RECIPES["gpipe"].rows(num_ranks, num_micro_batches, virtual_stages)
        return dataclasses.replace(rows, pattern=lambda rank: [*rows.pattern(rank)][:: 1 if rank else -1])

    mine = dataclasses.replace(RECIPES["gpipe"], name="mine", rows=crossed)
    monkeypatch.setattr(pipelines, "RECIPES", {**RECIPES, "mine": mine})
    with refused("dependency-circle", "on rank 0"):
        PipelineSimulator().span("mine", 2, 1, 4, [EVEN] * 2)


def test_a_bubble_is_the_share_that_ranks_stand_still_on_average_of_the_longest_span() -> None:
    assert PipelineSpan(step_s=12.0, rank_spans_s=(10.0, 8.0), busy_s=(4.0, 8.0)).bubble_rate == pytest.approx(0.4)
