"""Finds the checkpoint that a run goes on from and its config, loads it on every rank, and decides when a run saves.

The user's values come first, then the saved run's, then the job's defaults. Values that belong to the saved run's
machines (world size, devices, folders) are not taken over. The global batch stays the same on any number of ranks:

>>> batch = BatchConfig(global_size=24, micro_size=4)
>>> fit_micro_size(batch, num_data_ranks=4).micro_size, fit_micro_size(batch, num_data_ranks=3).micro_size
(3, 4)
"""

from __future__ import annotations

import json
import logging
import shlex
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardwise.checkpoint.commit import leftovers, rename_later, step_folders, step_of
from shardwise.checkpoint.find import IN_RUN, newest_whole
from shardwise.checkpoint.manifest import AbsentRankError, CheckpointError, DamagedError, Manifest
from shardwise.checkpoint.match import LENIENT_FIX
from shardwise.config.errors import ConfigError, system_code, with_code
from shardwise.config.resolve import BatchConfig, Config, RunConfig, TiersConfig, read_toml
from shardwise.config.untrusted_files import UntrustedFileError, open_regular, read_json
from shardwise.config.written_files import write_whole
from shardwise.engine.checkpoint_api import saves_from_files
from shardwise.layout.mesh_shape import MeshShape, nearest_divisors
from shardwise.models import decoder_config
from shardwise.report.run_folder import PREDICTION_NAME
from shardwise.train.job_model import model_name
from shardwise.train.loop import Trainer
from shardwise.train.metrics import METRICS_NAME
from shardwise.train.rank_watch import ENVIRONMENT_NAME
from shardwise.train.setup import CONFIG_NAME, TOKENIZER_NAME, job_config, runs_in

AUTO: Final = "auto"
# These keys of the saved run say where and how it ran, not what it trained.
_NOT_TAKEN_OVER: Final = frozenset(
    {"batch.accumulation", "checkpoint.path", "mesh.dp_shard", "mesh.dp_replicate", "run.device", "run.dir",
     "run.num_procs", "run.num_threads", "tiers.cores"}
)  # fmt: skip

