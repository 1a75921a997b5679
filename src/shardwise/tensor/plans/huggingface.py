"""Plans from those that Hugging Face models bring (`_tp_plan`, `_pp_plan`); transformers is not imported.

Theirs name the linear layers. Added are: heads that stay whole, KV heads that ranks share, embedding and head, where
inputs enter, where the sequence is split, and what attention modules know of their heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.config import ConfigError
from shardwise.layout.splits import Part, check_divides
from shardwise.layout.tensor_plan import TensorPlan
from shardwise.tensor.plans.draft import Draft, Heads, argument_names, split_size
from shardwise.tensor.plans.words import HUGGING_FACE_WORDS, NO_TENSOR, Style

_KEY_OR_VALUE = re.compile(r"(^|\.)(k|v|key|value)(_proj)?(\.|$)")
_FUSED = re.compile(r"qkv|query_key_value")
_OWN_TABLE = (
    "let shardwise.propose_plan(model, batch, tp=...) make one, give your own as plan={module pattern: style}, or "
    f"{NO_TENSOR}"
)

Styles = dict[str, Style]


def huggingface_plan(model: nn.Module, degree: int) -> TensorPlan | None:
    """The plan that a Hugging Face model brings, completed; None where it brings none.

    Args:
        model: with `_tp_plan`, as transformers sets it, or with `config.base_model_tp_plan`.
        degree: ranks of the tensor-parallel group.

    Raises:
        ConfigError: a style is not known here (experts), heads or features do not divide by `degree`, or a layer that
            splits its input stands beside others of which the plan does not speak.
    """
    words = _their_plan(model)
    if not words:
        return None
    draft = Draft(model, degree)
    draft.vocabulary()
    settled = {*draft.layers, *draft.whole}
    styles = {name: style for name, style in _styles(draft, words).items() if name not in settled}
    if not styles:
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
        else:
            if not _split_features(draft, region, inside):
                continue
        draft.region(region)
    _add_stack(draft)
    return draft.plan()


def _their_plan(model: nn.Module) -> dict[str, str]:
    """Style by pattern of names in `model`; `*` stands for the index of a layer."""
    if not hasattr(model, "base_model_prefix"):
        return {}  # their inner modules have the config too
    words = dict(getattr(model, "_tp_plan", None) or {})
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = str(model.base_model_prefix)
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return words or {f"{prefix}{pattern}": word for pattern, word in base.items()}


def _styles(draft: Draft, words: dict[str, str]) -> Styles:
    """Style by module, in module order; a later pattern wins."""
    names = (*draft.modules, *(name for name, _ in draft.model.named_parameters()))
    styles: Styles = {}
    for pattern, word in words.items():
        matching = [name for name in names if _regex(pattern).fullmatch(name)]
        style = HUGGING_FACE_WORDS.get(word)
        if matching and (style is None or matching[0] not in draft.modules):
            what = "a style" if style is None else "on a bare parameter"
            raise ConfigError(
                f"{type(draft.model).__name__} splits {pattern!r} by {word!r}, {what} that Shardwise does not know: it "
                f"splits dense layers, no experts; {_OWN_TABLE}"
            )
        styles |= {name: style for name in matching if style is not None}
    return {name: styles[name] for name in draft.modules if name in styles}


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))


def _regions(styles: Styles) -> list[str]:
    """The innermost modules around each row layer and the columns that feed it, in order."""
    columns = [name for name, style in styles.items() if style.kind == "column"]
    regions = dict.fromkeys(_around(name, columns) for name, style in styles.items() if style.kind == "row")
    for outer in regions:
        if any(inner.startswith(f"{outer}.") for inner in regions):
            raise ConfigError(f"the plan has row layers of its own in {outer} and within it; {_OWN_TABLE}")
    return list(regions)


def _around(row: str, columns: list[str]) -> str:
    name = row
    while name:
        name = name.rpartition(".")[0]
        if name and any(column.startswith(f"{name}.") for column in columns):
            return name
    raise ConfigError(f"the plan splits the inputs of {row}, but no outputs before it; {_OWN_TABLE}")


def _is_attention(draft: Draft, region: str) -> bool:
    return _head_dim(draft.modules[region]) is not None


def _head_dim(module: Any) -> int | None:
    found: int | None = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    return found


def _split_attention(draft: Draft, region: str, inside: Styles) -> None:
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
            raise ConfigError(f"{name}: how its {size} features belong to {units} heads is not known; {_OWN_TABLE}")
        draft.layer(name, style, Part(size, units))
    for name, param in _unsplit(draft, region, inside):
        # A norm of single heads sees this rank's alone.
        if param.shape != (heads.dim,) or name.count(".") != region.count(".") + 2:
            raise _unknown(draft, region, name)
        draft.partial.append(name)
    draft.local_heads(region, heads, has_dropout=_drops_heads(draft, region))


def _heads(draft: Draft, region: str, inside: Styles) -> Heads:
    dim = _head_dim(draft.modules[region]) or 1
    rows = [name for name, style in inside.items() if style.kind == "row"]
    keys = [name for name in inside if _KEY_OR_VALUE.search(name.removeprefix(f"{region}."))]
    keys = [name for name in keys if inside[name].kind == "column"]
    query = split_size(draft.modules[rows[0]], rows[0], "row") // dim
    kv = min((split_size(draft.modules[name], name, "column") // dim for name in keys), default=query)
    if not kv or query % kv:
        raise ConfigError(f"{region}: {query} query heads do not divide by {kv} KV heads of {dim}; {_OWN_TABLE}")
    return Heads(query, kv, dim)


def _drops_heads(draft: Draft, region: str) -> bool:
    """Whether the functional dropouts of an attention module are on heads, not on its output (as in Starcoder2)."""
    module = draft.modules[region]
    on_heads, on_output = (getattr(module, name, 0) for name in ("attention_dropout", "residual_dropout"))
    if not isinstance(on_output, float) or not on_output:
        return True
    if on_heads:
        raise ConfigError(
            f"{region} drops both attention ({on_heads}) and its output ({on_output}) by functions that cannot be told "
            "apart; set residual_dropout=0 or attention_dropout=0"
        )
    return False


def _split_features(draft: Draft, region: str, inside: Styles) -> bool:
    """Split a feed-forward network by its features, or an attention whose heads are gathered in between.

    Returns:
        whether what enters it may enter once for all of it. Where norms see gathered features, their gradients are
        whole on every rank, and each matrix is entered by itself.
    """
    fused = _chunked(draft, inside)
    for name, style in inside.items():
        if name in fused:
            style = Style("column", num_parts=2) if style.kind == "column" else Style("row")
        draft.layer(name, style)
        _check_features(draft, name)
    is_gathered = not fused and all(style.gathers_output for style in inside.values() if style.kind == "column")
    if is_gathered:
        place = re.sub(r"\.\d+\.", ".*.", region)
        note = f"{place}: Hugging Face's plan gathers what lies between its matrices, so every rank computes all of it"
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


def _chunked(draft: Draft, inside: Styles) -> set[str]:
    """`gate_up_proj` and `down_proj`: gathered for a `chunk(2, -1)` alone, which fits local parts as well."""
    by_leaf = {name.rpartition(".")[2]: name for name in inside}
    if set(by_leaf) != {"gate_up_proj", "down_proj"}:
        return set()
    both = split_size(draft.modules[by_leaf["gate_up_proj"]], by_leaf["gate_up_proj"], "column")
    one = split_size(draft.modules[by_leaf["down_proj"]], by_leaf["down_proj"], "row")
    return set(inside) if both == 2 * one else set()


def _check_features(draft: Draft, name: str) -> None:
    """Refuse a degree that does not divide what a layer splits; replicated ones split nothing."""
    intermediate_size = getattr(getattr(draft.model, "config", None), "intermediate_size", None)
    for part in draft.layers[name].parts if name in draft.layers else ():
        what = "intermediate_size" if part.size == intermediate_size else f"the features of {name}"
        if not part.is_padded:
            check_divides(draft.degree, part.size, what)


def _unsplit(draft: Draft, region: str, inside: Styles) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a region of which the plan does not speak."""
    for name, param in draft.modules[region].named_parameters(region):
        if not any(name.startswith(f"{each}.") for each in inside):
            yield name, param


