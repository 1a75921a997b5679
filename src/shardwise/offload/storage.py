"""Store a state of a parameter group: on the device, in host memory, or in a swap file (`nvme_storage`).

A `StateStorage` is a `FlatState`, so it is read and written by ranges. It also moves:

    fetch      all of it to the device, to be gathered
    prefetch   what `fetch` would wait for
    put        all of it from the device
    take       a gradient from the device, to be kept or added
    open       a part of it into host memory for the step there, which the part's `close` writes back
    close      the memory or file is freed

On the CPU, device and host are one memory, but states on the host have storage and a memory tracker of their own, so
that transfers are copied and counted as on a GPU.

The engine's thread calls `fetch`, `put` and `take`, its worker thread `open` and `close`. Either may call `read` and
`write`, once the worker is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final, Protocol

import torch
from torch import Tensor

from shardwise.config.resolve import Tier
from shardwise.offload.counters import TransferCounters
from shardwise.offload.staging_buffers import StagingBuffers
from shardwise.offload.worker import HostWorker, Task
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import Event, Streams
from shardwise.runtime.precision import add_widened
from shardwise.runtime.state_shards import FlatSlice, FlatState, TensorFlatState

# Tensors that have left the device and wait for the worker: without a limit they would fill the host's memory.
MOST_STAGED: Final = 3
# Tensors that the host has read and the device has not copied yet, where the host runs ahead of the device.
MOST_FETCHED: Final = 3
# Parts that move to the device, each in a buffer, while the worker thread goes on.
MOST_ARRIVING: Final = 2
# A disk needs more time than a gather: this many blocks are read after the one that is gathered ahead.
NUM_PREFETCHED: Final = 2


class StagedView(Protocol):
    """Gives access to a part of a state in host memory, until `close`."""

    def wait(self) -> Tensor:
        """Return the part, 1-D, once it is there."""

    def close(self, write: bool = False) -> None:
        """Release the memory; what was written into it counts where `write` is set."""


class StateStorage(FlatState, Protocol):
    """Stores a flat state in one tier."""

    @property
    def tier(self) -> Tier:
        """Return the tier."""

    def fetch(self, target: Tensor) -> Event:
        """Start to fill `target`, as long as the state and on the device; wait for the event before it is used."""

    def prefetch(self) -> None:
        """Start what `fetch` would have to wait for on the host."""

    def put(self, source: Tensor, pool: BufferPool) -> None:
        """Start to replace all of the state by `source`, a tensor of the device; what was fetched is waited for before.

        Args:
            source: as long as the state, of any dtype.
        """

    def take(self, source: Tensor, pool: BufferPool, then: Callable[[Tensor], None] | None, add: bool) -> Task | None:
        """Start to replace all of the state by `source`, or to add that, in the dtype of the state; as `put`.

        Args:
            source: as long as the state, on the device, leased from `pool`; it is released.
            then: called on the worker thread with the sum, in host memory, if one is made there; None for nothing.
            add: whether there is something to add to.

        Returns:
            the part that the worker thread does; None where the device does all.
        """

    def open(self, start: int, stop: int, read: bool = True, after: Event | None = None) -> StagedView:
        """Start to load the elements [start, stop) into host memory.

        Args:
            start: the first element of the part.
            read: False where all of them will be written.
            after: the point in the device's work at which they are valid there; None if they are valid now.
        """

    def close(self) -> None:
        """Free the memory."""


@contextmanager
def staged(view: StagedView, write: bool = False) -> Iterator[Tensor]:
    """Yield a part of a state in host memory; what is written there counts if `write` is set and nothing is raised."""
    try:
        yield view.wait()
    except BaseException:
        view.close()
        raise
    view.close(write)


@contextmanager
def loaded(storage: StateStorage, *, write: bool = False) -> Iterator[Tensor]:
    """Yield all of a state as one tensor, where it is stored, or in host memory if that is a file.

    Args:
        write: whether what is written into the tensor counts.
    """
    if storage.tensor is not None:
        yield storage.tensor
        return
    with staged(storage.open(0, storage.numel), write) as part:
        yield part


class TransferContext:
    """Bundles what all storages of an engine use to move data.

    Args:
        streams: the streams of the engine's device.
        worker: the thread that does what must wait.
    """

    def __init__(
        self, streams: Streams, buffers: StagingBuffers, worker: HostWorker, traffic: TransferCounters
    ) -> None:
        self.streams = streams
        self.buffers = buffers
        self.worker = worker
        self.traffic = traffic
        self._staged: deque[Task] = deque()
        self._fetched: deque[tuple[Event, StagedView]] = deque()

    # [Note: Staging buffers wait for an event]
    # A staging buffer is host memory: no stream orders its reuse, and its pool has no events. So it goes back only
    # after the host has seen that the copy is over. The host does not wait for that as long as few copies are under
    # way: it looks for copies that are over when it starts the next one. It waits above MOST_FETCHED, as a host that is
    # far ahead of its device would fill its memory with what the device has not taken yet.
    def close_after(self, copied: Event, window: StagedView) -> None:
        """Close a window once the device has copied its content."""
        self._fetched.append((copied, window))
        self.close_reached()

    def close_reached(self, most_left: int = MOST_FETCHED) -> None:
        """Close the windows that the device has copied, of any state, and wait until at most `most_left` are left."""
        while self._fetched and (len(self._fetched) > most_left or self._fetched[0][0].is_reached()):
            copied, window = self._fetched.popleft()
            copied.wait_on_host()
            window.close()

    def stage(self, source: Tensor, capacity_bytes: int = 0) -> tuple[Tensor, Event]:
        """Start to copy a tensor of the device into a host buffer; return the buffer's bytes and the copy's end.

        The caller's stream may reuse `source` at once.

        Args:
            capacity_bytes: the least size of the buffer; what comes after the copy is undefined.
        """
        num_bytes = source.numel() * source.element_size()
        memory = self.buffers.acquire(max(num_bytes, capacity_bytes))
        memory[:num_bytes].view(source.dtype).copy_(source, non_blocking=True)
        self.traffic.add("device", "host", num_bytes)
        return memory, Event.record(self.streams.device)

    @contextmanager
    def leaving(self, source: Tensor, dtype: torch.dtype, pool: BufferPool) -> Iterator[Tensor]:
        """Yield `source` in `dtype`, with the offload stream as the current one.

        It is rounded before: a copy that rounds takes device memory, in the order of the stream on which it runs.

        Args:
            pool: the device's buffer pool, for the rounded copy.
        """
        rounded = source
        if source.dtype != dtype:
            rounded = pool.acquire(source.numel(), dtype)
            rounded.copy_(source)
        with self.streams.side_stream("offload"):
            yield rounded
            if rounded is not source:
                pool.release(rounded)

    def work_off(self, work: Callable[[], object]) -> Task:
        """Submit work on what was staged to the worker; wait while more than `MOST_STAGED` such tasks are left."""
        task = self.worker.submit(work)
        self._staged.append(task)
        while len(self._staged) > MOST_STAGED:
            self._staged.popleft().wait()
        return task


class DeviceStorage(TensorFlatState):
    """Stores a state on the engine's device."""

    tier: Tier = "device"

    def __init__(self, tensor: Tensor, transfers: TransferContext) -> None:
        super().__init__(tensor)
        self._transfers = transfers
        self._arriving: deque[tuple[Event, Tensor]] = deque()

    def fetch(self, target: Tensor) -> Event:
        """Copy on the current stream."""
        target.copy_(self.tensor)
        return Event(None)

    def prefetch(self) -> None:
        """Do nothing: no read is needed."""

    def put(self, source: Tensor, pool: BufferPool) -> None:
        """Copy on the current stream."""
        self.tensor.copy_(source)

    def take(self, source: Tensor, pool: BufferPool, then: Callable[[Tensor], None] | None, add: bool) -> Task | None:
        """Copy `source`, or with `add` add it, on the current stream; release it to `pool`. `then` is not called."""
        (add_widened if add else Tensor.copy_)(self.tensor, source)
        pool.release(source)
        return None

    def open(self, start: int, stop: int, read: bool = True, after: Event | None = None) -> StagedView:
        """Start to copy [start, stop) to the host, from the point `after` on, unless `read` is False."""
        return _DeviceView(self, self.tensor[start:stop], read, after)

    def note_arriving(self, event: Event, memory: Tensor) -> None:
        """Release a buffer once its content is on the device."""
        self._arriving.append((event, memory))
        self._await_arriving(MOST_ARRIVING)

    def wait_arrived(self) -> None:
        """Return once all that windows have written is on the device; the worker thread calls it."""
        self._await_arriving(0)

    def _await_arriving(self, most: int) -> None:
        while len(self._arriving) > most:
            event, memory = self._arriving.popleft()
            event.wait_on_host()
            self._transfers.buffers.release(memory)

    def close(self) -> None:
        """Do nothing: the memory belongs to the owner of the tensor."""


