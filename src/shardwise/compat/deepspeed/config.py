"""Translate DeepSpeed's JSON into Shardwise's config, by the table of `keys`."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardwise.compat.deepspeed.hjson import to_json
from shardwise.compat.deepspeed.keys import KEYS, key_of, nearest, usual_path
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, resolve_batch, set_key, shown_value
from shardwise.config.sections import BatchConfig
from shardwise.config.untrusted_files import UntrustedFileError, as_config_error, parse_json, read_text
from shardwise.config.validate import ATTENTION_KEYS
from shardwise.layout.precision import dtype_key

_ZERO: Final = "zero_optimization"
_BASE64: Final = re.compile(r"[A-Za-z0-9_-]{16,}={0,2}")
_MAX_NAME: Final = 255


@dataclass(frozen=True)
class Translation:
    """Hold what a config of DeepSpeed's is here.

    Attributes:
        config: what `Config.from_dict` takes, with this library's keys.
        notes: lines to say once: what has no effect, what was left "auto", what is unknown.
        refused: a line for each key that is refused; `translate` raises the first.
        given: what the JSON says, by dotted key in the table's spelling, without "auto" and null.
    """

    config: Mapping[str, Any]
    notes: tuple[str, ...]
    refused: tuple[str, ...]
    given: Mapping[str, Any]

    def section(self, name: str) -> dict[str, Any]:
        """Return one section of what the JSON says, such as `optimizer` with its `type` and `params`."""
        settings: dict[str, Any] = {}
        for path, value in self.given.items():
            if path.startswith(f"{name}."):
                set_key(settings, path.removeprefix(f"{name}."), value)
        return settings


def read_config(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config as DeepSpeed takes it: a mapping, the path of a JSON file, or base64 of one's text.

    The file may be HJSON.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    with as_config_error():
        values = source if isinstance(source, Mapping) else _read_file(source)
    if not isinstance(values, Mapping):
        raise ConfigError("deepspeed-section", f"{source} holds no object of keys and values; give DeepSpeed's config")
    return values


def _read_file(source: str | Path) -> Any:
    fix, where = "give DeepSpeed's config as JSON", str(source)
    if isinstance(source, str) and _BASE64.fullmatch(source) and not Path(source[:_MAX_NAME]).exists():
        where = "base64"
        text = base64.urlsafe_b64decode(source).decode(errors="replace")
    else:
        text = read_text(source, fix)
    try:
        return parse_json(text, where, fix)
    except UntrustedFileError as error:
        if error.code != "not-json":
            raise
        try:
            return parse_json(to_json(text), where, fix)
        except (UntrustedFileError, ValueError):
            raise error from None


def translate(values: Mapping[str, Any], world_size: int | None = None, *, refuse: bool = True) -> Translation:
    """Translate a config, which stays as it is.

    Args:
        world_size: ranks, for the batch's equation; None leaves that to `Config.resolve`.
        refuse: raise for keys that are refused, and do not only list them.

    Raises:
        ConfigError: a key is refused, a value is none of the key's, or the batch's terms do not agree.
    """
    flat, left_open = _flatten(values)
    settings: dict[str, Any] = {"zero.stage": 0, "optimizer.clip_norm": 1.0, "run.on_nonfinite": "skip"}
    notes = [f'left "auto", so taken as absent: {", ".join(left_open)}'] if left_open else []
    without_effect: dict[str, list[str]] = {}
    refused = []
    for path, value in flat.items():
        key = key_of(path, value)
        if key is None:
            close, shown = nearest(path), path if path.isprintable() and len(path) < _MAX_SHOWN else shown_value(path)
            notes.append(f"{shown} is not a key of DeepSpeed's" + (f"; did you mean {close}?" if close else ""))
        elif key.action == "R" and key.asks(value):
            refused.append(f"{path}={shown_value(value)}: {key.text}")
        elif key.action == "N" and key.asks(value) and flat.get(f"{path.partition('.')[0]}.enabled", True):
            without_effect.setdefault(key.text, []).append(path)
        elif key.action == "M":
            settings |= _read(path, value, key.target)
    if refused and refuse:
        more = f" (and {len(refused) - 1} more)" if refused[1:] else ""
        raise ConfigError("deepspeed-key-refused", f"{refused[0]}{more}")
    notes += [f"no effect here: {', '.join(paths)} ({why})" for why, paths in without_effect.items()]
    notes += _settle(settings, flat)
    config = _nested(settings)
    for path, value in _dotted(flat.get("shardwise", {})):
        set_key(config, path, value)
    _check(Config.from_dict(config), world_size)
    return Translation(MappingProxyType(config), tuple(notes), tuple(refused), MappingProxyType(flat))


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for path, value in settings.items():
        set_key(config, path, value)
    return config


def _flatten(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return what is given by dotted key, and the keys that were left "auto"; what is dotted at the top wins."""
    by_path: dict[str, Any] = {}
    ours = values.get("shardwise") or {}
    if not isinstance(ours, Mapping):
        raise ConfigError("deepspeed-section", f"shardwise={shown_value(ours)} is not a section; give sections of ours")
    others = {name: value for name, value in values.items() if name != "shardwise"}
    for name, value in sorted(others.items(), key=lambda item: "." in item[0]):
        for written, setting in _dotted({name: value}):
            path = usual_path(written)
            if path == _ZERO and isinstance(setting, bool):
                path, setting = f"{_ZERO}.stage", int(setting)  # the spelling of the first releases
            elif (
                setting not in (None, "auto")
                and key_of(path) is None
                and any(key.startswith(f"{path}.") for key in KEYS)
            ):
                rule = "is not a section; give an object of its keys"
                raise ConfigError("deepspeed-section", f"{path}={shown_value(setting)} {rule}")
            by_path[path] = setting
    if len(by_path) > _MAX_KEYS:
        rule = "more than DeepSpeed knows; give a config of DeepSpeed's"
        raise ConfigError("deepspeed-too-many-keys", f"the config has {len(by_path):,} keys, {rule}")
    for old, new in ((f"{_ZERO}.cpu_offload", "offload_optimizer"), (f"{_ZERO}.cpu_offload_param", "offload_param")):
        if f"{_ZERO}.{new}.device" in by_path:
            by_path.pop(old, None)
    left_open = [path for path, value in by_path.items() if value == "auto"]
    present = {path: value for path, value in by_path.items() if value is not None and value != "auto"}
    return present | ({"shardwise": ours} if ours else {}), left_open


