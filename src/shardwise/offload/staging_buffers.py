"""Pool host memory for what moves between device, host and files.

>>> buffers = StagingBuffers()
>>> first = buffers.acquire(100_000)
>>> buffers.release(first)
>>> again = buffers.acquire(99_000)
>>> again.data_ptr() == first.data_ptr(), buffers.live_bytes, buffers.reserved_bytes
(True, 99000, 106496)
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.runtime.pinned_memory import host_pages
from shardwise.runtime.torch_private import unseen_by_op_modes

# Forward, backward and step use buffers of different sizes one after the other.
_SPARED: Final = 1 / 3


class StagingBuffers:
    """Leases buffers of host memory, each in pages of its own, as many as are asked for; for any thread.

    An idle buffer of about the size is used again, as in `BufferPool`. At most what was once in use at the same time,
    and a third more, is kept until `trim`.

    Args:
        pinned_for: a device that copies from and to the buffers while it computes; None pins nothing.
        tracker: the host's memory tracker; counts every buffer under BUCKETS, and idle bytes as fragments.
        sizes: sizes in bytes that are often asked for. A buffer for at least half of one is made as large, so that
            it serves all of them: the system zeroes and pins new pages, which takes longer than to fill them.
    """

    def __init__(
        self,
        pinned_for: torch.device | None = None,
        tracker: MemoryTracker | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self._sizes = sorted(sizes)
        self._lock = threading.Lock()
        self._pool = BufferPool("cpu", tracker, allocate=partial(host_pages, pinned_for=pinned_for), spared=_SPARED)

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of all buffers, in use and idle."""
        return self._pool.reserved_bytes

    @property
    def live_bytes(self) -> int:
        """Return the bytes that were asked for, of the buffers in use."""
        return self._pool.live_bytes

    def acquire(self, num_bytes: int, capacity_bytes: int = 0) -> Tensor:
        """Lease a buffer with undefined content, until `release`.

        Args:
            capacity_bytes: the least size of the buffer, so that larger tensors can use it later.

        Returns:
            1-D uint8 of so many bytes, whose address is a multiple of `ALIGNMENT_BYTES`; under fake tensors a fake.

        Raises:
            MemoryError: the host has no more, or lets no more be pinned.
        """
        # A meter of the device must not count them, in a simulation either, where pages are made by an op.
        with self._lock, unseen_by_op_modes():
            capacity_bytes = max(capacity_bytes, self._capacity_bytes(num_bytes))
            return self._pool.acquire(num_bytes, torch.uint8, capacity_bytes=capacity_bytes)

    def _capacity_bytes(self, num_bytes: int) -> int:
        return next((size for size in self._sizes if num_bytes <= size <= 2 * num_bytes), num_bytes)

    def release(self, tensor: Tensor) -> None:
        """Return a buffer to the pool, once no copy, read or write of it is under way.

        Raises:
            ValueError: it is not on lease: released already, a view of it, or from elsewhere.
        """
        # The pool has no events here: see [Note: Staging buffers wait for an event].
        with self._lock:
            self._pool.release(tensor)

    def trim(self) -> None:
        """Give idle buffers back to the system, and keep no more from now on than is in use now."""
        with self._lock:
            self._pool.trim()
