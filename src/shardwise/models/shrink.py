"""Shrink a model's sizes to small ones that divide in the same way: pure integers, for ours and Hugging Face's models.

>>> from shardwise.models import preset
>>> mesh = MeshShape(pp=8, dp_shard=8, tp=8)
>>> scale = Scale(mesh, MeshShape(pp=4, dp_shard=2, tp=2), num_stages=8, num_folded_stages=4)
>>> small = shrink_decoder(preset("llama-3-70b"), scale)
>>> small.num_layers, small.hidden_size, small.num_heads, small.num_kv_heads, small.ffn_size, small.vocab_size
(8, 64, 16, 2, 224, 60)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Final

from shardwise.config.errors import ConfigError
from shardwise.config.model_files import CHOICE_NAMES, EXPERT_NAMES, check_model_config
from shardwise.config.untrusted_files import as_config_error
from shardwise.layout.mesh_shape import MeshShape
from shardwise.models import DecoderConfig

_HEAD_DIM: Final = 4
_VOCAB_SIZE: Final = 60
_SEQ_LEN: Final = 12
SMALL_NUM_EXPERTS: Final = 4
_MANY_SHARERS: Final = 8
_NUM_POSITIONS: Final = 48
_WINDOW: Final = 6
_BLOCK: Final = 2


@dataclass(frozen=True)
class Scale:
    """Says which meshes and stages the shrunk sizes must fit.

    Attributes:
        recompute_every: every so many blocks, one is recomputed; the small model keeps at least one other block.
    """

    mesh: MeshShape
    folded: MeshShape
    num_stages: int = 1
    num_folded_stages: int = 1
    recompute_every: int = 1


@dataclass(frozen=True)
class ModelSizes:
    """Holds the sizes of a model that are scaled."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_seq_len: int


