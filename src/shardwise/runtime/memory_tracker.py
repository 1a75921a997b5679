"""The memory tracker counts which bytes of one device's memory are live, by category, and what they were at the peak.

It is no allocator: it watches storages that others make. Each is counted once, with any number of views, until
it is freed; the tracker keeps nothing alive. On the CPU the counts are exact for registered storages, and under
`MemoryTracker.meter` for all that ops make. On CUDA torch's allocator gives the total, and what is not registered
counts as activations.

>>> tracker = MemoryTracker()
>>> weight = torch.zeros(4, 8)
>>> tracker.track(weight, Category.PARAMETERS)
>>> tracker.track(weight.t(), Category.PARAMETERS)
>>> with tracker.meter():
...     product = weight @ torch.ones(8, 2)
...     snapshot = tracker.snapshot()
>>> snapshot.live_bytes[Category.PARAMETERS], snapshot.live_bytes[Category.ACTIVATIONS], snapshot.peak_bytes
(128, 32, 224)
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from shardwise.config.resolve import ResolvedConfig
from shardwise.runtime.device import AllocatorStats, allocator_stats, kind_of, reset_peak
from shardwise.runtime.format import format_bytes
from shardwise.runtime.memory_report import (
    Category,
    MemoryAdvice,
    MemorySnapshot,
    first_line,
    format_table,
    is_out_of_memory,
    oom_advice,
    oom_message,
)
from shardwise.runtime.torch_private import OpMode, set_unsharded_storage

__all__ = [
    "Allocator",
    "AllocatorStats",
    "Category",
    "MemoryAdvice",
    "MemorySnapshot",
    "MemoryTracker",
    "TorchAllocator",
    "explain_out_of_memory",
    "first_line",
    "format_bytes",
    "format_table",
    "is_out_of_memory",
    "keep_host_memory",
    "oom_advice",
    "trim_host_memory",
]


class Allocator(Protocol):
    """Gives a device's totals."""

    def stats(self) -> AllocatorStats:
        """Read the counters."""

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""


