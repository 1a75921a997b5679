"""Make plans from those that Hugging Face models bring (`_tp_plan`, `_pp_plan`); transformers is not imported.

Their plans name the linear layers. This module adds: heads that stay whole, KV heads that ranks share, embedding and
head, which inputs column layers share, where the sequence is split, and the numbers of heads of attention modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from shardwise.config.errors import ConfigError
from shardwise.construction.experts import is_experts
from shardwise.layout.tensor_plan import PROVED, ProvedPlan, SplitDropout, TensorPlan, is_within, kinds_of
from shardwise.layout.tp_sharding import FusedPart, check_divides
from shardwise.tensor.kinds import is_linear, is_lookup
from shardwise.tensor.plan_table import (
    HUGGING_FACE_WORDS,
    NO_TENSOR,
    HeadSplit,
    PlanBuilder,
    StyleRule,
    Table,
    argument_names,
    check_plan,
    split_size,
    table_plan,
)

_KEY_OR_VALUE = re.compile(r"(^|\.)(k|v|key|value)(_proj)?(\.|$)")
_FUSED = re.compile(r"qkv|query_key_value")
_OWN_TABLE = (
    "let shardwise.propose_plan(model, batch, tp=...) make one, give your own as plan={module pattern: style}, or "
    f"{NO_TENSOR}"
)

Styles = dict[str, StyleRule]


def huggingface_plan(model: nn.Module, degree: int) -> TensorPlan | None:
    """Return the plan that a Hugging Face model brings, completed; None where it brings none.

    Args:
        model: with `_tp_plan`, as transformers sets it, or with `config.base_model_tp_plan`.

    Raises:
        ConfigError: a style is not known here (experts), heads or features do not divide by `degree`, or a layer that
            splits its input is next to others that the plan does not name.
    """
    words = _their_plan(model)
    if not words:
        return None
    draft = PlanBuilder(model, degree)
    draft.vocabulary()
    decided = {*draft.layers, *draft.whole}
    styles = {name: style for name, style in _styles(draft, words).items() if name not in decided}
    if not styles and not _experts(draft):
        return None
    regions = _regions(styles)
    for name, style in styles.items():
        region = next((each for each in regions if name.startswith(f"{each}.")), None)
        if style.kind != "partial" and region is None:
            draft.layer(name, style)
            _check_features(draft, name)
    for region in regions:
        inside = {name: style for name, style in styles.items() if name.startswith(f"{region}.")}
        if _is_attention(draft, region) and not any(style.splits_input for style in inside.values()):
            _split_attention(draft, region, inside)
        elif hasattr(draft.modules[region], "kv_lora_rank"):
            _split_latent_attention(draft, region, inside)
        else:
            if not _split_features(draft, region, inside):
                continue
        draft.region(region)
    _add_stack(draft)
    return draft.plan()


def _their_plan(model: nn.Module) -> dict[str, str]:
    """Return style by pattern of names in `model`; `*` stands for the index of a layer."""
    if not hasattr(model, "base_model_prefix"):
        return {}  # inner modules of theirs have the config too
    words = dict(getattr(model, "_tp_plan", None) or {})
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = str(model.base_model_prefix)
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return words or {f"{prefix}{pattern}": word for pattern, word in base.items()}


def _styles(draft: PlanBuilder, words: dict[str, str]) -> Styles:
    """Return style by module, in module order; a later pattern wins."""
    styles: Styles = {}
    passed_over = [*_experts(draft), *_with_bare_parameters(draft, words)]  # mesh.ep divides experts, whatever it says
    for pattern, word in words.items():
        matching = [name for name in draft.modules if _regex(pattern).fullmatch(name)]
        matching = [name for name in matching if not is_within(name, passed_over)]
        style = HUGGING_FACE_WORDS.get(word)
        if matching and style is None:
            raise ConfigError(
                "tp-plan-style",
                f"{type(draft.model).__name__} splits {pattern!r} by {word!r}, a style that Shardwise does not know: "
                f"it splits dense layers, and experts of Hugging Face's interface; {_OWN_TABLE}",
            )
        styles |= {name: style for name in matching if style is not None}
    return {name: styles[name] for name in draft.modules if name in styles}


def _with_bare_parameters(draft: PlanBuilder, patterns: Iterable[str]) -> list[str]:
    """Return the modules that stay whole as their plan splits parameters of theirs that are no layers (sinks)."""
    experts, bare = _experts(draft), [_regex(pattern) for pattern in patterns]
    names = [name for name, _ in draft.model.named_parameters() if any(regex.fullmatch(name) for regex in bare)]
    names = [name for name in names if name not in draft.modules and not is_within(name, experts)]
    for pattern in dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names):
        draft.notes.append(f"{pattern.rpartition('.')[0]} whole: its plan splits {pattern}, which is no layer")
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _experts(draft: PlanBuilder) -> list[str]:
    return [name for name, module in draft.modules.items() if is_experts(module)]


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))


def _regions(styles: Styles) -> list[str]:
    """Return the innermost modules around each row layer and the columns that feed it, in order."""
    columns = [name for name, style in styles.items() if style.kind == "column"]
    regions = dict.fromkeys(_around(name, columns) for name, style in styles.items() if style.kind == "row")
    for outer in regions:
        if any(inner.startswith(f"{outer}.") for inner in regions):
            raise ConfigError(
                "tp-nested-regions", f"the plan has row layers of its own in {outer} and within it; {_OWN_TABLE}"
            )
    return list(regions)


def _around(row: str, columns: list[str]) -> str:
    name = row
    while name:
        name = name.rpartition(".")[0]
        if name and any(column.startswith(f"{name}.") for column in columns):
            return name
    raise ConfigError("tp-plan-columns", f"the plan splits the inputs of {row}, but no outputs before it; {_OWN_TABLE}")


def _is_attention(draft: PlanBuilder, region: str) -> bool:
    return _head_dim(draft.modules[region]) is not None


def _head_dim(module: Any) -> int | None:
    found: int | None = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    return found


def _split_attention(draft: PlanBuilder, region: str, inside: Styles) -> None:
    """Split an attention module by its heads."""
    heads = _heads(draft, region, inside)
    heads.check(draft.degree, "num_attention_heads", "num_key_value_heads")
    for name, style in inside.items():
        if style.kind in ("replicate", "partial"):
            draft.layer(name, style)
            continue
        size = split_size(draft.modules[name], name, style.kind)
        is_kv = style.kind == "column" and _KEY_OR_VALUE.search(name.removeprefix(f"{region}."))
        units = heads.kv if is_kv else heads.query
        is_fused = _FUSED.search(name.rpartition(".")[2]) is not None
        if size % units or style.num_parts > 1 or (is_fused and size != 3 * heads.query * heads.dim):
            raise ConfigError(
                "tp-unknown-heads",
                f"{name}: how its {size} features belong to {units} heads is not known; {_OWN_TABLE}",
            )
        draft.layer(name, style, FusedPart(size, units))
    for name, param in _unsplit(draft, region, inside):
        # A norm over single heads sees only this rank's heads.
        if param.shape != (heads.dim,) or name.count(".") != region.count(".") + 2:
            raise _unknown(draft, region, name)
        draft.partial.append(name)
    draft.local_heads(region, heads, has_dropout=_drops_heads(draft, region))


def _split_latent_attention(draft: PlanBuilder, region: str, inside: Styles) -> None:
    """Split an attention module whose heads are made from latent states; what makes these is whole on every rank.

    Each rank uses the latent states for its own heads, so the gradients of what makes them are parts of sums.
    """
    module: Any = draft.modules[region]
    heads = HeadSplit(module.num_heads, module.num_heads, module.v_head_dim)
    heads.check(draft.degree, "num_attention_heads", "num_attention_heads")
    split = {name: style for name, style in inside.items() if style.kind in ("column", "row")}
    for name, style in split.items():
        draft.layer(name, style, FusedPart(split_size(draft.modules[name], name, style.kind), heads.query))
    draft.partial.extend(name for name, _ in _unsplit(draft, region, split))
    draft.local_heads(region, heads, has_dropout=_drops_heads(draft, region))


def _heads(draft: PlanBuilder, region: str, inside: Styles) -> HeadSplit:
    module: Any = draft.modules[region]
    dim = _head_dim(module) or 1
    value_dim = getattr(module, "v_head_dim", None) or dim
    rows = [name for name, style in inside.items() if style.kind == "row"]
    keys = [name for name in inside if _KEY_OR_VALUE.search(name.removeprefix(f"{region}."))]
    keys = [name for name in keys if inside[name].kind == "column"]
    query = split_size(draft.modules[rows[0]], rows[0], "row") // value_dim
    dims = [value_dim if name.rpartition(".")[2].startswith("v") else dim for name in keys]
    sizes = [split_size(draft.modules[name], name, "column") for name in keys]
    kv = min((size // head_dim for size, head_dim in zip(sizes, dims, strict=True)), default=query)
    if not kv or query % kv:
        raise ConfigError(
            "kv-heads-divide-heads",
            f"{region}: {query} query heads do not divide by {kv} KV heads of {dim}; {_OWN_TABLE}",
        )
    return HeadSplit(query, kv, dim)


def _drops_heads(draft: PlanBuilder, region: str) -> bool:
    """Return whether an attention module's functional dropouts are on heads, not on its output (as in Starcoder2)."""
    module = draft.modules[region]
    on_heads, on_output = (getattr(module, name, 0) for name in ("attention_dropout", "residual_dropout"))
    if not isinstance(on_output, float) or not on_output:
        return True
    if on_heads:
        raise ConfigError(
            "tp-two-dropouts",
            f"{region} drops both attention ({on_heads}) and its output ({on_output}) by functions that look the "
            "same; set residual_dropout=0 or attention_dropout=0",
        )
    return False


