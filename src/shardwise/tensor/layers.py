"""Define the classes of split modules, which `shardwise.runtime.class_swap.subclass_module` joins with their own.

A layer's `weight` and `bias` hold this rank's part; its forward is defined here. A region, and the ends of a
sequence-parallel stack, change the inputs or outputs of a module's own forward. The classes compose: a module may have
several of them. Each class has its state in one attribute of the module, which copies of the module share.

>>> layer = nn.Linear(4, 8, device="meta")
>>> undo = subclass_module(layer, ColumnLinear)
>>> isinstance(layer, ColumnLinear), isinstance(layer, nn.Linear), type(layer).__name__
(True, True, 'Linear')
>>> undo()
>>> type(layer) is nn.Linear
True
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.config.errors import ConfigError
from shardwise.runtime.batch_errors import check_indices
from shardwise.runtime.class_swap import subclass_module
from shardwise.runtime.param_guard import used_by_owner
from shardwise.tensor.loss_parallel import LazyLogits, LazyLogitsHead
from shardwise.tensor.mappings import TpMappings

__all__ = [
    "ColumnEmbedding",
    "ColumnLinear",
    "EmbeddingState",
    "ForwardArgument",
    "GatherState",
    "HeadState",
    "LinearState",
    "RowLinear",
    "ScatterState",
    "SequenceGather",
    "SequenceScatter",
    "SharedInputModule",
    "SharedInputState",
    "VocabEmbedding",
    "VocabParallelHead",
    "mappings_of",
    "place_of",
    "subclass_module",
    "with_first_tensor",
]

# (rank, start, stop) of slices along a dim, in the order of the whole; empty where the whole is the ranks' tensors
# concatenated in rank order.
Order = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, eq=False)
class LayerState:
    """Holds what a module's forward needs besides its parameters.

    Attributes:
        name: of the module, for counts and messages.
    """

    ops: TpMappings
    name: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the object itself: a copy of the module uses the same ranks."""
        return self

    @property
    def title(self) -> str:
        """Return the module's name; in compiled code, which blocks share, a name for all of them."""
        return "a compiled block" if torch.compiler.is_compiling() else self.name


@dataclass(frozen=True, eq=False)
class LinearState(LayerState):
    """Holds the state of a linear layer.

    Attributes:
        is_in_region: whether a region around it maps its input.
        is_sequence: whether it is in a sequence-parallel stack: a row layer scatters its sum along the sequence, a
            column layer outside of regions gathers its input.
        is_transposed: whether the weight is [in, out].
        gathers_output: whether a column layer returns all features.
        splits_input: whether a row layer gets all features.
        order: of the ranks' features in the whole, where `gathers_output` or `splits_input`.
    """

    is_in_region: bool = False
    is_sequence: bool = False
    is_transposed: bool = False
    gathers_output: bool = False
    splits_input: bool = False
    order: Order = ()


def mappings_of(model: nn.Module) -> TpMappings | None:
    """Return the mappings of a split model; None where nothing is split."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, LayerState):
                return value.ops
    return None


class ColumnLinear(nn.Module):
    """Computes a linear layer split by its outputs; the output holds this rank's features, or all of them."""

    weight: Tensor
    bias: Tensor | None
    _shardwise_linear: LinearState

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:  # [..., in] -> [..., out / tp]
        (x,) = (*args, *kwargs.values())
        state = self._shardwise_linear
        if not state.is_in_region:
            mapping = state.ops.gather_sequence if state.is_sequence else state.ops.copy_to_tp
            x = mapping(x, state.title)
        weight, bias = self.weight, self.bias
        with used_by_owner(weight, bias):
            y = state.ops.column(x, weight.t() if state.is_transposed else weight, bias)
        return _gathered_features(y, state) if state.gathers_output else y

    def extra_repr(self) -> str:
        return _described(super().extra_repr(), "column", self._shardwise_linear)


