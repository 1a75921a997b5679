"""Times of calls that all ranks make together, as often and at the same time, as they do when they train.

Neighbours contend for memory, caches and links: what one process alone can do says little. Of each call the slowest
rank's time counts, since ranks that train wait for one another, and of the calls the median.

    watch = Stopwatch(comm, budget_s=0.1)
    seconds = watch.time_s(lambda: torch.mm(left, right))
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from shardwise.comm import Comm
from shardwise.doctor.peers import slowest_of_each

_MIN_CALLS: Final = 3
_MAX_CALLS: Final = 200
# A synchronisation of a GPU takes longer than a small kernel; so many calls share one.
_CALLS_A_SYNC: Final = 10


class Stopwatch:
    """Times calls on all ranks at once.

    Args:
        comm: among all ranks.
        budget_s: of one measurement, about.
        limit_s: of all of them; after it `is_late` is true, on all ranks or none.
    """

    def __init__(self, comm: Comm, budget_s: float, limit_s: float = float("inf")) -> None:
        self.comm = comm
        self._budget_s = budget_s
        self._deadline_s = time.perf_counter() + limit_s
        self._is_cuda = comm.device.type == "cuda"

    def is_late(self) -> bool:
        """Whether the time for all measurements is over; all ranks call it."""
        return self.slowest(time.perf_counter() - self._deadline_s) > 0

    def slowest(self, value: float) -> float:
        """The largest of the ranks' values."""
        return self._slowest_of_each([value])[0]

    def _slowest_of_each(self, values: list[float]) -> list[float]:
        return slowest_of_each(self.comm, values) if self.comm.world_size > 1 else values

    def time_s(self, call: Callable[[], object]) -> float:
        """Seconds of one call."""
        return self.times_s(call)[0]

    def times_s(self, *calls: Callable[[], object], min_calls: int = _MIN_CALLS) -> tuple[float, ...]:
        """Seconds of each of some calls that are made in turn: the second may use what the first left."""
        group = _CALLS_A_SYNC if self._is_cuda and len(calls) == 1 else 1
        self._round(calls, group)
        rounds = [self._round(calls, group)]
        num_rounds = int(self._budget_s / max(1e-9, self.slowest(sum(rounds[0]))))
        rounds += [self._round(calls, group) for _ in range(max(min_calls, min(_MAX_CALLS, num_rounds)) - 1)]
        slowest = self._slowest_of_each([seconds for each in rounds for seconds in each])
        return tuple(statistics.median(slowest[index :: len(calls)]) / group for index in range(len(calls)))

    def _round(self, calls: tuple[Callable[[], object], ...], group: int) -> list[float]:
        times = []
        for call in calls:
            start_s = time.perf_counter()
            for _ in range(group):
                call()
            if self._is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start_s)
        return times
