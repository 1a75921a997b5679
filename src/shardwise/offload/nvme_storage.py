"""Store a state in a swap file.

Parts are read into pooled buffers and written from them, in the background. A part that has been written stays in its
buffer for as long as the cache of kept buffers allows: a step that begins with these parts does not read them.

Reads wait for writes of the same bytes that are under way, and buffers are used again only once their write has ended.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.config.resolve import Tier
from shardwise.offload.storage import StagedView, TransferContext, loaded, staged
from shardwise.offload.worker import Task, WorkerOutcome
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import Event
from shardwise.runtime.pinned_memory import ALIGNMENT_BYTES, host_pages
from shardwise.runtime.precision import add_widened
from shardwise.runtime.state_shards import FlatSlice, FlatState


class SwapFileLike(Protocol):
    """Reads and writes a file for `NvmeStorage`; offsets and lengths in bytes, tensors 1-D uint8 on the host."""

    def read(self, offset_bytes: int, target: Tensor) -> Future[None]:
        """Start to fill `target`."""

    def write(self, offset_bytes: int, source: Tensor) -> Future[None]:
        """Start to write `source`."""

    def free(self) -> None:
        """Remove the file."""


@dataclass(eq=False)
class _FileBuffer:
    """Holds the bytes [start, stop) of the file in memory, valid once `ready`; not to be changed before `written`.

    `is_reported` says that a failed write has been reported.
    """

    start: int
    stop: int
    memory: Tensor
    ready: Future[None] | None = None
    written: Future[None] | None = None
    is_reported: bool = False


class BufferCache:
    """Keeps buffers of an engine's swap files in case their part is opened again; the oldest go first.

    Args:
        most_bytes: the most bytes that are kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._buffers: OrderedDict[_FileBuffer, Callable[[_FileBuffer], None]] = OrderedDict()

    def keep(self, buffer: _FileBuffer, release: Callable[[_FileBuffer], None]) -> None:
        """Keep a buffer; `release` is called once it is not kept any more."""
        with self._lock:
            self._buffers[buffer] = release
            self._num_bytes += buffer.memory.numel()
            gone = []
            while self._num_bytes > self._most_bytes:
                oldest, release_oldest = self._buffers.popitem(last=False)
                self._num_bytes -= oldest.memory.numel()
                gone.append((oldest, release_oldest))
        # Without the lock: to release a buffer waits for its write, and takes the lock of its storage.
        for oldest, release_oldest in gone:
            release_oldest(oldest)

    def take(self, buffer: _FileBuffer) -> bool:
        """Take a buffer back; say whether it was still kept."""
        with self._lock:
            if self._buffers.pop(buffer, None) is None:
                return False
            self._num_bytes -= buffer.memory.numel()
            return True

    def clear(self) -> None:
        """Release all kept buffers."""
        with self._lock:
            gone, self._buffers, self._num_bytes = self._buffers, OrderedDict(), 0
        for buffer, release in gone.items():
            release(buffer)


