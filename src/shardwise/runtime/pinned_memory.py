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
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

# Direct reads and writes of files, past the page cache, need multiples of this: offset, length and address.
ALIGNMENT_BYTES: Final = 4096
_HUGE_PAGE_BYTES: Final = 2**21
# Every context of this process sees the memory as pinned: cudaHostRegisterPortable.
_PORTABLE: Final = 1


class _Pages(mmap.mmap):
    """Holds private memory of this process; `unpin` runs before it is freed, where a weak reference's callback runs
    after.
    """

    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


def host_pages(num_bytes: int, pin_memory: bool = False) -> Tensor:
    """Allocate memory in whole pages, which goes back to the system with the last tensor that views it.

    `torch.empty` keeps what is freed, below 32 MiB in the C library and where it is pinned in torch, which also rounds
    that up to a power of two.

    Args:
        pin_memory: for copies from and to a CUDA device that overlap its work.

    Returns:
        1-D uint8, `num_bytes` rounded up to a multiple of `ALIGNMENT_BYTES` (at least one). Fake under fake tensors.

    Raises:
        MemoryError: the host has no more, or lets no more be pinned.
    """
    num_bytes = max(1, -(-num_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    if type(torch.empty(0)) is not Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return _map(num_bytes, num_bytes, pin_memory)


def host_zeros(numel: int, dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
    """Make zeros in pages of their own, as `host_pages` does: 1-D, with a storage of no more than its elements.

    Args:
        pin_memory: for copies from and to a CUDA device that overlap its work.

    Raises:
        MemoryError: the host has no more, or lets no more be pinned.
    """
    num_bytes = numel * dtype.itemsize
    if num_bytes == 0 or type(torch.empty(0)) is not Tensor:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    return _map(-(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, num_bytes, pin_memory).view(dtype)


def _map(num_bytes: int, num_shown_bytes: int, pin_memory: bool) -> Tensor:
    """Map new pages, and return a 1-D uint8 tensor of the first bytes."""
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
    if pin_memory:
        _pin(pages, tensor.data_ptr())
    return tensor


def _pin(pages: _Pages, address: int) -> None:
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(address, len(pages), _PORTABLE))
    if error:
        raise MemoryError(
            f"CUDA pins no {len(pages)} bytes of the host (error {error}); let fewer ranks share it, or keep more on "
            "nvme"
        )
    pages.unpin = partial(runtime.cudaHostUnregister, address)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, to read or to write; they keep the tensor alive.

    It does not use `Tensor.numpy`: torch never again resizes a storage that NumPy has seen, so no parameter could be
    released.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    memory: Any = (ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # else a copy made for the call, such as of a tensor on a GPU, is freed before it is read
    return memoryview(memory).cast("B")
