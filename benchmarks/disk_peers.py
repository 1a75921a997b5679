"""What a disk gives to others than the tier: to fio, and to a bare loop over `preadv` and `pwritev`.

Both write and read a file that has its blocks on the disk already, past the page cache, `depth` blocks at a time. They
leave the file there and take it again: a disk that still discards the blocks of a deleted one is slower by half. Both
have their buffers in huge pages, as the tier has, which doubled what is read a second where memory was in pieces.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def fio_bandwidth(folder: Path, block_bytes: int, depth: int, num_bytes: int) -> tuple[float, float] | None:
    """What fio reads and writes a second, in bytes, by one process with libaio; None where there is no fio.

    Args:
        folder: on the disk, which must take O_DIRECT; the file stays there for the next call.
        block_bytes: of one read or write.
        depth: how many are under way.
        num_bytes: of the file.
    """
    fio = shutil.which("fio")
    if fio is None:
        return None
    path = folder / "fio"
    command = [
        *(fio, f"--filename={path}", f"--size={num_bytes}", f"--bs={block_bytes}", f"--iodepth={depth}"),
        *("--name=disk", "--direct=1", "--ioengine=libaio", "--output-format=json"),
    ]
    variables = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

    def bandwidth(kind: str) -> float:
        done = subprocess.run([*command, f"--rw={kind}"], env=variables, check=True, capture_output=True, text=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][kind]
        return job["io_bytes"] / (job["runtime"] / 1000)

    if not path.exists():
        bandwidth("write")
    write_bytes_s = bandwidth("write")
    return bandwidth("read"), write_bytes_s


def raw_bandwidth(folder: Path, block_bytes: int, depth: int, num_bytes: int) -> tuple[float, float]:
    """What threads of Python's read and write a second, in bytes, each its own part of a file and in its own buffer.

    Args:
        folder: on the disk, which must take O_DIRECT; the file stays there for the next call.
        block_bytes: of one read or write, a multiple of 4096.
        depth: how many threads.
        num_bytes: of the file, a multiple of `block_bytes`.
    """
    path = folder / "raw"
    buffers = [mmap.mmap(-1, block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(depth)]
    for buffer in buffers:
        buffer.madvise(mmap.MADV_HUGEPAGE)
        buffer.write(os.urandom(block_bytes))
    is_new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)

    def bandwidth(move: Callable[[int, list[mmap.mmap], int], int]) -> float:
        def work(index: int) -> int:
            starts = range(index * block_bytes, num_bytes, depth * block_bytes)
            return sum(move(descriptor, [buffers[index]], start) for start in starts)

        with ThreadPoolExecutor(depth) as threads:
            start_s = time.perf_counter()
            moved_bytes = sum(threads.map(work, range(depth)))
            seconds = time.perf_counter() - start_s
        if moved_bytes != num_bytes:
            raise OSError(f"moved {moved_bytes} of {num_bytes} bytes; make num_bytes a multiple of block_bytes")
        return num_bytes / seconds

    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        if is_new:
            bandwidth(os.pwritev)
        write_bytes_s = bandwidth(os.pwritev)
        return bandwidth(os.preadv), write_bytes_s
    finally:
        os.close(descriptor)
