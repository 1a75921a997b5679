"""Find where a pipeline may cut a model: list its modules in the order in which a forward runs them, each once.

A unit is one module, or several that always stay together. A cut after a unit is possible where the later modules need
only the unit's output and the model's inputs. That shows only when the model runs, so the units are found by the names
and lists that nearly all models use.

>>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 8, bias=False))
>>> model[3].weight = model[0].weight
>>> for unit in find_stage_units(model):
...     print(unit.name, [entry.name for entry in unit.params])
0 ['0.weight']
1 ['1.weight', '1.bias']
2 []
3 ['0.weight']
"""

from __future__ import annotations

import ast
import fnmatch
import inspect
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from shardwise.config.resolve import ConfigError
from shardwise.layout.param_groups import ParamEntry, find_units, read_parameters

# Some models register what they run last before their blocks (OPT's final_layer_norm and project_out), or what they run
# first after them (BART's layernorm_embedding).
_RUNS_LAST: Final = re.compile(r"(^|_)(final|head|out|f)(_|$)")
_RUNS_FIRST: Final = re.compile(r"(^|_)embed(ding|dings)?(_|$)")
_LIBRARIES: Final = (nn.Module.__module__, "transformers.modeling_utils")  # whose methods run no child by name
_FIX: Final = "name it in pipeline.replicate, so that every stage runs it, or name the units in pipeline.units"


@dataclass(frozen=True)
class StageUnit:
    """Hold modules that are always in one pipeline stage.

    Attributes:
        name: name of its first module.
        modules: fully qualified names, one for each name that a module has; a module without parameters (rotary
            tables, a dropout beside the blocks) may be in no unit: all stages run it.
        params: every parameter that its modules use, tied ones too, under the first name that each has in the model.
        is_cut_allowed_before: whether a stage may begin with it.
    """

    name: str
    modules: tuple[str, ...]
    params: tuple[ParamEntry, ...]
    is_cut_allowed_before: bool


@dataclass(frozen=True)
class _Chain:
    """Hold modules that run one after the other, each with the output of the one before it."""

    names: tuple[str, ...]
    begins_with_embedding: bool = False


def find_stage_units(
    model: nn.Module, patterns: Sequence[str] | None = None, replicate: Sequence[str] = ()
) -> tuple[StageUnit, ...]:
    """Find the units of a model in the order in which they run. The first source in this list that exists decides:

    1. `patterns`.
    2. The `base_model_pp_plan` of a Hugging Face model's config: embedding, layers, norm.
    3. Every entry of an `nn.Sequential`, and so of a `shardwise.LayerList`.
    4. The longest list of blocks of one class, in an encoder-decoder the encoder's.

    Modules with parameters that are registered before those, or after them, are the first and the last units, unless
    their names say that they run elsewhere (`embed` first; `final`, `head` and `out` last). Where several run before
    the blocks (token and position embeddings), they stay with the first block. After the blocks a cut is allowed
    before the first module, and after it if it is a norm: a head may need more than a pooler returns.

    Args:
        model: any module; its storage is not read.
        patterns: class names or name patterns (`blocks.*`) of the modules between which cuts are allowed.
        replicate: class names or name patterns of modules that are in no unit: every stage holds and runs them.

    Raises:
        ConfigError: there are no blocks, or a pattern matches nothing.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chain = _find_chain(model, modules, patterns)
    _refuse_repeats(chain, modules)
    replicated = find_units(model, replicate, key="pipeline.replicate")
    before, after = _split_outside(modules, chain.names, replicated)
    num_glued = _num_glued(before, chain, modules)
    groups = [(tuple(before), True)] if before else []
    groups += [((name,), index >= num_glued) for index, name in enumerate(chain.names)]
    for index, name in enumerate(after):
        is_allowed = index == 0 or (index == 1 and "norm" in type(modules[after[0]]).__name__.lower())
        groups.append(((name,), is_allowed))
    params = _share_out(model, [names for names, _ in groups])
    return tuple(
        StageUnit(names[0], names, used, is_allowed) for (names, is_allowed), used in zip(groups, params, strict=True)
    )


def _find_chain(model: nn.Module, modules: Mapping[str, nn.Module], patterns: Sequence[str] | None) -> _Chain:
    if patterns is not None:
        names = find_units(model, patterns, key="pipeline.units")
        if not names:
            raise ConfigError(
                "no-units-named", "pipeline.units=[] names no module; leave it out, or name those between which to cut"
            )
        return _Chain(names)
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


def _planned_chain(modules: Mapping[str, nn.Module]) -> _Chain | None:
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


def _outermost_lists(modules: Mapping[str, nn.Module]) -> list[tuple[str, ...]]:
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


def _run_children(parent: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the children of a list; a list inside it is never called itself, so its children stand for it."""
    for name in _children(parent, modules):
        if isinstance(modules[name], nn.ModuleList):
            yield from _run_children(name, modules)
        else:
            yield name


