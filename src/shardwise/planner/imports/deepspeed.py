"""Read a strategy from DeepSpeed's JSON: stage, offload, batch, precision, as our config's keys.

>>> imported = settings_of({"train_batch_size": 64, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, "ds")
>>> imported.global_batch, dict(imported.settings)
(64, {'zero.stage': 3, 'precision.param': 'bf16'})
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardwise.config.resolve import ConfigError
from shardwise.planner.imports.huggingface import read_json
from shardwise.planner.imports.imported import MAX_KEYS, ImportedJob, short, whole_number

_READ: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization",
    "bf16",
    "bfloat16",
    "fp16",
    "gradient_clipping",
    "optimizer",
    "activation_checkpointing",
    "sequence_parallel_size",
    "tensor_parallel",
    "communication_data_type",
    "data_types",
)
_READ_OF_ZERO: Final = (
    "stage",
    "offload_optimizer",
    "offload_param",
    "cpu_offload",
    "cpu_offload_params",
    "mics_shard_size",
    "zero_hpz_partition_size",
    "overlap_comm",
)
_TIERS: Final = ("none", "cpu", "nvme")
_MOST: Final = sys.float_info.max
_NO_SHARDS: Final = (None, 0, -1)
"""Values of `mics_shard_size` that mean there is no such group."""


def read_deepspeed(path: str | Path) -> ImportedJob:
    """Read the strategy in a DeepSpeed config.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or a value is not DeepSpeed's.
    """
    return settings_of(read_json(path), Path(path).name)


def settings_of(values: Mapping[str, Any], source: str) -> ImportedJob:
    """Return the strategy that a parsed DeepSpeed config describes; values "auto" are left open.

    Args:
        values: of the file.
        source: the file's name, for messages.

    Raises:
        ConfigError: a key is misspelled, or a value is not DeepSpeed's.
    """
    given = _given(values)
    zero = _given(_section(given, "zero_optimization", source))
    _refuse_typos(given, _READ, source)
    _refuse_typos(zero, _READ_OF_ZERO, f"{source}: zero_optimization")
    settings: dict[str, object] = {"zero.stage": _stage(zero, source)}
    settings |= _tiers(zero, source) | _precision(given, source) | _batch(given, source) | _optimizer(given, source)
    if zero.get("mics_shard_size") not in _NO_SHARDS:
        settings["mesh.dp_shard"] = whole_number(zero, ("mics_shard_size",), source)
    if given.get("sequence_parallel_size", 1) != 1:
        settings["mesh.cp"] = whole_number(given, ("sequence_parallel_size",), source)
        settings["context.transport"] = "ulysses"
    tensor = _given(_section(given, "tensor_parallel", source))
    if tensor.get("autotp_size"):
        settings["mesh.tp"] = whole_number(tensor, ("autotp_size",), source)
    checkpointing = _given(_section(given, "activation_checkpointing", source))
    if checkpointing:
        settings["recompute.mode"] = "full"
        if checkpointing.get("cpu_checkpointing"):
            settings["tiers.activations"] = "host"
    batch = whole_number(given, ("train_batch_size",), source) if "train_batch_size" in given else None
    return ImportedJob(settings=settings, global_batch=batch, notes=_notes(given, zero))


def is_deepspeed(values: Mapping[str, Any]) -> bool:
    """Say whether a parsed JSON file looks like DeepSpeed's and not like a model's.

    >>> is_deepspeed({"zero_optimization": {"stage": 2}}), is_deepspeed({"hidden_size": 64})
    (True, False)
    """
    return any(key in values for key in ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"))


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value != "auto" and value is not None}


def _section(values: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    section = values.get(key, {})
    if not isinstance(section, Mapping):
        raise ConfigError(
            "deepspeed-section", f"{source}: {key}={short(section)} is not a section; give an object of keys and values"
        )
    return section


def _refuse_typos(values: Mapping[str, Any], known: tuple[str, ...], source: str) -> None:
    if len(values) > MAX_KEYS:
        raise ConfigError(
            "deepspeed-too-many-keys",
            f"{source} has {len(values):,} keys, more than DeepSpeed knows; give a config of DeepSpeed's",
        )
    for key in values:
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.9)
        if close and close[0] not in values:
            raise ConfigError(
                "deepspeed-unknown-key", f"{source}: {key} is not a key of DeepSpeed's; did you mean {close[0]}?"
            )


def _stage(zero: Mapping[str, Any], source: str) -> int:
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ConfigError(
            "deepspeed-zero-stage",
            f"{source}: zero_optimization.stage={short(stage)} must be 0, 1, 2 or 3; correct it there",
        )
    return int(stage)


def _tiers(zero: Mapping[str, Any], source: str) -> dict[str, object]:
    settings: dict[str, object] = {}
    for key, state, old in (
        ("offload_optimizer", "optimizer", "cpu_offload"),
        ("offload_param", "params", "cpu_offload_params"),
    ):
        section = _given(_section(zero, key, source))
        device = section.get("device", "cpu" if zero.get(old) else "none")
        if device not in _TIERS:
            tiers = ", ".join(_TIERS)
            raise ConfigError(
                "deepspeed-offload-device",
                f"{source}: {key}.device={short(device)} must be one of {tiers}; correct it there",
            )
        if device != "none":
            settings[f"tiers.{state}"] = "host" if device == "cpu" else "nvme"
        if device == "nvme":
            known = settings.get("tiers.nvme_path", "/local_nvme")  # of the other state, or what DeepSpeed takes
            settings["tiers.nvme_path"] = str(section.get("nvme_path", known))
    return settings


def _precision(given: Mapping[str, Any], source: str) -> dict[str, object]:
    names = {"bf16": "bf16" if "bf16" in given else "bfloat16", "fp16": "fp16"}
    said = {name: _section(given, key, source).get("enabled") for name, key in names.items()}
    enabled = [name for name, value in said.items() if value and value != "auto"]
    if len(enabled) > 1:
        raise ConfigError("deepspeed-two-dtypes", f"{source} enables bf16 and fp16; leave one of them out")
    left_open = [name for name, value in said.items() if value == "auto"]
    settings: dict[str, object] = {"precision.param": [*enabled, *left_open, "fp32"][0]}
    if given.get("communication_data_type") == "fp32":
        settings["precision.reduce"] = "fp32"
    return settings


def _batch(given: Mapping[str, Any], source: str) -> dict[str, object]:
    names = {
        "batch.micro_size": "train_micro_batch_size_per_gpu",
        "batch.accumulation": "gradient_accumulation_steps",
    }
    return {ours: whole_number(given, (key,), source) for ours, key in names.items() if key in given}


def _optimizer(given: Mapping[str, Any], source: str) -> dict[str, object]:
    settings: dict[str, object] = {}
    clip_norm = given.get("gradient_clipping", 0)
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float) or not 0 <= clip_norm < _MOST:
        raise ConfigError(
            "deepspeed-clip-range",
            f"{source}: gradient_clipping={short(clip_norm)} must be a finite number >= 0; correct it there",
        )
    if clip_norm:
        settings["optimizer.clip_norm"] = float(clip_norm)
    params = _given(_section(_given(_section(given, "optimizer", source)), "params", source))
    for key in ("lr", "eps", "weight_decay"):
        if isinstance(params.get(key), int | float) and abs(params[key]) < _MOST:
            settings[f"optimizer.{key}"] = float(params[key])
    return settings


def _notes(given: Mapping[str, Any], zero: Mapping[str, Any]) -> tuple[str, ...]:
    of_zero = (f"zero_optimization.{key}" for key in zero if key not in _READ_OF_ZERO)
    unread = [*(key for key in given if key not in _READ), *of_zero]
    notes = [f"not needed here, and left out: {', '.join(unread)}"] if unread else []
    if zero.get("zero_hpz_partition_size", 1) not in (0, 1):
        notes.append("zero_hpz_partition_size has no counterpart; mesh.dp_shard with replicas is nearest")
    return tuple(notes)
