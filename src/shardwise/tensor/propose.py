"""Propose a plan for a model that has none: shapes and order of its layers propose, numbers decide.

Linear layers that feed a common layer, and those that they feed, are a set: columns and rows, such as query, key and
value before the output of attention. The first block that has such a set runs whole, and as ranks would run it; outputs
and gradients are compared (`shardwise.tensor.prove`). What fails is altered: how fused outputs lie, sizes that the code
takes from attributes, parameters whose gradients are sums. If nothing helps, the layers stay whole. In the end the
whole model proves the whole plan.

>>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
>>> plan = propose_plan(model, torch.zeros(2, 8), tp=2)
>>> print(plan)
0 by 32 features -> 2
proved in float64 over tp=2
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError
from shardwise.config.sections import Ranks
from shardwise.construction.scan import check_plain
from shardwise.dropout.still import StillFunctions
from shardwise.layout.tensor_plan import (
    LayerSplit,
    SharedInput,
    SplitDropout,
    TensorPlan,
    is_within,
    kinds_of,
    layer_lines,
    pattern,
)
from shardwise.layout.tp_sharding import FusedPart
from shardwise.runtime.batch_errors import refuse_misfit
from shardwise.runtime.torch_private import is_fake, pytree
from shardwise.tensor.kinds import is_linear, is_lookup, is_transposed
from shardwise.tensor.observe import Observation
from shardwise.tensor.plan_layout import MAX_ELEMENTS, check_provable, propose_fix, small_copy, with_proof
from shardwise.tensor.plan_table import NO_TENSOR
from shardwise.tensor.prove import (
    Difference,
    NotProvedError,
    WholeRun,
    in_float64,
    in_short,
    proving,
    refute,
    split_dropouts,
)

# Trials of one set of layers, of some milliseconds each. They are counted, and no time is taken, so that all ranks
# propose the same plan however busy their machines are.
MAX_TRIES: Final = 60


@checked
def propose_plan(model: nn.Module, batch: Any, tp: Ranks, small: tuple[nn.Module, Any] | None = None) -> TensorPlan:
    """Find out how a model can be split over `tp` ranks, by running it whole and split in this process.

    Args:
        model: of any device; neither it nor its values are touched.
        batch: an example of the model's arguments: a dict gives keyword arguments, a tuple or list positional ones,
            anything else is the one argument.
        small: a small model of the same code, with values, and its batch: what they prove is proposed for a model of
            more than two million elements. A Hugging Face model needs none: its config says how a small one is made.

    Raises:
        ConfigError: the model decides on the values of tensors, or nothing in it can be split, or it is too large and
            there is no small one, or it does not run, or it is not split as the small one is.
    """
    check_plain(model)
    with torch.device("cpu"):  # the caller's default may be another, such as meta
        try:
            return _proposed(model, batch, tp, small)
        except NotProvedError as error:
            raise ConfigError(
                "tp-plan-unproved",
                f"no plan for tp={tp} is proved: {error}; {propose_fix(tp)}, for a small model of the kind, or give a "
                f"plan as a table, or {NO_TENSOR}",
            ) from error
        except Exception as error:
            refuse_misfit(error, model, batch)
            raise


def _proposed(model: nn.Module, batch: Any, tp: int, given: tuple[nn.Module, Any] | None) -> TensorPlan:
    with proving():
        source, source_batch, degree = _provable(model, batch, tp, given)
        search = _Search(*in_float64(source, source_batch), degree)
        sets = search.sets()
    found = search.proved(sets, source, source_batch)
    plan = search.plan(found, model, tp)
    if source is not model and kinds_of(plan) != kinds_of(search.plan(found, source, degree)):
        raise NotProvedError("its small model is split otherwise")
    return with_proof(plan, tp)


def _provable(model: nn.Module, batch: Any, tp: int, given: tuple[nn.Module, Any] | None) -> tuple[nn.Module, Any, int]:
    """Return a model that can be run, its batch, and over how many ranks it is split: the model, or a small one."""
    tensors = [*model.parameters(), *model.buffers()]
    if sum(tensor.numel() for tensor in tensors) <= MAX_ELEMENTS:
        missing = {id(tensor): _with_values(tensor) for tensor in tensors if _has_none(tensor)}
        batch = pytree.tree_map(lambda leaf: _with_values(leaf) if isinstance(leaf, Tensor) else leaf, batch)
        return (copy.deepcopy(model, missing) if missing else model), batch, tp
    try:
        if given:
            check_provable(*given)
            return *given, tp
        return *small_copy(model, tp), 2
    except Exception as error:  # any error of foreign code, at sizes that it was not made for
        why = error if isinstance(error, NotProvedError) else in_short(error)
        raise NotProvedError(
            f"the model has more than {MAX_ELEMENTS:,} elements, and of its {'small' if given else 'tiny'} copy: {why}"
        ) from error


def _has_none(tensor: Tensor) -> bool:
    return tensor.is_meta or is_fake(tensor)


def _with_values(tensor: Tensor) -> Tensor:
    """Return a tensor with values: random ones in place of none, or of zeros, which would hide what code does."""
    is_float = tensor.is_floating_point()
    if not _has_none(tensor) and not (is_float and tensor.numel() and not bool(tensor.abs().max() > _SMALL)):
        return tensor
    make = torch.rand if is_float else torch.zeros  # buffers such as a variance are positive
    found = make(tensor.shape, dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(found - 0.5 if is_float else found, tensor.requires_grad)
    return found


_SMALL: Final = 1e-6  # what is not more may be the memory of an `empty` tensor


class _Linear(NamedTuple):
    """Holds the sizes of a linear layer."""

    num_in: int
    num_out: int
    is_transposed: bool


Linears = Mapping[str, _Linear]


def _linears(model: nn.Module) -> Linears:
    found = {}
    for name, module in model.named_modules():
        if is_linear(module):
            num_rows, num_columns = module.get_parameter("weight").shape
            is_turned = is_transposed(module)
            sizes = (num_rows, num_columns) if is_turned else (num_columns, num_rows)
            found[name] = _Linear(*sizes, is_turned)
    return found


@dataclass(frozen=True)
class _BlockSet:
    """Says how layers of one block are split together; those of the same names in other blocks are split as they are.

    Attributes:
        columns: names, and how the logical tensors in their outputs lie, as in `_part_sizes`.
        attributes: modules and names of integers of which a rank has its share.
    """

    columns: tuple[tuple[str, str], ...]
    rows: tuple[str, ...]
    attributes: tuple[tuple[str, str], ...] = ()
    regions: tuple[SharedInput, ...] = ()
    partial: tuple[str, ...] = ()
    dropouts: tuple[SplitDropout, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        return (*(name for name, _ in self.columns), *self.rows)

    def plans(self, model: nn.Module, linears: Linears, tp: int) -> Iterator[TensorPlan]:
        """Yield the plan of each block that has these layers, where tp divides them."""
        first = self.layers[0]
        for name in linears:
            if pattern(name) == pattern(first):
                plan = self.plan(model, linears, tp, _renamer(first, name))
                if plan is not None:
                    yield plan

    def plan(self, model: nn.Module, linears: Linears, tp: int, named: Callable[[str], str] = str) -> TensorPlan | None:
        """Return the plan of the block whose names `named` gives; None where it lacks a layer, or tp does not fit."""
        if not all(named(name) in linears for name in self.layers):
            return None
        features = linears[named(self.rows[0])].num_in
        layers = []
        for name, layout in self.columns:
            parts = tuple(map(FusedPart, _part_sizes(layout, linears[named(name)].num_out, features)))
            layers.append(LayerSplit(named(name), "column", parts, is_transposed=linears[named(name)].is_transposed))
        for name in self.rows:
            parts = (FusedPart(features),)
            layers.append(LayerSplit(named(name), "row", parts, is_transposed=linears[named(name)].is_transposed))
        values = [(named(name), key) for name, key in self.attributes]
        numbers = [getattr(model.get_submodule(name), key, 1) for name, key in values]
        if any(size % tp for size in (*numbers, *(part.size for layer in layers for part in layer.parts))):
            return None
        return TensorPlan(
            tuple(layers),
            regions=tuple(replace(region, module=named(region.module)) for region in self.regions),
            partial=tuple(map(named, self.partial)),
            attributes=tuple((*value, number // tp) for value, number in zip(values, numbers, strict=True)),
            dropouts=tuple(replace(dropout, module=named(dropout.module)) for dropout in self.dropouts),
        )


@dataclass(frozen=True)
class _VocabularySet:
    """Names an embedding of tokens, and the layers to the vocabulary that go with it: whether each is gathered."""

    embedding: str
    heads: tuple[tuple[str, bool], ...]

    @property
    def layers(self) -> tuple[str, ...]:
        return self.embedding, *(name for name, _ in self.heads)

    def plans(self, model: nn.Module, linears: Linears, tp: int) -> Iterator[TensorPlan]:
        """Yield the plan."""
        parts = (FusedPart(model.get_parameter(f"{self.embedding}.weight").shape[0], is_padded=True),)
        heads = [
            LayerSplit(name, "column" if is_gathered else "head", parts, gathers_output=is_gathered)
            for name, is_gathered in self.heads
        ]
        yield TensorPlan((LayerSplit(self.embedding, "vocab", parts), *heads))


Sets = Sequence[_BlockSet | _VocabularySet]


def _renamer(first: str, other: str) -> Callable[[str], str]:
    """Return what makes the names in a block that has `other` of those in a block that has `first`."""
    pairs = list(zip(first.split("."), other.split("."), strict=True))

    def rename(name: str) -> str:
        parts = name.split(".")
        for place, (old, new) in enumerate(pairs[: len(parts)]):
            if parts[place] != old:
                break
            parts[place] = new
        return ".".join(parts)

    return rename


def _part_sizes(layout: str, size: int, features: int) -> tuple[int, ...]:
    """Return the sizes of the logical tensors in `size` outputs: a number of equal ones, or query, key and value."""
    if layout == "qkv":
        return features, (size - features) // 2, (size - features) // 2
    return (size // int(layout),) * int(layout)


def _layouts(sizes: Mapping[str, int], features: int) -> Iterator[tuple[str, ...]]:
    """Yield how `sizes` outputs of columns may lie before rows of `features` inputs, the likely way first.

    Of many columns, those of one size are the same.
    """
    keys = {name: (size, name if len(sizes) == 2 else "") for name, size in sizes.items()}
    ways: dict[tuple[int, str], tuple[str, ...]] = {}
    for key in keys.values():
        size, num = key[0], [*keys.values()].count(key)
        if size <= features:  # keys and values of fewer heads, or both in one
            ways[key] = ("1", "2") if num == 1 < len(sizes) else ("1",)
        elif size % features == 0:
            ways[key] = (str(size // features), "1")
        else:
            ways[key] = ("qkv", "1") if (size - features) % 2 == 0 else ("1",)
    for chosen in itertools.product(*ways.values()):
        way = dict(zip(ways, chosen, strict=True))
        yield tuple(way[key] for key in keys.values())


def _connected(feeders: Mapping[str, Collection[str]]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return columns with their rows: layers that feed a common layer, and those that they feed."""
    sets: list[tuple[set[str], set[str]]] = []
    for row, columns in feeders.items():
        joined = [each for each in sets if each[0] & set(columns)]
        sets = [each for each in sets if each not in joined]
        if columns:
            sets.append((set(columns).union(*(each[0] for each in joined)), {row}.union(*(each[1] for each in joined))))
    place = list(feeders).index
    found = [(tuple(sorted(columns, key=place)), tuple(sorted(rows, key=place))) for columns, rows in sets]
    return sorted(found, key=lambda each: place(each[0][0]))