class RowLinear(nn.Module):
    """Computes a linear layer split by its inputs; the products are summed over the ranks, the bias is added once."""

    weight: Tensor
    bias: Tensor | None
    _shardwise_linear: LinearState

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:  # [..., in / tp] -> [..., out]
        (x,) = (*args, *kwargs.values())
        state = self._shardwise_linear
        if state.splits_input:
            x = state.ops.split(_in_order(x, state), -1, state.title)
        weight, bias = self.weight, self.bias
        with used_by_owner(weight, bias):
            return state.ops.row(x, weight.t() if state.is_transposed else weight, bias, state.is_sequence, state.title)

    def extra_repr(self) -> str:
        return _described(super().extra_repr(), "row", self._shardwise_linear)


@dataclass(frozen=True, eq=False)
class HeadState(LayerState):
    """Holds the state of a head: how its rows are split over the ranks."""

    head: LazyLogitsHead


class VocabParallelHead(nn.Module):
    """Computes a linear layer to the vocabulary, split by tokens; its logits are deferred until they are read."""

    weight: Tensor
    bias: Tensor | None
    _shardwise_head: HeadState

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:  # [..., in] -> [..., words]
        (x,) = (*args, *kwargs.values())
        state = self._shardwise_head
        return LazyLogits(state.ops.copy_to_tp(x, state.title), self.weight, self.bias, state.head)

    def extra_repr(self) -> str:
        return _described(super().extra_repr(), "vocabulary", self._shardwise_head)


@dataclass(frozen=True, eq=False)
class EmbeddingState(LayerState):
    """Holds the state of an embedding.

    Attributes:
        size: the number of rows of the whole, without padding.
        start: the first token of this rank's rows.
        stop: the token after its last one.
        padding: the row that never trains, counted from `start`; None where this rank does not hold it.
        gathers_output: whether one split by columns returns all features.
    """

    size: int = 0
    start: int = 0
    stop: int = 0
    padding: int | None = None
    gathers_output: bool = False
    order: Order = ()


class VocabEmbedding(nn.Embedding):
    """Looks up an embedding split by tokens: rows of other ranks count as zero, and the ranks' outputs are summed.

    It becomes a base of an embedding's own class, so a forward there that scales the result of torch's still does.
    """

    _shardwise_embedding: EmbeddingState

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:  # [...] -> [..., features]
        (ids,) = (*args, *kwargs.values())
        state = self._shardwise_embedding
        if ids.dtype in (torch.int64, torch.int32):  # torch refuses the others below
            check_indices(ids, state.size)
        is_elsewhere = (ids < state.start) | (ids >= state.stop)
        rows = (ids - state.start).masked_fill(is_elsewhere, 0)
        weight = self.weight
        with used_by_owner(weight):
            found = F.embedding(rows, weight, state.padding).masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return state.ops.reduce_from_tp(found, state.title)

    def extra_repr(self) -> str:
        return _described(super().extra_repr(), "vocabulary", self._shardwise_embedding)


class ColumnEmbedding(nn.Module):
    """Looks up an embedding split by its columns; the output holds this rank's features, or all of them."""

    _shardwise_embedding: EmbeddingState

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:  # [...] -> [..., features / tp]
        state = self._shardwise_embedding
        found: Tensor = super().forward(*args, **kwargs)
        return _gathered_features(found, state) if state.gathers_output else found

    def extra_repr(self) -> str:
        return _described(super().extra_repr(), "column", self._shardwise_embedding)


