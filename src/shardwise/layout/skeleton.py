"""The model's skeleton: names, shapes and blocks of an `nn.Module`, read without touching storage (meta tensors will
do).

A unit is a module whose parameters are communicated together: a transformer block. What belongs to no block, or to
several (tied weights), is the root unit's.

>>> import torch.nn as nn
>>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
>>> find_units(model, None)
('0', '1')
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from shardwise.config import ConfigError, PrecisionConfig
from shardwise.layout.precision import buffer_dtype

ROOT: Final = "root"
_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class ParamEntry:
    """One parameter: its first fully qualified name, its other names where it is tied, its unit and its shape."""

    name: str
    aliases: tuple[str, ...]
    unit: str
    shape: tuple[int, ...]
    requires_grad: bool
    is_wide: bool = False  # see `wide_parameters`


def find_units(model: nn.Module, patterns: Sequence[str] | None, key: str = "zero.blocks") -> tuple[str, ...]:
    """Names of the modules that form units, in module order.

    Args:
        model: any module; its storage is not read.
        patterns: class names or name patterns (`blocks.*`) of the blocks; None takes the children with parameters of
            the outermost `ModuleList`s and `Sequential`s.
        key: of the config, that the patterns come from.

    Raises:
        ConfigError: a pattern matches no module, or a block lies inside another.
    """
    if patterns is None:
        return tuple(_children_of_containers(model, prefix=""))
    names: tuple[str, ...] = ()
    for name, module in model.named_modules():
        found = [pattern for pattern in patterns if name and _matches(name, module, (pattern,))]
        above = [each for each in names if name.startswith(each + ".")]
        # Of what one pattern matches, the outermost: `blocks.*` are the blocks, not what is in them.
        if any(not any(_matches(each, model.get_submodule(each), (pattern,)) for each in above) for pattern in found):
            names += (name,)
    for pattern in patterns:
        if not any(_matches(name, model.get_submodule(name), (pattern,)) for name in names):
            kinds = sorted({type(module).__name__ for module in model.modules()})
            raise ConfigError(f"{key}={pattern!r} matches no module; classes in this model: {', '.join(kinds)}")
    for name in names:
        for other in names:
            if name.startswith(other + "."):
                raise ConfigError(f"{key}: block {name} lies inside block {other}; name only one of the two")
    return names


def wide_parameters(model: nn.Module, config: PrecisionConfig) -> frozenset[str]:
    """Return the names of the parameters that stay in fp32 although `precision.param` is narrower.

    They are those that a Hugging Face model lists: `_keep_in_fp32_modules_strict`, and under fp16, whose range is
    small, `_keep_in_fp32_modules` too, as `from_pretrained` reads them; and those of a batch norm whose statistics are
    in fp32, because torch takes a narrow weight beside narrow statistics only.
    """
    if config.param not in ("bf16", "fp16"):
        return frozenset()
    lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if config.param == "fp16" else [])]
    found: set[str] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        patterns = [pattern.replace("*", ".*") for key in lists for pattern in getattr(module, key, None) or ()]
        if isinstance(module, _BATCH_NORMS) and module.running_mean is not None:
            patterns += [""] if buffer_dtype(module.running_mean.dtype, config) is torch.float32 else []
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)] if patterns else []
        kept = (name for name in names if any(re.search(pattern, name) for pattern in patterns))
        found.update(f"{prefix}.{name}" if prefix else name for name in kept)
    return frozenset(found)


def read_parameters(model: nn.Module, units: Sequence[str], wide: Set[str] = frozenset()) -> tuple[ParamEntry, ...]:
    """Every parameter once, in module order, each with the one unit that holds all its names (else the root).

    Args:
        model: any module.
        units: the blocks.
        wide: names of parameters that stay in fp32.

    Raises:
        ConfigError: a parameter is not of a floating dtype.
    """
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.layout is not torch.strided:
            raise ConfigError(f"parameter {name} is {parameter.layout} but shards are dense; use its to_dense()")
        if not parameter.is_floating_point():
            cure = "keep its torch.view_as_real" if parameter.is_complex() else "register it as a buffer"
            raise ConfigError(f"parameter {name} is {parameter.dtype} but shards are floating; {cure}")
    parameter_of: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
        parameter_of[id(parameter)] = parameter
    _refuse_shared_storage(parameter_of.values(), names_of)
    unit_of_module = {id(model.get_submodule(unit)): unit for unit in units}
    return tuple(
        ParamEntry(
            name=names[0],
            aliases=tuple(names[1:]),
            unit=_common_unit(names, model, unit_of_module),
            shape=tuple(parameter_of[key].shape),
            requires_grad=parameter_of[key].requires_grad,
            is_wide=not wide.isdisjoint(names),
        )
        for key, names in names_of.items()
    )


def _refuse_shared_storage(parameters: Iterable[nn.Parameter], names_of: Mapping[int, Sequence[str]]) -> None:
    """Two parameters over one storage would be trained apart; those of other classes may have no address."""
    name_at: dict[tuple[str, int], str] = {}
    for parameter in parameters:
        name = names_of[id(parameter)][0]
        if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.numel() == 0:
            continue
        place = (str(parameter.device), parameter.data_ptr())
        if place in name_at:
            raise ConfigError(
                f"parameters {name_at[place]} and {name} are two over one memory, so they would be trained apart; tie "
                "them by assigning the one to the other's module"
            )
        name_at[place] = name


def _children_of_containers(module: nn.Module, prefix: str) -> Iterator[str]:
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        if is_container and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield prefix + name
        else:
            yield from _children_of_containers(child, f"{prefix}{name}.")


def _matches(name: str, module: nn.Module, patterns: Sequence[str]) -> bool:
    return any(type(module).__name__ == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _common_unit(names: Sequence[str], model: nn.Module, unit_of_module: Mapping[int, str]) -> str:
    """The unit that holds all names; by identity, since a block may stand in its container twice."""
    owners = {_owner(name, model, unit_of_module) for name in names}
    return owners.pop() if len(owners) == 1 else ROOT


def _owner(name: str, model: nn.Module, unit_of_module: Mapping[int, str]) -> str:
    module = model
    for part in name.split(".")[:-1]:
        module = module.get_submodule(part)
        if id(module) in unit_of_module:
            return unit_of_module[id(module)]
    return ROOT
