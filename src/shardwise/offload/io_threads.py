"""Move bytes between files and host memory in threads, bypassing the page cache where that is possible.

One read or write is cut into blocks, so that several threads keep the disk busy; Python's lock is free while the
system moves a block. Blocks bypass the page cache (O_DIRECT) where file system and alignment allow it. Others go
through it, such as the last bytes of a file, or all of a file on tmpfs.

>>> import tempfile, torch
>>> from pathlib import Path
>>> threads = IoThreads()
>>> with tempfile.TemporaryDirectory() as folder:
...     moved = MovedFile(Path(folder, "states"), is_direct=False)
...     moved.path.touch()
...     threads.write(moved, 2, torch.tensor([7, 8, 9], dtype=torch.uint8)).result()
...     threads.read(moved, 1, found := torch.empty(3, dtype=torch.uint8)).result()
>>> found.tolist()
[0, 7, 8]
>>> threads.close()
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from torch import Tensor

from shardwise.config.errors import CodedError, system_code
from shardwise.runtime.pinned_memory import ALIGNMENT_BYTES, memory_of

# Measured on ext4: 4 MiB by four threads reads and writes as much a second as more of either.
BLOCK_BYTES: Final = 4 * 2**20
NUM_THREADS: Final = 4
_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_ELSEWHERE: Final = "set tiers.nvme_path to a folder on another disk"
_MORE_SPACE: Final = f"free some space there, or {_ELSEWHERE}; the last checkpoint can be loaded"
_FIXES: Final[Mapping[int, str]] = MappingProxyType(
    {
        errno.ENOSPC: _MORE_SPACE,
        errno.EDQUOT: _MORE_SPACE,
        errno.EFBIG: f"raise the limit on the size of files (ulimit -f), or {_ELSEWHERE}",
        errno.EIO: f"check the disk, or {_ELSEWHERE}; the last checkpoint can be loaded",
        errno.EROFS: f"mount it for writing, or {_ELSEWHERE}",
        errno.EACCES: "give this user the right to, or set tiers.nvme_path to a folder of this user's",
        errno.EPERM: "give this user the right to, or set tiers.nvme_path to a folder of this user's",
        errno.ENOENT: "something has removed it: keep other programs off the folder, and start again",
        errno.ENOTDIR: "a file stands where a folder must be: move it, or set tiers.nvme_path to another folder",
        errno.EEXIST: "a file stands where a folder must be: move it, or set tiers.nvme_path to another folder",
        errno.EMFILE: "raise the limit on open files (ulimit -n)",
    }
)


class SwapError(CodedError, RuntimeError):
    """A swap file or its folder cannot be made, read or written."""


@contextmanager
def named_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `SwapError` that says what failed, where, why, and what would help.

    >>> with named_errors("write", Path("/nvme/states")):
    ...     raise OSError(errno.EROFS, "Read-only file system")
    Traceback (most recent call last):
        ...
    shardwise.offload.io_threads.SwapError: cannot write /nvme/states: Read-only file system; mount it for writing, or \
set tiers.nvme_path to a folder on another disk
    """
    try:
        yield
    except OSError as error:
        fix = _FIXES.get(error.errno or 0, f"fix that, or {_ELSEWHERE}")
        code = system_code(error, "swap-refused")
        raise SwapError(code, f"cannot {doing} {path}: {error.strerror or error}; {fix}") from error


