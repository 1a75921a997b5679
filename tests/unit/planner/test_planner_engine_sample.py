"""Of strategies drawn at random, the planner says what the engine's memory tracker counts, at rest and at the peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from harness.engine_memory import Sample, drawn

ROLES: Final = {"param": "params", "grad": "grads", "optimizer": "optimizer"}


def errors_of(sample: Sample) -> Iterator[float]:
    """Yield the relative error of each rank's peak; its states agree to the byte."""
    print(sample)
    for estimated in sample.estimated().ranks:
        simulation = sample.simulated(estimated.pipeline_rank)
        error = estimated.peak_bytes / simulation.peak.peak_bytes - 1
        print(f"rank {estimated.pipeline_rank}, {error:+.1%}: {dict(estimated.peak)}")
        print(f"    simulated: {dict(simulation.peak.peak_live_bytes)}")
        assert {role: estimated.peak[name] for role, name in ROLES.items()} == simulation.states_bytes
        yield error


@pytest.mark.quick(1)
@pytest.mark.parametrize("sample", drawn(seed=10, num_samples=5), ids=range(5))
def test_each_rank_holds_at_rest_and_at_the_peak_what_the_planner_says(sample: Sample) -> None:
    assert all(abs(error) <= 0.05 for error in errors_of(sample))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 112))
def test_most_of_many_ranks_are_within_a_twentieth(seed: int) -> None:
    errors = [error for sample in drawn(seed, 12) for error in errors_of(sample)]
    assert sum(abs(error) <= 0.05 for error in errors) >= 0.85 * len(errors)
