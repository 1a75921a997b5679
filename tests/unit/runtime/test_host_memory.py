"""Pages of host memory: aligned, zero, pinned and given back; and a tensor's raw bytes."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch

from harness.fake_device import FakeDevice
from shardwise.runtime.pinned_memory import ALIGNMENT_BYTES, host_pages, host_zeros, memory_of


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 4097, 5 * 2**20 + 1])
def test_pages_are_aligned_and_zero(num_bytes: int) -> None:
    pages = host_pages(num_bytes)
    assert (pages.dtype, pages.dim(), pages.data_ptr() % ALIGNMENT_BYTES) == (torch.uint8, 1, 0)
    assert pages.numel() == max(1, -(-num_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    assert not pages.any()


@pytest.mark.parametrize("numel", [0, 1, 1023, 3 * 2**20 + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_zeros_hold_what_they_show_and_no_more(numel: int, dtype: torch.dtype) -> None:
    zeros = host_zeros(numel, dtype)
    assert (zeros.shape, zeros.dtype, zeros.data_ptr() % ALIGNMENT_BYTES) == ((numel,), dtype, 0)
    assert zeros.untyped_storage().nbytes() == numel * dtype.itemsize
    assert not zeros.any()
    zeros.fill_(1)


def test_a_child_has_no_part_in_the_pages() -> None:
    pages, is_inside, flags = host_pages(4096), False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, _, stop = line.split()[0].partition("-")
            is_inside = int(start, 16) <= pages.data_ptr() < int(stop, 16)
        elif is_inside and line.startswith("VmFlags:"):
            flags = line
    assert "dc" in flags.split()  # "do not copy on fork"


def test_a_host_without_space() -> None:
    with pytest.raises(MemoryError, match="1125899906842624 bytes: Cannot allocate memory"):
        host_pages(2**50)


class Runtime:
    """CUDA's runtime, as far as pages need it."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1
        if not self.error:
            self.pinned[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        assert is_mapped(address)  # as CUDA demands
        del self.pinned[address]
        return 0


DEVICE = torch.device("cuda", 0)


def runtime_of(monkeypatch: pytest.MonkeyPatch, error: int = 0, fake: FakeDevice | None = None) -> Runtime:
    (fake or FakeDevice("cuda")).install(monkeypatch)
    runtime = Runtime(error)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime, raising=False)
    return runtime


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def test_pinned_pages_are_let_go_before_they_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of(monkeypatch)
    pages = host_pages(5000, DEVICE)
    view, address = pages[10:20], pages.data_ptr()
    assert runtime.pinned == {address: 8192}
    del pages
    gc.collect()
    assert runtime.pinned == {address: 8192}
    del view
    assert runtime.pinned == {}


def test_pages_that_die_on_another_thread_are_let_go_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice("cuda")
    runtime = runtime_of(monkeypatch, fake=fake)
    let_go = runtime.cudaHostUnregister

    def unregister(address: int) -> int:
        fake.calls.append(("let go", ()))
        return let_go(address)

    monkeypatch.setattr(runtime, "cudaHostUnregister", unregister)
    pages = [host_pages(5000, torch.device("cuda", 3))]
    thread = threading.Thread(target=pages.clear)
    thread.start()
    thread.join()
    assert runtime.pinned == {}
    assert fake.calls == [("enter device", (3,)), ("let go", ()), ("leave device", (3,))]


def test_a_failure_to_pin_leaves_no_error_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps the error of a call until it is asked for the last one, as after each kernel of torch's."""
    runtime, kept = runtime_of(monkeypatch, error=2), ["out of memory"]
    plain = torch.zeros

    def zeros(*size: int, device: object = None, **kwargs: object) -> torch.Tensor:
        if device == DEVICE and kept:
            raise RuntimeError(f"CUDA error: {kept.pop()}")
        return plain(*size, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(MemoryError, match=r"\(error 2\)"):
        host_pages(5000, DEVICE)
    assert kept == []
    assert runtime.pinned == {}


def test_pinned_zeros_are_no_larger_than_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of(monkeypatch)
    zeros = host_zeros(5000, torch.float32, DEVICE)
    assert runtime.pinned == {zeros.data_ptr(): 20480}
    del zeros
    assert runtime.pinned == {}


def test_pages_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime_of(monkeypatch, error=2)
    with pytest.raises(MemoryError, match=r"8192 bytes .*\(error 2\)"):
        host_pages(5000, DEVICE)


def test_memory_of_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        memory_of(torch.empty(3, device="meta"))


def test_memory_keeps_its_tensor() -> None:
    tensor = torch.arange(4, dtype=torch.uint8)
    alive = weakref.ref(tensor)
    memory = memory_of(tensor)[1:]
    del tensor
    assert alive() is not None
    assert memory.tolist() == [1, 2, 3]
    del memory
    assert alive() is None
