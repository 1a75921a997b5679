"""A short run in this process."""

import io

import pytest
from rich.console import Console

from shardwise.config.resolve import Config
from shardwise.launch.environment import lone_rank
from shardwise.launch.signals import StopFlag
from shardwise.train import run
from shardwise.train.prepare import prepare_data
from shardwise.train.setup import resolve_job


@pytest.fixture
def train(tmp_path):
    """Run this process as the only rank of a short run; returns the exit code and what was shown."""
    (tmp_path / "text.txt").write_text("".join(f"line {number} of some text\n" for number in range(300)))
    values = {
        "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 64},
        "data": {"path": str(tmp_path / "text.txt"), "seq_len": 16, "tokenizer": "bytes"},
        "run": {"steps": 3, "device": "cpu", "eval_batches": 1, "sample_tokens": 4},
    }

    def start(
        stop: StopFlag | None = None, tiers: dict | None = None, checkpoint: dict | None = None, **run_values
    ) -> tuple[int, str]:
        given = {"run": values["run"] | run_values, "tiers": tiers or {}, "checkpoint": checkpoint or {}}
        config = Config.from_dict(values | given)
        config = resolve_job(config, world_size=1, num_local_ranks=1)
        shard_path = prepare_data(config, tmp_path / "cache").path
        shown = io.StringIO()
        console = Console(file=shown, width=100)
        stop = StopFlag() if stop is None else stop  # a flag that was not set is false
        code = run.run_rank(config, tmp_path / "run", shard_path, env=lone_rank(), stop=stop, console=console)
        return code, shown.getvalue()

    return start
