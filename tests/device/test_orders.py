"""The library on a virtual CUDA device, whose streams run in any legal order: the numbers are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from device.virtual import reason_to_skip
from harness.warm_python import WarmPython

pytestmark = [
    pytest.mark.begin,  # what takes long and is one file goes first
    pytest.mark.skipif(reason_to_skip() is not None, reason=reason_to_skip() or ""),
]

TESTS = Path(__file__).parents[1]
NUM_FAULTS = 12
# By a word of its name that no other has.
QUICK = (
    *("stage 3, recompute full", "tp, chunks", "everything on the host", "activations on the host"),
    *("gathers in int8", "saves, states int8, save_async", "state access", "memory handed over"),
)


Lines = list[dict[str, Any]]


def run(module: str, *arguments: str, warm: WarmPython | None = None) -> Lines:
    """What a program prints; a process of its own, since the device is torch's from then on."""
    paths = os.pathsep.join((str(TESTS), str(TESTS.parent / "src")))
    environ = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environ["PYTHONWARNINGS"] = "ignore"
    command = [sys.executable, "-m", module, *arguments]
    with nullcontext() if warm is None else mock.patch.object(subprocess, "Popen", warm.popen()):
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def check(verdicts: Lines) -> None:
    assert {verdict["name"]: verdict["races"] for verdict in verdicts if verdict["races"]} == {}
    assert [verdict["foreign_calls"] for verdict in verdicts if verdict["foreign_calls"]] == []


@pytest.fixture(scope="module")
def verdicts(warm_programs: WarmPython) -> Lines:
    """Of some cases, then of the faults: one process learns all shapes once."""
    return run("device.orders", "--quick", "--faults", *QUICK, warm=warm_programs)


def test_numbers_do_not_depend_on_the_order_of_streams(verdicts: Lines) -> None:
    assert len(verdicts) == len(QUICK) + NUM_FAULTS
    check(verdicts[: len(QUICK)])


def test_each_fault_that_is_planted_is_seen(verdicts: Lines) -> None:
    planted = verdicts[len(QUICK) :]
    assert [verdict["name"] for verdict in planted if not verdict["races"]] == []


def test_a_rank_that_fails_ends_what_the_device_of_another_waits_for(warm_programs: WarmPython) -> None:
    (found,) = run("device.failures", warm=warm_programs)
    assert found["error"].startswith("CommError: rank 0 failed in ")
    assert "rank 1 has failed: ValueError: no such label" in found["error"]
    assert found["seconds"] < 30  # the transport's time-out is twice that


@pytest.mark.full
def test_numbers_do_not_depend_on_any_order() -> None:
    check(run("device.orders"))