def _unknown(draft: Draft, region: str, name: str) -> ConfigError:
    return ConfigError(
        f"the plan of {type(draft.model).__name__} splits {region} but does not say how {name} takes part; {_OWN_TABLE}"
    )


def _add_stack(draft: Draft) -> None:
    """Find the blocks and the norm behind them in `_pp_plan`; a note where the sequence cannot be split."""
    plan = getattr(draft.model, "_pp_plan", None) or {}
    containers = [name for name in plan if isinstance(draft.modules.get(name), nn.ModuleList)]
    for name in containers:
        blocks = draft.child_blocks(name)
        norm = _norm_behind(draft, name.rpartition(".")[0], plan)
        strange = next(_mixing(draft, blocks), None)
        if strange is None and blocks:
            draft.stack(blocks, norm)
        elif strange is not None:
            draft.notes.append(f"no sequence parallelism: {strange} may read other positions and is not split")


def _norm_behind(draft: Draft, parent: str, plan: dict[str, Any]) -> str | None:
    """The module behind the blocks that maps hidden states to hidden states."""
    prefix = f"{parent}." if parent else ""
    for name, (inputs, _) in plan.items():
        is_beside = name.startswith(prefix) and "." not in name.removeprefix(prefix)
        is_norm = not isinstance(draft.modules.get(name), nn.ModuleList | None) and inputs == ["hidden_states"]
        if is_beside and is_norm and argument_names(draft.modules[name]) and name not in draft.layers:
            return name
    return None


def _mixing(draft: Draft, blocks: list[str]) -> Iterator[str]:
    """Parameters in blocks, outside of regions, that are more than norms."""
    regions = tuple(f"{region.module}." for region in draft.regions)
    for block in blocks:
        for name, param in draft.modules[block].named_parameters(block):
            if param.dim() > 1 and not name.startswith(regions):
                yield name
