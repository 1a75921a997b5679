"""Layers of experts on two virtual devices: whichever stream is first, the bits are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from device.virtual import reason_to_skip

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=reason_to_skip() or "")

TESTS = Path(__file__).parents[1]


@pytest.mark.usefixtures("warm_python")
def test_streams_change_nothing_and_the_host_waits_once_a_layer(pytestconfig: pytest.Config) -> None:
    is_full = pytestconfig.getoption("--full")
    paths = os.pathsep.join((str(TESTS), str(TESTS.parent / "src")))
    environ = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "device.expert_streams", *([] if is_full else ["--quick"])]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    refusals = [line.pop("refusal") for line in found if "refusal" in line]
    found = [line for line in found if line]
    assert refusals == ["routing-changed"] * 2
    assert len(found) == 2 * (5 if is_full else 2)  # ranks, orders
    for line in found:
        assert line["differences"] == [], line["order"]
        assert [where.partition(" ")[0] for where in line["waits"]] == ["event"] * 2, line["order"]
        # In a step two layers, whose recomputations do not wait, and then loss and norm.
        assert [where.partition(" ")[0] for where in line["step_waits"]] == ["event"] * 3, line["order"]
        assert line["numbers"] == found[0]["numbers"], line["order"]
