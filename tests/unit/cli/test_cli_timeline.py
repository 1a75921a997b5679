"""`shardwise timeline`: from a config to a drawing, with a recorded run under it."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.refusals import refused
from shardwise.cli import main as cli
from shardwise.cli.timeline import OpTimes, mean_times, num_micro_batches_of
from shardwise.config.resolve import Config
from shardwise.report.chrome_trace import chrome_trace, read_chrome_trace
from shardwise.schedule import ActionKind, Schedule, simulate

GPIPE = ["mesh.pp=2", "pipeline.schedule=gpipe", "batch.accumulation=2"]


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def test_the_plan_is_drawn_in_the_terminal(capsys):
    Path("my.toml").write_text('[mesh]\npp = 2\n[pipeline]\nschedule = "1f1b"\n[batch]\naccumulation = 8\n')
    assert cli.main(["timeline", "my.toml", *GPIPE]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "gpipe, planned: 2 ranks, 2 micro-batches"
    assert lines[2:5] == [
        "rank 0  67 %  F0    F1    ··················B0          B1",
        "rank 1  67 %  ······F0    F1    B0          B1          ············",
        "bubble        33.3 % of 9 s; within a rank's span 3 s, by the formula 3 s",
    ]


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
    files = ["--svg", "plan.svg", "--html", "plan.html", "--chrome-trace", "plan.json"]
    assert cli.main(["timeline", *GPIPE, *files]) == 0
    assert capsys.readouterr().out == "wrote plan.svg\nwrote plan.html\nwrote plan.json\n"
    assert ElementTree.parse("plan.svg").getroot().tag.endswith("svg")
    assert "gpipe, planned: 2 ranks, 2 micro-batches" in Path("plan.html").read_text()
    planned = read_chrome_trace(json.loads(Path("plan.json").read_text()))
    assert [str(each.action) for each in planned if each.rank == 1 and each.action.kind is ActionKind.BACKWARD] == [
        "1B0",
        "1B1",
    ]
    assert cli.main(["timeline", *GPIPE, *files, "--text"]) == 0
    assert "rank 1  67 %" in capsys.readouterr().out


def test_a_recorded_run_is_drawn_under_a_plan_with_its_times(capsys):
    run = Schedule.parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1")
    timed = simulate(run, lambda rank, action: 0.02 if action.kind is ActionKind.FORWARD else 0.03)
    Path("run.json").write_text(json.dumps(chrome_trace(timed)))
    assert cli.main(["timeline", *GPIPE, "--recorded", "run.json"]) == 0
    out = capsys.readouterr().out
    assert out.index("gpipe, planned") < out.index("recorded: run.json")
    assert "33.3 % of 150 ms; within a rank's span 50 ms, by the formula 50 ms" in out
    rows = [line for line in out.splitlines() if line.startswith("rank 1")]
    assert rows[0] == rows[1]
    assert cli.main(["timeline", *GPIPE, "--recorded", "run.json", "--forward-s", "0.03"]) == 0
    assert "33.3 % of 180 ms" in capsys.readouterr().out


def test_virtual_stages_share_a_ranks_time_and_transfers_cost(capsys):
    settings = ["mesh.pp=2", "pipeline.schedule=interleaved", "pipeline.virtual_stages=2", "batch.accumulation=4"]
    assert cli.main(["timeline", *settings]) == 0
    # 4 micro-batches of 3 s, and a bubble of (2 - 1) x 3 s / 2.
    assert "of 13.5 s; within a rank's span 1.5 s, by the formula 1.5 s" in capsys.readouterr().out
    assert cli.main(["timeline", *GPIPE, "--transfer-s", "0.5"]) == 0
    # Free transfers are what the formula is about.
    assert "40.0 % of 10 s; within a rank's span 4 s\n" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pipeline.shedule=gpipe"], "did you mean pipeline.schedule?"),
        (["--forward-s", "-1"], "--forward-s -1 is no duration"),
        (["--recorded", "nowhere.json"], "--recorded nowhere.json: cannot read nowhere.json"),
        (["--recorded", "text.json"], "--recorded text.json: text.json is not valid JSON"),
        (["--recorded", "other.json"], "--recorded other.json: none of the 1 events"),
        (["pipeline.schedule=interleaved"], "pipeline.virtual_stages=1"),
    ],
)
def test_what_the_user_can_mend_is_one_line(arguments, message, capsys):
    Path("text.json").write_text("no JSON")
    Path("other.json").write_text('{"traceEvents": [{"ph": "X", "name": "mm"}]}')
    assert cli.main(["timeline", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_file_that_cannot_be_written_is_named(capsys):
    assert cli.main(["timeline", "--svg", "nowhere/plan.svg"]) == 1
    assert (
        capsys.readouterr().err
        == "shardwise: cannot write nowhere/plan.svg: No such file or directory; give the path of a file\n"
    )
