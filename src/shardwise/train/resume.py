"""Going on from a checkpoint: which one, under which config. Found before any process starts; loading is the ranks'.

What the user gives now counts most, then what the saved run was told, then the job's defaults. What belongs to the
machines of then (world size, devices, folders) is not taken over, and the global batch is kept on any number of ranks:

>>> batch = BatchConfig(global_size=24, micro_size=4)
>>> fit_micro_size(batch, num_data_ranks=4).micro_size, fit_micro_size(batch, num_data_ranks=3).micro_size
(3, 4)
>>> fit_micro_size(batch, num_data_ranks=5)
Traceback (most recent call last):
    ...
shardwise.config.ConfigError: 5 data-parallel ranks do not divide the saved run's global batch of 24; nearest legal: \
4, 6; or set batch.global_size
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardwise.checkpoint.folder import candidates, read_manifest
from shardwise.checkpoint.manifest import CheckpointError, DamagedError, Manifest
from shardwise.config import BatchConfig, Config, ConfigError, read_toml
from shardwise.layout.mesh_shape import MeshShape
from shardwise.layout.splits import nearest_legal
from shardwise.train.job import job_config

AUTO: Final = "auto"
FOLDER_NAME: Final = "checkpoints"
# Keys of the saved run that say where and how it ran, not what it trained.
_NOT_TAKEN_OVER: Final = frozenset(
    {"batch.accumulation", "checkpoint.path", "mesh.dp_shard", "mesh.dp_replicate", "run.device", "run.dir",
     "run.num_procs", "run.num_threads"}
)  # fmt: skip


def resumed_job(
    path: str | Path | None, assignments: Sequence[str], data_path: str | None, resume: str
) -> tuple[Config, Path | None]:
    """The config of a run that goes on from a checkpoint, and where that is; None where there is none to go on from.

    Args:
        path: a TOML file, or None; it and the next two as for `job_config`.
        assignments: of the user.
        data_path: `data.path`, given by itself.
        resume: a checkpoint, a folder of some, or "auto": the newest in `checkpoint.path`, or without one, the newest
            that a run of this name has left in `run.dir`; where there is none, the run starts afresh.

    Raises:
        ConfigError: a key or a value is wrong, or there is no checkpoint where `resume` says.
    """
    config = job_config(path, assignments, data_path)
    source = _newest_root(config) if resume == AUTO else Path(resume)
    manifest = None if source is None else _newest_manifest(source)
    if source is None or manifest is None:
        if resume != AUTO:
            raise ConfigError(f"--resume {resume}: no checkpoint there; give a step-... folder or a folder of these")
        return config, None
    saved = _taken_over(manifest.config)
    config = job_config(path, assignments, data_path, base=saved)
    given = Config.from_dict(read_toml(path) if path is not None else {}).override(assignments)
    if given.batch.global_size is None:
        global_size = manifest.config["batch"]["global_size"]
        batch = BatchConfig(global_size=global_size, micro_size=config.batch.micro_size)
        config = config.model_copy(update={"batch": batch})
    return config, source


def keep_global_batch(config: Config, world_size: int) -> Config:
    """Let the micro-batch of a resumed run divide each rank's part of its global batch.

    Raises:
        ConfigError: the ranks do not divide the global batch.
    """
    mesh = config.model_copy(update={"batch": BatchConfig()}).resolve(world_size).mesh
    batch = fit_micro_size(config.batch, MeshShape.from_config(mesh).num_data_ranks)
    return config.model_copy(update={"batch": batch})


def fit_micro_size(batch: BatchConfig, num_data_ranks: int) -> BatchConfig:
    """The largest micro-batch, up to the one given, with which the ranks make up the global batch.

    Raises:
        ConfigError: there is none.
    """
    total, micro = batch.global_size, batch.micro_size
    if total is None or batch.accumulation is not None:
        return batch
    per_rank, rest = divmod(total, num_data_ranks)
    if rest:
        raise ConfigError(
            f"{num_data_ranks} data-parallel ranks do not divide the saved run's global batch of {total}; nearest "
            f"legal: {nearest_legal(total, num_data_ranks)}; or set batch.global_size"
        )
    fitting = next(size for size in range(min(micro or per_rank, per_rank), 0, -1) if per_rank % size == 0)
    return BatchConfig(global_size=total, micro_size=fitting)


def _newest_root(config: Config) -> Path | None:
    """Where a run of this config has left checkpoints."""
    if config.checkpoint.path is not None:
        root = Path(config.checkpoint.path).expanduser()
        return root if root.is_dir() else None
    runs = Path(config.run.dir).expanduser()
    name = re.compile(rf"\d{{8}}-\d{{6}}-{re.escape(config.run.name or config.model.preset)}(-\d+)?")
    folders = [folder for folder in runs.iterdir() if name.fullmatch(folder.name)] if runs.is_dir() else []
    # Their names begin with the time.
    roots = [folder / FOLDER_NAME for folder in sorted(folders, reverse=True)]
    return next((root for root in roots if root.is_dir() and _newest_manifest(root) is not None), None)


def _newest_manifest(source: Path) -> Manifest | None:
    try:
        found = candidates(source)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    for folder in found:
        try:
            return read_manifest(folder)
        except DamagedError:  # the load says so
            continue
    return None


def _taken_over(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {
        section: {key: value for key, value in keys.items() if f"{section}.{key}" not in _NOT_TAKEN_OVER}
        for section, keys in saved.items()
    }
