"""Provide DeepSpeed's learning-rate schedules: its names and arguments, and its values step by step.

A schedule sets the optimizer's rates when it is made and after every step. What it computes depends on the number of
steps alone, so that is all that a checkpoint has of it. An option may be a list with a value for each param group.

>>> import torch
>>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
>>> schedule = WarmupLR(optimizer, warmup_max_lr=0.2, warmup_num_steps=4, warmup_type="linear")
>>> for _ in range(3):
...     schedule.step()
>>> schedule.get_last_lr(), schedule.state_dict()
([0.1], {'last_batch_iteration': 2})
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import Any, ClassVar, Final

from torch import Tensor
from torch.optim import Optimizer

from shardwise.compat.deepspeed.finder import answers

VALID_LR_SCHEDULES: Final = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

_ABOVE_ZERO: Final = ("lr_range_test_step_size", "cycle_first_step_size")
_NOT_BELOW_ZERO: Final = ("cycle_second_step_size",)
# What DeepSpeed's schedules call their options, where it is not the option's own name.
_ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "step_size": "lr_range_test_step_size",
        "step_rate": "lr_range_test_step_rate",
        "staircase": "lr_range_test_staircase",
        "first_step_size": "cycle_first_step_size",
        "first_stair_count": "cycle_first_stair_count",
    }
)
# Those that are lists with a value for each param group; of several options the one that the schedule has.
_LISTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "min_lr": ("lr_range_test_min_lr",),
        "min_lrs": ("warmup_min_lr", "cycle_min_lr"),
        "max_lrs": ("warmup_max_lr", "cycle_max_lr"),
        "min_moms": ("cycle_min_mom",),
        "max_moms": ("cycle_max_mom",),
    }
)
_SECOND_BETA: Final = 0.99

_Options = Mapping[str, Any]  # of one param group
_Rate = Callable[[_Options, int, float], float]  # of the options, the last step, and the group's own rate


def _signature(*needed: str, **defaults: Any) -> Signature:
    values = {**dict.fromkeys(needed, Parameter.empty), **defaults, "last_batch_iteration": -1}
    return Signature(
        [Parameter(parameter, Parameter.POSITIONAL_OR_KEYWORD, default=it) for parameter, it in values.items()]
    )


def _risen(of: _Options, done: int) -> float:
    """Return the share of a warm-up."""
    num_steps = _num_warmup_steps(of)
    if not 0 <= done < num_steps:
        return float(done >= 0)
    return done / num_steps if of["warmup_type"] == "linear" else 1.0 / math.log(num_steps) * math.log(done + 1)


def _num_warmup_steps(of: _Options) -> int:
    return max(2, of["warmup_num_steps"])


def _warmup(of: _Options, done: int, own: float) -> float:
    low, high = of["warmup_min_lr"], own if of["warmup_max_lr"] is None else of["warmup_max_lr"]
    total, start, share = of.get("total_num_steps"), _num_warmup_steps(of), _risen(of, done)
    if total is not None and done >= start:
        share = max(0.0, (total - done) / max(1.0, total - start))
    return float(low + (high - low) * share)


def _cosine(of: _Options, done: int, own: float) -> float:
    start, share, least = _num_warmup_steps(of), _risen(of, done), of["warmup_min_ratio"]
    if done >= start:
        progress = min(1.0, (done - start + 1) / max(1, of["total_num_steps"] - start))
        share, least = (1 + math.cos(math.pi * progress)) / 2, of["cos_min_ratio"]
    return own * max(0.0, least + share * (1.0 - least)) if done >= 0 else 0.0


def _range_test(of: _Options, done: int, own: float) -> float:
    rise = (done + 1) / of["lr_range_test_step_size"]
    rise = math.floor(rise) if of["lr_range_test_staircase"] else rise
    return float(of["lr_range_test_min_lr"] * (1 + of["lr_range_test_step_rate"] * rise))


def _cycle(of: _Options, done: int, own: float) -> float:
    low, scale = of["cycle_min_lr"], _cycle_scale(of, done)
    if scale is None:
        return float(low / _cycle_decay(of, done, "decay_lr_rate"))
    return float(low + (of["cycle_max_lr"] - low) * scale)


def _cycle_momentum(of: _Options, done: int) -> float:
    low, high, scale = of["cycle_min_mom"], of["cycle_max_mom"], _cycle_scale(of, done)
    if scale is None:
        return float(high * _cycle_decay(of, done, "decay_mom_rate"))
    return float(high - (high - low) * scale)


def _cycle_halves(of: _Options) -> tuple[float, float]:
    first, second = of["cycle_first_step_size"], of["cycle_second_step_size"]
    return float(first), float(first if second is None else second)


def _cycle_decay(of: _Options, done: int, name: str) -> float:
    size, over = of["decay_step_size"], done - sum(_cycle_halves(of)) + 1
    return float(1 + of[name] * (over / size)) if size else 1.0


def _cycle_scale(of: _Options, done: int) -> float | None:
    """Return how far a rate is from its lower end, from 0 to 1, in stairs of whole steps; None after the cycle."""
    first, second = _cycle_halves(of)
    total = first + second
    if done >= total:
        return None
    middle, progress = first / total, 1.0 + (done + 1) / total
    progress -= math.floor(progress)
    is_rising = progress <= middle
    stairs, of_fall = of["cycle_first_stair_count"], of["cycle_second_stair_count"]
    if not is_rising and of_fall is not None:
        stairs = of_fall
    if stairs <= 0:
        return progress / middle if is_rising else (progress - 1) / (middle - 1)
    step = (done + 1) % total
    return math.floor(step * stairs / first if step <= first else (total - step) * stairs / second) / stairs


class LRSchedule:
    """Sets the learning rate of each param group from the number of steps; the arguments are those of DeepSpeed.

    Raises:
        TypeError: there is no torch optimizer, or an argument is unknown or missing.
        ValueError: a number of steps is below the least, or a list has another length than the param groups.
    """

    arguments: ClassVar[Signature]
    rate: ClassVar[_Rate]

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        inner = optimizer if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer, and has none as .optimizer")
        bound = self.arguments.bind(*args, **kwargs)
        bound.apply_defaults()
        if (curve := bound.arguments.get("warmup_type", "log")) not in ("log", "linear"):
            warnings.warn(f"warmup_type={curve!r} is none of log, linear; it is taken as log", stacklevel=2)
            bound.arguments["warmup_type"] = "log"
        self.optimizer, self.options = inner, MappingProxyType(bound.arguments)
        self._of = [dict(self.options) for _ in inner.param_groups]
        for name, value in self.options.items():
            if name in _ABOVE_ZERO and not (isinstance(value, int | float) and value > 0):
                raise ValueError(f"{name}={value} must be a number above 0")
            if name == "warmup_num_steps" and not (isinstance(value, int | float) and value >= 0):
                raise ValueError(f"{name}={value} must be a number, 0 or more")
            if name in _NOT_BELOW_ZERO and value is not None and value < 0:
                raise ValueError(f"{name}={value} must not be below 0")
            if isinstance(value, list | tuple):
                if len(value) != len(self._of):
                    raise ValueError(
                        f"{name} has {len(value)} values for {len(self._of)} param groups; give all of them"
                    )
                for of, item in zip(self._of, value, strict=True):
                    of[name] = item
        self.last_batch_iteration: int = self.options["last_batch_iteration"]
        self.own_lrs = [float(group["lr"]) for group in inner.param_groups]
        if self.last_batch_iteration == -1:
            self._set()

    def __getattr__(self, name: str) -> Any:
        """Return an option by the name that DeepSpeed's schedule has for it."""
        options = self.__dict__.get("options", {})
        if name == "warmup_num_steps" and name in options:
            return _num_warmup_steps(options)
        if (option_name := _ATTRIBUTES.get(name, name)) in options:
            return options[option_name]
        for option in _LISTS.get(name, ()):
            if option in options:
                return [self._of_group(index, option) for index in range(len(self._of))]
        if name == "delta_lrs" and "warmup_max_lr" in options:
            return [high - low for high, low in zip(self.max_lrs, self.min_lrs, strict=True)]
        if name == "org_lrs":
            return list(self.own_lrs)
        raise AttributeError(f"{type(self).__name__} has no {name}; it has {', '.join(options)}")

    def _of_group(self, index: int, option: str) -> Any:
        value = self._of[index][option]
        if option.endswith("_mom"):
            return value, _SECOND_BETA
        return self.own_lrs[index] if value is None else value

    def get_lr(self) -> list[float]:
        """Return the rate of each param group after `last_batch_iteration` steps."""
        done = self.last_batch_iteration
        return [type(self).rate(of, done, own_lr) for of, own_lr in zip(self._of, self.own_lrs, strict=True)]

    def get_last_lr(self) -> list[Any]:
        """Return the rates that the param groups have."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates after one step more, or after the given number."""
        done = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = done
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the last step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; the next step sets the rates."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _set(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class WarmupLR(LRSchedule):
    """Raises the rate from `warmup_min_lr` to `warmup_max_lr`, the optimizer's own by default, and keeps it there."""

    arguments = _signature(warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000, warmup_type="log")
    rate = _warmup


