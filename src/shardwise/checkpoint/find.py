"""Finds the checkpoints at a path that a user names, and says which of them are whole; needs no torch.

>>> from tempfile import TemporaryDirectory
>>> from shardwise.checkpoint.commit import begin, commit
>>> from shardwise.checkpoint.manifest import MANIFEST_NAME
>>> with TemporaryDirectory() as place:
...     root = Path(place)
...     for step in (100, 200):
...         _ = commit(begin(root, step), root, Manifest(step=step, tensors=(), files={}))
...     _ = (root / "step-00000200" / MANIFEST_NAME).write_text("torn")
...     newest_whole(root)[0].name, [(found.folder.name, bool(found.damage)) for found in survey(root)]
('step-00000100', [('step-00000200', True), ('step-00000100', False)])
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardwise.checkpoint.commit import candidates, is_checkpoint, read_latest, read_manifest, step_folders, step_of
from shardwise.checkpoint.manifest import CheckpointError, DamagedError, Manifest
from shardwise.checkpoint.match import listed_names

# The root in the folder of a run.
IN_RUN: Final = "checkpoints"


@dataclass(frozen=True)
class Found:
    """Describes a checkpoint, or what is left of one.

    Attributes:
        manifest: None where the manifest, or the size of a file, shows damage.
        damage: what is wrong then; otherwise empty.
        is_latest: whether the file `latest` names it.
    """

    folder: Path
    manifest: Manifest | None
    damage: str = ""
    is_latest: bool = False

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its files; 0 where it is damaged."""
        return sum(self.manifest.files.values()) if self.manifest is not None else 0


def is_root(path: Path) -> bool:
    """Say whether a path is a folder of checkpoints, and not a checkpoint itself."""
    return step_of(path) is None and not is_checkpoint(path)


def root_of(path: Path) -> Path:
    """Return the folder of checkpoints that a user means, who may give the folder of a run instead."""
    inner = path / IN_RUN
    try:
        return inner if inner.is_dir() and not candidates(path) and candidates(inner) else path
    except CheckpointError:  # to be said by who reads it
        return path


def find(path: Path, step: int | None = None) -> list[Path]:
    """Return the step folders that a user means, newest first; at least one.

    Args:
        path: a step folder, a root, or the folder of a run, which has a root.
        step: only this one; None for all.

    Raises:
        CheckpointError: there is none; the message says what there is.
    """
    path = root_of(path)
    folders = candidates(path)
    wanted = [folder for folder in folders if step in (None, step_of(folder))]
    if not folders:
        raise CheckpointError("no-checkpoint", _without_checkpoints(path))
    if not wanted:
        steps = listed_names([str(step_of(folder)) for folder in folders])
        raise CheckpointError("no-such-step", f"{path} has no step {step}; it has {steps}")
    return wanted


def newest_whole(path: Path, step: int | None = None) -> tuple[Path, Manifest]:
    """Return the newest checkpoint at a path that has all its files in their sizes, and its manifest.

    Raises:
        CheckpointError: there is none, or a newer version has written it.
        DamagedError: every one is damaged; the message is that of the newest.
    """
    damaged = []
    for folder in find(path, step):
        try:
            return folder, read_manifest(folder)
        except DamagedError as error:
            damaged.append(error)
    raise damaged[0]


def survey(root: Path) -> list[Found]:
    """Return every step folder in a root, newest first."""
    latest = read_latest(root)
    found = []
    for folder in step_folders(root):
        try:
            found.append(Found(folder, read_manifest(folder), is_latest=folder.name == latest))
        except CheckpointError as error:
            found.append(Found(folder, None, str(error), folder.name == latest))
    return found


def _without_checkpoints(path: Path) -> str:
    names = sorted(each.name for each in path.iterdir())
    below = [str(path / name) for name in names if (path / name).is_dir() and step_folders(path / name)]
    there = f"it has {listed_names(names)}" if names else "it is empty"
    fix = f"; did you mean {' or '.join(below[:3])}?" if below else ""
    return f"{path} has no checkpoint, a folder such as step-00000100; {there}{fix}"
