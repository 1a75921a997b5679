"""Read a job of the config that a user writes, and write the config that runs a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, ModelConfig, ResolvedConfig
from shardwise.models.presets import PRESETS, decoder_config
from shardwise.planner.candidates import PLANNED
from shardwise.planner.hardware import Cluster
from shardwise.planner.huggingface import cached_config, read_huggingface
from shardwise.planner.job import ModelShape, PlanJob, changed

SPLITS: Final = ("mesh", "batch", "precision", "zero", "tiers", "tensor", "pipeline", "context", "recompute")
"""The sections that say how a job is split and stored."""

ALWAYS_WRITTEN: Final = frozenset(
    {
        "model.preset",
        "data.seq_len",
        "batch.global_size",
        "batch.micro_size",
        "mesh.dp_replicate",
        "mesh.dp_shard",
        "precision.param",
        "zero.stage",
    }
)
"""Keys that a planned config always has, even at their defaults: `shardwise train` has its own defaults for some."""

_SHAPE_KEYS: Final = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size")


def base_of(config: Config) -> ResolvedConfig:
    """Return what candidates have of a user's config: nothing that the planner chooses, and no cut of the stages."""
    usual = Config().resolve(world_size=1)
    chosen = {key: getattr(getattr(usual, section), leaf) for key in PLANNED for section, leaf in [key.split(".")]}
    whole = ResolvedConfig.model_construct(config.model_fields_set, **{**dict(config), "batch": usual.batch})
    return changed(whole, {**chosen, "zero.stage": 0, "pipeline.cut": None})


def split_as(base: ResolvedConfig, config: ResolvedConfig) -> ResolvedConfig:
    """Return `base`, split and stored as another config says."""
    return base.model_copy(update={name: getattr(config, name) for name in SPLITS})


def job_of(config: Config, cluster: Cluster) -> PlanJob:
    """Return the job that the model, data and batch of a config, resolved or not, describe on all GPUs of a cluster.

    Raises:
        ConfigError: the model or the batch is none.
    """
    resolved = config.resolve(cluster.num_gpus)
    shape = shape_of(resolved)
    window = window_of(resolved)
    return PlanJob(
        shape=shape if window is None else replace(shape, window=window),
        seq_len=resolved.data.seq_len,
        global_batch=resolved.batch.global_size,
        cluster=cluster,
        base=base_of(resolved),
    )


def shape_of(config: Config) -> ModelShape:
    """Return the shape of a config's model.

    Raises:
        ConfigError: there is none, or its folder has no config.json that gives the sizes.
    """
    if config.model.path is not None:
        path = Path(config.model.path).expanduser() / "config.json"
        source_shape = read_huggingface(path if path.is_file() else cached_config(config.model.path) or path).shape
        if source_shape is None:
            raise ConfigError("model-not-named", f"model.path={config.model.path} names no model; give its folder")
        return source_shape
    decoder = decoder_config(config.model, max_seq_len=config.data.seq_len, attention=config.attention)
    return ModelShape.of_decoder(decoder, name=config.model.preset)


def written(job: PlanJob, config: ResolvedConfig) -> Config:
    """Return the config by which `shardwise train` runs a candidate of a job, without what follows from the rest.

    Raises:
        ConfigError: our decoder cannot have the job's shape.
    """
    values = config.model_dump()
    if config.model.path is None:
        values["model"] = model_section(job.shape, config.model).model_dump()
    values["data"]["seq_len"] = job.seq_len
    values["batch"]["accumulation"] = None
    return Config.from_dict(values)


def model_section(shape: ModelShape, base: ModelConfig) -> ModelConfig:
    """Return the `model` section of a shape: `base` where that is already it, else the preset with the fewest changes.

    Raises:
        ConfigError: our decoder cannot have that shape.
    """
    foreign = {
        "dense layers before its experts": bool(shape.experts and shape.experts.num_dense_layers),
        "a feed-forward of two matrices": shape.ffn != "gated",
        "biases": shape.has_biases,
        "learned positions": shape.num_positions > 0,
    }
    used_keys = [what for what, is_there in foreign.items() if is_there]
    wanted, sections = replace(shape, name="", window=None), [base]
    for name, preset in PRESETS.items():
        values = _section_values(ModelShape.of_decoder(preset))
        changes = {key: value for key, value in _section_values(wanted).items() if value != values.get(key)}
        if not used_keys and shape.hidden_size % shape.num_heads == 0:
            sections.append(ModelConfig(preset=name, **changes))
    same = [section for section in sections if ModelShape.of_decoder(decoder_config(section), name="") == wanted]
    if not same:
        what = " and ".join(used_keys) or f"head_dim={shape.head_dim}, not hidden_size / num_heads"
        raise ConfigError(
            "model-plan-only", f"model {shape.name} has {what}, and the decoder of shardwise train has not; plan only"
        )
    if same[0] is base:
        return base
    return min(same, key=lambda each: (len(each.model_dump(exclude_none=True)), each.preset != shape.name))


def _section_values(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of a `model` section that describe a shape."""
    values = {key: getattr(shape, key) for key in _SHAPE_KEYS} | {"tie_embeddings": shape.is_tied, "num_experts": 0}
    experts = shape.experts
    if experts is not None:
        values |= {"num_experts": experts.num_experts, "num_chosen": experts.num_chosen}
        values |= {"expert_size": experts.ffn_size, "num_shared_experts": experts.num_shared}
    return values


def pins_of(assignments: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return the pins of `section.key=value` assignments, by key; commas separate several values.

    >>> pins_of(["mesh.tp=4,8", "zero.stage=3"])
    {'mesh.tp': (4, 8), 'zero.stage': (3,)}

    Raises:
        ConfigError: the config has no such value, or the key may not be pinned.
    """
    pins: dict[str, tuple[Any, ...]] = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        if key.endswith("_on_device"):
            raise ConfigError(
                "key-chosen-last", f"{key} is chosen last, as large as fits; leave it out, or price yours by --explain"
            )
        section, _, leaf = key.partition(".")
        configs = [Config().override([f"{key}={value.strip()}"]) for value in text.split(",")]
        pins[key] = tuple(getattr(getattr(config, section), leaf) for config in configs)
    return pins


def window_of(config: Config) -> int | None:
    """Return how many keys a query sees at most under a sliding window; other structures are priced as dense (None)."""
    attention = config.attention
    if attention.kind != "sliding-window":
        return None
    blocks = attention.num_sliding_window_blocks or 3
    return min(config.data.seq_len, (blocks // 2 + 1) * attention.block)
