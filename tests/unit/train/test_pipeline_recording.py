"""What a run says of its pipeline, and the timeline that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli import main as cli
from shardwise.config.resolve import Config
from shardwise.schedule import Action, TimedAction
from shardwise.schedule.simulate import mean_times
from shardwise.train.console_notes import measured_share, schedule_line


def timed(text: str, rank: int, start_s: float, end_s: float) -> TimedAction:
    return TimedAction(Action.parse(text), rank, start_s, end_s, "compute")


def test_the_bubble_is_that_of_the_longest_rank() -> None:
    actions = [timed("0F0", 0, 0.0, 2.0), timed("0B0", 0, 5.0, 10.0), timed("1F0", 1, 2.0, 3.0)]
    assert measured_share(actions) == pytest.approx(0.3)
    assert mean_times(actions).backward_input_s == pytest.approx(2.5 / 2)
    assert measured_share([timed("0F0", 0, 1.0, 1.0)]) == 0.0


@pytest.mark.parametrize(
    ("pipeline", "accumulation", "said"),
    [
        ({}, 6, "1f1b over 4 ranks, 6 micro-batches: bubble 33.3 % of"),  # 9 of 27
        ({"schedule": "interleaved", "virtual_stages": 3}, 4, "interleaved over 4 ranks x 3 stages, 4 micro-batches: "),
        ({"schedule": "zb-v", "virtual_stages": 2}, 8, "zb-v over 4 ranks x 2 stages, 8 micro-batches: bubble 0.0 %"),
        ({"schedule": "zb-h1"}, 1, "zb-h1 over 4 ranks, 1 micro-batch: its bubble has no formula for such numbers; "),
    ],
)
def test_the_schedule_is_said_with_its_bubble(pipeline: dict[str, object], accumulation: int, said: str) -> None:
    config = Config.from_dict({"mesh": {"pp": 4}, "batch": {"accumulation": accumulation}, "pipeline": pipeline})
    assert schedule_line(config).startswith(said)


SETTINGS = (
    "model.num_layers=4 model.hidden_size=32 model.num_heads=2 model.num_kv_heads=1 model.ffn_size=64 data.seq_len=16 "
    "data.tokenizer=bytes data.path=text.txt batch.micro_size=2 batch.accumulation=4 mesh.pp=2 run.device=cpu "
    "run.num_procs=2 run.num_threads=1 run.steps=3 run.eval_batches=1 run.record_timeline=2 precision.param=fp32"
)


def test_a_run_shows_the_cut_and_both_bubbles_and_leaves_a_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    Path("text.txt").write_text("".join(f"line {number} of some text\n" for number in range(300)))
    assert cli.main(["train", *SETTINGS.split()]) == 0
    said = capfd.readouterr().out
    assert "stage  rank  units" in said
    assert " x the mean time, the last " in said
    assert "1f1b over 2 ranks, 4 micro-batches: bubble 20.0 % of a rank's step" in said
    equation = "global batch 8 = 2 samples a micro-batch x 4 micro-batches (chunks) x 1 data-parallel ranks"
    assert equation in said
    assert "pipeline over 2 ranks" in said
    assert "bubble of the last step: " in said
    assert "by formula for the times measured" in said
    (recorded,) = Path("runs").glob("*/timeline.json")
    actions = [event["name"] for event in json.loads(recorded.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {f"{stage}{kind}{micro_batch}" for stage in (0, 1) for kind in "FB" for micro_batch in range(4)} <= {
        *actions
    }
    assert cli.main(["timeline", "mesh.pp=2", "batch.accumulation=4", "--recorded", str(recorded)]) == 0
    assert f"recorded: {recorded}" in capfd.readouterr().out
