"""A small file system of its own for a test, which any process of the machine can write to.

It is mounted by a forked process in a mount namespace of its own, as root or as any user who may make one. Others come
to it through that process, as whose root the kernel shows it.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC_PRIVATE = 1, 32, 0x4000 | (1 << 18)


def mount(place: Path | str, kind: str, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", str(place).encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {kind}: {os.strerror(ctypes.get_errno())}")


def mount_alone(place: Path, num_bytes: int) -> None:
    """Mount an empty file system that this process alone sees; the process must have one thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNS):
        if libc.unshare(CLONE_NEWNS | CLONE_NEWUSER):
            raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    mount("/", "", MS_REC_PRIVATE)
    mount(place, "tmpfs", 0, f"size={num_bytes}")


@dataclass(frozen=True)
class SmallDisk:
    """A mounted file system; any process may be given this.

    Attributes:
        root: its root.
        orders: a named pipe, to the process that has mounted it.
        answers: also from it.
    """

    root: Path
    orders: Path
    answers: Path

    def remount(self, read_only: bool) -> None:
        """Let no process write to it any more; or again."""
        self.orders.write_text("r" if read_only else "w")
        if answer := self.answers.read_text():
            raise OSError(answer)

    def fill(self, free_bytes: int = 0) -> None:
        """Write a file that leaves about so many bytes free."""
        space = os.statvfs(self.root)
        with suppress(OSError):  # another has been faster
            (self.root / "ballast").write_bytes(bytes(max(0, space.f_bavail * space.f_frsize - free_bytes)))

    def make_space(self) -> None:
        """Remove that file."""
        (self.root / "ballast").unlink()


@contextmanager
def small_disk(place: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """A file system of this size, until the context ends; skips the test where none can be mounted.

    Args:
        place: an empty folder, in one where files can be made.
        num_bytes: of the file system.
    """
    orders, answers = (place.with_name(f"{place.name}.{each}") for each in ("orders", "answers"))
    os.mkfifo(orders)
    os.mkfifo(answers)
    child = os.fork()
    if child == 0:
        _serve(place, num_bytes, orders, answers)
    try:
        if text := answers.read_text():
            pytest.skip(f"no file system can be mounted here: {text}")
        root = Path(f"/proc/{child}/root{place.absolute()}")
        assert root.stat().st_dev != place.stat().st_dev
        yield SmallDisk(root, orders, answers)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve(place: Path, num_bytes: int, orders: Path, answers: Path) -> None:
    """Mount, and remount as asked, until killed; an answer is empty, or what went wrong."""
    try:
        answers.write_text(_refusal(lambda: mount_alone(place, num_bytes)))
        while True:
            flags = MS_REMOUNT | (MS_RDONLY if orders.read_text() == "r" else 0)
            answers.write_text(_refusal(lambda flags=flags: mount(place, "tmpfs", flags, f"size={num_bytes}")))
    finally:
        os._exit(0)


def _refusal(call: Callable[[], None]) -> str:
    try:
        call()
    except OSError as error:
        return str(error)
    return ""
