"""Measures matrix products, copies and the disk. Each probe takes about the time it is given.

Speeds are those of the best of many calls, which is what the hardware can do; latencies are medians. Both are in base
units. `collective_bench` measures what processes send to each other.

>>> ticks = iter(range(100))
>>> call_times_s(lambda: None, budget_s=4.0, clock=lambda: float(next(ticks)))
[1.0, 1.0, 1.0]
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shardwise.offload.disk_bench import SwapSpeed
from shardwise.train.loop import peak_flops

MATMUL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_MATMUL, _MAX_MATMUL = 256, 8192
# A first look at how long a product takes may take so many seconds.
_GLANCE_S = 0.01
_COPY_BYTES = 128 * 2**20
_CHUNK_BYTES = 4 * 2**20
_DISK_BYTES = 256 * 2**20
_SYNC_BYTES = 4096
_MAX_CALLS = 1000


@dataclass(frozen=True)
class MatmulSpeed:
    """Holds the speed of products of square matrices of `size` rows; the peak is the data sheet's, None if unknown."""

    device: str
    dtype: str
    size: int
    num_threads: int
    flops_per_s: float
    peak_flops_per_s: float | None


@dataclass(frozen=True)
class CopySpeed:
    """Holds the speed of a copy between memories; bytes count once, even where one memory is read and written."""

    source: str
    target: str
    pinned: bool
    num_bytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class DiskSpeed:
    """Holds the speed of sequential writes, with a sync at the end, and of reads; `sync_s` times one small write.

    `direct` says that the page cache was bypassed; otherwise reads may come from memory.
    """

    path: str
    num_bytes: int
    direct: bool
    write_bytes_per_s: float
    read_bytes_per_s: float
    sync_s: float


@dataclass(frozen=True)
class CollectiveSpeed:
    """Holds the speed of one collective over `num_ranks` ranks on a whole fp32 buffer of `num_bytes`.

    `bus_bytes_per_s` is what each rank of a ring sends, (n - 1)/n of the buffer, twice for an all-reduce, divided by
    the time of a call. It can be compared between numbers of ranks.
    """

    backend: str
    num_ranks: int
    op: str
    num_bytes: int
    call_s: float
    bus_bytes_per_s: float


@dataclass(frozen=True)
class ProbeFailure:
    """Names a probe that failed, and the reason."""

    probe: str
    reason: str


@dataclass(frozen=True)
class Measurements:
    """Holds the results of all probes; a probe that failed may have left some."""

    matmuls: tuple[MatmulSpeed, ...] = ()
    copies: tuple[CopySpeed, ...] = ()
    collectives: tuple[CollectiveSpeed, ...] = ()
    disk: DiskSpeed | None = None
    failures: tuple[ProbeFailure, ...] = ()
    swap: SwapSpeed | None = None


