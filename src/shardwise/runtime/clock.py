"""The clocks here measure time as seen by a process that may be stopped, and detect whether another process is stopped.

>>> clock = AwakeClock(gap_s=2.0)
>>> clock.now_s() < 1.0
True
"""

from __future__ import annotations

import time

import psutil


class AwakeClock:
    """Counts the seconds in which this process was awake: a process that slept must not call others late.

    Args:
        gap_s: seconds; the clock is read more often than this, and more time between two readings was sleep.
    """

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._last_s = time.monotonic()
        self._awake_s = 0.0

    def now_s(self) -> float:
        """Return the seconds since the clock was made, less those of sleep."""
        now_s = time.monotonic()
        self._awake_s += min(now_s - self._last_s, self._gap_s)
        self._last_s = now_s
        return self._awake_s


class StopDetector:
    """Measures for how long a process has been stopped (SIGSTOP, Ctrl-Z); a debugger's stop does not count.

    Args:
        gap_s: seconds; `stopped_s` is called more often than this.
    """

    def __init__(self, pid: int, gap_s: float) -> None:
        self._pid = pid
        self._clock = AwakeClock(gap_s)
        self._since_s: float | None = None

    def stopped_s(self) -> float | None:
        """Return for how long it has been seen to be stopped; None if it is not, or where the system does not say."""
        now_s = self._clock.now_s()
        if not is_stopped(self._pid):
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        return None if self._since_s is None else now_s - self._since_s


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped; False where there is none."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