def shrink_sizes(sizes: ModelSizes, scale: Scale, head_dim: int = _HEAD_DIM) -> ModelSizes:
    """Return small sizes in the same ratios, which divide by the folded axes if the given ones divide by the run's."""
    tp, folded_tp = scale.mesh.tp, scale.folded.tp
    num_sharers = sizes.num_heads // sizes.num_kv_heads
    if tp > sizes.num_kv_heads:  # ranks share KV heads, two of them each
        num_kv_heads = max(1, folded_tp // 2)
    else:
        most = 2 if num_sharers <= _MANY_SHARERS else 1
        num_kv_heads = folded_tp * min(most, max(1, sizes.num_kv_heads // tp))
    num_heads = num_kv_heads * num_sharers
    while sizes.num_heads % tp == 0 and num_heads % folded_tp:
        num_heads += num_kv_heads
    hidden_size = num_heads * head_dim
    if sizes.hidden_size != sizes.num_heads * sizes.head_dim:
        # Models with a head size of their own may still need hidden sizes that are a multiple of the number of heads.
        per_head = sizes.hidden_size * head_dim / (sizes.num_heads * sizes.head_dim)
        hidden_size = num_heads * max(1, math.ceil(per_head) if per_head > head_dim else math.floor(per_head))
    return ModelSizes(
        num_layers=shrink_layers(sizes.num_layers, scale),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=_like(round(hidden_size * sizes.ffn_size / sizes.hidden_size), sizes.ffn_size, tp, folded_tp),
        vocab_size=_like(_VOCAB_SIZE, sizes.vocab_size, tp, folded_tp),
        max_seq_len=shrink_seq_len(sizes.max_seq_len, scale),
    )


def shrink_layers(num_layers: int, scale: Scale) -> int:
    """Return the number of small layers: two a stage if there are enough, one more if stages do not divide them."""
    if num_layers < scale.num_stages:  # embedding and head are stages of their own
        return max(1, scale.num_folded_stages - (scale.num_stages - num_layers))
    per_stage = min(2, num_layers // scale.num_stages)
    wanted = per_stage * scale.num_folded_stages + (num_layers % scale.num_stages > 0)
    return min(num_layers, max(wanted, scale.recompute_every + 1))


def shrink_seq_len(seq_len: int, scale: Scale) -> int:
    """Return a small sequence length: tp divides it if it divides the run's, and every cp token split can divide it."""
    mesh, folded = scale.mesh, scale.folded
    if folded.cp == 1:
        return _like(_SEQ_LEN, seq_len, mesh.tp, folded.tp)
    unit = 2 * folded.cp * (folded.tp if seq_len % (mesh.cp * mesh.tp) == 0 else 1)
    return -(-_SEQ_LEN // unit) * unit


def shrink_decoder(shape: DecoderConfig, scale: Scale) -> DecoderConfig:
    """Return a decoder's shape with small sizes and attention blocks; other fields, such as tied embeddings, stay."""
    sizes = ModelSizes(**{field.name: getattr(shape, field.name) for field in fields(ModelSizes)})
    small = shrink_sizes(sizes, scale)
    attention = shape.attention
    if attention.kind != "dense":
        attention = attention.model_copy(update={"block": _BLOCK})
    # The shared experts have as many features as the dense layer, so that tp divides either.
    experts: dict[str, Any] = {"expert_size": None, "num_shared_experts": min(shape.num_shared_experts, 1)}
    if shape.num_experts:
        num_experts = min(shape.num_experts, SMALL_NUM_EXPERTS)
        experts |= {"num_experts": num_experts, "num_chosen": min(shape.num_chosen, 2, num_experts)}
    return replace(
        shape,
        attention=attention,
        **experts,
        **{field.name: getattr(small, field.name) for field in fields(ModelSizes)},
    )


# The families' names of their sizes; the first that a config has gives the model's size, and all of them are changed.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "depth"),
        "hidden_size": ("hidden_size", "n_embd", "d_model"),
        "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"),
        "num_kv_heads": ("num_key_value_heads",),
        "head_dim": ("head_dim", "d_kv"),
        "ffn_size": ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "decoder_ffn_dim"),
        "vocab_size": ("vocab_size",),
        "max_seq_len": ("max_position_embeddings", "n_positions"),
    }
)
_MORE_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "num_layers": ("num_decoder_layers", "encoder_layers"),
        "num_heads": ("encoder_attention_heads",),
        "ffn_size": ("encoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"),
        "hidden_size": ("word_embed_proj_dim", "embed_dim"),
        "max_seq_len": ("n_ctx",),
    }
)
_MOST: Final[Mapping[str, int]] = MappingProxyType(
    {
        **dict.fromkeys(EXPERT_NAMES, SMALL_NUM_EXPERTS),
        **dict.fromkeys(CHOICE_NAMES, 2),
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 2 * _HEAD_DIM),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "linear_head_dim"), _HEAD_DIM),
        **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
        **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    }
)
_TOKENS: Final[Mapping[str, int]] = MappingProxyType({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})