class _DeviceView:
    def __init__(self, storage: DeviceStorage, tensor: Tensor, read: bool, after: Event | None) -> None:
        self._storage = storage
        self._tensor = tensor
        self._transfers = transfers = storage._transfers
        self._after = after
        self._memory = transfers.buffers.acquire(tensor.numel() * tensor.element_size())
        self._there: Event | None = None
        if read:
            with transfers.streams.side_stream("offload", after):  # see [Note: What a chunk waits for]
                self._memory.view(tensor.dtype).copy_(tensor, non_blocking=True)
                self._there = Event.record(transfers.streams.device)
            transfers.traffic.add("device", "host", self._memory.numel())

    def wait(self) -> Tensor:
        if self._there is not None:
            self._there.wait_on_host()
        return self._memory.view(self._tensor.dtype)

    def close(self, write: bool = False) -> None:
        if not write:
            if self._there is not None:
                self._there.wait_on_host()  # not waited for yet if an earlier task has failed
            self._transfers.buffers.release(self._memory)
            return
        # After `after`, not after all that the compute stream holds now: the worker thread comes here while the engine
        # enqueues other work, which does not use these parameters until the step's task has ended.
        with self._transfers.streams.side_stream("reload", self._after):
            self._tensor.copy_(self._memory.view(self._tensor.dtype), non_blocking=True)
            written = Event.record(self._transfers.streams.device)
        self._transfers.traffic.add("host", "device", self._memory.numel())
        self._storage.note_arriving(written, self._memory)


