"""Find sets of linear layers that can be split together, in units that stay whole, and rehearse one rank's share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.layout.tensor_plan import SplitDropout
from shardwise.layout.tp_sharding import FusedPart
from shardwise.runtime.torch_private import pytree, quiet_fakes, unseen_by_op_modes
from shardwise.tensor.autoplan.feature_flow import FeatureFlow, LayerFeatures, components, follow
from shardwise.tensor.autoplan.kinds import is_transposed
from shardwise.tensor.autoplan.trace import ModelTrace, TracedOp, record


@dataclass(frozen=True)
class LayerSet:
    """Names linear layers that are split together: `columns` by their outputs, `rows` by their inputs.

    Attributes:
        columns: names, in the order in which they run, as are `rows`.
        parts: of every layer along its split dim.
        num_units: number of units, which can be on different ranks.
        dropouts: on tensors between columns and rows.
        partial: parameters that are used between them.
        why_not: why they cannot be split; empty where they can.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    parts: Mapping[str, tuple[FusedPart, ...]] = field(default_factory=dict)
    num_units: int = 1
    dropouts: tuple[SplitDropout, ...] = ()
    partial: frozenset[str] = frozenset()
    why_not: str = ""


class FlowAnalysis:
    """Follows the labels of a trace, and finds sets of layers that can be split.

    Args:
        sizes: numbers of inputs and outputs of the linear layers whose features are followed, by name.
    """

    def __init__(self, trace: ModelTrace, sizes: Mapping[str, tuple[int, int]], tp: int) -> None:
        self.trace, self.tp = trace, tp
        self.features: dict[str, LayerFeatures] = {}
        num_labels = 0
        for name, (num_in, num_out) in sizes.items():
            middle, end = num_labels + num_in, num_labels + num_in + num_out
            self.features[name] = LayerFeatures(torch.arange(num_labels, middle), torch.arange(middle, end))
            num_labels = end
        self.flow: FeatureFlow = follow(trace, self.features)
        self._units = components(num_labels, self.flow.joined)
        vectors = [each for layer in self.features.values() for each in (layer.inputs, layer.outputs)]
        stars = [(each[:1].expand_as(each), each) for each in vectors]
        self._roots = components(num_labels, [*self.flow.joined, *stars])
        self._place = torch.zeros(num_labels, dtype=torch.int64)  # of a unit, by its component, in its set
        self.sets = self._find_sets()
        self.num_failed_ops = 0

    def _root(self, labels: Tensor) -> int:
        return int(self._roots[labels.flatten()[0]])

    def _find_sets(self) -> list[LayerSet]:
        order = list(dict.fromkeys(op.module for op in self.trace.ops if op.name == "linear"))
        columns: dict[int, list[str]] = {}
        rows: dict[int, list[str]] = {}
        for name in order:
            if name in self.features:
                columns.setdefault(self._root(self.features[name].outputs), []).append(name)
                rows.setdefault(self._root(self.features[name].inputs), []).append(name)
        reasons: dict[int, str] = {}
        for labels, why in self.flow.broken:
            for root in self._roots[labels].unique().tolist():
                reasons.setdefault(root, why)
        whole_uses = set(self.flow.whole)
        partial: dict[int, set[str]] = {}
        for name, labels in self.flow.partial:
            for root in self._roots[labels].unique().tolist():
                partial.setdefault(root, set()).add(name)
        found = []
        for root, names in columns.items():
            plain = LayerSet(tuple(names), tuple(rows.get(root, ())), partial=frozenset(partial.get(root, ())))
            found.append(self._complete(plain, root, reasons.get(root), whole_uses))
        return _without_conflicts(found)

    def _complete(self, plain: LayerSet, root: int, reason: str | None, whole_uses: set[str]) -> LayerSet:
        def refuse(why: str) -> LayerSet:
            return LayerSet(plain.columns, plain.rows, partial=plain.partial, why_not=why)

        if reason is not None:
            return refuse(reason)
        if not plain.rows:
            return refuse("no linear layer reads its output")
        if plain.partial & whole_uses:
            return refuse(f"{min(plain.partial & whole_uses)} is used elsewhere too")
        vectors = {name: self._units[self.features[name].outputs] for name in plain.columns}
        vectors |= {name: self._units[self.features[name].inputs] for name in plain.rows}
        if len(vectors) < len(plain.columns) + len(plain.rows):
            return refuse("a layer reads its own output")
        order = _first_values(vectors[plain.columns[0]])
        if len(order) == 1:
            return refuse("each of its outputs is mixed with all others")
        self._place[order] = torch.arange(len(order))
        parts = {name: _parts(vector, order) for name, vector in vectors.items()}
        if not all(parts.values()):
            return refuse("its outputs are mixed in groups that are not in order")
        if len(order) % self.tp:
            return refuse(f"tp={self.tp} does not divide its {len(order)} units")
        try:
            dropouts = tuple(self._dropouts(root, order))
        except ValueError as error:
            return refuse(str(error))
        return LayerSet(plain.columns, plain.rows, parts, len(order), dropouts, plain.partial)

    def _dropouts(self, root: int, order: Tensor) -> Iterator[SplitDropout]:
        found: dict[str, SplitDropout] = {}
        for op, labels in self._between({root}):
            if not _draws(op):
                continue
            units = self._units[labels]
            dims = [
                dim for dim in range(units.dim()) if not torch.equal(units, units.narrow(dim, 0, 1).expand_as(units))
            ]
            line = units.movedim(dims[0], 0).reshape(units.shape[dims[0]], -1)[:, 0] if dims else units.flatten()
            split = SplitDropout(op.module, dims[0] if dims else 0)
            if len(dims) != 1 or len(_parts(line, order)) != 1 or found.setdefault(op.module, split) != split:
                raise ValueError(f"the dropout in {op.module} draws over more than one split dim")
        yield from found.values()

    def _between(self, roots: set[int]) -> Iterator[tuple[TracedOp, Tensor]]:
        """Yield ops on the split tensors of sets, with the labels of each output."""
        for op, outputs in zip(self.trace.ops, self.flow.seen, strict=True):
            for labels in outputs:
                if labels is not None and labels.numel() and self._root(labels) in roots:
                    yield op, labels

    def split_sizes(self, sets: Sequence[LayerSet]) -> dict[str, set[int]]:
        """Return by module the sizes that split dims have in its forward, and the numbers of units."""
        roots = {self._root(self.features[each.columns[0]].outputs): each.num_units for each in sets}
        found: dict[str, set[int]] = {}
        for op, outputs in zip(self.trace.ops, self.flow.seen, strict=True):
            for ref, labels in zip(op.outputs, outputs, strict=True):
                if labels is None or not labels.numel() or (root := self._root(labels)) not in roots:
                    continue
                varying = {size for size, each in zip(ref.shape, labels.shape, strict=True) if each > 1}
                found.setdefault(op.module, set()).update(varying | {roots[root]})
        return found

    def rehearse(
        self, model: nn.Module, batch: Any, sets: Sequence[LayerSet], attributes: Iterable[tuple[str, str, int]]
    ) -> str:
        """Run a copy of `model` on `batch` as the last rank would; compare every tensor with that rank's share of the
        whole.

        Args:
            attributes: module, attribute and a rank's value, set on the copy.

        Returns:
            the first difference or error; empty where there is none.
        """
        owner = torch.full_like(self._units, -1)
        for each in sets:
            labels = [self.features[name].outputs for name in each.columns]
            labels += [self.features[name].inputs for name in each.rows]
            for vector in labels:
                owner[vector] = self._place[self._units[vector]] * self.tp // each.num_units
        rank = self.tp - 1

        def own(labels: Tensor) -> Tensor:
            return labels[(owner[labels] < 0) | (owner[labels] == rank)]

        features = {name: LayerFeatures(own(each.inputs), own(each.outputs)) for name, each in self.features.items()}
        columns = [name for each in sets for name in each.columns]
        rows = [name for each in sets for name in each.rows]

        def alter(copy: nn.Module) -> None:
            for name in columns:
                _narrow(copy.get_submodule(name), len(features[name].outputs), is_column=True)
            for name in rows:
                _narrow(copy.get_submodule(name), len(features[name].inputs), is_column=False)
            for name, attribute, value in attributes:
                setattr(copy.get_submodule(name), attribute, value)

        num_ops = 0

        def check(local: ModelTrace) -> None:
            nonlocal num_ops
            num_ops = len(local.ops)
            with unseen_by_op_modes(is_real=True):
                wrong = self._misshapen(local, owner, rank)
            if wrong:
                raise ValueError(wrong)

        try:
            with quiet_fakes():
                local = record(model, batch, alter, check)
        except Exception as error:  # any error of the model's code at a rank's sizes
            self.num_failed_ops += num_ops + sum(1 for _ in model.modules())  # a copy costs as much
            return str(error).splitlines()[0] if str(error) else type(error).__name__
        if len(local.ops) < len(self.trace.ops):
            return "it computes otherwise on a rank's share"
        seen = follow(local, features).seen
        for index, op in enumerate(self.trace.ops):
            for whole, own_part in zip(self.flow.seen[index], seen[index], strict=True):
                if not _fits(whole, own_part, owner, rank):
                    return f"{op.name} in {op.module} makes of a rank's share what is not a rank's share"
        return ""

    def _misshapen(self, local: ModelTrace, owner: Tensor, rank: int) -> str:
        """Say what is wrong with the last op of a rank's trace, by its name, its numbers and its shapes."""
        index, own = len(local.ops) - 1, local.ops[-1]
        if index >= len(self.trace.ops) or self.trace.ops[index].name != own.name:
            return "it computes otherwise on a rank's share"
        op = self.trace.ops[index]
        if _numbers(op) != _numbers(own):
            return f"{op.name} in {op.module} computes with a size that differs on a rank"
        for ref, own_ref, labels in zip(op.outputs, own.outputs, self.flow.seen[index], strict=True):
            if list(own_ref.shape) != _local_shape(ref.shape, labels, owner, rank):
                return f"{op.name} in {op.module} makes {list(ref.shape)} into {list(own_ref.shape)} on a rank"
        return ""


