"""Find a plan for a model that has none, by tracing it once without memory.

A layer is left whole unless its split is shown to be right: a set of layers is split only where every path from its
columns ends in its rows, and where every tensor in a rehearsal of one rank's forward is that rank's share. The plan's
notes say what is split, and why other layers are not.

>>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
>>> plan = propose_plan(model, torch.zeros(2, 8), tp=2)
>>> print(plan)
0 by 32 features -> 2
proved in float64 over tp=2
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError
from shardwise.config.sections import Ranks
from shardwise.construction.scan import check_plain
from shardwise.layout.tensor_plan import (
    LayerSplit,
    SharedInput,
    TensorPlan,
    is_within,
    kinds_of,
    layer_lines,
    pattern,
)
from shardwise.layout.tp_sharding import FusedPart
from shardwise.runtime.batch_errors import refuse_misfit
from shardwise.tensor.autoplan.feature_groups import FlowAnalysis, LayerSet
from shardwise.tensor.autoplan.kinds import is_linear, is_lookup, is_transposed
from shardwise.tensor.autoplan.trace import ModelTrace, ModuleCall, TracedOp, record
from shardwise.tensor.plan_layout import check_provable, propose_fix, small_copy, warn, with_proof
from shardwise.tensor.plan_table import NO_TENSOR
from shardwise.tensor.thread_proof import NotProvedError, in_short, refute

Attributes = tuple[tuple[str, str, int], ...]

# Ops of failed rehearsals in the search for attributes from which code takes sizes: about 10 seconds. Ops are counted
# instead of time, so that all ranks propose the same plan however busy their machines are.
MAX_FAILED_OPS: Final = 10_000


@checked
def propose_plan(model: nn.Module, batch: Any, tp: Ranks, small: tuple[nn.Module, Any] | None = None) -> TensorPlan:
    """Find out how a model can be split over `tp` ranks, by running its forward once on tensors without memory.

    Args:
        model: of any device; neither it nor its values are touched.
        batch: an example of the model's arguments: a dict gives keyword arguments, a tuple or list positional ones,
            anything else is the one argument. Only shapes and dtypes of its tensors matter.
        small: a small model of the same code, with values, and its batch; by these the plan of a model of more than
            two million elements is proved.

    Raises:
        ConfigError: the model decides on the values of tensors, or nothing in it can be split; or a small model's
            outputs and gradients, computed in float64 by all ranks of the plan, are not those of the whole.
    """
    check_plain(model)
    with torch.device("cpu"):  # the caller's default may be another, such as meta
        try:
            plan = _propose(model, batch, tp)
        except Exception as error:
            refuse_misfit(error, model, batch)
            raise
        try:
            wrong = _refute(model, plan, batch, tp, small)
        except NotProvedError as error:
            warn(model, str(error), propose_fix(tp))
            return plan
        except Exception as error:  # any error of the model's code with split layers
            wrong = in_short(error)
    if wrong:
        raise ConfigError(
            "tp-plan-refuted",
            f"the plan that was found for tp={tp} is refuted: {wrong}; give a plan as a table, or {NO_TENSOR}",
        )
    return with_proof(plan, tp)


def _refute(model: nn.Module, plan: TensorPlan, batch: Any, tp: int, given: tuple[nn.Module, Any] | None) -> str:
    """Say what is wrong with a plan, run on the model itself or, if that is too large, on a small one."""
    try:
        check_provable(model, batch)
    except NotProvedError as error:
        degree, name = (tp, "small model") if given else (2, "tiny copy")
        try:
            small, small_batch = given or small_copy(model, tp)
            check_provable(small, small_batch)
            found = _propose(small, small_batch, degree)
        except Exception as other:
            why = other if isinstance(other, NotProvedError) else in_short(other)
            raise NotProvedError(f"{error}, and of a {name}: {why}") from other
        if kinds_of(found) != kinds_of(plan):
            raise NotProvedError(f"{error}, and its {name} is split otherwise") from error
        return refute(small, found, small_batch, degree)
    return refute(model, plan, batch, tp)


def _propose(model: nn.Module, batch: Any, tp: int) -> TensorPlan:
    trace = record(model, batch)
    tables = _Tables(model, trace)
    vocabulary, vocabulary_notes = _vocabulary(model, tables, tp)
    heads = {split.module for split in vocabulary}
    sizes = {
        name: tables.sizes[name]
        for name in tables.followable()
        if name not in heads and not is_within(name, trace.deciding)
    }
    analysis = FlowAnalysis(trace, sizes, tp)
    sets, attributes, dropped = _rehearsed(model, batch, analysis)
    left = [(name, dropped.get(each.columns, each.why_not)) for each in analysis.sets for name in each.columns]
    left += [(name, f"it decides on the values of tensors ({op})") for name, op in trace.deciding.items()]
    layers = [*(split for each in sets for split in _layer_splits(model, each)), *vocabulary]
    if not layers:
        whys = [why for name, why in left if why and name not in trace.deciding]
        reasons = "; ".join(dict.fromkeys([*_left_lines(each for each in left if each[0] in trace.deciding), *whys]))
        raise ConfigError(
            "tp-nothing-to-split",
            f"nothing in the model can be split over tp={tp} ranks ({reasons or 'it has no linear layers'}); "
            f"{'give a plan as a table, or ' if tables.linears else ''}{NO_TENSOR}",
        )
    split = {layer.module for layer in layers}
    left += [(name, "other code than its own reads its parameters") for name in tables.exposed()]
    notes = [*layer_lines(layers), *_left_lines([each for each in left if each[0] not in split and each[1]])]
    dropouts = [
        replace(each, is_functional=not isinstance(model.get_submodule(each.module), nn.Dropout))
        for layer_set in sets
        for each in layer_set.dropouts
    ]
    partial = tuple(sorted({name for each in sets for name in each.partial}))
    return TensorPlan(
        layers=tuple(layers),
        regions=tuple(_regions(tables, sets, set(partial))),
        partial=partial,
        attributes=attributes,
        dropouts=tuple(dict.fromkeys(dropouts)),
        notes=(*notes, *vocabulary_notes),
    )


class _Tables:
    """Records what a model's parameters are used for."""

    def __init__(self, model: nn.Module, trace: ModelTrace) -> None:
        self.trace = trace
        self.linears = {name: module for name, module in model.named_modules() if is_linear(module)}
        self.sizes = {name: _sizes(module) for name, module in self.linears.items()}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameters: dict[str, list[str]] = {}  # of a module, by the names in the trace
        self.owners: dict[str, list[str]] = {}  # of a parameter
        for name, module in model.named_modules():
            own = [names[id(each)] for each in module._parameters.values() if each is not None]
            self.parameters[name] = own
            for each in own:
                self.owners.setdefault(each, []).append(name)
        self.readers: dict[str, list[TracedOp]] = {}  # ops that take a parameter and are not its layer's own
        for op in trace.ops:
            for ref in op.inputs:
                if ref.index in trace.parameters:
                    self.readers.setdefault(trace.parameters[ref.index], []).append(op)
        self.runs = [op for op in trace.ops if op.name == "linear"]

    def is_exposed(self, name: str) -> bool:
        """Return whether other modules own or read a layer's parameters."""
        return any(self.owners[each] != [name] or each in self.readers for each in self.parameters[name])

    def followable(self) -> Iterator[str]:
        """Yield linear layers that run and whose parameters no other module uses."""
        ran = {op.module for op in self.runs}
        return (name for name in self.linears if name in ran and not self.is_exposed(name))

    def exposed(self) -> Iterator[str]:
        """Yield linear layers whose parameters other modules use too."""
        return (name for name in self.linears if self.is_exposed(name))


