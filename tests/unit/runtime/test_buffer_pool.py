"""Pooled buffers: who owns which bytes, how many are held, and which stream waits for which."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.runtime.buffer_pool import BufferPool, size_class_bytes
from shardwise.runtime.memory_tracker import Category, MemoryTracker

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8]


def address_range(tensor: Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())


def allocated_bytes(tracker: MemoryTracker) -> int:
    """What the pool's storages really hold, by the tracker's weak references to them."""
    return tracker.snapshot().live_bytes[Category.BUCKETS]


def test_a_buffer_has_the_shape_asked_for_and_keeps_what_is_written() -> None:
    pool = BufferPool()
    buffers = [pool.acquire(numel, dtype) for numel in (0, 1, 1000) for dtype in DTYPES]
    for value, buffer in enumerate(buffers):
        buffer.fill_(value)
    for index, (value, buffer) in enumerate(zip(range(len(buffers)), buffers, strict=True)):
        assert buffer.shape == ((0, 1, 1000)[index // len(DTYPES)],)
        assert buffer.dtype == DTYPES[index % len(DTYPES)]
        assert buffer.is_contiguous()
        assert (buffer == value).all()


def test_a_released_buffer_serves_the_next_request_of_any_dtype() -> None:
    pool = BufferPool()
    first = pool.acquire(1 << 16, torch.float32)
    pool.release(first)
    second = pool.acquire((1 << 17) - 100, torch.bfloat16)
    assert second.data_ptr() == first.data_ptr()
    assert (pool.reserved_bytes, pool.live_bytes, pool.fragment_bytes) == (1 << 18, (1 << 18) - 200, 200)


def test_the_smallest_fitting_idle_buffer_is_taken_and_a_wasteful_one_is_not() -> None:
    pool = BufferPool()
    held = [pool.acquire(numel, torch.uint8) for numel in (9000, 4500, 4096)]
    for buffer in held:
        pool.release(buffer)
    assert pool.acquire(4096, torch.uint8).data_ptr() == held[2].data_ptr(), "both fit; this one is smaller"
    assert pool.acquire(4096, torch.uint8).data_ptr() == held[1].data_ptr()
    assert pool.acquire(4096, torch.uint8).data_ptr() != held[0].data_ptr(), "more than an eighth would be wasted"


def test_no_more_is_held_than_was_once_in_use() -> None:
    """Sizes that grow would pile up in a pool that only ever adds: 1 + 2 + 4 + 8."""
    tracker = MemoryTracker()
    pool = BufferPool(tracker=tracker)
    for exponent in range(12, 20):
        pool.release(pool.acquire(1 << exponent, torch.uint8))
        assert pool.reserved_bytes == allocated_bytes(tracker) == 1 << exponent
    both = [pool.acquire(1 << 19, torch.uint8), pool.acquire(1 << 12, torch.uint8)]
    for buffer in both:
        pool.release(buffer)
    assert pool.reserved_bytes == (1 << 19) + (1 << 12), "these were in use together, so both stay"


def test_the_longest_idle_buffer_is_freed_first() -> None:
    pool = BufferPool()
    old, new = pool.acquire(1024, torch.uint8), pool.acquire(1024, torch.uint8)
    pool.release(old)
    pool.release(new)
    kept_pointer = new.data_ptr()
    del old, new
    pool.acquire(800, torch.uint8)
    assert pool.reserved_bytes == 1024 + 832
    assert pool.acquire(1024, torch.uint8).data_ptr() == kept_pointer


def test_trim_frees_what_is_idle_and_forgets_the_peak() -> None:
    tracker = MemoryTracker()
    pool = BufferPool(tracker=tracker)
    first, second = pool.acquire(4096, torch.uint8), pool.acquire(1 << 16, torch.uint8)
    pool.release(second)
    del second
    pool.trim()
    assert pool.reserved_bytes == allocated_bytes(tracker) == pool.live_bytes == 4096
    pool.release(first)
    pool.release(pool.acquire(8192, torch.uint8))
    assert pool.reserved_bytes == 8192


def test_the_tracker_counts_buffers_and_fragments_and_the_pools_end() -> None:
    tracker = MemoryTracker()
    pool = BufferPool(tracker=tracker)
    first, second = pool.acquire(1000, torch.uint8), pool.acquire(2048, torch.uint8)
    pool.release(second)
    snapshot = tracker.snapshot()
    assert snapshot.live_bytes[Category.BUCKETS] == snapshot.reserved_bytes == 1024 + 2048
    assert snapshot.fragment_bytes == pool.fragment_bytes == 24 + 2048
    del pool, first, second
    gc.collect()
    snapshot = tracker.snapshot()
    assert (snapshot.total_bytes, snapshot.fragment_bytes) == (0, 0)


def test_a_metered_acquire_counts_the_buffer_once() -> None:
    tracker = MemoryTracker()
    pool = BufferPool(tracker=tracker)
    with tracker.meter():
        buffer = pool.acquire(1024, torch.uint8).fill_(1).view(32, 32)
    snapshot = tracker.snapshot()
    assert snapshot.total_bytes == snapshot.live_bytes[Category.BUCKETS] == buffer.numel()


def test_what_is_not_on_lease_cannot_be_released() -> None:
    pool = BufferPool()
    buffer = pool.acquire(10, torch.float32)
    foreign = BufferPool().acquire(10, torch.float32)
    for tensor in (foreign, torch.zeros(10), buffer[:5], buffer.view(10)):
        with pytest.raises(ValueError, match="not on lease"):
            pool.release(tensor)
    pool.release(buffer)
    with pytest.raises(ValueError, match="not on lease"):
        pool.release(buffer)
    again = pool.acquire(10, torch.float32)
    assert again.data_ptr() == buffer.data_ptr()
    with pytest.raises(ValueError, match="not on lease"):
        pool.release(buffer)  # The memory is on lease again, but to the holder of `again`.
    assert (pool.live_bytes, pool.reserved_bytes) == (40, 512)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="numel=-1"):
        BufferPool().acquire(-1, torch.float32)


@given(st.integers(0, 2**40))
def test_size_classes_hold_and_waste_little(num_bytes: int) -> None:
    capacity_bytes = size_class_bytes(num_bytes)
    assert num_bytes <= capacity_bytes <= max(512, num_bytes + num_bytes // 8)
    assert size_class_bytes(capacity_bytes) == capacity_bytes
    assert capacity_bytes % 16 == 0, "so that slices of any dtype stay aligned"


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_sequence_keeps_owners_apart_and_the_counters_exact(data: st.DataObject) -> None:
    tracker = MemoryTracker()
    pool = BufferPool(tracker=tracker)
    leased: list[Tensor] = []
    peak_live_bytes = most_leased = 0
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["acquire", "acquire", "release", "release", "trim"]))
        if action == "acquire":
            leased.append(pool.acquire(data.draw(st.integers(0, 5000)), data.draw(st.sampled_from(DTYPES))))
        elif action == "release" and leased:
            pool.release(leased.pop(data.draw(st.integers(0, len(leased) - 1))))
        elif action == "trim":
            pool.trim()
        ranges = sorted((address_range(tensor) for tensor in leased if tensor.numel()), key=lambda r: r.start)
        assert all(low.stop <= high.start for low, high in pairwise(ranges))
        live_bytes = sum(map(len, ranges))
        peak_live_bytes, most_leased = max(peak_live_bytes, live_bytes), max(most_leased, len(leased))
        assert pool.live_bytes == live_bytes
        assert live_bytes <= pool.reserved_bytes == allocated_bytes(tracker)
        assert pool.fragment_bytes == tracker.snapshot().fragment_bytes == pool.reserved_bytes - live_bytes
        assert pool.reserved_bytes <= peak_live_bytes * 9 / 8 + 512 * most_leased


class FakeStream:
    """Records what the pool asks of a stream; an event is the name of its moment."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_events = 0
        self.waited_for: list[str] = []

    def record_event(self) -> str:
        self.num_events += 1
        return f"{self.name}{self.num_events}"

    def wait_event(self, event: str) -> None:
        self.waited_for.append(event)