class TorchAllocator:
    """Reads torch's caching allocator on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stats(self) -> AllocatorStats:
        return allocator_stats(self._device)

    def reset_peak(self) -> None:
        reset_peak(self._device)


class IdleBuffers(Protocol):
    """Holds buffers of which some are idle."""

    @property
    def fragment_bytes(self) -> int:
        """Return the bytes reserved minus the bytes in use."""


class _Record(weakref.ref[torch.UntypedStorage]):
    """Records one storage; the storage itself is not kept alive.

    torch keeps one Python object for a storage as long as the storage lives, also if only the autograd graph
    holds it, so identity and weak references of that object are those of the memory
    (`test_a_storage_is_one_object_until_it_dies`).
    """

    __slots__ = ("category", "key", "num_bytes")
    key: int
    category: Category
    num_bytes: int


class MemoryTracker:
    """Counts live bytes by category on one device, from its first registered storage to the engine's end.

    Thread-safe: storages may die on any thread, such as those of gloo and of autograd.

    Args:
        device: whose memory is counted; tensors elsewhere are left out, such as AdamW's step counts.
        allocator: the source of totals; by default torch's, where it counts; it does not on the CPU.
        limit_bytes: the device's memory, for simulations: a storage that would bring the total above it is not
            counted, and raises `torch.OutOfMemoryError`. None for no limit.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        allocator: Allocator | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._limit_bytes = limit_bytes
        if allocator is None and kind_of(self.device).counts_memory:
            allocator = TorchAllocator(self.device)
        self._allocator = allocator
        self._records: dict[int, _Record] = {}
        # Storages die at any bytecode of any thread, also while the lock is held. So their deaths take no
        # lock: the records queue up here and are removed before the next entry; no peak counts dead bytes.
        self._dead: deque[_Record] = deque()
        self._lock = threading.Lock()
        self._live_bytes = dict.fromkeys(Category, 0)
        self._total_bytes = 0
        self._peak_bytes = 0
        self._peak_live_bytes: dict[Category, int] = dict(self._live_bytes)
        self._pools: weakref.WeakSet[IdleBuffers] = weakref.WeakSet()
        self._is_metering = False
        self._was_metered = False

    def track(self, tensor: Tensor | torch.UntypedStorage, category: Category) -> None:
        """Count the storage of `tensor` until it is freed; one that is counted already moves to `category`."""
        if not _is_on(tensor.device, self.device):
            return
        storage = _storage(tensor)
        with self._lock:
            before = self._begin()
            record = self._records.get(id(storage))
            if record is None:
                self._open(storage, category)
            else:
                self._count_bytes(record, category, storage.nbytes())
            self._end(before)

    def resize(self, tensor: Tensor | torch.UntypedStorage, num_bytes: int) -> None:
        """Resize a counted storage, 0 to free it; tensors that view it stay, unusable until it grows back.

        Raises:
            ValueError: the storage is not counted.
        """
        storage = _storage(tensor)
        with self._lock:
            before = self._begin()
            record = self._records.get(id(storage))
            if record is None:
                raise ValueError(f"a storage of {storage.nbytes()} bytes is not tracked; track it first")
            self._refuse_above_limit(num_bytes - record.num_bytes)
            set_unsharded_storage(storage, num_bytes)
            self._count_bytes(record, record.category, num_bytes)
            self._end(before)

    def category_of(self, storage: torch.UntypedStorage) -> Category | None:
        """Return the category under which a storage is counted; None if it is not counted."""
        record = self._records.get(id(storage))
        return record.category if record is not None and record() is storage else None

    @contextmanager
    def meter(self, category: Category = Category.ACTIVATIONS) -> Iterator[None]:
        """Count every storage that ops make on this thread, or in backwards started from it, until it is freed.

        On the CPU this slows every op, so turn it on for sampled steps. On CUDA it reads the allocator at
        every change of the counts, to find which categories were live at the peak. Not seen: tensors made
        before (register them), scratch memory inside one op, and what is not a tensor, such as gloo's
        buffers.

        Args:
            category: of what is made, unless it is registered under another one.

        Raises:
            RuntimeError: a meter is on already.
        """
        if self._is_metering:
            raise RuntimeError("this tracker's meter is on already; end it before the next one")
        self._is_metering = self._was_metered = True
        try:
            if self._allocator is not None:
                yield
            else:
                with _OutputMeter(self, category):
                    yield
        finally:
            self._is_metering = False

    def attach_pool(self, pool: IdleBuffers) -> None:
        """Count the idle bytes of `pool` as fragments; it is not kept alive."""
        self._pools.add(pool)

    def reset_peak(self) -> None:
        """Start a new peak at what is live now."""
        with self._lock:
            self._forget_freed()
            self._was_metered = self._is_metering
            total_bytes = self._total_bytes
            if self._allocator is not None:
                self._allocator.reset_peak()
                total_bytes = self._allocator.stats().allocated_bytes
            self._peak_bytes = total_bytes
            self._peak_live_bytes = _with_remainder(self._live_bytes, total_bytes)

    def snapshot(self) -> MemorySnapshot:
        """Return the counts now."""
        idle_bytes = sum(pool.fragment_bytes for pool in self._pools)
        with self._lock:
            before = dict(self._live_bytes)
            self._forget_freed()
            live_bytes = dict(self._live_bytes)
            reserved_bytes = self._total_bytes
            if self._allocator is not None:
                stats = self._allocator.stats()
                self._note_allocator_peak(stats, before)
                live_bytes = _with_remainder(live_bytes, stats.allocated_bytes)
                # Registered memory may be outside the allocator, such as in a pool of NCCL's.
                reserved_bytes = max(stats.reserved_bytes, sum(live_bytes.values()))
            return MemorySnapshot(
                device_type=self.device.type,
                live_bytes=live_bytes,
                peak_bytes=self._peak_bytes,
                peak_live_bytes=dict(self._peak_live_bytes),
                reserved_bytes=reserved_bytes,
                fragment_bytes=reserved_bytes - sum(live_bytes.values()) + idle_bytes,
                metered=self._was_metered,
            )

    def observe(self, output: Tensor, inputs: Sequence[Any], category: Category) -> None:
        """Count an op's output: a new storage under `category`, a known one at its present size.

        An output that shares the storage of an uncounted input was made elsewhere, and is not counted.

        Args:
            inputs: of the op; lists and tuples may nest.
        """
        storage = output.untyped_storage()
        with self._lock:
            self._forget_freed()
            record = self._records.get(id(storage))
            if record is not None:
                if record.num_bytes == storage.nbytes():
                    return
                self._refuse_above_limit(storage.nbytes() - record.num_bytes)
                self._count_bytes(record, record.category, storage.nbytes())
            elif any(storage is tensor.untyped_storage() for tensor in _strided(inputs)):
                return
            else:
                self._open(storage, category)
            self._note_peak()

    def _begin(self) -> Mapping[Category, int]:
        """Begin an entry, with the lock held: remove dead storages; return the counts of before, for `_end`."""
        before = dict(self._live_bytes) if self._allocator is not None and self._is_metering else self._live_bytes
        if self._dead:
            self._forget_freed()
        return before

    def _end(self, before: Mapping[Category, int]) -> None:
        """End an entry: note the peak."""
        if self._allocator is None:
            self._note_peak()
        elif self._is_metering:
            self._note_allocator_peak(self._allocator.stats(), before)

    def _open(self, storage: torch.UntypedStorage, category: Category) -> None:
        self._refuse_above_limit(storage.nbytes())
        record = _Record(storage, self._dead.append)
        record.key, record.category, record.num_bytes = id(storage), category, 0
        self._records[record.key] = record
        self._count_bytes(record, category, storage.nbytes())

    def _count_bytes(self, record: _Record, category: Category, num_bytes: int) -> None:
        self._live_bytes[record.category] -= record.num_bytes
        self._live_bytes[category] += num_bytes
        self._total_bytes += num_bytes - record.num_bytes
        record.category, record.num_bytes = category, num_bytes

    def _refuse_above_limit(self, more_bytes: int) -> None:
        if self._limit_bytes is None or more_bytes <= 0 or self._total_bytes + more_bytes <= self._limit_bytes:
            return
        raise torch.OutOfMemoryError(
            f"{self.device.type} would hold {format_bytes(self._total_bytes)} + {format_bytes(more_bytes)}, "
            f"of {format_bytes(self._limit_bytes)}"
        )

    def _forget_freed(self) -> None:
        while self._dead:
            record = self._dead.popleft()
            self._count_bytes(record, record.category, 0)
            del self._records[record.key]

    def _note_peak(self) -> None:
        # An equal total counts too: a storage that makes the peak and then moves is shown where it moved.
        if self._total_bytes >= self._peak_bytes:
            self._peak_bytes = self._total_bytes
            self._peak_live_bytes = dict(self._live_bytes)

    def _note_allocator_peak(self, stats: AllocatorStats, before: Mapping[Category, int]) -> None:
        """Attribute the allocator's new peak to the counts of now, or else to those since the last entry."""
        if stats.peak_allocated_bytes <= self._peak_bytes:
            return
        self._peak_bytes = stats.peak_allocated_bytes
        is_now = stats.allocated_bytes == stats.peak_allocated_bytes
        registered = self._live_bytes if is_now else before
        self._peak_live_bytes = _with_remainder(registered, self._peak_bytes) if self._is_metering else {}