def _sizes(module: nn.Module) -> tuple[int, int]:
    weight = module.get_parameter("weight")
    num_in, num_out = weight.shape if is_transposed(module) else weight.shape[::-1]
    return num_in, num_out


def _vocabulary(model: nn.Module, tables: _Tables, tp: int) -> tuple[list[LayerSplit], list[str]]:
    """Return splits of token embeddings by rows and of the layers that make logits, with notes on those left whole."""
    splits: list[LayerSplit] = []
    notes: list[str] = []
    tokens = _from_batch(tables.trace)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or module.num_embeddings < max(tp, 2 * module.embedding_dim):
            continue
        weight = tables.parameters[name][0] if tables.parameters[name] else ""
        tied = [each for each in tables.owners.get(weight, ()) if each != name]
        readers = tables.readers.get(weight, [])
        if is_within(name, tables.trace.deciding):
            continue
        is_own = all(op.name == "embedding" and op.module == name for op in readers) and len(readers) > 0
        is_plain = is_lookup(module) and module.max_norm is None and not module.sparse
        if not is_own or not is_plain or not all(op.inputs[1].index in tokens for op in readers):
            continue
        heads = _heads(tables, tied, module, tp)
        if {each.module for each in heads} >= set(tied):
            part = FusedPart(module.num_embeddings, is_padded=True)
            splits += [LayerSplit(name, "vocab", (part,)), *heads]
        else:
            notes.append(f"{pattern(name)} whole: {', '.join(tied)} uses its weight too")
    return list(dict.fromkeys(splits)), notes


