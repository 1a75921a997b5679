"""Offer small helpers whose modules of DeepSpeed have nothing but them here."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.compat.deepspeed.accelerator import get_accelerator
from shardwise.compat.deepspeed.finder import MissingNameError
from shardwise.compat.deepspeed.names import sentence
from shardwise.compat.deepspeed.utils import logger
from shardwise.runtime.torch_private import pytree


def is_moe_param(param: Tensor) -> bool:
    """Return False: no parameter needs an optimizer's group of its own, also where experts are divided."""
    return False


def has_moe_layers(m: Any) -> tuple[bool, int]:
    """Return that there are none of DeepSpeed's own layers of experts."""
    return False, 0


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Return False, as `is_moe_param`."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]], max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """Return the parameter groups as they are, in a list."""
    listed = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    return [dict(group) for group in listed]


def configure_moe_param_groups(model_parameters: Any) -> list[Any]:
    """Return the parameters as they are, in a list."""
    return list(model_parameters)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a nested object with copies of its tensors on a device: `torch.save` writes the whole memory of a view."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone().to(device), item)


def op_report(verbose: bool = True) -> None:
    """Say that there are no operators to build."""
    print("deepspeed is Shardwise: nothing is compiled, and there are no operators to build")


class WallClockTimer:
    """Times what is between `start` and `stop`, in seconds."""

    def __init__(self, name: str = "") -> None:
        self.name_, self.started_, self._elapsed, self._begin, self._count = name, False, 0.0, 0.0, 0

    def start(self) -> None:
        """Begin, after the device is done with what was given to it."""
        get_accelerator().synchronize()
        self.started_, self._begin = True, time.perf_counter()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End; `reset` forgets what was before. The arguments are those of DeepSpeed."""
        get_accelerator().synchronize()
        passed = time.perf_counter() - self._begin
        self._elapsed, self.started_ = passed if reset else self._elapsed + passed, False
        self._count += 1

    def reset(self) -> None:
        """Forget what was measured."""
        self._elapsed, self._count, self.started_ = 0.0, 0, False

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds so far, as DeepSpeed does."""
        elapsed_ms = self._elapsed * 1000.0
        if reset:
            self.reset()
        return elapsed_ms

    def mean(self) -> float:
        """Return the milliseconds of one time between start and stop."""
        return self._elapsed * 1000.0 / max(1, self._count)


class SynchronizedWallClockTimer:
    """Holds timers by name, which wait for the device."""

    Timer = WallClockTimer

    def __init__(self) -> None:
        self.timers: dict[str, WallClockTimer] = {}

    def __call__(self, name: str) -> WallClockTimer:
        return self.timers.setdefault(name, WallClockTimer(name))

    def get_timers(self) -> dict[str, WallClockTimer]:
        """Return the timers by name."""
        return self.timers

    def has_timer(self, name: str) -> bool:
        """Say whether there is a timer of that name."""
        return name in self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the milliseconds of some timers; the arguments are those of DeepSpeed."""
        parts = [f"{name}: {self(name).elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers]
        logger.info("time (ms) | %s", " | ".join(parts))

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the milliseconds of one time of some timers; the arguments are those of DeepSpeed."""
        means = {name: self(name).mean() / normalizer for name in names if name in self.timers}
        for name in means if reset else ():
            self(name).reset()
        return means


class ThroughputTimer:
    """Counts samples a second from the third step on; the arguments are those of DeepSpeed."""

    def __init__(
        self,
        config: Any = None,
        batch_size: int = 1,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Any = None,
    ) -> None:
        self.batch_size, self.start_step = max(1, batch_size), start_step
        self.global_step_count, self.total_elapsed_time, self._begin = 0, 0.0, 0.0

    def start(self) -> None:
        """Begin a step."""
        get_accelerator().synchronize()
        self._begin = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a step, or a micro-batch of one; the arguments are those of DeepSpeed."""
        get_accelerator().synchronize()
        self.global_step_count += global_step
        if self.global_step_count > self.start_step:
            self.total_elapsed_time += time.perf_counter() - self._begin

    def avg_samples_per_sec(self) -> float:
        """Return the samples a second; minus infinity before there are any, as in DeepSpeed."""
        steps = self.global_step_count - self.start_step
        return (
            self.batch_size * steps / self.total_elapsed_time
            if steps > 0 and self.total_elapsed_time
            else -float("inf")
        )


class OpBuilder:
    """Answers for an operator that DeepSpeed builds, and that is torch's or this library's own here."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True: nothing is to be built."""
        return True

    def load(self, verbose: bool = False) -> None:
        """Do nothing: scripts load an operator so that it is built before they start."""


class AsyncIOBuilder(OpBuilder):
    """Reads and writes states on a disk: `offload_optimizer.device` and `offload_param.device` may be nvme."""

    NAME = "async_io"


class CPUAdamBuilder(OpBuilder):
    """Steps Adam where its states are."""

    NAME = "cpu_adam"


class FusedAdamBuilder(OpBuilder):
    """Steps Adam on the device."""

    NAME = "fused_adam"


class CPULionBuilder(OpBuilder):
    """Steps Lion where its states are."""

    NAME = "cpu_lion"


class FusedLionBuilder(OpBuilder):
    """Steps Lion on the device."""

    NAME = "fused_lion"


class CPUAdagradBuilder(OpBuilder):
    """Steps Adagrad where its states are."""

    NAME = "cpu_adagrad"


_BUILDERS: Final = (
    AsyncIOBuilder,
    CPUAdamBuilder,
    FusedAdamBuilder,
    CPULionBuilder,
    FusedLionBuilder,
    CPUAdagradBuilder,
)


class _MissingBuilder(OpBuilder):
    """Says of an operator that has no equal here that it cannot be built, so that scripts go another way."""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return False."""
        return False

    def load(self, verbose: bool = False) -> None:
        """Refuse."""
        raise MissingNameError("deepspeed-name-missing", sentence(f"ops.op_builder.{type(self).__name__}"))


@cache
def _missing_builder(name: str) -> type[OpBuilder]:
    return type(name, (_MissingBuilder,), {"NAME": name.removesuffix("Builder").lower()})


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Say whether torch is at least, or at most, of a release such as 2.6; the arguments are those of DeepSpeed."""
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    low, high = (tuple(map(int, str(bound or 0).split("."))) for bound in (min_version, max_version))
    return version >= low and (max_version is None or version <= high)


def __getattr__(name: str) -> Any:
    """Return what DeepSpeed notes when it is installed: its operators, and the torch that it was built with."""
    if name == "torch_info":
        accelerator = get_accelerator()
        release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
        return {
            "version": release,
            "cuda_version": torch.version.cuda or "0.0",
            "hip_version": torch.version.hip or "0.0",
            "nccl_version": ".".join(map(str, accelerator.communication_backend_version() or (0, 0))),
            "bf16_support": accelerator.is_bf16_supported(),
        }
    if name in ("installed_ops", "compatible_ops", "__compatible_ops__"):
        return defaultdict(bool, {builder.NAME: True for builder in _BUILDERS})
    if name.isupper():
        return name.lower()
    if name.endswith("Builder"):
        return _missing_builder(name)
    raise AttributeError(name)
