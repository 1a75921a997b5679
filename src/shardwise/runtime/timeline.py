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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final, Literal

from shardwise.schedule.actions import COMPUTATIONS, STREAMS, Action, ActionKind, TimedAction

# What the host does in a step; "outside" is all between the steps, and between a backward and the next forward.
Phase = Literal["forward", "backward", "step", "other", "outside"]
WAIT: Final = "wait"

_PHASE_OF: Final[Mapping[ActionKind, Phase]] = MappingProxyType(
    {
        ActionKind.FORWARD: "forward",
        ActionKind.RECOMPUTE: "backward",
        ActionKind.BACKWARD: "backward",
        ActionKind.BACKWARD_INPUT: "backward",
        ActionKind.BACKWARD_WEIGHT: "backward",
        ActionKind.STEP: "step",
    }
)

_Entry = tuple[ActionKind, int, str | None, float, float]  # kind, micro-batch, group, start, end


class _Performed:
    """Holds an action of a schedule, under way until it is ended."""

    def __init__(self, action: Action) -> None:
        self.action = action
        self.start_s = self.end_s = time.perf_counter()
        self.is_left_open = False

    def end(self) -> None:
        self.end_s = time.perf_counter()


class StepClock:
    """Adds up the host's seconds of a step by phase, apart from those in which it waited for other ranks.

    It costs two readings of a clock a phase. On CUDA the host enqueues work and waits for the device at the end of a
    step, so there the phases are those of the host.

    Attributes:
        waited_s: returns the seconds that the host has waited for other ranks so far.
        parts_s: seconds of the last step by phase, and as "wait"; what is outside of it has none.
        closed_s: when the last step ended, by `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.waited_s: Callable[[], float] = float  # 0.0, where there are no other ranks
        self.parts_s: Mapping[str, float] = {}
        self.closed_s = self._since_s = time.perf_counter()
        self._phase: Phase = "outside"
        self._waited_before_s = 0.0
        self._open: dict[str, float] = {}

    def switch(self, phase: Phase) -> None:
        """End the phase under way and begin another."""
        now_s, waited_s = time.perf_counter(), self.waited_s()
        if self._phase != "outside":
            waited_in_it_s = waited_s - self._waited_before_s
            for name, seconds in ((self._phase, now_s - self._since_s - waited_in_it_s), (WAIT, waited_in_it_s)):
                self._open[name] = self._open.get(name, 0.0) + seconds
        self._phase, self._since_s, self._waited_before_s = phase, now_s, waited_s

    def close_step(self) -> None:
        """Keep the sums as those of the last step."""
        self.switch("outside")
        self.closed_s = self._since_s
        self.parts_s, self._open = self._open, {}


class Timeline:
    """Collects the actions of one step; `close_step` keeps them as the last step and starts the next.

    Args:
        rank: of this process in the world.

    Attributes:
        clock: the seconds of a step by phase.
        now: returns the seconds on the clock that all actions share.
    """

    now = staticmethod(time.perf_counter)

    def __init__(self, rank: int) -> None:
        self.clock = StepClock()
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
        self.clock.switch(_PHASE_OF.get(action.kind, "other"))
        try:
            yield
        finally:
            self.clock.switch("other")
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

    def close_step(self) -> None:
        """Finish the step's record; do nothing within an action of a schedule, whose executor closes the step at its
        end.
        """
        if self._current is not None:
            return
        self.clock.close_step()
        self._closed, self._open = self._open, []
        self.micro_batch = 0

    def _timed(self, entry: _Entry | _Performed) -> TimedAction:
        if isinstance(entry, _Performed):
            kind = entry.action.kind
            return TimedAction(entry.action, self._rank, entry.start_s, entry.end_s, STREAMS[kind])
        kind, micro_batch, group, start_s, end_s = entry
        action = Action(kind, micro_batch=micro_batch if kind in COMPUTATIONS else None, group=group)
        return TimedAction(action, self._rank, start_s, end_s, STREAMS[kind])
