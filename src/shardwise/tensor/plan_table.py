"""Build plans: the code that plans for Hugging Face models and plans from tables share."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from torch import nn

from shardwise.config.errors import ConfigError
from shardwise.layout.tensor_plan import (
    LayerSplit,
    LayerStyle,
    SequenceStack,
    SharedInput,
    SplitDropout,
    TensorPlan,
    is_within,
)
from shardwise.layout.tp_sharding import FusedPart, check_divides
from shardwise.tensor.adapters import with_adapters
from shardwise.tensor.kinds import is_linear, is_lookup, is_transposed

# Attributes by which attention modules know their numbers of heads, and the features of all of them.
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_FEATURES = ("all_head_size", "inner_dim", "split_size")
_WHOLE_INPUTS = ("key_value_states", "encoder_hidden_states")


@dataclass(frozen=True)
class HeadSplit:
    """Describes the heads of one attention module; `kv` of them have keys and values of their own."""

    query: int
    kv: int
    dim: int

    @property
    def query_part(self) -> FusedPart:
        """Return the part along the features of all query heads."""
        return FusedPart(self.query * self.dim, self.query)

    @property
    def kv_part(self) -> FusedPart:
        """Return the part along the features of all KV heads."""
        return FusedPart(self.kv * self.dim, self.kv)

    def check(self, degree: int, query_name: str, kv_name: str) -> None:
        """Refuse a `degree` that does not fit the heads, whose config keys are `query_name` and `kv_name`."""
        check_divides(degree, self.query, query_name)
        self.kv_part.check(degree, kv_name)


class PlanBuilder:
    """Collects the splits of one model, in module order where its callers go in that order.

    Args:
        model: whose names and shapes are read.
    """

    def __init__(self, model: nn.Module, degree: int) -> None:
        self.model = model
        self.degree = degree
        self.modules = dict(model.named_modules())
        self.layers: dict[str, LayerSplit] = {}
        self.regions: list[SharedInput] = []
        self.stacks: list[SequenceStack] = []
        self.partial: list[str] = []
        self.attributes: list[tuple[str, str, int]] = []
        self.dropouts: list[SplitDropout] = []
        self.notes: list[str] = []
        self.whole: set[str] = set()  # these stay whole, whatever a plan from outside says

    def plan(self) -> TensorPlan:
        """Return the plan of all splits collected so far."""
        plan = TensorPlan(
            layers=tuple(self.layers.values()),
            regions=tuple(self.regions),
            stacks=tuple(self.stacks),
            partial=tuple(self.partial),
            attributes=tuple(self.attributes),
            dropouts=tuple(self.dropouts),
            notes=tuple(self.notes),
        )
        return with_adapters(plan, self.modules)

    def layer(self, name: str, style: StyleRule, *parts: FusedPart) -> None:
        """Split one module.

        Args:
            parts: the logical tensors in its matrix, one after the other; without them, single features.

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
            parts = (FusedPart(size, is_padded=True),)
        self.layers[name] = LayerSplit(
            module=name,
            style=style.kind,
            parts=parts or equal_parts(name, size, style.num_parts),
            gathers_output=style.gathers_output,
            splits_input=style.splits_input,
            is_transposed=is_transposed(self.modules[name]),
        )

    def columns(self, prefix: str, names: Iterable[str], *parts: FusedPart) -> None:
        """Split linear layers by their outputs.

        Args:
            prefix: name of the module that has them.
        """
        for name in names:
            self.layer(f"{prefix}.{name}", StyleRule("column"), *parts)

    def row(self, name: str, *parts: FusedPart) -> None:
        """Split a linear layer by its inputs."""
        self.layer(name, StyleRule("row"), *parts)

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
                self.layer(name, StyleRule(style))

    def region(self, name: str) -> None:
        """Let the column layers of a module share the hidden states, and in cross-attention the encoder's."""
        names = argument_names(self.modules[name])
        inputs = "hidden_states" if "hidden_states" in names else names[0]
        self.regions.append(SharedInput(name, (inputs,), tuple(each for each in _WHOLE_INPUTS if each in names)))

    def local_heads(self, name: str, heads: HeadSplit, *, has_dropout: bool = True) -> None:
        """Set an attention module's numbers of heads to a rank's, and split its dropout by heads.

        Args:
            has_dropout: whether the module's forward drops probabilities by a function.
        """
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
        """Split the sequence between blocks; it is gathered after `last`, or else after the last block."""
        argument = argument_names(self.modules[blocks[0]])[0]
        modules = (*blocks, *([last] if last else []))
        self.stacks.append(SequenceStack(blocks[0], argument, modules[-1], modules))

    def child_blocks(self, name: str) -> list[str]:
        """Return the names of a container's children."""
        return [f"{name}.{child}" for child, _ in self.modules[name].named_children()]