def takes_direct_io(folder: Path) -> bool:
    """Say whether files in a folder can be written and read without the page cache; tmpfs and some others cannot.

    Raises:
        OSError: no file can be written there at all.
    """
    path = folder / "probe"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _O_DIRECT, 0o600)
        try:
            with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
                return bool(_O_DIRECT) and os.pwrite(descriptor, page, 0) == os.preadv(descriptor, [page], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    finally:
        path.unlink(missing_ok=True)


class _DirectIoLock:
    """Lets blocks of a file that bypass the page cache take turns with those that go through it, in order of arrival.

    The two kinds never run at the same time. The kernel keeps them coherent one after the other, but not while they run
    beside each other in one page, and on some machines a page is larger than `ALIGNMENT_BYTES`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_come = self._num_served = self._num_running = 0
        self._is_direct = False

    @contextmanager
    def hold(self, is_direct: bool) -> Iterator[None]:
        """Run the context's body beside blocks of the same kind only."""
        with self._changed:
            ticket = self._num_come
            self._num_come += 1
            while ticket != self._num_served or (self._num_running and self._is_direct != is_direct):
                self._changed.wait()
            self._num_served += 1
            self._num_running += 1
            self._is_direct = is_direct
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()


@dataclass(frozen=True)
class MovedFile:
    """Describes a file that threads read and write.

    Attributes:
        is_direct: whether its file system can bypass the page cache.
    """

    path: Path
    is_direct: bool
    lock: _DirectIoLock = field(default_factory=_DirectIoLock, repr=False, compare=False)


class _IoBlock(NamedTuple):
    """Describes a part of a read or write that one thread does."""

    offset_bytes: int
    memory: memoryview
    is_direct: bool


class _IoTransfer:
    """Tracks one read or write: its blocks, its descriptors, and the future that ends with the last block.

    The file is opened for each one, which takes some microseconds: a model has more states than a process has
    descriptors.
    """

    def __init__(self, file: MovedFile, blocks: list[_IoBlock], is_write: bool) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()
        self._file = file
        self._is_write = is_write
        self._num_left = len(blocks)
        self._error: BaseException | None = None
        self._descriptors: dict[bool, int] = {}
        self._lock = threading.Lock()

    def move(self, block: _IoBlock) -> None:
        """Read or write a block; an error goes into the future."""
        error: BaseException | None = None
        try:
            doing = f"{'write' if self._is_write else 'read'} {len(block.memory)} bytes at {block.offset_bytes} of"
            with named_errors(doing, self._file.path), self._file.lock.hold(block.is_direct):
                self._move(block, doing)
        except BaseException as each:
            error = each
        self._end_block(error)

    def _move(self, block: _IoBlock, doing: str) -> None:
        descriptor = self._descriptor(block.is_direct)
        move = os.pwritev if self._is_write else os.preadv
        done_bytes = 0
        while done_bytes < len(block.memory):
            moved_bytes = move(descriptor, [block.memory[done_bytes:]], block.offset_bytes + done_bytes)
            if block.is_direct and done_bytes + moved_bytes < len(block.memory):
                moved_bytes -= moved_bytes % ALIGNMENT_BYTES  # the next call must start aligned, as the first did
            if not moved_bytes:
                raise SwapError(
                    "swap-file-cut",
                    f"cannot {doing} {self._file.path}: it ends after {done_bytes} of them; something has cut it: keep "
                    "other programs off the folder, and start again",
                )
            done_bytes += moved_bytes

    def _descriptor(self, is_direct: bool) -> int:
        with self._lock:
            if is_direct not in self._descriptors:
                flags = (os.O_WRONLY if self._is_write else os.O_RDONLY) | (_O_DIRECT if is_direct else 0)
                self._descriptors[is_direct] = os.open(self._file.path, flags)
            return self._descriptors[is_direct]

    def _end_block(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._num_left -= 1
            if self._num_left:
                return
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        if self._error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self._error)


class IoThreads:
    """Reads in some threads and writes in others, so that a read never waits for a long write.

    Args:
        num_threads: of each kind; they start as they are needed.
        block_bytes: bytes that one thread moves at a time, a multiple of `ALIGNMENT_BYTES`.
    """

    def __init__(self, num_threads: int = NUM_THREADS, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._readers = ThreadPoolExecutor(num_threads, thread_name_prefix="shardwise-read")
        self._writers = ThreadPoolExecutor(num_threads, thread_name_prefix="shardwise-write")

    def read(self, file: MovedFile, offset_bytes: int, target: Tensor) -> Future[None]:
        """Fill `target`, 1-D uint8 on the CPU, from a file; return a future that keeps it alive and raises `SwapError`.

        Args:
            offset_bytes: where to start in the file.
        """
        return self._start(file, offset_bytes, target, is_write=False)

    def write(self, file: MovedFile, offset_bytes: int, source: Tensor) -> Future[None]:
        """Write `source`, 1-D uint8 on the CPU, to a file; return a future that keeps it alive and raises `SwapError`.

        Args:
            offset_bytes: where to start in the file.
        """
        return self._start(file, offset_bytes, source, is_write=True)

    def close(self) -> None:
        """Finish what is under way, and end the threads."""
        self._readers.shutdown()
        self._writers.shutdown()

    def _start(self, file: MovedFile, offset_bytes: int, tensor: Tensor, is_write: bool) -> Future[None]:
        is_aligned = not (offset_bytes % ALIGNMENT_BYTES or tensor.data_ptr() % ALIGNMENT_BYTES)
        blocks = list(self._blocks(offset_bytes, memory_of(tensor), file.is_direct and is_aligned))
        transfer = _IoTransfer(file, blocks, is_write)
        if not blocks:
            transfer.future.set_result(None)
        for block in blocks:
            (self._writers if is_write else self._readers).submit(transfer.move, block)
        return transfer.future

    def _blocks(self, offset_bytes: int, memory: memoryview, is_aligned: bool) -> Iterator[_IoBlock]:
        num_bytes = len(memory)
        num_direct_bytes = num_bytes - num_bytes % ALIGNMENT_BYTES if is_aligned else 0
        for first, last in ((0, num_direct_bytes), (num_direct_bytes, num_bytes)):
            for start in range(first, last, self._block_bytes):
                stop = min(last, start + self._block_bytes)
                yield _IoBlock(offset_bytes + start, memory[start:stop], stop <= num_direct_bytes)
