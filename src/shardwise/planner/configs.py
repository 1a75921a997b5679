"""Translate between the config that a user writes and what the planner prices: a job and a strategy.

>>> config = Config.from_dict({"mesh": {"tp": 2}, "zero": {"stage": 3}, "batch": {"global_size": 8, "micro_size": 1}})
>>> strategy = strategy_of(config, world_size=8)
>>> strategy.tp, strategy.dp_shard, strategy.num_micro_batches
(2, 4, 2)
>>> print(to_toml(Config.from_dict({"zero": {"stage": 3}})))
[zero]
stage = 3
<BLANKLINE>
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, ModelConfig
from shardwise.config.sections import MODEL_SOURCE_KEYS
from shardwise.layout.zero_stages import STAGES
from shardwise.models.presets import PRESETS, decoder_config
from shardwise.planner.hardware import Cluster
from shardwise.planner.imports.huggingface import cached_config, read_huggingface
from shardwise.planner.job import SHARDWISE, ModelShape, PlanJob, Strategy
from shardwise.schedule.pipelines import RECIPES

KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mesh.pp": "pp",
        "mesh.dp_replicate": "dp_replicate",
        "mesh.dp_shard": "dp_shard",
        "mesh.cp": "cp",
        "mesh.tp": "tp",
        "zero.stage": "zero_stage",
        "batch.micro_size": "micro_size",
        "batch.accumulation": "num_micro_batches",
        "pipeline.schedule": "schedule",
        "pipeline.virtual_stages": "virtual_stages",
        "pipeline.gather": "gather",
        "tensor.sequence_parallel": "sequence_parallel",
        "context.transport": "transport",
        "context.heads_over": "heads_over",
        "context.chunk_tokens": "chunk_tokens",
        "recompute.mode": "recompute",
        "recompute.every": "recompute_every",
        "tiers.params": "params_tier",
        "tiers.grads": "grads_tier",
        "tiers.optimizer": "optimizer_tier",
        "tiers.activations": "activations_tier",
        "tiers.params_on_device": "params_on_device",
        "tiers.grads_on_device": "grads_on_device",
        "tiers.optimizer_on_device": "optimizer_on_device",
        "precision.param": "param",
        "precision.reduce": "reduce",
        "precision.accumulate": "accumulate",
    }
)
"""Keys of the config that a strategy has too, and its fields."""

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

_SHAPE_KEYS: Final = tuple(key for key in ModelConfig.model_fields if key not in (*MODEL_SOURCE_KEYS, "tie_embeddings"))


def strategy_of(config: Config, world_size: int) -> Strategy:
    """Return the strategy by which a config, resolved or not, splits its job over so many ranks.

    Raises:
        ConfigError: it cannot be resolved for so many ranks.
    """
    resolved = config.resolve(world_size)
    sections = resolved.model_dump()
    values = {field: sections[key.partition(".")[0]][key.partition(".")[2]] for key, field in KEYS.items()}
    if RECIPES[resolved.pipeline.schedule].is_v_shaped:
        values["virtual_stages"] = 2
    if resolved.context.transport == "ulysses":
        values["heads_over"] = None
    if resolved.pipeline.cut is not None and resolved.mesh.pp > 1:
        values["stage_layers"] = _layers_between(resolved.pipeline.cut, shape_of(resolved).num_layers)
    return Strategy(**values)


def job_of(config: Config, cluster: Cluster) -> PlanJob:
    """Return the job that the model, data and batch of a config, resolved or not, describe on all GPUs of a cluster.

    Raises:
        ConfigError: the model or the batch is none.
    """
    resolved = config.resolve(cluster.num_gpus)
    shape = shape_of(resolved)
    window = _window(resolved)
    traits = replace(
        SHARDWISE,
        is_compiled=resolved.compile.enabled,
        overlaps_data=resolved.zero.overlap,
        overlaps_tensor=resolved.tensor.overlap_chunks > 1,
    )
    return PlanJob(
        shape=shape if window is None else replace(shape, window=window),
        seq_len=resolved.data.seq_len,
        global_batch=resolved.batch.global_size or 1,
        cluster=cluster,
        traits=traits,
        optimizer=resolved.optimizer.name,
        states=resolved.precision.states,
        gather_codec=resolved.precision.gather,
        zero=resolved.zero,
        reduce_feedback=resolved.precision.reduce_feedback,
        lora=resolved.lora,
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


def config_of(job: PlanJob, strategy: Strategy, base: Config | None = None) -> Config:
    """Return the config by which `shardwise train` runs a strategy.

    Args:
        job: its shape must be one that our decoder can have.
        strategy: a strategy for all GPUs of the job's cluster.
        base: the config to start from; what the planner does not decide stays as it is there. None means the defaults.

    Raises:
        ConfigError: our decoder cannot have the shape, or our engine does not run the strategy.
    """
    for name, usual in (("ep", 1), ("matmul", None), ("stage_layers", None)):
        if (value := getattr(strategy, name)) != usual:
            raise ConfigError("plan-only", f"{name}={value} is priced, and has no key of our config; plan only")
    base = Config() if base is None else base
    values = base.model_dump()
    if base.model.path is None:
        values["model"] = model_section(job.shape, base.model).model_dump()
    values["data"]["seq_len"] = job.seq_len
    for key, field in KEYS.items():
        section, _, leaf = key.partition(".")
        values[section][leaf] = getattr(strategy, field)
    values["batch"] |= {"global_size": strategy.global_batch, "accumulation": None}
    values["optimizer"]["name"] = job.optimizer
    if strategy.pp == 1:
        values["pipeline"] = Config().pipeline.model_dump()
    else:
        values["pipeline"]["cut"] = None
    if strategy.cp == 1:
        values["context"] = {**Config().context.model_dump(), "chunk_tokens": strategy.chunk_tokens}
    if not STAGES[strategy.zero_stage].unshard_for_use or strategy.params_tier != "device":
        values["zero"]["secondary_shard"] = 0
    is_on_nvme = "nvme" in (strategy.params_tier, strategy.grads_tier, strategy.optimizer_tier)
    values["tiers"]["nvme_path"] = (base.tiers.nvme_path or "nvme") if is_on_nvme else None
    return Config.from_dict(values)


def model_section(shape: ModelShape, base: ModelConfig) -> ModelConfig:
    """Return the `model` section of a shape: `base` where that is already it, else the preset with the fewest changes.

    Raises:
        ConfigError: our decoder cannot have that shape.
    """
    foreign = {
        "experts": shape.experts is not None,
        "a feed-forward of two matrices": shape.ffn != "gated",
        "biases": shape.has_biases,
        "learned positions": shape.num_positions > 0,
    }
    used_keys = [what for what, is_there in foreign.items() if is_there]
    wanted, sections = replace(shape, name="", window=None), [base]
    for name, preset in PRESETS.items():
        changes = {key: getattr(wanted, key) for key in _SHAPE_KEYS if getattr(wanted, key) != getattr(preset, key)}
        if wanted.is_tied != preset.tie_embeddings:
            changes["tie_embeddings"] = wanted.is_tied
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


def pins_of(assignments: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return the pins of `section.key=value` assignments, by field of the strategy; commas separate several values.

    >>> pins_of(["mesh.tp=4,8", "zero.stage=3"])
    {'tp': (4, 8), 'zero_stage': (3,)}
    >>> pins_of(["mesh.tq=4"])
    Traceback (most recent call last):
        ...
    shardwise.config.errors.ConfigError: mesh.tq is nothing that the planner chooses; did you mean mesh.tp?

    Raises:
        ConfigError: the planner chooses no such key, or the config has no such value.
    """
    pins: dict[str, tuple[Any, ...]] = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, n=1)
            fix = f"did you mean {close[0]}?" if close else f"it chooses {', '.join(KEYS)}"
            raise ConfigError("key-not-planned", f"{key} is nothing that the planner chooses; {fix}")
        if key.endswith("_on_device"):
            raise ConfigError(
                "key-chosen-last", f"{key} is chosen last, as large as fits; leave it out, or price yours by --explain"
            )
        section, _, leaf = key.partition(".")
        configs = [Config().override([f"{key}={value.strip()}"]) for value in text.split(",")]
        pins[KEYS[key]] = tuple(getattr(getattr(config, section), leaf) for config in configs)
    return pins


