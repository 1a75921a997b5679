"""What the system does with folders, files and names: on disk when it returns, refused with a message that helps.

Knows nothing of checkpoints; see `folder` for these.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

from shardwise.checkpoint.manifest import CheckpointError

_FOLDER_S: Final = 30.0
_POLL_S: Final = 0.05
ELSEWHERE: Final = "use another folder"
_MORE_ROOM: Final = f"free some room, keep fewer checkpoints (keep_last), or {ELSEWHERE}"
_CURES: Final[Mapping[int, str]] = MappingProxyType(
    {
        errno.ENOSPC: _MORE_ROOM,
        errno.EDQUOT: _MORE_ROOM,
        errno.EROFS: f"mount it for writing, or {ELSEWHERE}",
        errno.EACCES: f"give this user the right to, or {ELSEWHERE}",
        errno.EPERM: f"give this user the right to, or {ELSEWHERE}",
        errno.ENOTDIR: f"a file stands where a folder must be: move it, or {ELSEWHERE}",
        errno.EEXIST: f"a file stands where a folder must be: move it, or {ELSEWHERE}",
        errno.EIO: f"check the disk, and {ELSEWHERE}",
    }
)


@contextmanager
def named_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` that says what failed, where, why, and what would help.

    >>> with named_errors("write", Path("/runs/a/latest")):
    ...     raise OSError(errno.EROFS, "Read-only file system")
    Traceback (most recent call last):
        ...
    shardwise.checkpoint.manifest.CheckpointError: cannot write /runs/a/latest: Read-only file system; mount it for \
writing, or use another folder
    """
    try:
        yield
    except OSError as error:
        cure = _CURES.get(error.errno or 0, f"mend that, or {ELSEWHERE}")
        raise CheckpointError(f"cannot {doing} {path}: {error.strerror or error}; {cure}") from error


def sync_folder(path: Path) -> None:
    """Have the names in a folder reach the disk, where its file system can say so.

    Some network file systems refuse to sync a folder; these keep names at once, or there is nothing to be done.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Write a file, and return when its bytes are on disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def name_beside(path: Path, ending: str) -> Path:
    """A name that nothing has, in the same folder, hence in the same file system, where a rename is atomic."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{ending}")


def await_folder(path: Path, timeout_s: float) -> None:
    """Return once a folder that another rank has made is there; a network file system may show it late.

    Args:
        path: of the folder.
        timeout_s: after which it will not come, or `_FOLDER_S`, if that is less.

    Raises:
        CheckpointError: it has not come.
    """
    deadline_s = time.monotonic() + min(_FOLDER_S, timeout_s)
    while not path.is_dir():
        if time.monotonic() > deadline_s:
            raise CheckpointError(f"{path}, made by rank 0, is not there; save to a folder that all ranks share")
        time.sleep(_POLL_S)


def entries(root: Path) -> list[Path]:
    """What is in a folder; nothing where there is none."""
    with named_errors("list", root):
        try:
            return list(root.iterdir())
        except FileNotFoundError:
            return []


def remove(path: Path) -> bool:
    """Remove a folder, a file or a link to one; whether it is gone.

    A network file system keeps names of files that somebody still reads: then what is left stays, for another try.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY):
            raise
    return not os.path.lexists(path)


def check_room(root: Path, num_bytes: int) -> None:
    """Raise if there is less room for a checkpoint than it needs; before anything is written.

    Args:
        root: which need not exist yet.
        num_bytes: of all files of all ranks together.

    Raises:
        CheckpointError: so it is.
    """
    with named_errors("ask for the room in", root):
        room = os.statvfs(next(each for each in (root, *root.parents) if each.exists()))
    free_bytes = room.f_bavail * room.f_frsize
    # A file system without blocks does not know.
    if room.f_blocks and num_bytes > free_bytes:
        needed, free = _in_words(num_bytes), _in_words(free_bytes)
        raise CheckpointError(f"{root} has {free} free and the checkpoint needs {needed}; {_MORE_ROOM}")


def _in_words(num_bytes: int) -> str:
    unit, unit_bytes = ("GiB", 2**30) if num_bytes >= 2**30 else ("MiB", 2**20)
    return f"{num_bytes / unit_bytes:.2f} {unit}"