def _split_features(draft: PlanBuilder, region: str, inside: Styles) -> bool:
    """Split a feed-forward network by its features, or an attention module whose plan gathers its heads.

    Returns:
        whether the column layers of the region can share its inputs. Where norms see gathered features, their
        gradients are whole on every rank, and each matrix maps its inputs separately.
    """
    fused = _chunked(draft, inside)
    for name, style in inside.items():
        if name in fused:
            style = StyleRule("column", num_parts=2) if style.kind == "column" else StyleRule("row")
        draft.layer(name, style)
        _check_features(draft, name)
    is_gathered = not fused and all(style.gathers_output for style in inside.values() if style.kind == "column")
    if is_gathered:
        place = re.sub(r"\.\d+\.", ".*.", region)
        note = f"{place}: Hugging Face's plan gathers what is between its matrices, so every rank computes all of it"
        draft.notes += [note] if note not in draft.notes else []
    is_region = True
    for name, param in _unsplit(draft, region, inside):
        is_activation = param.numel() == 1 and name.removeprefix(f"{region}.").startswith("act")
        if not (is_activation or (is_gathered and param.dim() < 2)):
            raise _unknown(draft, region, name)
        if is_gathered:
            is_region = False
        else:  # an activation's number (xIELU) acts on each feature, of which a rank has some
            draft.partial.append(name)
    return is_region


