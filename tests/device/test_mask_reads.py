"""What layers read of a batch's masks on the host is read once: a larger model does not make the host wait more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from device.virtual import reason_to_skip
from harness.warm_python import WarmPython

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=reason_to_skip() or "")

TESTS = Path(__file__).parents[1]
# Each kind of batch and each way to attend to it is there; the others are combinations of these.
NAMES = ("plain", "torch's attention replaced, padded", "sparse, padded", "sparse, packed by ends")
MORE = ("cp, padded",)
OTHERS = ("padded", "sparse, packed", "sparse, packed, recomputed", "cp, packed", "cp, packed, recomputed")


@pytest.fixture(scope="module")
def waits(warm_programs: WarmPython) -> dict[str, dict[str, Any]]:
    return measured(warm_programs, [*NAMES, *MORE])


@pytest.fixture(scope="module")
def other_waits(warm_programs: WarmPython) -> dict[str, dict[str, Any]]:
    return measured(warm_programs, OTHERS)


def measured(warm_programs: WarmPython, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What `device.mask_reads` prints, by name."""
    paths = os.pathsep.join((str(TESTS), str(TESTS.parent / "src")))
    environ = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, "-m", "device.mask_reads", *names]
    with mock.patch.object(subprocess, "Popen", warm_programs.popen()):
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return {line["name"]: line for line in map(json.loads, ended.stdout.splitlines())}


@pytest.mark.parametrize("name", [*NAMES, *MORE])
@pytest.mark.parametrize("place", ["device", "host"])
def test_more_layers_make_the_host_wait_no_more(waits: dict[str, dict[str, Any]], name: str, place: str) -> None:
    one, two = (waits[name][size][place] for size in ("one layer", "two layers"))
    assert len(one) == len(two)


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("place", ["device", "host"])
def test_nor_do_they_where_options_meet(other_waits: dict[str, dict[str, Any]], name: str, place: str) -> None:
    test_more_layers_make_the_host_wait_no_more(other_waits, name, place)


@pytest.mark.parametrize("name", ["plain", "sparse, padded", "cp, padded"])
def test_what_is_padded_is_read_before_it_is_on_the_device(waits: dict[str, dict[str, Any]], name: str) -> None:
    assert len(waits[name]["two layers"]["host"]) == 1  # for loss and norm


def test_what_cp_makes_of_a_batch_is_not_waited_for(waits: dict[str, dict[str, Any]]) -> None:
    assert not [wait for wait in waits["cp, padded"]["two layers"]["device"] if "copy" in wait]
