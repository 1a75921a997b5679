"""Activations in flight, by hand: from a forward to the end of its backward, or of its first half."""

import pytest

from harness.zero_schedules import num_in_flight
from shardwise.schedule import RECIPES, Schedule, lower
from shardwise.schedule.formulas import max_in_flight, moments_in_flight


@pytest.mark.parametrize(
    ("row", "peak"),
    [
        ("0F0 0F1 0B0 0B1", 2),
        ("0F0 0B0 0F1 0B1", 1),
        ("0F0 0I0 0F1 0W0 0I1 0W1", 1),  # what is kept for the weight's gradient counts as deferred
        ("0F0 0I0 0W0 0F1 0I1 0W1", 1),
        ("0F0 1F0 1B0 0B0", 2),  # of each stage on the rank
        ("0F0 0F1", 1),  # an evaluation keeps nothing from one to the next
        ("0F0[a] 0F0[b] 0B0[b] 0F1[a] 0F1[b] 0B0[a] 0B1[b] 0B1[a]", 2),
        ("0F0[a] 0F0[b] 0B0[b] 0B0[a] 0F1[a] 0F1[b] 0B1[b] 0B1[a]", 1),
        ("0STEP", 0),
    ],
)
def test_peak_of_a_row(row: str, peak: int) -> None:
    assert num_in_flight(Schedule.parse(f"rank 0: {row}\nrank 1:")) == (peak, 0)


def test_lowering_changes_nothing() -> None:
    schedule = Schedule.parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1")
    assert num_in_flight(lower(schedule, unshard_for_use=True)) == num_in_flight(schedule) == (2, 1)


@pytest.mark.parametrize(
    ("schedule", "held"),
    [
        ("1f1b", [(0, 3, 0)]),
        ("gpipe", [(0, 8, 0)]),
        # A forward ends with p - i micro-batches in flight, while i gradients of weights are still to come.
        ("zb-h1", [(-1, 2, 1), (-1, 3, 0), (0, 3, 0), (0, 3, 1)]),
    ],
)
def test_moments_are_those_of_the_schedule(schedule: str, held: list[tuple[int, ...]]) -> None:
    assert set(moments_in_flight(schedule, 4, 8, 1, rank=1)) >= set(held)


@pytest.mark.parametrize("schedule", sorted(RECIPES))
@pytest.mark.parametrize("num_micro_batches", [1, 4, 11, 64])
def test_the_most_at_a_moment_is_the_closed_form(schedule: str, num_micro_batches: int) -> None:
    recipe = RECIPES[schedule]
    virtual_stages = 3 if recipe.is_interleaved else recipe.min_virtual_stages
    for rank in range(4):
        moments = moments_in_flight(schedule, 4, num_micro_batches, virtual_stages, rank)
        most = max(sum(held[:virtual_stages]) for _, *held in moments)
        assert most == max_in_flight(schedule, 4, num_micro_batches, virtual_stages, rank)