def to_toml(config: Config, always: Collection[str] = ()) -> str:
    """Write what differs from the defaults in a config as TOML, and the dotted keys of `always`.

    Raises:
        ConfigError: a value is None where the default is none, which TOML cannot say.
    """
    defaults = Config().model_dump()
    lines: list[str] = []
    for section, leaves in config.model_dump().items():
        written: list[str] = []
        for leaf, value in leaves.items():
            key = f"{section}.{leaf}"
            if value == defaults[section][leaf] and (key not in always or value is None):
                continue
            if value is None:
                raise ConfigError(
                    "none-in-toml", f"{key} is none, which TOML cannot say; give {key}=none beside the file"
                )
            written.append(f"{leaf} = {_toml_value(value)}")
        if written:
            lines += [f"[{section}]", *written, ""]
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_value(key)} = {_toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return repr(value)


def _window(config: Config) -> int | None:
    """Return how many keys a query sees at most under a sliding window; other structures are priced as dense (None)."""
    attention = config.attention
    if attention.kind != "sliding-window":
        return None
    blocks = attention.num_sliding_window_blocks or 3
    return min(config.data.seq_len, (blocks // 2 + 1) * attention.block)


def _layers_between(cut: Sequence[str], num_layers: int) -> tuple[int, ...]:
    """Count the blocks of each stage, where every stage but the first begins with a named module."""
    starts: list[int] = []
    for name in cut:
        prefix, _, index = name.rpartition(".")
        starts.append(int(index) if prefix == "blocks" and index.isdecimal() else num_layers)
    return tuple(stop - start for start, stop in pairwise((0, *starts, num_layers)))
