"""The command line as a user meets it: what is wrong is said in one line before anything starts, and runs end well."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardwise
from harness.paths import DOCS
from harness.waiting import PATIENCE_S, num_lines, wait_until
from shardwise.cli import main as cli
from shardwise.config.reference import describe_key
from shardwise.config.resolve import Config, all_keys
from shardwise.train import setup as job

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


def test_two_ranks_train_and_leave_everything_behind(settings, capfd):
    assert cli.main(["train", *settings, "run.num_procs=2", "precision.param=fp32"]) == 0
    folder = run_folder()
    config = Config.from_json((folder / "config.json").read_text())
    assert (config.mesh.dp_shard, config.batch.global_size, config.run.num_procs) == (2, 16, 2)
    assert [record["step"] for record in read_metrics(folder)] == [1, 2, 3]
    assert read_metrics(folder)[1]["peak_bytes"]["activations"] > 0
    assert list((folder / "tensorboard").glob("events.*"))
    for rank in (0, 1):
        assert "step 2: loss" in (folder / f"rank-{rank}.log").read_text()
        assert "BACKWARD" not in (folder / f"timeline-{rank}.jsonl").read_text()
        assert '"0STEP"' in (folder / f"timeline-{rank}.jsonl").read_text()
    assert (folder / "tokenizer" / "tokenizer_config.json").is_file()
    printed = capfd.readouterr().out
    for part in (
        "ZeRO-2 over 2 ranks",
        "step 3/3",
        "eval loss",
        "to compare",
        "tokens/s",
        "at rest",
        "sample",
        str(folder),
    ):
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
    assert "must be finite" in err
    assert "Traceback" not in err


def test_ranks_of_another_launcher_join(settings):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    process = start_train([*settings, "run.sample_tokens=0"], **place)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert "1 rank, so nothing is sharded" in out
    assert "eval loss" in out
    assert "prompt" not in out
    assert "step 2: loss" in (run_folder() / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zero.stege=3"], "zero.stege is not a config key; did you mean zero.stage?"),
        (["run.steps", "7"], "run.steps has no value; write run.steps=..."),
        (["missing.toml"], "cannot read missing.toml: No such file or directory; give the path of a TOML file"),
        (["a.toml", "b.toml"], "a.toml and b.toml are two config files"),
        (["batch.global_size=7"], "batch.global_size=7 is not a multiple of"),
        (["--data", "nowhere"], "data.path=nowhere does not exist"),
        (["--data", "text.txt", "zero.stege=3"], "zero.stege is not a config key"),
        (["model.preset=tinny"], "tinny is not a preset; did you mean tiny?"),
        (["model.num_heads=3"], "model.num_heads=3 does not divide hidden_size=32"),
        (["zero.blocks=['layers.*']"], "zero.blocks"),
        (["optimizer.name=lbfgs"], "is not element-wise"),
        (["data.seq_len=100000"], "data.seq_len=100000"),
        (
            ["mesh.tp=3"],
            "world size 2 is not a multiple of pp 1 x dp_replicate 1 x cp 1 x tp 3 = 3; start a multiple of 3",
        ),
        (["mesh.tp=2", "run.num_procs=1"], "world size 1 is not a multiple of pp 1 x dp_replicate 1 x cp 1 x tp 2 = 2"),
        (
            ["mesh.tp=2", "model.num_heads=1", "model.num_kv_heads=1"],
            "tp=2 does not divide num_heads=1; nearest legal: 1",
        ),
        (
            ["mesh.tp=4", "run.num_procs=4", "model.hidden_size=96", "model.num_heads=12", "model.num_kv_heads=6"],
            "tp=4 does not divide num_kv_heads=6; nearest legal: 3, 6",
        ),
        (["mesh.tp=2", "model.ffn_size=63"], "tp=2 does not divide ffn_size=63; nearest legal: 1, 3"),
        (
            ["mesh.tp=2", "tensor.sequence_parallel=true", "data.seq_len=15"],
            "data.seq_len=15 does not divide by tp=2, as tensor.sequence_parallel needs; nearest legal: 14, 16; or set",
        ),
        (["tensor.tp=2"], "tensor.tp is not a config key; did you mean mesh.tp?"),
        (["run.device=cuda"], "no GPU"),
        (["run.dir=text.txt/runs"], "text.txt/runs"),
        (["run.name=a/b"], "run.name=a/b is not the name of a folder"),
        (["model.preset=llama-405b", "model.num_layers=126", "model.hidden_size=16384"], "needs"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(settings, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("shardwise.train.run.launch_local", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["train", "run.num_procs=2", *settings, *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("shardwise: ")
    assert err.count("\n") == 1, "one line"
    assert not list(Path().glob("runs/2*")), "no folder of a run that never was"


def test_a_dry_run_says_what_a_rank_would_hold_and_starts_nothing(settings, capsys, monkeypatch):
    monkeypatch.setattr("shardwise.train.run.launch_local", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["train", "--dry-run", *settings, "zero.stage=3", "--world-size", "64", "mesh.dp_shard=8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    words = [line.split() for line in lines]
    assert any("ZeRO-3 over 64 ranks, 8 replicas of 8 shards" in line for line in lines)
    assert any(row[:1] == ["checkpoint"] and row[3:] == ["by", "all", "ranks", "together"] for row in words)
    # The one block and the root: gathered once each, since the backward begins with them, and reduced once each.
    assert ["dp_shard", "all-gather", "2"] in [row[:3] for row in words]
    assert ["dp_shard", "reduce-scatter", "2"] in [row[:3] for row in words]
    assert ["dp_replicate+dp_shard", "all-reduce-scalars", "1"] in [row[:3] for row in words]
    assert list(Path().iterdir()) == [Path("text.txt")], "no folder, no cache"


def test_a_dry_run_is_of_the_run_that_is_resumed(settings, capsys):
    assert cli.main(["train", "--dry-run", *settings, "--resume=auto", "--world-size=2"]) == 0
    assert "layers of" in capsys.readouterr().out
    assert cli.main(["train", "--dry-run", *settings, "--resume=nowhere"]) == 2
    assert "--resume nowhere: nowhere does not exist" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_ends_the_output_without_a_traceback():
    script = "from shardwise.cli.main import main; raise SystemExit(main(['config']))"
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
    line = "shardwise: cannot write the answer: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, line)


def test_a_dry_run_of_split_layers_shows_what_crosses_the_tp_axis(settings, capsys):
    split = ["mesh.tp=2", "tensor.sequence_parallel=true", "model.num_layers=1"]
    assert cli.main(["train", "--dry-run", *settings, *split, "--world-size", "4"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "ZeRO-2 over 2 of 4 ranks x tensor and sequence parallel over 2" in out
    assert "x 2 data-parallel ranks" in out
    assert "tp all-gather" in out
    assert "tp reduce-scatter" in out


def test_a_dry_run_needs_no_gpu_to_book_nccls_collectives(settings, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["train", "--dry-run", *settings, "run.device=cuda", "--world-size=2"]) == 0
    assert "NCCL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "zero.stege=3"], "did you mean zero.stage?"),
        (["--dry-run", "--world-size=3", "mesh.dp_shard=2"], "world size 3 is not a multiple of"),
        (["--dry-run", "--world-size=0"], "world size 0 holds no rank"),
        (["--dry-run", "batch.global_size=7", "--world-size=2"], "batch.global_size=7 is not a multiple of"),
        (["--dry-run", "optimizer.name=lbfgs"], "is not element-wise"),
        (["--dry-run", "optimizer.name=asgd"], "an optimizer such as adamw"),
        (["--world-size=2"], "add --dry-run"),
    ],
)
def test_what_is_wrong_with_a_dry_run_is_said_on_one_line(settings, capsys, arguments, message):
    assert cli.main(["train", *settings, *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("shardwise: ")
    assert err.count("\n") == 1


def test_a_half_set_environment_is_refused(settings, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", *settings]) == 2
    assert "RANK is not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plam"], "did you mean plan?"),
        (["train", "--rsume", "auto"], "train has no flag --rsume; did you mean --resume?"),
        (["plan", "--zzz"], "plan has no flag --zzz; see shardwise plan --help"),
        (["plan", "--model"], "argument --model: expected one argument"),
        (["presets", "tiny"], "tiny is more than the command takes"),
        (["train", "--tp", "8"], "train has no flag --tp; did you mean mesh.tp=8?"),
        (["plan", "--num-procs=8"], "did you mean run.num_procs=8?"),
        (["verify", "--mesh.tp"], "did you mean mesh.tp=...?"),
        (["train", "--tp", "--dry-run"], "did you mean mesh.tp=...?"),
        (["presets", "--tp", "8"], "presets has no flag --tp; see shardwise presets --help"),
        (["--foo"], "shardwise has no flag --foo"),
    ],
)
def test_unknown_commands_and_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as exited:
        cli.main(arguments)
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("shardwise: ")
    assert error.count("\n") == 1


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_that_of_a_mistake(capsys):
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert "train a decoder on text" in shown.err
    assert not shown.out


def test_help_needs_no_torch():
    script = (
        "import sys, shardwise.cli.main\n"
        "try: shardwise.cli.main.main(['train', '--help'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "key=value" in out
    assert out.splitlines()[-1] == "False"


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as exited:
        cli.main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"shardwise {shardwise.__version__}\n"


def test_no_extra_is_needed_to_import_the_engine_and_the_trainer():
    missing = "sys.modules.update(dict.fromkeys(['transformers', 'tensorboard', 'triton', 'deepspeed']))"
    script = f"import sys; {missing}; import shardwise.engine.initialize, shardwise.train.run, shardwise.planner.plan"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_config_printed_is_the_config_used(tmp_path, capsys):
    assert cli.main(["config"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "all.toml").write_text(printed)
    assert job.job_config(tmp_path / "all.toml", []) == job.job_config(None, [])
    for key in all_keys():
        assert f"{key.partition('.')[2]} =" in printed
    assert cli.main(["config", "zero.stage=3"]) == 0
    assert "stage = 3" in capsys.readouterr().out


def test_every_key_is_explained_where_it_is_printed_and_in_the_docs(capsys):
    assert cli.main(["config"]) == 0
    printed = capsys.readouterr().out.replace("\n# ", " ")
    for key in all_keys():
        assert describe_key(key) in printed
    assert cli.main(["config", "--markdown"]) == 0
    assert capsys.readouterr().out == (DOCS / "config.md").read_text()


def test_help_of_train_names_the_sections(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    out = capsys.readouterr().out
    assert all(section in out for section in Config.model_fields)


def test_presets_answers(capsys):
    assert cli.main(["presets"]) == 0
    assert "llama-405b   406 B" in capsys.readouterr().out


def test_the_users_file_and_settings_go_over_the_defaults(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "has_fast_bf16", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plain = job.job_config(None, [])
    assert plain.precision.param == "bf16"
    (tmp_path / "my.toml").write_text("[optimizer]\nlr = 0.1\n[run]\nsteps = 1000\n[batch]\nglobal_size = 6\n")
    mine = job.job_config(tmp_path / "my.toml", ["optimizer.lr=0.2", "precision.param=fp32"], "some.txt")
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
    saved = job.create_folder(config, time.localtime()) / "config.json"
    assert job.resolve_job(job.job_config(saved, []), 2, 2) == config
    assert job.job_config(saved, ["run.steps=7"]).run.steps == 7


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "is not a config"), ('{"optimiser": {"lr": 1}}', "is not a config key")]
)
def test_other_json_is_no_config(settings, capsys, text, message):
    Path("some.json").write_text(text)
    assert cli.main(["train", "some.json"]) == 2
    assert message in capsys.readouterr().err


def test_two_runs_in_one_second_get_two_folders(tmp_path):
    config = Config.from_dict({"run": {"dir": str(tmp_path / "runs"), "name": "mine"}})
    now = time.localtime(0)
    first, second = job.create_folder(config, now), job.create_folder(config, now)
    assert first != second
    assert first.name.endswith("-mine")
    assert Config.from_json((second / "config.json").read_text()) == config
