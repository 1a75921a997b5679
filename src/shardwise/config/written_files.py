"""Write files so that no link is followed and no one reads half of one.

A file is written under a name that no one can guess, which must not be there, and then takes its own name: what stood
there, a link too, is replaced and not written through.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     write_whole(Path(folder, "a.txt"), "whole")
...     Path(folder, "a.txt").read_text(), len(list(Path(folder).iterdir()))
('whole', 1)
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

_MODE: Final = 0o666
_LINE_BYTES: Final = 4096
_STREAMS: Final = ("/dev/std", "/dev/fd/", "/proc/")
_NEW: Final = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_whole(path: str | Path, content: str | bytes, *, is_synced: bool = False, mode: int = _MODE) -> None:
    """Write a file; who reads it meanwhile sees the old or the new one, whole.

    Args:
        path: of the file; what has this name, be it a pipe or a link, is replaced.
        content: a text is written as UTF-8.
        is_synced: returns when its bytes are on disk.
        mode: who may read, write and run it, less the umask.

    Raises:
        OSError: with the name of the file; the disk is full, or the path is no file.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    with _named(path):
        unfinished = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}")
        try:
            with create(unfinished, mode) as file:
                file.write(data)
                if is_synced:
                    file.flush()
                    os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def create(path: str | Path, mode: int = _MODE) -> BinaryIO:
    """Open a new file for writing bytes; raise FileExistsError where anything, be it a link, has its name."""
    return os.fdopen(os.open(path, os.O_WRONLY | _NEW, mode), "wb")


def open_end(path: str | Path, *, is_new: bool = False) -> BinaryIO:
    """Open a regular file to write at its end, and make it where it is missing, or must be (`is_new`).

    Raises:
        OSError: with the name of the file; a link, a pipe or a device has its name.
    """
    path = Path(path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    with _named(path):
        descriptor = os.open(path, flags | (os.O_EXCL if is_new else 0), _MODE)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no regular file")
        return os.fdopen(descriptor, "ab")


def write_asked(path: str | Path, content: str, mode: int = _MODE) -> None:
    """Write a file that the user named: as `write_whole`, but into the pipe, the device or the stream that it may be.

    Args:
        mode: of a new file, as in `write_whole`.

    Raises:
        OSError: with the name of the file.
    """
    path = Path(path)
    is_stream = path.exists() and not (path.is_file() or path.is_dir())
    is_stream = is_stream or str(path).startswith(_STREAMS)
    if not is_stream and os.access(path.parent, os.W_OK):
        write_whole(path, content, mode=mode)
        return
    with _named(path), open(path, "w", encoding="utf-8", opener=None if is_stream else _unlinked) as file:
        file.write(content)


def _unlinked(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, _MODE)


def is_full(folder: Path) -> bool:
    """Say whether the disk of a folder has no space for a line more: what was written there last may be cut off."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return False
    return space.f_bavail * space.f_frsize < _LINE_BYTES


def end_with(path: Path, line: str) -> None:
    """Let a line be the last of a file that has no space for it any more: it takes the place of what was there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.log")
    ...     write_whole(path, "step 1 taken\\nstep 2 taken\\nthe dis")
    ...     end_with(path, "the disk is full")
    ...     path.read_text()
    'step 1 taken\\nst\\nthe disk is full\\n'

    Raises:
        OSError: the system refuses.
    """
    data = f"\n{line}\n".encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, data, max(0, os.fstat(descriptor).st_size - len(data)))
    finally:
        os.close(descriptor)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error of the system name the file that was meant."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror or str(error), str(path)) from None
