"""Offer DeepSpeed's profiler of operations over torch's counter: products count, each multiply-add as two operations.

>>> import torch
>>> flops, macs, params = get_model_profile(torch.nn.Linear(4, 2), (3, 4), print_profile=False, as_string=False)
>>> flops, macs, params
(48, 24, 10)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise.runtime.format import format_count


class FlopsProfiler:
    """Counts the operations of a model's forwards between `start_profile` and `stop_profile`.

    The arguments are those of DeepSpeed; `ds_engine` is not used.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.recompute_fwd_factor = model, recompute_fwd_factor
        self.started = False
        self._counter: FlopCounterMode | None = None
        self._begin = self._duration = 0.0
        self._flops = 0

    def start_profile(self, ignore_list: Any = None) -> None:
        """Begin to count; `ignore_list` is not used."""
        self.reset_profile()
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()
        self.started, self._begin = True, time.perf_counter()

    def stop_profile(self) -> None:
        """End the count, which stays until `end_profile`."""
        if self.started and self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._flops, self._duration = self._counter.get_total_flops(), time.perf_counter() - self._begin
            self.started = False

    def reset_profile(self) -> None:
        """Forget what was counted."""
        self._flops, self._duration = 0, 0.0

    def end_profile(self) -> None:
        """End the count, and forget it."""
        self.stop_profile()
        self.reset_profile()

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the operations of the forwards."""
        return flops_to_string(self._flops) if as_string else self._flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiply-adds of the forwards."""
        return macs_to_string(self._flops // 2) if as_string else self._flops // 2

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds of the forwards."""
        return duration_to_string(self._duration) if as_string else self._duration

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the parameters of the model, those of all ranks."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return params_to_string(count) if as_string else count

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the totals and, with `detailed`, the operations by module; the arguments are those of DeepSpeed."""
        lines = [
            f"step {profile_step}: {self.get_total_params(True)} parameters, {self.get_total_flops(True)}, "
            f"{self.get_total_macs(True)}, {self.get_total_duration(True)}"
        ]
        if detailed and self._counter is not None:
            depth = None if module_depth < 0 else module_depth
            lines.append(self._counter.get_table(depth))
        text = "\n".join(lines)
        if output_file is None:
            print(text)
        else:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(text + "\n")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the operations by module; the arguments are those of DeepSpeed."""
        self.print_model_profile(module_depth=module_depth, top_modules=top_modules)


def get_model_profile(  # noqa: PLR0913  DeepSpeed's arguments
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Any = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Return the operations, the multiply-adds and the parameters of one forward; the arguments are those of DeepSpeed.

    `mode` "generate" counts `model.generate`.
    """
    if input_shape is not None:
        first = next(model.parameters())
        args = [torch.ones(tuple(input_shape), dtype=first.dtype, device=first.device)]
    call: Any = model.generate if mode == "generate" else model
    profiler = FlopsProfiler(model)
    for _ in range(warm_up):
        call(*args, **(kwargs or {}))
    profiler.start_profile()
    call(*args, **(kwargs or {}))
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    numbers = (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
    profiler.end_profile()
    return numbers


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number with a prefix such as M; the arguments are those of DeepSpeed, of which `num` counts."""
    return format_count(num)


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of operations in words; the arguments are those of DeepSpeed."""
    return f"{number_to_string(flops)} FLOPs"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of multiply-adds in words; the arguments are those of DeepSpeed."""
    return f"{number_to_string(macs)} MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of parameters in words; the arguments are those of DeepSpeed."""
    return number_to_string(params_num)


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Return seconds in words; the arguments are those of DeepSpeed."""
    return f"{duration * 1000:.{precision}f} ms"