@dataclass(frozen=True)
class ForwardArgument:
    """Describes an argument of a forward: its name, and its position where it can be given by position."""

    name: str
    position: int | None

    def change(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[[Tensor], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `args` and `kwargs` in which `function` has replaced this argument, if it is given and a tensor."""
        if self.name in kwargs:
            value = kwargs[self.name]
            return args, {**kwargs, self.name: function(value)} if isinstance(value, Tensor) else kwargs
        at = self.position
        if at is None or at >= len(args) or not isinstance(args[at], Tensor):
            return args, kwargs
        return (*args[:at], function(args[at]), *args[at + 1 :]), kwargs


def place_of(module: nn.Module, name: str, argument: str) -> ForwardArgument:
    """Return where the forward of a module of a name takes an argument.

    Raises:
        ConfigError: it takes none of that name.
    """
    parameters = inspect.signature(module.forward).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    if argument not in parameters:
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return ForwardArgument(argument, None)
        raise ConfigError(
            "tp-plan-argument",
            f"module {name} has no argument {argument!r}; the plan must name one of {', '.join(parameters)}",
        )
    is_keyword = parameters[argument].kind is inspect.Parameter.KEYWORD_ONLY
    return ForwardArgument(argument, None if is_keyword else list(parameters).index(argument))


@dataclass(frozen=True, eq=False)
class SharedInputState(LayerState):
    """Holds the state of a region.

    Attributes:
        sequences: arguments that arrive split along dim 1.
    """

    whole: tuple[ForwardArgument, ...] = ()
    sequences: tuple[ForwardArgument, ...] = ()


class SharedInputModule(nn.Module):
    """Makes the column layers of a module share its inputs: arguments are mapped once, sequences are gathered once."""

    _shardwise_region: SharedInputState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._shardwise_region
        seen: list[tuple[Tensor, Tensor]] = []

        def gather(x: Tensor) -> Tensor:
            for given, whole in seen:
                if given is x:
                    return whole
            seen.append((x, state.ops.gather_sequence(x, state.title)))
            return seen[-1][1]

        for place in state.sequences:
            args, kwargs = place.change(args, kwargs, gather)
        for place in state.whole:
            args, kwargs = place.change(args, kwargs, lambda x: state.ops.copy_to_tp(x, state.title))
        seen.clear()
        return super().forward(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class ScatterState(LayerState):
    """Holds the state of a stack's first module: the argument to split."""

    place: ForwardArgument


class SequenceScatter(nn.Module):
    """Splits one argument along dim 1, as the first module of a sequence-parallel stack.

    Raises:
        ConfigError: its length does not divide by the number of ranks, and a backward follows.
    """

    _shardwise_entry: ScatterState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._shardwise_entry
        args, kwargs = state.place.change(args, kwargs, lambda x: state.ops.split_sequence(x, state.title))
        return super().forward(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class GatherState(LayerState):
    """Holds the state of a stack's last module."""


class SequenceGather(nn.Module):
    """Gathers the first tensor of its output along dim 1, as the last module of a sequence-parallel stack."""

    _shardwise_exit: GatherState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._shardwise_exit
        output = super().forward(*args, **kwargs)
        return with_first_tensor(output, lambda x: state.ops.join_sequence(x, state.title), state.name)


def with_first_tensor(output: Any, change: Callable[[Tensor], Tensor], name: str) -> Any:
    """Return an output like that of a module of a name, with its first tensor changed."""
    if isinstance(output, Tensor):
        return change(output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):  # Hugging Face's outputs are such
        for field in dataclasses.fields(output):
            if isinstance(value := getattr(output, field.name), Tensor):
                return dataclasses.replace(output, **{field.name: change(value)})
    elif isinstance(output, Mapping):
        for key, value in output.items():
            if isinstance(value, Tensor):
                return {**output, key: change(value)}
    elif isinstance(output, tuple | list):
        for index, value in enumerate(output):
            if isinstance(value, Tensor):
                values = [*output[:index], change(value), *output[index + 1 :]]
                return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    raise ConfigError(
        "tp-stack-output",
        f"module {name} ends a sequence-parallel stack, and its output, a {type(output).__name__}, has no tensor to "
        "gather; name another last module in the plan",
    )


def _gathered_features(y: Tensor, state: LinearState | EmbeddingState) -> Tensor:
    """Return the whole's features [..., out], from this rank's [..., out / tp]."""
    whole, size = state.ops.gather(y, -1, state.title), y.shape[-1]
    if not state.order:
        return whole
    return torch.cat(
        [whole[..., rank * size + start : rank * size + stop] for rank, start, stop in state.order], dim=-1
    )


def _in_order(x: Tensor, state: LinearState) -> Tensor:
    """Return the whole's features [..., in] in the order of ranks."""
    if not state.order:
        return x
    slices = zip(state.order, x.split([stop - start for _, start, stop in state.order], dim=-1), strict=True)
    return torch.cat([part for _, part in sorted(slices, key=lambda each: each[0])], dim=-1)


def _described(own: str, style: str, state: LayerState) -> str:
    comm = state.ops.comm
    return f"{own}, {style} {comm.rank} of tp={comm.world_size}"
