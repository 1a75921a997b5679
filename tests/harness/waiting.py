"""Waiting in tests for what must come, however slow or busy the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")

# Bounds a hang, and nothing else: no machine takes so long for what a test waits for.
PATIENCE_S = 100.0


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Whether a condition has come true."""
    deadline_s = time.monotonic() + timeout_s
    while not (is_true := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return is_true


def settled(read: Callable[[], Value]) -> Value:
    """What is read once it stands still: gloo's threads let go of a buffer some time after its wait has returned.

    A thread that has yet to do so may wait for a core as long as it likes, so all of them must sleep.
    """
    readings: list[Value] = []
    while len(readings) < 5 or any(reading != readings[-1] for reading in readings[-5:]):
        time.sleep(0.005)
        if not other_threads_sleep():
            readings.clear()
        readings.append(read())
    return readings[-1]


def other_threads_sleep() -> bool:
    """Whether no other thread of this process runs, or would if it had a core."""
    own = threading.get_native_id()
    threads = [int(each.name) for each in Path("/proc/self/task").iterdir()]
    return all(state(each) in ("", "S") for each in threads if each != own)


def num_lines(pattern: str) -> int:
    """Of the longest of the files below the working folder that fit."""
    return max((len(path.read_text().splitlines()) for path in Path().glob(pattern)), default=0)


def state(pid: int) -> str:
    """The system's code for what a process does: Z that it only waits to be fetched, T that it is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    return state(pid) not in ("", "Z")
