"""Signals at random moments: no run hangs, none loses a checkpoint that it has announced, all resume to the bit."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from harness.forked_runs import Nursery
from harness.signals import LAYOUTS, Chain, Whole, drawn, run_whole
from harness.warm_python import WarmPython

pytestmark = pytest.mark.begin

# A chain has about one and a half signals a leg: 200 in all.
SEEDS, NUM_LEGS = range(1, 5), 6


@pytest.fixture(scope="module")
def nursery(pytestconfig: pytest.Config, warm_programs: WarmPython) -> Iterator[Nursery]:
    nursery = Nursery(with_hugging_face=pytestconfig.getoption("--full"))
    with patch.object(subprocess, "Popen", warm_programs.popen()):
        nursery.__enter__()
    yield nursery
    nursery.__exit__(None, None, None)


@pytest.fixture(scope="module")
def wholes(nursery: Nursery) -> dict[str, Whole]:
    """Filled as layouts are met, with the nursery that makes them."""
    return {}


def test_the_whole_campaign_has_two_hundred_signals() -> None:
    shots = [shot for layout in LAYOUTS for seed in SEEDS for leg in drawn(layout, seed, NUM_LEGS) for shot in leg]
    assert len(shots) >= 200
    assert {shot.signum for shot in shots} == {"KILL", "TERM", "STOP"}
    assert {shot.moment for shot in shots} == {"start", "step", "save", "end"}


@pytest.mark.parametrize(
    ("layout", "seed", "num_legs"),
    [
        pytest.param("stage3", 0, 2, id="stage3-quick"),
        *(
            pytest.param(layout, seed, NUM_LEGS, id=f"{layout}-{seed}", marks=pytest.mark.full)
            for seed in SEEDS
            for layout in LAYOUTS
        ),
    ],
)
def test_whatever_signals_come_nothing_is_lost_and_the_run_resumes_to_the_bit(
    layout: str,
    seed: int,
    num_legs: int,
    nursery: Nursery,
    wholes: dict[str, Whole],
    tmp_path: Path,
) -> None:
    if layout not in wholes:
        wholes[layout] = run_whole(layout, tmp_path / "whole", nursery)
    judged = Chain(layout, seed, tmp_path / "chain", wholes[layout], nursery).run(num_legs)
    assert judged.sent
    assert judged.faults == {}
