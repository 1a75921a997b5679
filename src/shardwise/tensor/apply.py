"""Apply a plan of tensor parallelism: modules get the classes that the plan says, and the change can be undone.

Only the classes and the integer attributes of modules change. Parameters keep their objects; another part of the
library gives them this rank's part of the data, before or after this.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, cast

from torch import nn

from shardwise.comm.collectives import Comm
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import TensorConfig
from shardwise.dropout import ShardRegion, may_drop_by_function
from shardwise.layout import tensor_plan
from shardwise.layout.tensor_plan import LayerSplit, TensorLayout, TensorPlan, is_within
from shardwise.layout.tp_sharding import FusedPart, ParamSplit
from shardwise.runtime.class_swap import set_attribute, subclass_module
from shardwise.tensor import layers
from shardwise.tensor.cross_entropy import VocabSplit
from shardwise.tensor.layers import Order, place_of
from shardwise.tensor.loss_parallel import HEAD_STATE, LazyLogitsHead
from shardwise.tensor.mappings import TpMappings

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
    """Make a model's modules work on this rank's part.

    Args:
        model: whose modules change; its parameters do not.
        splits: by name of parameter, as `param_splits` gives them for the plan.
        is_in_pipeline: whether other ranks run other stages of the model, with split sequences too.
        cp: ranks that split sequences before this split.

    Returns:
        functions that undo it; call them in reverse order.

    Raises:
        ConfigError: a module is not what its split needs, or has no argument of a name in the plan.
    """
    if comm.world_size == 1 or plan == TensorPlan():
        return []
    ops = TpMappings(comm, config.overlap_chunks, may_keep_whole=not is_in_pipeline, cp=cp)
    stacks = plan.stacks if config.sequence_parallel else ()
    applier = _PlanApplier(model, ops, [ops.close], plan, tuple(name for stack in stacks for name in stack.modules))
    try:
        for layer in plan.layers:
            applier.split(layer, splits[f"{layer.module}.weight"])
        for region in plan.regions:
            applier.open_region(region)
        for stack in stacks:
            applier.bound(stack)
        for name, attribute, value in plan.attributes_of(comm.rank, comm.world_size):
            applier.undo.append(set_attribute(model.get_submodule(name), attribute, value))
    except BaseException:
        for undo in reversed(applier.undo):
            undo()
        raise
    return applier.undo


@dataclass(frozen=True)
class _PlanApplier:
    model: nn.Module
    ops: TpMappings
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
                "row-split-parts",
                f"row layer {layer.module} splits its input, and tp={split.degree} leaves ranks the same part of it; "
                "use a smaller tp",
            )
        out_size, in_size = split.local_shape[::-1] if layer.is_transposed else split.local_shape
        names = {"nf": out_size, "nx": in_size} if layer.is_transposed else {}
        kind = layers.ColumnLinear if layer.style == "column" else layers.RowLinear
        self._swap_class(module, kind, "_shardwise_linear", state)
        self._resize(module, {"out_features": out_size, "in_features": in_size, **names})

    def _split_head(self, module: nn.Module, layer: LayerSplit, split: ParamSplit) -> None:
        vocab = VocabSplit(split.global_shape[0], self.ops.comm)
        state = layers.HeadState(self.ops, layer.module, LazyLogitsHead(vocab, layer.module))
        self._swap_class(module, layers.VocabParallelHead, HEAD_STATE, state)
        self._resize(module, {"out_features": split.local_shape[0]})

    def _split_embedding(self, module: nn.Embedding, layer: LayerSplit, split: ParamSplit) -> None:
        degree, padding = self.ops.comm.world_size, module.padding_idx
        if layer.style == "vocab":
            start, stop = layer.parts[0].range_of(self.ops.comm.rank, degree)
            local_padding = padding - start if padding is not None and start <= padding < stop else None
            state = layers.EmbeddingState(self.ops, layer.module, split.global_shape[0], start, stop, local_padding)
        else:
            order = _order(layer.parts, degree) if layer.gathers_output else ()
            state = layers.EmbeddingState(self.ops, layer.module, gathers_output=layer.gathers_output, order=order)
        kind = layers.VocabEmbedding if layer.style == "vocab" else layers.ColumnEmbedding
        self._swap_class(module, kind, "_shardwise_embedding", state)
        num_rows, num_columns = split.local_shape
        self._resize(module, {"num_embeddings": num_rows, "embedding_dim": num_columns})

    def open_region(self, region: tensor_plan.SharedInput) -> None:
        """Make the column layers of a module share its inputs."""
        module = self.model.get_submodule(region.module)
        is_sequence = is_within(region.module, self.sequence_modules)
        inputs = tuple(place_of(module, region.module, name) for name in region.inputs)
        whole = tuple(place_of(module, region.module, name) for name in region.whole_inputs)
        state = layers.SharedInputState(
            self.ops, region.module, whole if is_sequence else inputs + whole, inputs if is_sequence else ()
        )
        self._swap_class(module, layers.SharedInputModule, "_shardwise_region", state)

    def bound(self, stack: tensor_plan.SequenceStack) -> None:
        """Split the sequence before a stack, and gather it after."""
        first, last = self.model.get_submodule(stack.first), self.model.get_submodule(stack.last)
        entry = layers.ScatterState(self.ops, stack.first, place_of(first, stack.first, stack.argument))
        self._swap_class(first, layers.SequenceScatter, "_shardwise_entry", entry)
        self._swap_class(last, layers.SequenceGather, "_shardwise_exit", layers.GatherState(self.ops, stack.last))

    def _swap_class(self, module: nn.Module, kind: type[nn.Module], slot: str, state: layers.LayerState) -> None:
        if not isinstance(module, kind):  # the plan may have it under several names
            self.undo.append(subclass_module(module, kind, nn.Embedding if kind is layers.VocabEmbedding else None))
            self.undo.append(set_attribute(module, slot, state))

    def _resize(self, module: nn.Module, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            if name in module.__dict__:
                self.undo.append(set_attribute(module, name, size))


def _order(parts: tuple[FusedPart, ...], degree: int) -> Order:
    """Return where the whole's indices are on the ranks; indices that several ranks share count on the first."""
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