class WarmupDecayLR(LRSchedule):
    """Raises the rate as `WarmupLR` does, and lowers it in a line to `warmup_min_lr` at `total_num_steps`."""

    arguments = _signature(
        "total_num_steps", warmup_min_lr=0.0, warmup_max_lr=0.001, warmup_num_steps=1000, warmup_type="log"
    )
    rate = _warmup


class WarmupCosineLR(LRSchedule):
    """Scales each group's own rate: from `warmup_min_ratio` to 1, then down a cosine to `cos_min_ratio`."""

    arguments = _signature(
        "total_num_steps", warmup_min_ratio=0.0, warmup_num_steps=1000, cos_min_ratio=0.0001, warmup_type="log"
    )
    rate = _cosine

    def get_lr_ratio(self) -> float:
        """Return what each group's own rate is multiplied by now."""
        return _cosine(self.options, self.last_batch_iteration, 1.0)


class LRRangeTest(LRSchedule):
    """Raises the rate without end: by `lr_range_test_step_rate` times the first in `lr_range_test_step_size` steps."""

    arguments = _signature(
        lr_range_test_min_lr=1e-3,
        lr_range_test_step_size=2000,
        lr_range_test_step_rate=1.0,
        lr_range_test_staircase=False,
    )
    rate = _range_test


