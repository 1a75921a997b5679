"""The benchmark of the planner's search runs and writes what it measured. Not how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import BENCHMARKS


@pytest.mark.full
def test_a_whole_answer_is_measured(tmp_path: Path) -> None:
    kept = tmp_path / "measured.json"
    command = [sys.executable, str(BENCHMARKS / "planner_search.py"), "--quick", "--json", str(kept)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    (answer,) = json.loads(kept.read_text())["results"]
    assert (answer["model"], answer["cluster"]) == ("llama-3-8b", "h100:8")
    assert 0 < answer["search_s"] < answer["wall_s"]
    assert answer["cpu_s"] > 0
    assert answer["torch_s"] > 0
    assert 0 < answer["num_priced"] <= answer["num_outlines"] * 100
    assert " a step, " in answer["best"]
    assert answer["wins"]
    assert "llama-3-8b on h100:8: " in finished.stdout