def call_times_s(
    run: Callable[[], object], budget_s: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Call `run` once to warm up, then for about `budget_s` in all, and return the time of each call.

    The warm-up counts only where it takes the whole budget: then there is no other call.

    Args:
        run: the call to time.
        budget_s: seconds that all calls may take together.
        clock: a clock in seconds.
    """
    start_s = now_s = clock()
    times_s: list[float] = []
    while (now_s - start_s < budget_s or not times_s) and len(times_s) <= _MAX_CALLS:
        run()
        then_s, now_s = now_s, clock()
        times_s.append(now_s - then_s)
    return times_s[1:] or times_s


def measure_matmul(
    device: torch.device,
    dtype: torch.dtype,
    budget_s: float = 0.5,
    clock: Callable[[], float] = time.perf_counter,
) -> MatmulSpeed:
    """Multiply random matrices, the larger the faster the device is, in `dtype` without TF32.

    Args:
        device: the CPU, with the threads that torch has, or a GPU.
        dtype: the dtype of both factors.
        budget_s: seconds for all products but the smallest, which starts threads and libraries.
        clock: a clock in seconds.
    """
    size, product_s = _MIN_MATMUL, _time_matmul(device, dtype, _MIN_MATMUL, _GLANCE_S)
    deadline_s = clock() + budget_s
    # Two products of the next size must fit into what is left.
    while size < _MAX_MATMUL and 2 * 8 * product_s < deadline_s - clock():
        size *= 2
        product_s = _time_matmul(device, dtype, size, _GLANCE_S)
    product_s = _time_matmul(device, dtype, size, deadline_s - clock())
    is_cuda = device.type == "cuda"
    return MatmulSpeed(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        size=size,
        num_threads=1 if is_cuda else torch.get_num_threads(),
        flops_per_s=2 * size**3 / product_s,
        peak_flops_per_s=_peak_flops(device, dtype) if is_cuda else None,
    )


def measure_host_copy(budget_s: float = 0.4, num_bytes: int = _COPY_BYTES) -> CopySpeed:
    """Copy a buffer larger than the caches within the host's memory, with the threads that torch has."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    copy_s = min(call_times_s(lambda: target.copy_(source), budget_s))
    return CopySpeed("cpu", "cpu", False, num_bytes, num_bytes / copy_s)


def measure_device_copies(device: torch.device, budget_s: float = 0.3, num_bytes: int = _COPY_BYTES) -> list[CopySpeed]:
    """Copy within a GPU's memory, and between it and the host's, pinned and pageable.

    Args:
        device: the GPU.
        budget_s: seconds for each kind of copy.
        num_bytes: bytes of the buffer that is copied.
    """
    on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    copies = [_measure_copy(on_device, torch.empty_like(on_device), budget_s)]
    for pinned in (True, False):
        on_host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        copies.append(_measure_copy(on_host, on_device, budget_s))
        copies.append(_measure_copy(on_device, on_host, budget_s))
    return copies


def measure_disk(folder: Path, budget_s: float = 1.5, num_bytes: int = _DISK_BYTES) -> DiskSpeed:
    """Write and read a file in `folder` past the page cache where that is possible; the file is removed.

    Args:
        folder: an existing folder.
        budget_s: seconds, about a third each for writing, reading and small syncs; one slow sync may take longer.
        num_bytes: the most bytes to write; fewer where the disk is slow or nearly full.

    Raises:
        OSError: the folder cannot be written to.
    """
    statvfs = os.statvfs(folder)
    num_bytes = max(_CHUNK_BYTES, min(num_bytes, statvfs.f_bavail * statvfs.f_frsize // 10))
    # Direct I/O needs memory that starts on a page.
    with mmap.mmap(-1, _CHUNK_BYTES) as chunk:
        chunk.write(os.urandom(_CHUNK_BYTES))
        fd, direct = _open_unnamed(folder, chunk)
        try:
            write_bytes_per_s, written_bytes = _write(fd, chunk, num_bytes, budget_s / 3, direct)
            if not direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read_bytes_per_s = _read(fd, chunk, written_bytes, budget_s / 3)
            sync_s = statistics.median(call_times_s(partial(_write_and_sync, fd, chunk), budget_s / 3))
        finally:
            os.close(fd)
    return DiskSpeed(str(folder), written_bytes, direct, write_bytes_per_s, read_bytes_per_s, sync_s)


def _time_matmul(device: torch.device, dtype: torch.dtype, size: int, budget_s: float) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))  # [size, size]
    out = torch.empty(size, size, device=device, dtype=dtype)  # [size, size]

    def multiply() -> None:
        torch.matmul(left, right, out=out)
        _synchronize(device)

    multiply()  # starts threads and libraries
    return min(call_times_s(multiply, budget_s))


def _measure_copy(source: Tensor, target: Tensor, budget_s: float) -> CopySpeed:
    def copy() -> None:
        target.copy_(source)
        for tensor in (source, target):
            _synchronize(tensor.device)

    num_bytes = source.numel()
    pinned = source.is_pinned() or target.is_pinned()
    return CopySpeed(
        str(source.device), str(target.device), pinned, num_bytes, num_bytes / min(call_times_s(copy, budget_s))
    )


def _peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return a GPU's peak FLOP/s in a half precision that it has in hardware; None for other dtypes."""
    has_it = dtype == torch.float16 or (dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] >= 8)
    return peak_flops(torch.cuda.get_device_name(device)) if has_it else None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _open_unnamed(folder: Path, chunk: mmap.mmap) -> tuple[int, bool]:
    """Open a new file and unlink it, so that it is removed with this process, however that ends."""
    path = folder / f".shardwise-doctor-{uuid.uuid4().hex}"
    flags, direct = os.O_RDWR | os.O_CREAT | os.O_EXCL, getattr(os, "O_DIRECT", 0)
    try:
        try:
            return _open_and_write(path, flags | direct, chunk), direct != 0
        except OSError:
            # A file system without direct I/O refuses the opening, maybe having made the file, or the first write.
            path.unlink(missing_ok=True)
            return _open_and_write(path, flags, chunk), False
    finally:
        path.unlink(missing_ok=True)


def _open_and_write(path: Path, flags: int, chunk: mmap.mmap) -> int:
    fd = os.open(path, flags, 0o600)
    try:
        os.pwrite(fd, chunk, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def _write(fd: int, chunk: mmap.mmap, num_bytes: int, budget_s: float, direct: bool) -> tuple[float, int]:
    """Return (bytes a second, bytes written); the final sync counts too."""
    start_s = time.perf_counter()
    written_bytes = 0
    while written_bytes < num_bytes and (written_bytes == 0 or time.perf_counter() - start_s < budget_s):
        written_bytes += os.pwrite(fd, chunk, written_bytes)
        if not direct:  # the cache would take all at once, and the sync at the end would take very long
            os.fsync(fd)
    os.fsync(fd)
    return written_bytes / (time.perf_counter() - start_s), written_bytes


def _read(fd: int, chunk: mmap.mmap, num_bytes: int, budget_s: float) -> float:
    start_s = time.perf_counter()
    read_bytes = 0
    while read_bytes < num_bytes and (read_bytes == 0 or time.perf_counter() - start_s < budget_s):
        read_bytes += os.preadv(fd, [chunk], read_bytes)
    return read_bytes / (time.perf_counter() - start_s)


def _write_and_sync(fd: int, chunk: mmap.mmap) -> None:
    os.pwrite(fd, memoryview(chunk)[:_SYNC_BYTES], 0)
    os.fsync(fd)
