"""When a run saves, what it adds to its checkpoints, and how it goes on from one. On every rank alike."""

from __future__ import annotations

import logging
from pathlib import Path

from shardwise.checkpoint.folder import candidates, clean, set_aside
from shardwise.checkpoint.loading import LoadReport
from shardwise.checkpoint.manifest import CheckpointError
from shardwise.config import Config, ConfigError
from shardwise.train.loop import Trainer
from shardwise.train.resume import FOLDER_NAME

log = logging.getLogger("shardwise")


class RunCheckpoints:
    """Saves a run's states into one folder.

    Args:
        trainer: of the run.
        root: the folder.
    """

    def __init__(self, trainer: Trainer, root: Path) -> None:
        self.root = root
        self._trainer = trainer
        self._config = trainer.config.checkpoint
        self._saved_step: int | None = None

    def resume(self, source: Path) -> LoadReport:
        """Go on from the newest whole checkpoint in `source`; later ones in this run's folder are set aside.

        Raises:
            CheckpointError: none is whole, it does not fit, or it was trained on other data.
        """
        report = self._trainer.engine.load(source)
        self._trainer.go_on_from(report.extra or {})
        self._saved_step = report.step if report.path.parent.resolve() == self.root.resolve() else None
        if self._trainer.engine.comm.rank == 0 and self.root.is_dir():
            clean(self.root)
            for folder in set_aside(self.root, report.step):
                log.warning("set aside %s: the run goes on from step %d", folder.name, report.step)
        return report

    def after_step(self, step: int) -> None:
        """Save where it is due; training goes on meanwhile where the config says so."""
        if self._config.every is not None and step % self._config.every == 0:
            self._save(step, wait=not self._config.background)

    def at_end(self) -> Path | None:
        """Save the last step, unless that is done or not wanted, and return the newest checkpoint."""
        step = self._trainer.engine.num_steps
        if (self._config.at_end or self._config.every is not None) and step > 0:
            self._save(step, wait=True)
        return self._trainer.engine.finish_saves()

    def _save(self, step: int, wait: bool) -> None:
        if step == self._saved_step:
            return
        self._saved_step = step
        config = self._config
        self._trainer.engine.save(
            self.root,
            extra=self._trainer.position(),
            wait=wait,
            keep_last=config.keep_last or None,
            keep_every=config.keep_every,
        )


def checkpoint_root(config: Config, folder: Path) -> Path:
    """Where the checkpoints of a run in `folder` are."""
    path = config.checkpoint.path
    return folder / FOLDER_NAME if path is None else Path(path).expanduser()


def refuse_foreign_checkpoints(config: Config) -> None:
    """Raise where a run that starts afresh would save among another's checkpoints.

    Raises:
        ConfigError: naming the newest of them.
    """
    path = config.checkpoint.path
    if path is None or not Path(path).expanduser().exists():
        return
    try:
        found = candidates(Path(path).expanduser())
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    if found:
        raise ConfigError(
            f"checkpoint.path={path} holds {found[0].name} of another run; go on from it with --resume auto, or choose "
            "another folder"
        )
