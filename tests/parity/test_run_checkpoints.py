"""A run that stops and goes on is the run that did not stop; what is saved, and what is said when that fails."""

import errno
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from harness.waiting import PATIENCE_S, num_lines, wait_until
from shardwise.checkpoint import async_saver as saver
from shardwise.checkpoint.commit import step_folders
from shardwise.checkpoint.compare import compare
from shardwise.checkpoint.manifest import AbsentRankError
from shardwise.comm.loss import NonFiniteLossError
from shardwise.comm.records import CommError
from shardwise.config.resolve import Config
from shardwise.launch.environment import lone_rank
from shardwise.launch.signals import StopFlag
from shardwise.train import run
from shardwise.train.checkpoints import RunCheckpoints
from shardwise.train.loop import Trainer, build_trainer
from shardwise.train.prepare import open_data, prepare_data
from shardwise.train.recorder import RunRecorder
from shardwise.train.setup import resolve_job

pytestmark = [pytest.mark.begin, pytest.mark.usefixtures("warm_python")]

NUM_STEPS = 8
TEXT = "".join(f"def double_{number}(x):\n    return {2 * number} * x\n\n" for number in range(400))
TIED_BF16 = {"model": {"tie_embeddings": True}, "precision": {"param": "bf16"}}


@pytest.fixture
def values(tmp_path) -> dict:
    (tmp_path / "text.txt").write_text(TEXT)
    return {
        "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 2, "ffn_size": 64},
        "data": {"path": str(tmp_path / "text.txt"), "seq_len": 16, "tokenizer": "bytes"},
        "batch": {"global_size": 4},
        "optimizer": {"lr": 1e-2},
        "run": {"steps": NUM_STEPS, "device": "cpu", "eval_batches": 1, "sample_tokens": 0},
    }


def merged(values: dict, changes: dict) -> dict:
    return values | {section: values.get(section, {}) | keys for section, keys in changes.items()}


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


