"""Find which elements of a traced model's tensors depend on which features of its linear layers.

Every output feature of a linear layer, and every input feature, gets a label of its own. A tensor's labels say from
which feature each element comes; they have size 1 along a dim on which they do not depend. An op that mixes elements
(a product over heads, a norm, a rotation of pairs) joins their labels; an op that no rule covers, or that needs all
elements in one place, breaks them. Labels that are not joined at the end can be on different ranks: the heads of
attention, the features of a feed-forward network. Labels stop at a linear layer: those of its input are joined with
those of its input features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from shardwise.layout.tensor_plan import is_within
from shardwise.tensor.autoplan.trace import ModelTrace, TensorRef, TracedOp

MAX_LABELS: Final = 2**22  # of one tensor; larger ones have to be whole
ACTIVATION: Final = ""  # the origin of tensors that depend on more than parameters


@dataclass
class FeatureFlow:
    """Holds the results of `follow`; labels are int64, and 1-d unless stated otherwise.

    Attributes:
        labels: index of a `TensorRef` -> its labels, of as many dims as the tensor; the last ones where it was written
            in place.
        seen: for every op, the labels of its outputs.
        joined: pairs of labels that depend on each other.
        broken: labels that have to be whole, and why.
        partial: names of parameters, with labels of the tensors with which they are combined.
        whole: names of parameters that are combined with tensors without labels.
    """

    labels: dict[int, Tensor] = field(default_factory=dict)
    seen: list[list[Tensor | None]] = field(default_factory=list)
    joined: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    broken: list[tuple[Tensor, str]] = field(default_factory=list)
    partial: list[tuple[str, Tensor]] = field(default_factory=list)
    whole: set[str] = field(default_factory=set)

    def join(self, first: Tensor, second: Tensor) -> None:
        """Join labels element by element; shapes broadcast."""
        if first is second or (first.shape == second.shape and torch.equal(first, second)):
            return
        if math.prod(torch.broadcast_shapes(first.shape, second.shape)) > MAX_LABELS:
            self.give_up((first, second), "tensors too large to follow")
            return
        first, second = torch.broadcast_tensors(first, second)
        self.joined.append((first.flatten(), second.flatten()))

    def join_over(self, labels: Tensor, dims: Iterable[int]) -> Tensor:
        """Join labels along dims; the result has size 1 there."""
        for dim in dims:
            if labels.shape[dim] > 1:
                self.join(labels.narrow(dim, 0, 1), labels)
                labels = labels.narrow(dim, 0, 1)
        return labels

    def give_up(self, labels: Iterable[Tensor], why: str) -> None:
        """Mark labels as ones that have to be whole."""
        self.broken += [(label.flatten(), why) for label in labels]


@dataclass(frozen=True)
class LayerFeatures:
    """Holds the labels of one linear layer, 1-d; a rank's are some of the whole layer's."""

    inputs: Tensor
    outputs: Tensor


def follow(trace: ModelTrace, layers: Mapping[str, LayerFeatures]) -> FeatureFlow:
    """Follow labels through a trace.

    Args:
        layers: the linear layers whose features are followed, by name.
    """
    flow = FeatureFlow()
    origins: dict[int, frozenset[str]] = {index: frozenset((name,)) for index, name in trace.parameters.items()}
    for op in trace.ops:
        labelled = any(ref.index in flow.labels for ref in op.inputs)
        if is_within(op.module, trace.deciding) and op.name != "linear":
            origin = _meet(flow, op, origins, labelled)
            labels = [flow.labels[ref.index] for ref in op.inputs if ref.index in flow.labels]
            flow.give_up(labels, f"{op.module} decides on the values of tensors")
        elif op.name == "linear":
            _linear(flow, op, layers.get(op.module))
            origin = frozenset((ACTIVATION,))
            flow.whole.update(*(origins.get(ref.index, ()) for ref in op.inputs))
        else:
            origin = _meet(flow, op, origins, labelled)
            if labelled:
                _apply(flow, op)
        for ref in op.outputs:
            if ref.is_float and origin:
                origins[ref.index] = origin
        flow.seen.append([flow.labels.get(ref.index) for ref in op.outputs])
    for ref in trace.outputs:
        flow.whole.update(origins.get(ref.index, ()))
        if ref.index in flow.labels:
            flow.give_up([flow.labels[ref.index]], "the model returns what follows from it")
    return flow


def _meet(flow: FeatureFlow, op: TracedOp, origins: Mapping[int, frozenset[str]], labelled: bool) -> frozenset[str]:
    """Return the origins of an op's gradient; parameters combined with labelled tensors become partial."""
    plain = [ref for ref in op.inputs if ref.index not in flow.labels]
    found = frozenset[str]().union(*(origins.get(ref.index, frozenset()) for ref in plain))
    labels = [flow.labels[ref.index] for ref in op.inputs if ref.index in flow.labels]
    if labelled:
        if ACTIVATION in found:  # its gradient would have to be summed over the ranks
            flow.give_up(labels, f"{op.name} in {op.module} joins it with something computed whole")
        flow.partial += [(name, each.flatten()) for name in found - {ACTIVATION} for each in labels]
        return frozenset((ACTIVATION,))
    if op.name == "embedding" or len(found) > 1:
        flow.whole.update(found - {ACTIVATION})
        return frozenset((ACTIVATION,))
    return found


