"""Commits checkpoints to a root folder and deletes old ones; no reader ever sees half a checkpoint.

    runs/a/
      step-00000050/                       whole: it has a manifest, and all files that the manifest names
      step-00000100/
      step-00000150.3f9c01aa.partial/      being written, or left by a dead run
      step-00000020.77ab3c10.deleted/      being deleted, or left by a dead run
      step-00000100.aside-1/               renamed by a run that resumed from an older checkpoint; not loaded any more
      latest                               one line: step-00000100

A step folder is made by a rename, once everything in it has reached the disk. A deletion begins with a rename too.
`latest` moves after the commit. It is for people and other tools: a process killed before it moves leaves a newer whole
checkpoint than it names, so nothing here looks for checkpoints by it.

Only rank 0 calls these functions, except `candidates` and `read_manifest`, which any rank may call. A root belongs to
one run at a time.

>>> from tempfile import TemporaryDirectory
>>> with TemporaryDirectory() as place:
...     for step in (50, 100, 150):
...         temporary = begin(Path(place), step)
...         _ = (temporary / "a.safetensors").write_bytes(b"pieces")
...         folder = commit(temporary, Path(place), Manifest(step=step, tensors=(), files={"a.safetensors": 6}))
...     names = [each.name for each in retain(Path(place), keep_last=1, keep_every=100)]
...     names, [each.name for each in candidates(Path(place))]
(['step-00000050'], ['step-00000150', 'step-00000100'])
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final

from shardwise.checkpoint.manifest import MANIFEST_NAME, CheckpointError, DamagedError, Manifest
from shardwise.checkpoint.match import listed_names
from shardwise.config.errors import system_code
from shardwise.config.untrusted_files import open_regular, read_bytes
from shardwise.runtime.format import format_bytes

LATEST_NAME: Final = "latest"
_STEP: Final = re.compile(r"step-([0-9]{8,})")
_PARTIAL, _DELETED, _RENAMED = ".partial", ".deleted", ".aside-"
_LEFTOVER: Final = re.compile(r"(step-[0-9]{8,}|latest)\.[0-9a-f]+\.(partial|deleted)")
# A tag is a name of the user's for the folder of a checkpoint.
_TAG: Final = re.compile(r"(?!step-|latest)[A-Za-z0-9_][A-Za-z0-9_.=-]{0,99}")
# The errors of a file system that cannot read what it has stored, or has another kind of entry under the name.
_DAMAGE: Final = (
    errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.EFBIG, errno.ENXIO,
)  # fmt: skip
MAX_MANIFEST_BYTES: Final = 2**30


def step_name(step: int) -> str:
    """Return the name of a step's folder.

    >>> step_name(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step that a step folder's name says; None for any other name.

    >>> step_of(Path("runs/step-00000100")), step_of(Path("step-00000100.aside-1")), step_of(Path("step-100"))
    (100, None, None)
    """
    found = _STEP.fullmatch(folder.name)
    step = int(found[1]) if found else None
    return step if step is not None and folder.name == step_name(step) else None


def step_folders(root: Path) -> list[Path]:
    """Return the step folders in a root, newest first; none where there is no root yet. They need not be whole."""
    by_step = {step: entry for entry in entries(root) if (step := step_of(entry)) is not None and entry.is_dir()}
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def candidates(path: Path) -> list[Path]:
    """Return the folders of checkpoints that one may try to load, newest first; perhaps none.

    Args:
        path: a checkpoint, which is returned itself, or a root: its step folders, and those that are named by a tag.
            If `latest` names a tag, that comes first: names alone do not say which of these is the newest.

    Raises:
        CheckpointError: there is no such folder.
    """
    with named_errors("look into", path):
        if not path.is_dir():
            raise _missing(path)
        if step_of(path) is not None or is_checkpoint(path):
            return [path]
    tagged = [each for each in entries(path) if _TAG.fullmatch(each.name) and each.is_dir() and is_checkpoint(each)]
    named = [read_latest(path, name) for name in (LATEST_NAME, f"{LATEST_NAME}_universal")]
    first = [each for name in named for each in tagged if each.name == name][:1]
    others = sorted((each for each in tagged if each not in first), key=_number_in_name, reverse=True)
    return [*first, *step_folders(path), *others]


def is_checkpoint(folder: Path) -> bool:
    """Say whether a folder has the manifest of a checkpoint, or files as DeepSpeed names them."""
    return (folder / MANIFEST_NAME).is_file() or is_of_deepspeed(folder)


def is_of_deepspeed(folder: Path) -> bool:
    """Say whether DeepSpeed has written this checkpoint."""
    return not (folder / MANIFEST_NAME).is_file() and any(folder.glob("*mp_rank_*_model_states.pt"))


def _number_in_name(folder: Path) -> tuple[int, str]:
    """Return the last number of a name, by which folders such as `global_step100` are in order, and the name."""
    return int((re.findall("[0-9]+", folder.name) or ["-1"])[-1]), folder.name


def check_tag(tag: str, keeps_all: bool) -> None:
    """Raise unless a folder can be named by this tag.

    Args:
        tag: of the user's; empty where the step names the folder.
    """
    if tag and not _TAG.fullmatch(tag):
        raise CheckpointError(
            "tag-invalid",
            f"tag={tag!r:.120} cannot name a folder; use a-z, 0-9 and _ . = -, and begin with neither step- nor latest",
        )
    if tag and not keeps_all:
        raise CheckpointError(
            "tag-keeps-all", f"tag={tag} names no step, by which keep_last and keep_every count; leave them out"
        )


def begin(root: Path, step: int, tag: str = "") -> Path:
    """Make the temporary folder in which a checkpoint is written, and the root, if need be.

    Args:
        root: where the folder of the checkpoint will be.
        step: by which that folder is named.
        tag: by which it is named instead, unless empty.

    Raises:
        CheckpointError: there is a checkpoint of this step, or what has this tag is none of ours; or the folder cannot
            be made.
    """
    final = root / (tag or step_name(step))
    with named_errors("make a folder in", root):
        _make_root(root)
        if not _is_replaced(final, tag):
            _refuse_taken(final)
        temporary = name_beside(root / step_name(step), _PARTIAL)
        temporary.mkdir()
    return temporary


def commit(temporary: Path, root: Path, manifest: Manifest, tag: str = "") -> Path:
    """Commit a written checkpoint: write its manifest, rename it, move `latest`; each is on disk before the next.

    Args:
        temporary: from `begin`; the files in it are on disk already.
        manifest: of what is in the temporary folder.
        tag: as given to `begin`; an older checkpoint of this tag is deleted.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: a file is not there as the manifest says, the step has a checkpoint already, or the system
            refuses; earlier checkpoints are unchanged.
    """
    with named_errors("read what was written in", temporary):
        wrong = _wrong_file(temporary, manifest)
    if wrong:
        raise CheckpointError(
            "folder-not-shared",
            f"{wrong}; save to one folder that all ranks share, not to a disk of each machine's own",
        )
    with named_errors("write", temporary / MANIFEST_NAME):
        write_text(temporary / MANIFEST_NAME, manifest.to_text())
        sync_folder(temporary)
    final = root / (tag or step_name(manifest.step))
    # Were the process killed between the renames, the older one would still be there, as a folder that is not deleted.
    older = _next_renamed(root / step_name(manifest.step)) if _is_replaced(final, tag) else None
    with named_errors("make", final):
        if older is not None:
            os.rename(final, older)
        _rename(temporary, final)
        sync_folder(root)
    _move_latest(root, final.name)
    if older is not None:
        _delete(older)
    return final


def discard(temporary: Path) -> None:
    """Remove what was begun, as far as that works: it is called after something else has failed."""
    with suppress(OSError):
        remove(temporary)


def clean(root: Path) -> None:
    """Remove what dead runs have left in a root of one run at a time: folders half written and half deleted.

    Raises:
        CheckpointError: the system refuses.
    """
    for leftover in leftovers(root):
        with named_errors("remove", leftover):
            remove(leftover)


def leftovers(root: Path) -> list[Path]:
    """Return what saves have begun to write, or to delete, in a root: by a run that lives, or left by a dead one."""
    return [entry for entry in entries(root) if _LEFTOVER.fullmatch(entry.name)]


def read_manifest(step_folder: Path, checks_files: bool = True) -> Manifest:
    """Read the manifest of a checkpoint, and check that each file it names is there with its size.

    That of DeepSpeed's checkpoints is made from their files.

    Raises:
        DamagedError: the manifest, or a file, is missing, torn, cannot be read from the disk, or is another step's.
        CheckpointError: a newer version has written it, or this user may not read it.
    """
    if is_of_deepspeed(step_folder):
        from shardwise.checkpoint.deepspeed import describe  # it needs torch, which this module does without

        return describe(step_folder)
    path = step_folder / MANIFEST_NAME
    try:
        manifest = Manifest.from_text(read_bytes(path, MAX_MANIFEST_BYTES, step_folder), str(path))
        code, wrong = "file-torn", _wrong_file(step_folder, manifest) if checks_files else ""
    except FileNotFoundError:
        code, wrong = "no-manifest", f"{step_folder} is no whole checkpoint: it has no {MANIFEST_NAME}"
    except OSError as error:
        where = f"cannot read {error.filename or path}: {error.strerror}"
        if error.errno not in _DAMAGE:
            raise CheckpointError("read-refused", f"{where}; fix that, or use another checkpoint") from error
        code, wrong = "file-unreadable", where
    if wrong:
        raise DamagedError(code, f"{wrong}; use an older checkpoint")
    if step_of(step_folder) not in (None, manifest.step):
        raise DamagedError(
            "folder-step-differs",
            f"{path} is of step {manifest.step}, which is not what its folder's name says; name it "
            f"{step_name(manifest.step)}, or use an older checkpoint",
        )
    return manifest


def steps_to_delete(steps: Iterable[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """Return which of these steps' checkpoints are not to be kept, oldest first.

    Args:
        keep_last: how many of the newest to keep; None keeps all.
        keep_every: also keep the steps that are multiples of it; None keeps no others.

    >>> steps_to_delete([100, 150, 200, 250, 300], keep_last=2, keep_every=100)
    [150]
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise CheckpointError("keep-positive", f"{name}={value} is less than 1; give a positive number, or None")
    if keep_last is None:
        return []
    return [step for step in sorted(steps)[:-keep_last] if not _is_milestone(step, keep_every)]


def retain(root: Path, keep_last: int | None, keep_every: int | None) -> list[Path]:
    """Delete the whole checkpoints that need not be kept, oldest first.

    Those that cannot be read are neither counted nor deleted, so that the user can examine them. The checkpoint that
    `latest` names stays too: it may be older than others, where a run has resumed from before them.

    Args:
        root: the folder of the step folders.

    Returns:
        The former paths of the deleted checkpoints.

    Raises:
        CheckpointError: the system refuses.
    """
    whole: dict[int, Path] = {}
    for folder in step_folders(root) if keep_last else []:
        step = step_of(folder) or 0
        # A manifest may be long: those that stay anyway are not read.
        is_surely_kept = len(whole) >= (keep_last or 0) and _is_milestone(step, keep_every)
        if not is_surely_kept and _is_whole(folder):
            whole[step] = folder
    latest = read_latest(root)
    going = [whole[step] for step in steps_to_delete(whole, keep_last, keep_every) if whole[step].name != latest]
    for folder in going:
        _delete(folder)
    return going


def rename_later(root: Path, after_step: int) -> list[Path]:
    """Rename the checkpoints of later steps, so that a run resumed from this one can save these steps again.

    Args:
        root: the folder of the step folders.
        after_step: the step of the checkpoint that the run resumes from; `latest` moves back to it.

    Returns:
        The new paths, named `step-00000100.aside-1` and so on, newest first; `candidates` does not return them.

    Raises:
        CheckpointError: the system refuses.
    """
    folders = step_folders(root)
    later = [folder for folder in folders if (step_of(folder) or 0) > after_step]
    if not later:
        return []
    # Before anything is renamed: a process killed in between must not leave `latest` naming a folder that is gone.
    _move_latest(root, next((folder.name for folder in folders if folder not in later and _is_whole(folder)), ""))
    moved = []
    with named_errors("rename checkpoints in", root):
        for folder in later:
            moved.append(_next_renamed(folder))
            os.rename(folder, moved[-1])
        sync_folder(root)
    return moved


def rename_step(root: Path, step: int) -> None:
    """Rename the checkpoint of this step, if there is one; it is damaged and is about to be saved again.

    Raises:
        CheckpointError: the system refuses.
    """
    folder = root / step_name(step)
    with named_errors("rename", folder):
        if folder.is_dir():
            os.rename(folder, _next_renamed(folder))
            sync_folder(root)


def _missing(path: Path) -> CheckpointError:
    """Return the error for a path that is no folder: it says what there is instead."""
    if path.exists():
        return CheckpointError(
            "not-a-folder", f"{path} is a file; give the folder of a checkpoint, or the one that these are in"
        )
    parent = next(parent for parent in path.parents if parent.is_dir())
    names = sorted(entry.name for entry in entries(parent))
    close = difflib.get_close_matches(path.relative_to(parent).parts[0], names, n=3)
    there = f"has {listed_names(names)}" if names else "is empty"
    fix = f"did you mean {' or '.join(close)}?" if close else "give the folder of a checkpoint, or the one these are in"
    return CheckpointError("no-such-path", f"{path} does not exist, {parent.absolute()} {there}; {fix}")


def _make_root(root: Path) -> None:
    for each in reversed([each for each in (root, *root.parents) if not each.exists()]):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)
    if not root.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root))


