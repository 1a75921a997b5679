"""A plan of tensor parallelism in lines, equal blocks as one: what `print(plan)` shows.

>>> from shardwise.layout.splits import Part
>>> from shardwise.layout.tensor_plan import LayerSplit, SequenceStack, TensorPlan
>>> layers = [LayerSplit(f"blocks.{i}.{name}", style, (Part(32),)) for i in (0, 1) for name, style in
...           (("up", "column"), ("down", "row"))]
>>> print(TensorPlan(tuple(layers), stacks=(SequenceStack("blocks.0", "x", "norm", ("blocks.0", "blocks.1", "norm")),)))
blocks.*: up by 32 features -> down
blocks.*, norm: sequence split
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from shardwise.layout.splits import Part

if TYPE_CHECKING:
    from shardwise.layout.tensor_plan import LayerSplit, TensorPlan


def plan_lines(plan: TensorPlan) -> list[str]:
    """What a plan does, and its notes, each once."""
    lines = layer_lines(plan.layers)
    lines += [f"{pattern(name)}.{attribute} = {_shown(value)}" for name, attribute, value in plan.attributes]
    lines += [f"{pattern(name)}: gradients summed over the ranks" for name in plan.partial]
    lines += [f"{pattern(each.module)}: dropout drawn as of the whole tensor" for each in plan.dropouts]
    stacks = (", ".join(dict.fromkeys(pattern(f"{name}.x")[:-2] for name in stack.modules)) for stack in plan.stacks)
    lines += [f"{modules}: sequence split" for modules in stacks]
    return list(dict.fromkeys([*lines, *plan.notes]))


def _shown(value: int | Part) -> str:
    return f"the first of a rank's part of {value.size}" if isinstance(value, Part) else str(value)


def pattern(name: str) -> str:
    """A name with a star for the number of each block that the module lies in."""
    *blocks, own = name.split(".")
    return ".".join([*("*" if part.isdigit() else part for part in blocks), own])


def _prefix(names: Sequence[str]) -> str:
    """The module that holds all of them, with a dot behind it; empty where that is the model."""
    parts = [name.split(".")[:-1] for name in names]
    common = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return "".join(level[0] + "." for level in common)


def layer_lines(layers: Iterable[LayerSplit]) -> list[str]:
    """Columns and the rows behind them in a line."""
    groups: list[list[LayerSplit]] = []
    for layer in layers:
        before = groups[-1][-1] if groups else layer
        meets_whole = any(each.gathers_output or each.splits_input for each in (before, layer))
        if groups and (before.style, layer.style) in _IN_ONE_LINE and not meets_whole:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return list(dict.fromkeys(map(_line, groups)))


_IN_ONE_LINE: Final = (("column", "column"), ("column", "row"), ("row", "row"))


def _line(group: Sequence[LayerSplit]) -> str:
    prefix = pattern(_prefix([layer.module for layer in group]) + "x")[:-1] if len(group) > 1 else ""
    columns = [pattern(layer.module)[len(prefix) :] for layer in group if layer.style != "row"]
    rows = [pattern(layer.module)[len(prefix) :] for layer in group if layer.style == "row"]
    first = group[0]
    part = first.parts[0]
    what = "tokens" if first.style in ("vocab", "head") else "features"
    units = f"{part.num_units} heads" if part.num_units else f"{part.size} {what}"
    place = f"{prefix[:-1]}: " if prefix else ""
    if not (columns and rows):
        style: str = "columns, output gathered" if first.gathers_output else first.style
        style = "rows, input split" if first.splits_input else style
        return f"{place}{', '.join(columns + rows)}: {style} by {units}"
    return f"{place}{', '.join(columns)} by {units} -> {', '.join(rows)}"