@contextmanager
def explain_out_of_memory(tracker: MemoryTracker, config: ResolvedConfig, where: str) -> Iterator[None]:
    """Raise a failure of memory again, with what holds the memory and the settings that need less.

    Args:
        tracker: of the device that runs out.
        where: for the message, such as `on rank 0 in step 3`.

    Raises:
        torch.OutOfMemoryError: the device's memory is too small for what runs inside.
        MemoryError: Python's own error was raised inside.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_explained = error.__cause__ is not None and is_out_of_memory(error.__cause__)
        if not is_out_of_memory(error) or is_explained:
            raise
        kind = MemoryError if isinstance(error, MemoryError) else torch.OutOfMemoryError
        raise kind(oom_message(error, where, tracker.snapshot(), config)) from error


class _OutputMeter(OpMode):
    """Shows a memory tracker the outputs of every op."""

    def __init__(self, tracker: MemoryTracker, category: Category) -> None:
        super().__init__()
        self._tracker = tracker
        self._category = category

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        # `torch.tensor` and its kin allocate below the mode, and show their storage first as this op's input.
        inputs = () if func is torch.ops.aten.lift_fresh.default else (*args, *(kwargs or {}).values())
        for output in _strided((outputs,)):
            if output.device == self._tracker.device:
                self._tracker.observe(output, inputs, self._category)
        return outputs


def trim_host_memory() -> None:
    """Return freed pages of the host to the system, which the C library keeps where it is glibc; takes some 2 ms.

    Blocks of less than 32 MiB share one heap. Freed tensors leave gaps between tensors that stay, the next ones
    seldom fit into these, and the process grows by as much as was ever freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def keep_host_memory() -> None:
    """Let this process keep freed blocks of up to 32 MiB for its next tensors, where the C library is glibc.

    By default glibc returns blocks of that size to the system, and a step faults all its temporaries in again. What is
    kept is at most what was in use at the same time, with gaps; `trim_host_memory` returns it. See mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 * 2**20)  # the largest that glibc takes
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3


def _strided(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors with a storage among an op's arguments or results, which nest lists and tuples only."""
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, list | tuple):
            yield from _strided(value)


def _storage(tensor: Tensor | torch.UntypedStorage) -> torch.UntypedStorage:
    return tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor


def _is_on(device: torch.device, tracker_device: torch.device) -> bool:
    return device.type == tracker_device.type and tracker_device.index in (None, device.index)


def _with_remainder(registered: Mapping[Category, int], total_bytes: int) -> dict[Category, int]:
    """Return registered bytes by category, with what is missing to the total as activations."""
    remaining_bytes = max(0, total_bytes - sum(registered.values()))
    return {**registered, Category.ACTIVATIONS: registered[Category.ACTIVATIONS] + remaining_bytes}
