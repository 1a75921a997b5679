"""Run an engine's work on the host in a thread: steps, sums of gradients, and what waits for the disk.

It is one thread, so that tasks run in the order in which they are submitted; torch's kernels use the cores of the rank
from there.

>>> worker = HostWorker(torch.device("cpu"))
>>> found = []
>>> worker.submit(lambda: found.append(1)).wait()
>>> found
[1]
>>> worker.close()
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import torch

from shardwise.config.errors import CodedError, code_of
from shardwise.offload.cpu_optimizer import bind_this_thread
from shardwise.runtime.device import use_device
from shardwise.runtime.torch_private import unseen_by_op_modes


class HostWorkError(CodedError, RuntimeError):
    """Work on the host has failed midway, so states are mixed; the message says what failed. `recover` forgets it."""


@dataclass
class WorkerOutcome:
    """Holds the first failure on a worker, if there is one, and whether it has been reported."""

    failure: BaseException | None = None
    is_reported: bool = False

    def check(self) -> None:
        """Raise if something has failed.

        Raises:
            HostWorkError: with the failure as its cause.
        """
        if self.failure is not None:
            self.is_reported = True
            raise _explained(self.failure)

    @property
    def unreported(self) -> HostWorkError | None:
        """Return the failure as an error if it has not been reported."""
        return None if self.failure is None or self.is_reported else _explained(self.failure)


def _explained(failure: BaseException) -> HostWorkError:
    code = code_of(failure, "host-work-failed")
    error = HostWorkError(code, f"{str(failure) or type(failure).__name__}; states are mixed: load the last checkpoint")
    error.__cause__ = failure
    return error


class Task:
    """Represents work that was submitted to a worker."""

    def __init__(self, future: Future[None], outcome: WorkerOutcome) -> None:
        self._future = future
        self._outcome = outcome

    @property
    def is_done(self) -> bool:
        """Say whether it has ended, with or without an error."""
        return self._future.done()

    def wait(self) -> None:
        """Return once it has ended.

        Raises:
            HostWorkError: it failed, or something else on the worker has, and `recover` was not called since.
        """
        self.end()
        # Of any task: after a failure what this one was to do has been skipped, or stands on mixed states.
        self._outcome.check()

    def end(self) -> None:
        """Return once it has ended, with or without an error."""
        self._future.result()


class HostWorker:
    """Runs tasks in order, in the background; after a failure it runs no more.

    Args:
        device: the engine's device, which is current in the thread.
        cores: to which the thread and those that torch starts for it are bound; None for those of the process.
        is_inline: run everything at once on the calling thread, as for fake tensors, whose mode is set for one thread.

    Attributes:
        outcome: whether something has failed so far.
    """

    # [Note: One thread, in order]
    # What the host does in a step builds on what the backward has left there: a gradient is added, then written, then
    # stepped with. One thread keeps that order, so that states need no locks and no task waits for a later one. After a
    # failure the rest is skipped, since some states are of this step and some of the one before: what is computed from
    # both would be wrong, and no error would say so.
    def __init__(self, device: torch.device, cores: tuple[int, ...] | None = None, is_inline: bool = False) -> None:
        self._is_inline = is_inline
        self.outcome = WorkerOutcome()
        self._last: Task | None = None

        def begin() -> None:
            bind_this_thread(cores)
            use_device(device)

        self._threads: Final = None if is_inline else ThreadPoolExecutor(1, "shardwise-host", begin)

    def submit(self, work: Callable[[], object]) -> Task:
        """Run `work` after all that was submitted before."""
        if self._threads is None:
            future: Future[None] = Future()
            with unseen_by_op_modes():
                _do(work, self.outcome)
            future.set_result(None)
        else:
            future = self._threads.submit(_do, work, self.outcome)
        self._last = Task(future, self.outcome)
        return self._last

    def wait_idle(self) -> None:
        """Return once all is done.

        Raises:
            HostWorkError: something has failed.
        """
        if self._last is not None:
            self._last.wait()

    def recover(self) -> WorkerOutcome:
        """Wait until all is done or skipped; return what has failed and forget it: the states must be written again."""
        if self._last is not None:
            self._last.end()
        outcome = replace(self.outcome)
        self.outcome.failure, self.outcome.is_reported = None, False
        return outcome

    def close(self) -> None:
        """End the thread, once it has done what was submitted."""
        if self._threads is not None:
            self._threads.shutdown()


def _do(work: Callable[[], object], outcome: WorkerOutcome) -> None:
    """Run `work`, unless something has failed before."""
    if outcome.failure is None:
        try:
            with torch.no_grad():
                work()
        except Exception as error:
            outcome.failure = error