class NvmeStorage:
    """Stores a flat state in a file of its own.

    Args:
        file: its length is at least `padded_bytes(numel, dtype)`.
        kept: the buffers that are kept after their use.
    """

    tier: Tier = "nvme"
    tensor: None = None

    def __init__(
        self, file: SwapFileLike, numel: int, dtype: torch.dtype, transfers: TransferContext, kept: BufferCache
    ) -> None:
        self.numel = numel
        self.dtype = dtype
        self._file = file
        self._transfers = transfers
        self._kept = kept
        self._lock = threading.Lock()
        self._under_way: list[_FileBuffer] = []  # these are being written
        self._idle: list[_FileBuffer] = []  # these are kept
        self._putting: Task | None = None
        self._prefetched: _NvmeView | None = None

    def open(self, start: int, stop: int, read: bool = True, after: Event | None = None) -> StagedView:
        """Start to read [start, stop) into a buffer, unless `read` is False or it is in one; `after` has no effect.

        What was prefetched is dropped, because the part may be about to be written.
        """
        self.forget()
        return self._open(start, stop, read)

    def keeps(self, start: int, stop: int) -> bool:
        """Say whether the part is still in a buffer, and need not be read."""
        first, last = self._bytes_of(start, stop)
        with self._lock:
            return any(buffer.start == first and buffer.stop == last for buffer in self._idle)

    def _bytes_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of bytes of the file's blocks that contain the elements."""
        return start * self.dtype.itemsize // ALIGNMENT_BYTES * ALIGNMENT_BYTES, padded_bytes(stop, self.dtype)

    def _open(self, start: int, stop: int, read: bool) -> _NvmeView:
        item = self.dtype.itemsize
        first, last = self._bytes_of(start, stop)
        # Other elements beside the part share its first and last block; after the state there are none.
        shares = first < start * item or (stop < self.numel and last > stop * item)
        buffer = self._take_kept(first, last) or self._load(first, last, read or shares)
        return _NvmeView(self, buffer, start * item - first, (stop - start) * item)

    # [Note: Reads ahead of their use]
    # A gather waits for the slice of this rank, and a disk needs longer for it than the network for the rest. So while
    # a unit computes, those after the next one are read (`NUM_PREFETCHED`). A state has at most
    # one such window. It is dropped when a part is opened, because a step would make its content old. It is read only
    # after the last `put`, whose bytes the worker thread brings to the file.
    def fetch(self, target: Tensor) -> Event:
        """Copy on the gather stream, once the file is read; the host waits for the read, unless it was prefetched."""
        self.prefetch()
        window, self._prefetched = self._prefetched or self._open(0, self.numel, read=True), None
        memory = window.wait()
        with self._transfers.streams.side_stream("gather"):
            target.copy_(memory, non_blocking=True)
            copied = Event.record(self._transfers.streams.device)
        self._transfers.traffic.add("host", "device", memory.numel() * memory.element_size())
        self._transfers.close_after(copied, window)  # see [Note: Staging buffers wait for an event]
        return copied

    def prefetch(self) -> None:
        """Start to read all of the state."""
        self._transfers.close_reached()
        if self._prefetched is None:
            # A put is no write under way until the worker thread has started it.
            self._await_put()
            self._prefetched = self._open(0, self.numel, read=True)

    def forget(self) -> None:
        """Drop what was prefetched."""
        if self._prefetched is not None:
            window, self._prefetched = self._prefetched, None
            window.close()

    def put(self, source: Tensor, pool: BufferPool) -> None:
        """Copy to a buffer on the offload stream; the worker thread writes that to the file."""
        self.forget()
        with self._transfers.leaving(source, self.dtype, pool) as rounded:
            memory, there = self._transfers.stage(rounded, padded_bytes(self.numel, self.dtype))
        self._putting = self._transfers.work_off(lambda: self._write_staged(memory, there))

    def take(self, source: Tensor, pool: BufferPool, then: Callable[[Tensor], None] | None, add: bool) -> Task | None:
        """Copy `source` to a buffer on the offload stream and release it to `pool`; the worker writes it to the file.

        With `add`, the worker adds it to the state first, and calls `then`.
        """
        with self._transfers.streams.side_stream("offload"):
            memory, there = self._transfers.stage(source, 0 if add else padded_bytes(self.numel, self.dtype))
            pool.release(source)
        if not add:
            return self._transfers.work_off(lambda: self._write_staged(memory, there))
        dtype = source.dtype  # the worker may run this late, and must not keep the device's memory so long

        def add_on_host() -> None:
            there.wait_on_host()
            with loaded(self, write=True) as total:
                add_widened(total, memory.view(dtype))
                self._transfers.buffers.release(memory)
                if then is not None:
                    then(total)

        return self._transfers.work_off(add_on_host)

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of the elements [start, stop). It has memory of its own: a pool would keep each size."""
        self._await_put()
        if self.keeps(start, stop):
            with staged(self._open(start, stop, read=True)) as part:
                return part.clone()
        first, last = self._bytes_of(start, stop)
        self._await_writes(first, last)  # see [Note: Reads and writes of the same bytes]
        memory = host_pages(last - first)
        self._file.read(first, memory).result()
        self._transfers.traffic.add("nvme", "host", last - first)
        item = self.dtype.itemsize
        return memory[start * item - first : stop * item - first].view(self.dtype)

    def write(self, start: int, values: Tensor) -> None:
        """Replace the elements from `start` on; their write to the file is under way when it returns."""
        self._await_put()
        with staged(self.open(start, start + values.numel(), read=False), write=True) as part:
            part.copy_(values)

    def part(self, start: int, stop: int) -> FlatState:
        """Return the elements [start, stop) as a state."""
        return FlatSlice(self, start, stop)

    def flush(self) -> None:
        """Return once the file has all that was written, or raise the error of a write that failed."""
        with self._lock:
            writing = list(self._under_way)
        for buffer in writing:
            _end(buffer)

    def recover(self) -> WorkerOutcome:
        """Return a failed write, and forget it and all kept buffers: the caller writes the state again.

        Call it while the worker thread is idle.
        """
        self._putting = None
        self.forget()
        with self._lock:
            writing, self._under_way = self._under_way, []
        outcome = WorkerOutcome()
        for buffer in writing:
            failure = None if buffer.written is None else buffer.written.exception()
            if failure is not None:
                outcome = WorkerOutcome(failure, outcome.is_reported or buffer.is_reported)
        for buffer in list(self._idle):
            if self._kept.take(buffer):
                self._release_kept(buffer)
        return outcome

    def close(self) -> None:
        """Remove the file."""
        self.forget()
        self._transfers.close_reached(most_left=0)
        with suppress(Exception):  # the content is not needed any more
            self.flush()
        for buffer in list(self._idle):
            if self._kept.take(buffer):
                self._release(buffer)
        self._file.free()

    def _await_put(self) -> None:
        putting, self._putting = self._putting, None
        if putting is not None:
            putting.wait()

    def _load(self, first: int, last: int, is_read: bool) -> _FileBuffer:
        self._await_writes(first, last)  # see [Note: Reads and writes of the same bytes]
        buffer = _FileBuffer(first, last, self._transfers.buffers.acquire(last - first))
        if is_read:
            buffer.ready = self._file.read(first, buffer.memory)
            self._transfers.traffic.add("nvme", "host", last - first)
        return buffer

    def _take_kept(self, first: int, last: int) -> _FileBuffer | None:
        with self._lock:
            found = [buffer for buffer in self._idle if buffer.start == first and buffer.stop == last]
        for buffer in found:
            if self._kept.take(buffer):
                with self._lock:
                    self._idle.remove(buffer)
                _end(buffer)  # its write: see [Note: Reads and writes of the same bytes]
                self._transfers.traffic.keep(last - first)
                return buffer
        return None

    # [Note: Reads and writes of the same bytes]
    # Threads read and write a file in any order. So a read waits for writes of its bytes, which would come too late for
    # it, and a write waits for older ones, which might come after it. The memory of a write must not change until it
    # has ended: a kept buffer is waited for before it is used again, and a released one before it goes back to the
    # pool.
    def _await_writes(self, first: int, last: int) -> None:
        with self._lock:
            writing = [each for each in self._under_way if each.start < last and first < each.stop]
        for buffer in writing:
            _end(buffer)

    def _write_back(self, buffer: _FileBuffer) -> None:
        self._drop_kept(buffer.start, buffer.stop)
        self._await_writes(buffer.start, buffer.stop)
        self._transfers.traffic.add("host", "nvme", buffer.stop - buffer.start)
        with self._lock:
            self._under_way = [each for each in self._under_way if not _has_ended_well(each)]
            buffer.written = self._file.write(buffer.start, buffer.memory)
            self._under_way.append(buffer)
            self._idle.append(buffer)
        self._kept.keep(buffer, self._release_kept)

    def _drop_kept(self, first: int, last: int) -> None:
        """Release kept buffers of bytes that are being written from another buffer."""
        with self._lock:
            stale = [each for each in self._idle if each.start < last and first < each.stop]
        for buffer in stale:
            if self._kept.take(buffer):
                self._release_kept(buffer)

    def _release_kept(self, buffer: _FileBuffer) -> None:
        with self._lock:
            self._idle.remove(buffer)
        self._release(buffer)

    def _release(self, buffer: _FileBuffer) -> None:
        if buffer.written is not None:
            buffer.written.exception()  # `flush` or the next read reports the failure
        with self._lock:  # a failed one stays, to be reported
            self._under_way = [each for each in self._under_way if each is not buffer or not _has_ended_well(each)]
        self._transfers.buffers.release(buffer.memory)

    def _write_staged(self, memory: Tensor, there: Event) -> None:
        """Write from the buffer into which the tensor was copied, which has space for whole blocks."""
        there.wait_on_host()
        self._write_back(_FileBuffer(0, memory.numel(), memory))


class _NvmeView:
    def __init__(self, storage: NvmeStorage, buffer: _FileBuffer, offset_bytes: int, num_bytes: int) -> None:
        self._storage = storage
        self._buffer = buffer
        self._offset_bytes = offset_bytes
        self._num_bytes = num_bytes

    def wait(self) -> Tensor:
        if self._buffer.ready is not None:
            self._buffer.ready.result()
            self._buffer.ready = None
        own = self._buffer.memory[self._offset_bytes : self._offset_bytes + self._num_bytes]
        return own.view(self._storage.dtype)

    def close(self, write: bool = False) -> None:
        if self._buffer.ready is not None:  # it was not waited for
            with suppress(Exception):
                self._buffer.ready.result()
        if write:
            self._storage._write_back(self._buffer)
        else:
            self._storage._release(self._buffer)


def padded_bytes(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of a file for a state: whole blocks."""
    return -(-numel * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _end(buffer: _FileBuffer) -> None:
    if buffer.written is not None:
        buffer.is_reported = buffer.written.exception() is not None
        buffer.written.result()


def _has_ended_well(buffer: _FileBuffer) -> bool:
    written = buffer.written
    return written is not None and written.done() and written.exception() is None
