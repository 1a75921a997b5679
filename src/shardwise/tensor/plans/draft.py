"""A plan in the making: what the makers of plans for Hugging Face models and for tables have in common."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from shardwise.config import ConfigError
from shardwise.layout.splits import Part, check_divides
from shardwise.layout.tensor_plan import LayerSplit, Region, SequenceStack, SplitDropout, TensorPlan
from shardwise.tensor.kinds import is_linear, is_lookup, is_transposed
from shardwise.tensor.plans.words import Style

# Attributes by which attention modules know their numbers of heads, and the features of all of them.
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_FEATURES = ("all_head_size", "inner_dim", "split_size")
_WHOLE_INPUTS = ("key_value_states", "encoder_hidden_states")


@dataclass(frozen=True)
class Heads:
    """The heads of one attention module; `kv` of them have keys and values of their own."""

    query: int
    kv: int
    dim: int

    @property
    def query_part(self) -> Part:
        """Along the features of all query heads."""
        return Part(self.query * self.dim, self.query)

    @property
    def kv_part(self) -> Part:
        """Along the features of all KV heads."""
        return Part(self.kv * self.dim, self.kv)

    def check(self, degree: int, query_name: str, kv_name: str) -> None:
        """Refuse a degree that does not fit the heads; the names are the config's."""
        check_divides(degree, self.query, query_name)
        self.kv_part.check(degree, kv_name)


