"""The record of a real run: timed actions of the current step, in the schedule's own words.

A recorded run and a simulated one are the same kind of value, so they can be laid over each other. Times are the
host's; on CUDA they are when work was enqueued, not when the device did it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.schedule.actions import COMPUTATIONS, LANES, Action, Kind, TimedAction

_Entry = tuple[Kind, int, str | None, float, float]  # kind, micro-batch, group, start, end


class Timeline:
    """Collects the actions of one step; `close_step` hands them over and starts the next.

    Args:
        rank: of this process in the world.
    """

    def __init__(self, rank: int) -> None:
        self.micro_batch = 0
        self.is_recording = True
        self._rank = rank
        # As plain values: building actions takes longer than some of them, and most steps' are never looked at.
        self._open: list[_Entry] = []
        self._closed: list[_Entry] = []

    @property
    def last_step(self) -> tuple[TimedAction, ...]:
        """The actions of the last step that was closed."""
        return tuple(self._timed(*entry) for entry in self._closed)

    def add(self, kind: Kind, group: str | None, start_s: float) -> None:
        """Record an action that began at `start_s` (of `now`) and has just ended."""
        if self.is_recording:
            self._open.append((kind, self.micro_batch, group, start_s, time.perf_counter()))

    @contextmanager
    def span(self, kind: Kind, group: str | None) -> Iterator[None]:
        """Record the body as one action."""
        start_s = self.now()
        yield
        self.add(kind, group, start_s)

    def latest(self, count: int) -> tuple[TimedAction, ...]:
        """The last actions, of this step and before; another thread may ask."""
        entries = [*self._closed, *self._open]
        return tuple(self._timed(*entry) for entry in entries[-count:])

    @staticmethod
    def now() -> float:
        """Seconds on the clock that all actions share."""
        return time.perf_counter()

    def close_step(self) -> None:
        """Finish the step's record."""
        self._closed, self._open = self._open, []
        self.micro_batch = 0

    def _timed(self, kind: Kind, micro_batch: int, group: str | None, start_s: float, end_s: float) -> TimedAction:
        action = Action(kind, micro_batch=micro_batch if kind in COMPUTATIONS else None, group=group)
        return TimedAction(action, self._rank, start_s, end_s, LANES[kind])
