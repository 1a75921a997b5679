"""What answers from values alone starts without torch, whose import takes longer than the answer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cold

# The last one is to see torch: a config in encoded states counts bytes by their codec, whose module is torch's.
COMMANDS = (
    ("--help", "plan"),
    ("plan --help", "--cluster"),
    ("presets", "llama-3-8b"),
    ("convert ds.json", "global_size = 8"),
    ("timeline pipe.toml", "1f1b"),
    ("plan llama-3-8b h100:8 --simulate 0", "ZeRO"),
    ("plan states.toml h100:8 --simulate 0", "ZeRO"),
    ("plan mixtral-8x7b h100:64 --simulate 0", "2 of 8 experts"),
    ("plan qwen.json h100:64 --simulate 0", "experts"),
    ("plan --fit --cluster rtx-4090:1", "largest at"),
    ("plan states.toml h100:8 --simulate 0 optimizer.name=adamw precision.states=int8", "ZeRO"),
)
# One process runs all: what is not imported after a command was imported by none before it either.
_RUN = """
import contextlib, io, json, sys
from shardwise.cli.main import main
ended = []
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(command.split())
    ended.append([code, printed.getvalue(), sorted({"torch", "transformers"} & set(sys.modules))])
print(json.dumps(ended))
"""


def test_only_what_counts_codes_imports_torch(tmp_path: Path) -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "pipe.toml").write_text("[mesh]\npp = 2\n[batch]\nmicro_size = 1\naccumulation = 4\n")
    (tmp_path / "states.toml").write_text('[model]\npreset = "llama-3-8b"\n[optimizer]\nname = "muon"\n')
    qwen = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32}
    qwen |= {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768}
    qwen |= {"num_experts": 128, "num_experts_per_tok": 8, "hidden_act": "silu", "max_position_embeddings": 4096}
    (tmp_path / "qwen.json").write_text(json.dumps({**qwen, "vocab_size": 1000, "tie_word_embeddings": False}))
    command = [sys.executable, "-c", _RUN, *(each for each, _ in COMMANDS)]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    ended = json.loads(done.stdout.splitlines()[-1])
    for (each, said), (code, printed, modules) in zip(COMMANDS, ended, strict=True):
        assert code == 0, each
        assert said in printed, each
        assert modules == (["torch"] if "precision.states" in each else []), each