def _read(path: str, value: Any, target: str | None) -> dict[str, Any]:
    """Return the setting that a value means, if it means one; the error of a wrong one names DeepSpeed's key."""
    if path.startswith("sparse_attention."):
        target = target or f"attention.{path.rpartition('.')[2]}"
    if target is None and path not in _READERS:
        return {}
    try:
        meant = _READERS.get(path, lambda same: same)(value)
        if target is None or (meant is None and path != "gradient_clipping"):
            return {}
        Config.from_dict(_nested({target: meant}))
    except ConfigError as error:
        raise ConfigError(error.code, f"{path}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        rule = "is none of DeepSpeed's values for it; correct it there"
        raise ConfigError("deepspeed-value", f"{path}={shown_value(value)} {rule}") from None
    return {target: meant}


def _settle(settings: dict[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Make the settings agree with one another, as DeepSpeed does; yield what to say of it."""
    stage = settings["zero.stage"]
    given_sums(given)
    if given.get("fp16.enabled") and given.get("bf16.enabled"):
        raise ConfigError("deepspeed-two-dtypes", "bf16 and fp16 are both enabled; leave one of them out")
    if stage == 0:
        settings.pop("precision.loss_scale_hysteresis", None)  # only ZeRO's optimizers have one
    elif given.get("fp16.enabled"):
        settings.setdefault("precision.loss_scale_hysteresis", 2)
    if stage == 3:
        settings.setdefault("zero.keep_whole_below", _KEEP_WHOLE)
        settings.setdefault("zero.lockstep", "auto")
    else:
        for key in ("zero.keep_whole_below", "zero.secondary_shard", "precision.gather"):  # DeepSpeed's stage 3 alone
            settings.pop(key, None)
        if settings.get("precision.reduce") == "int4":
            settings.pop("precision.reduce")
    for state, least in (("optimizer", 1), ("params", 3)):
        if settings.get(f"tiers.{state}", "device") != "device" and stage < least:
            settings[f"tiers.{state}"] = "device"
            yield f"{state} stay on the device: offload needs zero_optimization.stage={least}"
    if settings.get("tiers.params", "device") != "device" and settings.pop("zero.secondary_shard", 0):
        yield "zero_hpz_partition_size has no effect: offload_param moves the parameters away from the device"
    if settings.get("tiers.optimizer", "device") != "device":
        settings["tiers.grads"] = "host"
    else:
        settings.pop("tiers.optimizer_on_device", None)
    if "nvme" in (settings.get("tiers.optimizer"), settings.get("tiers.params")):
        settings.setdefault("tiers.nvme_path", "/local_nvme")  # where DeepSpeed writes
    else:
        settings.pop("tiers.nvme_path", None)
    if settings.get("mesh.cp", 1) > 1:
        settings["context.transport"] = "ulysses"
    if not given.get("expert_parallel.enabled"):
        settings.pop("mesh.ep", None)
    if any(key.startswith("attention.") for key in settings):
        _settle_attention(settings)
    if name := given.get("optimizer.type"):
        settings |= {"optimizer.decay_1d": True} | {key: settings.get(key, value) for key, value in _OPTIONS.items()}
        if name.lower() in _KINDS and not given.get("optimizer.params.adam_w_mode", True):
            settings["optimizer.name"] = "adam"
        elif name.lower() == "adam":
            yield f"optimizer.type={name} is AdamW, as in DeepSpeed; optimizer.params.adam_w_mode=false is Adam"


def given_sums(given: Mapping[str, Any]) -> bool:
    """Say whether gradients of the data ranks are added, where their mean is usual.

    Raises:
        ConfigError: the JSON names something else.
    """
    value = given.get("gradient_allreduce_op", "mean")
    if not isinstance(value, str) or value.lower() not in ("mean", "sum"):
        rule = "is none of DeepSpeed's values for it; give mean or sum"
        raise ConfigError("deepspeed-value", f"gradient_allreduce_op={shown_value(value)} {rule}")
    return value.lower() == "sum"


def _settle_attention(settings: dict[str, Any]) -> None:
    """Complete a sparse attention by DeepSpeed's defaults, and leave out keys that its structure does not have."""
    attention_kind = settings.setdefault("attention.kind", "fixed")
    settings.setdefault("attention.block", 16)
    for key in [key for key in settings if key.startswith("attention.") and key != "attention.kind"]:
        if key.removeprefix("attention.") not in ATTENTION_KEYS[attention_kind]:
            del settings[key]


def _check(config: Config, world_size: int | None) -> None:
    """Refuse what the loop of a script cannot run, and a batch whose terms do not agree."""
    mesh = config.mesh
    if mesh.pp != 1:
        raise ConfigError(
            "deepspeed-pipeline",
            f"shardwise.mesh.pp={mesh.pp}: a pipeline needs a loop of whole batches, and the script has its own; use "
            "deepspeed.PipelineModule and train_batch, or leave it out",
        )
    num_data_ranks = 0 if world_size is None else world_size // (mesh.cp * mesh.tp)
    if num_data_ranks == 0:
        return  # the mesh itself is refused by `Config.resolve`
    try:
        resolve_batch(config.batch, num_data_ranks)
    except ConfigError as error:
        text = str(error).replace("batch.global_size", "train_batch_size")
        text = text.replace("micro_size", "train_micro_batch_size_per_gpu")
        text = text.replace("accumulation", "gradient_accumulation_steps")
        raise ConfigError(error.code, text + _ONLY_RANK * _is_of_one_rank(config.batch, num_data_ranks)) from None


def _is_of_one_rank(batch: BatchConfig, num_data_ranks: int) -> bool:
    """Say whether the terms of a batch would agree if there were one rank."""
    one = (batch.micro_size or 1) * (batch.accumulation or 1)
    return num_data_ranks > 1 and batch.micro_size is not None and batch.global_size == one


_ONLY_RANK: Final = (
    "; if the Trainer has filled in these keys, it takes itself for the only rank: without a GPU it needs use_cpu=True "
    "(Accelerate: PartialState(cpu=True) first)"
)
TAG_RULES: Final = ("WARN", "FAIL", "IGNORE")
"""What to do where ranks give a checkpoint different tags; the first without a word."""
_MAX_KEYS: Final = 1000
_MAX_SHOWN: Final = 120
_KEEP_WHOLE: Final = 100_001
# What an optimizer has where the JSON does not say it: DeepSpeed's, not ours.
_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "optimizer.lr": 1e-3,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.momentum": 0.0,
        "optimizer.weight_decay": 0.0,
    }
)


def _wide(value: str) -> str:
    return "fp32" if dtype_key(value) == "fp32" else "param"


_TIERS: Final = MappingProxyType({"none": "device", "cpu": "host", "nvme": "nvme"})
_KINDS: Final = MappingProxyType({"fusedadam": "adamw", "cpuadam": "adamw", "adam": "adamw"})

# How values are read; of every other key they are the same here.
_READERS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "optimizer.type": lambda value: _KINDS.get(value.lower(), value.lower()),
        "optimizer.params.betas": list,
        "fp16.enabled": lambda value: "fp16" if value else None,
        "fp16.loss_scale": lambda value: value or "dynamic",
        "fp16.initial_scale_power": lambda value: 2.0**value,
        "bf16.enabled": lambda value: "bf16" if value else None,
        "bf16.check_grad_overflow": lambda value: "skip" if value else "ignore",
        "data_types.grad_accum_dtype": _wide,
        "data_types.param_dtype": dtype_key,
        "data_types.buffer_dtype": lambda value: "keep" if dtype_key(value) == "fp32" else "param",
        "communication_data_type": _wide,
        "gradient_clipping": lambda value: value or None,
        # DeepSpeed keeps parameters of as many elements, too.
        f"{_ZERO}.stage3_param_persistence_threshold": lambda value: int(value) + 1 if value else 0,
        f"{_ZERO}.offload_optimizer.device": _TIERS.__getitem__,
        f"{_ZERO}.offload_param.device": _TIERS.__getitem__,
        f"{_ZERO}.offload_optimizer.ratio": lambda value: 1.0 - value,
        f"{_ZERO}.cpu_offload": lambda value: "host" if value else "device",
        f"{_ZERO}.cpu_offload_param": lambda value: "host" if value else "device",
        f"{_ZERO}.zero_hpz_partition_size": lambda value: 0 if value == 1 else value,
        f"{_ZERO}.zero_quantized_weights": lambda value: "int8" if value else "param",
        f"{_ZERO}.zero_quantized_gradients": lambda value: "int4" if value else None,
        f"{_ZERO}.mics_shard_size": lambda value: None if value in (0, -1) else value,
        "pipeline.activation_checkpoint_interval": lambda value: "full" if value else "none",
        "tensor_parallel.tp_overlap_comm": lambda value: 2 if value else 1,
        "tensor_parallel.autotp_size": lambda value: value or 1,
        "checkpoint.tag_validation": lambda value: TAG_RULES.index(value.upper()),
    }
)
