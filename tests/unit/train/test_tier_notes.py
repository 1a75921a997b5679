"""What `shardwise train` says and refuses where states are stored off the device: before, at the start, in the end."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from harness.refusals import refused
from shardwise.config.resolve import Config
from shardwise.runtime.memory_tracker import Category
from shardwise.train import setup as job
from shardwise.train.loop import Trainer, build_trainer
from shardwise.train.prepare import prepare_data
from shardwise.train.progress import Header, Progress
from shardwise.train.setup import check_job, resolve_job, tiers_line
from shardwise.train.summary import RunOutcome, render_outcome

MODEL = {"preset": "tiny", "num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 257}


@pytest.fixture
def trainer(tmp_path):
    """A trainer with the given tiers that has taken its steps."""
    (tmp_path / "text.txt").write_text("Some words that come again and again. " * 200)
    made: list[Trainer] = []

    def make(**tiers: object) -> Trainer:
        values = {
            "model": MODEL,
            "data": {"path": str(tmp_path / "text.txt"), "seq_len": 16, "tokenizer": "bytes"},
            "batch": {"global_size": 4},
            "tiers": tiers,
            "run": {"steps": 2, "device": "cpu", "eval_batches": 1},
        }
        config = Config.from_dict(values)
        trainer = build_trainer(config, prepare_data(config, tmp_path / "cache"))
        made.append(trainer)
        assert len(list(trainer.steps(lambda: False, lambda activity: None))) == 2
        return trainer

    yield make
    for each in made:
        each.engine.close()


def test_states_on_the_host_are_measured_there(trainer) -> None:
    at_host = trainer(optimizer="host", grads="host")
    held = at_host.engine.layout.bytes_by_tier()["host"]
    assert at_host.host is not None
    assert at_host.host.live_bytes[Category.OPTIMIZER] == held["optimizer"] > 0
    state = Progress(Header("", ""), total_steps=2, step=2)
    text = Console(width=100, file=io.StringIO(), record=True)
    text.print(render_outcome(RunOutcome(state, host=at_host.host)))
    assert re.search(r"host's peak +[\d.]+ \w+: .*optimizer", text.export_text())


def resolved(num_local_ranks: int = 2, **tiers: object) -> Config:
    config = Config.from_dict({"tiers": tiers, "run": {"device": "cpu"}, "optimizer": {"name": "adam"}})
    return resolve_job(config, world_size=2, num_local_ranks=num_local_ranks)


def test_memory_and_disk_are_each_asked_for_what_is_stored_there(tmp_path, monkeypatch) -> None:
    asked: list[tuple[Path, int]] = []
    monkeypatch.setattr(job.SwapFolder, "check_free_space", lambda root, num_bytes: asked.append((root, num_bytes)))
    nvme = {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    by_tier = check_job(resolved(**nvme), 2)[1].bytes_by_tier()
    assert asked == [(tmp_path, 2 * sum(by_tier["nvme"].values()))]
    monkeypatch.setattr(job, "usable_bytes", lambda: 2 * sum(by_tier["device"].values()) + 4096)
    resolved(**nvme)
    for optimizer in ("device", "host"):
        with refused("states-exceed-memory", "model.preset=tiny", "this machine"):
            resolved(optimizer=optimizer)


def test_nvme_needs_a_folder_with_free_space(tmp_path) -> None:
    with refused("no-swap-folder", "tiers.grads=nvme", "tiers.nvme_path"):
        resolved(grads="nvme")
    (tmp_path / "file").touch()
    with refused("swap-refused", str(tmp_path / "file" / "x"), "Not a directory"):
        resolved(grads="nvme", nvme_path=str(tmp_path / "file" / "x"))


def test_the_line_of_the_tiers_adds_up_and_is_empty_where_nothing_is_away() -> None:
    layout = check_job(resolved(optimizer="host", optimizer_on_device=0.5), 2)[1]
    assert re.fullmatch(r"device: parameters .*, gradients .*, optimizer .*; host: optimizer .*", tiers_line(layout))
    assert tiers_line(check_job(resolved(), 2)[1]) == ""
