"""Of strategies drawn at random, the planner's model ranks memory as the engine's own peaks do, and counts its states.

The engine runs on fake tensors (`simulate`), with the collectives that it has on GPUs.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pytest

from harness.engine_memory import Sample, drawn

ROLES: Final = {"param": "params", "grad": "grads", "optimizer": "optimizer"}
# Of 97 samples the median error was 4 %, that of nine in ten below 11 %, the largest 51 %.
MEDIAN: Final = 0.08
WORST: Final = 0.6
APART: Final = 0.15


@dataclass(frozen=True)
class Peaks:
    """What the fullest rank's tensors take, in bytes."""

    sample: Sample
    estimated: float
    simulated: float

    @property
    def error(self) -> float:
        return abs(self.estimated / self.simulated - 1)


def peaks_of(sample: Sample) -> Peaks:
    """The peaks; the states of each rank agree to the byte."""
    ranks = sample.estimated().ranks
    simulations = [sample.simulated(each.pipeline_rank) for each in ranks]
    for estimated, simulation in zip(ranks, simulations, strict=True):
        assert {role: estimated.peak[name] for role, name in ROLES.items()} == simulation.states_bytes
    return Peaks(
        sample,
        max(each.peak_bytes - each.bytes_of("overhead", "rounding") for each in ranks),
        max(each.peak.peak_bytes for each in simulations),
    )


def share_in_order(every: Sequence[Peaks]) -> float:
    """Of the pairs whose simulated peaks are further apart than `APART`, the share that the planner orders so too."""
    pairs = [sorted(pair, key=lambda each: each.simulated) for pair in itertools.combinations(every, 2)]
    apart = [(low, high) for low, high in pairs if high.simulated > (1 + APART) * low.simulated]
    return sum(low.estimated < high.estimated for low, high in apart) / len(apart)


def check(every: Sequence[Peaks], least_in_order: float) -> None:
    for each in every:
        print(f"{each.estimated / each.simulated:.2f} {each.sample}")
    errors = [each.error for each in every]
    assert statistics.median(errors) <= MEDIAN
    assert max(errors) <= WORST
    assert share_in_order(every) >= least_in_order


@pytest.mark.full
def test_small_jobs_are_ranked_as_the_engine_would() -> None:
    check([peaks_of(sample) for sample in drawn(seed=10, num_samples=8)], least_in_order=1.0)


@pytest.mark.full
def test_many_small_jobs_are_ranked_as_the_engine_would() -> None:
    check([peaks_of(sample) for sample in drawn(seed=7, num_samples=100)], least_in_order=0.98)
