"""Signals to one process of a real run at named moments: all processes end, the end is named, and no save is lost.

The whole campaign is `python -m harness.stops` in the folder `tests`; its table stands in docs/elastic.md.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest

from harness.stops import (
    MARGIN_S,
    NUM_STEPS,
    TIMEOUT_S,
    Stop,
    all_stops,
    differing,
    resume,
    run_stopped,
    run_whole,
    stored,
)
from harness.warm_python import WarmPython
from shardwise.checkpoint.manifest import StoredTensor

pytestmark = [pytest.mark.begin, pytest.mark.usefixtures("warm_python")]

# Signals to the launcher, and its own stop, are quick in `test_launcher`.
QUICK = (Stop("STOP", "0", "save"),)
# What a busy machine adds: of processes that end, not of those that wait.
_BUSY_S = 30.0


@pytest.fixture(scope="module")
def whole(warm_programs: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[StoredTensor]]:
    with patch.object(subprocess, "Popen", warm_programs.popen()):
        return run_whole(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    "stop",
    [pytest.param(each, id=str(each), marks=() if each in QUICK else pytest.mark.full) for each in all_stops()],
)
def test_whatever_is_stopped_all_end_and_what_was_saved_is_whole(
    stop: Stop, whole: dict[int, list[StoredTensor]], tmp_path: Path
) -> None:
    end = run_stopped(stop, tmp_path)
    assert end.leftovers == 0
    assert end.names(stop.victim), end.said
    assert end.took_s < TIMEOUT_S + MARGIN_S + _BUSY_S
    assert set(end.committed[0]) <= set(end.committed[1])
    assert differing(tmp_path, whole) == []


@pytest.mark.full
@pytest.mark.parametrize("stop", [Stop("STOP", "0", "save"), Stop("KILL", "1", "final save")], ids=str)
def test_the_same_command_goes_on_to_the_same_end(
    stop: Stop, whole: dict[int, list[StoredTensor]], tmp_path: Path
) -> None:
    run_stopped(stop, tmp_path)
    assert resume(tmp_path)[0] == NUM_STEPS
    assert differing(tmp_path, whole) == []
    assert stored(tmp_path, NUM_STEPS) == whole[NUM_STEPS]