_SPEAKS_OF_SHAPES: Final = re.compile(r"shape|(?<!batch_)size|dimension|cannot be multiplied|to unpack")


def explain_shapes(error: BaseException, model: nn.Module, tensor: TensorLayout | None) -> None:
    """Add a hint to a forward's error about shapes: what the plan may lack.

    Args:
        tensor: how the model is split; None where it is not.
    """
    hint = shape_hint(error, model, tensor) if tensor is not None else ""
    if hint:
        error.add_note(hint)


def shape_hint(error: BaseException, model: nn.Module, tensor: TensorLayout) -> str:
    """Say in one line what the plan may lack; empty where `error` is about something else."""
    if type(error) not in (RuntimeError, ValueError, AssertionError) or not _speaks_of_shapes(error):
        return ""
    names = {id(module): name for name, module in model.named_modules()}
    inside = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    failed = next((each for each in reversed(inside) if id(each) in names and isinstance(each, nn.Module)), None)
    if failed is None:
        return ""
    name = names[id(failed)]
    layer = next((layer for layer in tensor.plan.layers if layer.module == name), None)
    fix = _layer_fix(layer) if layer is not None else _module_fix(name, failed, tensor)
    return f"mesh.tp={tensor.degree}: {name or type(model).__name__} {fix}"


def _speaks_of_shapes(error: BaseException) -> bool:
    return not str(error) or _SPEAKS_OF_SHAPES.search(str(error)) is not None


def _layer_fix(layer: LayerSplit) -> str:
    if layer.style == "row":
        return "is a row layer, but gets all features; split the layer before it ('column'), or make it 'row-split'"
    return (
        f"is split ('{layer.style}'), but gets some of the features; end the column layers before it in a 'row' layer, "
        "or make them 'column-gather'"
    )


def _module_fix(name: str, module: nn.Module, tensor: TensorLayout) -> str:
    if isinstance(module, nn.Linear):
        return "is whole, but gets some features; give it the style 'row' in the plan, or take out the column before"
    layers = ", ".join(_within(name, (layer.module for layer in tensor.plan.layers if layer.style == "column")))
    reason = f" ({layers} split them)" if layers else ""
    sizes = _sizes(name, module, tensor)
    known = f", such as {', '.join(f'{key}={value}' for key, value in sizes)}" if sizes else ""
    attribute = sizes[0][0] if len(sizes) == 1 else "<attribute>"
    return (
        f"computes with 1/{tensor.degree} of the features{reason}; if its code takes a number of heads or features "
        f"from an attribute{known}, add 'local {attribute}' for it to the plan"
    )


def _within(name: str, layers: Iterable[str]) -> list[str]:
    return [layer.removeprefix(f"{name}.") for layer in layers if name and is_within(layer, (name,))]


def _sizes(name: str, module: nn.Module, tensor: TensorLayout) -> list[tuple[str, int]]:
    """Return the integer attributes of a module that could be a rank's share, and are not yet."""
    done = {attribute for owner, attribute, _ in tensor.plan.attributes if owner == name}
    return [
        (key, value)
        for key, value in vars(module).items()
        if type(value) is int and value > 1 and value % tensor.degree == 0 and key not in done
    ]


def dropout_zones(model: nn.Module, tensor: TensorLayout, tp_index: int) -> dict[str, ShardRegion]:
    """Return by module on which part of a tensor its dropout works, for a rank of the tensor-parallel group.

    Dropouts that the plan names are on split features or heads; others in a sequence-parallel stack are on a part of
    the sequence, unless a region's own code calls them.

    Args:
        model: whose modules are searched for dropouts.
        tp_index: of the rank in the tensor-parallel group.
    """
    zones = {dropout.module: ShardRegion(dropout.dim, tp_index, tensor.degree) for dropout in tensor.plan.dropouts}
    regions = [region.module for region in tensor.plan.regions]
    for name, module in model.named_modules():
        if name in zones or not is_within(name, tensor.sequence_modules):
            continue
        if isinstance(module, nn.Dropout) or (may_drop_by_function(module) and not is_within(name, regions)):
            zones[name] = ShardRegion(1, tp_index, tensor.degree)
    return zones
