"""Where a state of a parameter group rests: on the device, in host memory, in a swap file. One class for each.

A `StateStorage` is a `FlatState`, so it is read and written by ranges. Beside that it moves:

    fetch   all of it to the device, to be gathered
    put     all of it from the device
    take    a gradient from the device, to be kept or added
    open    a part of it into host memory for the step there, and `close` writes it back

On the CPU device and host are one memory, but what rests on the host has storage and books of its own, so that what
crosses is copied and counted as elsewhere.

Threads: `fetch`, `put` and `take` belong to the engine's thread, `open` and `close` to its lane; `read` and `write` to
either, once the lane is settled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Protocol

import torch
from torch import Tensor

from shardwise.config.resolve import Tier
from shardwise.offload.counters import TransferCounters
from shardwise.offload.staging_buffers import StagingBuffers
from shardwise.offload.worker import HostWorker, Task
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.precision import add_widened
from shardwise.runtime.state_shards import FlatSlice, FlatState, TensorFlatState
from shardwise.runtime.streams import Event, Streams

# What leaves the device faster than the host takes it up would fill the host's memory.
MOST_STAGED: Final = 3
# Likewise, where the host runs ahead of the device: what it has read and the device has not taken up yet.
MOST_FETCHED: Final = 3
# Parts on their way to the device, each in a buffer, while the lane goes on.
MOST_ARRIVING: Final = 2


class StagedView(Protocol):
    """A part of a state in host memory, until `close`."""

    def wait(self) -> Tensor:
        """The part, 1-D, once it is there."""

    def close(self, write: bool = False) -> None:
        """Give the memory back; what was written into it counts where `write` is set."""


class StateStorage(FlatState, Protocol):
    """A flat state in one tier."""

    @property
    def tier(self) -> Tier:
        """The memory."""

    def fetch(self, target: Tensor) -> Event:
        """Start to fill `target`, as long as the state and on the device; wait for the event before it is used."""

    def prefetch(self) -> None:
        """Start what `fetch` would have to wait for on the host."""

    def forget(self) -> None:
        """Give up what was prefetched: it is about to be written."""

    def put(self, source: Tensor, pool: BufferPool) -> None:
        """Start to replace all of it by `source`, a tensor of the device.

        Args:
            source: of any dtype.
            pool: of the device.
        """

    def take(self, source: Tensor, pool: BufferPool, then: Callable[[Tensor], None] | None, add: bool) -> Task | None:
        """Start to replace all of it by `source`, or to add that, in the dtype of the state.

        Args:
            source: leased from `pool`, of the device; given back.
            pool: of the device.
            then: is called on the lane with the sum, in host memory, where one is made.
            add: whether there is something to add to.

        Returns:
            the part that the lane does; None where the device does all.
        """

    def open(self, start: int, stop: int, read: bool = True, after: Event | None = None) -> StagedView:
        """Start to load the elements [start, stop) into host memory.

        Args:
            start: of the part.
            stop: likewise.
            read: False where all of them will be written.
            after: the point in the device's work at which they are valid there.
        """

    def loaded(self, read: bool = True, write: bool = False) -> AbstractContextManager[Tensor]:
        """All of it as one tensor, where it lies or in host memory; what is written there counts if `write` is set."""

    def close(self) -> None:
        """Give the memory back."""


class TransferContext:
    """What all rests of an engine move by.

    Args:
        streams: of the engine's device.
        buffers: host memory for what is on its way.
        lane: does what must wait.
        traffic: counts.
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

    def close_after(self, copied: Event, window: StagedView) -> None:
        """Close a window once what is in it has come to the device."""
        self._fetched.append((copied, window))
        self.close_reached()

    def close_reached(self, most_left: int = MOST_FETCHED) -> None:
        """Close the windows of which that is so, whatever state they are of, and wait until few are left."""
        while self._fetched and (len(self._fetched) > most_left or self._fetched[0][0].is_reached()):
            copied, window = self._fetched.popleft()
            copied.wait_on_host()
            window.close()

    def stage(self, source: Tensor, room_bytes: int = 0) -> tuple[Tensor, Event]:
        """Start to copy a tensor of the device into a buffer of the host; the buffer's bytes, and when they are there.

        The caller's stream may reuse `source` at once.

        Args:
            source: 1-D.
            room_bytes: of the buffer, at least; what lies behind the copy is undefined.
        """
        num_bytes = source.numel() * source.element_size()
        memory = self.buffers.acquire(max(num_bytes, room_bytes))
        memory[:num_bytes].view(source.dtype).copy_(source, non_blocking=True)
        self.traffic.add("device", "host", num_bytes)
        return memory, Event.record(self.streams.device)

    @contextmanager
    def leaving(self, source: Tensor, dtype: torch.dtype, pool: BufferPool) -> Iterator[Tensor]:
        """Inside, `source` in `dtype`, on the stream of offloads.

        It is rounded before: a copy that rounds takes device memory, in the order of the stream on which it runs.
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
        """Have the lane use up what was staged; where it is far behind, wait until it has caught up."""
        task = self.worker.submit(work)
        self._staged.append(task)
        while len(self._staged) > MOST_STAGED:
            self._staged.popleft().wait()
        return task


class DeviceStorage(TensorFlatState):
    """A state on the engine's device."""

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
        """There is nothing to wait for."""

    def forget(self) -> None:
        """There is nothing to give up."""

    def put(self, source: Tensor, pool: BufferPool) -> None:
        """Copy on the current stream."""
        self.tensor.copy_(source)

    def take(self, source: Tensor, pool: BufferPool, then: Callable[[Tensor], None] | None, add: bool) -> Task | None:
        """Copy or add on the current stream."""
        (add_widened if add else Tensor.copy_)(self.tensor, source)
        pool.release(source)
        return None

    def open(self, start: int, stop: int, read: bool = True, after: Event | None = None) -> StagedView:
        """Start to copy a part to the host."""
        return _DeviceView(self, self.tensor[start:stop], read, after)

    def note_arriving(self, event: Event, memory: Tensor) -> None:
        """Give a buffer back once what it holds is on the device."""
        self._arriving.append((event, memory))
        self._await_arriving(MOST_ARRIVING)

    def settle(self) -> None:
        """Return once all that windows have written is on the device; on the lane."""
        self._await_arriving(0)

    def _await_arriving(self, most: int) -> None:
        while len(self._arriving) > most:
            event, memory = self._arriving.popleft()
            event.wait_on_host()
            self._transfers.buffers.release(memory)

    @contextmanager
    def loaded(self, read: bool = True, write: bool = False) -> Iterator[Tensor]:
        """The tensor itself."""
        yield self.tensor

    def close(self) -> None:
        """The memory is whose tensor it was."""


