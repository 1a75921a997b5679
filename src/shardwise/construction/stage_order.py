"""Find where a pipeline may cut a model: list its modules in the order in which a forward runs them, each once.

A unit is one module, or several that always stay together. A cut after a unit is possible where the later modules need
only the unit's output and the model's inputs. That shows only when the model runs, so the units are found by the names
and lists that nearly all models use.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from shardwise.config.errors import ConfigError
from shardwise.config.model_files import CHOICE_NAMES, EXPERT_NAMES
from shardwise.layout.facts import ParamEntry, StageUnit

Modules = Mapping[str, nn.Module]
"""A model's modules by each of their fully qualified names, in module order; the model itself is the first."""

# Some models register what they run last before their blocks (OPT's final_layer_norm and project_out), or what they run
# first after them (BART's layernorm_embedding).
_RUNS_LAST: Final = re.compile(r"(^|_)(final|head|out|f)(_|$)")
_RUNS_FIRST: Final = re.compile(r"(^|_)embed(ding|dings)?(_|$)")
_LIBRARIES: Final = (nn.Module.__module__, "transformers.modeling_utils")  # whose methods run no child by name
_FIX: Final = "name it in pipeline.replicate, so that every stage runs it, or name the units in pipeline.units"


@dataclass(frozen=True)
class _Chain:
    """Hold modules that run one after the other, each with the output of the one before it."""

    names: tuple[str, ...]
    begins_with_embedding: bool = False


def find_stage_units(
    modules: Modules, params: Sequence[ParamEntry], named: Sequence[str] | None, replicated: Sequence[str]
) -> tuple[StageUnit, ...]:
    """Find the units of a model in the order in which they run. The first source in this list that exists decides:

    1. The modules that `pipeline.units` names.
    2. The `base_model_pp_plan` of a Hugging Face model's config: embedding, layers, norm.
    3. Every entry of an `nn.Sequential`, and so of a `shardwise.LayerList`.
    4. The longest list of blocks of one class, in an encoder-decoder the encoder's.

    Modules with parameters that are registered before those, or after them, are the first and the last units, unless
    their names say that they run elsewhere (`embed` first; `final`, `head` and `out` last). Where several run before
    the blocks (token and position embeddings), they stay with the first block. After the blocks a cut is allowed
    before the first module, and after it if it is a norm: a head may need more than a pooler returns.

    Args:
        modules: by each of their names, the model first; their storage is not read.
        named: the modules between which the user allows cuts; None to find them.
        replicated: modules that are in no unit: every stage holds and runs them.

    Raises:
        ConfigError: there are no blocks, or modules stand where no stage runs them.
    """
    chain = _find_chain(modules, named)
    _refuse_repeats(chain, modules)
    before, after = _split_outside(modules, chain.names, replicated)
    num_glued = _num_glued(before, chain, modules)
    groups = [(tuple(before), True)] if before else []
    groups += [((name,), index >= num_glued) for index, name in enumerate(chain.names)]
    for index, name in enumerate(after):
        is_allowed = index == 0 or (index == 1 and "norm" in type(modules[after[0]]).__name__.lower())
        groups.append(((name,), is_allowed))
    names = [names for names, _ in groups]
    shared_out, flops = _share_out(params, names), _matrix_flops(modules, names)
    return tuple(
        StageUnit(names[0], names, used, is_allowed, products)
        for (names, is_allowed), used, products in zip(groups, shared_out, flops, strict=True)
    )


def _find_chain(modules: Modules, named: Sequence[str] | None) -> _Chain:
    model = modules[""]
    if named is not None:
        if not named:
            raise ConfigError(
                "no-units-named", "pipeline.units=[] names no module; leave it out, or name those between which to cut"
            )
        return _Chain(tuple(named))
    planned = _planned_chain(modules)
    if planned is not None:
        return planned
    if isinstance(model, nn.Sequential):
        return _Chain(tuple(_children("", modules)))
    lists = _outermost_lists(modules)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        # All blocks of a decoder need the encoder's output; the encoder's blocks need nothing of the decoder.
        lists = [names for names in lists if "encoder" in names[0].split(".")] or lists
    if not lists:
        raise ConfigError(
            "no-block-list",
            f"{type(model).__name__} has no ModuleList or Sequential of like blocks to be cut between; name the "
            "modules it runs one after the other in pipeline.units, or build it as a shardwise.LayerList",
        )
    return _Chain(max(lists, key=len))


