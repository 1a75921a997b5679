"""The thread on which an engine works for its host tier: steps, sums of gradients, what waits for the disk.

One thread, so that what is given to it happens in that order; torch's kernels use the cores of the rank from there.

>>> lane = HostLane(torch.device("cpu"))
>>> found = []
>>> lane.submit(lambda: found.append(1)).wait()
>>> found
[1]
>>> lane.close()
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import torch

from shardwise._torch_private import unseen_by_op_modes
from shardwise.tiers.cores import bind_this_thread


class LaneError(RuntimeError):
    """Work on the host has failed midway, so states are mixed; the message says what failed."""


class Task:
    """Work that was given to a lane."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self) -> None:
        """Return once it has ended.

        Raises:
            LaneError: it failed, or did not begin because something before it had.
        """
        try:
            self._future.result()
        except LaneError:
            raise
        except Exception as error:
            raise LaneError(f"{error}; states are mixed: load the last checkpoint") from error


class HostLane:
    """Does what it is given in order, in the background; after a failure nothing more.

    Args:
        device: of the engine; what the thread enqueues goes there.
        cores: that the thread and those that torch starts for it keep to; None for those of the process.
        is_inline: do everything at once on the calling thread, as for fake tensors, which other threads do not know.
    """

    def __init__(self, device: torch.device, cores: tuple[int, ...] | None = None, is_inline: bool = False) -> None:
        self._is_inline = is_inline
        self._failure: Exception | None = None
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
            try:
                with unseen_by_op_modes():
                    self._do(work)
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)
        else:
            future = self._threads.submit(self._do, work)
        self._last = Task(future)
        return self._last

    def settle(self) -> None:
        """Return once all is done.

        Raises:
            LaneError: something has failed.
        """
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        """End the thread, once it has done what it was given."""
        if self._threads is not None:
            self._threads.shutdown()

    def _do(self, work: Callable[[], object]) -> None:
        if self._failure is not None:
            raise LaneError(f"{self._failure}; states are mixed: load the last checkpoint")
        try:
            with torch.no_grad():
                work()
        except Exception as error:
            self._failure = error
            raise
