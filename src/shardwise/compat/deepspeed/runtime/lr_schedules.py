"""Provide DeepSpeed's learning-rate schedules: its names and arguments, and its values step by step.

A schedule sets the optimizer's rates when it is made and after every step. What it computes depends on the number of
steps alone, so that is all that a checkpoint has of it.

>>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
>>> schedule = WarmupLR(optimizer, warmup_max_lr=0.1, warmup_num_steps=4, warmup_type="linear")
>>> rates = []
>>> for _ in range(6):
...     schedule.step()
...     rates += schedule.get_last_lr()
>>> rates
[0.0, 0.025, 0.05, 0.07500000000000001, 0.1, 0.1]
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

VALID_LR_SCHEDULES: Final = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


class LRSchedule(ABC):
    """Sets the learning rate of each param group from the number of steps.

    Args:
        optimizer: of torch, or a wrapper that has one as `optimizer`.
        last_batch_iteration: number of the last step; -1 before the first.

    Raises:
        TypeError: there is no torch optimizer.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1) -> None:
        inner = optimizer if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer, and has none as .optimizer")
        self.optimizer = inner
        self.last_batch_iteration = last_batch_iteration

    @abstractmethod
    def get_lr(self) -> list[Any]:
        """Return the rate of each param group after `last_batch_iteration` steps."""

    def get_last_lr(self) -> list[Any]:
        """Return the rates that the param groups have."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates after one step more, or after the given number."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the last step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; the next step sets the rates."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _each(self, value: float | Sequence[float], name: str) -> list[float]:
        """Return a value for each param group."""
        num_groups = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [value] * num_groups  # type: ignore[list-item]
        if len(value) != num_groups:
            raise ValueError(f"{name} has {len(value)} values for {num_groups} param groups; give one for each")
        return list(value)


def _warmup(num_steps: int, kind: str) -> Callable[[int], float]:
    """Return the share of the warm-up after a number of steps; an unknown kind is "log", as in DeepSpeed."""
    if not isinstance(num_steps, int) or num_steps <= 0:
        raise ValueError(f"warmup_num_steps={num_steps} must be an integer above 0")
    if kind == "linear":
        return lambda iteration: iteration / num_steps
    inverse = 1.0 / math.log(num_steps)
    return lambda iteration: inverse * math.log(iteration + 1)


class WarmupLR(LRSchedule):
    """Raises the rate from `warmup_min_lr` to `warmup_max_lr`, and keeps it there.

    Args:
        optimizer: as in `LRSchedule`.
        warmup_min_lr: the first rate, or one for each param group.
        warmup_max_lr: the last one; None takes the optimizer's.
        warmup_num_steps: of the warm-up.
        warmup_type: "log" or "linear".
        last_batch_iteration: as in `LRSchedule`.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        own = [group["lr"] for group in self.optimizer.param_groups]
        self.min_lrs = self._each(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._each(own if warmup_max_lr is None else warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps = max(2, warmup_num_steps)
        self._share = _warmup(warmup_num_steps if warmup_num_steps != 1 else 2, warmup_type)
        if last_batch_iteration == -1:
            self._set(self.min_lrs)

    def get_lr(self) -> list[Any]:
        """Return the rate of each param group."""
        if self.last_batch_iteration < 0:
            return self.min_lrs
        is_warm = self.last_batch_iteration >= self.warmup_num_steps
        share = self._after() if is_warm else self._share(self.last_batch_iteration)
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after(self) -> float:
        """Return the share of the rise that is left after the warm-up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Raises the rate as `WarmupLR` does, and lowers it in a line to `warmup_min_lr` at `total_num_steps`.

    Args:
        optimizer: as in `LRSchedule`.
        total_num_steps: of the run.
        warmup_min_lr: as in `WarmupLR`, and so are the others.
        warmup_max_lr: the highest rate.
        warmup_num_steps: of the warm-up.
        warmup_type: "log" or "linear".
        last_batch_iteration: as in `LRSchedule`.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(LRSchedule):
    """Scales each group's own rate: up to 1, then down a cosine to `cos_min_ratio` at `total_num_steps`.

    Args:
        optimizer: as in `LRSchedule`.
        total_num_steps: of the run.
        warmup_min_ratio: the first share.
        warmup_num_steps: of the warm-up.
        cos_min_ratio: the last share.
        warmup_type: "log" or "linear".
        last_batch_iteration: as in `LRSchedule`.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_num_steps = max(2, warmup_num_steps)
        self._share = _warmup(warmup_num_steps if warmup_num_steps != 1 else 2, warmup_type)
        rates = (group["lr"] for group in self.optimizer.param_groups)
        self.org_lrs = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[Any]:
        """Return the rate of each param group."""
        return [rate * self.get_lr_ratio() for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """Return the share of its own rate that each group has."""
        done = self.last_batch_iteration
        if done < 0:
            return 0.0
        if done < self.warmup_num_steps:
            return self.warmup_min_ratio + self._share(done) * (1.0 - self.warmup_min_ratio)
        progress = (done - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


class LRRangeTest(LRSchedule):
    """Raises the rate without end, to find the largest that trains.

    Args:
        optimizer: as in `LRSchedule`.
        lr_range_test_min_lr: the first rate, or one for each param group.
        lr_range_test_step_size: steps in which it rises by `lr_range_test_step_rate` times the first.
        lr_range_test_step_rate: how much it rises.
        lr_range_test_staircase: raise it once in so many steps, and not at every step.
        last_batch_iteration: as in `LRSchedule`.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if not isinstance(lr_range_test_step_size, int) or lr_range_test_step_size <= 0:
            raise ValueError(f"lr_range_test_step_size={lr_range_test_step_size} must be an integer above 0")
        self.min_lr = self._each(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[Any]:
        """Return the rate of each param group."""
        interval = (self.last_batch_iteration + 1) / self.step_size
        rise = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * rise for rate in self.min_lr]


@dataclass(frozen=True)
class CycleOptions:
    """Hold the arguments of `OneCycle` after the optimizer, in DeepSpeed's order.

    Attributes:
        cycle_min_lr: the first and last rate of the cycle, or one for each param group.
        cycle_max_lr: the rate in its middle.
        decay_lr_rate: how fast the rate falls after the cycle; 0 keeps it.
        cycle_first_step_size: steps of the rise.
        cycle_second_step_size: steps of the fall; None takes those of the rise.
        cycle_first_stair_count: stairs of the rise; 0 is none.
        cycle_second_stair_count: stairs of the fall; None takes those of the rise.
        decay_step_size: steps to which the decay rates apply; 0 is no decay.
        cycle_momentum: whether the first beta goes down while the rate goes up.
        cycle_min_mom: the beta in the middle, or one for each param group.
        cycle_max_mom: the beta at both ends.
        decay_mom_rate: how fast the beta grows after the cycle.
        last_batch_iteration: as in `LRSchedule`.
    """

    cycle_min_lr: float | Sequence[float]
    cycle_max_lr: float | Sequence[float]
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = 2000
    cycle_second_step_size: float | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: float = 0
    cycle_momentum: bool = True
    cycle_min_mom: float | Sequence[float] = 0.8
    cycle_max_mom: float | Sequence[float] = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: int = -1


class OneCycle(LRSchedule):
    """Raises the rate and lowers it once, with the momentum the other way round, and then lets both decay.

    Args:
        optimizer: as in `LRSchedule`.
        args: the fields of `CycleOptions`, in their order.
        kwargs: those by name.
    """

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        options = CycleOptions(*args, **kwargs)
        super().__init__(optimizer, options.last_batch_iteration)
        second = options.cycle_second_step_size
        self.first_step_size = float(options.cycle_first_step_size)
        self.second_step_size = self.first_step_size if second is None else float(second)
        if self.first_step_size <= 0 or self.second_step_size < 0:
            sizes = f"cycle_first_step_size={self.first_step_size}, cycle_second_step_size={self.second_step_size}"
            raise ValueError(f"{sizes} must be above 0, and 0 or more")
        self.total_size = self.first_step_size + self.second_step_size
        self.options = options
        self.min_lrs = self._each(options.cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._each(options.cycle_max_lr, "cycle_max_lr")
        self.min_moms = self._each(options.cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._each(options.cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = options.cycle_momentum and "betas" in self.optimizer.defaults
        if options.cycle_momentum and not self.cycle_momentum:
            name = type(self.optimizer).__name__
            warnings.warn(f"OneCycle sets no momentum: {name} has no betas; set cycle_momentum=False", stacklevel=2)
        if options.last_batch_iteration == -1:
            self._set(self.min_lrs)
            self._set_momenta(self.min_moms)

    def get_lr(self) -> list[Any]:
        """Return the rate of each param group."""
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / self._decay(self.options.decay_lr_rate) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each param group; None where the momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            momenta = [high - (high - low) * scale for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        else:
            momenta = [high * self._decay(self.options.decay_mom_rate) for high in self.max_moms]
        return [(momentum, _SECOND_BETA) for momentum in momenta]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set rates and momenta after one step more, or after the given number."""
        super().step(last_batch_iteration)
        self._set_momenta([momentum for momentum, _ in self.get_mom() or ()])

    def _set_momenta(self, momenta: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta if self.cycle_momentum else (), strict=False):
            group["betas"] = (momentum, _SECOND_BETA)

    def _decay(self, rate: float) -> float:
        """Return the factor of the decay after the cycle."""
        if not self.options.decay_step_size:
            return 1.0
        return 1 + rate * ((self.last_batch_iteration - self.total_size + 1) / self.options.decay_step_size)

    def _scale(self) -> float:
        """Return how far the rate is from its lower end, from 0 to 1; in stairs it is counted from whole steps."""
        done = self.last_batch_iteration + 1
        place, middle = 1.0 + done / self.total_size, self.first_step_size / self.total_size
        place -= math.floor(place)
        is_rising = place <= middle
        first, second = self.options.cycle_first_stair_count, self.options.cycle_second_stair_count
        stairs = first if is_rising or second is None else second
        if stairs <= 0:
            return place / middle if is_rising else (place - 1) / (middle - 1)
        step = done % self.total_size
        if step <= self.first_step_size:
            return math.floor(step * stairs / self.first_step_size) / stairs
        return math.floor((self.total_size - step) * stairs / self.second_step_size) / stairs


_SECOND_BETA: Final = 0.99
