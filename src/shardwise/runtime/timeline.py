"""A timeline records a real run: timed actions of the current step, in the schedule's own words.

A recorded run and a simulated one are the same kind of value, so they can be compared. Times are the host's; on CUDA
they are when work was enqueued, not when the device did it.

Without a pipeline, hooks report what was done to which param group (`add`). In a pipeline the executor of the schedule
reports what it does (`perform`), and calls of `add` are ignored: a record has the actions of the schedule, in its
order.

>>> timeline = Timeline(rank=0)
>>> timeline.is_scheduled = True
>>> with timeline.perform(Action.parse("0F0")):
...     timeline.add(ActionKind.UNSHARD, "blocks.0", timeline.now())
>>> timeline.close_step()
>>> [str(timed.action) for timed in timeline.last_step]
['0F0']
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwise.schedule.actions import COMPUTATIONS, STREAMS, Action, ActionKind, TimedAction

_Entry = tuple[ActionKind, int, str | None, float, float]  # kind, micro-batch, group, start, end


class _Performed:
    """Holds an action of a schedule, under way until it is ended."""

    def __init__(self, action: Action) -> None:
        self.action = action
        self.start_s = self.end_s = time.perf_counter()
        self.is_left_open = False

    def end(self) -> None:
        self.end_s = time.perf_counter()


class Timeline:
    """Collects the actions of one step; `close_step` keeps them as the last step and starts the next.

    Args:
        rank: of this process in the world.
    """

    def __init__(self, rank: int) -> None:
        self.micro_batch = 0
        self.is_recording = True
        self.is_scheduled = False
        self._rank = rank
        # As plain values: to build an action takes longer than some actions, and most steps' are never read.
        self._open: list[_Entry | _Performed] = []
        self._closed: list[_Entry | _Performed] = []
        self._current: _Performed | None = None

    @property
    def last_step(self) -> tuple[TimedAction, ...]:
        """Return the actions of the last step that was closed."""
        return tuple(map(self._timed, self._closed))

    def add(self, kind: ActionKind, group: str | None, start_s: float) -> None:
        """Record an action that has just ended.

        Args:
            kind: of the action.
            group: the param group's name; None for an action without one.
            start_s: when it began, on the clock of `now`.
        """
        if self.is_recording and not self.is_scheduled:
            self._open.append((kind, self.micro_batch, group, start_s, time.perf_counter()))

    @contextmanager
    def span(self, kind: ActionKind, group: str | None) -> Iterator[None]:
        """Record the body as one action."""
        start_s = self.now()
        yield
        self.add(kind, group, start_s)

    @contextmanager
    def perform(self, action: Action) -> Iterator[None]:
        """Record the body as an action of the schedule."""
        if not self.is_recording:
            yield
            return
        current = self._current = _Performed(action)
        if action.micro_batch is not None:
            self.micro_batch = action.micro_batch
        self._open.append(current)
        try:
            yield
        finally:
            if not current.is_left_open:
                current.end()
            self._current = None

    def restart(self) -> None:
        """Let the action under way begin only now: until here it has waited for others."""
        if self._current is not None:
            self._current.start_s = time.perf_counter()

    def leave_open(self) -> Callable[[], None]:
        """Let the action under way go on in the background; return the function to call when it has ended."""
        current = self._current
        if current is None:
            return lambda: None
        current.is_left_open = True
        return current.end

    def latest(self, count: int) -> tuple[TimedAction, ...]:
        """Return the last actions, of this step and before; another thread may call it."""
        entries = [*self._closed, *self._open]
        return tuple(map(self._timed, entries[-count:]))

    @staticmethod
    def now() -> float:
        """Return the seconds on the clock that all actions share."""
        return time.perf_counter()

    def close_step(self) -> None:
        """Finish the step's record; do nothing within an action of a schedule, whose executor closes the step at its
        end.
        """
        if self._current is not None:
            return
        self._closed, self._open = self._open, []
        self.micro_batch = 0

    def _timed(self, entry: _Entry | _Performed) -> TimedAction:
        if isinstance(entry, _Performed):
            kind = entry.action.kind
            return TimedAction(entry.action, self._rank, entry.start_s, entry.end_s, STREAMS[kind])
        kind, micro_batch, group, start_s, end_s = entry
        action = Action(kind, micro_batch=micro_batch if kind in COMPUTATIONS else None, group=group)
        return TimedAction(action, self._rank, start_s, end_s, STREAMS[kind])