def flip_a_bit(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# --- on real ranks ---


def run_on_rank(
    rank: int, world_size: int, values: dict, shard: Path, root: Path, source: Path | None = None, stop_at: int = -1
) -> list[tuple]:
    """Step, loss and gradient norm of every step that is taken."""
    trainer = build_trainer(Config.from_dict(values), open_data(shard, Config.from_dict(values)))
    checkpoints = RunCheckpoints(trainer, root)
    if source is not None:
        checkpoints.resume(source)

    def save(step: int) -> None:
        if checkpoints.is_due(step):
            checkpoints.save(step)

    records = list(trainer.steps(lambda: trainer.engine.num_steps == stop_at, lambda activity: None, save))
    checkpoints.finish()
    trainer.engine.close()
    return [(record.step, record.loss, record.grad_norm, record.lr) for record in records]


@pytest.fixture
def play(values, tmp_path, ranks):
    """`play(world_size, changes, ...)`: rank 0's steps; all ranks have the same."""
    shard = prepare_data(Config.from_dict(values), tmp_path / "cache").path

    def start(world_size: int, changes: dict, *arguments) -> list[tuple]:
        first, *others = ranks(world_size).run(run_on_rank, merged(values, changes), shard, *arguments)
        assert all(other == first for other in others)
        return first

    return start


@pytest.mark.parametrize(
    "changes",
    [
        {},
        TIED_BF16 | {"zero": {"stage": 3}, "checkpoint": {"every": 1}},
        pytest.param({"zero": {"stage": 1}, "checkpoint": {"every": 2, "background": False}}, marks=pytest.mark.full),
        pytest.param(TIED_BF16 | {"mesh": {"tp": 2}, "checkpoint": {"every": 2}}, marks=pytest.mark.full),
        pytest.param({"precision": {"param": "fp16"}, "checkpoint": {"every": 1}}, marks=pytest.mark.full),
    ],
)
def test_a_run_that_is_stopped_twice_is_the_run_that_is_not_to_the_last_bit(play, tmp_path, changes):
    whole = play(2, changes, tmp_path / "whole")
    root = tmp_path / "ck"
    parts = play(2, changes, root, None, 3)
    parts += play(2, changes, root, root, 5)
    parts += play(2, changes, root, root)
    assert len(whole) == NUM_STEPS
    assert parts == whole


@pytest.mark.full  # `test_tier_checkpoints.py` shows it of engines
def test_a_run_that_changes_its_tiers_twice_is_the_run_that_does_not_to_the_last_bit(play, tmp_path):
    changes = TIED_BF16 | {"zero": {"stage": 3}, "checkpoint": {"every": 1}}
    whole = play(2, changes, tmp_path / "whole")
    root, swap = tmp_path / "ck", str(tmp_path / "swap")
    parts = play(2, changes | {"tiers": {"optimizer": "nvme", "grads": "host", "nvme_path": swap}}, root, None, 3)
    parts += play(2, changes | {"tiers": {"optimizer": "host", "params": "nvme", "nvme_path": swap}}, root, root, 5)
    parts += play(2, changes, root, root)
    assert parts == whole


@pytest.mark.parametrize(
    ("tiers", "waits"),
    [({}, False), ({"optimizer": "host", "params": "nvme"}, False), ({"optimizer": "nvme"}, True)],
)
def test_a_run_says_that_it_saves_where_the_save_holds_it_up(values, tmp_path, tiers, waits):
    where = {"nvme_path": str(tmp_path / "swap")} if "nvme" in tiers.values() else {}
    config = Config.from_dict(merged(values, {"tiers": tiers | where, "zero": {"stage": 3}}))
    trainer = build_trainer(config, open_data(prepare_data(config, tmp_path / "cache").path, config))
    checkpoints = RunCheckpoints(trainer, tmp_path / "ck")
    assert checkpoints.waits(2) == waits
    assert checkpoints.waits(NUM_STEPS)
    trainer.engine.close()


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        pytest.param(2, {"mesh": {"tp": 2}}, marks=pytest.mark.full),
        (2, {"mesh": {"pp": 2}, "batch": {"micro_size": 1}}),
        pytest.param(1, {"zero": {"stage": 0}}, marks=pytest.mark.full),
        pytest.param(2, {"zero": {"stage": 0}}, marks=pytest.mark.full),
        pytest.param(4, {"mesh": {"tp": 2}, "zero": {"stage": 3}}, marks=pytest.mark.full),
    ],
)
def test_on_another_layout_it_is_the_same_run_within_rounding(play, tmp_path, world_size, changes):
    fp64 = {"precision": {"param": "fp64"}, "zero": {"stage": 3}, "checkpoint": {"every": 4}}
    whole = play(2, fp64, tmp_path / "whole")
    later = play(world_size, fp64 | changes, tmp_path / "later", tmp_path / "whole" / "step-00000004")
    assert len(later) == NUM_STEPS - 4
    for mine, theirs in zip(later, whole[4:], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


@pytest.mark.full  # `test_pipeline_checkpoints.py` shows it of engines
def test_a_pipelined_run_goes_on_under_another_pipeline(play, tmp_path):
    fp64 = {"precision": {"param": "fp64"}, "model": {"tie_embeddings": True}, "checkpoint": {"every": 4}}
    pipelined = fp64 | {"mesh": {"pp": 2}, "batch": {"micro_size": 1}}
    whole = play(2, pipelined, tmp_path / "whole")
    source = tmp_path / "whole" / "step-00000004"
    assert play(2, pipelined, tmp_path / "same", source) == whole[4:]
    zb = {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": "zb-h1"}, "zero": {"stage": 3}}
    for mine, theirs in zip(play(4, pipelined | zb, tmp_path / "other", source), whole[4:], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


def test_another_global_batch_goes_on_at_the_next_sample(values, tmp_path, monkeypatch):
    shard = prepare_data(Config.from_dict(values), tmp_path / "cache").path

    def rows(changes: dict, source: Path | None, root: Path) -> list[list[int]]:
        """The samples that the steps saw."""
        config = Config.from_dict(merged(values, changes))
        trainer = build_trainer(config, open_data(shard, config))
        checkpoints = RunCheckpoints(trainer, root)
        if source is not None:
            checkpoints.resume(source)
        seen, train_step = [], trainer.engine.train_step

        def see(batches):
            seen.extend(row for tokens, _ in batches for row in tokens.tolist())
            return train_step(batches)

        monkeypatch.setattr(trainer.engine, "train_step", see)
        for record in trainer.steps(lambda: False, lambda activity: None):
            if record.step == 3:
                checkpoints.save(3)
        checkpoints.finish()
        return seen

    whole = rows({}, None, tmp_path / "a")
    later = rows({"batch": {"global_size": 6}, "run": {"steps": 4}}, tmp_path / "a", tmp_path / "b")
    again = rows({"batch": {"global_size": 2}, "run": {"steps": 4}}, tmp_path / "a", tmp_path / "c")
    assert later == whole[12:18]
    assert again == whole[12:14]


# --- one rank, from its start to its exit code ---


@pytest.fixture
def train(values, tmp_path):
    """Run this process as the only rank; returns the exit code, what was shown and the metrics."""
    number = 0

    def start(changes: dict | None = None, resume: Path | None = None, stop: StopFlag | None = None) -> tuple:
        nonlocal number
        number += 1
        stop = StopFlag() if stop is None else stop  # one that is not set yet is false
        config = resolve_job(Config.from_dict(merged(values, changes or {})), world_size=1, num_local_ranks=1)
        shard_path = prepare_data(config, tmp_path / "cache").path
        folder, shown = tmp_path / f"run-{number}", io.StringIO()
        console = Console(file=shown, width=100)
        code = run.run_rank(config, folder, shard_path, env=lone_rank(), stop=stop, console=console, resume=resume)
        path, others = folder / "metrics.jsonl", set(folder.parent.glob("run-*/metrics.jsonl"))
        lines = path.read_text().splitlines() if path.exists() else []
        earlier = {line for other in others - {path} for line in other.read_text().splitlines()}
        lines = [line for line in lines if line not in earlier]  # those of the runs before come first
        return code, shown.getvalue(), [json.loads(line) for line in lines]

    return start


def losses(records: list[dict]) -> list[tuple]:
    return [(record["step"], record["loss"], record.get("eval_loss")) for record in records]


def test_the_end_is_saved_into_the_runs_folder_and_the_summary_says_how_to_go_on(train, tmp_path):
    code, shown, records = train()
    assert code == 0
    assert names(tmp_path / "run-1" / "checkpoints") == ["latest", "step-00000008"]
    assert "checkpoints    step-00000008" in shown
    line = f"shardwise train --resume {tmp_path / 'run-1'} run.dir={tmp_path} run.steps=16\n"
    assert line in shown, "one line, for copying"
    assert f"shardwise checkpoint export {tmp_path / 'run-1' / 'checkpoints'}" in shown
    code, shown, more = train({"run": {"steps": 16}}, resume=tmp_path / "run-1" / "checkpoints")
    assert code == 0
    assert [record["step"] for record in records + more] == list(range(1, 17))
    assert f"resumed from step 8 of {tmp_path / 'run-1' / 'checkpoints'}" in shown
    assert "8 steps in" in shown
    assert shown.index("saving step 16") < shown.index("evaluating"), "what comes after the last step may be killed"


def test_equal_runs_have_equal_checkpoints_wherever_generators_stand(train, tmp_path):
    saved = []
    for name in ("first", "second"):
        random.random(), np.random.rand(), torch.rand(1)
        train({"checkpoint": {"path": str(tmp_path / name)}})
        saved.append(tmp_path / name / "step-00000008")
    found = compare(*saved)
    assert not replace(found, config=())


def test_a_stopped_run_saves_and_goes_on(train, tmp_path):
    _, _, whole = train()
    stop = StopFlag()
    stop.request(signal.SIGTERM)
    code, shown, first = train({"checkpoint": {"path": str(tmp_path / "ck")}}, stop=stop)
    assert code == 143
    assert f"saving step 1 into {tmp_path / 'ck'}" in shown
    assert f"shardwise train --resume {tmp_path / 'ck'} checkpoint.path={tmp_path / 'ck'} run.dir={tmp_path}\n" in shown
    assert names(tmp_path / "ck") == ["latest", "step-00000001"]
    code, _, later = train(resume=tmp_path / "ck")
    assert code == 0
    assert losses(first + later) == losses(whole)


def test_nothing_is_saved_where_nothing_is_wanted(train, tmp_path):
    stop = StopFlag()
    stop.request(signal.SIGTERM)
    for each in (None, stop):
        _, shown, _ = train({"checkpoint": {"at_end": False}}, stop=each)
        assert "--resume" not in shown
    assert not list(tmp_path.glob("run-*/checkpoints"))
    train({"checkpoint": {"at_end": False, "every": 3, "keep_last": 1}})
    assert names(tmp_path / "run-3" / "checkpoints") == ["latest", "step-00000006"]


def test_what_the_user_changes_takes_effect(train, tmp_path):
    _, _, before = train({"checkpoint": {"every": 4}, "scheduler": {"name": "constant"}})
    source = tmp_path / "run-1" / "checkpoints" / "step-00000004"
    _, _, slower = train({"optimizer": {"lr": 1e-4}, "scheduler": {"name": "constant"}}, resume=source)
    assert [record["lr"] for record in before[3:5]] == [1e-2, 1e-2]
    assert {record["lr"] for record in slower} == {1e-4}
    assert slower[0]["loss"] == before[4]["loss"]
    assert slower[1]["loss"] != before[5]["loss"]
    _, _, longer = train({"scheduler": {"name": "linear", "final_ratio": 0.0}, "run": {"steps": 12}}, resume=source)
    assert [record["lr"] for record in longer] == pytest.approx([1e-2 * (12 - step) / 12 for step in range(4, 12)])


def test_a_run_with_no_step_left_says_so_and_evaluates(train, tmp_path):
    _, _, records = train()
    code, shown, none = train(resume=tmp_path / "run-1" / "checkpoints")
    assert (code, none) == (0, [])
    assert "all 8 were taken before; a larger run.steps takes more" in shown
    assert f"{records[-1]['eval_loss']:.4f} nats a token" in shown
    assert not (tmp_path / "run-2" / "checkpoints").exists(), "there is nothing new to save"


def test_a_damaged_newest_checkpoint_is_named_and_the_older_one_taken(train, tmp_path):
    changes = {"checkpoint": {"every": 3, "path": str(tmp_path / "ck")}}
    _, _, whole = train(changes)
    flip_a_bit(tmp_path / "ck" / "step-00000008")
    code, shown, later = train(changes, resume=tmp_path / "ck")
    assert code == 0
    assert "resumed from step 6" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("not whole")]
    for part in ("step-00000008", ".safetensors"):
        assert part in line
    assert str(tmp_path / "ck" / "step-00000008.aside-1") in shown
    assert losses(later) == losses(whole[6:])
    assert names(tmp_path / "ck") == [
        "latest",
        "step-00000003",
        "step-00000006",
        "step-00000008",
        "step-00000008.aside-1",
    ]


def test_where_no_checkpoint_is_whole_the_run_ends_in_a_line(train, tmp_path, capsys):
    train()
    root = tmp_path / "run-1" / "checkpoints"
    flip_a_bit(root / "step-00000008")
    code, _, none = train(resume=root)
    assert (code, none) == (1, [])
    err = capsys.readouterr().err
    assert err.count("\n") == 2, "why, and how to go on"
    assert f"no checkpoint in {root} is whole" in err


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model": {"num_layers": 3}}, "missing blocks.2."),
        ({"model": {"ffn_size": 96}}, "blocks.0.ffn"),
        ({"data": {"path": "other.txt"}}, "data.path"),
        ({"optimizer": {"name": "sgd"}}, "AdamW"),
    ],
)
def test_another_model_and_other_data_are_refused_in_a_line(train, tmp_path, monkeypatch, capsys, changes, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text(TEXT[:-1])
    train()
    capsys.readouterr()
    code, _, none = train(changes, resume=tmp_path / "run-1" / "checkpoints")
    assert (code, none) == (1, [])
    err = capsys.readouterr().err
    assert what in err
    assert "strict" not in err, "which the command line has not"
    assert err.count("\n") == 2, "why, and how to go on"


def fail_to_write(monkeypatch) -> None:
    def write(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saver.writer, "write_state_shards", write)


def test_a_full_disk_at_the_end_hides_nothing_of_what_was_learned(train, tmp_path, monkeypatch, capsys):
    fail_to_write(monkeypatch)
    code, shown, records = train()
    assert code == 1
    assert "held-out loss" in shown
    assert "--resume" not in shown
    assert math.isfinite(records[-1]["eval_loss"])
    err = capsys.readouterr().err
    assert err.count("\n") == 2, "why, and how to go on"
    assert "checkpoint of step 8 failed on rank 0: " in err
    assert "No space left on device" in err
    assert step_folders(tmp_path / "run-1" / "checkpoints") == []


def test_a_last_save_that_lacks_a_rank_ends_the_run_at_once(train, monkeypatch, capsys):
    """An evaluation would wait for that rank once more."""

    def lack(self, step):
        raise AbsentRankError("checkpoint of step 8 failed on rank 1: it has shown no progress for 10 s")

    monkeypatch.setattr(RunCheckpoints, "save", lack)
    monkeypatch.setattr(Trainer, "evaluate", lambda self: pytest.fail("it evaluates"))
    code, _, _ = train()
    assert code == 1
    assert "it has shown no progress" in capsys.readouterr().err


def test_a_save_that_fails_in_the_background_ends_the_run_in_a_line(train, monkeypatch, capsys):
    fail_to_write(monkeypatch)
    code, _, records = train({"checkpoint": {"every": 2, "on_failure": "stop"}, "run": {"steps": 10000}})
    assert code == 1
    assert 2 <= len(records) < 10000
    err = capsys.readouterr().err
    assert err.count("\n") == 2, "why, and how to go on"
    assert "checkpoint of step 2 failed on rank 0: " in err


def hold_up_saves(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """The first says that a save is under way, the second lets it go on."""
    write, begun, may_go = saver.writer.write_state_shards, threading.Event(), threading.Event()

    def wait_and_write(*arguments, **options):
        begun.set()
        may_go.wait(60)
        return write(*arguments, **options)

    monkeypatch.setattr(saver.writer, "write_state_shards", wait_and_write)
    return begun, may_go


@pytest.mark.parametrize("is_alone", [False, True])
def test_an_error_lets_the_save_under_way_finish_unless_a_peer_is_gone(train, tmp_path, monkeypatch, is_alone):
    begun, may_go = hold_up_saves(monkeypatch)
    timer = threading.Timer(3.0 if is_alone else 0.5, may_go.set)

    def fail(self, record):
        begun.wait(60)
        timer.start()
        raise CommError("rank 1 is gone") if is_alone else NonFiniteLossError("loss nan must be finite")

    monkeypatch.setattr(RunRecorder, "see", fail)
    code, _, _ = train({"checkpoint": {"every": 1, "path": str(tmp_path / "ck")}})
    assert code == 1
    assert may_go.is_set() != is_alone
    assert bool(step_folders(tmp_path / "ck")) != is_alone
    timer.cancel()
    may_go.set()


def test_a_stop_while_a_save_is_under_way_finishes_both(train, tmp_path, monkeypatch):
    begun, may_go = hold_up_saves(monkeypatch)
    stop = StopFlag()

    def see(self, record):
        begun.wait(60)
        stop.request(signal.SIGTERM)
        threading.Timer(0.2, may_go.set).start()

    monkeypatch.setattr(RunRecorder, "see", see)
    code, _, _ = train({"checkpoint": {"every": 1, "path": str(tmp_path / "ck")}}, stop=stop)
    assert code == 143
    assert names(tmp_path / "ck") == ["latest", "step-00000001", "step-00000002"]


def test_a_signal_that_comes_while_it_evaluates_ends_the_run_after_the_next_step(train, tmp_path, monkeypatch):
    evaluate = run.Trainer.evaluate

    def evaluate_when_asked_to_stop(trainer):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(trainer)

    monkeypatch.setattr(run.Trainer, "evaluate", evaluate_when_asked_to_stop)
    stop = StopFlag(in_steps=(signal.SIGTERM,))
    code, _, records = train({"run": {"eval_every": 3}}, stop=stop)
    assert code == 143
    assert [record.get("eval_loss") is not None for record in records] == [False, False, True, False]
    assert names(tmp_path / "run-1" / "checkpoints") == ["latest", "step-00000004"]


# --- as a user starts it ---


def settings(num_steps: int) -> list[str]:
    return [
        *("model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=1"),
        *("model.ffn_size=64", "data.path=text.txt", "data.seq_len=16", "data.tokenizer=bytes"),
        *("batch.micro_size=4", "run.device=cpu", f"run.steps={num_steps}", "run.eval_batches=1"),
        *("run.sample_tokens=0", "scheduler.total_steps=100", "checkpoint.path=ck", "precision.param=fp32"),
    ]


def command_line(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise.cli", "train", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out + err


def all_metrics() -> dict[int, float]:
    """The loss of each step, over all runs; a step taken twice must have had the same."""
    found: dict[int, float] = {}
    for path in sorted(Path("runs").glob("2*/metrics.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            assert found.setdefault(record["step"], record["loss"]) == record["loss"]
    return found


def wait_for_step(number: int) -> None:
    assert wait_until(lambda: num_lines("runs/2*/metrics.jsonl") >= number), f"no step {number}"


@pytest.fixture
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.full
@pytest.mark.usefixtures("_own_folder")
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.full)]
)
def test_a_signal_to_the_launcher_saves_and_the_same_command_goes_on(signum, code):
    process = command_line(*settings(100_000), "run.num_procs=2", "--resume", "auto")
    wait_for_step(3)
    process.send_signal(signum)
    returncode, said = finish(process)
    assert returncode == code, said
    assert "checkpoint.path=ck has no checkpoint yet; the run starts afresh" in said
    (saved,) = step_folders(Path("ck"))
    step = len(all_metrics())
    assert saved.name == f"step-{step:08d}"
    returncode, said = finish(command_line(*settings(step + 2), "run.num_procs=1", "--resume", "auto"))
    assert returncode == 0, said
    assert f"resumed from step {step} of ck" in said
    assert "global batch 8 = 4 samples a micro-batch x 2 accumulation x 1 data-parallel ranks" in said
    assert sorted(all_metrics()) == list(range(1, step + 3))


@pytest.mark.full
@pytest.mark.usefixtures("_own_folder")
def test_a_second_ctrl_c_leaves_what_was_saved_before_whole():
    large = ["model.num_layers=8", "model.hidden_size=512", "model.ffn_size=2048"]  # takes a while to save
    process = command_line(*settings(100_000), *large, "run.num_procs=2", "checkpoint.every=2")
    wait_for_step(6)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "once more kills them" not in process.stderr.readline():
        assert process.poll() is None, "it has ended at the first"
    time.sleep(0.6)  # else it is taken for the first
    process.send_signal(signal.SIGINT)
    returncode, said = finish(process)
    assert returncode == 130, said
    assert "killed, not having stopped in time" in said
    before = all_metrics()
    returncode, said = finish(command_line(*settings(max(before) + 2), *large, "--resume", "auto"))
    assert returncode == 0, said
    assert max(all_metrics()) == max(before) + 2


@pytest.mark.full
@pytest.mark.usefixtures("_own_folder")
def test_a_task_of_srun_saves_when_it_is_preempted(monkeypatch):
    place = {"JOB_ID": "7", "STEP_ID": "0", "STEP_NODELIST": "localhost", "STEP_NUM_TASKS": "1", "NODEID": "0"}
    place |= {"STEP_TASKS_PER_NODE": "1", "PROCID": "0", "LOCALID": "0"}
    for name, value in place.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    process = command_line(*settings(100_000))
    wait_for_step(3)
    process.send_signal(signal.SIGTERM)
    returncode, said = finish(process)
    assert returncode == 143, said
    assert len(step_folders(Path("ck"))) == 1
