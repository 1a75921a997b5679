"""The benchmark of checkpoints runs, each operation, and writes what it has measured; how fast is not asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OPERATIONS = ["save", "load warm", "load cold", "save aside"]


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
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
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
