"""Swap files store states in plain files of a folder on NVMe, which belongs to one rank and is removed with it.

>>> import tempfile, torch
>>> with tempfile.TemporaryDirectory() as root:
...     folder = SwapFolder.open(Path(root), rank=0)
...     file = folder.allocate("decoder.layers.0/exp_avg", 10_000)
...     file.write(8192, torch.full((4,), 7, dtype=torch.uint8)).result()
...     file.read(8190, found := torch.empty(4, dtype=torch.uint8)).result()
...     folder.close()
>>> file.path.name, found.tolist()
('00000-decoder.layers.0_exp_avg', [0, 0, 7, 7])
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import re
import socket
import weakref
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from shardwise.offload.io_threads import NUM_THREADS, IoThreads, MovedFile, SwapError, named_errors, takes_direct_io
from shardwise.runtime.format import format_bytes
from shardwise.runtime.pinned_memory import ALIGNMENT_BYTES

__all__ = ["ALIGNMENT_BYTES", "SwapError", "SwapFile", "SwapFolder"]

_PREFIX: Final = "shardwise-swap"
_LOCK: Final = "lock"
# These errors say that a file system has no locks: a folder that cannot be locked is never taken for dead.
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class SwapFolder:
    """Manages a rank's private folder in the user's, with the threads that read and write its files.

    It holds a lock that the system drops when the process ends in any way. A folder of this user and host that is not
    locked belongs to a dead run, and the next run removes it. Where the file system has no locks, or under another
    host's name, it stays for the user to remove.

    Attributes:
        path: of the folder, which only this user can enter.
        is_direct: whether reads and writes of its files bypass the page cache.
    """

    def __init__(self, path: Path, lock: int, is_direct: bool, threads: IoThreads) -> None:
        self.path = path
        self.is_direct = is_direct
        self.num_bytes = 0
        self._threads = threads
        self._numbers = itertools.count()
        # At a plain exit too; but not by a process that this one forked, whose exit is not the run's.
        self._remover = weakref.finalize(self, _remove_own, path, lock, os.getpid())

    @classmethod
    def open(cls, root: Path, rank: int, num_threads: int = NUM_THREADS) -> SwapFolder:
        """Make a rank's folder, and remove those of dead runs.

        Args:
            root: the user's folder, made where it is missing.
            rank: of this process in the world, for the name.
            num_threads: threads that read, and as many that write.

        Raises:
            SwapError: nothing can be written there.
        """
        with named_errors("make a swap folder in", root):
            root.mkdir(parents=True, exist_ok=True)
            _remove_dead(root)
            path, lock = _make(root, rank)
            try:
                is_direct = takes_direct_io(path)
            except BaseException:
                _remove(path, lock)
                raise
        return cls(path, lock, is_direct, IoThreads(num_threads))

    @staticmethod
    def check_free_space(root: Path, num_bytes: int) -> None:
        """Raise if a folder has less free space than is needed, once the files of dead runs are removed; write nothing.

        Args:
            root: the user's folder, which need not exist yet.
            num_bytes: that all ranks which share its file system need together, beside what they have allocated.

        Raises:
            SwapError: there is too little space, or it cannot be found out.
        """
        with named_errors("ask for the free space of", root):
            _remove_dead(root)
            system = os.statvfs(next(each for each in (root, *root.absolute().parents) if each.exists()))
        free_bytes = system.f_bavail * system.f_frsize
        # A file system without blocks does not know.
        if system.f_blocks and num_bytes > free_bytes:
            raise SwapError(
                "too-little-space",
                f"{root} has {format_bytes(free_bytes)} free and the states on nvme need {format_bytes(num_bytes)}; "
                "free some space there, set tiers.nvme_path to a folder on another disk, or store less on nvme",
            )

    def allocate(self, name: str, num_bytes: int) -> SwapFile:
        """Make a file whose blocks on the disk are reserved; it reads as zeros until it is written.

        Args:
            name: of what it holds, for the file's name.

        Raises:
            SwapError: there is no space for it, or no file can be made.
        """
        if not self._remover.alive:
            raise SwapError("swap-folder-closed", f"{self.path} is closed and holds no {name}; open a new swap folder")
        file_name = re.sub(r"[^\w.-]+", "_", name)[:80]
        path = self.path / f"{next(self._numbers):05d}-{file_name}"
        with named_errors(f"allocate {format_bytes(num_bytes)} in", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                _reserve(descriptor, num_bytes)
            except BaseException:
                path.unlink()
                raise
            finally:
                os.close(descriptor)
        self.num_bytes += num_bytes
        return SwapFile(self, path, num_bytes)

    def close(self) -> None:
        """Finish what is under way, end the threads, and remove the folder with all files; may be called twice."""
        # Each transfer opens its file by the path, so all of them end before the folder is removed.
        self._threads.close()
        self._remover()


class SwapFile:
    """Reads and writes a file of a swap folder.

    Reads and writes start at once and run beside each other; of two that touch the same bytes, start the second when
    the first has ended. Tensors are 1-D, uint8, contiguous and on the CPU, and must not be changed until then. What is
    aligned to `ALIGNMENT_BYTES` in the file and in memory bypasses the page cache, up to the last multiple of it; the
    other bytes go through it.
    """

    def __init__(self, folder: SwapFolder, path: Path, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._folder = folder  # lives as long as a file of it
        self._file = MovedFile(path, folder.is_direct)
        self._is_free = False

    def read(self, offset_bytes: int, target: Tensor) -> Future[None]:
        """Fill `target` with the bytes from `offset_bytes` on.

        Raises:
            ValueError: not all of them are in the file, or `target` cannot be read into.
            SwapError: raised by the future's `result()`: they could not be read.
        """
        self._check("read", offset_bytes, target)
        return self._folder._threads.read(self._file, offset_bytes, target)

    def write(self, offset_bytes: int, source: Tensor) -> Future[None]:
        """Replace the bytes from `offset_bytes` on by `source`.

        Raises:
            ValueError: not all of them are in the file, or `source` cannot be written from.
            SwapError: raised by the future's `result()`: they could not be written.
        """
        self._check("write", offset_bytes, source)
        return self._folder._threads.write(self._file, offset_bytes, source)

    def free(self) -> None:
        """Delete the file; what is under way goes on."""
        if not self._is_free:
            self._is_free = True
            self._folder.num_bytes -= self.num_bytes
            with named_errors("delete", self.path):
                self.path.unlink(missing_ok=True)

    def _check(self, doing: str, offset_bytes: int, tensor: Tensor) -> None:
        if self._is_free or not self._folder._remover.alive:
            raise ValueError(f"{self.path} is deleted; {doing} it before it is freed and its folder closed")
        if (
            tensor.dtype != torch.uint8
            or tensor.dim() != 1
            or tensor.device.type != "cpu"
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"cannot {doing} {tensor.dtype} {list(tensor.shape)} on {tensor.device}: files take contiguous 1-D "
                "uint8 tensors on the CPU; pass a flat tensor.view(torch.uint8)"
            )
        stop_bytes = offset_bytes + tensor.numel()
        if offset_bytes < 0 or stop_bytes > self.num_bytes:
            raise ValueError(
                f"cannot {doing} bytes {offset_bytes} to {stop_bytes} of {self.path}: it has {self.num_bytes}; "
                "keep to these"
            )


def _make(root: Path, rank: int) -> tuple[Path, int]:
    """Make a new folder; return it and the descriptor of its lock."""
    for number in itertools.count():
        again = f"-{number}" if number else ""  # another engine of this process, or another container, has the name
        path = root / f"{_PREFIX}-{socket.gethostname()}-{os.getpid()}-rank-{rank}{again}"
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            # A run that starts beside this one may remove the folder before it is locked.
            with suppress(FileNotFoundError, BlockingIOError):
                return path, _lock(path, is_new=True)
    raise AssertionError("itertools.count ends")


def _lock(folder: Path, is_new: bool = False) -> int:
    """Lock a folder; return the descriptor of the lock.

    Raises:
        BlockingIOError: another process holds it.
        FileNotFoundError: there is none, or there was until now.
        OSError: the file system has no locks, unless `is_new`.
    """
    path = folder / _LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if is_new else 0), 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not is_new or error.errno not in _NO_LOCKS:
                raise
        if os.fstat(descriptor).st_ino != path.stat().st_ino:
            raise FileNotFoundError(errno.ENOENT, "replaced before it was locked")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_dead(root: Path) -> None:
    """Remove the folders that dead runs of this user on this host have left; what cannot be removed stays."""
    name = re.compile(rf"{_PREFIX}-{re.escape(socket.gethostname())}-\d+-rank-\d+(-\d+)?")
    with suppress(FileNotFoundError):
        for entry in list(os.scandir(root)):
            with suppress(OSError):
                is_own = entry.is_dir(follow_symlinks=False) and entry.stat().st_uid == os.geteuid()
                if is_own and name.fullmatch(entry.name):
                    _remove_if_dead(Path(entry.path))


def _remove_if_dead(path: Path) -> None:
    try:
        lock = _lock(path)
    except FileNotFoundError:
        path.rmdir()  # its lock goes last: what has none is empty, unless it is not one of these folders
        return
    _remove(path, lock)


def _remove_own(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:
        _remove(path, lock)


def _remove(path: Path, lock: int) -> None:
    """Remove a folder whose lock is held; the lock goes last, so a folder without a lock is empty."""
    try:
        with suppress(OSError):
            for file in path.iterdir():
                if file.name != _LOCK:
                    file.unlink()
            (path / _LOCK).unlink()
            path.rmdir()
    finally:
        os.close(lock)


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Give a new file its size, and its blocks on the disk where the file system can promise that.

    It uses the system's own call: `posix_fallocate` of the C library writes to every block where there is none.
    """
    reserve = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if reserve is not None and num_bytes:
        while reserve(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
            code = ctypes.get_errno()
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                break
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, num_bytes)