def _chunked(draft: PlanBuilder, inside: Styles) -> set[str]:
    """Return the names where `gate_up_proj` is gathered only for a `chunk(2, -1)`, which fits local parts too."""
    by_leaf = {name.rpartition(".")[2]: name for name in inside}
    if set(by_leaf) != {"gate_up_proj", "down_proj"}:
        return set()
    both = split_size(draft.modules[by_leaf["gate_up_proj"]], by_leaf["gate_up_proj"], "column")
    one = split_size(draft.modules[by_leaf["down_proj"]], by_leaf["down_proj"], "row")
    return set(inside) if both == 2 * one else set()


def _check_features(draft: PlanBuilder, name: str) -> None:
    """Refuse a degree that does not divide the features that a layer splits; replicated layers split nothing."""
    intermediate_size = getattr(getattr(draft.model, "config", None), "intermediate_size", None)
    for part in draft.layers[name].parts if name in draft.layers else ():
        what = "intermediate_size" if part.size == intermediate_size else f"the features of {name}"
        if not part.is_padded:
            check_divides(draft.degree, part.size, what)


def _unsplit(draft: PlanBuilder, region: str, inside: Styles) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters of a region that the plan does not name."""
    for name, param in draft.modules[region].named_parameters(region):
        if not any(name.startswith(f"{each}.") for each in inside):
            yield name, param


def _unknown(draft: PlanBuilder, region: str, name: str) -> ConfigError:
    return ConfigError(
        "tp-plan-unnamed",
        f"the plan of {type(draft.model).__name__} splits {region} but does not say how {name} takes part; "
        f"{_OWN_TABLE}",
    )


def _add_stack(draft: PlanBuilder) -> None:
    """Find the blocks and the norm after them in `_pp_plan`; add a note where the sequence cannot be split."""
    plan = getattr(draft.model, "_pp_plan", None) or {}
    containers = [name for name in plan if isinstance(draft.modules.get(name), nn.ModuleList)]
    for name in containers:
        blocks = draft.child_blocks(name)
        norm = _norm_after(draft, name.rpartition(".")[0], plan)
        strange = next(_mixing(draft, blocks), None)
        if strange is None and blocks:
            draft.stack(blocks, norm)
        elif strange is not None:
            draft.notes.append(f"no sequence parallelism: {strange} may read other positions and is not split")


def _norm_after(draft: PlanBuilder, parent: str, plan: dict[str, Any]) -> str | None:
    """Return the module after the blocks that maps hidden states to hidden states."""
    prefix = f"{parent}." if parent else ""
    for name, (inputs, _) in plan.items():
        is_beside = name.startswith(prefix) and "." not in name.removeprefix(prefix)
        is_norm = not isinstance(draft.modules.get(name), nn.ModuleList | None) and inputs == ["hidden_states"]
        if is_beside and is_norm and argument_names(draft.modules[name]) and name not in draft.layers:
            return name
    return None


def _mixing(draft: PlanBuilder, blocks: list[str]) -> Iterator[str]:
    """Yield parameters in blocks, outside of regions, that have more than one dim, so are no norms."""
    regions = tuple(f"{region.module}." for region in draft.regions)
    of_tokens = [name.rpartition(".")[0] for name in _experts(draft)]  # a router and its experts, token by token
    for block in blocks:
        for name, param in draft.modules[block].named_parameters(block):
            if param.dim() > 1 and not name.startswith(regions) and not is_within(name, of_tokens):
                yield name


def family_plan(model: nn.Module, degree: int) -> TensorPlan | None:
    """Return the plan of a model of a known family; None for others.

    Raises:
        ConfigError: heads or features do not divide by `degree`.
    """
    # Inner modules of theirs have a config too, but no prefix.
    config = getattr(model, "config", None) if hasattr(model, "base_model_prefix") else None
    make = _FAMILIES.get(str(getattr(config, "model_type", None)))
    if make is None:
        return None
    draft = PlanBuilder(model, degree)
    draft.vocabulary()
    make(draft)
    return draft.plan()


def _gpt2(draft: PlanBuilder) -> None:
    for name, module in draft.modules.items():
        if hasattr(module, "c_attn"):
            _gpt2_attention(draft, name, module)
        elif hasattr(module, "c_fc"):
            _mlp(draft, name, ("c_fc",), "c_proj", "n_inner")
        elif hasattr(module, "h") and isinstance(module.h, nn.ModuleList):
            prefix = f"{name}." if name else ""
            draft.stack(draft.child_blocks(f"{prefix}h"), f"{prefix}ln_f")


def _gpt2_attention(draft: PlanBuilder, name: str, module: Any) -> None:
    heads = HeadSplit(module.num_heads, module.num_heads, module.head_dim)
    heads.check(draft.degree, "n_head", "n_head")
    part = heads.query_part
    if hasattr(module, "q_attn"):  # cross-attention: keys and values alone are in one matrix
        draft.columns(name, ("c_attn",), part, part)
        draft.columns(name, ("q_attn",), part)
    else:
        draft.columns(name, ("c_attn",), part, part, part)
    draft.row(f"{name}.c_proj", part)
    draft.region(name)
    draft.local_heads(name, heads)
    draft.dropouts.append(SplitDropout(f"{name}.attn_dropout", dim=1))


def _bert(draft: PlanBuilder) -> None:
    for name, module in draft.modules.items():
        if name.endswith(".self") and hasattr(module, "query"):
            _bert_attention(draft, name, module)
        elif name.endswith(".intermediate"):
            block = name.removesuffix(".intermediate")
            check_divides(draft.degree, module.dense.weight.shape[0], "intermediate_size")
            draft.columns(name, ("dense",))
            draft.row(f"{block}.output.dense")
            draft.region(name)
        elif isinstance(module, nn.ModuleList) and name.endswith("encoder.layer"):
            draft.stack(draft.child_blocks(name), None)


def _bert_attention(draft: PlanBuilder, name: str, module: Any) -> None:
    heads = HeadSplit(module.num_attention_heads, module.num_attention_heads, module.attention_head_size)
    heads.check(draft.degree, "num_attention_heads", "num_attention_heads")
    draft.columns(name, ("query", "key", "value"), heads.query_part)
    draft.row(f"{name.removesuffix('.self')}.output.dense", heads.query_part)
    draft.region(name)
    draft.local_heads(name, heads)
    draft.dropouts.append(SplitDropout(f"{name}.dropout", dim=1))


def _t5(draft: PlanBuilder) -> None:
    for name, module in draft.modules.items():
        if hasattr(module, "key_value_proj_dim"):
            _t5_attention(draft, name, module)
        elif hasattr(module, "wo"):
            _mlp(draft, name, tuple(each for each in ("wi", "wi_0", "wi_1") if hasattr(module, each)), "wo", "d_ff")
            draft.dropouts.append(SplitDropout(f"{name}.dropout", dim=-1))
        elif hasattr(module, "block") and isinstance(module.block, nn.ModuleList):
            prefix = f"{name}." if name else ""
            draft.stack(draft.child_blocks(f"{prefix}block"), f"{prefix}final_layer_norm")


def _t5_attention(draft: PlanBuilder, name: str, module: Any) -> None:
    heads = HeadSplit(module.n_heads, module.n_heads, module.key_value_proj_dim)
    heads.check(draft.degree, "num_heads", "num_heads")
    draft.columns(name, ("q", "k", "v"), heads.query_part)
    draft.row(f"{name}.o", heads.query_part)
    if module.has_relative_attention_bias:
        draft.layer(f"{name}.relative_attention_bias", StyleRule("column-embedding"), FusedPart(heads.query))
    draft.region(name)
    draft.local_heads(name, heads)


def _opt(draft: PlanBuilder) -> None:
    layerdrop = getattr(draft.model.config, "layerdrop", 0)
    if layerdrop:
        raise ConfigError(
            "tp-layerdrop",
            f"layerdrop={layerdrop} lets each rank skip other layers, but tensor parallelism needs all ranks in each "
            "layer; set layerdrop=0",
        )
    draft.notes.append("no sequence parallelism: the blocks of OPT flatten samples and sequence to one dim")
    for name, module in draft.modules.items():
        if name.endswith(".self_attn"):
            heads = HeadSplit(module.num_heads, module.num_heads, module.head_dim)
            heads.check(draft.degree, "num_attention_heads", "num_attention_heads")
            draft.columns(name, ("q_proj", "k_proj", "v_proj"), heads.query_part)
            draft.row(f"{name}.out_proj", heads.query_part)
            draft.region(name)
            draft.local_heads(name, heads)
        elif hasattr(module, "fc1"):
            _mlp(draft, name, ("fc1",), "fc2", "ffn_dim", is_region=False)


def _mlp(
    draft: PlanBuilder, name: str, columns: tuple[str, ...], row: str, size_name: str, *, is_region: bool = True
) -> None:
    size = split_size(draft.modules[f"{name}.{row}"], f"{name}.{row}", "row")
    check_divides(draft.degree, size, size_name)
    draft.columns(name, columns)
    draft.row(f"{name}.{row}")
    if is_region:
        draft.region(name)


_FAMILIES: Mapping[str, Callable[[PlanBuilder], None]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "roberta": _bert,
    "xlm-roberta": _bert,
    "camembert": _bert,
    "t5": _t5,
    "mt5": _t5,
    "opt": _opt,
}


def find_plan(model: nn.Module, degree: int, given: Table | TensorPlan | None, sequence_parallel: bool) -> TensorPlan:
    """Return the plan by which tensor parallelism splits a model.

    Args:
        model: of any device; names and shapes are read only.
        given: a plan or a table, which then is the only source, or a `ProvedPlan`, which has one; None for the first
            of: the model's own `tensor_plan` (a plan, a table, or a method from `degree` to either), ours for its
            family, Hugging Face's. A model that contains such models is split where they are.
        sequence_parallel: whether the sequence is to be split between the plan's blocks.

    Raises:
        ConfigError: there is no plan, it does not fit the model, heads or features do not divide by `degree`, or
            sequence parallelism is asked of a plan without stacks.
    """
    if isinstance(given, ProvedPlan):
        return _plan_like(model, degree, given, sequence_parallel)
    plan = _plan_of(model, degree, given) or _plan_of_parts(model, degree)
    if plan is None:
        raise _no_plan(model, degree)
    check_plan(model, plan, degree, sequence_parallel)
    return plan


def _plan_like(model: nn.Module, degree: int, proved: ProvedPlan, sequence_parallel: bool) -> TensorPlan:
    """Return the plan of a model from the source of one that was proved, with its proof."""
    plan = find_plan(model, degree, proved.source, sequence_parallel)
    if others := sorted(kinds_of(plan) ^ kinds_of(proved)):
        raise ConfigError(
            "tp-proof-other-kinds",
            f"the plan was proved for a model that is split otherwise than {type(model).__name__}, as to "
            f"{' '.join(others[0])}; call shardwise.prove_plan with a small model that has all kinds of its modules",
        )
    proofs = [note for note in proved.notes if note.startswith(PROVED)]
    return replace(plan, notes=(*plan.notes, *proofs))


def _no_plan(model: nn.Module, degree: int) -> ConfigError:
    name = type(model).__name__
    if not any(is_linear(module) or is_lookup(module) for module in model.modules()):
        return ConfigError(
            "tp-nothing-to-split",
            f"{name} has no linear layers, nor embeddings, that mesh.tp={degree} can split; {NO_TENSOR}",
        )
    return ConfigError(
        "tp-no-plan",
        f"there is no tensor-parallel plan for {name}; let shardwise.propose_plan(model, batch, tp={degree}) make one, "
        "or give plan={module pattern: style}, such as {'blocks.*.up': 'column', 'blocks.*.down': 'row'}; where that "
        f"is refused too, {NO_TENSOR}",
    )


def _plan_of(model: nn.Module, degree: int, given: Table | TensorPlan | None = None) -> TensorPlan | None:
    source = getattr(model, "tensor_plan", None) if given is None else given
    if callable(source):
        source = source(degree)
    if source is not None and not isinstance(source, TensorPlan | Mapping):
        raise ConfigError(
            "tp-plan-type",
            f"plan={source!r} is a {type(source).__name__}; give a table {{module pattern: style}}, or what "
            "shardwise.propose_plan returned",
        )
    if isinstance(source, Mapping):
        return table_plan(model, source, degree)
    return source or family_plan(model, degree) or huggingface_plan(model, degree)


def _plan_of_parts(model: nn.Module, degree: int) -> TensorPlan | None:
    """Join the plans of the outermost modules that have one."""
    plan: TensorPlan | None = None
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        part = _plan_of(module, degree) if name and not name.startswith(inside or ("\0",)) else None
        if part is not None:
            inside += (f"{name}.",)
            plan = _join(plan or TensorPlan(), _moved(part, f"{name}."))
    return plan


def _join(one: TensorPlan, other: TensorPlan) -> TensorPlan:
    return TensorPlan(*(getattr(one, field) + getattr(other, field) for field in TensorPlan.__dataclass_fields__))


def _moved(plan: TensorPlan, prefix: str) -> TensorPlan:
    """Return the plan of a submodule with the names that its modules have in the whole model."""
    return TensorPlan(
        layers=tuple(replace(layer, module=prefix + layer.module) for layer in plan.layers),
        regions=tuple(replace(region, module=prefix + region.module) for region in plan.regions),
        stacks=tuple(
            replace(
                stack,
                first=prefix + stack.first,
                last=prefix + stack.last,
                modules=tuple(prefix + name for name in stack.modules),
            )
            for stack in plan.stacks
        ),
        partial=tuple(prefix + name for name in plan.partial),
        after_rows=tuple(prefix + name for name in plan.after_rows),
        attributes=tuple((prefix + name, attribute, value) for name, attribute, value in plan.attributes),
        dropouts=tuple(replace(dropout, module=prefix + dropout.module) for dropout in plan.dropouts),
        notes=plan.notes,
    )
