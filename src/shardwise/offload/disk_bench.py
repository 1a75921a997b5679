"""Measure a folder's disk through swap files, as the NVMe tier uses them.

>>> import tempfile
>>> from pathlib import Path
>>> with tempfile.TemporaryDirectory() as folder:
...     speed = measure_swap(Path(folder), budget_s=0.03, num_bytes=2**20)
...     left = list(Path(folder).iterdir())
>>> speed.num_bytes, min(speed.read_bytes_per_s, speed.write_bytes_per_s) > 0, left
(1048576, True, [])
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from shardwise.offload.nvme import SwapFolder
from shardwise.runtime.pinned_memory import host_pages

# For each GPU, in each direction: with less, steps with states on NVMe wait for the disk (DeepSpeed's issue 998).
USEFUL_BYTES_PER_S: Final = 3e9
_CHUNK_BYTES: Final = 8 * 2**20
_FILE_BYTES: Final = 128 * 2**20
_NUM_IN_FLIGHT: Final = 2


@dataclass(frozen=True)
class SwapSpeed:
    """Says how much one process reads and writes a second in a folder.

    Attributes:
        num_bytes: of the file that was read and written.
        direct: whether the page cache was bypassed; otherwise the speed may be that of memory.
        write_bytes_per_s: while nothing is read, into blocks that the file had already.
    """

    path: str
    num_bytes: int
    direct: bool
    read_bytes_per_s: float
    write_bytes_per_s: float


def measure_swap(root: Path, rank: int = 0, budget_s: float = 0.6, num_bytes: int = _FILE_BYTES) -> SwapSpeed:
    """Write and read a swap file in a folder, and remove it.

    Args:
        rank: of this process; ranks that share a disk measure at the same time, so that each finds its part.
        budget_s: seconds, a third each to fill the file, to write it again and to read it; a slow disk takes longer.
        num_bytes: the most bytes of the file; less where the disk is slow or nearly full.

    Raises:
        SwapError: nothing can be made, written or read there.
    """
    folder = SwapFolder.open(root, rank)
    try:
        free_bytes = shutil.disk_usage(folder.path).free // 10
        num_bytes = max(min(num_bytes, _CHUNK_BYTES), min(num_bytes, free_bytes // _CHUNK_BYTES * _CHUNK_BYTES))
        file = folder.allocate("speed", num_bytes)
        chunk = host_pages(min(num_bytes, _CHUNK_BYTES))
        chunk.view(torch.int64).random_(generator=torch.Generator())  # no file system makes it shorter
        # Not counted: where nothing was written yet, writing takes longer.
        filled_bytes, _ = _move(file.write, chunk, num_bytes, budget_s / 3, is_once=True)
        written_bytes, write_s = _move(file.write, chunk, filled_bytes, budget_s / 3)
        read_bytes, read_s = _move(file.read, chunk, filled_bytes, budget_s / 3)
        return SwapSpeed(str(root), filled_bytes, folder.is_direct, read_bytes / read_s, written_bytes / write_s)
    finally:
        folder.close()


def _move(
    move: Callable[[int, Tensor], Future[None]], chunk: Tensor, num_bytes: int, budget_s: float, is_once: bool = False
) -> tuple[int, float]:
    """Return (bytes moved, seconds): from start to end of the file, again unless `is_once`, until the time is up."""
    start_s = time.perf_counter()
    moved_bytes = 0
    under_way: deque[Future[None]] = deque()
    while not moved_bytes or (time.perf_counter() - start_s < budget_s and not (is_once and moved_bytes == num_bytes)):
        if len(under_way) == _NUM_IN_FLIGHT:
            under_way.popleft().result()
        under_way.append(move(moved_bytes % num_bytes, chunk))
        moved_bytes += chunk.numel()
    for each in under_way:
        each.result()
    return moved_bytes, time.perf_counter() - start_s
