"""What ranks hold at once is what the schedule says, however many micro-batches are left out of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.planner.flights import Flights
from shardwise.schedule.formulas import max_in_flight
from shardwise.schedule.in_flight import peak_held_bytes
from shardwise.schedule.recipes import pipeline_step

VIRTUAL = {"naive": 1, "gpipe": 2, "1f1b": 1, "interleaved": 3, "zb-h1": 1, "zb-h2": 1, "zb-v": 2}


@given(
    name=st.sampled_from(sorted(VIRTUAL)),
    num_ranks=st.integers(1, 5),
    num_micro_batches=st.integers(1, 40),
    deferred=st.sampled_from([0.5, 0.9]),
)
def test_most_is_that_of_the_whole_schedule(name: str, num_ranks: int, num_micro_batches: int, deferred: float) -> None:
    schedule = pipeline_step(name, num_ranks, num_micro_batches, VIRTUAL[name])
    expected = peak_held_bytes(schedule, 1.0, deferred)
    flights = Flights()
    for rank in range(num_ranks):
        moments = flights.of(name, num_ranks, VIRTUAL[name], num_micro_batches, rank=rank)
        most = max(sum(moment.whole) + deferred * sum(moment.deferred) for moment in moments)
        assert most == pytest.approx(expected[rank])
        assert max(sum(moment.whole) for moment in moments) <= max_in_flight(
            name, num_ranks, num_micro_batches, VIRTUAL[name], rank
        )


def test_a_stage_that_runs_later_is_held_less_often() -> None:
    moments = Flights().of("interleaved", 4, 2, 8, rank=0)
    assert [moment.whole for moment in moments] == [(7, 4), (8, 3)]
    assert not any(one.covers(other) for one in moments for other in moments if one is not other)
