"""The record of a real run: timed actions of the current step, in the schedule's own words.

A recorded run and a simulated one are the same kind of value, so they can be laid over each other. Times are the
host's; on CUDA they are when work was enqueued, not when the device did it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.schedule.actions import COMPUTATIONS, LANES, Action, Kind, TimedAction


class Timeline:
    """Collects the actions of one step; `close_step` hands them over and starts the next.

    Args:
        rank: of this process in the world.
    """

    def __init__(self, rank: int) -> None:
        self.last_step: tuple[TimedAction, ...] = ()
        self.micro_batch = 0
        self.is_recording = True
        self._rank = rank
        self._open: list[TimedAction] = []

    def add(self, kind: Kind, group: str | None, start_s: float) -> None:
        """Record an action that began at `start_s` (of `now`) and has just ended."""
        if not self.is_recording:
            return
        action = Action(kind, micro_batch=self.micro_batch if kind in COMPUTATIONS else None, group=group)
        self._open.append(TimedAction(action, self._rank, start_s, self.now(), LANES[kind]))

    @contextmanager
    def span(self, kind: Kind, group: str | None) -> Iterator[None]:
        """Record the body as one action."""
        start_s = self.now()
        yield
        self.add(kind, group, start_s)

    @staticmethod
    def now() -> float:
        """Seconds on the clock that all actions share."""
        return time.perf_counter()

    def close_step(self) -> None:
        """Finish the step's record."""
        self.last_step = tuple(self._open)
        self._open.clear()
        self.micro_batch = 0