class OneCycle(LRSchedule):
    """Raises the rate and lowers it once, with the first beta the other way round; then both may decay."""

    arguments = _signature(
        "cycle_min_lr",
        "cycle_max_lr",
        decay_lr_rate=0.0,
        cycle_first_step_size=2000,
        cycle_second_step_size=None,
        cycle_first_stair_count=0,
        cycle_second_stair_count=None,
        decay_step_size=0,
        cycle_momentum=True,
        cycle_min_mom=0.8,
        cycle_max_mom=0.9,
        decay_mom_rate=0.0,
    )
    rate = _cycle

    @property
    def total_size(self) -> float:
        """Return the steps of the cycle."""
        return sum(_cycle_halves(self.options))

    @property
    def second_step_size(self) -> float:
        """Return the steps in which the rate falls."""
        return _cycle_halves(self.options)[1]

    @property
    def step_ratio(self) -> float:
        """Return the share of the cycle in which the rate rises."""
        return _cycle_halves(self.options)[0] / self.total_size

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each param group after the last step; None where they stay."""
        if not self.options["cycle_momentum"]:
            return None
        return [(_cycle_momentum(of, self.last_batch_iteration), _SECOND_BETA) for of in self._of]

    def _set(self) -> None:
        super()._set()
        if not self.options["cycle_momentum"]:
            return
        if "betas" not in self.optimizer.defaults:
            if self.last_batch_iteration < 0:
                what = f"{type(self.optimizer).__name__} has no betas; set cycle_momentum=False"
                warnings.warn(f"OneCycle cycles no momentum: {what}", stacklevel=4)
            return
        done = self.last_batch_iteration
        for group, of in zip(self.optimizer.param_groups, self._of, strict=True):
            first = _cycle_momentum(of, done) if done >= 0 else of["cycle_min_mom"]  # as DeepSpeed begins
            group["betas"] = (first, _SECOND_BETA)


_answer = answers(__name__)


def __getattr__(name: str) -> Any:
    """Return a constant of DeepSpeed's: the name of a schedule, of an option or of a kind of warm-up."""
    of_schedule = {valid.upper(): valid for valid in VALID_LR_SCHEDULES}.get(name.replace("_", ""))
    if name.isupper() and of_schedule is not None:
        return of_schedule
    kinds = (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
    if name.isupper() and any(name.lower() in kind.arguments.parameters for kind in kinds):
        return name.lower()
    return {"WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear"}.get(name) or _answer(name)
