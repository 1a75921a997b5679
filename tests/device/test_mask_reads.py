"""What layers read of a batch's masks on the host is read once: a larger model does not make the host wait more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from device.virtual import reason_to_skip

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=reason_to_skip() or "")

TESTS = Path(__file__).parents[1]
NAMES = ("plain", "padded", "torch's attention replaced, padded", "sparse, padded", "sparse, packed")
MORE = ("sparse, packed by ends", "sparse, packed, recomputed", "cp, padded", "cp, packed", "cp, packed, recomputed")


@pytest.fixture(scope="module")
def waits() -> dict[str, dict[str, Any]]:
    """What `device.mask_reads` prints, by name."""
    paths = os.pathsep.join((str(TESTS), str(TESTS.parent / "src")))
    environ = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", "-m", "device.mask_reads"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return {line["name"]: line for line in map(json.loads, ended.stdout.splitlines())}


@pytest.mark.parametrize("name", [*NAMES, *MORE])
@pytest.mark.parametrize("place", ["device", "host"])
def test_more_layers_make_the_host_wait_no_more(waits: dict[str, dict[str, Any]], name: str, place: str) -> None:
    one, three = (waits[name][size][place] for size in ("one layer", "three layers"))
    assert len(one) == len(three)


@pytest.mark.parametrize("name", ["plain", "sparse, padded", "cp, padded"])
def test_what_is_padded_is_read_before_it_is_on_the_device(waits: dict[str, dict[str, Any]], name: str) -> None:
    assert len(waits[name]["three layers"]["host"]) == 1  # for loss and norm


def test_what_cp_makes_of_a_batch_is_not_waited_for(waits: dict[str, dict[str, Any]]) -> None:
    assert not [wait for wait in waits["cp, padded"]["three layers"]["device"] if "copy" in wait]
