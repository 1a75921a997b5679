"""Plans for the families of Hugging Face models that bring none: GPT-2, BERT, T5 and OPT.

They are known by `config.model_type` and the names of their modules; transformers is not imported. What is not named
here stays whole: position and token-type embeddings, poolers, classifiers, OPT's `project_in` and `project_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from shardwise.config import ConfigError
from shardwise.layout.splits import Part, check_divides
from shardwise.layout.tensor_plan import SplitDropout, TensorPlan
from shardwise.tensor.plans.draft import Draft, Heads, split_size
from shardwise.tensor.plans.words import Style


def family_plan(model: nn.Module, degree: int) -> TensorPlan | None:
    """The plan of a model of a known family; None for others.

    Args:
        model: whose `config.model_type` names the family.
        degree: ranks of the tensor-parallel group.

    Raises:
        ConfigError: heads or features do not divide by `degree`.
    """
    # Their inner modules have a config too, but no prefix.
    config = getattr(model, "config", None) if hasattr(model, "base_model_prefix") else None
    make = _FAMILIES.get(str(getattr(config, "model_type", None)))
    if make is None:
        return None
    draft = Draft(model, degree)
    draft.vocabulary()
    make(draft)
    return draft.plan()


def _gpt2(draft: Draft) -> None:
    for name, module in draft.modules.items():
        if hasattr(module, "c_attn"):
            _gpt2_attention(draft, name, module)
        elif hasattr(module, "c_fc"):
            _mlp(draft, name, ("c_fc",), "c_proj", "n_inner")
        elif hasattr(module, "h") and isinstance(module.h, nn.ModuleList):
            prefix = f"{name}." if name else ""
            draft.stack(draft.child_blocks(f"{prefix}h"), f"{prefix}ln_f")


def _gpt2_attention(draft: Draft, name: str, module: Any) -> None:
    heads = Heads(module.num_heads, module.num_heads, module.head_dim)
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


def _bert(draft: Draft) -> None:
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


def _bert_attention(draft: Draft, name: str, module: Any) -> None:
    heads = Heads(module.num_attention_heads, module.num_attention_heads, module.attention_head_size)
    heads.check(draft.degree, "num_attention_heads", "num_attention_heads")
    draft.columns(name, ("query", "key", "value"), heads.query_part)
    draft.row(f"{name.removesuffix('.self')}.output.dense", heads.query_part)
    draft.region(name)
    draft.local_heads(name, heads)
    draft.dropouts.append(SplitDropout(f"{name}.dropout", dim=1))


def _t5(draft: Draft) -> None:
    for name, module in draft.modules.items():
        if hasattr(module, "key_value_proj_dim"):
            _t5_attention(draft, name, module)
        elif hasattr(module, "wo"):
            _mlp(draft, name, tuple(each for each in ("wi", "wi_0", "wi_1") if hasattr(module, each)), "wo", "d_ff")
            draft.dropouts.append(SplitDropout(f"{name}.dropout", dim=-1))
        elif hasattr(module, "block") and isinstance(module.block, nn.ModuleList):
            prefix = f"{name}." if name else ""
            draft.stack(draft.child_blocks(f"{prefix}block"), f"{prefix}final_layer_norm")


def _t5_attention(draft: Draft, name: str, module: Any) -> None:
    heads = Heads(module.n_heads, module.n_heads, module.key_value_proj_dim)
    heads.check(draft.degree, "num_heads", "num_heads")
    draft.columns(name, ("q", "k", "v"), heads.query_part)
    draft.row(f"{name}.o", heads.query_part)
    if module.has_relative_attention_bias:
        draft.layer(f"{name}.relative_attention_bias", Style("column-embedding"), Part(heads.query))
    draft.region(name)
    draft.local_heads(name, heads)


def _opt(draft: Draft) -> None:
    layerdrop = getattr(draft.model.config, "layerdrop", 0)
    if layerdrop:
        raise ConfigError(
            f"layerdrop={layerdrop} lets each rank skip other layers, but tensor parallelism needs all ranks in each "
            "layer; set layerdrop=0"
        )
    draft.notes.append("no sequence parallelism: the blocks of OPT flatten samples and sequence to one dim")
    for name, module in draft.modules.items():
        if name.endswith(".self_attn"):
            heads = Heads(module.num_heads, module.num_heads, module.head_dim)
            heads.check(draft.degree, "num_attention_heads", "num_attention_heads")
            draft.columns(name, ("q_proj", "k_proj", "v_proj"), heads.query_part)
            draft.row(f"{name}.out_proj", heads.query_part)
            draft.region(name)
            draft.local_heads(name, heads)
        elif hasattr(module, "fc1"):
            _mlp(draft, name, ("fc1",), "fc2", "ffn_dim", is_region=False)


def _mlp(
    draft: Draft, name: str, columns: tuple[str, ...], row: str, size_name: str, *, is_region: bool = True
) -> None:
    size = split_size(draft.modules[f"{name}.{row}"], f"{name}.{row}", "row")
    check_divides(draft.degree, size, size_name)
    draft.columns(name, columns)
    draft.row(f"{name}.{row}")
    if is_region:
        draft.region(name)


_FAMILIES: Mapping[str, Callable[[Draft], None]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "roberta": _bert,
    "xlm-roberta": _bert,
    "camembert": _bert,
    "t5": _t5,
    "mt5": _t5,
    "opt": _opt,
}
