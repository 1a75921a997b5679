"""Carries out a plan of tensor parallelism: modules become what the plan says, and can be given back.

Only classes and numbers of modules change. Parameters keep their objects, and get this rank's part of the data
elsewhere; where that comes first or last plays no part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from torch import nn

from shardwise.comm import Comm
from shardwise.config import ConfigError, TensorConfig
from shardwise.layout import tensor_plan
from shardwise.layout.splits import ParamSplit, Part
from shardwise.layout.tensor_plan import LayerSplit, TensorPlan, is_within
from shardwise.tensor import layers
from shardwise.tensor.cross_entropy import Vocab
from shardwise.tensor.layers import Order, Place
from shardwise.tensor.logits import VocabHead
from shardwise.tensor.ops import TensorOps
from shardwise.wearing import become, set_attribute

Undo = Callable[[], None]


def split_model(
    model: nn.Module,
    plan: TensorPlan,
    comm: Comm,
    config: TensorConfig,
    splits: Mapping[str, ParamSplit],
    is_in_pipeline: bool = False,
    cp: int = 1,
) -> list[Undo]:
    """Let a model's modules work on this rank's part.

    Args:
        model: whose modules change; its parameters do not.
        plan: for it.
        comm: the tensor-parallel group.
        config: of tensor parallelism.
        splits: by name of parameter, as `param_splits` gives them for the plan.
        is_in_pipeline: other ranks run the rest of the model, and sequences are split there too.
        cp: ranks that split sequences before.

    Returns:
        what undoes it; to be called in reverse order.

    Raises:
        ConfigError: a module is not what its split needs, or has no argument of a name in the plan.
    """
    if comm.world_size == 1 or plan == TensorPlan():
        return []
    ops = TensorOps(comm, config.overlap_chunks, may_keep_whole=not is_in_pipeline, cp=cp)
    stacks = plan.stacks if config.sequence_parallel else ()
    surgeon = _Surgeon(model, ops, [ops.close], plan, tuple(name for stack in stacks for name in stack.modules))
    try:
        for layer in plan.layers:
            surgeon.split(layer, splits[f"{layer.module}.weight"])
        for region in plan.regions:
            surgeon.open_region(region)
        for stack in stacks:
            surgeon.bound(stack)
        for name, attribute, value in plan.attributes_of(comm.rank, comm.world_size):
            surgeon.undo.append(set_attribute(model.get_submodule(name), attribute, value))
    except BaseException:
        for undo in reversed(surgeon.undo):
            undo()
        raise
    return surgeon.undo


@dataclass(frozen=True)
class _Surgeon:
    model: nn.Module
    ops: TensorOps
    undo: list[Undo]
    plan: TensorPlan
    sequence_modules: tuple[str, ...]

    def split(self, layer: LayerSplit, split: ParamSplit) -> None:
        """Split one layer."""
        module = self.model.get_submodule(layer.module)
        if layer.style in ("vocab", "column-embedding"):
            self._split_embedding(cast(nn.Embedding, module), layer, split)
            return
        if layer.style == "head":
            self._split_head(module, layer, split)
            return
        state = layers.LinearState(
            self.ops,
            layer.module,
            is_in_region=is_within(layer.module, (region.module for region in self.plan.regions)),
            is_sequence=is_within(layer.module, self.sequence_modules),
            is_transposed=layer.is_transposed,
            gathers_output=layer.gathers_output,
            splits_input=layer.splits_input,
            order=_order(layer.parts, self.ops.comm.world_size) if layer.gathers_output or layer.splits_input else (),
        )
        if layer.splits_input and any(part.num_sharers(split.degree) > 1 or part.is_padded for part in layer.parts):
            raise ConfigError(
                f"row layer {layer.module} splits its input, and tp={split.degree} leaves ranks the same part of it; "
                "use a smaller tp"
            )
        out_size, in_size = split.local_shape[::-1] if layer.is_transposed else split.local_shape
        names = {"nf": out_size, "nx": in_size} if layer.is_transposed else {}
        kind = layers.ColumnLinear if layer.style == "column" else layers.RowLinear
        self._wear(module, kind, "_shardwise_linear", state)
        self._resize(module, {"out_features": out_size, "in_features": in_size, **names})

    def _split_head(self, module: nn.Module, layer: LayerSplit, split: ParamSplit) -> None:
        vocab = Vocab(split.global_shape[0], self.ops.comm)
        state = layers.HeadState(self.ops, layer.module, VocabHead(vocab, layer.module))
        self._wear(module, layers.Head, "_shardwise_head", state)
        self._resize(module, {"out_features": split.local_shape[0]})

    def _split_embedding(self, module: nn.Embedding, layer: LayerSplit, split: ParamSplit) -> None:
        degree, padding = self.ops.comm.world_size, module.padding_idx
        if layer.style == "vocab":
            start, stop = layer.parts[0].range_of(self.ops.comm.rank, degree)
            local_padding = padding - start if padding is not None and start <= padding < stop else None
            state = layers.EmbeddingState(self.ops, layer.module, start, stop, local_padding)
        else:
            order = _order(layer.parts, degree) if layer.gathers_output else ()
            state = layers.EmbeddingState(self.ops, layer.module, gathers_output=layer.gathers_output, order=order)
        kind = layers.VocabEmbedding if layer.style == "vocab" else layers.ColumnEmbedding
        self._wear(module, kind, "_shardwise_embedding", state)
        num_rows, num_columns = split.local_shape
        self._resize(module, {"num_embeddings": num_rows, "embedding_dim": num_columns})

    def open_region(self, region: tensor_plan.Region) -> None:
        """Let a module's inputs enter."""
        module = self.model.get_submodule(region.module)
        is_sequence = is_within(region.module, self.sequence_modules)
        inputs = tuple(_place(module, region.module, name) for name in region.inputs)
        whole = tuple(_place(module, region.module, name) for name in region.whole_inputs)
        state = layers.RegionState(
            self.ops, region.module, whole if is_sequence else inputs + whole, inputs if is_sequence else ()
        )
        self._wear(module, layers.Region, "_shardwise_region", state)

    def bound(self, stack: tensor_plan.SequenceStack) -> None:
        """Split the sequence before a stack, and gather it behind."""
        first, last = self.model.get_submodule(stack.first), self.model.get_submodule(stack.last)
        entry = layers.EntryState(self.ops, stack.first, _place(first, stack.first, stack.argument))
        self._wear(first, layers.StackEntry, "_shardwise_entry", entry)
        self._wear(last, layers.StackExit, "_shardwise_exit", layers.ExitState(self.ops, stack.last))

    def _wear(self, module: nn.Module, kind: type[nn.Module], slot: str, state: layers.State) -> None:
        if not isinstance(module, kind):  # it may stand in the plan by several names
            self.undo.append(become(module, kind, nn.Embedding if kind is layers.VocabEmbedding else None))
            self.undo.append(set_attribute(module, slot, state))

    def _resize(self, module: nn.Module, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            if name in module.__dict__:
                self.undo.append(set_attribute(module, name, size))


def _place(module: nn.Module, name: str, argument: str) -> Place:
    parameters = inspect.signature(module.forward).parameters
    kinds = [each.kind for each in parameters.values()]
    if argument not in parameters:
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return Place(argument, None)
        raise ConfigError(
            f"module {name} has no argument {argument!r}; the plan must name one of {', '.join(parameters)}"
        )
    is_keyword = parameters[argument].kind is inspect.Parameter.KEYWORD_ONLY
    return Place(argument, None if is_keyword else list(parameters).index(argument))


def _order(parts: tuple[Part, ...], degree: int) -> Order:
    """Where the whole's indices lie on the ranks; of ranks that share some, on the first."""
    pieces: list[tuple[int, int, int]] = []
    offset = 0
    for part in parts:
        for rank in range(0, degree, part.num_sharers(degree)):
            start, stop = part.range_of(rank, degree)
            if stop > start:
                pieces.append((rank, offset, offset + stop - start))
        offset += part.local_size(degree)
    as_it_is = tuple((rank, 0, offset) for rank in range(degree))
    return () if tuple(pieces) == as_it_is else tuple(pieces)