def _heads(tables: _Tables, tied: Sequence[str], embedding: nn.Embedding, tp: int) -> list[LayerSplit]:
    """Return splits of the layers to the vocabulary: those tied to its embedding, and the last one of its size."""
    outputs = {ref.index for ref in tables.trace.outputs}
    part = FusedPart(embedding.num_embeddings, is_padded=True)
    heads = []
    for name in dict.fromkeys([*tied, *(op.module for op in tables.runs[-1:])]):
        runs = [op for op in tables.runs if op.module == name]
        is_wide = bool(runs) and tables.sizes[name][1] == embedding.num_embeddings
        if not is_wide or is_transposed(tables.linears[name]):
            continue
        # A tied weight is checked with the embedding; a bias may have other owners, if they never read it.
        weight, *bias = tables.parameters[name]
        is_own = name in tied or (tables.owners[weight] == [name] and weight not in tables.readers)
        others = {each for key in bias for each in tables.owners[key]} & set(tables.linears) - {name}
        if not is_own or others or any(key in tables.readers for key in bias):
            continue
        if all(op.outputs[0].index in outputs for op in runs):
            heads.append(LayerSplit(name, "head", (part,)))
        elif embedding.num_embeddings % tp == 0:
            heads.append(LayerSplit(name, "column", (part,), gathers_output=True))
    return heads


def _from_batch(trace: ModelTrace) -> set[int]:
    """Return the tensors that are the batch's own, at most moved."""
    found = set(trace.batch)
    for op in trace.ops:
        if op.name in _MOVES and op.inputs[0].index in found:
            found.update(ref.index for ref in op.outputs)
    return found


_MOVES: Final = ("view", "slice", "clone", "_to_copy", "alias", "detach", "expand")


def _rehearsed(
    model: nn.Module, batch: Any, analysis: FlowAnalysis
) -> tuple[list[LayerSet], Attributes, dict[tuple[str, ...], str]]:
    """Return the sets with which a rank's forward is right, the attributes it needs, and why other sets are dropped."""
    dropped: dict[tuple[str, ...], str] = {}
    sets = [each for each in analysis.sets if not each.why_not]
    if not sets or not analysis.rehearse(model, batch, sets, ()):
        return sets, (), dropped
    kinds: dict[tuple[str, ...], list[LayerSet]] = {}
    for each in sets:
        kinds.setdefault(tuple(pattern(name) for name in each.columns), []).append(each)
    kept: list[tuple[list[LayerSet], Attributes]] = []
    for kind in kinds.values():
        chosen, wrong = _find_attributes(model, batch, analysis, kind)
        if chosen is None:
            dropped.update((each.columns, f"on a rank's share, {wrong}") for each in kind)
        else:
            kept.append((kind, chosen))
    while kept and (wrong := _clash(kept, sets) or analysis.rehearse(model, batch, *_together(kept))):
        dropped.update((each.columns, wrong) for each in kept.pop()[0])
    return *_together(kept), dropped


def _find_attributes(
    model: nn.Module, batch: Any, analysis: FlowAnalysis, kind: list[LayerSet]
) -> tuple[Attributes | None, str]:
    """Return the attributes with which one kind of layers is right, or None and the error without any."""
    first = ""
    for chosen in _attribute_choices(model, analysis, kind):
        if analysis.num_failed_ops > MAX_FAILED_OPS:
            tried = first or "nothing was tried"
            return None, f"{tried}, and the time to look for attributes that make it work is over"
        wrong = analysis.rehearse(model, batch, kind, chosen)
        if not wrong:
            return chosen, ""
        first = first or wrong
    return None, first