def _linear(flow: FeatureFlow, op: TracedOp, features: LayerFeatures | None) -> None:
    source, output = op.inputs[0], op.outputs[0]
    labels = flow.labels.get(source.index)
    if features is None:
        if labels is not None:
            flow.give_up([labels], f"{op.module} reads it whole")
        return
    if labels is None:
        flow.give_up([features.inputs], f"{op.module} reads something whole")
    elif max(labels.shape[:-1], default=1) > 1:
        flow.give_up([labels, features.inputs], f"{op.module} works on each part of it")
    else:
        flow.join(labels.flatten(), features.inputs)
    flow.labels[output.index] = features.outputs.reshape((1,) * (len(output.shape) - 1) + (-1,))


def _apply(flow: FeatureFlow, op: TracedOp) -> None:
    rule = _RULES.get(op.name)
    if rule is None and op.is_pointwise:
        rule = _pointwise
    outputs = None
    if rule is not None and all(math.prod(ref.shape) for ref in op.outputs):
        outputs = rule(flow, op)
    if outputs is None:
        labels = [flow.labels[ref.index] for ref in op.inputs if ref.index in flow.labels]
        if op.outputs or not op.name.startswith("_assert"):
            flow.give_up(labels, f"{op.name} in {op.module} needs all of it")
        outputs = [None] * len(op.outputs)
    for ref, labels_out in zip(op.outputs, outputs, strict=True):
        if labels_out is not None:
            flow.labels[ref.index] = labels_out


Outputs = Sequence[Tensor | None] | None
Rule = Callable[[FeatureFlow, TracedOp], Outputs]


def _combine(flow: FeatureFlow, labels: Sequence[Tensor], plain: Sequence[Sequence[int]], num_dims: int) -> Tensor:
    """Return the labels of an element-wise result of labelled tensors and of others, whose shapes are `plain`.

    A tensor without labels is whole on every rank: where its size is more than 1, labels along that dim are joined.
    """
    aligned = [label.reshape((1,) * (num_dims - label.dim()) + tuple(label.shape)) for label in labels]
    for each in aligned[1:]:
        flow.join(aligned[0], each)
    for shape in plain:
        offset = num_dims - len(shape)
        dims = [offset + dim for dim, size in enumerate(shape) if size > 1]
        for each in aligned:
            flow.join_over(each, dims)
    return aligned[0]


def _split_up(flow: FeatureFlow, refs: Sequence[TensorRef]) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    labels = [flow.labels[ref.index] for ref in refs if ref.index in flow.labels]
    return labels, [ref.shape for ref in refs if ref.index not in flow.labels]


def _pointwise(flow: FeatureFlow, op: TracedOp) -> Outputs:
    num_dims = max(len(ref.shape) for ref in op.outputs)
    if op.name.endswith("_") and op.inputs[0].index not in flow.labels:
        return None  # the tensor that is written, perhaps a view, has no labels
    labels, plain = _split_up(flow, op.inputs)
    if any(label.dim() > num_dims for label in labels):
        return None
    out = _combine(flow, labels, plain, num_dims)
    return [out] * len(op.outputs)


def _new(flow: FeatureFlow, op: TracedOp) -> Outputs:
    return [None] * len(op.outputs)


def _view(flow: FeatureFlow, op: TracedOp) -> Outputs:
    (source,) = op.inputs
    labels = flow.labels[source.index]
    expanded: list[int] = []
    target: list[int] = []
    for start, stop, sizes in _groups(source.shape, op.outputs[0].shape):
        varies = any(size > 1 for size in labels.shape[start:stop])
        expanded += source.shape[start:stop] if varies else (1,) * (stop - start)
        target += sizes if varies else (1,) * len(sizes)
    if math.prod(expanded) > MAX_LABELS:
        return None
    return [_compact(labels.expand(expanded).reshape(target))]


def _compact(labels: Tensor) -> Tensor:
    """Reduce labels to size 1 along dims on which they do not depend, such as a batch dim merged with heads."""
    for dim, size in enumerate(labels.shape):
        first = labels.narrow(dim, 0, 1)
        if size > 1 and torch.equal(first.expand_as(labels), labels):
            labels = first
    return labels


