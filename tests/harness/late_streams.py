"""A device whose side streams are late: what is enqueued there happens when it is waited for, and no sooner.

The engine runs on the CPU as it is; its compute stream is the order of the program. Copies inside `Streams.side_stream`
up until an event after them is waited for, by the compute stream, by the host, or by another stream that runs. What is
read too early is then not there, what is written too early is what a late copy sees, and what is freed too early is
missed. So that neither goes unseen by luck, memory is spoilt when it is handed out and when it is given back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardwise.offload.staging_buffers import StagingBuffers
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import Event, StreamName, Streams
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.runtime.pinned_memory import host_pages

SPOILT = 0xFF  # as any floating dtype it is a nan


@dataclass(eq=False)
class LateStream:
    """A stream's work, in order; on the compute stream all is done at once."""

    device: LateDevice
    name: str
    queue: list[Callable[[], object]] = field(default_factory=list)
    num_done: int = 0

    def record_event(self) -> LateEvent:
        return LateEvent(self.device, self, len(self.queue))

    def wait_event(self, event: LateEvent) -> None:
        self.enqueue(event.reach)

    def enqueue(self, work: Callable[[], object]) -> None:
        with self.device.lock:
            if self is self.device.compute:
                work()
            else:
                self.queue.append(work)

    def run_until(self, position: int) -> None:
        with self.device.lock:
            while self.num_done < position:
                self.num_done += 1
                self.queue[self.num_done - 1]()


@dataclass(eq=False)
class LateEvent:
    """A point in a late stream; used as torch.cuda's."""

    device: LateDevice
    stream: LateStream
    position: int
    num_asks: int = 0

    def reach(self) -> None:
        self.stream.run_until(self.position)

    def wait(self) -> None:
        self.device.current.wait_event(self)

    def synchronize(self) -> None:
        self.device.host_waits.append(threading.current_thread().name)
        self.reach()

    def query(self) -> bool:
        self.num_asks += 1
        if self.num_asks > self.device.num_asks:
            self.reach()
        return self.stream.num_done >= self.position


class LateDevice:
    """The streams, and what of the library sees of them inside `installed`.

    Args:
        num_asks: how often an event may be asked before it says that it is reached.

    Attributes:
        host_waits: the names of the threads that have waited for an event on the host, one for each time.
        num_late: copies that were enqueued on side streams.
    """

    def __init__(self, num_asks: int = 1) -> None:
        self.lock = threading.RLock()
        self.num_asks = num_asks
        self.host_waits: list[str] = []
        self.num_late = 0
        self.compute = LateStream(self, "compute")
        self._streams: dict[str, LateStream] = {}
        self._local = threading.local()
        self._copy = Tensor.copy_

    @property
    def current(self) -> LateStream:
        return getattr(self._local, "stream", self.compute)

    def _current_of(self, allocate: Any) -> LateStream | None:
        """The current stream, for a pool whose memory `allocate` makes; None for one of the host."""
        return None if getattr(allocate, "func", None) is host_pages else self.current

    def finish(self) -> None:
        """Do all that is still queued: what it needs must be there until the end."""
        for stream in self._streams.values():
            stream.run_until(len(stream.queue))

    @contextmanager
    def installed(self) -> Iterator[LateDevice]:
        """Inside, engines that are made and run use this device."""
        resize, make, acquire, release, host_release, host_acquire = (
            MemoryTracker.resize,
            BufferPool.__init__,
            BufferPool.acquire,
            BufferPool.release,
            StagingBuffers.release,
            StagingBuffers.acquire,
        )

        def resize_spoilt(tracker: MemoryTracker, tensor: Tensor, num_bytes: int) -> None:
            resize(tracker, tensor, num_bytes)
            if num_bytes:
                spoil(tensor)

        # A pool of the host is as on any device: no stream uses its memory, so none waits for another's use of it.
        def make_late(pool: BufferPool, *args: Any, **options: Any) -> None:
            make(pool, *args, **{"home": self._current_of(options.get("allocate")), **options})

        def acquire_late(pool: BufferPool, numel: int, dtype: torch.dtype, **options: Any) -> Tensor:
            return acquire(pool, numel, dtype, **{"stream": self._current_of(pool._empty), **options})

        def release_spoilt(pool: BufferPool, tensor: Tensor, stream: Any = None) -> None:
            stream = stream or self._current_of(pool._empty)
            if stream is not None:  # the next user writes after the last use
                memory = bytes_of(tensor)
                stream.enqueue(lambda: memory.fill_(SPOILT))
            release(pool, tensor, stream)

        def host_release_spoilt(buffers: StagingBuffers, tensor: Tensor) -> None:
            spoil(tensor)
            host_release(buffers, tensor)

        def host_acquire_spoilt(buffers: StagingBuffers, num_bytes: int, capacity_bytes: int = 0) -> Tensor:
            return spoil(host_acquire(buffers, num_bytes, capacity_bytes))

        with ExitStack() as stack:
            for owner, name, replacement in (
                (Streams, "side_stream", self._side_stream),
                (Event, "record", classmethod(lambda cls, device: cls(self.current.record_event()))),
                (Tensor, "copy_", self._late_copy()),
                (BufferPool, "__init__", make_late),
                (BufferPool, "acquire", acquire_late),
                (BufferPool, "release", release_spoilt),
                (MemoryTracker, "resize", resize_spoilt),
                (StagingBuffers, "release", host_release_spoilt),
                (StagingBuffers, "acquire", host_acquire_spoilt),
            ):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            yield self
            self.finish()

    @property
    def _side_stream(self) -> Callable[..., Any]:
        @contextmanager
        def on_stream(streams: Streams, name: StreamName | None, after: Event | None = None) -> Iterator[None]:
            before = self.current
            if name is None:
                if after is not None:
                    after.wait()
                yield
                return
            is_helper = threading.current_thread().name.startswith("shardwise")
            assert after is not None or not is_helper, "the worker's current stream is not the one that computes"
            with self.lock:
                stream = self._streams.setdefault(name, LateStream(self, name))
            stream.wait_event(after.mark if after is not None else before.record_event())
            self._local.stream = stream
            try:
                yield
            finally:
                self._local.stream = before

        return on_stream

    def _late_copy(self) -> Callable[..., Tensor]:
        def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            stream = self.current
            if stream is self.compute:
                return self._copy(target, source)
            assert target.dtype == source.dtype, "a copy that rounds allocates on a side stream"
            target_of, source_of = reopen(target), reopen(source)
            stream.enqueue(lambda: self._copy(target_of(), source_of()))
            self.num_late += 1
            if not non_blocking:
                stream.run_until(len(stream.queue))
            return target

        return copy_


def bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def spoil(tensor: Tensor) -> Tensor:
    tensor.detach().view(torch.uint8).fill_(SPOILT)
    return tensor


def reopen(tensor: Tensor) -> Callable[[], Tensor]:
    """What gives the tensor again without holding its memory, and fails where that has been freed meanwhile."""
    storage, num_bytes = weakref.ref(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
    place, empty = (tensor.storage_offset(), tensor.size(), tensor.stride()), tensor.detach().new_empty(0)

    def reopened() -> Tensor:
        memory = storage()
        assert memory is not None, "memory was given back while a copy used it"
        assert memory.nbytes() == num_bytes, "memory was freed while a copy used it"
        return empty.detach().set_(memory, *place)

    return reopened
