"""What is handed over: the tensors of a model under the names of its folder, in one order, cut into groups and buckets.

The order is that of the modules, with all tensors of a block together. Names say what is a block, since receivers know
no more: one has the same text up to its first number. What precedes all blocks is a group, and so is all other that is
in none, at the end.

>>> [list(names) for names in layerwise(["embed", "h.0.b", "norm", "h.1.a", "h.0.a"], key=str)]
[['embed'], ['h.0.b', 'h.0.a'], ['h.1.a'], ['norm']]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shardwise.checkpoint.hf.config_files import decoder_config, describe, folder_names
from shardwise.checkpoint.hf.exporter import ExportTensor, folder_parts, in_folder
from shardwise.checkpoint.hf.key_map import NameMap, WeightPart
from shardwise.checkpoint.manifest import CheckpointError
from shardwise.checkpoint.safetensors_io import dtype_name
from shardwise.config.resolve import Dtype
from shardwise.engine.adapters import AdaptedModel
from shardwise.engine.checkpoint_api import buffer_writer, saved_buffers
from shardwise.engine.parts import EngineParts
from shardwise.layout.slicing import Rect, Shape
from shardwise.runtime.precision import torch_dtype
from shardwise.zero.weight_gather import ModelTensor

Values = Mapping[str, Tensor]
Adapters = Literal["merge", "only"] | None
# What a user may say of names: the model's pattern -> the folder's; see `NameMap.of`.
Names = NameMap | Mapping[str, Any] | Literal["hf"] | None
Each = TypeVar("Each")
_BLOCK: Final = re.compile(r"(|.*?\.)(\d+)(?:\.|$)")  # the text of a name up to its first number, and that number


class WeightInfo(NamedTuple):
    """Describes a tensor that is handed over."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightItem:
    """Is what must be whole together, mostly one tensor of the model, and what is handed over of it.

    Attributes:
        parts: by name of a member, the tensors of a folder that it is.
        change: makes of the members, whole, what `parts` are cut from; None for the members themselves.
    """

    members: tuple[ModelTensor, ...]
    outputs: tuple[WeightInfo, ...]
    parts: Mapping[str, tuple[WeightPart, ...]]
    change: Callable[[Values], Values] | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the members, whole."""
        return sum(member.num_bytes for member in self.members)

    def tensors(self, members: Values) -> list[Tensor]:
        """Return what is handed over of the members, whole, by name, in the order of `outputs`."""
        values = members if self.change is None else self.change(members)
        blocks: dict[str, list[tuple[Rect, Tensor]]] = {info.name: [] for info in self.outputs}
        for member, parts in self.parts.items():
            for name, rect, block in in_folder(parts, Rect.whole(tuple(values[member].shape)), values[member]):
                blocks[name].append((rect, block))
        return [_put_together(info, blocks[info.name]) for info in self.outputs]


def _put_together(info: WeightInfo, blocks: Iterable[tuple[Rect, Tensor]]) -> Tensor:
    by_row = [block.to(info.dtype) for _, block in sorted(blocks, key=lambda placed: placed[0].start)]
    if not by_row:
        return torch.empty(info.shape, dtype=info.dtype)
    return by_row[0].contiguous() if len(by_row) == 1 else torch.cat(by_row)


def weight_items(parts: EngineParts, names: Names, dtype: Dtype | None, adapters: Adapters) -> list[WeightItem]:
    """Return what is handed over of an engine's model, in order; the arguments are those of `Engine.weights`.

    Raises:
        CheckpointError: the folder's tensors are no parts of the model's, two have one name, or one is packed; there
            are no adapters.
    """
    tensors, aliases = _model_tensors(parts, dtype)
    shapes = {name: tensor.shape for tensor in tensors for name in (tensor.name, *aliases[tensor.name])}
    model = AdaptedModel(parts.model, shapes)
    if adapters == "only":
        stored = model.adapter_names()
        of_adapters = [tensor for tensor in tensors if tensor.name in stored]
        items = [_renamed(tensor, stored[tensor.name] if names else tensor.name) for tensor in of_adapters]
    elif adapters is None and names is None:
        items = [_renamed(tensor, tensor.name) for tensor in tensors]
    else:
        items = _joined(_base_items(model, tensors, aliases, names, adapters))
    members = [member for item in items for member in item.members]
    packed = next((member.name for member in members if member.group is not None and member.group.is_opaque), None)
    if packed is not None and (names is not None or adapters == "merge"):
        raise CheckpointError(
            "export-packed",
            f"weights are handed over as floating numbers, and parameter {packed} is packed or of integers; take "
            'adapters="only", which hands over those alone, or keep its bytes by engine.save(path)',
        )
    return [item for group in layerwise(items, lambda item: item.outputs[0].name) for item in group]


def _renamed(tensor: ModelTensor, name: str) -> WeightItem:
    return _item(tensor, (WeightPart(name, Rect.whole(tensor.shape)),))


def _item(tensor: ModelTensor, parts: tuple[WeightPart, ...]) -> WeightItem:
    outputs = tuple(WeightInfo(stored.stored, tensor.dtype, stored.stored_shape) for stored in parts)
    return WeightItem((tensor,), outputs, {tensor.name: parts})


def _base_items(
    model: AdaptedModel,
    tensors: Iterable[ModelTensor],
    aliases: Mapping[str, tuple[str, ...]],
    names: Names,
    adapters: Adapters,
) -> Iterator[WeightItem]:
    """Yield the tensors of the model without its adapters; what these are merged into comes with them."""
    plain, described = model.plain_names, describe(model.base)
    # A reader of a folder of transformers ties its own parameters.
    ties = "model_type" in described.get("config", {}) or decoder_config(described) is not None
    tied = getattr(model.base, "all_tied_weights_keys", None) or {}  # names that transformers does not save
    exported, saved_names = list[ExportTensor](), dict[str, str]()
    for tensor in tensors:
        named = [plain[name] for name in (tensor.name, *aliases[tensor.name]) if name in plain]
        if named:
            saved_names[tensor.name] = min(named, key=lambda name: name in tied)
            others = tuple(name for name in named if name != saved_names[tensor.name])
            copies = () if tensor.group is not None and ties else others
            dtype = dtype_name(tensor.dtype)
            exported.append(ExportTensor(saved_names[tensor.name], others, tensor.shape, dtype, copies))
    rules = hub_rules(model.base, names, {plain[name]: shape for name, shape in model.shapes.items() if name in plain})
    parts = folder_parts(exported, rules)
    wrapper_of = model.wrapper_of if adapters == "merge" else {}
    for wrapper, group in groupby(tensors, lambda tensor: wrapper_of.get(tensor.name)):
        members = tuple(group)
        items = [_item(tensor, parts[saved_names[tensor.name]]) for tensor in members if tensor.name in saved_names]
        if wrapper is None:
            yield from items
            continue
        yield WeightItem(
            members,
            tuple(output for item in items for output in item.outputs),
            {plain[tensor.name]: parts[saved_names[tensor.name]] for tensor in members if tensor.name in plain},
            partial(model.merged, wrapper),
        )


def _joined(items: Iterable[WeightItem]) -> list[WeightItem]:
    """Return items, those as one that have rows of the same tensor of a folder."""
    groups, of_name = list[list[WeightItem]](), dict[str, list[WeightItem]]()
    for item in items:
        names = [info.name for info in item.outputs]
        group = next((of_name[name] for name in names if name in of_name), None)
        if group is None:
            groups.append(group := [])
        group.append(item)
        of_name |= dict.fromkeys(names, group)
    return [
        WeightItem(
            tuple(member for item in group for member in item.members),
            tuple({info.name: info for item in group for info in item.outputs}.values()),
            {name: parts for item in group for name, parts in item.parts.items()},
            None if all(item.change is None for item in group) else partial(_changed, group),
        )
        for group in groups
    ]


def _changed(items: Iterable[WeightItem], members: Values) -> dict[str, Tensor]:
    values = dict[str, Tensor]()
    for item in items:
        parts = {member.name: members[member.name] for member in item.members}
        values |= parts if item.change is None else item.change(parts)
    return values


def hub_rules(model: nn.Module, names: Names, shapes: Mapping[str, Shape]) -> NameMap:
    """Return the rules for the names of a model's tensors in a folder.

    Args:
        names: as in `Engine.weights`; None for no rules.
        shapes: of parameters and persistent buffers, whole, by all their names.
    """
    if names is None:
        return NameMap()
    return NameMap.of(None if names == "hf" else names).then(folder_names(model, shapes))


def _model_tensors(parts: EngineParts, dtype: Dtype | None) -> tuple[list[ModelTensor], dict[str, tuple[str, ...]]]:
    """Return the parameters and persistent buffers in the order of a state dict, and the aliases of each by name."""
    layout, aliases = parts.layout, dict[str, tuple[str, ...]]()
    tensors = dict[str, ModelTensor]()
    for group in layout.model_groups:
        computed = layout.precision_of(group).param
        for param in group.params:
            aliases[param.name] = param.aliases
            sent = torch_dtype(computed if group.is_opaque else dtype or computed)
            tensors[param.name] = ModelTensor(param.name, param.global_shape, sent, group, param)
    for buffer in saved_buffers(parts):
        name, shape = buffer.state_shard.name, buffer.state_shard.global_shape
        aliases[name] = buffer.state_shard.aliases
        tensors[name] = ModelTensor(name, shape, buffer.buffer.dtype, source=buffer_writer(layout, name))
    return [tensors[name] for name in _in_module_order(parts.model) if name in tensors], aliases


def _in_module_order(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers, all of a tied one, in the order of a state dict."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for named in (module.named_parameters, module.named_buffers)
        for name, _ in named(recurse=False, remove_duplicate=False)
    ]


def layerwise(values: Iterable[Each], key: Callable[[Each], str]) -> list[list[Each]]:
    """Cut values into groups, one for each block, by the names that `key` returns; see the module."""
    first, last = list[Each](), list[Each]()
    blocks: dict[str, dict[int, list[Each]]] = {}
    for value in values:
        if block := _BLOCK.match(key(value)):
            blocks.setdefault(block[1], {}).setdefault(int(block[2]), []).append(value)
        else:
            (last if blocks else first).append(value)
    numbered = [stack[number] for stack in blocks.values() for number in sorted(stack)]
    return [group for group in (first, *numbered, last) if group]