def _groups(source: Sequence[int], target: Sequence[int]) -> Iterable[tuple[int, int, tuple[int, ...]]]:
    """Yield runs of dims that a view maps to each other: start and stop in the source, sizes in the target."""
    i = j = 0
    while i < len(source) or j < len(target):
        start, first = i, j
        left, right = math.prod(source[i : i + 1]), math.prod(target[j : j + 1])
        i, j = min(i + 1, len(source)), min(j + 1, len(target))
        while left != right:
            if left < right:
                left, i = left * source[i], i + 1
            else:
                right, j = right * target[j], j + 1
        yield start, i, tuple(target[first:j])


def _permute(flow: FeatureFlow, op: TracedOp) -> Outputs:
    labels = flow.labels[op.inputs[0].index]
    if op.name == "permute":
        return [labels.permute(op.arguments["dims"])]
    if op.name == "t":
        return [labels.t()]
    return [labels.transpose(op.arguments["dim0"], op.arguments["dim1"])]


def _expand(flow: FeatureFlow, op: TracedOp) -> Outputs:
    labels = flow.labels[op.inputs[0].index]
    return [labels.reshape((1,) * (len(op.outputs[0].shape) - labels.dim()) + tuple(labels.shape))]


def _repeat(flow: FeatureFlow, op: TracedOp) -> Outputs:
    labels = flow.labels[op.inputs[0].index]
    repeats = op.arguments["repeats"]
    labels = labels.reshape((1,) * (len(repeats) - labels.dim()) + tuple(labels.shape))
    times = [number if size > 1 else 1 for number, size in zip(repeats, labels.shape, strict=True)]
    return [labels.repeat(times)] if labels.numel() * math.prod(times) <= MAX_LABELS else None


def _cut(flow: FeatureFlow, op: TracedOp) -> Outputs:
    """Apply slice, select, split and similar ops."""
    labels = flow.labels[op.inputs[0].index]
    dim = op.arguments["dim"] % labels.dim()
    varies = labels.shape[dim] > 1
    if op.name == "slice":
        start, stop, step = (op.arguments[key] for key in ("start", "end", "step"))
        index = (slice(None),) * dim + (slice(start, stop, step),)
        return [labels[index] if varies else labels]
    if op.name == "select":
        return [labels.select(dim, op.arguments["index"] if varies else 0)]
    if op.name == "unbind":
        return [labels.select(dim, place if varies else 0) for place in range(len(op.outputs))]
    sizes = [ref.shape[dim] for ref in op.outputs]
    return list(labels.split(sizes, dim)) if varies else [labels] * len(sizes)


def _turn(flow: FeatureFlow, op: TracedOp) -> Outputs:
    """Apply roll and flip."""
    labels = flow.labels[op.inputs[0].index]
    if not op.arguments["dims"]:
        return None
    if op.name == "flip":
        return [labels.flip(op.arguments["dims"])]
    return [labels.roll(op.arguments["shifts"], op.arguments["dims"])]


def _cat(flow: FeatureFlow, op: TracedOp) -> Outputs:
    refs = [ref for ref in op.inputs if math.prod(ref.shape)]  # a cache begins as an empty tensor
    labels, plain = _split_up(flow, refs)
    if plain:
        return None
    dim = op.arguments["dim"] % len(op.outputs[0].shape)
    if op.name == "stack":
        labels, sizes = [label.unsqueeze(dim) for label in labels], [1] * len(labels)
    else:
        sizes = [ref.shape[dim] for ref in refs]
    if len(labels) == 1:
        return labels
    shape = [max(label.shape[place] for label in labels) for place in range(labels[0].dim())]
    full = [[*shape[:dim], size, *shape[dim + 1 :]] for size in sizes]
    if sum(map(math.prod, full)) > MAX_LABELS:
        return None
    return [torch.cat([each.expand(to) for each, to in zip(labels, full, strict=True)], dim)]