def _planned_chain(modules: Modules) -> _Chain | None:
    """Return the modules that a Hugging Face config's pipeline plan lists, None without a plan that fits."""
    for prefix, module in modules.items():
        plan = getattr(getattr(module, "config", None), "base_model_pp_plan", None)
        if not plan or not all(hasattr(module, key) for key in plan):
            continue
        names: list[str] = []
        for key in plan:
            name = f"{prefix}.{key}" if prefix else key
            if isinstance(modules.get(name), nn.ModuleList):
                names += _children(name, modules)
            elif name in modules:
                names.append(name)
        return _Chain(
            tuple(names), begins_with_embedding=not isinstance(getattr(module, next(iter(plan))), nn.ModuleList)
        )
    return None


def _outermost_lists(modules: Modules) -> list[tuple[str, ...]]:
    """Return the children of each outermost list; if lists with blocks of one class exist, only of those."""
    last = None
    of_one_kind: list[tuple[str, ...]] = []
    others: list[tuple[str, ...]] = []
    for name, module in modules.items():
        if last is not None and name.startswith(last + "."):
            continue
        if isinstance(module, nn.ModuleList | nn.Sequential):
            last = name
            names = tuple(_run_children(name, modules))
            kinds = {type(modules[child]) for child in names if _has_parameters(modules[child])}
            if kinds:
                (others if len(kinds) > 1 else of_one_kind).append(names)
    return of_one_kind or [names for names in others if len(names) > 1]


def _run_children(parent: str, modules: Modules) -> Iterator[str]:
    """Yield the children of a list; a list inside it is never called itself, so its children stand for it."""
    for name in _children(parent, modules):
        if isinstance(modules[name], nn.ModuleList):
            yield from _run_children(name, modules)
        else:
            yield name


def _refuse_repeats(chain: _Chain, modules: Modules) -> None:
    count = Counter(id(modules[name]) for name in chain.names if _has_parameters(modules[name]))
    repeated = [name for name in chain.names if count[id(modules[name])] > 1]
    if repeated:
        raise ConfigError(
            "unit-repeated",
            f"{repeated[0]} and {repeated[1]} are one module, but a pipeline runs each of its units once a forward; "
            "make them two modules that share parameters (shardwise.LayerSpec with tied)",
        )


def _split_outside(modules: Modules, chain: Sequence[str], replicated: Collection[str]) -> tuple[list[str], list[str]]:
    """Split the outermost modules with parameters outside the chain into those before it and those after it."""
    in_chain = set(chain)
    above = {name[:end] for name in chain for end in [0, *(found.start() for found in re.finditer(r"\.", name))]}
    outside: list[tuple[float, str]] = []  # below 0: before the chain
    left_out: set[str] = set()
    num_passed = 0
    inside = None
    for name, module in modules.items():
        if (inside is not None and name.startswith(inside + ".")) or (name in above and name not in in_chain):
            continue
        inside = name
        if name in in_chain:
            num_passed += 1
        elif name in replicated:
            left_out.add(name)
        elif not _has_parameters(module):
            continue
        elif 0 < num_passed < len(chain):
            raise ConfigError(
                "module-between-units",
                f"module {name} has parameters and stands between the units of the pipeline, but is none; {_FIX}",
            )
        else:
            outside.append((_place_beside(name, chain[0], modules, num_passed == 0), name))
    for name in replicated:
        if name not in left_out:
            raise ConfigError(
                "replicate-in-units",
                f"pipeline.replicate: {name} is one of the pipeline's blocks, or holds or is inside a unit of it; name "
                f"modules beside the blocks, such as {', '.join(sorted(left_out) or [each for _, each in outside])}",
            )
    outside.sort(key=lambda each: each[0])
    return [name for place, name in outside if place < 0], [name for place, name in outside if place >= 0]


def _place_beside(name: str, first: str, modules: Modules, is_registered_before: bool) -> float:
    """Return a number that says when a module runs: below 0 if before the chain, which begins with `first`.

    For a module next to the chain's own list, the code that runs both decides; otherwise the module's name and where it
    is registered.
    """
    path, other = name.split("."), first.split(".")
    depth = next(index for index, pair in enumerate(zip(path, other, strict=False)) if pair[0] != pair[1])
    if isinstance(modules[".".join(other[: depth + 1])], nn.ModuleList | nn.Sequential):
        owner = depth
        while owner and type(modules[".".join(path[:owner])]).forward is nn.Module.forward:
            owner -= 1  # a container of modules, which the code of its owner runs
        order = _order_in_code(modules[".".join(path[:owner])], {path[depth], other[depth]})
        if len(order) > 1:
            return (order[path[depth]] - order[other[depth]]) / max(order.values())
    if _RUNS_LAST.search(path[-1]):
        return 1.0
    return -1.0 if is_registered_before or _RUNS_FIRST.search(path[-1]) else 1.0


