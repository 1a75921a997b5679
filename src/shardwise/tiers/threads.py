"""Threads for work on the host in many small pieces, each piece on one core.

Torch's own threads share every single operation and wait for one another at its end. In a block of some hundred
microseconds that costs more than it gains, and where another thread has the core, as often beside a backward, each such
wait lasts as long as the other's time slice. Here a thread does its pieces alone, and all meet once.

>>> threads = StepThreads(2)
>>> done, rest = [], iter([1, 2, 3])
>>> threads.run(lambda: done.extend(rest))
>>> sorted(done)
[1, 2, 3]
>>> threads.close()
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier

import torch

from shardwise.tiers.cores import keep_to


class StepThreads:
    """Threads in which torch's operations use no others, until `close`.

    To be made where no thread begins to use torch meanwhile, such as at start: for a moment the number of threads that
    torch gives to threads new to it is 1.

    Args:
        num_threads: of them; by default as many as torch uses for an operation here.
        cores: that they keep to; None for those of who makes them.
    """

    def __init__(self, num_threads: int | None = None, cores: tuple[int, ...] | None = None) -> None:
        before = torch.get_num_threads()
        self.num_threads = num_threads or before
        self._executor = ThreadPoolExecutor(self.num_threads, "shardwise-step")
        all_are_there = Barrier(self.num_threads)
        wait([self._executor.submit(_use_one_core, all_are_there, cores) for _ in range(self.num_threads)])
        torch.set_num_threads(before)

    def run(self, function: Callable[[], object]) -> None:
        """Call a function as many times as there are threads, at once, and wait for all.

        Raises:
            Exception: what a call raised.
        """
        futures = [self._executor.submit(function) for _ in range(self.num_threads)]
        wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._executor.shutdown()


def _use_one_core(all_are_there: Barrier, cores: tuple[int, ...] | None) -> None:
    keep_to(cores)
    torch.get_num_threads()  # the first use of torch in a thread sets its number, which would undo what follows
    torch.set_num_threads(1)
    all_are_there.wait()