class _DeviceView:
    def __init__(self, rest: DeviceStorage, tensor: Tensor, read: bool, after: Event | None) -> None:
        self._rest = rest
        self._tensor = tensor
        self._transfers = transfers = rest._transfers
        self._after = after
        self._memory = transfers.buffers.acquire(tensor.numel() * tensor.element_size())
        self._there: Event | None = None
        if read:
            with transfers.streams.side_stream("offload", after):
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
                self._there.wait_on_host()  # nobody has, if what came before has failed
            self._transfers.buffers.release(self._memory)
            return
        with self._transfers.streams.side_stream("reload", self._after):
            self._tensor.copy_(self._memory.view(self._tensor.dtype), non_blocking=True)
            written = Event.record(self._transfers.streams.device)
        self._transfers.traffic.add("host", "device", self._memory.numel())
        self._rest.note_arriving(written, self._memory)


class HostStorage:
    """A state in host memory, pinned where the device is a GPU and the state goes there.

    Args:
        make: memory for it, of zeros.
        means: what moves it.
    """

    tier: Tier = "host"

    def __init__(self, make: Callable[[], Tensor], transfers: TransferContext) -> None:
        self._make = make
        self._tensor = tensor = make()
        self.numel = tensor.numel()
        self.dtype = tensor.dtype
        self._transfers = transfers
        self._moved = Event(None)  # the end of the last copy from or to the device

    @property
    def tensor(self) -> Tensor:
        """All of it, once no copy is under way."""
        self._moved.wait_on_host()
        return self._tensor

    def fetch(self, target: Tensor) -> Event:
        """Copy on the gathers' stream, so that a gather comes behind it."""
        with self._transfers.streams.side_stream("gather"):
            self._moved.wait()
            target.copy_(self._tensor, non_blocking=True)
            return self._note("host", "device")

    def prefetch(self) -> None:
        """There is nothing to wait for."""

    def forget(self) -> None:
        """There is nothing to give up."""

    def put(self, source: Tensor, pool: BufferPool) -> None:
        """Copy on the stream of offloads."""
        with self._transfers.leaving(source, self.dtype, pool) as rounded:
            self._moved.wait()
            self._tensor.copy_(rounded, non_blocking=True)
            self._note("device", "host")

    def take(self, source: Tensor, pool: BufferPool, then: Callable[[Tensor], None] | None, add: bool) -> Task | None:
        """Copy on the stream of offloads; add on the lane."""
        with self._transfers.streams.side_stream("offload"):
            if not add:
                self._moved.wait()
                self._tensor.copy_(source, non_blocking=True)
                self._note("device", "host")
                pool.release(source)
                return None
            memory, there = self._transfers.stage(source)
            pool.release(source)
        dtype = source.dtype  # the lane may come to it late, and must not keep the device's memory so long

        def add_on_host() -> None:
            there.wait_on_host()
            total = self.tensor
            add_widened(total, memory.view(dtype))
            self._transfers.buffers.release(memory)
            if then is not None:
                then(total)

        return self._transfers.work_off(add_on_host)

    def open(self, start: int, stop: int, read: bool = True, after: Event | None = None) -> StagedView:
        """A view, once no copy is under way."""
        return _HostView(self._tensor[start:stop], self._moved)

    @contextmanager
    def loaded(self, read: bool = True, write: bool = False) -> Iterator[Tensor]:
        """The tensor itself, once no copy is under way."""
        yield self.tensor

    def read(self, start: int, stop: int) -> Tensor:
        """The elements [start, stop), a view, once no copy is under way."""
        return self.tensor[start:stop]

    def write(self, start: int, values: Tensor) -> None:
        """Replace the elements from `start` on, once no copy is under way."""
        self.tensor[start : start + values.numel()].copy_(values)

    def part(self, start: int, stop: int) -> FlatState:
        """The elements [start, stop), over the same memory."""
        return FlatSlice(self, start, stop)

    def free(self) -> None:
        """Give the memory up, and what is in it, until `allocate`."""
        self._tensor = self.tensor[:0].clone()

    def allocate(self) -> None:
        """Have memory again, of zeros."""
        self._tensor = self._make()

    def close(self) -> None:
        """The memory is gone with the tensor, so no copy may be under way."""
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
    """Of any size; reads and writes are over at once and move nothing.

    Args:
        num_bytes: that it would have.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def read(self, offset_bytes: int, target: Tensor) -> Future[None]:
        """Leave `target` as it is."""
        return _over()

    def write(self, offset_bytes: int, source: Tensor) -> Future[None]:
        """Leave the file as it is not."""
        return _over()

    def free(self) -> None:
        """There is nothing to remove."""


def _over() -> Future[None]:
    over: Future[None] = Future()
    over.set_result(None)
    return over