def argument_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward."""
    return list(inspect.signature(module.forward).parameters)


def split_size(module: nn.Module, name: str, style: str) -> int:
    """Return the number of indices along the dim that a style splits.

    Args:
        module: with a weight of two dims.
        name: of the module, for the error.

    Raises:
        ConfigError: the module has no weight of two dims.
    """
    shape = getattr(getattr(module, "weight", None), "shape", ())
    if len(shape) != 2:
        raise ConfigError(
            "tp-plan-weight",
            f"{name} is a {type(module).__name__} without a weight of two dims, which {style!r} splits; "
            "name a linear layer or an embedding",
        )
    dim = 1 if style in ("row", "column-embedding") else 0
    return int(shape[1 - dim if is_transposed(module) else dim])


def why_whole(module: nn.Module, style: str) -> str:
    """Return why a module cannot have a layer's style; empty where it can."""
    kind = type(module).__name__
    if style not in ("vocab", "column-embedding"):
        return "" if is_linear(module) else f"the forward of {kind} is not nn.Linear's"
    needs = [name for name in ("max_norm", "sparse", "scale_grad_by_freq") if getattr(module, name, None)]
    if needs:
        return f"{needs[0]}={getattr(module, needs[0])} needs all of its rows"
    # A forward of its own may do anything with features that stay split.
    is_served = is_lookup(module) and (style == "vocab" or type(module).forward is nn.Embedding.forward)
    return "" if is_served else f"the forward of {kind} is not nn.Embedding's"


