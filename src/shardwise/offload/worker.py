"""The thread on which an engine works for its host tier: steps, sums of gradients, what waits for the disk.

One thread, so that what is given to it happens in that order; torch's kernels use the cores of the rank from there.

>>> lane = HostWorker(torch.device("cpu"))
>>> found = []
>>> lane.submit(lambda: found.append(1)).wait()
>>> found
[1]
>>> lane.close()
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import torch

from shardwise.offload.cpu_optimizer import bind_this_thread
from shardwise.runtime.torch_private import unseen_by_op_modes


class HostWorkError(RuntimeError):
    """Work on the host has failed midway, so states are mixed; the message says what, and `recover` forgets it."""


@dataclass
class WorkerOutcome:
    """What has failed on a lane first, if anything, and whether anybody has been told."""

    failure: BaseException | None = None
    is_told: bool = False

    def check(self) -> None:
        """Raise where something has failed.

        Raises:
            LaneError: so it is.
        """
        if self.failure is not None:
            self.is_told = True
            raise _explained(self.failure)

    @property
    def untold(self) -> HostWorkError | None:
        """What has failed, where nobody has been told."""
        return None if self.failure is None or self.is_told else _explained(self.failure)


def _explained(failure: BaseException) -> HostWorkError:
    error = HostWorkError(f"{str(failure) or type(failure).__name__}; states are mixed: load the last checkpoint")
    error.__cause__ = failure
    return error


class Task:
    """Work that was given to a lane."""

    def __init__(self, future: Future[None], outcome: WorkerOutcome) -> None:
        self._future = future
        self._outcome = outcome

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self) -> None:
        """Return once it has ended.

        Raises:
            LaneError: it failed, or something else on the lane has, and `recover` was not called since.
        """
        self.end()
        self._outcome.check()

    def end(self) -> None:
        """Return once it has ended, well or not."""
        self._future.result()


class HostWorker:
    """Does what it is given in order, in the background; after a failure nothing more.

    Args:
        device: of the engine; what the thread enqueues goes there.
        cores: that the thread and those that torch starts for it keep to; None for those of the process.
        is_inline: do everything at once on the calling thread, as for fake tensors, which other threads do not know.
    """

    def __init__(self, device: torch.device, cores: tuple[int, ...] | None = None, is_inline: bool = False) -> None:
        self._is_inline = is_inline
        self._outcome = WorkerOutcome()
        self._last: Task | None = None

        def begin() -> None:
            bind_this_thread(cores)
            if device.type == "cuda":
                torch.cuda.set_device(device)

        self._threads: Final = None if is_inline else ThreadPoolExecutor(1, "shardwise-host", begin)

    def submit(self, work: Callable[[], object]) -> Task:
        """Have `work` done behind all that was given before."""
        if self._threads is None:
            future: Future[None] = Future()
            with unseen_by_op_modes():
                _do(work, self._outcome)
            future.set_result(None)
        else:
            future = self._threads.submit(_do, work, self._outcome)
        self._last = Task(future, self._outcome)
        return self._last

    def check(self) -> None:
        """Raise where something has failed so far; waits for nothing.

        Raises:
            LaneError: so it is.
        """
        self._outcome.check()

    def settle(self) -> None:
        """Return once all is done.

        Raises:
            LaneError: something has failed.
        """
        if self._last is not None:
            self._last.wait()

    def recover(self) -> WorkerOutcome:
        """Return what has failed, once all is done or given up, and forget it: the states are to be made anew."""
        if self._last is not None:
            self._last.end()
        outcome = replace(self._outcome)
        self._outcome.failure, self._outcome.is_told = None, False
        return outcome

    def close(self) -> None:
        """End the thread, once it has done what it was given."""
        if self._threads is not None:
            self._threads.shutdown()


def _do(work: Callable[[], object], outcome: WorkerOutcome) -> None:
    """Work, unless something has failed before."""
    if outcome.failure is None:
        try:
            with torch.no_grad():
                work()
        except Exception as error:
            outcome.failure = error
