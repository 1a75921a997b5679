"""What each command prints for some fixed invocations, word for word: a file of `tests/data/snapshots` a command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import shardwise
from harness.checkpoints import flip, save, values_of
from harness.machines import FAST, GPU, ON_GPUS, SOUND, changed, rank
from harness.snapshots import Snapshots, transcript
from shardwise.checkpoint.manifest import MANIFEST_NAME
from shardwise.cli.verify import conclude, describe
from shardwise.config.resolve import Config
from shardwise.offload.disk_bench import SwapSpeed
from shardwise.report.chrome_trace import chrome_trace
from shardwise.report.console import Terminal
from shardwise.schedule import ActionKind, Schedule, simulate
from shardwise.verify.compare import TrainingDifference
from shardwise.verify.job import make_job
from shardwise.verify.run import VerifyOutcome

pytestmark = pytest.mark.begin

CONFIG = """
[model]
num_layers = 2
hidden_size = 32
num_heads = 4
num_kv_heads = 4
ffn_size = 48
vocab_size = 320
[data]
path = "text.txt"
seq_len = 16
tokenizer = "bytes"
[precision]
param = "fp32"
[batch]
micro_size = 2
accumulation = 2
[run]
device = "cpu"
num_procs = 2
"""
TRAIN_REFUSALS = [
    *("zero.stege=3", "run.steps 7", "missing.toml", "my.toml other.toml", "some.json", "foreign.json"),
    *("my.toml batch.accumulation=none batch.global_size=7", "my.toml --data nowhere", "model.preset=tinny"),
    *("my.toml model.num_heads=3", "my.toml zero.blocks=\"['layers.*']\"", "my.toml optimizer.name=lbfgs"),
    *("my.toml data.seq_len=100000", "my.toml mesh.tp=3", "my.toml mesh.tp=2 run.num_procs=1"),
    *("my.toml mesh.tp=2 model.num_heads=1 model.num_kv_heads=1", "my.toml mesh.tp=2 model.ffn_size=63"),
    "my.toml mesh.tp=4 run.num_procs=4 model.hidden_size=96 model.num_heads=12 model.num_kv_heads=6",
    "my.toml mesh.tp=2 tensor.sequence_parallel=true data.seq_len=15",
    *("tensor.tp=2", "my.toml run.device=cuda", "my.toml run.dir=text.txt/runs", "my.toml run.name=a/b"),
    *("--rsume auto", "--tp 8", "--tp --dry-run", "my.toml --world-size 2", "my.toml --resume nowhere"),
    *("model.preset=llama-405b model.num_layers=126 model.hidden_size=16384", "my.toml --data text.txt zero.stege=3"),
    *("--dry-run my.toml zero.stege=3", "--dry-run my.toml --world-size 3 mesh.dp_shard=2"),
    *("--dry-run my.toml --world-size 0", "--dry-run my.toml optimizer.name=asgd"),
]
GPIPE = "mesh.pp=2 pipeline.schedule=gpipe batch.accumulation=2"
COMMANDS = {
    "shardwise": ["", "--version", "plam", "--foo", "presets tiny", "presets --tp 8"],
    "train": [
        "train --help",
        "train --dry-run my.toml zero.stage=3 --world-size 64 mesh.dp_shard=8",
        "train --dry-run my.toml run.device=cuda --resume=auto --world-size=2",
        "train --dry-run my.toml mesh.tp=2 tensor.sequence_parallel=true --world-size 4",
        *(f"train {arguments}" for arguments in TRAIN_REFUSALS),
    ],
    "config": ["config --help"],
    "presets": ["presets"],
    "plan": [
        "plan --help",
        "plan --model 25m --cluster h100:4 --global-batch 16 --seq 512",
        "plan --dry-run my.toml mesh.pp=2 mesh.dp_shard=2 run.num_procs=4",
        "plan --dry-run my.toml mesh.pp=2 mesh.dp_shard=2 run.num_procs=4 tiers.optimizer=host --ranks stages",
        *("plan llama-70b h100:8 h100:16", "plan --model 70b --cluster h100:8", "plan Qwen/Qwen2.5-7B h100:8"),
        *("plan my.toml --ranks 0", "plan --dry-run my.toml --ranks first", "plan --dry-run my.toml --ranks 4"),
        *("plan --dry-run my.toml --world-size 7 mesh.pp=2", "plan --dry-run my.toml mesh.pp=9 run.num_procs=9"),
        *("plan --dry-run my.toml pipeline.shedule=gpipe", "plan", "plan --zzz", "plan --model", "plan --num-procs=8"),
        *("plan my.toml --top 0", "plan my.toml --margin 2", "plan my.toml --fit --explain my.toml"),
    ],
    "timeline": [
        "timeline --help",
        f"timeline {GPIPE}",
        "timeline my.toml mesh.pp=2 pipeline.schedule=1f1b batch.accumulation=4",
        "timeline mesh.pp=2 pipeline.schedule=interleaved pipeline.virtual_stages=2 batch.accumulation=4",
        *(f"timeline {GPIPE} --transfer-s 0.5", f"timeline {GPIPE} --recorded run.json"),
        f"timeline {GPIPE} --recorded run.json --forward-s 0.03",
        f"timeline {GPIPE} --html plan.html --chrome-trace plan.json",
        *("timeline pipeline.shedule=gpipe", "timeline --forward-s -1", "timeline --recorded nowhere.json"),
        *("timeline --recorded text.txt", "timeline --recorded other.json", "timeline pipeline.schedule=interleaved"),
        "timeline --html nowhere/plan.html",
    ],
}


PLACEHOLDERS = {
    r"simulated in [\d.]+ m?s": "simulated in TIME",
    r"\d[\d.]* m?s \([\d.,]+ .?B/s\)": "TIME (SPEED)",
    r"(?<=/cache/)\w{24}": "HASH",
    r"(?<=is not element-wise; choose one of )[\w, ]+(?= \[)": "NAMES",
    r"/\S*/test_\w+_prints\w*": "FOLDER",
    re.escape(f"shardwise {shardwise.__version__}") + "(?=\n)": "shardwise VERSION",
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with some files, on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLORTERM", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("shardwise.train.setup.has_fast_bf16", lambda: True)
    monkeypatch.setattr("shardwise.train.run.launch_local", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr("shardwise.verify.run.launch_local", lambda *_, **__: pytest.fail("ranks were started"))
    Path("my.toml").write_text(CONFIG)
    Path("other.toml").write_text("")
    Path("text.txt").write_text("def double(x):\n    return 2 * x\n" * 400)
    Path("some.json").write_text("[1]")
    Path("foreign.json").write_text('{"optimiser": {"lr": 1}}')
    Path("other.json").write_text('{"traceEvents": [{"ph": "X", "name": "mm"}]}')
    timed = simulate(
        Schedule.parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1"),
        lambda rank, action: 0.02 if action.kind is ActionKind.FORWARD else 0.03,
    )
    Path("run.json").write_text(json.dumps(chrome_trace(timed)))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints(name: str, snapshots: Snapshots, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started, and no folder is left by a command that does not run."""
    snapshots.check(name, transcript(COMMANDS[name], capsys, PLACEHOLDERS))
    assert not list(Path().glob("runs/2*"))


