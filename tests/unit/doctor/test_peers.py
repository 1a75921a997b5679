"""Ranks that measure: what hangs or dies is said and leaves nothing."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import is_running
from shardwise.doctor.calibrate import OPS, RESULTS, SIZES_BYTES, glance, measure_on_ranks

pytestmark = pytest.mark.begin

ROW = {"rank": 0, "field": "call_s", "value": 0.5}

# A rank that notes its process id; then rank 1 does as `fault` says.
SCRIPT = f"""
import json, os, signal, sys, time
from pathlib import Path
pids, fault, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
if os.environ["RANK"] == "0":
    (folder / {RESULTS!r}).write_text({json.dumps(ROW)!r} + '\\n{{"rank": 0, "fie')
note = pids.with_name(os.environ["RANK"])
note.write_text(str(os.getpid()))
note.rename(pids / note.name)
if os.environ["RANK"] == "1":
    while not (pids / "0").exists(): time.sleep(0.01)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "die":
        sys.exit("no network here")
if fault == "hang":
    signal.alarm(1)
time.sleep(600)
"""


def measure_with(fault: str, folder: Path) -> tuple[list[dict[str, Any]], str | None, list[int]]:
    """What is measured by ranks with a fault, and the ids of their processes."""
    (folder / "script.py").write_text(SCRIPT)
    pids = folder / "pids"
    pids.mkdir()
    argv = [str(folder / "script.py"), str(pids), fault]
    found, failure = measure_on_ranks(("cpu", 2, folder, "glance"), os.environ, timeout_s=0.5, argv=argv)
    return found, failure, [int(path.read_text()) for path in pids.iterdir()]


@pytest.mark.full
def test_a_glance_says_what_each_rank_reaches() -> None:
    ranks, failure = glance("cpu", 2, os.environ | {"OMP_NUM_THREADS": "1"})
    assert failure is None
    assert len(ranks) == 2
    for each in ranks:
        assert [(shape.dtype, shape.m) for shape in each.matmuls] == [("fp32", 1024), ("bf16", 1024)]
        assert each.copy_bytes_per_s("host", "host") > 0
        assert {(row.num_bytes, row.op) for row in each.collectives} == set(product(SIZES_BYTES, OPS))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("stop", "rank 1 was stopped (SIGSTOP or Ctrl-Z) for"),
        ("hang", "killed by SIGALRM: its time was over"),
        ("die", "rank 1 exited with code 1: no network here"),
    ],
)
def test_what_fails_is_said_in_one_line_and_leaves_no_process(
    fault: str, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found, failure, pids = measure_with(fault, tmp_path)
    assert failure is not None
    assert reason in failure
    assert "\n" not in failure
    assert found == [ROW], "what was measured by then is kept, but for the torn line"
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    assert capfd.readouterr() == ("", ""), "it is for the diagnosis to say"
