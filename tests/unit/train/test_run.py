"""How a rank ends: each way with its exit code and one line that says why."""

import errno
import json
import os
import re
import signal
from contextlib import contextmanager

import torch

from harness.refusals import refused
from shardwise.config.resolve import Config
from shardwise.launch.signals import StopFlag
from shardwise.train import metrics as sinks
from shardwise.train import run
from shardwise.train.recorder import RunRecorder
from shardwise.train.setup import resolve_job


def fail_with(monkeypatch, error: BaseException) -> None:
    def see(self, record):
        raise error

    monkeypatch.setattr(RunRecorder, "see", see)


def test_the_summary_sets_every_figure_beside_another(train, capsys):
    code, shown = train()
    assert code == 0
    for part in ("held-out loss", "predicted", "measured", "prompt"):
        assert part in shown
    assert len(re.findall(r"^step [123]/3 .* tokens/s [1-9][\d,]* ", shown, re.MULTILINE)) == 3
    assert shown.rstrip().endswith("/run"), "the last line is the path of the run's folder"
    assert capsys.readouterr().err == ""


def test_the_summary_sets_the_planners_peak_beside_the_measured_one(train, tmp_path):
    _, shown = train()
    peak = shown[shown.index(" peak memory    on rank") : shown.index(" checkpoints ")]
    assert re.search(r"on rank 0 +predicted +measured", peak)
    assert re.search(r"activations +[1-9][\d.]* [KM]iB +[1-9][\d.]* [KM]iB", peak)
    assert "shardwise doctor" in peak, "what the planner lacks for times"
    assert json.loads((tmp_path / "run" / "prediction.json").read_text())["measured"]["step_s"] > 0


@contextmanager
def failing(config, run):
    def write(record):
        raise ConnectionError("no network")

    yield write


def test_a_sink_that_fails_stops_nothing_and_is_named_at_the_end(train, tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "SINKS", {**sinks.SINKS, "wandb": failing})
    code, shown = train(sinks=["tensorboard", "wandb"])
    assert code == 0
    assert "step 3/3" in shown
    assert re.search(r"not recorded +wandb: dropped in step 1: ConnectionError: no network", shown)
    assert list((tmp_path / "run" / "tensorboard").iterdir()), "the others go on"


def test_a_run_keeps_the_memory_of_its_ranks_where_it_ran_and_the_steps_it_profiles(train, tmp_path):
    train(steps=4, profile_steps=[2, 3])
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert (memory["step"], memory["ranks"]) == (2, [last["peak_bytes"]])
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert {"versions", "device", "world_size", "hosts", "command"} == set(environment)
    assert (tmp_path / "run" / "profile" / "rank-0.pt.trace.json.gz").stat().st_size < 2**20


def test_a_run_that_ends_before_it_has_an_engine_leaves_no_swap_file(train, tmp_path, monkeypatch):
    build = run.build_trainer

    def interrupted(config, data):
        build(config, data)
        assert list((tmp_path / "nvme").iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "build_trainer", interrupted)
    code, _ = train(tiers={"optimizer": "nvme", "nvme_path": str(tmp_path / "nvme")})
    assert code == 130
    assert list((tmp_path / "nvme").iterdir()) == []


def test_a_run_with_nvme_says_what_is_stored_there_and_leaves_no_swap_file(train, tmp_path, monkeypatch):
    tiers = {"optimizer": "nvme", "nvme_path": str(tmp_path / "nvme")}
    code, shown = train(tiers=tiers)
    assert code == 0
    assert "at rest: device: parameters" in shown
    assert list((tmp_path / "nvme").iterdir()) == []
    fail_with(monkeypatch, ValueError("a bug"))
    code, _ = train(tiers=tiers)
    assert code == 1
    assert list((tmp_path / "nvme").iterdir()) == []


def test_a_signal_ends_it_after_the_step(train):
    stop = StopFlag()
    stop.request(signal.SIGTERM)
    code, shown = train(stop)
    assert code == 128 + signal.SIGTERM
    assert "at step 1 of 3 by SIGTERM" in shown
    assert "held-out loss" not in shown
    assert "nats a token in the last step" in shown


def test_sigterm_kills_in_the_first_step_and_asks_to_stop_in_the_next(train, monkeypatch):
    """A first step may take minutes, and there is nothing yet that a save would keep."""
    take_step, found = run.Trainer._take_step, []

    def noted(trainer):
        found.append(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        return take_step(trainer)

    monkeypatch.setattr(run.Trainer, "_take_step", noted)
    train(StopFlag(in_steps=(signal.SIGTERM,)))
    assert found == [True, False, False]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_full_disk_is_one_line(train, tmp_path, monkeypatch, capsys):
    fail_with(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    code, _ = train()
    err = capsys.readouterr().err
    assert code == 1
    assert err.startswith(
        f"shardwise: no space left for the run's files in {tmp_path / 'run'}: No space left on device; "
    )
    assert err.count("\n") == 1


def test_memory_that_runs_out_is_said_in_the_last_line(train, monkeypatch, capsys):
    fail_with(monkeypatch, torch.OutOfMemoryError("out of memory on rank 0; try less\nwhat it holds:\n  parameters"))
    assert train()[0] == 1
    err = capsys.readouterr().err
    assert err.endswith("out of memory on rank 0; try less\n"), "the end of a log is what a launcher shows"
    assert "what it holds:\n  parameters" in err
    assert "Traceback" not in err


def test_a_bug_leaves_its_traceback_in_the_log(train, monkeypatch, capsys, caplog):
    fail_with(monkeypatch, TypeError("never mind"))
    code, _ = train()
    assert code == 1
    assert "rank 0 failed: TypeError: never mind; the traceback is in rank-0.log" in capsys.readouterr().err
    assert "Traceback (most recent call last)" in caplog.text


def test_a_second_ctrl_c_ends_it_at_once(train, monkeypatch):
    fail_with(monkeypatch, KeyboardInterrupt())
    assert train()[0] == 130


def test_fp8_without_its_library_or_a_gpu_is_refused_before_a_run_begins(monkeypatch):
    config = Config.from_dict({"precision": {"linears": "fp8", "param": "bf16"}, "run": {"device": "cpu"}})
    monkeypatch.setattr("shardwise.runtime.fp8_linears.find_spec", lambda name: None)
    with refused("extra-missing", "torchao"):
        resolve_job(config, world_size=1, num_local_ranks=1)
    monkeypatch.setattr("shardwise.runtime.fp8_linears.find_spec", lambda name: name)
    with refused("no-fp8-products", "a CPU"):
        resolve_job(config, world_size=1, num_local_ranks=1)
