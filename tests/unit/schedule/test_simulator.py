"""Times against hand computation: nothing is faster than its dependencies, and hidden communication costs nothing."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.refusals import refused
from harness.zero_schedules import data_parallel_step, forward_only
from shardwise.schedule import (
    COMPUTATIONS,
    Action,
    ActionKind,
    Schedule,
    TimedAction,
    bubble_fraction,
    dependencies,
    makespan_s,
    rank_bubble_s,
    rank_span_s,
    simulate,
)

BLOCKS = ("root", "b0", "b1", "b2")
STAGE_3 = {"unshard_for_use": True, "reduce_each_backward": True}


def priced(**seconds: float):
    """A cost by kind, 0 where none is given."""
    return lambda rank, action: seconds.get(action.kind.name, 0.0)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(1, 3), st.randoms())
def test_without_communication_the_makespan_is_the_computing(
    num_groups: int, num_micro_batches: int, shards: bool, each: bool, num_ranks: int, dice: random.Random
) -> None:
    seconds = {kind: dice.randint(1, 9) for kind in (*COMPUTATIONS, ActionKind.STEP)}
    schedule = data_parallel_step(
        BLOCKS[:num_groups],
        num_micro_batches,
        unshard_for_use=shards,
        reduce_each_backward=each,
        unshard_after_step=not shards,
        num_ranks=num_ranks,
        recompute=BLOCKS[1:num_groups],
    )
    timed = simulate(schedule, lambda rank, action: seconds.get(action.kind, 0))
    assert makespan_s(timed) == sum(seconds.get(action.kind, 0) for action in schedule.ranks[0])
    assert bubble_fraction(timed) == 0.0


@pytest.mark.parametrize(("unshard", "forward"), [(1, 3), (2, 2), (3, 1)])
def test_prefetched_gathers_overlap_the_forward(unshard: float, forward: float) -> None:
    """4 groups: the first gather is exposed; then the slower of gathering and computing sets the pace."""
    schedule = forward_only(BLOCKS, 1, unshard_for_use=True)
    timed = simulate(schedule, priced(UNSHARD=unshard, FORWARD=forward))
    assert makespan_s(timed) == max(unshard + 4 * forward, 4 * unshard + forward)


@pytest.mark.parametrize(("reduce", "backward"), [(1, 3), (2, 2), (5, 1)])
def test_reductions_overlap_the_backward(reduce: float, backward: float) -> None:
    """4 groups, forward 1 s each: either the last reduction is exposed, or all but the first backward's wait."""
    timed = simulate(data_parallel_step(BLOCKS, 1), priced(FORWARD=1, BACKWARD=backward, REDUCE=reduce))
    assert makespan_s(timed) == 4 + max(4 * backward + reduce, backward + 4 * reduce)


@pytest.mark.parametrize(("unshard", "step"), [(1, 3), (3, 1)])
def test_gathers_after_the_step_overlap_the_next_groups_step(unshard: float, step: float) -> None:
    timed = simulate(data_parallel_step(BLOCKS, 1, unshard_after_step=True), priced(STEP=step, UNSHARD=unshard))
    assert makespan_s(timed) == max(4 * step + unshard, step + 4 * unshard)


def test_prefetching_goes_one_block_ahead_and_no_further() -> None:
    """A gather takes the memory that the block before last gave back, however idle the wire is."""
    timed = simulate(forward_only(BLOCKS, 1, unshard_for_use=True), priced(UNSHARD=1, FORWARD=10))
    starts = {(action.action.kind, action.action.group): action.start_s for action in timed}
    ends = {(action.action.kind, action.action.group): action.end_s for action in timed}
    assert starts[ActionKind.UNSHARD, "b2"] == ends[ActionKind.FORWARD, "b0"] == 21


