"""Ranks that measure: what hangs or dies is said and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import PATIENCE_S, is_running, state, wait_until
from shardwise.doctor import calibrate as peers
from shardwise.doctor.calibrate import OPS, RESULTS, SIZES_BYTES, glance, measure_on_ranks

pytestmark = pytest.mark.begin

ROW = {"rank": 0, "field": "call_s", "value": 0.5}

# A launcher whose ranks note their process ids; then rank 1 does as `fault` says.
SCRIPT = f"""
import json, os, signal, sys, time
from pathlib import Path
from shardwise.launch.environment import LAUNCHER_FD
from shardwise.launch.local import launch_local
from shardwise.launch.signals import exit_with_parent
pids, fault, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
exit_with_parent(os.environ)
if "RANK" not in os.environ:
    sys.exit(launch_local(sys.argv, 2, folder, grace_s=0.3, failure_grace_s=0.3))
if os.environ["RANK"] == "0":
    (folder / {RESULTS!r}).write_text({json.dumps(ROW)!r} + '\\n{{"rank": 0, "fie')
note = pids.with_name(os.environ["RANK"])
note.write_text(str(os.getpid()))
note.rename(pids / note.name)
if os.environ["RANK"] == "1":
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "die":
        while not (pids / "0").exists(): time.sleep(0.01)
        sys.exit("no network here")
time.sleep(600)
"""


class ExpiresOnceStopped(subprocess.Popen[str]):
    """Whose time is over when rank 1 has stopped and the others have said what they measured, not before."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            return super().wait()
        pids = Path(self.args[2])
        assert wait_until(lambda: len(list(pids.iterdir())) == 2 and state(int((pids / "1").read_text())) == "T")
        return super().wait(timeout=0.1)


def measure_with(fault: str, folder: Path, timeout_s: float) -> tuple[list[dict[str, Any]], str | None, list[int]]:
    """What is measured by ranks with a fault, and the ids of their processes."""
    (folder / "script.py").write_text(SCRIPT)
    pids = folder / "pids"
    pids.mkdir()
    argv = [str(folder / "script.py"), str(pids), fault]
    found, failure = measure_on_ranks(("cpu", 2, folder, "glance"), os.environ, timeout_s=timeout_s, argv=argv)
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


def test_a_hung_rank_ends_in_one_line_and_leaves_no_process(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(peers.subprocess, "Popen", ExpiresOnceStopped)
    found, failure, pids = measure_with("stop", tmp_path, timeout_s=6.0)
    assert failure == "did not end within 6 s"
    assert found == [ROW], "what was measured by then is kept, but for the torn line"
    assert len(pids) == 2
    assert wait_until(lambda: not any(map(is_running, pids)))


def test_a_dead_rank_is_named_with_its_reason(tmp_path) -> None:
    found, failure, pids = measure_with("die", tmp_path, timeout_s=PATIENCE_S)
    assert failure == "rank 1 exited with code 1: no network here"
    assert found == [ROW]
    assert len(pids) == 2
    assert not any(map(is_running, pids))


@pytest.mark.parametrize(("code", "reason"), [("7", "exited with code 7"), ("'no ranks'", "no ranks")])
def test_a_launcher_that_cannot_start_is_a_failure_too(tmp_path, code: str, reason: str) -> None:
    what = ("cpu", 2, tmp_path, "glance")
    assert measure_on_ranks(what, os.environ, argv=["-c", f"import sys; sys.exit({code})"]) == ([], reason)
