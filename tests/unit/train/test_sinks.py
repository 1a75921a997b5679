"""Sinks: each has every step by the names of the file, and none that fails ever stops a run."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardwise.train import metrics as train_sinks
from shardwise.train.metrics import RunInfo, SinkSet, StepRecord, scalars

pytestmark = pytest.mark.usefixtures("warm_python")

CONFIG = {"zero": {"stage": 3}, "run": {"sinks": ["jsonl"]}}


def make_record(step: int, **changes) -> StepRecord:
    values = {"loss": 8.0 - step, "count": 64, "grad_norm": 1.5, "lr": 1e-3, "skipped": False, "step_s": 0.5}
    values |= {"tokens_per_s": 128.0, "memory_bytes": {"parameters": 1024, "activations": 0}}
    return StepRecord(step=step, **(values | changes))


def write_run(folder, *names, first_step: int = 0, num_steps: int = 2) -> SinkSet:
    sinks = SinkSet(names, CONFIG, RunInfo("a-run", folder, first_step))
    for step in range(first_step + 1, first_step + num_steps + 1):
        sinks.write(make_record(step, eval_loss=6.5 if step == 2 else None))
    sinks.close()
    return sinks


def read_lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_is_on_disk_before_the_next(tmp_path):
    sinks = SinkSet(["jsonl"], CONFIG, RunInfo("a-run", tmp_path))
    for step in (1, 2):
        sinks.write(make_record(step))
        assert [line["step"] for line in read_lines(tmp_path)] == list(range(1, step + 1))
    sinks.close()
    sinks.close()
    assert sinks.failures == ()


def test_a_run_that_goes_on_adds_and_a_new_one_never_overwrites(tmp_path):
    write_run(tmp_path, "jsonl")
    write_run(tmp_path, "jsonl", first_step=2)
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3, 4]
    (failure,) = write_run(tmp_path, "jsonl").failures
    assert failure.startswith("jsonl: dropped at the start: FileExistsError")
    assert len(read_lines(tmp_path)) == 4


def test_tensorboard_has_the_names_of_the_file(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert write_run(tmp_path, "tensorboard").failures == ()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 7.0), (2, 6.0)]
    assert [(event.step, event.value) for event in events.Scalars("eval_loss")] == [(2, 6.5)]
    assert set(events.Tags()["scalars"]) == set(scalars(make_record(2, eval_loss=6.5)))


class Failing:
    """A sink that raises when it is started, written to or closed."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.calls: list[str] = []

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method == self.method:
            raise RuntimeError("no network\nat all")

    @contextmanager
    def __call__(self, config, run) -> Iterator:
        self._called("start")
        yield lambda record: self._called("write")
        self._called("close")


@pytest.mark.parametrize(
    ("method", "calls", "when"),
    [
        ("start", ["start"], "at the start"),
        ("write", ["start", "write", "close"], "in step 1"),
        ("close", ["start", "write", "write", "close"], "at the end"),
    ],
)
def test_a_sink_that_raises_is_dropped_logged_once_and_the_others_go_on(method, calls, when, caplog, monkeypatch):
    failing, well = Failing(method), Failing("never")
    monkeypatch.setattr(train_sinks, "SINKS", {"bad": failing, "good": well})
    with caplog.at_level(logging.WARNING):
        sinks = SinkSet(["bad", "good"], CONFIG, RunInfo("a-run", None))
        for step in (1, 2):
            sinks.write(make_record(step))
        sinks.close()
    assert failing.calls == calls
    assert well.calls == ["start", "write", "write", "close"]
    assert sinks.failures == (f"bad: dropped {when}: RuntimeError: no network",)
    assert [record.getMessage() for record in caplog.records] == list(sinks.failures)


def test_without_tensorboard_the_log_alone_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(train_sinks, "find_spec", lambda name: None)
    assert write_run(tmp_path, "jsonl", "tensorboard").failures == ()
    assert ["tensorboard" in record.getMessage() for record in caplog.records] == [True]
    assert len(read_lines(tmp_path)) == 2


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_without_its_library_a_sink_says_what_to_install(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    (failure,) = write_run(tmp_path, "jsonl", name).failures
    assert failure.startswith(f"{name}: dropped ")
    assert "pip install" in failure
    assert len(read_lines(tmp_path)) == 2


def test_without_a_folder_no_files_are_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert write_run(None, "jsonl", "tensorboard").failures == ()
    assert list(tmp_path.iterdir()) == []


# In a process of its own: these libraries keep state, threads and hooks of the interpreter's end.
WRITE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_sinks import write_run
print(write_run(Path(sys.argv[2]), sys.argv[3]).failures)
"""


def write_elsewhere(folder, name: str, **environment: str) -> None:
    """Write a run by one sink in another process, and expect no failure."""
    argv = [sys.executable, "-c", WRITE, os.path.dirname(__file__), str(folder), name]
    environment = os.environ | environment
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=folder, timeout=300, check=True)
    assert done.stdout.strip() == "()", done.stdout + done.stderr


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format after a head of 7 bytes: blocks of 32 KiB, records cut at their ends."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield parts
            parts = b""


def test_wandb_offline_has_every_step(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    write_elsewhere(tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, configured = [], set()
    for data in records_of(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items})
        if record.WhichOneof("record_type") == "run":
            configured |= {each.key for each in record.run.config.update}
    assert [(row["_step"], row["loss"]) for row in rows] == [(1, 7.0), (2, 6.0)]
    assert rows[1]["eval_loss"] == 6.5
    assert rows[0]["memory_bytes/parameters"] == 1024
    assert {"zero", "run"} <= configured


def test_mlflow_has_every_step_in_its_file_store(tmp_path):
    pytest.importorskip("mlflow")
    store = tmp_path / "mlruns"
    write_elsewhere(tmp_path, "mlflow", MLFLOW_TRACKING_URI=f"file:{store}", MLFLOW_ALLOW_FILE_STORE="true")
    (metrics,) = store.glob("*/*/metrics")
    assert [line.split()[1:] for line in (metrics / "loss").read_text().splitlines()] == [["7.0", "1"], ["6.0", "2"]]
    assert (metrics / "memory_bytes" / "parameters").exists()
    assert (metrics.parent / "params" / "zero.stage").read_text() == "3"
    assert "status: 3" in (metrics.parent / "meta.yaml").read_text(), "finished"
