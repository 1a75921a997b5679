"""Memory of the host as the system hands it out: whole pages to read files into and to copy from a GPU, and raw bytes.

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

# What files are read and written by past the page cache: offset, length and address are multiples of this.
ALIGNMENT_BYTES: Final = 4096
_HUGE_PAGE_BYTES: Final = 2**21
# Every context of this process sees the memory as pinned: cudaHostRegisterPortable.
_PORTABLE: Final = 1


class _Pages(mmap.mmap):
    """Private memory of this process; `unpin` is called before it goes, where a weak reference would be told after."""

    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


def host_pages(num_bytes: int, pin_memory: bool = False) -> Tensor:
    """Memory in whole pages, which goes back to the system with the last tensor that shows it.

    `torch.empty` keeps what is freed, below 32 MiB in the C library and where it is pinned in torch, which also rounds
    that up to a power of two.

    Args:
        num_bytes: at least 0.
        pin_memory: for copies from and to a CUDA device beside its work.

    Returns:
        1-D uint8, `num_bytes` rounded up to a multiple of `ALIGNMENT_BYTES` (at least one). Under fake tensors a fake.

    Raises:
        MemoryError: the host has no more, or lets no more be pinned.
    """
    num_bytes = max(1, -(-num_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    if type(torch.empty(0)) is not Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return _map(num_bytes, num_bytes, pin_memory)


def host_zeros(numel: int, dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
    """Zeros in pages of their own, as `host_pages` makes them: 1-D, with a storage of no more than its elements.

    Args:
        numel: elements, at least 0.
        dtype: of them.
        pin_memory: for copies from and to a CUDA device beside its work.

    Raises:
        MemoryError: the host has no more, or lets no more be pinned.
    """
    num_bytes = numel * dtype.itemsize
    if num_bytes == 0 or type(torch.empty(0)) is not Tensor:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    return _map(-(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, num_bytes, pin_memory).view(dtype)


def _map(num_bytes: int, num_shown_bytes: int, pin_memory: bool) -> Tensor:
    """New pages, of which a 1-D uint8 tensor shows the first bytes."""
    try:
        pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"the host gives no {num_bytes} bytes: {error.strerror}; let fewer ranks share it, or rest more on nvme"
        ) from error
    if num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them; reads and writes of files gain some 5 percent by them
            pages.madvise(mmap.MADV_HUGEPAGE)
    if hasattr(mmap, "MADV_DONTFORK"):
        # A fork would leave the copies of a disk or a GPU under way in pages that are the child's from then on.
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
            f"CUDA pins no {len(pages)} bytes of the host (error {error}); let fewer ranks share it, or rest more on "
            "nvme"
        )
    pages.unpin = partial(runtime.cudaHostUnregister, address)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to read or to write; they keep the tensor alive.

    Not by `Tensor.numpy`: torch never again resizes a storage that NumPy has seen, and so no parameter's is released.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    memory: Any = (ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # else a copy made for the call, such as of what is on a GPU, is gone before it is read
    return memoryview(memory).cast("B")
