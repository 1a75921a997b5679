"""`shardwise verify`: from a config to a proof, a difference, a refusal or a rank that died."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.refusals import refused
from shardwise.cli import main as cli
from shardwise.cli.verify import conclude, describe, read_model
from shardwise.config.resolve import Config, ConfigError
from shardwise.verify import run as running
from shardwise.verify.compare import TrainingDifference
from shardwise.verify.job import VerifyJob, make_job
from shardwise.verify.run import VerifyOutcome, verify


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def small_job() -> VerifyJob:
    return make_job(Config.from_dict({"model": {"preset": "tiny"}}), 2, num_steps=1)


def test_a_run_of_64_ranks_is_proved_on_two(capfd, tmp_path):
    Path("my.toml").write_text("[zero]\nstage = 3\n[batch]\nglobal_size = 128\nmicro_size = 2\n")
    assert cli.main(["verify", "my.toml", "--world-size", "64", "--steps", "1", "precision.param=bf16"]) == 0
    lines = [line.rstrip() for line in capfd.readouterr().out.splitlines()]
    assert lines[0] == "layout    2 processes = dp_shard 2, ZeRO-3"
    assert lines[1] == "folded    dp_shard 64 -> 2"
    assert lines[2].startswith("shrunk    layers 4 -> 2, hidden 320 -> 16, ")
    assert lines[3].startswith("replaced  precision.param bf16 -> fp64")
    assert lines[4].startswith("equal: losses, gradients and parameters, 1 step in ")
    assert not list(tmp_path.glob("shardwise-verify-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mesh.tp=3"], "tp=3 does not divide num_heads=4; nearest legal: 2, 4"),
        (["mesh.pp=2", "--world-size", "7"], "world size 7 is not a multiple of pp 2"),
        (["zero.stege=3"], "zero.stege is not a config key; did you mean zero.stage?"),
        (["--model", "nowhere"], "--model: cannot read nowhere: No such file"),
        (["--steps", "0"], "--steps 0 trains nothing"),
        (["mesh.pp=2", "mesh.tp=2", "--processes", "4"], "4 processes do not hold pp 2 x dp_shard 2 x tp 2 = 8"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("shardwise.verify.run.launch_local", None)
    assert cli.main(["verify", *arguments]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("shardwise: ")
    assert message in said


def test_a_rank_that_is_killed_is_named_and_its_log_stays(capfd):
    outcome = verify(small_job(), os.environ, argv=["-c", "import os; os.kill(os.getpid(), 9)"])
    assert outcome.exit_code == 137
    assert "killed by SIGKILL" in capfd.readouterr().err
    assert sorted(path.name for path in outcome.folder.glob("*.log")) == ["rank-0.log", "rank-1.log"]
    text = conclude(small_job(), outcome).plain
    assert text == f"nothing is proved: the small run failed; its logs are in {outcome.folder}"


def test_ctrl_c_leaves_nothing_behind(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(running, "launch_local", lambda *arguments, **options: 130)
    assert cli.main(["verify", "--world-size", "2"]) == 130
    assert capsys.readouterr().out.splitlines()[-1] == "nothing is proved: stopped"
    assert list(tmp_path.iterdir()) == []

    def interrupt(job):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "train_reference", interrupt)
    assert cli.main(["verify", "--world-size", "2"]) == 130
    assert "stopped by Ctrl-C" in capsys.readouterr().err


def test_a_model_that_nobody_can_train_is_refused(monkeypatch, capsys):
    def fail(job):
        raise RuntimeError("no such kernel\nat line 7")

    monkeypatch.setattr(running, "train_reference", fail)
    assert cli.main(["verify", "--world-size", "2"]) == 2
    assert "cannot train the small copy, so there is nothing to compare with (RuntimeError: no such kernel);" in (
        capsys.readouterr().err
    )


def test_a_difference_is_told():
    found = TrainingDifference("gradient", 1, 0.25, ("embed.weight", "blocks.0.ffn.up.weight"), (1.25, 1.0))
    told = conclude(small_job(), VerifyOutcome(1, found, ("stages 0, 1, rank 1", "stage 0, rank 0"))).plain
    assert told.splitlines() == [
        "different: the gradient of embed.weight in step 1",
        "  held by stages 0, 1, rank 1; it differs by 2.5e-01 of the largest value (1.25 where one process has 1)",
        "  2 tensors differ; the last, at which a backward begins, is blocks.0.ffn.up.weight, held by stage 0, rank 0",
    ]
    loss = TrainingDifference("loss", 2, 0.5, (), (3.0, 2.0))
    assert conclude(small_job(), VerifyOutcome(1, loss)).plain.startswith(
        "different: the loss of step 2, by 5.0e-01 of"
    )


def test_models_are_read_from_a_folder_or_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_model(tmp_path) == read_model(tmp_path / "config.json") == {"model_type": "llama"}
    (tmp_path / "config.json").write_text("[]")
    with refused("model-config-not-a-table", "config.json"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        read_model(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_job_round_trips_and_describes_itself():
    config = Config.from_dict({"mesh": {"pp": 2}, "batch": {"accumulation": 2}, "pipeline": {"cut": ["blocks.1"]}})
    job = make_job(config, None)
    assert VerifyJob.from_json(job.to_json()) == job
    assert job.folded == ("dp_shard taken as 2: neither mesh.dp_shard nor --world-size says it",)
    assert "pipeline.cut left out" in job.replaced
    assert describe(job).row_count == 4
