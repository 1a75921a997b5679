"""A clock that stands still while its process is stopped, and how long another one has been."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from harness.waiting import wait_until
from shardwise.runtime import clock as awake
from shardwise.runtime.clock import AwakeClock, StopDetector


def test_the_clock_counts_no_sleep_of_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(awake.time, "monotonic", lambda: now_s)
    clock = AwakeClock(gap_s=2.0)
    now_s += 1.5
    assert clock.now_s() == 1.5
    now_s += 1000.0
    assert clock.now_s() == 3.5


def test_a_stopped_process_is_seen_until_it_goes_on() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        watch = StopDetector(process.pid, gap_s=2.0)
        try:
            assert watch.stopped_s() is None
            os.kill(process.pid, signal.SIGSTOP)
            assert wait_until(lambda: (watch.stopped_s() or 0.0) > 0.0)
            os.kill(process.pid, signal.SIGCONT)
            assert wait_until(lambda: watch.stopped_s() is None)
        finally:
            process.kill()
    assert watch.stopped_s() is None