def _is_replaced(final: Path, tag: str) -> bool:
    """Say whether a checkpoint takes the place of another: a tag may be used again, as for the best so far."""
    return bool(tag) and (final / MANIFEST_NAME).is_file()


def _refuse_taken(final: Path) -> None:
    if os.path.lexists(final):
        raise CheckpointError(
            "checkpoint-exists",
            f"{final} exists and a checkpoint is never overwritten; go on from it (--resume, engine.load), save under "
            f"a tag, move it away, or {ELSEWHERE}",
        )


def _rename(temporary: Path, final: Path) -> None:
    try:
        os.rename(temporary, final)
    except OSError as error:
        # Made since `begin`: the system does not replace a folder with files in it, nor a file.
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            _refuse_taken(final)
        raise


def _wrong_file(folder: Path, manifest: Manifest) -> str:
    """Say what is wrong with the first file that is not as the manifest says; return "" if all are."""
    return next((wrong for file in manifest.files if (wrong := wrong_size(folder / file, manifest))), "")


def wrong_size(path: Path, manifest: Manifest) -> str:
    """Say what is wrong with the size of a file of a checkpoint; return "" if it is as the manifest says."""
    try:
        # Opened, since a network file system may otherwise give an old size of what another machine has written.
        with open(open_regular(path, path.parent), "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return f"{path} is missing"
    expected = manifest.files[path.name]
    return "" if num_bytes == expected else f"{path} has {num_bytes} bytes and the manifest says {expected}"


def _is_whole(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def _is_milestone(step: int, keep_every: int | None) -> bool:
    return keep_every is not None and step % keep_every == 0


def read_latest(root: Path, name: str = LATEST_NAME) -> str:
    """Return what `latest`, or the file of another name, names; "" where there is no such file."""
    with named_errors("read", root / name), suppress(FileNotFoundError):
        return read_bytes(root / name).decode(errors="replace").strip()
    return ""


def _move_latest(root: Path, name: str) -> None:
    """Make `latest` name this folder; remove it if `name` is empty."""
    latest = root / LATEST_NAME
    temporary = name_beside(latest, _PARTIAL)
    doing = f"name {name}, which is whole, in" if name else "remove"
    with named_errors(doing, latest):
        try:
            if name:
                write_text(temporary, f"{name}\n")
                os.replace(temporary, latest)
            else:
                latest.unlink(missing_ok=True)
        except OSError:
            discard(temporary)
            raise
        sync_folder(root)


def _next_renamed(folder: Path) -> Path:
    number = 1
    while os.path.lexists(renamed := folder.with_name(f"{folder.name}{_RENAMED}{number}")):
        number += 1
    return renamed


def _delete(folder: Path) -> None:
    deleted = name_beside(folder.with_name(folder.name.partition(".")[0]), _DELETED)
    with named_errors("delete", folder):
        os.rename(folder, deleted)
        sync_folder(folder.parent)
        remove(deleted)


_FOLDER_S: Final = 30.0
_POLL_S: Final = 0.05
ELSEWHERE: Final = "use another folder"
_MORE_SPACE: Final = f"free some space, keep fewer checkpoints (keep_last), or {ELSEWHERE}"
_FIXES: Final[Mapping[int, str]] = MappingProxyType(
    {
        errno.ENOSPC: _MORE_SPACE,
        errno.EDQUOT: _MORE_SPACE,
        errno.EFBIG: f"allow files so large, or {ELSEWHERE}",
        errno.EROFS: f"mount it for writing, or {ELSEWHERE}",
        errno.EACCES: f"give this user the right to, or {ELSEWHERE}",
        errno.EPERM: f"give this user the right to, or {ELSEWHERE}",
        errno.ENOTDIR: f"a file stands where a folder must be: move it, or {ELSEWHERE}",
        errno.EEXIST: f"a file stands where a folder must be: move it, or {ELSEWHERE}",
        errno.EIO: f"check the disk, and {ELSEWHERE}",
    }
)


@contextmanager
def named_errors(doing: str, path: Path, code: str = "folder-refused") -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` that says what failed, where, why, and what would help.

    Its code is `code`, but `disk-full` where the disk is.

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
        fix = _FIXES.get(error.errno or 0, f"fix that, or {ELSEWHERE}")
        raise CheckpointError(
            system_code(error, code), f"cannot {doing} {path}: {error.strerror or error}; {fix}"
        ) from error


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk, where its file system can do that.

    Some network file systems refuse to sync a folder: they store names at once, or there is nothing to be done.
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
    """Return an unused name in the same folder, hence in the same file system, where a rename is atomic."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{ending}")


def await_folder(path: Path, timeout_s: float) -> None:
    """Return once a folder that another rank has made is there; a network file system may show it late.

    Args:
        timeout_s: seconds to wait, but at most `_FOLDER_S`.

    Raises:
        CheckpointError: the folder has not appeared in that time.
    """
    deadline_s = time.monotonic() + min(_FOLDER_S, timeout_s)
    while not path.is_dir():
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                "folder-not-shared", f"{path}, made by rank 0, is not there; save to a folder that all ranks share"
            )
        time.sleep(_POLL_S)


def entries(root: Path) -> list[Path]:
    """Return the paths in a folder; none where there is no such folder."""
    with named_errors("list", root), suppress(FileNotFoundError):
        return list(root.iterdir())
    return []


def remove(path: Path) -> None:
    """Remove a folder, a file or a link to one.

    A network file system keeps names of files that are still being read: then these stay, for another try.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY):
            raise


def check_free_space(root: Path, num_bytes: int) -> None:
    """Check, before anything is written, that there is space for a checkpoint.

    Args:
        root: where it is to be written; it need not exist yet.
        num_bytes: of all files of all ranks together.

    Raises:
        CheckpointError: the file system has less free space than that.
    """
    with named_errors("ask for the free space of", root):
        system = os.statvfs(next(each for each in (root, *root.parents) if each.exists()))
    free_bytes = system.f_bavail * system.f_frsize
    # A file system that counts no blocks does not know its free space.
    if system.f_blocks and num_bytes > free_bytes:
        needed, free = format_bytes(num_bytes), format_bytes(free_bytes)
        raise CheckpointError(
            "too-little-space", f"{root} has {free} free and the checkpoint needs {needed}; {_MORE_SPACE}"
        )
