"""What a dry run shows of the tiers in which states are stored."""

from __future__ import annotations

import re
import signal
from io import StringIO

import pytest
from rich.console import Console

from shardwise.config.resolve import Config
from shardwise.runtime.format import format_bytes
from shardwise.train.setup import job_config
from shardwise.verify.dry_run import DryRun, dry_run, render

pytestmark = pytest.mark.begin

SMALL = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 96, "vocab_size": 64}
NAMES = {"device": "device", "host": "host", "nvme": "NVMe"}


def run_with(attention: str = "dense", **tiers: object) -> DryRun:
    config = {
        "model": SMALL,
        "attention": {"kind": attention},
        "data": {"seq_len": 16},
        "batch": {"micro_size": 2, "accumulation": 3},
        "precision": {"param": "bf16"},
        "zero": {"stage": 3},
        "tiers": tiers,
        "run": {"device": "cpu"},
    }
    return dry_run(Config.from_dict(config), world_size=2)


CONFIG = {
    "model": SMALL,
    "data": {"seq_len": 16},
    "batch": {"micro_size": 2, "accumulation": 2},
    "precision": {"param": "bf16"},
    "zero": {"stage": 3},
    "run": {"device": "cpu"},
}


@pytest.fixture(scope="module")
def exact() -> DryRun:
    return dry_run(Config.from_dict(CONFIG), 4, (0, 1))


@pytest.mark.parametrize("limit_s", [0.0, 5.02])
def test_what_is_not_simulated_in_time_is_estimated(limit_s: float, exact: DryRun) -> None:
    before, (left_s, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    run = dry_run(Config.from_dict(CONFIG), 4, (0, 1), limit_s=limit_s)
    assert [rank.num_simulated for rank in run.ranks] == [0, 0]
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert [rank.layout.bytes_at_rest() for rank in run.ranks] == [rank.layout.bytes_at_rest() for rank in exact.ranks]
    for estimated, simulated in zip(run.ranks, exact.ranks, strict=True):
        assert estimated.peak_bytes == pytest.approx(simulated.peak_bytes, rel=0.3)
    text = " ".join(word for line in shown(run) for word in line)
    assert "ranks 0, 1 estimated by the planner" in text
    assert "0, about" in text
    assert "a step sends over" not in text, "the planner does not know the collectives"
    assert signal.getsignal(signal.SIGALRM) is before
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 1) == (left_s > 1), "a timer around it goes on"


def test_what_is_simulated_in_time_is_exact(exact: DryRun) -> None:
    run = dry_run(Config.from_dict(CONFIG), 4, (0, 1), limit_s=500.0)
    assert [rank.peak for rank in run.ranks] == [rank.peak for rank in exact.ranks]
    assert "about" not in " ".join(word for line in shown(run) for word in line)


def shown(run: DryRun) -> list[list[str]]:
    """The words of each line, at 80 columns."""
    console = Console(width=80, file=StringIO(), record=True)
    console.print(render(run))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    return [line.split() for line in lines]


def test_where_states_are_stored_and_what_a_step_moves() -> None:
    run = run_with(params="host", params_on_device=0.4, grads="host", optimizer="nvme", nvme_path="swap")
    layout, rows = run.layout, shown(run)
    by_tier = layout.bytes_by_tier()
    assert set(by_tier) == {"device", "host", "nvme"}
    for tier, totals in by_tier.items():
        sizes = (*totals.values(), sum(totals.values()))
        cells = [f"{num_bytes / 2**10:,.2f}" if num_bytes else "-" for num_bytes in sizes]
        assert any(row[-5:] == [NAMES[tier], *cells] for row in rows)
    across = layout.bytes_across(num_micro_batches=3)
    assert len(across) == 4
    for (source, target), num_bytes in across.items():
        assert [NAMES[source], NAMES[target], *format_bytes(num_bytes).split()] in rows


def test_what_is_stored_on_the_device_does_not_move() -> None:
    rows = shown(run_with(activations="device"))
    assert not any(row[:3] == ["a", "step", "moves"] for row in rows)
    assert any(row[:3] == ["a", "step", "sends"] for row in rows)


@pytest.mark.parametrize("kind", [pytest.param("dense", marks=pytest.mark.full), "sliding-window"])
def test_sparse_attention_is_said_with_the_model(kind: str) -> None:
    text = " ".join(word for row in shown(run_with(kind)) for word in row)
    assert ("sliding-window attention over 100 % of the causal half" in text) == (kind != "dense")


def test_what_a_rank_holds_is_said_before_it_is_simulated() -> None:
    said: list[str] = []
    dry_run(job_config(None, ["run.device=cpu", "data.seq_len=16", "zero.stage=3"]), 4, announce=said.append)
    assert re.match(r"[\d.]+ MiB at rest on a rank \(params [\d.]+ MiB, .*optimizer [\d.]+ MiB\)$", said[0])
    assert "simulating rank 0 of 4" in said[1]
