"""Offer marks of leaf modules, which DeepSpeed gathers whole: `_z3_leaf` is a module's, and is read by scripts alone.

Nothing follows from a mark here. A block is a unit, which is gathered together, whatever of it a rank runs; and ranks
that run different blocks are kept in step by `zero.lockstep`, which the drop-in sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch import nn

from shardwise.compat.deepspeed.utils import logger

_LEAF: Final = "_z3_leaf"
_OF_PARAMETER: Final = "ds_z3_leaf_module"


def z3_leaf_module(model: nn.Module) -> bool:
    """Say whether a module is marked."""
    return bool(getattr(model, _LEAF, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Say whether a parameter is of a module that is marked."""
    return getattr(model, _OF_PARAMETER, None) is not None


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take its mark away."""
    model.__dict__[_LEAF] = flag
    for parameter in model.parameters():
        parameter.__dict__[_OF_PARAMETER] = model if flag else None


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of some classes, or of classes with these names; the arguments are those of DeepSpeed.

    Raises:
        ValueError: there is none.
    """
    return _mark(model, list(leaf_module_classes), True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks of these modules away, and return the modules; the arguments are those of DeepSpeed."""
    return _mark(model, list(leaf_module_classes), False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their dotted names; return them, and the names that no module has.

    The arguments are those of DeepSpeed.

    Raises:
        ValueError: a name is no module's.
    """
    return _by_name(model, list(module_names), lambda name, wanted: name == wanted, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their dotted names, as above; the arguments are those of DeepSpeed."""
    return _by_name(model, list(module_name_suffixes), str.endswith, flag, raise_if_not_found)


def set_by_section(model: nn.Module, section: Mapping[str, Any]) -> None:
    """Mark the modules that the JSON's section `leaf_module` names; say a word of names that fit no module."""
    wanted = {key: [value] if isinstance(value, str) else list(value) for key, value in section.items()}
    classes = wanted.get("classes", [])
    names = {name for module in _mark(model, classes, True, False) for name in _names_of(type(module))}
    missing = [name for name in classes if name not in names]
    missing += set_z3_leaf_modules_by_name(model, wanted.get("names", []), True, False)[1]
    missing += set_z3_leaf_modules_by_suffix(model, wanted.get("name_suffixes", []), True, False)[1]
    if missing:
        logger.warning("zero_optimization.leaf_module: the model has no modules %s", missing)


def _mark(model: nn.Module, kinds: list[Any], flag: bool, raises: bool) -> list[nn.Module]:
    names, classes = (
        {wanted_kind for wanted_kind in kinds if isinstance(wanted_kind, str)},
        tuple(k for k in kinds if isinstance(k, type)),
    )
    modules = [module for module in model.modules() if isinstance(module, classes) or _names_of(type(module)) & names]
    if raises and not modules:
        raise ValueError(f"{type(model).__name__} has no modules of {kinds}; pass raise_if_not_found=False for none")
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules


def _by_name(
    model: nn.Module, wanted: list[str], matches: Callable[[str, str], bool], flag: bool, raises: bool
) -> tuple[list[nn.Module], list[str]]:
    named = dict(model.named_modules())
    matching = {name: module for name, module in named.items() if any(matches(name, pattern) for pattern in wanted)}
    missing = [pattern for pattern in wanted if not any(matches(name, pattern) for name in named)]
    if raises and missing:
        raise ValueError(f"{type(model).__name__} has no modules {missing}; pass raise_if_not_found=False for none")
    for module in matching.values():
        set_z3_leaf_module(module, flag)
    return list(matching.values()), missing


def _names_of(kind: type) -> set[str]:
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