def test_an_acquirer_waits_for_the_stream_that_used_the_buffer_last() -> None:
    home, gather, reduce = FakeStream("home"), FakeStream("gather"), FakeStream("reduce")
    pool = BufferPool(home=home)
    buffer = pool.acquire(100, torch.float32, gather)
    assert gather.waited_for == ["home1"], "fresh memory may still be in use on the stream it was freed on"
    pool.release(buffer, reduce)
    buffer = pool.acquire(100, torch.float32, gather)
    assert gather.waited_for == ["home1", "reduce1"]
    pool.release(buffer, gather)
    pool.acquire(100, torch.float32, gather)
    assert gather.waited_for == ["home1", "reduce1"], "a stream is in order with itself"
    assert (home.waited_for, reduce.waited_for) == ([], [])


def test_memory_is_freed_after_its_last_use() -> None:
    home, gather = FakeStream("home"), FakeStream("gather")
    pool = BufferPool(home=home)
    by_gather, by_home = pool.acquire(100, torch.float32, gather), pool.acquire(100, torch.float32, home)
    pool.release(by_gather, gather)
    pool.release(by_home, home)
    pool.trim()
    assert home.waited_for == ["gather1"]


def test_without_streams_nothing_is_waited_for() -> None:
    pool = BufferPool()
    pool.release(pool.acquire(100, torch.float32))
    gather = FakeStream("gather")
    pool.acquire(100, torch.float32, gather)
    assert gather.waited_for == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_buffers_pass_between_cuda_streams_without_a_race() -> None:
    pool = BufferPool("cuda")
    side = torch.cuda.Stream()
    totals = []
    for value in range(20):
        buffer = pool.acquire(1 << 22, torch.float32)
        buffer.fill_(value)
        pool.release(buffer)
        with torch.cuda.stream(side):
            buffer = pool.acquire(1 << 22, torch.float32)
            totals.append(buffer.add_(1).sum() / buffer.numel())
            pool.release(buffer)
    torch.cuda.synchronize()
    assert [total.item() for total in totals] == [value + 1 for value in range(20)]
    assert pool.reserved_bytes == 1 << 24
