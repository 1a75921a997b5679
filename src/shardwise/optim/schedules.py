"""This module has learning-rate schedules by name, and advances any schedule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, SchedulerConfig


def learning_rate_factor(config: SchedulerConfig, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate at a step as a fraction of the peak: linear warm-up, then the named decay.

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
    """Return the schedule that the config names: constant where it names none; a decay needs a length.

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
            "scheduler-length",
            f"scheduler.name={section.name} decays over a length that is not given; set scheduler.total_steps to the "
            "number of steps, or leave scheduler.name out for a constant rate",
        )
    return learning_rate_factor(section, total_steps or 1)


def own_scheduler(config: Config, optimizer: Optimizer) -> LambdaLR:
    """Make the config's schedule over all of the optimizer's parameter groups, those too that are added later.

    Where it names none, rates are the script's, which may set them between steps.
    """
    section, factor = config.scheduler, schedule_of(config)
    is_constant = section.name in (None, "constant") and section.total_steps is None and section.warmup_steps == 0
    return _OwnSchedule(optimizer, _unchanged if is_constant else factor)


def _unchanged(step: int) -> float:
    """Is the factor of a schedule that leaves rates as they are; an optimizer that finds its own has None."""
    return 1.0


class _OwnSchedule(LambdaLR):
    """Gives groups that were added later the same factor of their own rate."""

    def get_lr(self) -> list[float | Tensor]:
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            rate = group["lr"]
            group["initial_lr"] = rate.clone() if isinstance(rate, Tensor) else rate
            self.base_lrs.append(group["initial_lr"])
            self.lr_lambdas.append(self.lr_lambdas[0])
        if self.lr_lambdas[0] is _unchanged:
            return [group["lr"] for group in self.optimizer.param_groups]
        return super().get_lr()


def advance(scheduler: Any) -> None:
    """Advance a schedule by a step, unless it needs a metric, as `ReduceLROnPlateau`: then the script does so."""
    if getattr(type(scheduler), "step", None) is LRScheduler.step or not _needs_arguments(scheduler.step):
        scheduler.step()


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function in C
        return False
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return any(parameter.default is inspect.Parameter.empty and parameter.kind not in kinds for parameter in parameters)
