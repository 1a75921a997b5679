"""`shardwise timeline`: from a config to a drawing, with a recorded run under it."""

import json
from pathlib import Path

import pytest

from harness.refusals import refused
from shardwise.cli import main as cli
from shardwise.cli.timeline import OpTimes, mean_times
from shardwise.config.resolve import Config
from shardwise.report.chrome_trace import read_chrome_trace
from shardwise.report.planned import PlanNote, num_micro_batches_of
from shardwise.schedule import ActionKind, Schedule, simulate

GPIPE = ["mesh.pp=2", "pipeline.schedule=gpipe", "batch.accumulation=2"]


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def test_colours_only_where_they_are_wanted(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = {}
    for setting in ("", "FORCE_COLOR", "NO_COLOR"):
        if setting:
            monkeypatch.setenv(setting, "1")
        assert cli.main(["timeline", *GPIPE]) == 0
        shown[setting] = "48;5" in capsys.readouterr().out
    assert shown == {"": False, "FORCE_COLOR": True, "NO_COLOR": False}


def test_files_are_written_instead_of_text_unless_both_are_asked_for(capsys):
    files = ["--html", "plan.html", "--chrome-trace", "plan.json"]
    assert cli.main(["timeline", *GPIPE, *files]) == 0
    assert "rank 1" not in capsys.readouterr().out
    assert "gpipe" in Path("plan.html").read_text()
    planned = read_chrome_trace(json.loads(Path("plan.json").read_text()))
    assert [str(each.action) for each in planned if each.rank == 1 and each.action.kind is ActionKind.BACKWARD] == [
        "1B0",
        "1B1",
    ]
    assert cli.main(["timeline", *GPIPE, *files, "--text"]) == 0
    assert "rank 1" in capsys.readouterr().out


def test_mean_times_are_those_of_a_rank():
    run = Schedule.parse("rank 0: 0F0 1F0 1I0 0I0 1W0 0W0")
    seconds = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD_INPUT: 2.0, ActionKind.BACKWARD_WEIGHT: 3.0}
    times = mean_times(simulate(run, lambda rank, action: seconds[action.kind]))
    assert times == OpTimes(2.0, 4.0, 6.0)
    whole = Schedule.parse("rank 0: 0F0[a] 0F0[b] 0RECOMPUTE0[b] 0B0[b] 0B0[a] 0STEP\nrank 1: 1F0 1B0")
    assert mean_times(simulate(whole, lambda rank, action: 4.0)) == OpTimes(6.0, 5.0, 3.0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], 1),
        (["batch.accumulation=6"], 6),
        (["batch.global_size=12"], 1),
        (["batch.global_size=24", "batch.micro_size=2", "mesh.dp_shard=3"], 4),
        (["batch.global_size=24", "batch.micro_size=2", "mesh.dp_shard=3", "mesh.dp_replicate=2"], 2),
    ],
)
def test_micro_batches_follow_from_the_config(settings, expected):
    assert num_micro_batches_of(Config().override(settings)) == expected


def test_micro_batches_that_depend_on_the_run_are_asked_for():
    config = Config().override(["batch.global_size=24", "batch.micro_size=2"])
    with refused("micro-batches-unknown", "mesh.dp_shard=N", "batch.accumulation=N"):
        num_micro_batches_of(config)


def test_a_plans_own_times_are_drawn_unless_its_pipeline_was_changed(capsys):
    note = PlanNote("h100:8", 2, 3, OpTimes(0.25, 0.25, 0.5, 0.0))
    text = f"{note.line}\n[mesh]\npp = 2\n[batch]\naccumulation = 3\n"
    Path("plan.toml").write_text(text)

    def makespan_s(*settings: str) -> float:
        assert cli.main(["timeline", "plan.toml", *settings, "--chrome-trace", "plan.json"]) == 0
        return max(each.end_s for each in read_chrome_trace(json.loads(Path("plan.json").read_text())))

    assert makespan_s() == pytest.approx((3 + 1) * 1.0)
    assert makespan_s("--forward-s", "1") == pytest.approx((3 + 1) * 1.75)
    assert makespan_s("batch.accumulation=4") == pytest.approx((4 + 1) * 3.0)
    Path("plan.toml").write_text(text.replace("0.25", "0.2x"))
    assert makespan_s() == pytest.approx((3 + 1) * 3.0)
