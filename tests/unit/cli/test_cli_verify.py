"""`shardwise verify`: from a config to a proof, a difference, a refusal or a rank that died."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.refusals import refused
from shardwise.cli import main as cli
from shardwise.cli.verify import conclude, describe, read_model
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.verify import run as running
from shardwise.verify.job import VerifyJob, make_job
from shardwise.verify.run import verify

pytestmark = pytest.mark.begin


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


@pytest.mark.usefixtures("warm_python")
def test_a_run_of_64_ranks_is_proved_on_two(capfd, tmp_path):
    Path("my.toml").write_text("[zero]\nstage = 3\n[batch]\nglobal_size = 128\nmicro_size = 2\n")
    assert cli.main(["verify", "my.toml", "--world-size", "64", "--steps", "1", "precision.param=bf16"]) == 0
    printed = capfd.readouterr().out
    assert "dp_shard 64 -> 2" in printed
    assert "equal: " in printed
    assert not list(tmp_path.glob("shardwise-verify-*"))


def test_a_rank_that_is_killed_is_named_and_its_log_stays(capfd):
    outcome = verify(small_job(), os.environ, argv=["-c", "import os; os.kill(os.getpid(), 9)"])
    assert outcome.exit_code == 137
    assert "killed by SIGKILL" in capfd.readouterr().err
    assert sorted(path.name for path in outcome.folder.glob("*.log")) == ["rank-0.log", "rank-1.log"]
    assert str(outcome.folder) in conclude(small_job(), outcome).plain


def test_ctrl_c_leaves_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(running, "launch_local", lambda *arguments, **options: 130)
    assert cli.main(["verify", "--world-size", "2"]) == 130
    assert list(tmp_path.iterdir()) == []

    def interrupt(job):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "train_reference", interrupt)
    assert cli.main(["verify", "--world-size", "2"]) == 130
    assert "stopped by Ctrl-C" in capsys.readouterr().err


def test_a_model_that_cannot_be_trained_is_refused(monkeypatch, capsys):
    def fail(job):
        raise RuntimeError("no such kernel\nat line 7")

    monkeypatch.setattr(running, "train_reference", fail)
    assert cli.main(["verify", "--world-size", "2"]) == 2
    err = capsys.readouterr().err
    assert "[reference-not-trainable]" in err
    assert "RuntimeError: no such kernel" in err


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
