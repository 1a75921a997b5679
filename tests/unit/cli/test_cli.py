"""The command line as a user meets it: what is wrong is said in one line before anything starts, and runs end well."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from harness.paths import DOCS
from harness.waiting import PATIENCE_S, num_lines, wait_until
from shardwise.cli import main as cli
from shardwise.config.resolve import Config, all_keys, describe_key
from shardwise.train import setup as job

pytestmark = pytest.mark.usefixtures("warm_python")

SMALL_MODEL = ["num_layers=1", "hidden_size=32", "num_heads=2", "num_kv_heads=1", "ffn_size=64"]
TEXT = "".join(f"def double_{number}(x):\n    return {2 * number} * x\n\n" for number in range(400))


@pytest.fixture
def settings(tmp_path, monkeypatch) -> list[str]:
    """Arguments of `train` for a run of a second, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return [
        *(f"model.{size}" for size in SMALL_MODEL),
        "data.path=text.txt",
        "data.seq_len=16",
        "data.tokenizer=bytes",
        "batch.micro_size=8",
        "run.device=cpu",
        "run.steps=3",
        "run.eval_batches=1",
        "run.sample_tokens=8",
    ]


def run_folder() -> Path:
    (folder,) = Path("runs").glob("2*")
    return folder


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_train_and_leave_every_file(settings, capfd):
    assert cli.main(["train", *settings, "run.num_procs=2", "precision.param=fp32"]) == 0
    folder = run_folder()
    config = Config.from_json((folder / "config.json").read_text())
    assert (config.mesh.dp_shard, config.batch.global_size, config.run.num_procs) == (2, 16, 2)
    assert [record["step"] for record in read_metrics(folder)] == [1, 2, 3]
    assert read_metrics(folder)[1]["peak_bytes"]["activations"] > 0
    assert list((folder / "tensorboard").glob("events.*"))
    for rank in (0, 1):
        assert "step 2: loss" in (folder / f"rank-{rank}.log").read_text()
    assert '"0STEP"' in (folder / "timeline.json").read_text()
    assert (folder / "tokenizer" / "tokenizer_config.json").is_file()
    assert '"dp_shard","reduce_scatter"' in (folder / "report.html").read_text(), "what rank 0 has sent"
    printed = capfd.readouterr().out
    for part in ("2 ranks", "3/3", "sample", str(folder)):
        assert part in printed, part