def _refuse_repeats(chain: _Chain, modules: Mapping[str, nn.Module]) -> None:
    count = Counter(id(modules[name]) for name in chain.names if _has_parameters(modules[name]))
    repeated = [name for name in chain.names if count[id(modules[name])] > 1]
    if repeated:
        raise ConfigError(
            "unit-repeated",
            f"{repeated[0]} and {repeated[1]} are one module, but a pipeline runs each of its units once a forward; "
            "make them two modules that share parameters (shardwise.LayerSpec with tied)",
        )


def _split_outside(
    modules: Mapping[str, nn.Module], chain: Sequence[str], replicated: Collection[str]
) -> tuple[list[str], list[str]]:
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


def _place_beside(name: str, first: str, modules: Mapping[str, nn.Module], is_registered_before: bool) -> float:
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


def _num_glued(before: Sequence[str], chain: _Chain, modules: Mapping[str, nn.Module]) -> int:
    """Count the chain's first units that stay with what is before it: they need more than one output of it."""
    if not before:
        return 0
    if chain.begins_with_embedding:
        return 2  # what the other modules compute (image features) is merged into what the embedding returns
    return 0 if len({frozenset(map(id, modules[name].parameters())) for name in before}) == 1 else 1


def _share_out(model: nn.Module, groups: Sequence[tuple[str, ...]]) -> list[tuple[ParamEntry, ...]]:
    """Return every group's parameters, in the model's order; a tied one is in every group that has one of its names.

    A parameter that is in no group's module is used by code that every stage runs, so it is in all groups.
    """
    group_of = {name: index for index, names in enumerate(groups) for name in names}
    shared_out: list[list[ParamEntry]] = [[] for _ in groups]
    for entry in read_parameters(model, ()):
        users = set()
        for name in (entry.name, *entry.aliases):
            owner = next((each for each in _ancestors(name) if each in group_of), None)
            users |= set(range(len(groups)) if owner is None else [group_of[owner]])
        for index in users:
            shared_out[index].append(replace(entry, unit=groups[index][0]))
    return [tuple(entries) for entries in shared_out]


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _children(parent: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the direct children, one that is registered twice included."""
    start = f"{parent}." if parent else ""
    return [name for name in modules if name and name.startswith(start) and "." not in name[len(start) :]]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


@dataclass(frozen=True)
class UnitCost:
    """Hold the cost of a unit.

    Attributes:
        name: name of the unit.
        compute: forward FLOPs a token, or seconds; only shares of the sum over all units count.
        memory_bytes: bytes of its parameters, gradients and optimizer states.
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
    """Estimate costs by the units' parameters: 2 FLOPs a token and element of each matrix in a product.

    That is a matrix product's cost (Kaplan et al. 2020, arXiv 2001.08361, table 1). A tied matrix costs time in the
    unit that multiplies by it, and memory in every unit that uses it. Experts count by the share of them that a token
    is sent to. Costs that parameters do not show are left out: activations, and the scores of attention, which grow
    with the sequence.

    Args:
        model: the model of the units; its storage is not read.
        units: as `find_stage_units` returns them.
        bytes_per_element: of a parameter with its gradient and optimizer states, on one rank; a number or a function.
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
    """Return the share of a block's experts that a token is sent to, by the Hugging Face config; 1 without one."""
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
            raise ConfigError(
                "no-unit-matches", f"measured times: {pattern!r} matches no unit; units are named such as {names}"
            )
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(
                "measured-time-range", f"measured times: {pattern}={seconds} s; a time is a finite number above 0"
            )
    times = [
        next((seconds for pattern, seconds in measured.items() if fnmatch.fnmatchcase(each.name, pattern)), None)
        for each in estimates
    ]
    pairs = [(seconds, each.compute) for seconds, each in zip(times, estimates, strict=True) if seconds is not None]
    known_flops = sum(flops for seconds, flops in pairs if flops)
    unmeasured_flops = sum(each.compute for seconds, each in zip(times, estimates, strict=True) if seconds is None)
    if unmeasured_flops and not known_flops:
        raise ConfigError(
            "measured-no-matrices",
            "measured times: no unit with matrices is among them; measure a block, or every unit",
        )
    # The time of an embedding lookup does not show how long a product takes.
    seconds_per_flop = sum(seconds for seconds, flops in pairs if flops) / known_flops if known_flops else 0.0
    return tuple(
        replace(each, compute=each.compute * seconds_per_flop if seconds is None else float(seconds))
        for seconds, each in zip(times, estimates, strict=True)
    )
