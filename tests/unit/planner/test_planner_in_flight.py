"""What ranks hold at once is what the schedule says, however many micro-batches are left out of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from operator import ge

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.planner.in_flight import InFlight, InFlightCounts, InFlightTable
from shardwise.schedule import registry
from shardwise.schedule.actions import ActionKind
from shardwise.schedule.formulas import max_in_flight, peak_held_bytes
from shardwise.schedule.registry import pipeline_step, placement_of

VIRTUAL = {"naive": 1, "gpipe": 2, "1f1b": 1, "interleaved": 3, "zb-h1": 1, "zb-h2": 1, "zb-v": 2}
NAMES = st.sampled_from(sorted(VIRTUAL))


def in_flight_of(name: str, num_ranks: int, num_micro_batches: int, rank: int) -> InFlight:
    return InFlightTable().of(name, num_ranks, VIRTUAL[name], num_micro_batches, rank=rank)


def most(moments: tuple[InFlightCounts, ...], deferred: float) -> float:
    return max(sum(moment.whole) + deferred * sum(moment.deferred) for moment in moments)


@given(
    name=NAMES,
    num_ranks=st.integers(1, 5),
    num_micro_batches=st.integers(1, 40),
    deferred=st.sampled_from([0.5, 0.9]),
)
def test_most_is_that_of_the_whole_schedule(name: str, num_ranks: int, num_micro_batches: int, deferred: float) -> None:
    schedule = pipeline_step(name, num_ranks, num_micro_batches, VIRTUAL[name])
    expected = peak_held_bytes(schedule, 1.0, deferred)
    table = InFlightTable()
    for rank in range(num_ranks):
        moments = table.of(name, num_ranks, VIRTUAL[name], num_micro_batches, rank=rank).moments
        assert most(moments, deferred) == pytest.approx(expected[rank])
        assert max(sum(moment.whole) for moment in moments) <= max_in_flight(
            name, num_ranks, num_micro_batches, VIRTUAL[name], rank
        )


def test_a_new_schedule_is_counted_whole_unless_it_says_that_it_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = dataclasses.replace(registry.RECIPES["gpipe"], name="mine", min_virtual_stages=2)
    monkeypatch.setattr(registry, "RECIPES", {**registry.RECIPES, "mine": mine})
    moments = InFlightTable().of("mine", 4, 2, 64, rank=0).moments
    assert max(sum(moment.whole) for moment in moments) == 2 * 64


def held_as_backwards_begin(
    name: str, num_ranks: int, num_micro_batches: int, rank: int
) -> Iterator[tuple[int, InFlightCounts]]:
    """By brute force over the whole schedule: the stage's index, what is held, what arrives and what was sent."""
    placement = placement_of(name, num_ranks, VIRTUAL[name])
    stages = placement.stages_of(rank)
    begun, half, ended, num_sent = set[tuple[int, int]](), set[tuple[int, int]](), set[tuple[int, int]](), 0
    row = pipeline_step(name, num_ranks, num_micro_batches, VIRTUAL[name]).ranks[rank]
    for action, following in zip(row, [*row[1:], None], strict=True):
        place = action.stage, action.micro_batch or 0
        if action.kind is ActionKind.FORWARD:
            begun.add(place)
            continue
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            ended.add(place)
            continue
        counts = [
            tuple(sum(stage == own for stage, _ in places) for own in stages) for places in (begun - half, half - ended)
        ]
        num_arrived = 0
        if following is not None and following.kind is not ActionKind.BACKWARD_WEIGHT:
            source = following.stage + (-1 if following.kind is ActionKind.FORWARD else 1)
            num_arrived = int(0 <= source < placement.num_stages and placement.rank_of(source) != rank)
        yield stages.index(action.stage), InFlightCounts(counts[0], counts[1], num_arrived, num_sent)
        half.add(place)
        if action.kind is ActionKind.BACKWARD:
            ended.add(place)
        num_sent += action.stage > 0 and placement.rank_of(action.stage - 1) != rank


def covers(one: InFlightCounts, other: InFlightCounts) -> bool:
    """Whether one keeps no less of any stage than the other."""
    return all(map(ge, one.counts, other.counts))


@given(name=NAMES, num_ranks=st.integers(1, 4), num_micro_batches=st.integers(1, 20), place=st.integers(0, 3))
def test_each_backward_begins_with_no_more_than_a_moment_says(
    name: str, num_ranks: int, num_micro_batches: int, place: int
) -> None:
    rank = place % num_ranks
    in_flight = in_flight_of(name, num_ranks, num_micro_batches, rank)
    held = list(held_as_backwards_begin(name, num_ranks, num_micro_batches, rank))
    for index, moments in enumerate(in_flight.backwards):
        begun = [each for of, each in held if of == index]
        assert all(any(covers(moment, each) for moment in moments) for each in begun)
        for moment in moments:
            same = [each for each in begun if each.counts == moment.counts]
            most = max(each.num_arrived + each.num_sent for each in same)
            assert moment.num_arrived + moment.num_sent == most


def test_a_stage_that_runs_later_is_held_less_often() -> None:
    in_flight = in_flight_of("gpipe", 2, 3, 0)
    assert [moment.whole for moment in in_flight.backwards[0]] == [(3, 0)]
    assert [moment.whole for moment in in_flight.backwards[1]] == [(3, 3)]
    assert in_flight.between == ()


def test_what_comes_next_has_arrived() -> None:
    first, last = (in_flight_of("1f1b", 2, 4, rank).backwards[0][0] for rank in (0, 1))
    assert (first.num_arrived, first.num_sent) == (1, 0)  # nothing is sent back by the first stage
    assert (last.num_arrived, last.num_sent) == (1, 2)  # before the last forward: after it nothing arrives
    assert in_flight_of("1f1b", 1, 4, 0).backwards[0][0].num_arrived == 0
    (end,) = in_flight_of("zb-h1", 2, 4, 1).between
    assert end.deferred == (2,)


def test_no_moment_covers_another_of_its_kind() -> None:
    for name in VIRTUAL:
        in_flight = in_flight_of(name, 4, 9, 1)
        for moments in (*in_flight.backwards, in_flight.between):
            assert not any(covers(one, other) for one in moments for other in moments if one is not other)
