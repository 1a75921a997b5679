"""Element-wise optimizers and learning-rate schedules by name.

The optimizer sees 1-D pieces of parameters, so only those whose update of an element depends on that element alone are
right; the others are refused by name.

>>> sorted(optimizer_names())[:4]
['adadelta', 'adagrad', 'adam', 'adamax']
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwise.config import Config, ConfigError, OptimizerConfig, SchedulerConfig, shown_value
from shardwise.lion import Lion

# What torch's own classes do to a whole matrix, or need a closure for; on pieces they would be silently wrong.
_NOT_ELEMENT_WISE: Final = frozenset({"lbfgs", "adafactor", "muon", "sparseadam"})

ParamGroups = Sequence[dict[str, Any]]


def optimizer_names() -> Mapping[str, type[Optimizer]]:
    """The element-wise optimizers of `torch.optim`, and Lion, by lower-case name."""
    classes = inspect.getmembers(torch.optim, lambda value: inspect.isclass(value) and issubclass(value, Optimizer))
    names = {"lion": Lion} | {name.lower(): kind for name, kind in classes if kind is not Optimizer}
    return MappingProxyType({name: kind for name, kind in names.items() if name not in _NOT_ELEMENT_WISE})


def refuse_unless_element_wise(optimizer: Optimizer) -> None:
    """Raise for torch's optimizers that work on whole matrices; others are taken at their word."""
    name = type(optimizer).__name__
    if name.lower() in _NOT_ELEMENT_WISE:
        raise ConfigError(
            f"optimizer {name} is not element-wise but sees 1-D pieces of parameters; use AdamW, SGD or another"
        )


def optimizer_kind(name: str) -> type[Optimizer]:
    """The optimizer of a name, in whatever case it is written.

    Raises:
        ConfigError: no element-wise optimizer has that name.
    """
    kinds = optimizer_names()
    kind = kinds.get(name.lower())
    if kind is None:
        rule = "is not element-wise" if name.lower() in _NOT_ELEMENT_WISE else "is unknown"
        raise ConfigError(f"optimizer.name={shown_value(name)} {rule}; choose one of {', '.join(sorted(kinds))}")
    return kind


def build_optimizer(config: OptimizerConfig, groups: ParamGroups) -> Optimizer:
    """Construct the optimizer that `config.name` names over parameter groups, fused where torch has a fused kernel.

    Raises:
        ConfigError: no element-wise optimizer has that name.
    """
    kind = optimizer_kind(config.name)
    accepted = inspect.signature(kind).parameters
    wanted: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    return kind(groups, **{key: value for key, value in wanted.items() if key in accepted})


def learning_rate_factor(config: SchedulerConfig, total_steps: int) -> Callable[[int], float]:
    """The learning rate at a step as a fraction of the peak: linear warm-up, then the named decay.

    >>> factor = learning_rate_factor(SchedulerConfig(name="linear", warmup_steps=2, final_ratio=0.0), total_steps=6)
    >>> [round(factor(step), 2) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    name = config.name or "constant"

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
        shape = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
        return config.final_ratio + (1.0 - config.final_ratio) * shape[name]

    return factor


def schedule_of(config: Config) -> Callable[[int], float]:
    """The schedule that the config names: constant where it names none, and never over a length that nobody gave.

    >>> schedule_of(Config())(10_000)
    1.0

    Raises:
        ConfigError: it names a decay and no length.
    """
    section, run = config.scheduler, config.run
    total_steps = section.total_steps or (run.steps if "steps" in run.model_fields_set else None)
    if section.name is None and section.total_steps is not None:
        section = section.model_copy(update={"name": "cosine"})
    if total_steps is None and section.name in ("linear", "cosine"):
        raise ConfigError(
            f"scheduler.name={section.name} decays over a length that is not given; set scheduler.total_steps to the "
            "number of steps, or leave scheduler.name out for a constant rate"
        )
    return learning_rate_factor(section, total_steps or 1)


def own_scheduler(config: Config, optimizer: Optimizer) -> LambdaLR:
    """The config's schedule over all of the optimizer's parameter groups."""
    return LambdaLR(optimizer, schedule_of(config))