def _without_conflicts(sets: list[LayerSet]) -> list[LayerSet]:
    """Give every layer one part at most, the first that it can have; drop sets whose parameters others use whole."""
    refused: dict[tuple[str, ...], str] = {each.columns: each.why_not for each in sets if each.why_not}
    for each in sets:
        for other in sets[: sets.index(each)]:
            clash = set(each.columns) & set(other.rows) or set(each.rows) & set(other.columns)
            if clash and {other.columns, each.columns}.isdisjoint(refused):
                refused[each.columns] = f"{min(clash)} is split otherwise"
    for _ in sets:
        for each in sets:
            for other in sets:
                if each.columns not in refused and other.columns in refused and each.partial & other.partial:
                    refused[each.columns] = f"{min(each.partial & other.partial)} is used elsewhere too"
    return [
        LayerSet(each.columns, each.rows, partial=each.partial, why_not=refused[each.columns])
        if each.columns in refused
        else each
        for each in sets
    ]


def _first_values(vector: Tensor) -> Tensor:
    """Return the different values in the order in which they first appear."""
    runs = torch.unique_consecutive(vector)
    return runs[: len(runs.unique())]


def _parts(vector: Tensor, order: Tensor) -> tuple[FusedPart, ...]:
    """Return the parts along a dim whose units are `vector`; none where units are not in `order`, each equally long."""
    values, counts = torch.unique_consecutive(vector, return_counts=True)
    num = len(order)
    if not len(values) or len(values) % num or not torch.equal(values, order.repeat(len(values) // num)):
        return ()
    runs = counts.view(-1, num)
    if not torch.equal(runs, runs[:, :1].expand_as(runs)):
        return ()
    return tuple(FusedPart(int(run) * num, num if run > 1 else None) for run in runs[:, 0])


def _draws(op: TracedOp) -> bool:
    if op.name == "sdpa":
        return bool(op.arguments.get("dropout_p"))
    return op.name == "dropout" and bool(op.arguments.get("training", True)) and bool(op.arguments.get("p", 0.5))


def _narrow(module: nn.Module, size: int, is_column: bool) -> None:
    """Narrow a layer of a copy without memory to a rank's share of its features."""
    weight = module.get_parameter("weight")
    dim = 0 if is_column != is_transposed(module) else 1
    module.weight = nn.Parameter(weight.detach().narrow(dim, 0, size))
    if is_column:
        if module.bias is not None:
            module.bias = nn.Parameter(module.get_parameter("bias").detach().narrow(0, 0, size))
        if is_transposed(module):
            module.nf = size  # type: ignore[assignment]  # its forward reads it


def _local_shape(shape: Sequence[int], labels: Tensor | None, owner: Tensor, rank: int) -> list[int]:
    """Return the shape of a rank's share of a tensor."""
    if labels is None:
        return list(shape)
    return [size if labels.shape[dim] == 1 else len(_kept(labels, owner, rank, dim)) for dim, size in enumerate(shape)]


def _kept(labels: Tensor, owner: Tensor, rank: int, dim: int) -> Tensor:
    """Return the indices along a dim at which a rank has an element."""
    mine = (owner[labels] < 0) | (owner[labels] == rank)
    return mine.movedim(dim, 0).reshape(mine.shape[dim], -1).any(1).nonzero().flatten()


def _fits(labels: Tensor | None, own: Tensor | None, owner: Tensor, rank: int) -> bool:
    """Return whether a rank's tensor, of the right shape, holds exactly its share of the whole one, in order."""
    if labels is None or own is None:
        return labels is own
    expected = labels
    for dim, size in enumerate(labels.shape):
        if size > 1:
            expected = expected.index_select(dim, _kept(labels, owner, rank, dim))
    is_mine = (owner[expected] < 0) | (owner[expected] == rank)
    return bool(is_mine.all()) and torch.equal(*torch.broadcast_tensors(expected, own))


def _numbers(op: TracedOp) -> list[Any]:
    """Return the numbers that an op computes with; those that say where to cut show in the shape of its output."""
    found: list[Any] = []
    for name, value in op.arguments.items():
        kinds = (int, float, complex) if op.is_pointwise or name in _EXACT else (bool, float, complex)
        found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, kinds)]
    return found


_EXACT: Final = ("fill_value", "alpha", "beta", "diagonal", "scale")