def _order_in_code(module: nn.Module, wanted: Collection[str]) -> dict[str, int]:
    """Return the position at which a module's forward, or a method it calls, first uses each wanted attribute."""
    found: dict[str, int] = {}
    for place, name in enumerate(_names_in_code(module)):
        if name in wanted:
            found.setdefault(name, place)
            if len(found) == len(wanted):
                break
    return found


def _names_in_code(module: nn.Module) -> Iterator[str]:
    functions: set[Any] = set()

    def read(function: Any) -> Iterator[str]:
        accessed: Any = function.fget if isinstance(function, property) else function
        function = inspect.unwrap(accessed)
        if inspect.isfunction(function) and function not in functions and function.__module__ not in _LIBRARIES:
            functions.add(function)
            with suppress(OSError, SyntaxError):  # no source is available
                yield from walk(ast.parse(textwrap.dedent(inspect.getsource(function))))

    def walk(node: ast.AST) -> Iterator[str]:
        parts = list(ast.iter_child_nodes(node))
        # Arguments, what is assigned and what is looped over are computed first.
        for part in (
            parts[1:] + parts[:1] if isinstance(node, ast.Call | ast.Assign | ast.For | ast.ListComp) else parts
        ):
            yield from walk(part)
        if isinstance(node, ast.Attribute):
            for kind in type(module).__mro__:
                if node.attr in vars(kind):
                    yield from read(vars(kind)[node.attr])
            yield node.attr

    return read(type(module).forward)


def _num_glued(before: Sequence[str], chain: _Chain, modules: Modules) -> int:
    """Count the chain's first units that stay with what is before it: they need more than one output of it."""
    if not before:
        return 0
    if chain.begins_with_embedding:
        return 2  # what the other modules compute (image features) is merged into what the embedding returns
    return 0 if len({frozenset(map(id, modules[name].parameters())) for name in before}) == 1 else 1


def _share_out(params: Sequence[ParamEntry], groups: Sequence[tuple[str, ...]]) -> list[tuple[ParamEntry, ...]]:
    """Return every group's parameters, in the model's order; a tied one is in every group that has one of its names.

    A parameter that is in no group's module is used by code that every stage runs, so it is in all groups.
    """
    group_of = {name: index for index, names in enumerate(groups) for name in names}
    shared_out: list[list[ParamEntry]] = [[] for _ in groups]
    for entry in params:
        users = set()
        for name in (entry.name, *entry.aliases):
            owner = next((ancestor for ancestor in _ancestors(name) if ancestor in group_of), None)
            users |= set(range(len(groups)) if owner is None else [group_of[owner]])
        for index in users:
            shared_out[index].append(replace(entry, unit=groups[index][0]))
    return [tuple(entries) for entries in shared_out]


def _matrix_flops(modules: Modules, groups: Sequence[tuple[str, ...]]) -> list[float]:
    """Return for each group of modules 2 FLOPs an element of each matrix in a product, experts by their share."""
    group_of = {name: index for index, names in enumerate(groups) for name in names}
    share_of_experts = _share_of_experts(modules[""])
    flops, counted = [0.0 for _ in groups], set()
    for name, module in modules.items():
        index = next((group_of[each] for each in (name, *_ancestors(name)) if each in group_of), None)
        if index is None or (index, id(module)) in counted:
            continue
        counted.add((index, id(module)))  # a module under two names is run once
        if isinstance(module, nn.EmbeddingBag) or type(module).__name__.endswith("Embedding"):
            continue
        share = share_of_experts if "experts" in name.split(".") else 1.0
        flops[index] += sum(2.0 * each.numel() * share for each in module.parameters(recurse=False) if each.dim() > 1)
    return flops


def _share_of_experts(model: nn.Module) -> float:
    """Return the share of a block's experts that a token is sent to, by the Hugging Face config; 1 without one."""
    config = getattr(model, "config", None)
    sizes = ([getattr(config, name, None) for name in names] for names in (EXPERT_NAMES, CHOICE_NAMES))
    total, chosen = (next((size for size in named if isinstance(size, int)), 0) for named in sizes)
    return min(1.0, chosen / total) if total and chosen else 1.0


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _children(parent: str, modules: Modules) -> list[str]:
    """Return the names of the direct children, one that is registered twice included."""
    start = f"{parent}." if parent else ""
    return [name for name in modules if name and name.startswith(start) and "." not in name[len(start) :]]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
