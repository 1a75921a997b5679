"""The tensor-parallel plan of a model says which modules are split and how. It is a pure value, equal on every rank.

`shardwise.tensor.hf_plans` makes plans from the model's own plan, from a user's table of patterns, or by tracing;
`shardwise.tensor.apply` carries them out; `param_splits` says how each parameter is split.

A feed-forward network of two matrices, the first split by its rows, the second by its columns:

>>> shapes = {"0.weight": (32, 8), "0.bias": (32,), "2.weight": (8, 32), "2.bias": (8,)}
>>> params = [ParamEntry(name, (), "root", shape, requires_grad=True) for name, shape in shapes.items()]
>>> plan = TensorPlan(layers=(LayerSplit("0", "column", (FusedPart(32),)), LayerSplit("2", "row", (FusedPart(32),))))
>>> splits = param_splits(params, plan, degree=2, sequence_parallel=False)
>>> {name: split.local_shape for name, split in splits.items()}
{'0.weight': (16, 8), '0.bias': (16,), '2.weight': (8, 16), '2.bias': (8,)}
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from shardwise.config.errors import ConfigError
from shardwise.layout.facts import FusedDim, ParamEntry
from shardwise.layout.tp_sharding import FusedPart, ParamSplit, check_divides

PROVED: Final = "proved in float64 over"  # as notes of proofs begin
LayerStyle = Literal["column", "row", "vocab", "head", "column-embedding"]


@dataclass(frozen=True)
class LayerSplit:
    """Describe how one module with a `weight`, and perhaps a `bias`, is split.

    Attributes:
        style: column: a linear layer by its outputs; row: by its inputs, outputs summed; vocab: an embedding by its
            rows, outputs summed; head: a linear layer to the vocabulary, whose logits stay split until something other
            than a cross entropy reads them; column-embedding: an embedding by its columns.
        parts: the logical tensors along the split dim.
        gathers_output: for a column layer: every rank gets the whole output.
        splits_input: for a row layer: its input arrives whole on every rank and is split first.
        is_transposed: the weight is [in, out], as in Hugging Face's Conv1D.
    """

    module: str
    style: LayerStyle
    parts: tuple[FusedPart, ...]
    gathers_output: bool = False
    splits_input: bool = False
    is_transposed: bool = False


@dataclass(frozen=True)
class SharedInput:
    """Name a module that reads some arguments through column layers only: one mapping serves all these layers.

    The mapping is the identity whose backward sums over the ranks (copy_to_tp). For an argument that arrives split
    under sequence parallelism, it is a gather whose backward is a reduce-scatter.

    Attributes:
        inputs: names of the mapped arguments; those in a sequence-parallel stack arrive split along dim 1.
        whole_inputs: names of mapped arguments that arrive whole in every case (an encoder's output).
    """

    module: str
    inputs: tuple[str, ...]
    whole_inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class SequenceStack:
    """Name consecutive blocks between which sequence parallelism keeps activations split along dim 1.

    Attributes:
        first: the module before whose forward `argument` is split.
        last: the module after whose forward the output, or the first tensor in it, is gathered.
        modules: names of the modules (blocks, final norm) within: their replicated parameters outside of regions see
            a part of the sequence, so their gradients are partial; their dropouts draw values for that part.
    """

    first: str
    argument: str
    last: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class SplitDropout:
    """Name a dropout on a split tensor.

    Attributes:
        module: a dropout module; or, with `is_functional`, a module whose forward calls dropout, or attention with
            dropout, on tensors whose dim `dim` is split.
        dim: the dim along which the tensor is split; it may be negative.
    """

    module: str
    dim: int
    is_functional: bool = False


@dataclass(frozen=True)
class TensorPlan:
    """Hold all splits of a model; see the module's example.

    Attributes:
        regions: where one mapping of the inputs serves several column layers.
        stacks: for sequence parallelism; none where the plan does not know any.
        partial: parameters that every rank holds whole but uses on its own part of the heads or features.
        after_rows: modules in regions that every rank holds whole and uses on the output of a row layer.
        attributes: (module, attribute, value on every rank), such as a number of heads that the model's code reads;
            where the value is a part, each rank has its first index.
        dropouts: on tensors that are split over ranks.
        notes: lines for the user, such as what was guessed.
    """

    layers: tuple[LayerSplit, ...] = ()
    regions: tuple[SharedInput, ...] = ()
    stacks: tuple[SequenceStack, ...] = ()
    partial: tuple[str, ...] = ()
    after_rows: tuple[str, ...] = ()
    attributes: tuple[tuple[str, str, int | FusedPart], ...] = ()
    dropouts: tuple[SplitDropout, ...] = ()
    notes: tuple[str, ...] = ()

    def attributes_of(self, rank: int, degree: int) -> list[tuple[str, str, int]]:
        """Return (module, attribute, value) on a rank of a tensor-parallel group of `degree` ranks."""
        return [
            (module, name, value.range_of(rank, degree)[0] if isinstance(value, FusedPart) else value)
            for module, name, value in self.attributes
        ]

    def __str__(self) -> str:
        """Return what is split, and the notes, in lines; equal blocks share a line."""
        return "\n".join(plan_lines(self))


@dataclass(frozen=True)
class ProvedPlan(TensorPlan):
    """Hold the plan of a small model that was proved, and what makes that of a large model of the same code.

    Attributes:
        source: a table, or None for the plan that a model brings; or the large model's `TensorPlan`.
    """

    source: Any = None


def kinds_of(plan: TensorPlan) -> set[tuple[str, ...]]:
    """Return what a plan says of each kind of modules, whatever their number and sizes."""
    layers = {
        (
            pattern(layer.module),
            layer.style,
            f"gathers_output={layer.gathers_output} splits_input={layer.splits_input}",
            *("features" if part.num_units is None else "units" for part in layer.parts),
        )
        for layer in plan.layers
    }
    regions = {(pattern(region.module), *region.inputs) for region in plan.regions}
    attributes = {(pattern(module), name) for module, name, _ in plan.attributes}
    stacks = {(pattern(f"{name}.x")[:-2], "stack", stack.argument) for stack in plan.stacks for name in stack.modules}
    return layers | regions | attributes | stacks | {(pattern(name),) for name in plan.partial}


@dataclass(frozen=True)
class TensorLayout:
    """Hold a plan with the split that it gives each parameter.

    Attributes:
        splits: the split of each parameter, by each of its names.
        sequence_parallel: whether the plan's stacks are split along the sequence.
    """

    plan: TensorPlan
    splits: Mapping[str, ParamSplit]
    degree: int
    sequence_parallel: bool

    @property
    def sequence_modules(self) -> tuple[str, ...]:
        """Return the names of the modules that are called with a part of the sequence on each rank."""
        return tuple(name for stack in self.plan.stacks for name in stack.modules) if self.sequence_parallel else ()


def param_splits(
    params: Sequence[ParamEntry], plan: TensorPlan, degree: int, sequence_parallel: bool
) -> dict[str, ParamSplit]:
    """Return how a model's parameters are split over the tp axis, by each of their names.

    Args:
        sequence_parallel: whether the plan's stacks are split along the sequence.

    Raises:
        ConfigError: units do not divide by `degree`, or tied parameters are split in two ways.
    """
    layers = {layer.module: layer for layer in plan.layers}
    splits: dict[str, ParamSplit] = {}
    for entry in params:
        names = (entry.name, *entry.aliases)
        found = {name: _split(plan, layers, name, entry.shape, degree, sequence_parallel) for name in names}
        # A module that only registers a parameter does not decide (BERT's head registers its decoder's bias).
        decide = {name for name in names if name in entry.layer_names or name.rpartition(".")[0] in layers}
        meant = {name: split for name, split in found.items() if name in decide} or found
        if len(set(meant.values())) > 1:
            ways = "; ".join(f"{name}: {_way(split)}" for name, split in meant.items())
            raise ConfigError(
                "tied-splits-differ",
                f"tied parameters are split in different ways ({ways}); give their modules one style",
            )
        splits.update(dict.fromkeys(names, next(iter(meant.values()))))
    return splits


def fused_by(plan: TensorPlan) -> dict[str, FusedDim]:
    """Return by name the weights that are several layers in one, as a plan knows them."""
    return {
        f"{layer.module}.weight": FusedDim(int(layer.is_transposed), tuple(part.size for part in layer.parts))
        for layer in plan.layers
        if layer.style == "column" and len(layer.parts) > 1
    }


def _split(
    plan: TensorPlan,
    layers: Mapping[str, LayerSplit],
    name: str,
    shape: tuple[int, ...],
    degree: int,
    sequence_parallel: bool,
) -> ParamSplit:
    module, _, own_name = name.rpartition(".")
    layer = layers.get(module)
    dim = None if layer is None else _split_dim(layer, own_name, name)
    if layer is not None and dim is not None:
        size = sum(part.size for part in layer.parts)
        if size != shape[dim]:
            raise ConfigError(
                "parts-fill-dim", f"the parts of {module} have {size} indices but dim {dim} of {name} {shape[dim]}"
            )
        for part in layer.parts:
            what = f"features of {module}" if part.num_units is None else f"units of {module}"
            part.check(degree, what)
            if layer.style == "row" and part.num_sharers(degree) > 1:  # the sum would count what they share twice
                check_divides(degree, part.size if part.num_units is None else part.num_units, what)
        return ParamSplit(shape, degree, dim, layer.parts)
    sees_part = sequence_parallel and _is_on_part_of_sequence(plan, module, is_row=layer is not None)
    return ParamSplit(shape, degree, is_partial=sees_part or name in plan.partial)


def _split_dim(layer: LayerSplit, own_name: str, name: str) -> int | None:
    """Return the dim along which a layer splits a parameter of its module; None where every rank holds all of it."""
    if own_name == "bias":
        return None if layer.style == "row" else 0
    if own_name != "weight":
        raise ConfigError(
            "layer-has-other-parameters",
            f"{name}: a {layer.style} layer has a weight and a bias only; leave {layer.module} whole",
        )
    by_inputs = layer.style in ("row", "column-embedding")
    return int(by_inputs != layer.is_transposed)


def _is_on_part_of_sequence(plan: TensorPlan, module: str, is_row: bool) -> bool:
    """Say whether a module applies its replicated parameters to this rank's part of the sequence only."""
    is_inside = any(is_within(module, stack.modules) for stack in plan.stacks)
    # A row layer adds its bias after the region that it ends.
    is_after_row = is_row or module in plan.after_rows
    return is_inside and (is_after_row or not is_within(module, [region.module for region in plan.regions]))


def is_within(module: str, roots: Iterable[str]) -> bool:
    """Say whether a module is one of `roots` or inside one, by name."""
    return any(not root or module == root or module.startswith(f"{root}.") for root in roots)


def _way(split: ParamSplit) -> str:
    if split.dim is None:
        return "a part of its gradient on each rank" if split.is_partial else "whole"
    return f"along dim {split.dim}"


def plan_lines(plan: TensorPlan) -> list[str]:
    """Return lines that say what a plan does, and its notes, each once."""
    lines = layer_lines(plan.layers)
    lines += [f"{pattern(name)}.{attribute} = {_shown(value)}" for name, attribute, value in plan.attributes]
    lines += [f"{pattern(name)}: gradients summed over the ranks" for name in plan.partial]
    lines += [f"{pattern(dropout.module)}: dropout drawn as of the whole tensor" for dropout in plan.dropouts]
    stacks = (", ".join(dict.fromkeys(pattern(f"{name}.x")[:-2] for name in stack.modules)) for stack in plan.stacks)
    lines += [f"{modules}: sequence split" for modules in stacks]
    return list(dict.fromkeys([*lines, *plan.notes]))


def _shown(value: int | FusedPart) -> str:
    return f"the first of a rank's part of {value.size}" if isinstance(value, FusedPart) else str(value)


def pattern(name: str) -> str:
    """Return a name with a star in place of the number of each block that contains the module."""
    *blocks, own = name.split(".")
    return ".".join([*("*" if block.isdigit() else block for block in blocks), own])


def _prefix(names: Sequence[str]) -> str:
    """Return the name of the module that holds all of them, with a dot at the end; empty where that is the model."""
    parts = [name.split(".")[:-1] for name in names]
    common = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return "".join(level[0] + "." for level in common)


def layer_lines(layers: Iterable[LayerSplit]) -> list[str]:
    """Describe layers in lines; column layers and the row layers after them share a line."""
    groups: list[list[LayerSplit]] = []
    for layer in layers:
        before = groups[-1][-1] if groups else layer
        meets_whole = any(state.gathers_output or state.splits_input for state in (before, layer))
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
