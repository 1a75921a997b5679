"""A save, or a file of the run, that the disk refuses while a run goes on."""

import errno
import os
import re
import shutil
from dataclasses import replace

import pytest

from harness.faults import Moment, once_at, watching
from shardwise.checkpoint.commit import read_manifest, step_folders, step_of
from shardwise.checkpoint.manifest import CheckpointError
from shardwise.launch.environment import lone_rank
from shardwise.report.console import LastingStream
from shardwise.train import metrics as sinks
from shardwise.train import rank_watch, recorder, recording, run

FILE = "rank-*"


def saved(folder):
    return sorted(step_of(each) for each in step_folders(folder / "checkpoints") if read_manifest(each))


def refusing(number, moment):
    def refuse():
        raise OSError(number, os.strerror(number))

    return watching(once_at(moment, refuse))


@pytest.mark.quick(2)
@pytest.mark.parametrize("background", [True, False], ids=["background", "at once"])
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (errno.ENOSPC, Moment("posix_fallocate", FILE)),
        (errno.EDQUOT, Moment("writev", FILE)),
        (errno.EIO, Moment("fsync", FILE)),
        (errno.EROFS, Moment("mkdir", "step-*")),
        (errno.ENOSPC, Moment("staging")),
    ],
    ids=lambda value: str(value),
)
def test_a_run_goes_on_after_a_save_that_the_disk_refuses(train, tmp_path, capsys, number, moment, background):
    """A failure in the background may be found in step 3 or 4, or before the save of step 4."""
    with refusing(number, moment):
        code, shown = train(steps=6, checkpoint={"every": 2, "background": background})
    assert code == 0
    if moment.call == "staging" and not background:  # then there is no copy
        assert saved(tmp_path / "run") == [2, 4, 6]
    else:
        assert saved(tmp_path / "run") == [4, 6]
        said = r"^not saved: checkpoint of step 2 failed .*; the run goes on, and saves after step [46]$"
        assert len(re.findall(said, shown, re.MULTILINE)) == 1
    assert capsys.readouterr().err == ""


def test_a_folder_that_vanishes_is_made_again_by_the_next_save(train, tmp_path):
    place = tmp_path / "run" / "checkpoints"
    with watching(once_at(Moment("fsync", FILE), lambda: shutil.rmtree(place))):
        code, shown = train(steps=4, checkpoint={"every": 2})
    assert code == 0
    assert "not saved: checkpoint of step 2 failed" in shown
    assert saved(tmp_path / "run") == [4]


def test_a_key_lets_a_failed_save_end_the_run(train, tmp_path, capsys):
    with refusing(errno.ENOSPC, Moment("posix_fallocate", FILE)):
        code, shown = train(steps=6, checkpoint={"every": 2, "background": False, "on_failure": "stop"})
    assert code == 1
    assert "step 3/6" not in shown
    assert "checkpoint of step 2 failed on rank 0" in capsys.readouterr().err


@pytest.mark.parametrize("checkpoint", [{"every": 2, "at_end": False, "background": True}, {"every": 4}])
def test_a_run_whose_last_save_fails_ends_with_an_error_and_its_figures(train, tmp_path, capsys, checkpoint):
    nth = 1 if checkpoint["every"] == 2 else 0
    with refusing(errno.ENOSPC, Moment("posix_fallocate", FILE, nth=nth)):
        code, shown = train(steps=4, checkpoint=checkpoint)
    assert code == 1
    assert "held-out loss" in shown
    assert "checkpoint of step 4 failed on rank 0" in capsys.readouterr().err
    assert saved(tmp_path / "run") == ([2] if nth else [])
    assert ("to go on" in shown) == bool(nth), "what was saved before is what one goes on from"


class FullDisk:
    """Refuses what a run writes in its own folder from a step on."""

    def __init__(self, monkeypatch) -> None:
        def refuse(*_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        for module in (recorder, rank_watch, recording):
            monkeypatch.setattr(module, "write_whole", refuse)
        monkeypatch.setattr(sinks, "to_json_line", refuse)


def test_a_full_folder_of_the_run_is_said_once_and_costs_no_step_and_no_checkpoint(train, tmp_path, monkeypatch):
    see, full = recorder.RunRecorder.see, []

    def seen(self, record):
        if not full:
            full.append(FullDisk(monkeypatch))
        see(self, record)

    monkeypatch.setattr(recorder.RunRecorder, "see", seen)
    code, shown = train(steps=4, record_timeline=2, sinks=["jsonl"], checkpoint={"every": 2})
    assert code == 0
    assert "step 4/4" in shown
    assert saved(tmp_path / "run") == [2, 4]
    lines = [line for line in shown.splitlines() if line.startswith("not ")]
    assert sum("metrics" in line or "jsonl" in line for line in lines) == 1
    assert sum("timeline.json" in line for line in lines) == 1
    assert len(set(lines)) == len(lines), "each is said once"
    assert "not recorded" in shown[shown.index("held-out loss") :], "and at the end"


def test_a_stdout_that_fails_is_left_alone(caplog):
    class Full:
        num_calls = 0

        def write(self, text):
            Full.num_calls += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def isatty(self):
            return False

    stream = LastingStream(Full())
    assert [stream.write("a"), stream.write("bc")] == [1, 2]
    assert Full.num_calls == 1
    assert not stream.isatty()
    assert "No space left" in caplog.text


def test_the_last_line_of_a_log_on_a_full_disk_is_why_the_rank_ends(tmp_path, monkeypatch, capsys):
    """It could not be added, and the launcher would quote what came before."""
    log = tmp_path / "rank-0.log"
    log.write_text("step 7\n" * 20 + "why it ends co")
    monkeypatch.setattr(run, "is_full", lambda folder: True)
    env = replace(lone_rank(), launcher="local")
    assert run._fail(CheckpointError("disk-full", "no space"), tmp_path, env, lambda: "") == 1
    assert log.read_text().startswith("step 7\n" * 10)
    assert log.read_text().endswith("\nno space [disk-full]\n")