def equal_parts(name: str, size: int, num_parts: int) -> tuple[FusedPart, ...]:
    """Return several logical tensors of one size.

    Args:
        name: of the module, for the error.

    Raises:
        ConfigError: they do not fill `size`.
    """
    if size % num_parts:
        raise ConfigError(
            "parts-fill-dim",
            f"{name}: {num_parts} equal parts do not fill {size} features; give the sizes of the parts",
        )
    return (FusedPart(size // num_parts),) * num_parts


def _ask(model: nn.Module, getter: str) -> object:
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError, TypeError):
        return None


Table = Mapping[str, str | Sequence[str]]


def table_plan(model: nn.Module, table: Table, degree: int) -> TensorPlan:
    """Return the plan that a table describes.

    Args:
        table: pattern of module names (`*` stands for anything) to an entry or several; the last style that matches a
            module counts.

    Raises:
        ConfigError: a pattern matches nothing, or an entry is not understood.
    """
    draft = PlanBuilder(model, degree)
    for pattern, entries in table.items():
        names = [name for name in draft.modules if name and fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise unknown_name(pattern, draft.modules, "module")
        for text in entries if isinstance(entries, list | tuple) else [entries]:
            entry = _parse(pattern, text)
            act = _ACTIONS.get(entry.word, _split)
            act(draft, names, entry)
    return draft.plan()


@dataclass(frozen=True)
class _TableEntry:
    """Holds a parsed entry `word argument ... key=value ...`, and its place in the table."""

    place: str
    word: str
    arguments: tuple[str, ...]
    options: Mapping[str, str]

    def number(self, key: str) -> int | None:
        """Return an option that is a whole number."""
        text = self.options.get(key)
        try:
            return None if text is None else int(text)
        except ValueError:
            raise ConfigError("tp-plan-number", f"{self.place}: {key}={text} is not a whole number") from None

    def names(self, key: str) -> tuple[str, ...]:
        """Return an option that is a list with commas."""
        return tuple(name for name in self.options.get(key, "").split(",") if name)


def _parse(pattern: str, text: Any) -> _TableEntry:
    place = f"tensor-parallel table, {pattern!r}: {text!r}"
    if not isinstance(text, str):
        raise ConfigError("tp-plan-text", f"{place} is no text; write a style such as 'column', or a list of entries")
    word, *others = text.split() or [""]
    known = (*OUR_WORDS, *_ACTIONS, *HUGGING_FACE_WORDS)
    if word not in known:
        close = difflib.get_close_matches(word, known, n=2)
        fix = f"did you mean {' or '.join(close)}?" if close else f"words are {', '.join((*OUR_WORDS, *_ACTIONS))}"
        raise ConfigError("tp-plan-style", f"{place}: {word!r} is no style; {fix}")
    options = dict(each.split("=", 1) for each in others if "=" in each)
    legal = _OPTIONS.get(word, ("units", "parts"))
    for key in options:
        if key not in legal:
            raise ConfigError(
                "tp-plan-option", f"{place}: {key!r} is no option of {word!r}; it takes {', '.join(legal) or 'none'}"
            )
    return _TableEntry(place, word, tuple(each for each in others if "=" not in each), options)


def _split(draft: PlanBuilder, names: list[str], entry: _TableEntry) -> None:
    style = OUR_WORDS.get(entry.word) or HUGGING_FACE_WORDS[entry.word]
    if entry.arguments:
        raise ConfigError(
            "tp-plan-words", f"{entry.place}: {entry.arguments[0]!r} is not understood; options are units= and parts="
        )
    for name in names:
        draft.layer(name, style)
        if entry.options and name in draft.layers:
            size = split_size(draft.modules[name], name, style.kind)
            draft.layers[name] = replace(draft.layers[name], parts=_parts(name, size, entry))


def _parts(name: str, size: int, entry: _TableEntry) -> tuple[FusedPart, ...]:
    """Parse `parts=2` (equal parts) or `parts=512:8+128:2` (512 and 128 features in 8 and 2 units)."""
    text, units = entry.options.get("parts", "1"), entry.number("units")
    if ":" not in text and "+" not in text:
        parts = equal_parts(name, size, entry.number("parts") or 1)
        return tuple(FusedPart(part.size, units) for part in parts)
    try:
        pairs = [part.partition(":") for part in text.split("+")]
        return tuple(FusedPart(int(size), int(units) if units else None) for size, _, units in pairs)
    except ValueError:
        raise ConfigError(
            "tp-plan-parts", f"{entry.place}: parts={text} is not understood; write such as 512:8+128:2"
        ) from None


def _region(draft: PlanBuilder, names: list[str], entry: _TableEntry) -> None:
    whole = entry.names("whole")
    if not entry.arguments and not whole:
        raise ConfigError(
            "tp-region-arguments",
            f"{entry.place}: which arguments do its column layers share? write such as 'region x'",
        )
    draft.regions += [SharedInput(name, entry.arguments, whole) for name in names]


def _stack(draft: PlanBuilder, names: list[str], entry: _TableEntry) -> None:
    if len(entry.arguments) != 1:
        raise ConfigError(
            "tp-stack-argument", f"{entry.place}: which argument is split? write such as 'stack x last=norm'"
        )
    # The children of a matching block match too where the pattern ends in `*`.
    blocks = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    last = entry.names("last")
    draft.stacks.append(SequenceStack(blocks[0], entry.arguments[0], (*blocks, *last)[-1], (*blocks, *last)))


def _local(draft: PlanBuilder, names: list[str], entry: _TableEntry) -> None:
    for name in names:
        for attribute in entry.arguments:
            value = getattr(draft.modules[name], attribute, None)
            if not isinstance(value, int):
                raise ConfigError(
                    "tp-local-attribute", f"{entry.place}: {name} has no attribute {attribute!r} that is a whole number"
                )
            check_divides(draft.degree, value, f"{name}.{attribute}")
            draft.attributes.append((name, attribute, value // draft.degree))


def _dropout(draft: PlanBuilder, names: list[str], entry: _TableEntry) -> None:
    dim = entry.number("dim")
    if dim is None:
        raise ConfigError(
            "tp-dropout-dim", f"{entry.place}: along which dim is the tensor split? write such as '{entry.word} dim=1'"
        )
    draft.dropouts += [SplitDropout(name, dim, entry.word == "functional-dropout") for name in names]


_ACTIONS: Mapping[str, Callable[[PlanBuilder, list[str], _TableEntry], None]] = {
    "region": _region,
    "stack": _stack,
    "local": _local,
    "dropout": _dropout,
    "functional-dropout": _dropout,
}
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "region": ("whole",),
    "stack": ("last",),
    "local": (),
    "dropout": ("dim",),
    "functional-dropout": ("dim",),
    "replicate": (),
    "partial": (),
}


def check_plan(model: nn.Module, plan: TensorPlan, degree: int, sequence_parallel: bool) -> None:
    """Refuse a plan that does not fit a model.

    Args:
        model: whose names and shapes are read.
        sequence_parallel: whether the plan needs a stack.

    Raises:
        ConfigError: a name is not the model's, the plan splits nothing, parts do not fill their dim or do not divide, a
            region is inside another, or a stack is needed and missing.
    """
    modules = dict(model.named_modules())
    if not plan.layers:
        raise ConfigError(
            "tp-plan-empty", "the tensor-parallel plan splits no layer; name some, such as {'blocks.*.up': 'column'}"
        )
    for name in _module_names(plan):
        if name not in modules:
            raise unknown_name(name, modules, "module")
    params = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in plan.partial:
        if name not in params:
            raise unknown_name(name, params, "parameter")
    for region in plan.regions:
        for name in (*region.inputs, *region.whole_inputs):
            _check_argument(modules[region.module], region.module, name)
    for stack in plan.stacks:
        _check_argument(modules[stack.first], stack.first, stack.argument)
    _check_regions(plan, params)
    for layer in plan.layers:
        _check_layer(modules[layer.module], layer, degree)
    if sequence_parallel and not plan.stacks:
        reason = next((note for note in plan.notes if note.startswith("no sequence")), "the plan names no blocks")
        raise ConfigError(
            "tp-no-stack",
            "tensor.sequence_parallel=true needs a plan that says between which blocks the sequence is split: "
            f"{reason}; set it to false, or name blocks, regions and the last norm in a table, such as "
            "{'blocks.*': 'stack x last=norm', 'blocks.*.ffn': 'region x'}",
        )


def unknown_name(name: str, names: Iterable[str], kind: str) -> ConfigError:
    """Return the error for a name, or a pattern, that the model does not have; it suggests close ones.

    Args:
        kind: module or parameter, for the message.
    """
    names = [name for name in names if name]
    close = difflib.get_close_matches(name, names, n=3)
    fix = f"did you mean {' or '.join(close)}?" if close else f"names are such as {', '.join(names[:3])}"
    return ConfigError(
        "tp-plan-name", f"the tensor-parallel plan names {name!r}, but the model has no such {kind}; {fix}"
    )


def _module_names(plan: TensorPlan) -> Iterable[str]:
    for items in (plan.layers, plan.regions, plan.dropouts):
        yield from (item.module for item in items)
    for stack in plan.stacks:
        yield from (stack.first, stack.last, *stack.modules)
    yield from plan.after_rows
    for name, _, _ in plan.attributes:
        yield name


def _check_argument(module: nn.Module, name: str, argument: str) -> None:
    names = argument_names(module)
    if argument not in names:
        raise ConfigError(
            "tp-plan-argument", f"{name} has no argument {argument!r}; its forward takes {', '.join(names)}"
        )


def _check_regions(plan: TensorPlan, params: Iterable[str]) -> None:
    """Refuse whole parameters in a region, which maps its input once: their gradients would count once per rank."""
    split = {layer.module for layer in plan.layers}
    regions = [region.module for region in plan.regions]
    for region in regions:
        outer = next((each for each in regions if region.startswith(f"{each}.")), None)
        if outer is not None:
            raise ConfigError(
                "tp-nested-regions",
                f"region {region} is in region {outer}, so its gradients would be summed twice; keep one of them",
            )
    named = split.union(plan.after_rows)
    for name in params:
        module = name.rpartition(".")[0]
        if module not in named and name not in plan.partial and is_within(module, regions):
            raise ConfigError(
                "tp-whole-in-region",
                f"{name} is in a region of the tensor-parallel plan, where ranks work on parts, but the plan neither "
                "splits it nor calls it partial; name its module, such as column, row or partial, or move it (an "
                "adapter, say) out of the region",
            )


def _check_layer(module: nn.Module, layer: LayerSplit, degree: int) -> None:
    size = split_size(module, layer.module, layer.style)
    if why := why_whole(module, layer.style):
        raise ConfigError(
            "tp-layer-style",
            f"layer {layer.module} cannot be split by {layer.style!r}: {why}; take it out of the plan, or let "
            "shardwise.propose_plan(model, batch, tp=...) make one, which leaves whole what cannot be split",
        )
    total = sum(part.size for part in layer.parts)
    if total != size:
        raise ConfigError("parts-fill-dim", f"{layer.module}: parts of {total} features in all do not fill its {size}")
    for part in layer.parts:
        units = part.size if part.num_units is None else part.num_units
        what = f"the {'features' if part.num_units is None else 'units'} of {layer.module}"
        if part.size % units:
            raise ConfigError("tp-units-divide", f"{layer.module}: {part.size} features do not divide by {units} units")
        part.check(degree, what)
        if layer.style == "row" and not part.is_padded:
            check_divides(degree, units, what)  # ranks that share inputs would add them twice


NO_TENSOR: Final = "use mesh.dp_shard with zero.stage=3 in place of mesh.tp"


@dataclass(frozen=True)
class StyleRule:
    """Says how a style's word splits a module.

    Attributes:
        kind: a layer's style; replicate: the module stays whole; partial: it stays whole, and its gradient is summed.
        num_parts: equal logical tensors in its weight, one after the other.
    """

    kind: LayerStyle | Literal["replicate", "partial"]
    gathers_output: bool = False
    splits_input: bool = False
    num_parts: int = 1


_COLUMN_GATHER = StyleRule("column", gathers_output=True)
_ROW_SPLIT = StyleRule("row", splits_input=True)

OUR_WORDS: Mapping[str, StyleRule] = {
    "column": StyleRule("column"),
    "row": StyleRule("row"),
    "column-gather": _COLUMN_GATHER,
    "row-split": _ROW_SPLIT,
    "vocab": StyleRule("vocab"),
    "head": StyleRule("head"),
    "column-embedding": StyleRule("column-embedding"),
    "replicate": StyleRule("replicate"),
    "partial": StyleRule("partial"),
}

HUGGING_FACE_WORDS: Mapping[str, StyleRule] = {
    "colwise": StyleRule("column"),
    "rowwise": StyleRule("row"),
    "colwise_gather_output": _COLUMN_GATHER,
    "colwise_rep": _COLUMN_GATHER,
    "rowwise_split_input": _ROW_SPLIT,
    "rowwise_rep": _ROW_SPLIT,
    "packed_colwise": StyleRule("column", num_parts=2),
    "packed_rowwise": StyleRule("row", num_parts=2),
    "embedding_rowwise": StyleRule("vocab"),
    # Theirs gathers the output, with the same values as a vocabulary split by rows, which also suits a tied head.
    "embedding_colwise": StyleRule("vocab"),
    **dict.fromkeys(("replicated_with_grad_allreduce", "mla_kv_a_proj"), StyleRule("partial")),
    # What theirs does for parameters that are no layers' is done by the split of the module's heads, or not at all.
    **dict.fromkeys(("replicate", "local_params"), StyleRule("replicate")),
}
