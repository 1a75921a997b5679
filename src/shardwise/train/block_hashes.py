"""Hashes a file in blocks, and compares it with those hashes on several cores: what was prepared is read as written.

One core hashes and looks through some 0.7 GB a second, so a file of 100 GB takes about ten seconds on 16 cores, where
its disk is that fast.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     path = Path(folder, "tokens.bin")
...     _ = path.write_bytes(bytes(range(7)))
...     with path.open("rb") as file:
...         whole, blocks = hash_blocks(file)
...     check_blocks(path, blocks, lambda block: "a six" if 6 in block else "")
Traceback (most recent call last):
    ...
ValueError: tokens.bin has a six in its bytes 0 to 7
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final

from shardwise.config.untrusted_files import open_regular
from shardwise.launch.host import num_cores

_HASH_BYTES: Final = 16
_DIGITS: Final = 2 * _HASH_BYTES
_BLOCK_BYTES: Final = 1 << 22
_MAX_THREADS: Final = 16


def hash_blocks(file: BinaryIO) -> tuple[str, str]:
    """Return the hash of a whole file, and the hashes of its blocks, one after the other, in hexadecimal digits."""
    total_digest, blocks = hashlib.blake2b(digest_size=_HASH_BYTES), list[str]()
    num_bytes = os.fstat(file.fileno()).st_size
    while block := file.read(min(_BLOCK_BYTES, num_bytes + 1)):  # of a short file less memory
        total_digest.update(block)
        blocks.append(_hash(block))
    return total_digest.hexdigest(), "".join(blocks)


def check_blocks(
    path: Path,
    blocks: str,
    fault_of: Callable[[bytes], str] = lambda block: "",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Read a file once and compare it with the hashes of its blocks.

    Args:
        blocks: what `hash_blocks` returned.
        fault_of: says what else is wrong with a block; "" for nothing.
        progress: called now and then with bytes read and bytes in all.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not the file that was hashed, or a block has a fault.
    """
    descriptor = open_regular(path, path.parent)
    try:
        num_bytes = os.fstat(descriptor).st_size
        if -(-num_bytes // _BLOCK_BYTES) * _DIGITS != len(blocks):
            raise ValueError(f"{path.name} has {num_bytes:,} bytes, and hashes of another number of blocks")

        def check(start: int) -> int:
            block = os.pread(descriptor, min(_BLOCK_BYTES, num_bytes - start), start)
            at = start // _BLOCK_BYTES * _DIGITS
            byte_range = f"its bytes {start:,} to {start + len(block):,}"
            if _hash(block) != blocks[at : at + _DIGITS]:
                raise ValueError(f"{path.name} is not what was written, in {byte_range}")
            if fault := fault_of(block):
                raise ValueError(f"{path.name} has {fault} in {byte_range}")
            return start + len(block)

        with ThreadPoolExecutor(max(1, min(_MAX_THREADS, num_cores()))) as pool:
            try:
                for num_read in pool.map(check, range(0, num_bytes, _BLOCK_BYTES)):
                    if progress is not None:
                        progress(num_read, num_bytes)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        os.close(descriptor)


def _hash(block: bytes) -> str:
    return hashlib.blake2b(block, digest_size=_HASH_BYTES).hexdigest()