def test_collectives_start_when_every_rank_is_ready_and_end_together() -> None:
    schedule = data_parallel_step(("root",), 1, num_ranks=2)
    slow_rank_1 = priced(FORWARD=1, BACKWARD=2, REDUCE=1)

    def cost(rank: int, action: Action) -> float:
        return slow_rank_1(rank, action) * (1 + 2 * rank)

    reduces = [timed for timed in simulate(schedule, cost) if timed.action.kind is ActionKind.REDUCE]
    assert [(timed.start_s, timed.end_s) for timed in reduces] == [(9, 12), (9, 12)]


def test_bubble_of_1f1b_equals_the_formula() -> None:
    """(p-1)/(m+p-1) with p=2, m=4: the text is the schedule, transfers cost nothing."""
    schedule = Schedule.parse("rank 0: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3\nrank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
    timed = simulate(schedule, priced(FORWARD=1, BACKWARD=2))
    assert makespan_s(timed) == (4 + 1) * (1 + 2)
    assert bubble_fraction(timed) == pytest.approx(1 / 5)


def test_a_transfer_delays_the_next_stage_by_its_cost() -> None:
    schedule = Schedule.parse("rank 0: 0F0 0SEND_F0\nrank 1: 1RECV_F0 1F0")
    assert makespan_s(simulate(schedule, priced(FORWARD=1, SEND=5))) == 1 + 5 + 1


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(1, 3), st.randoms())
def test_no_action_starts_before_what_it_follows_has_ended(
    num_groups: int, num_micro_batches: int, shards: bool, each: bool, num_ranks: int, dice: random.Random
) -> None:
    schedule = data_parallel_step(
        BLOCKS[:num_groups],
        num_micro_batches,
        unshard_for_use=shards,
        reduce_each_backward=each,
        unshard_after_step=not shards,
        num_ranks=num_ranks,
    )
    timed = simulate(schedule, lambda rank, action: dice.random())
    places = [(rank, index) for rank, row in enumerate(schedule.ranks) for index in range(len(row))]
    at = dict(zip(places, timed, strict=True))
    for place, earlier in dependencies(schedule).items():
        starts = [at[other].end_s for other in earlier]
        assert at[place].start_s >= max(starts, default=0.0)
        assert (at[place].rank, at[place].action) == (place[0], schedule.ranks[place[0]][place[1]])
    streams: dict[tuple[int, str], float] = {}
    for action in sorted(timed, key=lambda action: (action.start_s, action.end_s)):
        assert action.start_s >= streams.get((action.rank, action.stream), 0.0)
        streams[action.rank, action.stream] = action.end_s


def test_helpers_on_nothing_and_on_gaps() -> None:
    assert makespan_s(()) == bubble_fraction(()) == 0.0
    forward = Action(ActionKind.FORWARD, micro_batch=0)
    timed = (TimedAction(forward, 0, 1.0, 2.0, "compute"), TimedAction(forward, 1, 3.0, 5.0, "compute"))
    timed += (TimedAction(Action(ActionKind.UNSHARD), 1, 1.0, 5.0, "gather"),)
    assert makespan_s(timed) == 4.0
    assert bubble_fraction(timed) == 1 - (1 + 2) / (2 * 4)
    assert rank_span_s(timed, 1) == 2.0
    assert rank_span_s(timed, 7) == rank_bubble_s(timed, 7) == 0.0
    late = (*timed, TimedAction(forward, 1, 8.0, 9.0, "compute"))
    assert [rank_bubble_s(late, rank) for rank in range(2)] == [0.0, 3.0]
    assert timed[1].duration_s == 2.0


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_cost_that_is_no_duration_is_refused(seconds: float) -> None:
    with refused("cost-negative", f"cost={seconds} s"):
        simulate(forward_only(("root",), 1), lambda rank, action: seconds)


def test_a_deadlock_is_refused() -> None:
    crossed = Schedule.parse("rank 0: 0UNSHARD[a] 0UNSHARD[b]\nrank 1: 0UNSHARD[b] 0UNSHARD[a]")
    with refused("dependency-circle", "on rank 0"):
        simulate(crossed, priced())
