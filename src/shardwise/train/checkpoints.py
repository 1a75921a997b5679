"""Decides when a run saves, adds its position in the data to checkpoints, and resumes from one, on every rank."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.commit import rename_later, step_folders, step_of
from shardwise.checkpoint.manifest import CheckpointError
from shardwise.checkpoint.match import LENIENT_FIX
from shardwise.config.errors import system_code
from shardwise.config.resolve import Config, ConfigError
from shardwise.engine.checkpoint_api import saves_from_files
from shardwise.train.loop import Trainer
from shardwise.train.resume import FOLDER_NAME

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Resumed:
    """Names the folder of the checkpoint that a run goes on from, its step, and what a user should know about it."""

    path: Path
    step: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SavedCheckpoint:
    """Describes the checkpoints that a run has saved when it ends.

    Attributes:
        root: the folder that they are in.
        num_checkpoints: how many the folder holds, those of earlier runs included.
        newest: this run's newest checkpoint.
        num_bytes: its size on disk.
    """

    root: Path
    num_checkpoints: int
    newest: Path
    num_bytes: int


class RunCheckpoints:
    """Saves a run's states into one folder, `root`."""

    def __init__(self, trainer: Trainer, root: Path) -> None:
        self.root = root
        self._trainer = trainer
        self._config = trainer.config.checkpoint
        self._saved_step: int | None = None

    def resume(self, source: Path) -> Resumed:
        """Go on from the newest whole checkpoint in `source`; rename later ones in this run's folder out of the way.

        Raises:
            CheckpointError: none is whole, it does not fit, or it was trained on other data.
        """
        try:
            report = self._trainer.engine.load(source)
        except CheckpointError as error:
            what, is_misfit, _ = str(error).partition(LENIENT_FIX)
            if not is_misfit:
                raise
            raise CheckpointError(
                error.code,
                f"{what}; give the model, data and optimizer of the saved run, or start afresh without --resume",
            ) from None
        self._trainer.go_on_from(report.extra or {})
        self._saved_step = report.step
        notes = [f"not whole, so not used: {line}" for line in report.damaged]
        if self._trainer.engine.comm.rank == 0 and self.root.is_dir():
            notes += [f"renamed {folder}, which is of a later step" for folder in rename_later(self.root, report.step)]
        for note in notes:
            log.warning("%s", note)
        return Resumed(report.path, report.step, tuple(notes))

    def is_due(self, step: int) -> bool:
        """Say whether this step, which was just taken, is to be saved."""
        if step == self._saved_step:
            return False
        every = self._config.every
        return (every is not None and step % every == 0) or (self._config.at_end and self.is_last(step))

    def is_last(self, step: int) -> bool:
        """Say whether no other step follows this one."""
        return self._trainer.was_stopped or step >= self._trainer.config.run.steps

    def waits(self, step: int) -> bool:
        """Say whether training waits for the save of this step. The last is written from the states, without a copy."""
        return self.is_last(step) or not self._config.background or saves_from_files(self._trainer.engine.layout)

    def save(self, step: int) -> None:
        """Save the state after step `step`, the engine's last one.

        Raises:
            CheckpointError: as `Engine.save`.
        """
        config = self._config
        self._saved_step = step
        self._trainer.engine.save(
            self.root,
            contents="trainable" if self._trainer.config.lora.rank else "all",  # model.path has the frozen weights
            extra=self._trainer.position(),
            wait=self.waits(step),
            keep_last=config.keep_last or None,
            keep_every=config.keep_every,
        )

    def finish(self) -> SavedCheckpoint | None:
        """Wait for the save in progress, and return what this run has saved; None if nothing, and on ranks but 0.

        Raises:
            CheckpointError: it could not be written.
        """
        newest = self._trainer.engine.finish_saves()
        # The others need not know, and a network file system may show them the folder late.
        if newest is None or self._trainer.engine.comm.rank:
            return None
        num_bytes = sum(file.stat().st_size for file in newest.iterdir())
        return SavedCheckpoint(self.root, len(step_folders(self.root)), newest, num_bytes)


def checkpoint_root(config: Config, folder: Path) -> Path:
    """Return the folder of the checkpoints of a run in `folder`."""
    path = config.checkpoint.path
    return folder / FOLDER_NAME if path is None else Path(path).expanduser()


def make_root(config: Config, source: Path | None) -> None:
    """Make the folder that `checkpoint.path` names, so that a run that could not save does not start.

    Raises:
        ConfigError: the folder holds checkpoints of another run, or it cannot be made or written to.
    """
    path = config.checkpoint.path
    if path is None:
        return
    root = Path(path).expanduser()
    own = None if source is None else source.parent if step_of(source) is not None else source
    if own is None or own.resolve() != root.resolve():
        _refuse_foreign_checkpoints(path, root)
    if config.checkpoint.every is None and not config.checkpoint.at_end:
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise ConfigError(
            system_code(error, "folder-not-writable"),
            f"cannot write checkpoint.path={path}: {error.strerror}; set checkpoint.path to a folder that you may "
            "write to",
        ) from None


def _refuse_foreign_checkpoints(path: str, root: Path) -> None:
    try:
        if root.exists() and not root.is_dir():
            raise ConfigError("not-a-folder", f"checkpoint.path={path} is a file; give a folder")
        found = step_folders(root)
    except CheckpointError as error:
        raise ConfigError(error.code, f"checkpoint.path={path}: {error}") from None
    if found:
        raise ConfigError(
            "checkpoints-of-another-run",
            f"checkpoint.path={path} holds {found[0].name} of another run; go on from it with --resume auto, or choose "
            "another folder",
        )
