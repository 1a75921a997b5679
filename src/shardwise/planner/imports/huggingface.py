"""Read the shape of a model from Hugging Face's `config.json`: known architectures, and others by their fields' names.

>>> shape_of({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
...           "n_positions": 1024}, "config.json").num_params
124439808
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardwise.config.resolve import ConfigError
from shardwise.config.untrusted_files import UntrustedFileError
from shardwise.config.untrusted_files import read_json as read_foreign_json
from shardwise.planner.imports.imported import ImportedJob, whole_number
from shardwise.planner.shape import Experts, ModelShape

_HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "n_embed", "dim")
_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_FFN: Final = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "ffn_size")
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk")
_GATED_ACTIVATIONS: Final = frozenset({"silu", "swish", "swiglu", "geglu"})


@dataclass(frozen=True, kw_only=True)
class _Family:
    """State facts that an architecture's files leave out.

    Attributes:
        is_tied: whether the head is tied, where `tie_word_embeddings` is missing.
        learns_positions: whether positions are a table; it has `num_more_positions` additional rows.
        ffn_factor: feed-forward size over hidden size, where no size is given; 0 where one must be.
    """

    is_gated: bool
    has_biases: bool = False
    is_tied: bool = False
    learns_positions: bool = False
    num_more_positions: int = 0
    ffn_factor: int = 0


_LLAMA: Final = _Family(is_gated=True)
_GEMMA: Final = _Family(is_gated=True, is_tied=True)
_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        **dict.fromkeys(
            ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "phi3", "olmo", "olmo2"), _LLAMA
        ),
        **dict.fromkeys(
            ("deepseek_v2", "deepseek_v3", "stablelm", "granite", "internlm2", "smollm3", "gpt_oss"), _LLAMA
        ),
        **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2"), _GEMMA),
        "phi": _Family(is_gated=False, has_biases=True),
        "gpt2": _Family(is_gated=False, has_biases=True, is_tied=True, learns_positions=True, ffn_factor=4),
        "gpt_bigcode": _Family(is_gated=False, has_biases=True, is_tied=True, learns_positions=True, ffn_factor=4),
        "gpt_neo": _Family(is_gated=False, has_biases=True, is_tied=True, learns_positions=True, ffn_factor=4),
        "gptj": _Family(is_gated=False, has_biases=True, ffn_factor=4),
        "gpt_neox": _Family(is_gated=False, has_biases=True),
        "opt": _Family(
            is_gated=False, has_biases=True, is_tied=True, learns_positions=True, num_more_positions=2, ffn_factor=4
        ),
        "bloom": _Family(is_gated=False, has_biases=True, is_tied=True, ffn_factor=4),
        "falcon": _Family(is_gated=False, is_tied=True, ffn_factor=4),
        "mpt": _Family(is_gated=False, is_tied=True, ffn_factor=4),
        "starcoder2": _Family(is_gated=False, has_biases=True, is_tied=True),
    }
)


def read_huggingface(path: str | Path) -> ImportedJob:
    """Read the shape in a `config.json`, and the longest sequence it was made for.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or misses a size.
    """
    return imported_of(read_json(path), Path(path).name)


def imported_of(values: Mapping[str, Any], source: str) -> ImportedJob:
    """Return the shape and the longest sequence of a parsed `config.json`.

    Args:
        values: of the file.
        source: the file's name, for messages.

    Raises:
        ConfigError: a size is missing or is none.
    """
    return ImportedJob(
        shape=shape_of(values, source), seq_len=_num_positions(_text_part(values), source), notes=_notes(values)
    )


def is_huggingface(values: Mapping[str, Any]) -> bool:
    """Say whether a parsed JSON file gives the sizes of a model.

    >>> is_huggingface({"n_embd": 768}), is_huggingface({"zero_optimization": {"stage": 3}})
    (True, False)
    """
    return any(name in _text_part(values) for name in _HIDDEN)


def is_deepspeed(values: Mapping[str, Any]) -> bool:
    """Say whether a parsed JSON file looks like DeepSpeed's and not like a model's.

    >>> is_deepspeed({"zero_optimization": {"stage": 2}}), is_deepspeed({"hidden_size": 64})
    (True, False)
    """
    return any(key in values for key in ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"))


def read_json(path: str | Path) -> Mapping[str, Any]:
    """Parse a JSON file that holds one object.

    Raises:
        ConfigError: the file cannot be read, or is no such.
    """
    try:
        values = read_foreign_json(path, "give the path of a JSON file")
    except UntrustedFileError as error:
        raise ConfigError(error.code, str(error)) from None
    if not isinstance(values, dict):
        raise ConfigError("json-not-object", f"{path} holds no JSON object; give a file of keys and values")
    return values


def shape_of(values: Mapping[str, Any], source: str) -> ModelShape:
    """Return the shape that a parsed `config.json` describes.

    Args:
        values: of the file; of a model with several parts, that of text is taken.
        source: the file's name, for messages.

    Raises:
        ConfigError: a size is missing or is none.
    """
    text = _text_part(values)
    kind = str(text.get("model_type", values.get("model_type", "")))
    family = _FAMILIES.get(kind) or _guessed_family(text)
    hidden = whole_number(text, _HIDDEN, source)
    num_heads = whole_number(text, _HEADS, source)
    positions = _num_positions(text, source) if family.learns_positions else 0
    ffn = family.ffn_factor or whole_number(text, ("expansion_ratio",), source, default=0)
    vocab_size = whole_number(text, ("vocab_size",), source)
    return ModelShape(
        num_layers=whole_number(text, _LAYERS, source),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(text, num_heads, source),
        head_dim=_head_dim(text, hidden, num_heads, source),
        ffn_size=whole_number(text, _FFN, source, default=ffn * hidden or None),
        vocab_size=vocab_size,
        ffn="gated" if family.is_gated else "plain",
        is_tied=bool(text.get("tie_word_embeddings", values.get("tie_word_embeddings", family.is_tied))),
        has_biases=family.has_biases,
        num_positions=(positions + family.num_more_positions) if positions else 0,
        window=_window(text),
        experts=_experts(text, source),
        name=_name(values, kind),
    )


def _text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    part = values.get("text_config")
    return part if isinstance(part, Mapping) and part else values


def _guessed_family(text: Mapping[str, Any]) -> _Family:
    """Guess the family of an unknown architecture: gated where its activation is one that gates use."""
    activation = str(text.get("hidden_act", text.get("hidden_activation", text.get("activation_function", "silu"))))
    return _Family(is_gated=activation.lower() in _GATED_ACTIVATIONS)


def _num_positions(text: Mapping[str, Any], source: str) -> int | None:
    said = {name: text[name] for name in _POSITIONS if text.get(name)}
    return whole_number(said, _POSITIONS, source, default=0) or None


def _num_kv_heads(text: Mapping[str, Any], num_heads: int, source: str) -> int:
    if "kv_lora_rank" in text:
        return 1
    if text.get("multi_query") is True and not text.get("new_decoder_architecture"):
        return 1
    attention = text.get("attn_config")
    inner = attention if isinstance(attention, Mapping) else {}
    return whole_number({**inner, **text}, _KV_HEADS, source, default=num_heads)


def _head_dim(text: Mapping[str, Any], hidden: int, num_heads: int, source: str) -> int:
    if "kv_lora_rank" in text:
        return whole_number(text, ("v_head_dim",), source)
    if text.get("head_dim") is None and hidden % num_heads:
        raise ConfigError(
            "heads-divide-hidden", f"{source}: {num_heads} heads do not divide the hidden size {hidden}; add head_dim"
        )
    return whole_number(text, ("head_dim",), source, default=hidden // num_heads)


def _window(text: Mapping[str, Any]) -> int | None:
    """Return the window where every layer has one; where only some do, the others decide the time, so return None."""
    window = text.get("sliding_window")
    is_used = (
        text.get("use_sliding_window", True) and "layer_types" not in text and "sliding_window_pattern" not in text
    )
    is_mixed = str(text.get("model_type", "")).startswith(("gemma2", "gemma3", "cohere2", "gpt_oss"))
    return window if isinstance(window, int) and window > 0 and is_used and not is_mixed else None


def _experts(text: Mapping[str, Any], source: str) -> Experts | None:
    num_experts = whole_number(text, _EXPERTS, source, default=1)
    if num_experts == 1:
        return None
    ffn_size = whole_number(text, ("moe_intermediate_size", *_FFN), source)
    shared = whole_number(text, ("n_shared_experts",), source, default=0, least=0)
    if not shared:
        shared_size = whole_number(text, ("shared_expert_intermediate_size",), source, default=0, least=0)
        shared = max(1, round(shared_size / ffn_size)) if shared_size else 0
    dense_layers = text.get("mlp_only_layers") or ()
    if not isinstance(dense_layers, list | tuple):
        raise ConfigError(
            "mlp-only-layers", f"{source}: mlp_only_layers={dense_layers!r} must be a list of layers; correct it there"
        )
    dense = whole_number(text, ("first_k_dense_replace",), source, default=0, least=0) or len(dense_layers)
    return Experts(
        num_experts=num_experts,
        num_chosen=whole_number(text, _CHOSEN, source),
        ffn_size=ffn_size,
        num_shared=shared,
        num_dense_layers=dense,
    )


def _name(values: Mapping[str, Any], kind: str) -> str:
    path = values.get("_name_or_path")
    return str(path).rstrip("/").rpartition("/")[2] if path else (kind or "model")


def _notes(values: Mapping[str, Any]) -> tuple[str, ...]:
    text = _text_part(values)
    notes = []
    if text is not values:
        notes.append("of a model with several parts, that of text alone is planned")
    if "kv_lora_rank" in text:
        notes.append("latent attention is priced as attention with one head of keys and values")
    if str(text.get("model_type", "")) not in _FAMILIES:
        kind = text.get("model_type", "none")
        notes.append(f"model_type {kind} is read by its fields' names: check the number of parameters")
    return tuple(notes)
