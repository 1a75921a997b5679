"""Collectives between processes: the library's own are measured; what hangs or dies is said and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from harness.waiting import PATIENCE_S, is_running, state, wait_until
from shardwise.doctor import collective_bench as peers
from shardwise.doctor.collective_bench import OPS, RESULTS, SIZES_BYTES, measure_collectives
from shardwise.doctor.measure import CollectiveSpeed

pytestmark = pytest.mark.begin

RESULT = CollectiveSpeed("gloo", 2, "all_gather", 4096, 1e-4, 2e7)

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
    (folder / {RESULTS!r}).write_text({json.dumps(asdict(RESULT))!r} + '\\n{{"backend": "gl')
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

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:  # noqa: A002
        pids = Path(self.args[2])
        assert wait_until(lambda: len(list(pids.iterdir())) == 2 and state(int((pids / "1").read_text())) == "T")
        return super().communicate(input, timeout=0.1)


def measure_with(
    fault: str, folder: Path, timeout_s: float
) -> tuple[tuple[CollectiveSpeed, ...], str | None, list[int]]:
    """What is measured by ranks with a fault, and the ids of their processes."""
    (folder / "script.py").write_text(SCRIPT)
    pids = folder / "pids"
    pids.mkdir()
    argv = [str(folder / "script.py"), str(pids), fault]
    found, failure = measure_collectives("cpu", 2, os.environ, timeout_s=timeout_s, argv=argv)
    return found, failure, [int(path.read_text()) for path in pids.iterdir()]


@pytest.mark.full
def test_every_collective_is_measured_at_every_size() -> None:
    collectives, failure = measure_collectives(
        "cpu", 2, os.environ | {"OMP_NUM_THREADS": "1"}, timeout_s=2 * PATIENCE_S
    )
    assert failure is None
    assert [(each.num_bytes, each.op) for each in collectives] == [(size, op) for size in SIZES_BYTES for op in OPS]
    for each in collectives:
        assert (each.backend, each.num_ranks) == ("gloo", 2)
        sent_bytes = each.num_bytes * (1 if each.op == "all_reduce" else 0.5)
        assert each.bus_bytes_per_s == pytest.approx(sent_bytes / each.call_s)


def test_a_hung_rank_ends_in_one_line_and_leaves_no_process(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(peers, "_GRACE_S", PATIENCE_S)
    monkeypatch.setattr(peers.subprocess, "Popen", ExpiresOnceStopped)
    found, failure, pids = measure_with("stop", tmp_path, timeout_s=6.0)
    assert failure == "did not end within 6 s"
    assert found == (RESULT,), "what was measured by then is kept, but for the torn line"
    assert len(pids) == 2
    assert wait_until(lambda: not any(map(is_running, pids)))


def test_a_dead_rank_is_named_with_its_reason(tmp_path) -> None:
    found, failure, pids = measure_with("die", tmp_path, timeout_s=PATIENCE_S)
    assert failure == "rank 1 exited with code 1: no network here"
    assert found == (RESULT,)
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def test_a_launcher_that_cannot_start_is_a_failure_too(tmp_path) -> None:
    found, failure = measure_collectives("cpu", 2, os.environ, argv=["-c", "import sys; sys.exit(7)"])
    assert (found, failure) == ((), "exited with code 7")