def test_the_doctor_prints(
    snapshots: Snapshots, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = changed(ON_GPUS | {"memory.shm_bytes": 2**26, "swap": replace(SOUND.disk, needed_bytes=2**30)})
    copies = (("host->host", 2e10), ("host->device", 5e10))
    on_gpu = rank(GPU.name, flops_per_s={"fp32": 5e13, "bf16": 7e14}, copies_bytes_per_s=copies)
    measured = replace(
        FAST,
        ranks=(on_gpu, on_gpu),
        failures={"with 2 ranks at work at once": "rank 1 exited with code 1: no network here"},
        swap=SwapSpeed("/nvme", 2**27, direct=True, read_bytes_per_s=7e9, write_bytes_per_s=6e9),
    )
    monkeypatch.setattr("shardwise.doctor._measure", lambda *_, **__: measured)
    monkeypatch.setattr("shardwise.doctor.gather_facts", lambda *_, **__: SOUND)
    text = transcript(["doctor --help", "doctor --quick", "doctor --quick zero.stge=1"], capsys)
    monkeypatch.setattr("shardwise.doctor.gather_facts", lambda *_, **__: facts)
    snapshots.check("doctor", f"{text}\n{transcript(['doctor', 'doctor --json'], capsys)}")


def test_checkpoint_prints(snapshots: Snapshots, capsys: pytest.CaptureFixture[str]) -> None:
    about = {
        "layout": {"mesh": {"pp": 1, "dp_shard": 2, "tp": 2}, "stage": 3, "precision": {"param": "bf16"}},
        "config": {"zero": {"stage": 3}, "optimizer": {"lr": 0.1}},
        "trajectory": {"optimizer": {"kind": "AdamW"}},
        "model": {"class": "LlamaForCausalLM", "config": {"model_type": "llama", "dtype": "float32"}},
        "saved_at": "2026-11-21T18:00:00+00:00",
        "library": "0.1.0",
    }
    values = values_of()
    values["up.bias", "exp_avg"][2] += 0.5
    for step in (100, 200):
        save(Path("runs/a"), values_of(), step=step, **about)
    save(Path("runs/b"), values, 3, step=200, **about | {"config": {"zero": {"stage": 3}, "optimizer": {"lr": 0.2}}})
    names = ("show", "verify", "diff", "export")
    commands = [
        *(f"checkpoint {name} --help" for name in names),
        *("checkpoint show runs/a", "checkpoint show runs/a --step 100 --tensors", "checkpoint show --tensors runs/a"),
        *("checkpoint show runs/a --tensors head.*", "checkpoint show runs/a --tensors up --json"),
        *("checkpoint verify runs/a", "checkpoint diff runs/a runs/b", "checkpoint diff runs/a runs/b --weights"),
        "checkpoint export runs/a hf",
        *("checkpoint show runs/aa", "checkpoint verify runs", "checkpoint verify runs/a --step 150"),
        *("checkpoint show runs/a --tensors up.wieght", "checkpoint show", "checkpoint diff runs/a", "checkpoint"),
        *("checkpoint export runs/a hf", "checkpoint export runs/nowhere hf"),
    ]
    text = transcript(commands, capsys, PLACEHOLDERS)
    path = Path("runs/a/step-00000200/rank-00000-of-00002.safetensors")
    flip(path, path.stat().st_size - 1)
    Path("runs/a/step-00000100", MANIFEST_NAME).write_text("torn")
    damaged = ["checkpoint verify runs/a", "checkpoint show runs/a", "checkpoint show runs/a --step 100"]
    snapshots.check("checkpoint", f"{text}\n{transcript(damaged, capsys, PLACEHOLDERS)}")


def test_verify_prints(snapshots: Snapshots, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [
        "verify --help",
        *("verify mesh.tp=3", "verify mesh.pp=2 --world-size 7", "verify zero.stege=3", "verify --model nowhere"),
        *("verify --steps 0", "verify mesh.pp=2 mesh.tp=2 --processes 4", "verify --mesh.tp"),
    ]
    text = transcript(commands, capsys, PLACEHOLDERS)
    config = Config.from_dict({"zero": {"stage": 3}, "batch": {"global_size": 128, "micro_size": 2}})
    job = make_job(config.override(["precision.param=bf16", "mesh.pp=2"]), 64, num_steps=2)
    names = ("embed.weight", "blocks.0.ffn.up.weight")
    gradient = TrainingDifference("gradient", 1, 0.25, names, (1.25, 1.0))
    outcomes = [
        VerifyOutcome(0, error=1.5e-16, elapsed_s=2.5),
        VerifyOutcome(1, gradient, ("stages 0, 1, rank 1", "stage 0, rank 0")),
        VerifyOutcome(1, TrainingDifference("loss", 2, 0.5, (), (3.0, 2.0))),
        VerifyOutcome(137, folder=Path("logs")),
        VerifyOutcome(130),
    ]
    for each in (describe(job), *(conclude(job, outcome) for outcome in outcomes)):
        Terminal(highlight=False).print(each)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    snapshots.check("verify", "\n".join([text, *lines, ""]))
