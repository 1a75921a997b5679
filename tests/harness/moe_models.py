"""Tiny mixtures of experts with random weights: one of each Hugging Face family that was tried, unmodified.

A row has the options by which a family differs from `_SIZES`, of which each config takes those that it knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from harness.huggingface import FAMILIES, PAD, VOCAB_SIZE
from harness.models import ModelCase
from harness.tensor import lengthened

_NUM_EXPERTS: Final = 8
_SIZES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 32,
        "initializer_range": 0.2,
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _NUM_EXPERTS),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
        **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 12),
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    }
)
_LINEAR_HEADS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
)
_LATENT_HEADS: Final[Mapping[str, Any]] = MappingProxyType({"num_key_value_heads": 4})
_INDEX: Final[Mapping[str, Any]] = MappingProxyType({"index_n_heads": 2, "index_head_dim": 4, "index_topk": 4})
_SECOND_IS_SPARSE: Final[Mapping[str, Any]] = MappingProxyType({"mlp_layer_types": ["dense", "sparse"]})
_ONE_OF_EACH: Final[Mapping[str, Any]] = MappingProxyType(
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
)
MOE_FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "mixtral": {},
        "qwen2_moe": {},
        "qwen3_moe": {},
        "qwen3_next": _LINEAR_HEADS,
        "deepseek_v3": _LATENT_HEADS,
        "gpt_oss": _ONE_OF_EACH,
        "olmoe": {},
        "granitemoe": {},
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
        "glm4_moe": {},
        "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 1},
        "afmoe": {"num_dense_layers": 1, **_ONE_OF_EACH},
        "aria_text": {},
        "axk1": _LATENT_HEADS,
        "axk2": {**_LATENT_HEADS, **_INDEX},
        "bailing_hybrid": {**_LATENT_HEADS, "layer_group_size": 2},
        "beam": {**_ONE_OF_EACH, **_SECOND_IS_SPARSE},
        "cohere2_moe": {**_ONE_OF_EACH, **_SECOND_IS_SPARSE},
        "deepseek_v2": _LATENT_HEADS,
        "deepseek_v32": {**_LATENT_HEADS, **_INDEX},
        "deepseek_v4": {
            **_INDEX,
            "num_key_value_heads": 1,
            "o_groups": 2,
            "o_lora_rank": 4,
            "hc_mult": 2,
            "partial_rotary_factor": 0.5,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "compress_rates": {"heavily_compressed_attention": 4, "compressed_sparse_attention": 2},
            "mlp_layer_types": ["hash_moe", "moe"],
        },
        "dots1": {"layer_types": ["full_attention"] * 2},
        "dots3_note_text": {
            **_LATENT_HEADS,
            **_INDEX,
            "layer_types": ["sliding_attention", "indexed_attention"],
            "shared_experts_intermediate_size": 12,
            "head_dim": 8,
            **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads", "qk_nope_head_dim")},
            **{f"swa_{name}": 4 for name in ("v_head_dim", "qk_rope_head_dim")},
            **{f"swa_{name}": 8 for name in ("q_lora_rank", "kv_lora_rank", "head_dim")},
        },
        "exaone_moe": {**_ONE_OF_EACH, **_SECOND_IS_SPARSE},
        "flex_olmo": {},
        "flint": {**_ONE_OF_EACH, "mlp_only_layers": [0]},
        "gemma4_text": {
            **_ONE_OF_EACH,
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
        "glm4_moe_lite": {**_LATENT_HEADS, **_SECOND_IS_SPARSE},
        "glm_moe_dsa": {**_LATENT_HEADS, **_INDEX},
        "granitemoe_swa": _ONE_OF_EACH,
        "granitemoehybrid": {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
        },
        "granitemoeshared": {},
        "hunyuan_v1_moe": {},
        "hy_v3": _SECOND_IS_SPARSE,
        "hy_v4": {**_LATENT_HEADS, **_INDEX},
        "inkling_text": {
            **{f"swa_{name}": _SIZES[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")},
            "mlp_layer_types": ["dense", "sparse"],
            "n_shared_experts": 1,
            "rel_extent": 8,
            "d_rel": 4,
        },
        "kimi_linear": {
            **_LATENT_HEADS,
            **_SECOND_IS_SPARSE,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_head_dim": 4,
            "linear_num_heads": 4,
        },
        "kolibri1": {"sliding_window": 4},
        "laguna": _SECOND_IS_SPARSE,
        "lara_mini": _LINEAR_HEADS,
        "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        "mellum": _ONE_OF_EACH,
        "mimo_v2_flash": {**_ONE_OF_EACH, **_SECOND_IS_SPARSE, "v_head_dim": 2},
        "minimax": {"layer_types": ["linear_attention", "full_attention"]},
        "minimax_m2": {},
        "minimax_m3_vl_text": {
            **_INDEX,
            "shared_intermediate_size": 12,
            "dense_intermediate_size": 24,
            "rotary_dim": 4,
        },
        "nemotron_h": {
            "layers_block_type": ["mamba", "moe", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 4,
            "moe_shared_expert_intermediate_size": 12,
        },
        "phimoe": {},
        "qwen3_5_moe_text": _LINEAR_HEADS,
        "qwen4_exp_text": {
            **_LINEAR_HEADS,
            "ple_layer_ids": [1],
            "ngram_vocab_size_base": 16,
            "make_ngram_vocab_size_divisible_by": 4,
            "split_ngram_parts": 2,
            "heads_per_ngram": 2,
            "hc_count": 2,
            "hc_lowrank": 4,
            **{f"indexer_{name}": size for name, size in (("n_heads", 2), ("kv_heads", 1), ("head_dim", 4))},
            "indexer_budget": 4,
            "indexer_compress_ratio": 2,
        },
        "solar_open": {},
        "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
    }
)


# Whose experts have another interface, or none.
OTHER_FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama4_text": {"intermediate_size_mlp": 24, "attention_chunk_size": 8},
        "dbrx": {
            "d_model": 16,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 32,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
        },
        "doge": {"is_moe": True, "num_experts": 16},
        "jetmoe": {"kv_channels": 4},
        "longcat_flash": {
            **_LATENT_HEADS,
            "num_layers": 1,
            "ffn_hidden_size": 24,
            "expert_ffn_hidden_size": 12,
            "zero_expert_num": 2,
        },
        "switch_transformers": {
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_heads": 4,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "router_jitter_noise": 0.0,
            "dropout_rate": 0.0,
            "decoder_start_token_id": PAD,
        },
        "nllb-moe": {
            "d_model": 16,
            **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
            **{f"{part}_sparse_step": 2 for part in ("encoder", "decoder")},
            **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "moe_token_dropout"), 0.0),
            **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0),
            "decoder_start_token_id": PAD,
        },
    }
)
_HAVE_ENCODER: Final = ("switch_transformers", "nllb-moe")


def moe_case(family: str, **options: Any) -> ModelCase:
    """The case of a family's model, whose own output carries the loss."""
    return ModelCase(family, lambda: build_moe(family, **options), _batch, None)


def build_moe(family: str, **options: Any) -> nn.Module:
    """A tiny model of a family, of either table, with its routers' biases drawn as other weights are."""
    import transformers

    config = transformers.AutoConfig.for_model(family)
    known = inspect.signature(type(config).__init__).parameters
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    own = {**MOE_FAMILIES, **OTHER_FAMILIES}[family]
    config = transformers.AutoConfig.for_model(family, **{**sizes, **own, **options})
    automatic = transformers.AutoModelForSeq2SeqLM if family in _HAVE_ENCODER else transformers.AutoModelForCausalLM
    model: nn.Module = automatic.from_config(config, experts_implementation="eager")  # the others know no float64
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(tensor, std=0.1)
    return model


def _batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return lengthened(FAMILIES["llama"].batch(seed, num_samples, dtype))
