"""How a rank ends: each way with its exit code and one line that says why."""

import errno
import json
import os
import re
import signal
import time
from contextlib import contextmanager

import pytest
import torch

from harness.refusals import refused
from shardwise.checkpoint.commit import begin, commit
from shardwise.checkpoint.manifest import Manifest
from shardwise.comm.records import CommError
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.launch.signals import StopFlag
from shardwise.train import metrics as sinks
from shardwise.train import run
from shardwise.train.checkpoints import how_to_go_on
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
    said, hint = err.splitlines()
    assert said.endswith("free some, or set run.dir [disk-full]")
    assert hint.startswith("shardwise: nothing was saved by then")


def test_memory_that_runs_out_is_said_in_the_last_line(train, monkeypatch, capsys):
    fail_with(monkeypatch, torch.OutOfMemoryError("out of memory on rank 0; try less\nwhat it holds:\n  parameters"))
    assert train()[0] == 1
    err = capsys.readouterr().err
    assert "  parameters\nout of memory on rank 0; try less\n" in err, "what a launcher shows comes late"
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


@pytest.mark.parametrize("error", [KeyError("a"), ArithmeticError("nan"), CommError("rank 1 is gone")])
def test_an_end_by_an_error_says_how_to_go_on(train, tmp_path, monkeypatch, capsys, error):
    see = RunRecorder.see

    def failing_late(self, record):
        see(self, record)
        if record.step == 3:
            raise error

    monkeypatch.setattr(RunRecorder, "see", failing_late)
    assert train(steps=4, checkpoint={"every": 2, "background": False})[0] == 1
    hint = capsys.readouterr().err.splitlines()[-1]
    command = f"shardwise train --resume {tmp_path / 'run'} run.dir={tmp_path}"
    assert hint == f"shardwise: to go on from step-00000002: {command}"


def test_the_way_on_is_from_the_newest_whole_checkpoint_and_else_from_where_the_run_began(tmp_path):
    folder, before, where = tmp_path / "my run", tmp_path / "before", f"run.dir={tmp_path}"
    config = Config.from_dict({"checkpoint": {"every": 1}})
    assert how_to_go_on(config, folder, None) == "nothing was saved by then, so there is nothing to go on from"
    commit(begin(before, 3), before, Manifest(step=3, tensors=(), files={}))
    assert how_to_go_on(config, folder, before).endswith(f"step-00000003: shardwise train --resume {before} {where}")
    own = folder / "checkpoints"
    for step in (4, 5):
        commit(begin(own, step), own, Manifest(step=step, tensors=(), files={}))
    (own / "step-00000005" / "manifest.json").write_text("torn")
    assert how_to_go_on(config, folder, before).endswith(f"step-00000004: shardwise train --resume '{folder}' {where}")


def test_a_refused_config_leaves_no_folder(train, tmp_path, monkeypatch, capsys):
    def refuse(config, data):
        raise ConfigError("too-odd", "that is too odd")

    monkeypatch.setattr(run, "build_trainer", refuse)
    assert train()[0] == 2
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().err == "shardwise: that is too odd [too-odd]\n"


def test_a_refusal_after_a_step_leaves_what_the_step_has_left(train, tmp_path, monkeypatch):
    take = run.Trainer._take_step

    def refuse(trainer):
        if trainer.engine.num_steps:
            raise ConfigError("too-odd", "that is too odd")
        return take(trainer)

    monkeypatch.setattr(run.Trainer, "_take_step", refuse)
    assert train()[0] == 2
    assert (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_back_end_that_compiles_nothing_is_refused_though_compiling_is_off():
    config = Config.from_dict({"compile": {"backend": "nope"}, "run": {"device": "cpu"}})
    with refused("compile-backend", "nope"):
        resolve_job(config, world_size=1, num_local_ranks=1)


def test_what_takes_long_before_the_first_step_says_what_it_is(train, monkeypatch):
    build = run.build_trainer

    def slow(config, data):
        time.sleep(0.1)
        return build(config, data)

    monkeypatch.setattr(run, "build_trainer", slow)
    monkeypatch.setattr("shardwise.report.console.EVERY_S", 0.01)
    assert "making the model tiny on each rank\n" in train()[1]
