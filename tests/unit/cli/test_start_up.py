"""What answers from values alone starts without torch, whose import takes longer than the answer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cold

_RUN = """
import sys
from shardwise.cli.main import main
code = main(sys.argv[1:])
print(code, *sorted({"torch", "transformers"} & set(sys.modules)), file=sys.stderr)
"""


def run(folder: Path, *arguments: str) -> tuple[str, str]:
    """Run a command in a process of its own; return what it prints, and its exit code with the large modules it has."""
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", _RUN, *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    return done.stdout, done.stderr.splitlines()[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "pipe.toml").write_text("[mesh]\npp = 2\n[batch]\nmicro_size = 1\naccumulation = 4\n")
    (tmp_path / "states.toml").write_text('[model]\npreset = "llama-3-8b"\n[optimizer]\nname = "muon"\n')
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "plan"),
        (["plan", "--help"], "--cluster"),
        (["presets"], "llama-3-8b"),
        (["convert", "ds.json"], "global_size = 8"),
        (["timeline", "pipe.toml"], "1f1b"),
        (["plan", "llama-3-8b", "h100:8", "--simulate", "0"], "ZeRO"),
        (["plan", "states.toml", "h100:8", "--simulate", "0"], "ZeRO"),
        (["plan", "--fit", "--cluster", "rtx-4090:1"], "largest at"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
)
def test_it_needs_no_torch(folder: Path, arguments: list[str], said: str) -> None:
    printed, ended = run(folder, *arguments)
    assert said in printed
    assert ended == "0"


def test_the_check_sees_torch(folder: Path) -> None:
    """A config in encoded states counts bytes by their codec, whose module is torch's."""
    _, ended = run(folder, "plan", "states.toml", "h100:8", "optimizer.name=adamw", "precision.states=int8")
    assert ended == "0 torch"
