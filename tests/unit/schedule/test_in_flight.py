"""Activations in flight, by hand: from a forward to the end of its backward, or of its first half."""

import pytest

from shardwise.schedule import Schedule, lower, num_in_flight


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