class _Search:
    """Finds the sets of layers of a model in float64 that `tp` ranks can split.

    Raises:
        ConfigError: the model decides on the values of tensors.
        NotProvedError: it does not run.
    """

    def __init__(self, model: nn.Module, batch: Any, tp: int) -> None:
        self._model, self._batch, self._tp = model, batch, tp
        self._linears = _linears(model)
        self._seen = Observation(model, batch)
        self._called = [name for name in self._seen.calls if name in self._linears]
        self._whole = {name: f"it decides on the values of tensors ({op})" for name, op in self._seen.deciding.items()}
        self._runs: dict[str, WholeRun | str] = {"": WholeRun(model, batch)}  # by block, or why it cannot be run

    def sets(self) -> Sets:
        """Return the sets that are right on their own, each in its first block."""
        vocabulary = list(self._vocabulary())
        taken = {name for each in vocabulary for name in each.layers}
        taken |= {name for name in self._called if is_within(name, self._seen.deciding)}
        known: dict[tuple[str, ...], _BlockSet | None] = {}
        # Wide layers come first: what is narrow may be an adapter, which is split as the layer beside it is.
        found = _connected({name: self._seen.feeders(name, self._called) for name in self._called})
        for columns, rows in sorted(found, key=lambda each: -self._linears[each[1][0]].num_in):
            layers = (*columns, *rows)
            named = _renamer(layers[0], pattern(layers[0]))
            key = tuple(f"{named(name)} {self._linears[name]}" for name in layers)
            if not taken.isdisjoint(layers):
                continue
            if key not in known:
                known[key], why = self._first_right(columns, rows)
                self._whole |= dict.fromkeys(layers, why) if why else {}
            taken.update(layers if known[key] else ())
        return [*(each for each in known.values() if each), *vocabulary]

    def _vocabulary(self) -> Iterator[_VocabularySet]:
        """Yield token embeddings, each with the layers that are tied to it and the last one of its size."""
        for name, module in self._model.named_modules():
            call = self._seen.calls.get(name)
            if call is None or not isinstance(module, nn.Embedding) or not is_lookup(module):
                continue
            size = module.num_embeddings
            is_plain = module.max_norm is None and not module.sparse and self._seen.is_of_batch(call.first)
            is_large = size >= max(self._tp, 2 * module.embedding_dim)
            if not (is_plain and is_large) or is_within(name, self._seen.deciding):
                continue
            weights = {each: other._parameters.get("weight") for each, other in self._model.named_modules()}
            tied = {each for each, weight in weights.items() if weight is module.weight} - {name}
            fitting = [
                each
                for each in dict.fromkeys([*sorted(tied & {*self._called}), *self._called[-1:]])
                if self._linears[each].num_out == size and not self._linears[each].is_transposed
            ]
            heads = {each: not self._seen.is_returned(each) for each in fitting}
            if tied <= {*heads} and (size % self._tp == 0 or not any(heads[each] for each in tied)):
                kept = {
                    each: is_gathered for each, is_gathered in heads.items() if not is_gathered or size % self._tp == 0
                }
                yield _VocabularySet(name, tuple(kept.items()))
            else:
                self._whole[name] = f"{', '.join(sorted(tied))} uses its weight too"

    def _first_right(self, columns: tuple[str, ...], rows: tuple[str, ...]) -> tuple[_BlockSet | None, str]:
        """Return how layers are split together; or None, and why the likely way is wrong."""
        widths = {self._linears[name].num_in for name in rows}
        if set(columns) & set(rows) or len(widths) > 1:
            return None, "it reads outputs of layers beside it"
        if self._seen.feeders("", self._called) & set(columns):
            return None, "other code than linear layers reads its outputs"
        (features,), first = widths, ""
        attributes = self._attributes((*columns, *rows), features)
        waiting = [
            (_BlockSet(tuple(zip(columns, layouts, strict=True)), rows), "")
            for layouts in _layouts({name: self._linears[name].num_out for name in columns}, features)
        ]
        seen = {each for each, _ in waiting}
        for _ in range(MAX_TRIES):
            if not waiting:
                break
            tried, before = waiting.pop(0)
            found = self._tried(tried)
            if isinstance(found, _BlockSet):
                return found, ""
            first = first or found
            if found != before:  # an attribute was of use where something else goes wrong with it
                larger = {tuple(sorted({*tried.attributes, each})) for each in attributes} - {tried.attributes}
                more = [replace(tried, attributes=each) for each in sorted(larger)]
                waiting += [(each, found) for each in more if each not in seen]
                seen.update(more)
        return None, first

    def _attributes(self, layers: Sequence[str], features: int) -> list[tuple[str, str]]:
        """Return attributes of the modules around layers that may be numbers of heads or features."""
        around = {name.rpartition(".")[0] for name in layers} | {self._scope(layers)}
        widths = {self._linears[name].num_out for name in layers}
        found = []
        for name, module in self._model.named_modules():
            is_inner = is_within(name, around) and not any(is_within(linear, (name,)) for linear in self._linears)
            if (name in around or is_inner) and not type(module).__module__.startswith("torch.nn"):
                found += [
                    (name, key)
                    for key, value in vars(module).items()
                    if type(value) is int and value > 1 and value % self._tp == 0
                    if features % value == 0 or value in widths
                ]
        return found

    def _scope(self, names: Sequence[str]) -> str:
        """Return the innermost module around others that is called."""
        scope = names[0].rpartition(".")[0]
        while scope and (scope not in self._seen.calls or not all(is_within(name, (scope,)) for name in names)):
            scope = scope.rpartition(".")[0]
        return scope

    def _run(self, scope: str) -> WholeRun | str:
        """Return the run of a block whole, or why there is none."""
        if scope not in self._runs:
            try:
                self._runs[scope] = WholeRun(self._seen.block(self._model, self._batch, scope), ())
            except Exception as error:  # any error of code that is run in part
                self._runs[scope] = in_short(error)
        return self._runs[scope]

    def _tried(self, tried: _BlockSet) -> _BlockSet | str:
        """Return how layers are split, with all that goes with it, or why they cannot be split so."""
        run = self._run(scope := self._scope(tried.layers))
        if isinstance(run, str):
            return run

        def compare(each: _BlockSet, whole: WholeRun = run) -> Difference:
            plan = each.plan(self._model, self._linears, self._tp)
            try:
                return whole.compare(plan, self._tp) if plan else Difference(f"tp={self._tp} does not divide it")
            except Exception as error:  # any error of the model's code with split layers
                return Difference(in_short(error))

        found = compare(tried)
        if found.summed and not any(name.startswith("call_inputs.") for name in found.summed):
            tried = replace(tried, partial=tuple(sorted(found.summed)))
            found = compare(tried)
        if found.wrong:
            return found.wrong
        for regions in self._regions(tried, scope):
            better = (replace(tried, regions=(*tried.regions, region)) for region in regions)
            tried = next((each for each in better if not compare(each).wrong), tried)
        try:
            training = copy.deepcopy(run.source).train()
            with StillFunctions():
                whole = WholeRun(training, run.batch)
                found = compare(tried, whole)
            dropouts = split_dropouts(whole.dropped, found.dropped)
        except Exception as error:
            return f"in training mode {in_short(error)}"
        return f"in training mode {found.wrong}" if found.wrong else replace(tried, dropouts=dropouts)

    def _regions(self, tried: _BlockSet, scope: str) -> Iterator[list[SharedInput]]:
        """Yield the modules that get as an argument the tensor that several columns read, inner ones first.

        Of a module with other parameters the engine would have to know which of them come after the rows.
        """
        groups: dict[int, list[str]] = {}
        for name, _ in tried.columns:
            groups.setdefault(id(self._seen.calls[name].first), []).append(name)
        others = [
            name
            for name, _ in self._model.named_parameters(remove_duplicate=False)
            if name not in tried.partial and name.rpartition(".")[0] not in tried.layers
        ]
        for names in groups.values():
            yield [
                SharedInput(around, (key,))
                for around, call in reversed(self._seen.calls.items())
                if around and len(names) > 1 and is_within(around, (scope,))
                if all(is_within(name, (around,)) for name in names)
                and not any(is_within(name, (around,)) for name in others)
                for key, x in call.arguments.items()
                if x is self._seen.calls[names[0]].first
            ]

    def plan(self, sets: Sets, model: nn.Module, tp: int) -> TensorPlan:
        """Return the plan by which sets are split in all blocks of the model, or of a larger one of the same code."""
        linears = _linears(model)
        deciding = {pattern(f"{name}.x")[:-2] for name in self._seen.deciding}
        taken: set[str] = set()
        plans: list[TensorPlan] = []
        for each in sorted(sets, key=lambda each: isinstance(each, _BlockSet)):
            for plan in each.plans(model, linears, tp):
                names = {layer.module for layer in plan.layers}
                if taken.isdisjoint(names) and not any(is_within(pattern(name), deciding) for name in names):
                    plans.append(plan)
                    taken |= names
        place = {name: number for number, name in enumerate(linears)}
        plans.sort(key=lambda plan: (plan.layers[0].style != "column", place.get(plan.layers[0].module, 0)))
        whole = {name: "no other layers fit" for name in linears if not is_within(name, self._seen.deciding)}
        lines = [f"{pattern(name)} whole: {why}" for name, why in (whole | self._whole).items() if name not in taken]
        fields = ("layers", "regions", "partial", "attributes", "dropouts")
        joined = {key: tuple(itertools.chain(*(getattr(plan, key) for plan in plans))) for key in fields}
        left = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", line) for line in lines)
        return TensorPlan(**joined, notes=(*layer_lines(joined["layers"]), *left))

    def proved(self, sets: Sets, model: nn.Module, batch: Any) -> Sets:
        """Return the sets that are right together, in all blocks of the model as it was given.

        Raises:
            ConfigError: there is none.
            NotProvedError: the model does not run.
        """

        def refuted(sets: Sets) -> str:
            try:
                return refute(model, self.plan(sets, model, self._tp), batch, self._tp)
            except NotProvedError:
                raise
            except Exception as error:  # any error of the model's code with split layers
                return in_short(error)

        kept: Sets = sets
        if sets and refuted(sets):
            kept = []
            for each in sets:
                wrong = refuted([*kept, each])
                kept = kept if wrong else [*kept, each]
                self._whole |= dict.fromkeys(each.layers, wrong) if wrong else {}
        if not kept:
            reasons = "; ".join(self.plan([], model, self._tp).notes) or "it has no linear layers"
            raise ConfigError(
                "tp-nothing-to-split",
                f"nothing in the model can be split over tp={self._tp} ranks ({reasons}); "
                f"{'give a plan as a table, or ' if self._linears else ''}{NO_TENSOR}",
            )
        return kept
