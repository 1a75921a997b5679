"""Build the optimizer and the schedule that DeepSpeed's JSON names, with its parameter names and defaults."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.optim import Optimizer

from shardwise.compat.deepspeed.keys import KEYS, key_of
from shardwise.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam, marked
from shardwise.compat.deepspeed.runtime import lr_schedules
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import shown_value
from shardwise.optim.rules import optimizer_kind

_FUSED: Final = frozenset({torch.optim.Adam, torch.optim.AdamW})
_ADAMS: Final = frozenset({"adam", "adamw", "fusedadam", "cpuadam"})
_ADAM: Final = MappingProxyType({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0})
_LION: Final = MappingProxyType({"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0})
# DeepSpeed's own optimizers have other defaults than torch's of that name, or ours.
_DEFAULTS: Final = MappingProxyType({"adam": _ADAM, "adamw": _ADAM, "lion": _LION})


def build_optimizer(section: Mapping[str, Any], param_groups: Iterable[Any], *, is_on_host: bool = False) -> Optimizer:
    """Build the optimizer of a config's `optimizer` section; "Adam" is AdamW unless `adam_w_mode` is false.

    Args:
        param_groups: parameters, or groups of them as torch's optimizers take.
        is_on_host: whether the states are there, by which DeepSpeed chooses its Adam.

    Raises:
        ConfigError: the type is unknown or not element-wise, or a parameter is unknown or refused.
    """
    name = str(section.get("type", "")).lower()
    params = {key: value for key, value in dict(section.get("params") or {}).items() if value not in (None, "auto")}
    is_torch, is_decoupled = params.pop("torch_adam", False), params.pop("adam_w_mode", True)
    if name in _ADAMS:
        name = "adamw" if is_decoupled or name == "adamw" else "adam"
    if name == "muon":  # its matrices are not among these parameters, but in the layout
        raise ConfigError(
            "deepspeed-optimizer-muon", f"optimizer.type={section['type']}: {KEYS['optimizer.type=muon'].text}"
        )
    optimizer_class = optimizer_kind(name)
    options: dict[str, Any] = {} if is_torch else dict(_DEFAULTS.get(name, {}))
    accepted = inspect.signature(optimizer_class).parameters
    for key, value in params.items():
        key_row = key_of(f"optimizer.params.{key}")
        if key in accepted:
            options[key] = tuple(value) if key == "betas" else value
        elif key_row is None or key_row.action == "M":
            close = difflib.get_close_matches(key, accepted, n=1)
            fix = f"did you mean {close[0]}?" if close else "leave it out"
            raise ConfigError(
                "deepspeed-optimizer-param", f"optimizer.params.{key} is none of {optimizer_class.__name__}'s; {fix}"
            )
        elif key_row.action == "R" and key_row.asks(value):
            raise ConfigError("deepspeed-optimizer-param", f"{key_row.path}={shown_value(value)}: {key_row.text}")
    if optimizer_class in _FUSED and "foreach" not in options:
        options["fused"] = True
    made = optimizer_class(param_groups, **options)
    if optimizer_class in _FUSED and not is_torch:
        marked(made, DeepSpeedCPUAdam if is_on_host else FusedAdam, optimizer_class is torch.optim.AdamW)
    return made


def build_scheduler(section: Mapping[str, Any], optimizer: Optimizer) -> lr_schedules.LRSchedule:
    """Build the schedule of a config's `scheduler` section.

    Args:
        optimizer: whose learning rates, and momenta, it sets.

    Raises:
        ConfigError: the type is none of DeepSpeed's, or a parameter is none of the schedule's.
    """
    name, names = section.get("type"), lr_schedules.VALID_LR_SCHEDULES
    if name not in names:
        close = difflib.get_close_matches(str(name), names, n=1)
        fix = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}"
        raise ConfigError("deepspeed-scheduler", f"scheduler.type={shown_value(name)} is unknown; {fix}")
    params = {key: value for key, value in dict(section.get("params") or {}).items() if value not in (None, "auto")}
    try:
        schedule: lr_schedules.LRSchedule = getattr(lr_schedules, name)(optimizer, **params)
    except (TypeError, ValueError) as error:
        what = str(error).removeprefix(f"{name}.__init__() ")
        raise ConfigError("deepspeed-scheduler", f"scheduler.params of {name}: {what}; correct it there") from None
    return schedule
