"""This module takes host memory from the system: whole pages to read files into and to copy from a GPU, and raw bytes.

>>> pages = host_pages(5000)
>>> pages.numel(), pages.data_ptr() % ALIGNMENT_BYTES, len(memory_of(pages))
(8192, 0, 8192)
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.runtime.device import kind_of, pin_pages

# Direct reads and writes of files, past the page cache, need multiples of this: offset, length and address.
ALIGNMENT_BYTES: Final = 4096
_HUGE_PAGE_BYTES: Final = 2**21


class _Pages(mmap.mmap):
    """Holds private memory of this process; `unpin` runs before it is freed, where a weak reference's callback runs
    after.
    """

    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


def host_pages(num_bytes: int, pinned_for: torch.device | None = None) -> Tensor:
    """Allocate memory in whole pages, which goes back to the system with the last tensor that views it.

    `torch.empty` keeps what is freed, below 32 MiB in the C library and where it is pinned in torch, which also rounds
    that up to a power of two.

    Args:
        pinned_for: a device that copies from and to it while it computes; None, and what a device lacks, pin nothing.

    Returns:
        1-D uint8, `num_bytes` rounded up to a multiple of `ALIGNMENT_BYTES` (at least one). Fake under fake tensors.

    Raises:
        MemoryError: the host has no more, or lets no more be pinned.
    """
    num_bytes = max(1, -(-num_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    if type(torch.empty(0)) is not Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return _map(num_bytes, num_bytes, pinned_for)


def host_zeros(numel: int, dtype: torch.dtype, pinned_for: torch.device | None = None) -> Tensor:
    """Make zeros in pages of their own, as `host_pages` does: 1-D, with a storage of no more than its elements.

    Args:
        pinned_for: a device that copies from and to it while it computes; None, and what a device lacks, pin nothing.

    Raises:
        MemoryError: the host has no more, or lets no more be pinned.
    """
    num_bytes = numel * dtype.itemsize
    if num_bytes == 0 or type(torch.empty(0)) is not Tensor:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    return _map(-(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, num_bytes, pinned_for).view(dtype)


def _map(num_bytes: int, num_shown_bytes: int, pinned_for: torch.device | None) -> Tensor:
    """Map new pages, and return a 1-D uint8 tensor of the first bytes."""
    pinning = "none" if pinned_for is None else kind_of(pinned_for).pinning
    if pinning == "torch":
        memory = torch.zeros(num_shown_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, pin_memory=True)
        first = -memory.data_ptr() % ALIGNMENT_BYTES
        return memory[first : first + num_shown_bytes]
    try:
        pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"the host gives no {num_bytes} bytes: {error.strerror}; let fewer ranks share it, or keep more on nvme"
        ) from error
    if num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them; reads and writes of files gain some 5 percent by them
            pages.madvise(mmap.MADV_HUGEPAGE)
    if hasattr(mmap, "MADV_DONTFORK"):
        # After a fork a disk or a GPU would copy into pages that are the child's from then on.
        pages.madvise(mmap.MADV_DONTFORK)
    tensor = torch.frombuffer(pages, dtype=torch.uint8, count=num_shown_bytes)
    if pinned_for is not None and pinning == "pages":
        pages.unpin = pin_pages(pinned_for, tensor.data_ptr(), len(pages))
    return tensor


def bits_of(flat: Tensor) -> Tensor:
    """View a contiguous 1-D tensor as integers, to compare bits; two for each element of complex128."""
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.itemsize, torch.int64))


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, to read or to write; they keep the tensor alive.

    It does not use `Tensor.numpy`: torch never again resizes a storage that NumPy has seen, so no parameter could be
    released.
    """
    if tensor.device.type != "cpu":  # the host faults at an address of a device
        raise ValueError(f"a tensor of {tensor.device} has no bytes here; copy it to the CPU first")
    num_bytes = tensor.numel() * tensor.element_size()
    memory: Any = (ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # else a copy made for the call is freed before it is read
    return memoryview(memory).cast("B")
