"""Reuses flat buffers, the memory for collectives, from one collective to the next.

Not a general allocator: buffers are few and large, come from one device, and are handed out whole, as 1-D
tensors.

Reuse: a request takes the smallest idle buffer that fits with at most an eighth wasted, of any former
dtype, else a new one of its size class. Before a new one is made, idle buffers are freed, the longest idle
first, until the pool holds no more than was once in use at the same time. So `reserved_bytes` stays within
the peak of `live_bytes`, plus an eighth of it, plus 512 bytes a buffer, plus the share `spared`. The price: sizes that
alternate and were never in use together are reallocated, unless so much is spared.

Streams: storage is allocated and freed in the order of the home stream. `release` names the stream that used
a buffer last, and the pool records an event there; `acquire` makes the stream that uses it next wait for that
event.

>>> pool = BufferPool()
>>> first = pool.acquire(1000, torch.float32)
>>> pool.release(first)
>>> second = pool.acquire(2000, torch.bfloat16)
>>> second.data_ptr() == first.data_ptr(), pool.reserved_bytes, pool.live_bytes, pool.fragment_bytes
(True, 4096, 4000, 96)
>>> pool.acquire(1000, torch.float32).data_ptr() == second.data_ptr()
False
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from shardwise.runtime.device import current_stream, on_stream
from shardwise.runtime.memory_tracker import Category, MemoryTracker

_MIN_CLASS_BYTES: Final = 512
_CLASSES_PER_DOUBLING: Final = 8


class StreamLike(Protocol):
    """Names the part of `torch.Stream` that the pool uses."""

    def record_event(self) -> Any:
        """Mark the end of what is enqueued so far."""

    def wait_event(self, event: Any) -> None:
        """Hold back what is enqueued from now on until the event has passed."""


@dataclass(eq=False)
class _PooledBuffer:
    """Holds memory of the pool, 1-D uint8: leased as `tensor`, or idle since the event `last_use` on `last_stream`."""

    memory: Tensor
    capacity_bytes: int
    tensor: Tensor | None = None
    last_stream: StreamLike | None = None
    last_use: Any = None


class BufferPool:
    """Leases reusable flat buffers of one device, to one thread at a time.

    Args:
        tracker: counts every buffer under BUCKETS, and the pool's idle bytes as fragments; None to count none.
        home: the stream in whose order storage is allocated and freed; by default the current one.
        allocate: makes the memory of a buffer, 1-D uint8 of at least so many bytes on the device; None for torch's.
        spared: idle memory that may be kept beyond what was in use at the same time, as a share of that.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        tracker: MemoryTracker | None = None,
        home: StreamLike | None = None,
        allocate: Callable[[int], Tensor] | None = None,
        spared: float = 0.0,
    ) -> None:
        self._spared = spared
        self.device = torch.device(device)
        self._empty = allocate or partial(torch.empty, dtype=torch.uint8, device=self.device)
        self._tracker = tracker
        self._home = current_stream(self.device) if home is None else home
        self._leased: dict[torch.UntypedStorage, _PooledBuffer] = {}
        self._idle: list[_PooledBuffer] = []
        # Capacities, not requested bytes: the pool's bound counts those.
        self._leased_bytes = 0
        self._peak_leased_bytes = 0
        self.reserved_bytes = 0
        self.live_bytes = 0
        if tracker is not None:
            tracker.attach_pool(self)

    @property
    def fragment_bytes(self) -> int:
        """Return the bytes reserved and not in use: idle buffers, and what leased ones have beyond their tensor."""
        return self.reserved_bytes - self.live_bytes

    def acquire(
        self, numel: int, dtype: torch.dtype, stream: StreamLike | None = None, capacity_bytes: int = 0
    ) -> Tensor:
        """Lease a buffer of `numel` elements with undefined content, until `release`.

        Args:
            stream: that will use it first; by default the current one.
            capacity_bytes: the least size of the buffer, so that larger tensors can use it later.

        Raises:
            ValueError: `numel` is negative.
        """
        if numel < 0:
            raise ValueError(f"numel={numel} is negative; a buffer has 0 or more elements")
        if stream is None:
            stream = current_stream(self.device)
        num_bytes = numel * dtype.itemsize
        capacity_bytes = max(num_bytes, capacity_bytes)
        buffer = self._take_idle(capacity_bytes) or self._allocate(capacity_bytes)
        if stream is not None and buffer.last_use is not None and buffer.last_stream != stream:
            stream.wait_event(buffer.last_use)
        tensor = buffer.memory[:num_bytes].view(dtype)
        buffer.tensor = tensor
        self._leased[tensor.untyped_storage()] = buffer
        self._leased_bytes += buffer.capacity_bytes
        self._peak_leased_bytes = max(self._peak_leased_bytes, self._leased_bytes)
        self.live_bytes += num_bytes
        return tensor

    def release(self, tensor: Tensor, stream: StreamLike | None = None) -> None:
        """Return a buffer of `acquire` to the pool; the memory may be leased again at once.

        Args:
            tensor: the very tensor that `acquire` returned, not a view of it.
            stream: that used it last; by default the current one.

        Raises:
            ValueError: the tensor is not, or no longer, leased from this pool.
        """
        storage = tensor.untyped_storage()
        buffer = self._leased.get(storage)
        if buffer is None or buffer.tensor is not tensor:
            raise ValueError(
                f"a tensor of {tensor.numel()} {tensor.dtype} is not on lease from this pool: it was "
                "released already, is a view, or comes from elsewhere; release what acquire returned, once"
            )
        del self._leased[storage]
        buffer.tensor = None
        buffer.last_stream = current_stream(self.device) if stream is None else stream
        buffer.last_use = _record(buffer.last_stream)
        self._idle.append(buffer)
        self._leased_bytes -= buffer.capacity_bytes
        self.live_bytes -= tensor.numel() * tensor.element_size()

    def trim(self) -> None:
        """Free all idle buffers, and take what is in use now as the peak from now on."""
        self._peak_leased_bytes = self._leased_bytes
        self._free_idle_until(self._leased_bytes)

    def _take_idle(self, num_bytes: int) -> _PooledBuffer | None:
        most_bytes = max(_MIN_CLASS_BYTES, num_bytes + num_bytes // _CLASSES_PER_DOUBLING)
        best = None
        for buffer in self._idle:
            if num_bytes <= buffer.capacity_bytes <= most_bytes:
                most_bytes, best = buffer.capacity_bytes - 1, buffer  # the first of the smallest
        if best is not None:
            self._idle.remove(best)
        return best

    def _allocate(self, num_bytes: int) -> _PooledBuffer:
        capacity_bytes = size_class_bytes(num_bytes)
        in_use_bytes = self._leased_bytes + capacity_bytes
        most_bytes = max(in_use_bytes, int(self._peak_leased_bytes * (1 + self._spared)))
        self._free_idle_until(most_bytes - capacity_bytes)
        with on_stream(self.device, self._home):
            memory = self._empty(capacity_bytes)
        if self._tracker is not None:
            self._tracker.track(memory, Category.BUCKETS)
        self.reserved_bytes += capacity_bytes
        return _PooledBuffer(memory, capacity_bytes, last_stream=self._home, last_use=_record(self._home))

    def _free_idle_until(self, reserved_bytes: int) -> None:
        while self._idle and self.reserved_bytes > reserved_bytes:
            buffer = self._idle.pop(0)
            if self._home is not None and buffer.last_use is not None and buffer.last_stream != self._home:
                self._home.wait_event(buffer.last_use)
            self.reserved_bytes -= buffer.capacity_bytes


def size_class_bytes(num_bytes: int) -> int:
    """Return the capacity of a new buffer for `num_bytes`: eight classes between powers of two, at least 512 bytes.

    >>> [size_class_bytes(num_bytes) for num_bytes in (0, 513, 1024, 1025)]
    [512, 576, 1024, 1152]
    """
    if num_bytes <= _MIN_CLASS_BYTES:
        return _MIN_CLASS_BYTES
    step_bytes = 2 ** (num_bytes.bit_length() - 1) // _CLASSES_PER_DOUBLING
    return -(-num_bytes // step_bytes) * step_bytes


def _record(stream: StreamLike | None) -> Any:
    return None if stream is None else stream.record_event()
