"""Benchmarks run and write what they measured: checkpoints, steps on the host, pipelines, attention. Not how fast."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.paths import BENCHMARKS

pytestmark = pytest.mark.begin

OPERATIONS = ["save", "load warm", "load cold", "save aside"]


@pytest.mark.full
def test_checkpoints_are_measured(tmp_path: Path) -> None:
    kept, folder = tmp_path / "measured.json", tmp_path / "folder"
    folder.mkdir()
    options = ["--quick", "--systems", "raw,shardwise", "--operations", ",".join(OPERATIONS)]
    command = [
        sys.executable,
        str(BENCHMARKS / "checkpoint.py"),
        *options,
        "--folder",
        str(folder),
        "--json",
        str(kept),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    assert list(folder.iterdir()) == []
    results = json.loads(kept.read_text())["results"]
    assert [result["operation"] for result in results] == OPERATIONS
    for result in results:
        rows = {row["system"]: row for row in result["systems"]}
        assert set(rows) == ({"shardwise"} if result["operation"] == "save aside" else {"raw", "shardwise"})
        for row in rows.values():
            assert len(row["rounds"]) == 1
            assert min(row["rounds"][0][0]) > 0
    assert "throughput / raw" in finished.stdout


@pytest.mark.full
def test_host_time_and_kernels_are_measured(tmp_path: Path) -> None:
    kept, systems = tmp_path / "measured.json", ["fsdp2-3", "shardwise-3"]
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "host_time.py")]
    options = ["--dtypes", "fp32", "--rounds", "2", "--systems", ",".join(systems)]
    finished = subprocess.run([*command, *options, "--json", str(kept)], capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    rows = json.loads(kept.read_text())["rows"]["fp32"]
    assert [row["system"] for row in rows] == ["plain", *systems]
    plain, peer, ours = rows
    assert min(ours["pass_us"], ours["optimizer_us"], peer["pass_us"], peer["optimizer_us"]) > 0
    assert plain["num_pass_kernels"] < ours["num_pass_kernels"] < 1.05 * peer["num_pass_kernels"]


@pytest.mark.full
def test_the_step_on_the_host_is_measured(tmp_path: Path) -> None:
    kept = tmp_path / "measured.json"
    options = ["--numel", "100000", "--rounds", "2", "--no-deepspeed", "--json", str(kept)]
    command = [sys.executable, str(BENCHMARKS / "cpu_step.py"), *options]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    seconds = json.loads(kept.read_text())["seconds"]
    assert {"fused alone", "shardwise", "passes", "copy", "triad"} <= set(seconds)
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in seconds.values())


@pytest.mark.full
def test_pipelines_are_measured(tmp_path: Path) -> None:
    kept = tmp_path / "measured.json"
    systems = ["torch-1f1b", "shardwise-1f1b", "shardwise-zb-v"]
    options = ["--quick", "--micro-batches", "4", "--systems", ",".join(systems), "--versus", "torch-1f1b"]
    command = [sys.executable, str(BENCHMARKS / "pipeline.py"), *options, "--json", str(kept)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    (result,) = json.loads(kept.read_text())["results"]
    rows = {row["system"]: row for row in result["systems"]}
    assert [row["failure"] for row in rows.values()] == [None] * len(systems)
    assert all(len(row["rounds"]) == 2 for row in rows.values())
    for name in systems[1:]:
        assert rows[name]["losses"] == pytest.approx(rows["torch-1f1b"]["losses"], rel=1e-4)
    assert "shardwise-1f1b / torch-1f1b" in finished.stdout


@pytest.mark.full
def test_bubbles_are_measured(tmp_path: Path) -> None:
    kept = tmp_path / "measured.json"
    options = ["--quick", "--ranks", "2", "--micro-batches", "4", "--schedules", "1f1b,zb-v", "--json", str(kept)]
    command = [sys.executable, str(BENCHMARKS / "bubble.py"), *options]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    rows = {row["schedule"]: row for row in json.loads(kept.read_text())["rows"]}
    assert rows["1f1b"]["expected_s"] == pytest.approx(0.06)
    assert rows["1f1b"]["bubble_s"] > rows["1f1b"]["expected_s"] / 2
    assert rows["1f1b"]["as_timed_s"] > rows["1f1b"]["expected_s"] / 2
    assert rows["zb-v"]["expected_s"] == 0


@pytest.mark.full
def test_attention_is_measured(tmp_path: Path) -> None:
    kept = tmp_path / "measured.json"
    command = [sys.executable, str(BENCHMARKS / "attention.py"), "--quick", "--no-flex", "--json", str(kept)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    results = json.loads(kept.read_text())["results"]
    assert [result["mask"] for result in results] == ["bidirectional", "causal"]
    for result in results:
        rows = {row["name"]: row for row in result["ways"]}
        assert list(rows) == ["dense", "block 16, 50%", "block 64, 50%"]
        assert rows["dense"]["speed_up"] == rows["dense"]["density"] == 1
        for row in rows.values():
            assert row["efficiency"] == pytest.approx(row["speed_up"] * row["density"])
            assert 0.4 < row["density"] <= 1


@pytest.mark.full
def test_split_sequences_are_measured(tmp_path: Path) -> None:
    kept = tmp_path / "measured.json"
    options = ["--quick", "--lengths", "128", "--systems", "hand,ring", "--json", str(kept)]
    command = [sys.executable, str(BENCHMARKS / "context.py"), *options]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    content = json.loads(kept.read_text())
    hand, ring = content["results"][0]["systems"]
    assert ring["losses"] == pytest.approx(hand["losses"], rel=1e-5)
    for row in content["memory"]:
        if row["transport"] != "ulysses":  # which keeps the output twice
            one = row["activation_bytes"][0]
            assert row["activation_bytes"] == pytest.approx([one, one / 4], rel=0.1)


@pytest.mark.parametrize("of_length", [lambda n: 3 * n + 70, lambda n: n * n // 50 + n, lambda n: 10**7])
@pytest.mark.parametrize("limit_bytes", [1_000, 40_000, 1_000_000])
def test_the_longest_sequence_is_the_longest(
    monkeypatch: pytest.MonkeyPatch, of_length: Callable[[int], int], limit_bytes: int
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("attention_models")
    fitting = [length for length in range(script.STEP, 10**6, script.STEP) if of_length(length) <= limit_bytes]
    assert script.longest(of_length, limit_bytes) == max(fitting, default=0)


@pytest.mark.full
def test_models_with_sparse_attention_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    kept = tmp_path / "measured.json"
    command = [sys.executable, str(BENCHMARKS / "attention_models.py"), "--quick", "--models", "bert-base"]
    finished = subprocess.run([*command, "--json", str(kept)], capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    found = json.loads(kept.read_text())["results"]["bert-base"]
    assert all(len(rounds) == 1 and rounds[0] > 0 for rounds in found["cpu_s"].values())
    longest = found["longest"]
    assert longest["eager"] < longest["eager + recompute"] < longest["sparse + recompute"]
    assert longest["eager"] < longest["sparse"] < longest["sparse + recompute"]
