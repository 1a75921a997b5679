"""A disk that fills up under a real run: the run goes on, or ends with a coded line and all saved that can be.

What of it needs no real run is quick in `tests/unit/train/test_failed_saves.py`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.forked_runs import ForkedRun, Nursery
from harness.signals import LAYOUTS, NUM_STEPS, Place, Whole, metrics, run_whole, settings
from harness.small_disk import SmallDisk, small_disk
from harness.stops import tensors_of
from harness.waiting import PATIENCE_S, wait_until
from shardwise.checkpoint.commit import step_of
from shardwise.checkpoint.find import survey

pytestmark = [pytest.mark.begin, pytest.mark.full]

# The checkpoints of a run that keeps all have 10 MB.
DISK_BYTES = 2**25
FILLED_AT = 6


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.fixture(scope="module")
def wholes() -> dict[str, Whole]:
    return {}


@dataclass
class FullRun:
    """A run one of whose folders is on a small disk."""

    place: Place
    disk: SmallDisk
    launcher: ForkedRun

    def said(self) -> str:
        return (self.place.folder / "said").read_text(errors="replace")

    def shows(self, pattern: str) -> bool:
        return wait_until(lambda: re.search(pattern, self.said()) is not None or self.launcher.poll() is not None)

    def fill(self) -> None:
        """Take all space, from about a step on."""
        assert self.shows(rf"\bstep {FILLED_AT}/")
        self.disk.fill()


def folders(which: str, root: Path) -> dict[str, str]:
    """The settings of the folders that are on the disk, by what fills up."""
    return {
        "run.dir": {"run.dir": str(root / "runs")},
        "checkpoint.path": {"checkpoint.path": str(root / "ck")},
        "both": {"run.dir": str(root / "runs"), "checkpoint.path": str(root / "ck")},
        "nvme_path": {"tiers.nvme_path": str(root / "swap")},
        "cache_dir": {"data.cache_dir": str(root / "cache")},
    }[which]


@pytest.fixture
def start(nursery: Nursery, wholes: dict[str, Whole], tmp_path: Path) -> Iterator[Callable[..., tuple[FullRun, Whole]]]:
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:

        def start(which: str, layout: str = "stage3", is_full: bool = False, *more: str) -> tuple[FullRun, Whole]:
            if layout not in wholes:
                wholes[layout] = run_whole(layout, tmp_path / "whole", nursery)
            whole = wholes[layout]
            place = Place(tmp_path / "run", nursery)
            if whole.model is not None:
                shutil.copytree(whole.model, place.folder / whole.model.name)
            if is_full:
                disk.fill()
            given = [f"{key}={value}" for key, value in folders(which, disk.root).items()]
            launcher = place.start([*settings(layout, "ck"), *given, *more], "said")
            return FullRun(place, disk, launcher), whole

        yield start


def whole_steps(root: Path, whole: Whole) -> list[int]:
    """The steps that a folder has, each of which must be whole and to the bit."""
    found = survey(root)
    assert [each.damage for each in found if each.damage] == []
    for each in found:
        assert tensors_of(each.folder) == whole.saved[step_of(each.folder) or 0]
    assert not list(root.glob("*.partial"))
    return sorted(step_of(each.folder) or 0 for each in found)


def check_no_riddle(run: FullRun) -> None:
    logs = [path.read_text(errors="replace") for path in run.disk.root.glob("runs/*/rank-*.log")]
    assert not any("Traceback" in text for text in (run.said(), *run.place.logs(), *logs)), run.said()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_folder_of_the_run_costs_no_step_and_no_checkpoint(start, layout: str) -> None:
    run, whole = start("run.dir", layout)
    run.fill()
    assert run.launcher.wait(PATIENCE_S) == 0, run.said()
    assert whole_steps(run.place.folder / "ck", whole) == list(range(2, NUM_STEPS + 1, 2))
    assert len(re.findall("^not recorded from now on", run.said(), re.MULTILINE)) == 1
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in run.said()
    check_no_riddle(run)


@pytest.mark.parametrize("which", ["checkpoint.path", "both"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_saves_again_once_there_is_space(start, layout: str, which: str) -> None:
    run, whole = start(which, layout)
    run.fill()
    assert run.shows("not saved: .*the run goes on")
    run.disk.make_space()
    assert run.launcher.wait(PATIENCE_S) == 0, run.said()
    steps = whole_steps(run.disk.root / "ck", whole)
    assert {2, 4, NUM_STEPS} <= set(steps), run.said()
    # A disk may fill up between a checkpoint and its name in `latest`.
    assert len(steps) < NUM_STEPS // 2 + ("which is whole" in run.said()), run.said()
    check_no_riddle(run)


@pytest.mark.parametrize("which", ["checkpoint.path", "both"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_that_stays_full_ends_the_run_with_what_was_saved(start, layout: str, which: str) -> None:
    run, whole = start(which, layout)
    run.fill()
    assert run.launcher.wait(PATIENCE_S) == 1, run.said()
    steps = whole_steps(run.disk.root / "ck", whole)
    assert steps[:2] == [2, 4]
    assert steps[-1] < NUM_STEPS
    assert re.search(
        rf"checkpoint of step {NUM_STEPS} failed on rank \d: .*\[(disk-full|too-little-space)\]", run.said()
    )
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in run.said()
    check_no_riddle(run)
    line = re.search(rf"to go on from step-{steps[-1]:08d}: shardwise train (.*)", run.said())
    assert line, run.said()
    run.disk.make_space()
    assert run.place.start(shlex.split(line.group(1)), "said-2").wait(PATIENCE_S) == 0
    assert whole_steps(run.disk.root / "ck", whole)[-1] == NUM_STEPS
    runs = sorted((run.disk.root / "runs").iterdir()) if which == "both" else run.place.runs()
    assert metrics(runs[-1])[NUM_STEPS] == whole.metrics[NUM_STEPS]


def test_an_export_that_the_disk_refuses_is_an_error_after_all_is_saved_and_shown(start) -> None:
    run, whole = start("run.dir", "lora", False, "checkpoint.export=true")
    run.fill()
    assert run.launcher.wait(PATIENCE_S) == 1, run.said()
    assert whole_steps(run.place.folder / "ck", whole)[-1] == NUM_STEPS
    assert re.search(r"the export to \S+ failed on rank 0: .*\[disk-full\]", run.said())
    assert "held-out loss" in run.said()
    check_no_riddle(run)


@pytest.mark.parametrize("which", ["run.dir", "both"])
def test_a_signal_to_a_run_on_a_full_disk_ends_it_as_ever(start, which: str) -> None:
    run, whole = start(which)
    run.fill()
    run.shows("not recorded|not saved")
    os.kill(run.launcher.pid, signal.SIGTERM)
    code = run.launcher.wait(PATIENCE_S)
    root = (run.place.folder if which == "run.dir" else run.disk.root) / "ck"
    assert code in ((143,) if which == "run.dir" else (1, 143)), run.said()
    assert whole_steps(root, whole)[:2] == [2, 4]
    assert "to go on from" in run.said()
    check_no_riddle(run)


def test_a_full_disk_of_the_tier_ends_the_run_with_what_was_saved(start) -> None:
    run, whole = start("nvme_path", "nvme")
    run.fill()
    code = run.launcher.wait(PATIENCE_S)
    steps = whole_steps(run.place.folder / "ck", whole)
    assert steps[:2] == [2, 4]
    assert code == (0 if steps[-1] == NUM_STEPS else 1), run.said()
    check_no_riddle(run)


@pytest.mark.parametrize("which", ["run.dir", "checkpoint.path", "both", "nvme_path", "cache_dir"])
def test_a_disk_that_is_full_at_the_start_is_one_coded_line(start, which: str) -> None:
    start_s = time.monotonic()
    run, _ = start(which, "nvme", True)
    code = run.launcher.wait(PATIENCE_S)
    assert code in (1, 2), run.said()
    assert re.search(r"\[[a-z-]+\]$", run.said(), re.MULTILINE), run.said()
    assert time.monotonic() - start_s < PATIENCE_S
    check_no_riddle(run)