class HostStorage:
    """Stores a state in host memory, pinned where the device is a GPU and the state goes there."""

    tier: Tier = "host"

    def __init__(self, make: Callable[[], Tensor], transfers: TransferContext) -> None:
        self._make = make
        self._tensor = tensor = make()
        self.numel = tensor.numel()
        self.dtype = tensor.dtype
        self._transfers = transfers
        # [Note: One event for all copies of a state]
        # Copies of one state run on two streams: to the device on "gather", which waits for the event of the copy
        # before; from it on "offload", which begins after the current stream, and that has waited for what was fetched.
        # So the last event stands for all copies. Streams order nothing for the host, which waits for the event before
        # it reads or writes the memory.
        self._moved = Event(None)  # the end of the last copy from or to the device

    @property
    def tensor(self) -> Tensor:
        """Return all of the state, once no copy is under way."""
        self._moved.wait_on_host()
        return self._tensor

    def fetch(self, target: Tensor) -> Event:
        """Copy on the gather stream, so that a gather comes after it."""
        with self._transfers.streams.side_stream("gather"):
            self._moved.wait()  # see [Note: One event for all copies of a state]
            target.copy_(self._tensor, non_blocking=True)
            return self._note("host", "device")

    def prefetch(self) -> None:
        """Do nothing: no read is needed."""

    def put(self, source: Tensor, pool: BufferPool) -> None:
        """Copy on the offload stream."""
        with self._transfers.leaving(source, self.dtype, pool) as rounded:
            self._tensor.copy_(rounded, non_blocking=True)
            self._note("device", "host")

    def take(self, source: Tensor, pool: BufferPool, then: Callable[[Tensor], None] | None, add: bool) -> Task | None:
        """Copy `source` on the offload stream, release it to `pool`; with `add`, the worker adds and calls `then`."""
        with self._transfers.streams.side_stream("offload"):
            if not add:
                self._tensor.copy_(source, non_blocking=True)
                self._note("device", "host")
                pool.release(source)
                return None
            # Released on the stream that copies, so that the next user of the memory waits for the copy.
            memory, there = self._transfers.stage(source)
            pool.release(source)
        dtype = source.dtype  # the worker may run this late, and must not keep the device's memory so long

        def add_on_host() -> None:
            there.wait_on_host()
            total = self.tensor
            add_widened(total, memory.view(dtype))
            self._transfers.buffers.release(memory)
            if then is not None:
                then(total)

        return self._transfers.work_off(add_on_host)

    def open(self, start: int, stop: int, read: bool = True, after: Event | None = None) -> StagedView:
        """Return a view of [start, stop), valid once no copy is under way; `read` and `after` have no effect."""
        return _HostView(self._tensor[start:stop], self._moved)

    def read(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]

    def write(self, start: int, values: Tensor) -> None:
        self.tensor[start : start + values.numel()].copy_(values)

    def part(self, start: int, stop: int) -> FlatState:
        """Return the elements [start, stop), over the same memory."""
        return FlatSlice(self, start, stop)

    def free(self) -> None:
        """Free the memory, and what is in it, until `allocate`."""
        self._tensor = self.tensor[:0].clone()

    def allocate(self) -> None:
        """Allocate the memory again, zeros."""
        self._tensor = self._make()

    def close(self) -> None:
        """Wait for the copies under way: the memory is freed with the tensor."""
        self._moved.wait_on_host()

    def _note(self, source: Tier, target: Tier) -> Event:
        self._transfers.traffic.add(source, target, self.numel * self.dtype.itemsize)
        self._moved = Event.record(self._transfers.streams.device)
        return self._moved


class _HostView:
    def __init__(self, tensor: Tensor, moved: Event) -> None:
        self._tensor = tensor
        self._moved = moved

    def wait(self) -> Tensor:
        self._moved.wait_on_host()
        return self._tensor

    def close(self, write: bool = False) -> None:
        pass


class SimulatedFile:
    """Stands for a file of any size; reads and writes end at once and move nothing.

    Args:
        num_bytes: the size that the file would have.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def read(self, offset_bytes: int, target: Tensor) -> Future[None]:
        return _over()

    def write(self, offset_bytes: int, source: Tensor) -> Future[None]:
        return _over()

    def free(self) -> None:
        """Do nothing: there is no file."""


def _over() -> Future[None]:
    over: Future[None] = Future()
    over.set_result(None)
    return over