def start_train(arguments: list[str], **environ: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise.cli", "train", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(number: int) -> None:
    assert wait_until(lambda: num_lines("runs/2*/metrics.jsonl") >= number), f"no step {number}"


def test_ctrl_c_ends_the_run_after_a_step(settings):
    process = start_train([*settings, "run.num_procs=1", "run.steps=100000"])
    wait_for_step(2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    records = read_metrics(run_folder())
    assert f"at step {len(records)} of 100000" in out
    assert "stopped by Ctrl-C" in out
    assert "Traceback" not in out + err


def test_a_rank_that_diverges_says_so(settings, capfd):
    code = cli.main(
        ["train", *settings, "run.num_procs=1", "optimizer.name=sgd", "optimizer.lr=1e30", "optimizer.clip_norm=none"]
    )
    assert code == 1
    err = capfd.readouterr().err
    assert "[loss-not-finite]" in err
    assert "Traceback" not in err


def test_ranks_of_another_launcher_join(settings):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    process = start_train([*settings, "run.sample_tokens=0"], **place)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert "held-out loss" in out
    assert "prompt" not in out
    assert "step 2: loss" in (run_folder() / "rank-0.log").read_text()


@pytest.mark.cold  # a process that is forked meanwhile would keep the pipe open
def test_a_reader_that_has_seen_enough_ends_the_output_without_a_traceback():
    script = "from shardwise.cli.main import main; raise SystemExit(main(['presets']))"
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    writer.stdout.close()
    _, err = writer.communicate(timeout=PATIENCE_S)
    assert (writer.returncode, err) == (141, "")


def test_a_full_disk_under_the_output_is_one_line():
    script = "from shardwise.cli.main import main; raise SystemExit(main(['config']))"
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S
        )
    line = "shardwise: the answer: No space left on device [disk-full]\n"
    assert (ended.returncode, ended.stderr) == (1, line)


def test_a_half_set_environment_is_refused(settings, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", *settings]) == 2
    assert "[rank-unset]" in capsys.readouterr().err


@pytest.mark.cold
def test_help_needs_no_torch():
    script = (
        "import sys, shardwise.cli.main\nshardwise.cli.main.main(['train', '--help'])\nprint('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "KEY=VALUE" in out
    assert out.splitlines()[-1] == "False"


@pytest.mark.cold
def test_no_extra_is_needed_to_import_the_engine_and_the_trainer():
    missing = "sys.modules.update(dict.fromkeys(['transformers', 'tensorboard', 'triton', 'deepspeed']))"
    script = f"import sys; {missing}; import shardwise.engine.initialize, shardwise.train.run, shardwise.planner.plan"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_config_printed_is_the_config_used(tmp_path, capsys):
    assert cli.main(["config"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "all.toml").write_text(printed)
    assert job.job_config(tmp_path / "all.toml", []) == job.job_config(None, [])
    for key in all_keys():
        assert f"{key.partition('.')[2]} =" in printed
    assert cli.main(["config", "zero.stage=3"]) == 0
    assert "stage = 3" in capsys.readouterr().out


def test_every_key_is_explained_where_it_is_printed(capsys):
    assert cli.main(["config"]) == 0
    printed = capsys.readouterr().out.replace("\n# ", " ")
    for key in all_keys():
        assert describe_key(key) in printed
    assert cli.main(["config", "--markdown"]) == 0
    tables = capsys.readouterr().out.split("## ")[1:]
    rows = [f"{table.split()[0]}.{key}" for table in tables for key in re.findall(r"^\| `(\w+)` \|", table, re.M)]
    assert rows == all_keys()
    assert "| `stage` | an integer >= 0 and <= 3 | `2` | 0 shards nothing, " in tables[6]


def test_the_page_of_the_config_has_its_sections():
    page = (DOCS / "config.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == list(Config.model_fields)


def test_the_users_file_and_settings_go_over_the_defaults(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "has_fast_bf16", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plain = job.job_config(None, [])
    assert plain.precision.param == "bf16"
    (tmp_path / "my.toml").write_text("[optimizer]\nlr = 0.1\n[run]\nsteps = 1000\n[batch]\nglobal_size = 6\n")
    mine = job.job_config(tmp_path / "my.toml", ["optimizer.lr=0.2", "precision.param=fp32", "data.path=some.txt"])
    assert (mine.optimizer.lr, mine.run.steps, mine.precision.param, mine.data.path) == (0.2, 1000, "fp32", "some.txt")
    assert mine.batch.micro_size is None, "a default must not contradict what the user gave"
    assert mine.scheduler.warmup_steps == 50, "a share of the user's steps"
    assert job.job_config(None, ["model.preset=25m"]).optimizer.lr < plain.optimizer.lr
    monkeypatch.setattr(job, "has_fast_bf16", lambda: False)
    slow = job.job_config(None, [])
    assert slow.precision.param == "fp32"
    assert slow.run.steps < plain.run.steps


def test_a_runs_own_config_makes_the_same_run_again(settings):
    config = job.resolve_job(job.job_config(None, [*settings, "zero.stage=3", "batch.accumulation=2"]), 2, 2)
    saved = job.create_folder(config, datetime.now()) / "config.json"
    assert job.resolve_job(job.job_config(saved, []), 2, 2) == config
    assert job.job_config(saved, ["run.steps=7"]).run.steps == 7


def test_two_runs_in_one_second_get_two_folders(tmp_path):
    config = Config.from_dict({"run": {"dir": str(tmp_path / "runs"), "name": "mine"}})
    now = datetime(2025, 1, 1)
    first, second = job.create_folder(config, now), job.create_folder(config, now)
    assert first != second
    assert first.name.endswith("-mine")
    assert Config.from_json((second / "config.json").read_text()) == config


@pytest.mark.parametrize(
    ("words", "found"),
    [("shardwise pla", "plan"), ("shardwise plan --ra", "--ranks"), ("shardwise train mesh.t", "mesh.tp=")],
)
def test_a_shell_completes_commands_flags_and_keys(words, found, monkeypatch, capsys):
    monkeypatch.setenv("_SHARDWISE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert cli.main([]) == 0
    assert f"plain,{found}" in capsys.readouterr().out.splitlines()
    monkeypatch.delenv("_SHARDWISE_COMPLETE")
    assert cli.main(["completion", "bash"]) == 0
    assert "_SHARDWISE_COMPLETE=bash_complete" in capsys.readouterr().out
