"""What a run leaves: every step is on the disk at once, in JSON that any reader takes, and as events."""

import json
import logging
import math
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.schedule.actions import Action, ActionKind, TimedAction
from shardwise.train.metrics import MetricsWriter, StepRecord, to_json_line, write_timeline


def make_record(step: int, **changes) -> StepRecord:
    values = {
        "loss": 8.0 - step,
        "count": 64,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "skipped": False,
        "step_s": 0.5,
        "tokens_per_s": 128.0,
        "memory_bytes": {"parameters": 1024, "activations": 0},
    }
    return StepRecord(step=step, **(values | changes))


def read_lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_is_on_disk_before_the_next(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in (1, 2):
        writer.write(make_record(step))
        assert [line["step"] for line in read_lines(tmp_path)] == list(range(1, step + 1))
    writer.close()
    writer.close()


def test_a_line_says_what_is_known(tmp_path):
    plain = json.loads(to_json_line(make_record(1)))
    assert plain["loss"] == 7.0
    assert plain["memory_bytes"] == {"parameters": 1024, "activations": 0}
    assert not {"peak_bytes", "eval_loss"} & set(plain)
    full = json.loads(to_json_line(make_record(2, peak_bytes={"parameters": 2048}, eval_loss=6.5)))
    assert full["peak_bytes"] == {"parameters": 2048}
    assert full["eval_loss"] == 6.5


def test_an_overflow_stays_json():
    line = to_json_line(make_record(1, loss=math.inf, grad_norm=math.nan, skipped=True))
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["loss"] is None
    assert record["grad_norm"] is None


def test_earlier_metrics_are_never_overwritten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("kept\n")
    with pytest.raises(FileExistsError):
        MetricsWriter(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "kept\n"


def test_tensorboard_reads_the_same_numbers(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(make_record(1))
    writer.write(make_record(2, peak_bytes={"parameters": 1024, "activations": 512}, eval_loss=6.5))
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 7.0), (2, 6.0)]
    assert [event.value for event in events.Scalars("memory_bytes/peak")] == [1536]
    assert [(event.step, event.value) for event in events.Scalars("train/eval_loss")] == [(2, 6.5)]
    assert {"train/grad_norm", "train/lr", "speed/tokens_per_s", "memory_bytes/parameters"} <= set(
        events.Tags()["scalars"]
    )


def test_without_tensorboard_there_are_still_lines(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    writer = MetricsWriter(tmp_path)
    with caplog.at_level(logging.WARNING):
        writer.write(make_record(1))
        writer.write(make_record(2))
    writer.close()
    assert len(read_lines(tmp_path)) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once, not at every step"
    assert not (tmp_path / "tensorboard").exists()


def test_the_timeline_keeps_actions_in_their_text_form(tmp_path):
    forward, step = Action(ActionKind.FORWARD, micro_batch=0, group="blocks.1"), Action(ActionKind.STEP)
    actions = [TimedAction(forward, 1, 100.5, 100.75, "compute"), TimedAction(step, 1, 101.0, 101.25, "compute")]
    write_timeline(tmp_path / "timeline-1.jsonl", actions)
    lines = [json.loads(line) for line in (tmp_path / "timeline-1.jsonl").read_text().splitlines()]
    assert [Action.parse(line["action"]) for line in lines] == [forward, step]
    assert [(line["rank"], line["start_s"], line["end_s"]) for line in lines] == [(1, 0.0, 0.25), (1, 0.5, 0.75)]
