"""Provide DeepSpeed's learning-rate schedules: its names and arguments, and its values step by step.

A schedule sets the optimizer's rates when it is made and after every step. What it computes depends on the number of
steps alone, so that is all that a checkpoint has of it. A rate may be one number, or a list with one for each param
group.

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
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import Any, ClassVar, Final

from torch import Tensor
from torch.optim import Optimizer

VALID_LR_SCHEDULES: Final = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

_NEEDED: Final = Parameter.empty
_ABOVE_ZERO: Final = ("warmup_num_steps", "lr_range_test_step_size", "cycle_first_step_size")
_SECOND_BETA: Final = 0.99


def _arguments(**defaults: Any) -> Mapping[str, Any]:
    return MappingProxyType(defaults)


class LRSchedule(ABC):
    """Sets the learning rate of each param group from the number of steps.

    Args:
        optimizer: of torch, or a wrapper that has one as `optimizer`.
        args: the values of `arguments`, in their order, and `last_batch_iteration`: the last step, -1 before the first.
        kwargs: those by name.

    Raises:
        TypeError: there is no torch optimizer, or an argument is unknown or missing.
        ValueError: a number of steps is not above 0, or a list has another length than the param groups.
    """

    arguments: ClassVar[Mapping[str, Any]]
    """The arguments after the optimizer with their defaults, in DeepSpeed's order."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        inner = optimizer if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer, and has none as .optimizer")
        wanted = {**self.arguments, "last_batch_iteration": -1}
        kind = Parameter.POSITIONAL_OR_KEYWORD
        bound = Signature([Parameter(name, kind, default=each) for name, each in wanted.items()]).bind(*args, **kwargs)
        bound.apply_defaults()
        for name in _ABOVE_ZERO:
            if name in bound.arguments and not bound.arguments[name] > 0:
                raise ValueError(f"{name}={bound.arguments[name]} must be above 0")
        self.optimizer = inner
        self.options: Mapping[str, Any] = MappingProxyType(bound.arguments)
        self.last_batch_iteration: int = self.options["last_batch_iteration"]
        self.own_lrs = [float(group["lr"]) for group in inner.param_groups]
        if self.last_batch_iteration == -1:
            self._set(self.get_lr())

    @abstractmethod
    def get_lr(self) -> list[Any]:
        """Return the rate of each param group after `last_batch_iteration` steps."""

    def get_last_lr(self) -> list[Any]:
        """Return the rates that the param groups have."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates after one step more, or after the given number."""
        done = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = done
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the last step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; the next step sets the rates."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _set(self, rates: Sequence[Any]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _each(self, name: str) -> list[float]:
        """Return an option for each param group."""
        value, num_groups = self.options[name], len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [value] * num_groups
        if len(value) != num_groups:
            raise ValueError(f"{name} has {len(value)} values for {num_groups} param groups; give one for each")
        return list(value)

    def _warmup(self) -> tuple[bool, float]:
        """Say whether the warm-up is over, and return its share; an unknown type of it is "log", as in DeepSpeed."""
        num_steps, done = max(2, self.options["warmup_num_steps"]), self.last_batch_iteration
        if done >= num_steps:
            return True, 1.0
        if self.options["warmup_type"] == "linear":
            return False, done / num_steps
        return False, 1.0 / math.log(num_steps) * math.log(done + 1)


class WarmupLR(LRSchedule):
    """Raises the rate from `warmup_min_lr` to `warmup_max_lr`, the optimizer's own by default, and keeps it there."""

    arguments = _arguments(warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000, warmup_type="log")

    def get_lr(self) -> list[Any]:
        """Return the rate of each param group."""
        low = self._each("warmup_min_lr")
        high = self.own_lrs if self.options["warmup_max_lr"] is None else self._each("warmup_max_lr")
        share = self.share() if self.last_batch_iteration >= 0 else 0.0
        return [least + (most - least) * share for least, most in zip(low, high, strict=True)]

    def share(self) -> float:
        """Return how far the rate has risen, from 0 to 1."""
        return self._warmup()[1]


class WarmupDecayLR(WarmupLR):
    """Raises the rate as `WarmupLR` does, and lowers it in a line to `warmup_min_lr` at `total_num_steps`."""

    arguments = _arguments(
        total_num_steps=_NEEDED, warmup_min_lr=0.0, warmup_max_lr=0.001, warmup_num_steps=1000, warmup_type="log"
    )

    def share(self) -> float:
        """Return how far the rate has risen, and not fallen again."""
        is_over, share = self._warmup()
        total, warmup = self.options["total_num_steps"], max(2, self.options["warmup_num_steps"])
        return max(0.0, (total - self.last_batch_iteration) / max(1.0, total - warmup)) if is_over else share