def _pad(flow: FeatureFlow, op: TracedOp) -> Outputs:
    labels = flow.labels[op.inputs[0].index]
    pads = op.arguments["pad"]
    padded = [labels.dim() - 1 - place // 2 for place, number in enumerate(pads) if number]
    return [labels] if all(labels.shape[dim] == 1 for dim in padded) else None


def _dims(op: TracedOp, labels: Tensor) -> list[int]:
    """Return the dims that the op mixes."""
    if "normalized_shape" in op.arguments:
        return list(range(labels.dim() - len(op.arguments["normalized_shape"]), labels.dim()))
    if op.name in ("tril", "triu"):
        return [labels.dim() - 2, labels.dim() - 1]
    dims = op.arguments.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    return [dim % labels.dim() for dim in dims] if dims else list(range(labels.dim()))


def _mix(flow: FeatureFlow, op: TracedOp) -> Outputs:
    """Apply reductions, norms and softmax: along some dims every element depends on every other."""
    source = op.inputs[0]
    if source.index not in flow.labels or any(ref.index in flow.labels for ref in op.inputs[1:]):
        return None
    labels = flow.labels[source.index]
    dims = _dims(op, labels)
    reduced = flow.join_over(labels, dims)
    kept = tuple(1 if dim in dims else size for dim, size in enumerate(source.shape))
    left = tuple(size for dim, size in enumerate(source.shape) if dim not in dims)
    outputs: list[Tensor | None] = []
    for ref in op.outputs:
        if ref.shape == source.shape:
            outputs.append(labels)
        elif ref.shape == kept:
            outputs.append(reduced)
        elif ref.shape == left:
            outputs.append(reduced.reshape([size for dim, size in enumerate(reduced.shape) if dim not in dims]))
        else:
            return None
    return outputs


def _glu(flow: FeatureFlow, op: TracedOp) -> Outputs:
    labels = flow.labels[op.inputs[0].index]
    dim = op.arguments["dim"] % labels.dim()
    halves = labels.chunk(2, dim) if labels.shape[dim] > 1 else (labels,)
    return [_combine(flow, halves, (), labels.dim())]


def _product(flow: FeatureFlow, op: TracedOp) -> Outputs:
    """Apply products of matrices, batched or not: [.., m, k] and [.., k, n], perhaps added to another tensor."""
    first, second = op.inputs[-2:]
    factors: list[Tensor] = []
    plain: list[tuple[int, ...]] = []
    for ref, dim in ((first, -1), (second, -2)):
        if ref.index in flow.labels:
            factors.append(flow.join_over(flow.labels[ref.index], [dim]))
        else:
            plain.append((*ref.shape[:-2], 1, 1))
    num_dims = len(first.shape)
    added, shapes = _split_up(flow, op.inputs[:-2])
    if not factors:
        return None
    return [_combine(flow, [*factors, *added], [*plain, *shapes], num_dims)]


def _attention(flow: FeatureFlow, op: TracedOp) -> Outputs:
    """Apply scaled dot product attention: [.., H, S, D]; heads do not depend on each other."""
    query = op.arguments["query"]
    num_dims = len(query.shape)
    factors: list[Tensor] = []
    plain: list[tuple[int, ...]] = []
    for key in ("query", "key", "value"):
        ref = op.arguments[key]
        repeats = query.shape[-3] // ref.shape[-3] if op.arguments.get("enable_gqa") else 1
        if ref.index not in flow.labels:
            plain.append((*ref.shape[:-2], 1, 1))
            continue
        labels = flow.join_over(flow.labels[ref.index], (-2, -1))
        factors.append(labels.repeat_interleave(repeats, -3) if labels.dim() > 2 and labels.shape[-3] > 1 else labels)
    mask = op.arguments.get("attn_mask")
    if not factors or (mask is not None and mask.index in flow.labels):
        return None
    if mask is not None:
        plain.append((*mask.shape[:-2], 1, 1))
    out = _combine(flow, factors, plain, num_dims)
    return [out] if query.index in flow.labels else None


def _rules() -> dict[str, Rule]:
    return {
        name: rule
        for names, rule in (
            ("view _unsafe_view reshape squeeze unsqueeze flatten", _view),
            ("permute transpose t", _permute),
            ("expand", _expand),
            ("repeat", _repeat),
            ("slice select split split_with_sizes unbind chunk narrow", _cut),
            ("roll flip", _turn),
            ("cat stack", _cat),
            ("constant_pad_nd", _pad),
            ("sum mean amax amin var std var_mean linalg_vector_norm norm logsumexp all any", _mix),
            ("_softmax _log_softmax cumsum native_layer_norm _fused_rms_norm tril triu", _mix),
            ("glu", _glu),
            ("mm bmm addmm baddbmm", _product),
            ("sdpa", _attention),
            ("clone detach alias _to_copy lift_fresh contiguous copy_ _prelu_kernel", _pointwise),
            ("zeros_like ones_like empty_like full_like", _pointwise),
            ("new_zeros new_ones new_empty new_full", _new),
        )
        for name in names.split()
    }


_RULES: Final[Mapping[str, Rule]] = _rules()


def components(num_labels: int, joined: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return for every label the smallest label that it is joined with, directly or through others: [num_labels]."""
    parent = torch.arange(num_labels)
    if not joined:
        return parent
    first, second = (torch.cat(each) for each in zip(*joined, strict=True))
    while True:
        roots = torch.minimum(parent[first], parent[second])
        new = parent.clone()
        for side in (first, second):
            new.scatter_reduce_(0, parent[side], roots, "amin")
            new.scatter_reduce_(0, side, roots, "amin")
        new = new[new]
        if torch.equal(new, parent):
            return parent
        parent = new
