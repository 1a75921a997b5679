"""Host buffers: aligned, reused, given back, booked; for any thread, and under fake tensors."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.offload.staging_buffers import StagingBuffers
from shardwise.runtime.memory_tracker import Category, MemoryTracker
from shardwise.runtime.pinned_memory import ALIGNMENT_BYTES
from shardwise.runtime.torch_private import fake_tensors


@given(sizes=st.lists(st.integers(0, 300_000), min_size=1, max_size=8))
def test_buffers_are_aligned_disjoint_and_of_the_size(sizes: list[int]) -> None:
    tracker = MemoryTracker()
    buffers = StagingBuffers(tracker=tracker)
    leased = [buffers.acquire(size) for size in sizes]
    ranges = sorted((each.data_ptr(), each.data_ptr() + each.numel()) for each in leased)
    assert [each.shape for each in leased] == [(size,) for size in sizes]
    assert {(each.dtype, each.device.type) for each in leased} == {(torch.uint8, "cpu")}
    assert all(start % ALIGNMENT_BYTES == 0 for start, _ in ranges)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert buffers.live_bytes == sum(sizes) <= buffers.reserved_bytes
    assert tracker.snapshot().live_bytes[Category.BUCKETS] >= buffers.reserved_bytes
    for each in leased:
        buffers.release(each)
    buffers.trim()
    del each, leased
    assert (buffers.live_bytes, buffers.reserved_bytes, tracker.snapshot().total_bytes) == (0, 0, 0)


def test_an_idle_buffer_of_about_the_size_is_used_again() -> None:
    buffers = StagingBuffers()
    first = buffers.acquire(2**20)
    address = first.data_ptr()
    buffers.release(first)
    again = buffers.acquire(2**20 - 5)
    other = buffers.acquire(2**20 - 5)
    assert again.data_ptr() == address != other.data_ptr()
    buffers.release(again)
    assert buffers.acquire(2**19).data_ptr() != address
    with pytest.raises(ValueError, match=str(2**20 - 5)):
        buffers.release(again)


@pytest.mark.parametrize("sizes", [(4 * 8192, 8192), (8192, 4 * 8192)])
def test_a_buffer_for_the_larger_half_of_a_common_size_serves_all_of_it(sizes: tuple[int, ...]) -> None:
    buffers = StagingBuffers(sizes=sizes)
    first = buffers.acquire(4096)
    address, num_bytes = first.data_ptr(), first.numel()
    buffers.release(first)
    again = buffers.acquire(8192)
    assert (num_bytes, again.data_ptr(), buffers.reserved_bytes) == (4096, address, 8192)
    buffers.acquire(4095)
    assert buffers.reserved_bytes < 2 * 8192


def test_what_was_not_in_use_together_is_kept_up_to_a_third_beyond() -> None:
    buffers = StagingBuffers()
    for num_bytes in (3 * 2**20, 2**20, 3 * 2**20, 2**20):
        buffers.release(buffers.acquire(num_bytes))
    assert buffers.reserved_bytes == 4 * 2**20
    buffers.release(buffers.acquire(2**21))
    assert buffers.reserved_bytes == 3 * 2**20


def test_the_system_gets_what_is_trimmed() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * ALIGNMENT_BYTES

    buffers = StagingBuffers()
    before = resident_bytes()
    for size in (2**20, 2**24):  # the C library maps neither on its own once it has freed one of 32 MiB
        leased = [buffers.acquire(size).fill_(1) for _ in range(2**25 // size)]
        assert resident_bytes() > before + 2**24
        for each in leased:
            buffers.release(each)
        del each, leased
        buffers.trim()
        assert resident_bytes() < before + 2**23


def test_threads_take_and_give_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, busy = StagingBuffers(), threading.Lock()
    overlaps: list[str] = []

    def alone(name: str) -> Callable[..., object]:
        call = getattr(buffers._pool, name)

        def called(*args: object, **options: object) -> object:
            if not busy.acquire(blocking=False):
                overlaps.append(name)
                return call(*args, **options)
            time.sleep(0.001)  # long enough for the others to come
            try:
                return call(*args, **options)
            finally:
                busy.release()

        return called

    def work(value: int) -> None:
        for _ in range(5):
            leased = buffers.acquire(70_000).fill_(value)
            if not (leased == value).all():
                overlaps.append("memory")
            buffers.release(leased)
            buffers.trim()

    for name in ("acquire", "release", "trim"):
        monkeypatch.setattr(buffers._pool, name, alone(name))
    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []
    assert (buffers.live_bytes, buffers.reserved_bytes) == (0, 0)


def test_fake_tensors_need_no_memory() -> None:
    tracker = MemoryTracker()
    with fake_tensors():
        buffers = StagingBuffers(torch.device("cuda", 0), tracker)
        leased = buffers.acquire(2**44)
        assert (leased.shape, leased.dtype, leased.device.type) == ((2**44,), torch.uint8, "cpu")
        assert tracker.snapshot().live_bytes[Category.BUCKETS] == 2**44
        buffers.release(leased)
        assert buffers.acquire(2**44).untyped_storage() is leased.untyped_storage()
