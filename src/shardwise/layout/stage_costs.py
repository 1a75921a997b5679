"""What each unit of a pipeline costs: the time it computes and the memory that its states take.

An embedding is looked up, so it takes memory and next to no time; a head takes both, and is one or two blocks' worth in
a model of many tokens. Both are units like the blocks.

>>> from shardwise.layout.stage_units import find_stage_units
>>> model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8), nn.Linear(8, 100, bias=False))
>>> for cost in estimate_costs(model, find_stage_units(model), bytes_per_element=16):
...     print(cost)
UnitCost(name='0', compute=0.0, memory_bytes=12800.0)
UnitCost(name='1', compute=128.0, memory_bytes=1152.0)
UnitCost(name='2', compute=1600.0, memory_bytes=12800.0)
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from shardwise.config import ConfigError
from shardwise.layout.skeleton import ParamEntry
from shardwise.layout.stage_units import StageUnit


@dataclass(frozen=True)
class UnitCost:
    """What a unit weighs.

    Attributes:
        name: the unit's.
        compute: FLOPs a token, forward, or seconds: only shares of the sum over all units count.
        memory_bytes: of its parameters, gradients and optimizer states.
    """

    name: str
    compute: float
    memory_bytes: float


def estimate_costs(
    model: nn.Module,
    units: Sequence[StageUnit],
    bytes_per_element: float | Callable[[ParamEntry], float],
    measured: Mapping[str, float] | None = None,
) -> tuple[UnitCost, ...]:
    """Costs by the units' parameters: 2 FLOPs a token and element of each matrix that is multiplied by.

    That is a matrix product's cost (Kaplan et al. 2020, arXiv 2001.08361, table 1). A tied matrix costs time in the
    unit that multiplies by it, and memory in every unit that uses it. Experts count by the share of them that a token
    is sent to. What no parameter tells is left out: the scores of attention, which grow with the sequence, and
    activations.

    Args:
        model: the units'; its storage is not read.
        units: as `find_stage_units` returns them.
        bytes_per_element: of a parameter with its gradient and optimizer states, on one rank; of all, or of each.
        measured: seconds of a unit's forward and backward by pattern of unit names; the first that matches replaces
            the estimate. Estimates of the other units are scaled to them.

    Raises:
        ConfigError: a pattern matches no unit, or a measured time is not a positive number.
    """
    share = _share_of_experts(model)
    in_all = set.intersection(*({each.name for each in unit.params} for unit in units)) if len(units) > 1 else set()
    estimates = tuple(
        UnitCost(
            unit.name,
            _matrix_flops(model, unit, share),
            sum(
                math.prod(each.shape) * (bytes_per_element(each) if callable(bytes_per_element) else bytes_per_element)
                for each in unit.params
                if each.name not in in_all
            )
            + 0.0,
        )
        for unit in units
    )
    return _with_measured(estimates, measured) if measured else estimates


def _matrix_flops(model: nn.Module, unit: StageUnit, share_of_experts: float) -> float:
    # A module under two names is run once.
    modules = {id(module): (name, module) for top in unit.modules for name, module in _named_modules(model, top)}
    flops = 0.0
    for name, module in modules.values():
        if isinstance(module, nn.EmbeddingBag) or type(module).__name__.endswith("Embedding"):
            continue
        share = share_of_experts if "experts" in name.split(".") else 1.0
        flops += sum(2.0 * each.numel() * share for each in module.parameters(recurse=False) if each.dim() > 1)
    return flops


def _named_modules(model: nn.Module, top: str) -> list[tuple[str, nn.Module]]:
    return list(model.get_submodule(top).named_modules(prefix=top))


def _share_of_experts(model: nn.Module) -> float:
    """The part of a block's experts that a token is sent to, where the config of a Hugging Face model tells."""
    config = getattr(model, "config", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        total = getattr(config, key, None)
        if chosen and total:
            return min(1.0, float(chosen) / float(total))
    return 1.0


def _with_measured(estimates: Sequence[UnitCost], measured: Mapping[str, float]) -> tuple[UnitCost, ...]:
    for pattern, seconds in measured.items():
        if not any(fnmatch.fnmatchcase(each.name, pattern) for each in estimates):
            names = ", ".join(each.name for each in (estimates[0], estimates[-1]))
            raise ConfigError(f"measured times: {pattern!r} matches no unit; units are named such as {names}")
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"measured times: {pattern}={seconds} s; a time is a finite number above 0")
    times = [
        next((seconds for pattern, seconds in measured.items() if fnmatch.fnmatchcase(each.name, pattern)), None)
        for each in estimates
    ]
    pairs = [(seconds, each.compute) for seconds, each in zip(times, estimates, strict=True) if seconds is not None]
    known_flops = sum(flops for seconds, flops in pairs if flops)
    rest_flops = sum(each.compute for seconds, each in zip(times, estimates, strict=True) if seconds is None)
    if rest_flops and not known_flops:
        raise ConfigError("measured times: no unit with matrices is among them; measure a block, or every unit")
    # A lookup's time says nothing of how long a product takes.
    seconds_per_flop = sum(seconds for seconds, flops in pairs if flops) / known_flops if known_flops else 0.0
    return tuple(
        replace(each, compute=each.compute * seconds_per_flop if seconds is None else float(seconds))
        for seconds, each in zip(times, estimates, strict=True)
    )
