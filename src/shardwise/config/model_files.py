"""Checks the values of a foreign `config.json` before anything is built by them: a model is as large as they say.

What transformers makes of a value is not bounded: a billion layers have no end, and text for a size fails deep inside.

>>> check_model_config({"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4}, "config.json")
>>> check_model_config({"text_config": {"num_hidden_layers": 10**9}}, "config.json")
Traceback (most recent call last):
    ...
shardwise.config.untrusted_files.UntrustedFileError: config.json: num_hidden_layers=1000000000 must be an integer >= 1 \
and at most 2,000; take the config.json of the model
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from shardwise.config.resolve import shown_value
from shardwise.config.sections import MAX_LAYERS
from shardwise.config.untrusted_files import UntrustedFileError

_MAX_WIDTH: Final = 10**7
_MAX_EXPERTS: Final = 4096
_MAX_TOKENS: Final = 10**9
_MAX_LABELS: Final = 10**6
_FIX: Final = "take the config.json of the model"

# What configs name the experts of a layer, and those of a token; the usual name is first, our decoder's last.
EXPERT_NAMES: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOICE_NAMES: Final = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk"),
    *("moe_k", "top_k_experts", "num_chosen"),
)
# The least and the most of each size. Those that decide how many modules are built are the tightest.
_SIZES: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
                *("num_encoder_layers", "num_decoder_layers"),
            ),
            (1, MAX_LAYERS),
        ),
        **dict.fromkeys(
            (
                *("hidden_size", "n_embd", "n_embed", "d_model", "vocab_size", "num_attention_heads", "n_head"),
                *("n_heads", "encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"),
                *("num_kv_heads", "n_kv_heads", "head_dim", "intermediate_size", "ffn_dim", "n_inner"),
                *("ffn_hidden_size", "d_ff", "d_kv", "encoder_ffn_dim", "decoder_ffn_dim"),
            ),
            (1, _MAX_WIDTH),
        ),
        **dict.fromkeys((*EXPERT_NAMES, *CHOICE_NAMES, "n_shared_experts"), (0, _MAX_EXPERTS)),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), (0, _MAX_WIDTH)),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), (0, _MAX_TOKENS)),
        "num_labels": (0, _MAX_LABELS),
    }
)
# One number for each layer, or for each kind of experts, may stand in place of these.
_OF_LAYERS: Final = frozenset(
    (
        *("num_attention_heads", "num_key_value_heads", "num_kv_heads", "intermediate_size", "ffn_dim", "head_dim"),
        *("moe_intermediate_size", *EXPERT_NAMES, *CHOICE_NAMES),
    )
)
# Numbers that need not be whole, and the most that they may be.
_FLOATS: Final[Mapping[str, float]] = MappingProxyType(
    {
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), 1.0),
        **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout", "embd_pdrop", "attn_pdrop"), 1.0),
        **dict.fromkeys(("resid_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"), 1.0),
        **dict.fromkeys(("rope_theta", "rotary_emb_base", "initializer_range"), sys.float_info.max),
    }
)


def check_model_config(values: Mapping[str, Any], where: str) -> None:
    """Refuse a config whose sizes are none, or are beyond what any model has.

    Raises:
        UntrustedFileError: one is; the message names it, and what it may be.
    """
    for key, value, wrong in _wrong_values(values, is_whole=True):
        raise UntrustedFileError("hf-config-value", f"{where}: {key}={shown_value(value)} {wrong}; {_FIX}")


def runs_own_code(values: Mapping[str, Any]) -> bool:
    """Say whether a `config.json` or `tokenizer_config.json` names Python files that transformers would run.

    >>> runs_own_code({"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}), runs_own_code({})
    (True, False)
    """
    return bool(values.get("auto_map"))


def _wrong_values(values: Mapping[str, Any], is_whole: bool) -> Iterator[tuple[str, Any, str]]:
    """Yield each key with a value that cannot be, and the rule; parts such as towers for images may lack sizes."""
    heads, shared_by = values.get("num_attention_heads"), values.get("num_key_value_heads")
    are_sizes = _is_size(heads, 1, _MAX_WIDTH) and _is_size(shared_by, 1, _MAX_WIDTH)
    if are_sizes and int(heads or 0) % int(shared_by or 1):
        yield "num_key_value_heads", shared_by, f"must divide num_attention_heads={heads}"
    for key, value in values.items():
        if isinstance(value, Mapping) and key not in _SIZES:
            yield from _wrong_values(value, is_whole=key == "text_config")
        elif isinstance(value, float) and math.isnan(value):
            yield key, value, "must be a number"
        elif value is None:
            continue
        elif key in _SIZES:
            least, most = _SIZES[key]
            least = least if is_whole else 0
            numbers = value if isinstance(value, list) and value and key in _OF_LAYERS else [value]
            if len(numbers) > MAX_LAYERS or not all(_is_size(one, least, most) for one in numbers):
                yield key, value, f"must be an integer >= {least} and at most {most:,}"
        elif key in _FLOATS:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 <= value <= _FLOATS[key]):
                yield key, value, f"must be a number from 0 to {_FLOATS[key]:g}"


def _is_size(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
