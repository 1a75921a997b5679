"""The benchmark of predictions on this machine runs: it measures, prices and compares. Not how near it comes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.paths import BENCHMARKS
from shardwise.planner.profile import MatmulTime, Profile, write_profile

PROFILE = Profile(
    device="cpu",
    num_ranks=2,
    num_threads=1,
    memory_bytes=8e9,
    matmuls=tuple(MatmulTime(dtype=dtype, m=256, n=256, k=256, seconds=1e-3) for dtype in ("fp32", "bf16")),
    stream_bytes_per_s=3e9,
    step_bytes_per_s=5e9,
    copies_bytes_per_s=(("host->host", 3e9),),
    disk_read_bytes_per_s=1e9,
    disk_write_bytes_per_s=1e9,
)


@pytest.mark.full
def test_predictions_are_compared_with_real_runs(tmp_path: Path) -> None:
    for num_ranks in (1, 2, 4):
        write_profile(replace(PROFILE, num_ranks=num_ranks), tmp_path)
    kept, table = tmp_path / "measured.json", tmp_path / "table.md"
    options = ["--model", "tiny", "--rounds", "1", "--steps", "1", "--warmup", "1", "--profiles", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "planner_machine.py"), *options]
    finished = subprocess.run(
        [*command, "--json", str(kept), "--markdown", str(table)], capture_output=True, text=True, timeout=500
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    rows = json.loads(kept.read_text())["results"]
    assert len(rows) == 15
    assert [row["failure"] for row in rows] == [None] * 15
    for row in rows:
        assert row["step_error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert sum(row["parts_s"].values()) == pytest.approx(row["predicted_s"])
        assert min(row["measured_s"], row["measured_peak_bytes"], row["measured_at_rest_bytes"]) > 0
    assert len(table.read_text().splitlines()) == 17