def shrink_huggingface(values: Mapping[str, Any], scale: Scale, seq_len: int) -> dict[str, Any]:
    """Return the values of a Hugging Face `config.json` with small sizes; other values, such as dropout, stay.

    Args:
        scale: the meshes and stages that the sizes must fit.

    Raises:
        ConfigError: layers, hidden size, heads or vocabulary have no known name.
    """
    sizes = read_huggingface(values)
    # A rotary embedding of a part of the head, or of several axes, rotates pairs, too.
    rotary = values.get("rope_parameters")
    axes = rotary.get("mrope_section") if isinstance(rotary, dict) else None
    is_partial = isinstance(axes, list) or any(key in values for key in ("partial_rotary_factor", "rotary_pct"))
    small = shrink_sizes(sizes, scale, head_dim=4 * _HEAD_DIM if is_partial else _HEAD_DIM)
    shrunk = dict(values)
    for field in fields(ModelSizes):
        for key in (*_NAMES[field.name], *_MORE_NAMES.get(field.name, ())):
            if isinstance(values.get(key), int):
                shrunk[key] = _shrink_key(field.name, key, values[key], sizes, small, scale)
    for key, most in _MOST.items():
        if isinstance(values.get(key), int):
            shrunk[key] = min(values[key], most)
    for key, kinds in values.items():
        if isinstance(kinds, list) and len(kinds) == sizes.num_layers > 1 and key.endswith("layer_types"):
            shrunk[key] = _spread(kinds, small.num_layers)
    if isinstance(rotary, dict) and isinstance(axes, list):
        section_dim = small.head_dim // 2 // max(1, len(axes))
        first = small.head_dim // 2 - section_dim * (len(axes) - 1)
        shrunk["rope_parameters"] = {**rotary, "mrope_section": [first, *[section_dim] * (len(axes) - 1)]}
    window = values.get("sliding_window")
    if isinstance(window, int) and window < seq_len:
        shrunk["sliding_window"] = _WINDOW
    shrunk |= dict(_small_tokens(values, small.vocab_size))
    if values.get("is_encoder_decoder"):  # labels become the decoder's input after this token
        shrunk.setdefault("decoder_start_token_id", 0)
    return shrunk


def read_huggingface(values: Mapping[str, Any]) -> ModelSizes:
    """Read the sizes of a Hugging Face config.

    Raises:
        ConfigError: layers, hidden size, heads or vocabulary have no known name.
    """
    with as_config_error():
        check_model_config(values, "the Hugging Face config")
    sizes: dict[str, int] = {}
    for field in fields(ModelSizes):
        numbers = [values[key] for key in _NAMES[field.name] if isinstance(values.get(key), int)]
        if numbers:
            sizes[field.name] = numbers[0]
    for name in ("num_layers", "hidden_size", "num_heads", "vocab_size"):
        if name not in sizes:
            raise ConfigError(
                "model-size-unknown",
                f"the Hugging Face config of a {values.get('model_type', 'model')} has none of "
                f"{', '.join(_NAMES[name])}; give one of a text model, in which they stand at the top",
            )
    sizes.setdefault("num_kv_heads", sizes["num_heads"])
    sizes.setdefault("head_dim", max(1, sizes["hidden_size"] // sizes["num_heads"]))
    sizes.setdefault("ffn_size", 4 * sizes["hidden_size"])
    sizes.setdefault("max_seq_len", _NUM_POSITIONS)
    return ModelSizes(**sizes)


def _shrink_key(name: str, key: str, value: int, sizes: ModelSizes, small: ModelSizes, scale: Scale) -> int:
    if name == "max_seq_len":
        return min(value, _NUM_POSITIONS)
    if name == "num_layers":  # an encoder and a decoder may have different numbers
        return shrink_layers(value, scale)
    if key in _MORE_NAMES.get(name, ()) and value != getattr(sizes, name):
        return _like(
            max(1, round(getattr(small, name) * value / getattr(sizes, name))), value, scale.mesh.tp, scale.folded.tp
        )
    result: int = getattr(small, name)
    return result


def _spread(kinds: list[Any], number: int) -> list[Any]:
    """Return as many kinds of layers, from the first to the last, so that few of many are still of all kinds."""
    return [kinds[round(index * (len(kinds) - 1) / max(1, number - 1))] for index in range(number)]


def _small_tokens(values: Mapping[str, Any], vocab_size: int) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key.endswith("_token_id"):
            tokens = value if isinstance(value, list) else [value]
            small = [
                token if token is None or 0 <= token < min(4, vocab_size) else _TOKENS.get(key, 0) for token in tokens
            ]
            yield key, small if isinstance(value, list) else small[0]


def _like(number: int, original: int, degree: int, folded_degree: int) -> int:
    """Return the smallest size >= `number` that `folded_degree` divides if and only if `degree` divides `original`."""
    number = max(1, number)
    if folded_degree == 1:
        return number
    divides = original % degree == 0
    while (number % folded_degree == 0) != divides:
        number += 1
    return number