def _together(kept: Sequence[tuple[list[LayerSet], Attributes]]) -> tuple[list[LayerSet], Attributes]:
    return [each for kind, _ in kept for each in kind], tuple(each for _, chosen in kept for each in chosen)


def _clash(kept: Sequence[tuple[list[LayerSet], Attributes]], sets: Sequence[LayerSet]) -> str:
    """Name a parameter that one set uses on its split tensors and a dropped set uses whole, as a reason; else empty."""
    chosen = _together(kept)[0]
    partial = {name for each in chosen for name in each.partial}
    whole = {name for each in sets if each not in chosen for name in each.partial}
    return f"{min(partial & whole)} is used elsewhere too" if partial & whole else ""


def _attribute_choices(model: nn.Module, analysis: FlowAnalysis, kind: Sequence[LayerSet]) -> Iterator[Attributes]:
    """Yield sets of integer attributes, set to a rank's values, of modules whose forward uses the layers' outputs."""
    found: dict[tuple[str, str], list[tuple[str, str, int]]] = {}
    for name, sizes in analysis.split_sizes(kind).items():
        module = model.get_submodule(name)
        if is_linear(module):
            continue
        for attribute, value in vars(module).items():
            if type(value) is int and value in sizes and value % analysis.tp == 0:
                key = (pattern(f"{name}.{attribute}"), attribute)
                found.setdefault(key, []).append((name, attribute, value // analysis.tp))
    for number in range(len(found) + 1):
        for chosen in itertools.combinations(found.values(), number):
            yield tuple(itertools.chain.from_iterable(chosen))


def _layer_splits(model: nn.Module, layers: LayerSet) -> Iterator[LayerSplit]:
    for name in layers.columns:
        yield LayerSplit(name, "column", layers.parts[name], is_transposed=is_transposed(model.get_submodule(name)))
    for name in layers.rows:
        yield LayerSplit(name, "row", layers.parts[name], is_transposed=is_transposed(model.get_submodule(name)))


def _regions(tables: _Tables, sets: Sequence[LayerSet], partial: Set[str]) -> Iterator[SharedInput]:
    """Yield modules that read an argument through several columns, and whose other parameters all come after these.

    Any other parameter in the module, such as cross-attention's query weight, would get a rank's part of its gradient.
    """
    rows = {name for each in sets for name in each.rows}
    for layers in sets:
        read: dict[tuple[int, ...], list[str]] = {}
        for name in layers.columns:
            inputs = [call.arguments for call in tables.trace.calls if call.module == name]
            read.setdefault(tuple(ref.index for each in inputs for ref in each.values()), []).append(name)
        for columns in read.values():
            region = _region(tables.trace, columns) if len(columns) > 1 else None
            after = {*columns, *rows}
            if region is not None and all(
                module in after or partial >= set(own)
                for module, own in tables.parameters.items()
                if is_within(module, (region.module,))
            ):
                yield region


def _region(trace: ModelTrace, columns: Sequence[str]) -> SharedInput | None:
    paths = [name.split(".")[:-1] for name in columns]
    for depth in range(min(map(len, paths)), 0, -1):
        name = ".".join(paths[0][:depth])
        if any(path[:depth] != paths[0][:depth] for path in paths):
            continue
        arguments = {_argument(trace, columns, call) for call in trace.calls if call.module == name}
        if len(arguments) == 1 and (argument := arguments.pop()):
            return SharedInput(name, (argument,))
    return None


def _argument(trace: ModelTrace, columns: Sequence[str], call: ModuleCall) -> str:
    """Return the name of the argument that only the columns read in one call of a module; empty where there is none."""
    inside = trace.ops[call.start : call.stop]
    for name, ref in call.arguments.items():
        readers = {op.module for op in inside if ref in op.inputs}
        is_once = list(call.arguments.values()).count(ref) == 1 and ref not in call.outputs
        if readers == set(columns) and is_once:
            return name
    return ""


def _left_lines(left: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines that say which modules are left whole, and why."""
    lines = [f"{pattern(name)} whole: {why}" for name, why in left]
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", line) for line in lines))
