"""The library on a virtual CUDA device, whose streams run in any legal order: the numbers are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from device.virtual import reason_to_skip

pytestmark = [
    pytest.mark.begin,  # what takes long and is one file goes first
    pytest.mark.skipif(reason_to_skip() is not None, reason=reason_to_skip() or ""),
]

TESTS = Path(__file__).parents[1]
NUM_FAULTS = 12
QUICK = (
    *("stage 2", "stage 3, recompute full", "tp, chunks", "everything on the host", "activations on the host"),
    *("gathers in int8", "saves, states int8", "pp 1f1b", "state access", "memory handed over"),
)


def run_orders(*arguments: str) -> list[dict[str, object]]:
    """What `device.orders` prints; a process of its own, since the device is torch's from then on."""
    paths = os.pathsep.join((str(TESTS), str(TESTS.parent / "src")))
    environ = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "device.orders", *arguments]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def check(verdicts: list[dict[str, object]]) -> None:
    assert {verdict["name"]: verdict["races"] for verdict in verdicts if verdict["races"]} == {}
    assert [verdict["foreign_calls"] for verdict in verdicts if verdict["foreign_calls"]] == []


def test_numbers_do_not_depend_on_the_order_of_streams() -> None:
    verdicts = run_orders("--quick", *QUICK)
    assert len(verdicts) >= len(QUICK)
    check(verdicts)


@pytest.mark.full
def test_numbers_do_not_depend_on_any_order() -> None:
    check(run_orders())


def test_each_fault_that_is_planted_is_seen() -> None:
    verdicts = run_orders("--faults")
    assert len(verdicts) == NUM_FAULTS
    assert [verdict["name"] for verdict in verdicts if not verdict["races"] or "eager" in verdict["races"]] == []
