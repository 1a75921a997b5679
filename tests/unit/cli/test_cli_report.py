"""`shardwise report` of plans, and `--html` of the other commands: the same page."""

import json
from pathlib import Path

import pytest

from harness.browser import ask_page
from shardwise.cli import main as cli
from shardwise.report.planned import PlanNote

JOB = ["--model", "llama-7b", "--cluster", "h100:16", "--global-batch", "64", "--seq", "2048"]
PINS = ["mesh.pp=4", "mesh.tp=2", "mesh.dp_shard=2", "mesh.cp=1", "mesh.dp_replicate=1"]
SEEN = """return {
  sections: [...document.querySelectorAll("section")].map((each) => each.id),
  empty: document.querySelectorAll(".empty").length,
  tiles: [...document.querySelectorAll(".tile")].map((each) => each.innerText.split("\\n").slice(0, 2)),
  ranks: document.querySelectorAll("#memory .rank").length,
  panels: (window.report.timelines?.panels ?? []).map((panel) => [panel.ranks.length, panel.makespan]),
};"""


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def planned(tmp_path, capsys) -> Path:
    files = ["--write", "plan.toml", "--json", "plan.json", "--html", "plan.html"]
    assert cli.main(["plan", *JOB, *PINS, *files]) == 0
    capsys.readouterr()
    return tmp_path


def test_the_pages_of_a_plan_agree(planned):
    assert cli.main(["report", "plan.toml", "-o", "of_toml.html"]) == 0
    assert cli.main(["report", "plan.json", "-o", "of_json.html"]) == 0
    seen = [ask_page(Path(name).read_text(), SEEN, planned) for name in ("of_toml.html", "of_json.html", "plan.html")]
    best = json.loads(Path("plan.json").read_text())["best"][0]
    for each in seen:
        assert each["sections"][:3] == ["memory", "parts", "timelines"], "a plan has no curves"
        assert each["ranks"] == 4
        assert dict(map(tuple, each["tiles"]))["MFU"] == f"{100 * best['mfu']:.1f} %"
        # The planner's own times: all but the gathers, the step and what is like them.
        [[num_ranks, makespan_s]] = each["panels"]
        assert num_ranks == 4
        assert 0.5 * best["step_s"] < makespan_s <= best["step_s"]
    assert seen[0]["empty"] == 0
    assert seen[1]["empty"] == 1, "an answer has no config"


def test_a_config_needs_a_cluster(planned, capsys):
    text = Path("plan.toml").read_text()
    note = PlanNote.of(text)
    Path("bare.toml").write_text(text.replace(note.line, ""))
    assert cli.main(["report", "bare.toml"]) == 2
    assert "[cluster-not-known]" in capsys.readouterr().err
    assert cli.main(["report", "bare.toml", "--cluster", "h100:16", "-o", "priced.html"]) == 0
    assert ask_page(Path("priced.html").read_text(), SEEN, planned)["ranks"] == 4


@pytest.mark.parametrize("name", ["runs/none", "none.json", "none.toml"])
def test_a_path_that_is_not_there_may_have_meant_a_run(name, capsys):
    assert cli.main(["report", name]) == 2
    error = capsys.readouterr().err
    assert "[file-unreadable]" in error
    assert "the folder of a run" in error


@pytest.mark.parametrize("text", ["{}", '{"best": []}', "[1]", '{"job": {}, "best": [{"layout": 1}]}', '{"best": 3}'])
def test_an_answer_that_is_none_is_refused(text, tmp_path, capsys):
    (tmp_path / "some.json").write_text(text)
    assert cli.main(["report", "some.json"]) == 2
    assert "no-plan-answer" in capsys.readouterr().err


def test_the_page_of_a_timeline_shows_the_plan_and_the_run(tmp_path):
    settings = ["mesh.pp=2", "batch.accumulation=3"]
    assert cli.main(["timeline", *settings, "--chrome-trace", "run.json"]) == 0
    assert cli.main(["timeline", *settings, "--recorded", "run.json", "--html", "both.html"]) == 0
    seen = ask_page(Path("both.html").read_text(), SEEN, tmp_path)
    assert seen["sections"] == ["timelines"]
    assert [num_ranks for num_ranks, _ in seen["panels"]] == [2, 2]
