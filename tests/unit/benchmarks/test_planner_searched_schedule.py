"""The searched zero-bubble schedules: proven, within their memory, and no worse than those by recipe."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from harness.zero_schedules import peak_held_bytes
from planner_eval.searched_schedule import zero_bubble_searched
from shardwise.schedule import Schedule, rank_span_s, simulate, verify, zero_bubble_h2
from shardwise.schedule.simulate import OpTimes

SECONDS = st.floats(min_value=0.1, max_value=2.0)


def longest_span_s(schedule: Schedule, times: OpTimes) -> float:
    timed = simulate(schedule, times.cost(1))
    return max(rank_span_s(timed, rank) for rank in range(len(schedule.ranks)))


@given(
    st.integers(1, 6),
    st.integers(1, 12),
    st.builds(OpTimes, SECONDS, SECONDS, SECONDS, st.floats(min_value=0.0, max_value=0.3)),
    st.floats(min_value=1.0, max_value=14.0),
    st.floats(min_value=0.1, max_value=1.0),
)
def test_it_is_a_step_that_can_run_and_holds_what_it_may(
    num_ranks: int, num_micro_batches: int, times: OpTimes, max_held: float, deferred_share: float
) -> None:
    schedule = zero_bubble_searched(
        num_ranks, num_micro_batches, times, max_held=max_held, deferred_share=deferred_share
    )
    verify(schedule)
    assert max(peak_held_bytes(schedule, 1.0, deferred_share)) <= max_held + 1e-6


def test_with_little_left_for_later_it_has_less_bubble_than_the_recipe_in_as_much_memory() -> None:
    times, num_ranks, num_micro_batches = OpTimes(18.546, 18.097, 9.321), 8, 64
    share = 0.366
    searched = zero_bubble_searched(num_ranks, num_micro_batches, times, max_held=2 * num_ranks, deferred_share=share)
    recipe = zero_bubble_h2(num_ranks, num_micro_batches).schedule()
    work_s = num_micro_batches * (18.546 + 18.097 + 9.321)
    assert longest_span_s(searched, times) < 1.005 * work_s
    assert longest_span_s(recipe, times) > 1.04 * work_s


def test_a_gap_that_is_too_short_is_filled_where_waiting_takes_longer() -> None:
    # 35 s of work on each of two ranks; where a rank waits in short gaps, or counts its wait before the first backward,
    # a step takes 38 s.
    times = OpTimes(1.0, 2.0, 2.0)
    assert longest_span_s(zero_bubble_searched(2, 7, times, max_held=2), times) == 37


@pytest.mark.parametrize(
    ("sizes", "seconds", "max_held", "deferred_share", "most_s"),
    [
        ((2, 2), (1.0, 1.0, 1.0, 1.0), 4.0, 0.25, 7.0),  # what is sent is on its way for a while
        ((2, 5), (3.0, 4.0, 2.0, 0.0), 4.0, 0.5, 45.0),  # a forward that delays the first backward pays
        ((2, 3), (1.0, 1.0, 3.0, 0.5), 2.0, 0.25, 16.0),  # space for a forward is made by gradients of weights
        ((3, 3), (2.0, 2.0, 4.0, 0.0), 2.0, 0.5, 32.0),  # two backwards on end where no forward is on its way
        ((4, 6), (2.0, 3.0, 2.0, 1.0), 5.0, 0.5, 50.0),  # a short gap is filled where the rank has waited longest
        ((4, 8), (2.0, 1.0, 3.0, 0.5), 4.0, 1.0, 53.0),  # no rank waits for a forward that there is no space for
    ],
)
def test_each_thing_that_a_free_rank_weighs_shortens_some_step(
    sizes: tuple[int, int], seconds: tuple[float, ...], max_held: float, deferred_share: float, most_s: float
) -> None:
    times = OpTimes(*seconds)
    schedule = zero_bubble_searched(*sizes, times, max_held=max_held, deferred_share=deferred_share)
    assert longest_span_s(schedule, times) <= most_s


@pytest.mark.parametrize(
    ("num_ranks", "num_micro_batches", "max_held", "what"),
    [(0, 1, 1, "num_ranks=0"), (1, 0, 1, "num_micro_batches=0"), (1, 1, 0.5, "max_held=0.5")],
)
def test_counts_below_one_are_refused(num_ranks: int, num_micro_batches: int, max_held: float, what: str) -> None:
    with refused("count-below-one", what):
        zero_bubble_searched(num_ranks, num_micro_batches, OpTimes(), max_held=max_held)