class Draft:
    """Collects the splits of one model, in module order where its callers go in that order.

    Args:
        model: whose names and shapes are read.
        degree: ranks of the tensor-parallel group.
    """

    def __init__(self, model: nn.Module, degree: int) -> None:
        self.model = model
        self.degree = degree
        self.modules = dict(model.named_modules())
        self.layers: dict[str, LayerSplit] = {}
        self.regions: list[Region] = []
        self.stacks: list[SequenceStack] = []
        self.partial: list[str] = []
        self.attributes: list[tuple[str, str, int]] = []
        self.dropouts: list[SplitDropout] = []
        self.notes: list[str] = []
        self.whole: set[str] = set()  # left so, whatever a plan from outside says

    def plan(self) -> TensorPlan:
        """What was collected."""
        return TensorPlan(
            layers=tuple(self.layers.values()),
            regions=tuple(self.regions),
            stacks=tuple(self.stacks),
            partial=tuple(self.partial),
            attributes=tuple(self.attributes),
            dropouts=tuple(self.dropouts),
            notes=tuple(self.notes),
        )

    def layer(self, name: str, style: Style, *parts: Part) -> None:
        """Split one module; without parts, as its style says, by single features.

        Raises:
            ConfigError: the module has no weight of two dims.
        """
        if style.kind == "replicate":
            self.layers.pop(name, None)
            return
        if style.kind == "partial":
            self.partial += [f"{name}.{each}" for each, _ in self.modules[name].named_parameters()]
            return
        size = split_size(self.modules[name], name, style.kind)
        if not parts and style.kind in ("vocab", "head"):
            parts = (Part(size, is_padded=True),)
        self.layers[name] = LayerSplit(
            module=name,
            style=style.kind,
            parts=parts or equal_parts(name, size, style.num_parts),
            gathers_output=style.gathers_output,
            splits_input=style.splits_input,
            is_transposed=is_transposed(self.modules[name]),
        )

    def columns(self, prefix: str, names: Iterable[str], *parts: Part) -> None:
        """Split the linear layers `prefix.name` by their outputs."""
        for name in names:
            self.layer(f"{prefix}.{name}", Style("column"), *parts)

    def row(self, name: str, *parts: Part) -> None:
        """Split a linear layer by its inputs."""
        self.layer(name, Style("row"), *parts)

    def vocabulary(self) -> None:
        """Split the input embedding, the head, and all modules whose weights are tied to theirs, where all can be."""
        ends = [_ask(self.model, "get_input_embeddings"), _ask(self.model, "get_output_embeddings")]
        weights = dict.fromkeys(id(end.weight) for end in ends if isinstance(end, nn.Embedding | nn.Linear))
        for weight in weights:
            tied = {name: module for name, module in self.modules.items() if id(getattr(module, "weight", 0)) == weight}
            styles: dict[str, Literal["vocab", "head"]] = {
                name: "vocab" if isinstance(module, nn.Embedding) else "head" for name, module in tied.items()
            }
            why = next((why for name in tied if (why := why_whole(tied[name], styles[name]))), "")
            if why:
                self.whole.update(tied)
                self.notes.append(f"{', '.join(tied)} whole: {why}")
                continue
            for name, style in styles.items():
                self.layer(name, Style(style))

    def region(self, name: str) -> None:
        """Let the hidden states, and in cross-attention the encoder's, enter a module."""
        names = argument_names(self.modules[name])
        inputs = "hidden_states" if "hidden_states" in names else names[0]
        self.regions.append(Region(name, (inputs,), tuple(each for each in _WHOLE_INPUTS if each in names)))

    def local_heads(self, name: str, heads: Heads, *, has_dropout: bool = True) -> None:
        """Set what an attention module knows of its heads to a rank's numbers, and split its dropout by heads."""
        query, kv = (part.local_size(self.degree) // heads.dim for part in (heads.query_part, heads.kv_part))
        values = dict.fromkeys(_HEADS, (heads.query, query))
        values |= dict.fromkeys(_KV_HEADS, (heads.kv, kv))
        values |= dict.fromkeys(_FEATURES, (heads.query * heads.dim, query * heads.dim))
        values["num_key_value_groups"] = heads.query // heads.kv, query // kv
        for attribute, (whole, local) in values.items():
            if getattr(self.modules[name], attribute, None) == whole != local:
                self.attributes.append((name, attribute, local))
        if has_dropout:
            self.dropouts.append(SplitDropout(name, dim=1, is_functional=True))

    def stack(self, blocks: list[str], last: str | None) -> None:
        """Split the sequence between blocks; it is gathered behind `last`, or else the last block."""
        argument = argument_names(self.modules[blocks[0]])[0]
        modules = (*blocks, *([last] if last else []))
        self.stacks.append(SequenceStack(blocks[0], argument, modules[-1], modules))

    def child_blocks(self, name: str) -> list[str]:
        """The names of a container's children."""
        return [f"{name}.{child}" for child, _ in self.modules[name].named_children()]


def argument_names(module: nn.Module) -> list[str]:
    """The names of the arguments of a module's forward."""
    return list(inspect.signature(module.forward).parameters)


def split_size(module: nn.Module, name: str, style: str) -> int:
    """Indices along the dim that a style splits.

    Raises:
        ConfigError: the module has no weight of two dims.
    """
    shape = getattr(getattr(module, "weight", None), "shape", ())
    if len(shape) != 2:
        raise ConfigError(
            f"{name} is a {type(module).__name__} without a weight of two dims, which {style!r} splits; "
            "name a linear layer or an embedding"
        )
    dim = 1 if style in ("row", "column-embedding") else 0
    return int(shape[1 - dim if is_transposed(module) else dim])


def why_whole(module: nn.Module, style: str) -> str:
    """Return why a module cannot have a layer's style; nothing where it can."""
    kind = type(module).__name__
    if style not in ("vocab", "column-embedding"):
        return "" if is_linear(module) else f"the forward of {kind} is not nn.Linear's"
    needs = [name for name in ("max_norm", "sparse", "scale_grad_by_freq") if getattr(module, name, None)]
    if needs:
        return f"{needs[0]}={getattr(module, needs[0])} needs all of its rows"
    # What a forward of its own does with features that stay split, nobody knows.
    is_served = is_lookup(module) and (style == "vocab" or type(module).forward is nn.Embedding.forward)
    return "" if is_served else f"the forward of {kind} is not nn.Embedding's"


def equal_parts(name: str, size: int, num_parts: int) -> tuple[Part, ...]:
    """Several logical tensors of one size.

    Raises:
        ConfigError: they do not fill `size`.
    """
    if size % num_parts:
        raise ConfigError(f"{name}: {num_parts} equal parts do not fill {size} features; give the sizes of the parts")
    return (Part(size // num_parts),) * num_parts


def _ask(model: nn.Module, getter: str) -> object:
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError, TypeError):
        return None