# What a run's folder has before the first step, beside logs; the metrics are empty then.
_AT_START: Final = frozenset({CONFIG_NAME, ENVIRONMENT_NAME, METRICS_NAME, PREDICTION_NAME, TOKENIZER_NAME})

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
        newest: this run's newest checkpoint, of `num_bytes` on disk.
    """

    root: Path
    num_checkpoints: int
    newest: Path
    num_bytes: int


class RunCheckpoints:
    """Saves a run's states into one folder, `root`.

    Args:
        say: shows a line, about a save that has failed and after which the run goes on.

    Attributes:
        failure: why the newest save has failed; None where it has not.
    """

    def __init__(self, trainer: Trainer, root: Path, say: Callable[[str], None] = log.error) -> None:
        self.root = root
        self.say = say
        self.failure: CheckpointError | None = None
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
        log.info("resumed from %s at step %d", report.path, report.step)
        notes = [f"not whole, so not used: {line}" for line in report.damaged]
        if self._trainer.engine.comm.rank == 0 and self.root.is_dir():
            notes += [f"renamed {folder}, which is of a later step" for folder in rename_later(self.root, report.step)]
        if report.path.parent != self.root:  # else the first save removes them
            notes += [
                f"{folder} is half of a save that did not end; delete it, unless a run is writing it"
                for folder in leftovers(report.path.parent)
            ]
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
            CheckpointError: as `Engine.save`, and `checkpoint.on_failure` is "stop", or a retry would not help.
        """
        with self.survived():  # of the save before, or its error would be raised in place of this save
            self._trainer.engine.finish_saves()
        self._saved_step = step
        try:
            self._save(step)
            self.failure = None
        except CheckpointError as error:
            # After the last step the model is still evaluated, and its loss shown.
            if isinstance(error, AbsentRankError) or not self.is_last(step):
                self._survive(error)
            self.failure = error

    @contextmanager
    def survived(self) -> Iterator[None]:
        """Let a save in the background that is found to have failed in here end the run only if it must.

        Raises:
            CheckpointError: as `save`.
        """
        try:
            yield
        except CheckpointError as error:
            self._survive(error)

    def _survive(self, error: CheckpointError) -> None:
        self.failure = error
        if self._config.on_failure == "stop" or isinstance(error, AbsentRankError):
            raise error
        steps, every = self._trainer.config.run.steps, self._config.every or self._trainer.config.run.steps
        next_step = min(steps, (self._trainer.engine.num_steps // every + 1) * every)
        self.say(f"not saved: {with_code(error)}; the run goes on, and saves after step {next_step}")

    def _save(self, step: int) -> None:
        config = self._config
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

        What has failed is `failure` then.
        """
        try:
            newest = self._trainer.engine.finish_saves()
        except CheckpointError as error:
            self.failure = error
            newest = self._trainer.engine.finish_saves()  # a failure is raised once
        # The others need not know, and a network file system may show them the folder late.
        if newest is None or self._trainer.engine.comm.rank:
            return None
        num_bytes = sum(file.stat().st_size for file in newest.iterdir())
        return SavedCheckpoint(self.root, len(step_folders(self.root)), newest, num_bytes)


def checkpoint_root(config: Config, folder: Path) -> Path:
    """Return the folder of the checkpoints of a run in `folder`."""
    path = config.checkpoint.path
    return folder / IN_RUN if path is None else Path(path).expanduser()


def take_over_metrics(config: Config, folder: Path, resumed: Resumed) -> None:
    """Begin a run's metrics with those of the steps before it, so that its report has the whole curve."""
    root = resumed.path.parent
    runs = [root.parent] if root.name == IN_RUN else []
    runs += [
        run for _, _, run in runs_in(folder.parent) if run != folder and _saved_to(run).resolve() == root.resolve()
    ]
    metrics_path = folder / METRICS_NAME
    if "jsonl" not in config.run.sinks or metrics_path.exists():
        return
    best: list[bytes] = []
    for run in runs:
        with suppress(OSError):
            with open(open_regular(run / METRICS_NAME, run), "rb") as file:
                lines = [line for line in file if 0 < _step_in(line) <= resumed.step]
            # A run that dies in a save has no line of that step yet: others may have saved into this folder, too.
            best = max(best, lines, key=lambda each: _step_in(each[-1]) if each else 0)
    if best:
        write_whole(metrics_path, b"".join(best))


def _step_in(line: bytes) -> int:
    """Return the step of a line of metrics; 0 where it is damaged."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else 0
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0


def go_on_command(root: Path, folder: Path | None, saves_there: bool = True) -> str:
    """Return the command that goes on from the newest checkpoint in `root`.

    Args:
        folder: of the run; the new one's is beside it, where its curve finds the steps before. None for no run.
        saves_there: whether this run saves in `root`, and the new one shall do so again.

    >>> go_on_command(Path("runs/my first/checkpoints"), Path("runs/my first"))
    "shardwise train --resume 'runs/my first'"
    >>> go_on_command(Path("ck"), Path("runs/a"))
    'shardwise train --resume ck checkpoint.path=ck'
    >>> go_on_command(Path("mine/a/checkpoints"), Path("mine/a"))
    'shardwise train --resume mine/a run.dir=mine'
    """
    arguments = [str(root)]
    if folder is not None and saves_there:
        # The folder of a run is shorter than that of its checkpoints, and does as well.
        arguments = [str(folder)] if root == folder / IN_RUN else [str(root), f"checkpoint.path={root}"]
    if folder is not None and folder.parent != Path(RunConfig().dir):
        arguments.append(f"run.dir={folder.parent}")
    return f"shardwise train --resume {' '.join(map(shlex.quote, arguments))}"


def how_to_go_on(config: Config, folder: Path, resume: Path | None) -> str:
    """Say in a line how to go on after a run that has ended before its last step.

    Args:
        resume: the checkpoint that the run itself has gone on from, or its folder; None where it began afresh.
    """
    for root, is_own in ((checkpoint_root(config, folder), True), (resume, False)):
        if root is not None:
            with suppress(CheckpointError, OSError):
                newest, _ = newest_whole(root)
                return f"to go on from {newest.name}: {go_on_command(root, folder, is_own)}"
    fix = f"; checkpoint.every={max(1, config.run.steps // 10)} saves while it trains"
    return f"nothing was saved by then, so there is nothing to go on from{fix * (config.checkpoint.every is None)}"


def is_untouched(folder: Path) -> bool:
    """Say whether a run's folder has only what is written there before the first step."""
    return all(entry.name in _AT_START or entry.name.startswith("rank-") for entry in folder.iterdir()) and not any(
        (folder / METRICS_NAME).read_bytes()[:1] for _ in folder.glob(METRICS_NAME)
    )


def make_root(config: Config, source: Path | None) -> None:
    """Make the folder that `checkpoint.path` names, so that a run that could not save does not start.

    Raises:
        ConfigError: the folder holds checkpoints of another run, or it cannot be made or written to.
    """
    path = config.checkpoint.path
    if path is None:
        return
    root = Path(path).expanduser()
    source_root = None if source is None else source.parent if step_of(source) is not None else source
    if source_root is None or source_root.resolve() != root.resolve():
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
        steps = step_folders(root)
    except CheckpointError as error:
        raise ConfigError(error.code, f"checkpoint.path={path}: {error}") from None
    if steps:
        raise ConfigError(
            "checkpoints-of-another-run",
            f"checkpoint.path={path} holds {steps[0].name} of another run; go on from it with --resume auto, or "
            "choose another folder",
        )


def resumed_job(path: str | Path | None, assignments: Sequence[str], resume: str) -> tuple[Config, Path | None]:
    """Return the config of a run that goes on from a checkpoint, and where that is; None where there is none.

    Args:
        path: a TOML file, or None; it and `assignments` are as for `job_config`.
        resume: a checkpoint, a folder of checkpoints, or a run's folder; or "auto": the newest in `checkpoint.path`,
            or without one, that of the newest run of this name in `run.dir` that has saved; where there is none, the
            run starts afresh.

    Raises:
        ConfigError: a key or a value is wrong, there is no checkpoint where `resume` says, none there is whole, or the
            checkpoint has another model.
    """
    config = job_config(path, assignments)
    source = _newest_root(config) if resume == AUTO else _root_of(Path(resume).expanduser())
    if source is None:
        return config, None
    try:
        newest, manifest = newest_whole(source)
    except DamagedError as error:
        raise ConfigError(
            "no-whole-checkpoint",
            f"no checkpoint in {source} is whole; of the newest: {error}, given to --resume, or move them away",
        ) from None
    except CheckpointError as error:
        raise ConfigError(error.code, f"--resume {resume}: {error}") from None
    _refuse_unless_of_a_run(newest, manifest)
    saved = manifest.config
    config = job_config(path, assignments, base=_taken_over(saved))
    if config.mesh.pp != saved["mesh"]["pp"]:  # for which schedule and cut were chosen
        without = {section: keys for section, keys in saved.items() if section != "pipeline"}
        config = job_config(path, assignments, base=_taken_over(without))
    _refuse_another_model(newest, manifest, config)
    in_file = read_toml(path) if path is not None else {}
    batch = _resumed_batch(Config.from_dict(in_file).override(assignments).batch, manifest.config["batch"])
    keys = {assignment.partition("=")[0].strip().removeprefix("tiers.") for assignment in assignments}
    tiers = _resumed_tiers(config, keys.union(in_file.get("tiers", {})))
    return config.model_copy(update={"batch": batch, "tiers": tiers}), source


def auto_place(config: Config) -> str:
    """Say in words where `--resume auto` has looked.

    >>> auto_place(Config.from_dict({"checkpoint": {"path": "/shared/a"}}))
    'checkpoint.path=/shared/a has no checkpoint yet'
    >>> auto_place(Config.from_dict({"run": {"name": "big"}}))
    'checkpoint.path is not given, and no run named big (run.name) in run.dir=runs has saved yet'
    """
    if config.checkpoint.path is not None:
        return f"checkpoint.path={config.checkpoint.path} has no checkpoint yet"
    name = f"{config.run.name} (run.name)" if config.run.name else f"{model_name(config)}, after its model,"
    return f"checkpoint.path is not given, and no run named {name} in run.dir={config.run.dir} has saved yet"


def keep_global_batch(config: Config, world_size: int) -> Config:
    """Let the micro-batch of a resumed run divide each rank's part of its global batch.

    Raises:
        ConfigError: the ranks do not divide the global batch.
    """
    mesh = config.model_copy(update={"batch": BatchConfig()}).resolve(world_size).mesh
    batch = fit_micro_size(config.batch, MeshShape.from_config(mesh).num_data_ranks)
    return config.model_copy(update={"batch": batch})


def fit_micro_size(batch: BatchConfig, num_data_ranks: int) -> BatchConfig:
    """Return the batch with the largest micro-batch, up to the one given, that makes up the global batch.

    Raises:
        ConfigError: the ranks do not divide the global batch.
    """
    total, micro = batch.global_size, batch.micro_size
    if total is None or batch.accumulation is not None:
        return batch
    per_rank, remainder = divmod(total, num_data_ranks)
    if remainder:
        raise ConfigError(
            "batch-multiple",
            f"{num_data_ranks} data-parallel ranks do not divide the global batch of {total}; nearest legal: "
            f"{nearest_divisors(total, num_data_ranks)}; or set batch.global_size",
        )
    fitting = next(size for size in range(min(micro or per_rank, per_rank), 0, -1) if per_rank % size == 0)
    return BatchConfig(global_size=total, micro_size=fitting)


def _resumed_batch(given: BatchConfig, saved: Mapping[str, Any]) -> BatchConfig:
    """Return the saved global batch unless the user gives another, or the two numbers that make one up."""
    total, micro, accumulation = given.global_size, given.micro_size, given.accumulation
    if micro is None or accumulation is None:
        total = total or saved["global_size"]
    if micro is None and accumulation is None:
        micro = saved["micro_size"]
    return BatchConfig(global_size=total, micro_size=micro, accumulation=accumulation)


def _resumed_tiers(config: Config, given: Collection[str]) -> TiersConfig:
    """Return the tiers without saved values that no longer have a use, such as the folder of states once on NVMe."""
    tiers = config.tiers
    where = {"params": tiers.params, "grads": tiers.grads, "optimizer": tiers.optimizer}
    idle = [f"{state}_on_device" for state, tier in where.items() if tier == "device"]
    idle += [] if "nvme" in where.values() else ["nvme_path"]
    idle += ["activations"] if config.recompute.mode == "none" else []
    defaults = {key: TiersConfig.model_fields[key].default for key in idle if key not in given}
    return tiers.model_copy(update=defaults)


def _root_of(path: Path) -> Path:
    """Return the folder of checkpoints that a user means, who may give the run's folder instead."""
    inner = path / IN_RUN
    try:
        if not path.is_dir() or step_of(path) is not None or step_folders(path):
            return path
    except CheckpointError:  # to be said by who reads it
        return path
    if inner.is_dir():
        return inner
    runs = [run for _, _, run in runs_in(path) if step_folders(run / IN_RUN)]
    if runs:
        raise ConfigError(
            "runs-not-checkpoints", f"--resume {path}: {path} has runs, not checkpoints; did you mean {runs[0]}?"
        )
    root = _saved_to(path)
    return root if root != inner and step_folders(root) else path


def _newest_root(config: Config) -> Path | None:
    """Return the newest folder in which a run of this config has saved checkpoints; None where there is none."""
    try:
        if config.checkpoint.path is not None:
            root = Path(config.checkpoint.path).expanduser()
            return root if step_folders(root) else None
        run_name = config.run.name or model_name(config)
        roots = (_saved_to(run) for _, name, run in runs_in(Path(config.run.dir).expanduser()) if name == run_name)
        return next((root for root in roots if step_folders(root)), None)
    except CheckpointError as error:
        raise ConfigError(error.code, f"--resume {AUTO}: {error}") from None


def _saved_to(run: Path) -> Path:
    """Return the folder in which a run has saved: its own, if that holds checkpoints, else `checkpoint.path`."""
    inner = run / IN_RUN
    try:
        path = read_json(run / CONFIG_NAME, "")["checkpoint"]["path"]
    except (UntrustedFileError, KeyError, TypeError):
        path = None
    return inner if path is None or step_folders(inner) else Path(path).expanduser()


def _refuse_unless_of_a_run(newest: Path, manifest: Manifest) -> None:
    extra = manifest.extra if isinstance(manifest.extra, Mapping) else {}
    if manifest.contents == "weights":
        raise ConfigError(
            "checkpoint-not-all",
            f"{newest} has {manifest.contents} only, so a run cannot go on from it; give one with all",
        )
    if "tokens_hash" not in extra or "batch" not in manifest.config:
        raise ConfigError(
            "checkpoint-of-script",
            f"{newest} is not of shardwise train: where its data ended is unknown; load it in a script (engine.load)",
        )


def _refuse_another_model(newest: Path, manifest: Manifest, config: Config) -> None:
    saved, given = Config.from_dict({"model": manifest.config["model"]}).model, config.model
    if saved.path == given.path and (given.path is not None or decoder_config(saved) == decoder_config(given)):
        return
    was, now = saved.model_dump(), given.model_dump()
    changed = [f"model.{key}={now[key]} (was {was[key]})" for key in was if was[key] != now[key]]
    raise ConfigError(
        "checkpoint-of-other-model",
        f"{newest} is of another model than you give: {', '.join(changed)}; leave that out, or start afresh without "
        "--resume",
    )


def _taken_over(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {
        section: {key: value for key, value in keys.items() if f"{section}.{key}" not in _NOT_TAKEN_OVER}
        for section, keys in saved.items()
    }
