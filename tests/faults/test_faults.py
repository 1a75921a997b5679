"""Killed with SIGKILL at any moment: a run that saves often loses what it did since its last save, no more.

A run of two ranks saves every second step. A rank is killed at a chosen moment; the window in which it dies is read off
the disk; the run is started again, goes on from what it finds, and must end as a run that nothing happened to: with the
loss, and the checksums of all states, to the last bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from harness.faults import (
    KEEP_LAST,
    NUM_RANKS,
    NUM_STEPS,
    SAVE_EVERY,
    WINDOWS,
    Kill,
    Moment,
    Stage,
    Whole,
    Window,
    check_tidy,
    run_to_end,
    stage_on_disk,
    stored,
)
from harness.pool import RankError, WorkerPool
from shardwise.checkpoint.commit import step_folders, step_of

NUM_POINTS = 16
NUM_WRITES = 10

FILE, MANIFEST, PARTIAL, FINAL, LATEST, DELETED = (
    "rank-*", "manifest.json", "step-*.partial", "step-????????", "latest", "step-*.deleted"
)  # fmt: skip
ROOT = "checkpoints"

# By window: the moments, each with the stage at which the disk is then. Those of every rank; those of rank 0.
OF_ALL: dict[Window, list[tuple[Moment, Stage]]] = {
    "step": [
        (Moment("forward", "Linear", "after", 1), "nothing"),
        (Moment("forward", "Model", "after"), "nothing"),
        (Moment("backward", "Model"), "nothing"),
        (Moment("backward", "Linear", nth=1), "nothing"),
        (Moment("optimizer"), "nothing"),
        (Moment("optimizer", when="after"), "nothing"),
        (Moment("staging"), "nothing"),
        (Moment("staging", when="after"), "nothing"),
    ],
    "save": [
        (Moment("posix_fallocate", FILE), "files"),
        (Moment("posix_fallocate", FILE, "after"), "files"),
        (Moment("writev", FILE), "files"),
        (Moment("writev", FILE, "after"), "files"),
        (Moment("fsync", FILE), "files"),
        (Moment("fsync", FILE, "after"), "files"),
    ],
    "rename": [],
    "latest": [],
}
OF_RANK_0: dict[Window, list[tuple[Moment, Stage]]] = {
    "step": [(Moment("mkdir", PARTIAL), "nothing")],
    "save": [
        (Moment("mkdir", PARTIAL, "after"), "files"),
        (Moment("write_text", MANIFEST), "files"),
        (Moment("write_text", MANIFEST, "half"), "files"),
    ],
    "rename": [
        (Moment("fsync", MANIFEST), "manifest"),
        (Moment("fsync", MANIFEST, "after"), "manifest"),
        (Moment("fsync", PARTIAL), "manifest"),
        (Moment("fsync", PARTIAL, "after"), "manifest"),
        (Moment("rename", FINAL), "manifest"),
    ],
    "latest": [
        (Moment("rename", FINAL, "after"), "renamed"),
        (Moment("fsync", ROOT), "renamed"),
        (Moment("fsync", ROOT, "after"), "renamed"),
        (Moment("write_text", f"{LATEST}.partial"), "renamed"),
        (Moment("write_text", f"{LATEST}.partial", "half"), "renamed"),
        (Moment("fsync", f"{LATEST}.partial"), "renamed"),
        (Moment("fsync", f"{LATEST}.partial", "after"), "renamed"),
        (Moment("replace", LATEST), "renamed"),
        (Moment("replace", LATEST, "after"), "latest"),
        (Moment("fsync", ROOT, "before", 1), "latest"),
        (Moment("fsync", ROOT, "after", 1), "latest"),
        (Moment("rename", DELETED), "latest"),
        (Moment("rename", DELETED, "after"), "deleting"),
        (Moment("unlink", FILE), "deleting"),
        (Moment("unlink", MANIFEST, "after"), "deleting"),
        (Moment("rmdir", DELETED), "deleting"),
    ],
}


def kills(window: Window) -> Iterator[tuple[Kill, Stage]]:
    """`NUM_POINTS` random moments of a window, as many of them different as there are; both ranks die in turn."""
    draw = random.Random(window)
    both = [(actor, *each) for each in OF_ALL[window] for actor in range(NUM_RANKS)]
    moments = both + [(0, *each) for each in OF_RANK_0[window]]
    draw.shuffle(moments)
    for number in range(NUM_POINTS):
        actor, moment, stage = moments[number % len(moments)]
        if moment.call == "writev":
            moment = replace(moment, nth=draw.randrange(NUM_WRITES))
        is_deleting = stage == "deleting" or moment.target == DELETED
        first_save = KEEP_LAST + 1 if is_deleting else 1
        step = SAVE_EVERY * draw.randint(first_save, NUM_STEPS // SAVE_EVERY - 1)
        if window == "step" and moment.call not in ("staging", "mkdir"):
            step += draw.randrange(SAVE_EVERY)
        is_background = moment.call == "staging" or bool(number // 2 % 2)
        survivor_s = draw.choice([0.0, 0.02, 0.2, None if number % 8 == 7 else 0.1])
        yield Kill(window, moment, actor, number % NUM_RANKS, step, is_background, survivor_s), stage


def campaign() -> Iterator[Any]:
    for window in get_args(Window):
        for number, (kill, stage) in enumerate(kills(window)):
            # One of each rank, and with either way to save.
            marks = () if number in (2, 5) else (pytest.mark.full,)
            yield pytest.param(kill, stage, id=f"{number}-{kill}", marks=marks)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("kill", "stage"), list(campaign()))
def test_a_killed_run_loses_only_what_came_after_its_last_save(
    ranks: WorkerPool, tmp_path: Path, whole_run: Whole, kill: Kill, stage: Stage
) -> None:
    root = tmp_path / ROOT
    with pytest.raises(RankError, match="died"):
        ranks(NUM_RANKS).run(run_to_end, root, kill.is_background, kill)
    assert (tmp_path / f"{ROOT}.seen").read_text() == stage
    assert WINDOWS[stage] == kill.window
    if kill.victim == 0:  # rank 1 alone changes nothing
        assert stage_on_disk(root, kill.step) == stage
    committed = max((step_of(each) or 0 for each in step_folders(root)), default=0)
    # The last save before the moment has surely been committed, and that of the moment once it has its name.
    last_save = (kill.step - 1) // SAVE_EVERY * SAVE_EVERY
    assert committed >= (kill.step if kill.window == "latest" else last_save)
    ended = ranks(NUM_RANKS).run(run_to_end, root, kill.is_background)[0]
    assert (ended.first_step, ended.damaged) == (committed, ())
    assert ended.loss == whole_run.end.loss
    assert stored(root) == whole_run.stored
    check_tidy(root)
