"""Reads how a given config (ours, DeepSpeed's or Megatron's) splits a job, so that it can be priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.compat.deepspeed.config import translate
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, ResolvedConfig, is_config
from shardwise.models.huggingface_config import is_huggingface, read_json
from shardwise.models.megatron_flags import read_megatron
from shardwise.models.shape import ModelSource
from shardwise.planner.hardware import Cluster
from shardwise.planner.job import PlanJob
from shardwise.planner.request import Question, job_of, read_model, split_as
from shardwise.schedule.pipelines import placement_of
from shardwise.train.setup import check_job, job_config


@dataclass(frozen=True, kw_only=True)
class ImportedPlan:
    """Holds a job, the config that splits it, and notes about what was read."""

    job: PlanJob
    config: ResolvedConfig
    notes: tuple[str, ...] = ()


def read_explained(
    source: str,
    model: str | None,
    cluster: Cluster,
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    settings: Sequence[str] = (),
) -> ImportedPlan:
    """Read what a config says of a job on a cluster.

    Args:
        source: the path of our TOML or a run's config.json, of DeepSpeed's JSON or a script of Megatron's flags; or the
            flags themselves.
        model: a preset or a model's config, for a config that names no model.
        cluster: the machines that the job is priced for.
        seq_len: tokens a sequence; None takes the config's.
        global_batch: sequences a step; None takes the config's.
        settings: `section.key=value`, which override the config's values.

    Raises:
        ConfigError: the file is wrong, names no model, or its layout does not fit the cluster.
    """
    if is_config(source):
        preset = [] if model is None else [f"model.preset={model}"]
        assignments = [*preset, *_given(seq_len, global_batch), *settings]
        config = _config_on(source, cluster, assignments)
        check_job(config, cluster.num_gpus)
        return ImportedPlan(job=job_of(config, cluster), config=config.resolve(cluster.num_gpus))
    imported = _imported(source)
    if model is None and Path(source).suffix == ".json":
        raise ConfigError(
            "model-not-named", f"{Path(source).name} names no model; add --model, such as --model llama-7b"
        )
    wanted = read_model(model) if model is not None else imported
    config = _config(imported, cluster, global_batch or imported.global_batch, settings)
    asked = Question(wanted, cluster, seq_len or imported.seq_len, config.batch.global_size).ask()
    notes = tuple(dict.fromkeys((*imported.notes, *asked.notes)))
    return ImportedPlan(job=asked.job, config=split_as(asked.job.base, config), notes=notes)


def read_deepspeed(path: str | Path) -> ModelSource:
    """Read how a DeepSpeed config splits a job, as the library would run it; values "auto" are left open.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or a value is not DeepSpeed's.
    """
    values = read_json(path)
    try:
        translation = translate(values, refuse=False)
    except ConfigError as error:
        raise ConfigError(error.code, f"{Path(path).name}: {error}") from None
    settings = {
        f"{name}.{leaf}": value for name, section in translation.config.items() for leaf, value in section.items()
    }
    sections = {dtype: values.get(key) for key, dtype in (("bfloat16", "bf16"), ("bf16", "bf16"), ("fp16", "fp16"))}
    left_open = [
        key for key, section in sections.items() if isinstance(section, Mapping) and section.get("enabled") == "auto"
    ]
    settings.setdefault("precision.param", [*left_open, "fp32"][0])
    if any(key.startswith("activation_checkpointing.") for key in translation.given):
        settings["recompute.mode"] = "full"  # as the script of such a config most likely does
        if translation.given.get("activation_checkpointing.cpu_checkpointing"):
            settings["tiers.activations"] = "host"
    batch = settings.pop("batch.global_size", None)
    notes = (*translation.notes, *(f"refused in a run: {line}" for line in translation.refused))
    return ModelSource(settings=settings, global_batch=batch, notes=notes)


def _given(seq_len: int | None, global_batch: int | None) -> list[str]:
    lengths = [] if seq_len is None else [f"data.seq_len={seq_len}"]
    return lengths + ([] if global_batch is None else [f"batch.global_size={global_batch}"])


def _config_on(path: str, cluster: Cluster, settings: Sequence[str]) -> Config:
    return job_config(path, [f"run.device={cluster.gpu.run_device}", *settings])


def _config(
    imported: ModelSource, cluster: Cluster, global_batch: int | None, settings: Sequence[str] = ()
) -> ResolvedConfig:
    """Return the config of an imported job; a batch that is left open is one micro-batch for each rank."""
    config = Config().override([*imported.assignments, *settings])
    if config.batch.global_size is None and global_batch is not None:
        config = config.override([f"batch.global_size={global_batch}", "batch.accumulation=none"])
    if config.batch.micro_size is None:
        config = config.override(["batch.micro_size=1"])
    return config.resolve(cluster.num_gpus)


def named_batch(source: str, num_gpus: int) -> int | None:
    """Return the sequences a step that a config, ours or another tool's, has on so many GPUs; None where it says none.

    Raises:
        ConfigError: the file is wrong.
    """
    if is_config(source):
        config, named = Config.from_toml(source), None
    else:
        imported = _imported(source)
        config, named = Config().override(imported.assignments), imported.global_batch
    batch = config.batch
    if named is None and batch.global_size is None and (batch.micro_size or batch.accumulation) is None:
        return None
    return named or config.resolve(num_gpus).batch.global_size


def split_for(source: str, job: PlanJob) -> ImportedPlan:
    """Return a job split and stored as a config says; nothing else of the config is read.

    Raises:
        ConfigError: the file is wrong, or its layout does not fit the job or its cluster.
    """
    if is_config(source):
        config = _config_on(source, job.cluster, _given(job.seq_len, job.global_batch))
        resolved = config.resolve(job.cluster.num_gpus)
        notes: tuple[str, ...] = ()
    else:
        imported = _imported(source)
        resolved, notes = _config(imported, job.cluster, job.global_batch), imported.notes
    mesh, batch, pipeline = resolved.mesh, resolved.batch.global_size, resolved.pipeline
    if batch != job.global_batch:
        raise ConfigError(
            "batch-of-strategy",
            f"it takes {batch} sequences a step, not {job.global_batch}; give --global-batch {batch}",
        )
    for what, size, ranks in (("heads", job.shape.num_heads, mesh.tp), ("tokens", job.seq_len, mesh.cp)):
        if size % ranks:
            raise ConfigError(
                "ranks-divide-size", f"{size} {what} do not divide over {ranks} ranks; choose another size"
            )
    if placement_of(pipeline.schedule, mesh.pp, pipeline.virtual_stages).num_stages > job.shape.num_layers:
        raise ConfigError(
            "more-stages-than-layers", f"it has more stages than {job.shape.num_layers} layers; take fewer"
        )
    return ImportedPlan(job=job, config=split_as(job.base, resolved), notes=notes)


def _imported(source: str) -> ModelSource:
    if Path(source).suffix != ".json":
        return read_megatron(source)
    if is_huggingface(read_json(source)):
        raise ConfigError(
            "model-without-strategy",
            f"{Path(source).name} is a model and says not how it is split; give it with --model",
        )
    return read_deepspeed(source)