class WarmupCosineLR(LRSchedule):
    """Scales each group's own rate: from `warmup_min_ratio` to 1, then down a cosine to `cos_min_ratio`."""

    arguments = _arguments(
        total_num_steps=_NEEDED, warmup_min_ratio=0.0, warmup_num_steps=1000, cos_min_ratio=0.0001, warmup_type="log"
    )

    def get_lr(self) -> list[Any]:
        """Return the rate of each param group."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.own_lrs]

    def get_lr_ratio(self) -> float:
        """Return the share of its own rate that each group has."""
        if self.last_batch_iteration < 0:
            return 0.0
        is_over, share = self._warmup()
        least = self.options["cos_min_ratio" if is_over else "warmup_min_ratio"]
        if is_over:
            warmup = max(2, self.options["warmup_num_steps"])
            done, length = self.last_batch_iteration - warmup + 1, max(1, self.options["total_num_steps"] - warmup)
            share = (1 + math.cos(math.pi * min(1.0, done / length))) / 2
        return max(0.0, least + share * (1.0 - least))


class LRRangeTest(LRSchedule):
    """Raises the rate without end: by `lr_range_test_step_rate` times the first in `lr_range_test_step_size` steps."""

    arguments = _arguments(
        lr_range_test_min_lr=1e-3,
        lr_range_test_step_size=2000,
        lr_range_test_step_rate=1.0,
        lr_range_test_staircase=False,
    )

    def get_lr(self) -> list[Any]:
        """Return the rate of each param group."""
        interval = (self.last_batch_iteration + 1) / self.options["lr_range_test_step_size"]
        rise = math.floor(interval) if self.options["lr_range_test_staircase"] else interval
        return [
            rate * (1 + self.options["lr_range_test_step_rate"] * rise) for rate in self._each("lr_range_test_min_lr")
        ]


class OneCycle(LRSchedule):
    """Raises the rate and lowers it once, with the first beta the other way round; then both may decay."""

    arguments = _arguments(
        cycle_min_lr=_NEEDED,
        cycle_max_lr=_NEEDED,
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

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        name, wanted = type(self.optimizer).__name__, self.options["cycle_momentum"]
        self.cycle_momentum = bool(wanted and "betas" in self.optimizer.defaults)
        if wanted and not self.cycle_momentum:
            warnings.warn(f"OneCycle cycles no momentum: {name} has no betas; set cycle_momentum=False", stacklevel=2)
        if self.cycle_momentum and self.last_batch_iteration == -1:
            self._set_momenta(self._each("cycle_min_mom"))

    def get_lr(self) -> list[Any]:
        """Return the rate of each param group."""
        low = self._each("cycle_min_lr")
        if self.last_batch_iteration >= sum(self._halves()):
            return [rate / self._decay("decay_lr_rate") for rate in low]
        scale = self._scale()
        return [least + (most - least) * scale for least, most in zip(low, self._each("cycle_max_lr"), strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each param group; None where the momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        high = self._each("cycle_max_mom")
        if self.last_batch_iteration >= sum(self._halves()):
            momenta = [momentum * self._decay("decay_mom_rate") for momentum in high]
        else:
            scale = self._scale()
            momenta = [
                most - (most - least) * scale for least, most in zip(self._each("cycle_min_mom"), high, strict=True)
            ]
        return [(momentum, _SECOND_BETA) for momentum in momenta]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set rates and momenta after one step more, or after the given number."""
        super().step(last_batch_iteration)
        if momenta := self.get_mom():
            self._set_momenta([momentum for momentum, _ in momenta])

    def _set_momenta(self, momenta: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = (momentum, _SECOND_BETA)

    def _halves(self) -> tuple[float, float]:
        """Return the steps of the rise and of the fall."""
        first, second = self.options["cycle_first_step_size"], self.options["cycle_second_step_size"]
        return float(first), float(first if second is None else second)

    def _decay(self, name: str) -> float:
        """Return the factor of the decay after the cycle."""
        size, done = self.options["decay_step_size"], self.last_batch_iteration - sum(self._halves()) + 1
        return 1 + self.options[name] * (done / size) if size else 1.0

    def _scale(self) -> float:
        """Return how far the rate is from its lower end, from 0 to 1; in stairs it is counted from whole steps."""
        first, second = self._halves()
        total, done = first + second, self.last_batch_iteration + 1
        middle, place = first / total, 1.0 + done / total
        place -= math.floor(place)
        is_rising = place <= middle
        stairs, of_fall = self.options["cycle_first_stair_count"], self.options["cycle_second_stair_count"]
        if not is_rising and of_fall is not None:
            stairs = of_fall
        if stairs <= 0:
            return place / middle if is_rising else (place - 1) / (middle - 1)
        step = done % total
        return math.floor(step * stairs / first if step <= first else (total - step) * stairs / second) / stairs
