"""Lists decoder shapes by name: small ones of the library to train, published ones to train or to plan for.

Not weights: a preset is a shape, and training starts from drawn parameters.

>>> preset("llama-8b")
Traceback (most recent call last):
    ...
shardwise.config.errors.ConfigError: llama-8b is not a preset; did you mean llama-3-8b?
>>> decoder_config(ModelConfig(preset="tiny", num_layers=2), max_seq_len=128).num_layers
2
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import AttentionConfig, ModelConfig
from shardwise.config.sections import MODEL_SOURCE_KEYS
from shardwise.models.decoder import DecoderConfig


def _small(*, vocab_size: int, num_layers: int, num_heads: int, ffn_size: int, max_seq_len: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden_size=64 * num_heads,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=64,
        ffn_size=ffn_size,
        max_seq_len=max_seq_len,
        tie_embeddings=True,
    )


# 6.0 M parameters, few layers and heads, since attention is slowest on a CPU.
_TINY = DecoderConfig(
    vocab_size=4096,
    num_layers=4,
    hidden_size=320,
    num_heads=4,
    num_kv_heads=2,
    head_dim=80,
    ffn_size=896,
    max_seq_len=256,
    tie_embeddings=True,
)
# Zhang et al. 2024, TinyLlama.
_1B = DecoderConfig(
    vocab_size=32_000,
    num_layers=22,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=5632,
    max_seq_len=2048,
)
# Touvron et al. 2023, Llama 2.
_LLAMA_7B = DecoderConfig(
    vocab_size=32_000,
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    ffn_size=11_008,
    max_seq_len=4096,
)
# Llama team 2024, The Llama 3 herd of models, table 3; the context is the first of pre-training.
_LLAMA_3_8B = DecoderConfig(
    vocab_size=128_256,
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=14_336,
    max_seq_len=8192,
    rope_theta=500_000.0,
)
# Brown et al. 2020, table 2.1: GPT-3's depth, width and heads. Its feed-forward of two matrices, 4 h wide,
# becomes three of 8 h / 3 in this family: a layer has as many parameters.
_GPT_3_175B = DecoderConfig(
    vocab_size=50_257,
    num_layers=96,
    hidden_size=12_288,
    num_heads=96,
    num_kv_heads=96,
    head_dim=128,
    ffn_size=32_768,
    max_seq_len=2048,
    tie_embeddings=True,
)

PRESETS: Mapping[str, DecoderConfig] = MappingProxyType(
    {
        "tiny": _TINY,
        "25m": _small(vocab_size=8192, num_layers=6, num_heads=8, ffn_size=1536, max_seq_len=1024),
        "100m": _small(vocab_size=16_384, num_layers=12, num_heads=12, ffn_size=2048, max_seq_len=1024),
        "350m": _small(vocab_size=32_000, num_layers=24, num_heads=16, ffn_size=2816, max_seq_len=2048),
        "1b": _1B,
        "llama-7b": _LLAMA_7B,
        "llama-13b": replace(
            _LLAMA_7B, num_layers=40, hidden_size=5120, num_heads=40, num_kv_heads=40, ffn_size=13_824
        ),
        "llama-70b": replace(_LLAMA_7B, num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, ffn_size=28_672),
        "llama-3-8b": _LLAMA_3_8B,
        "llama-3-70b": replace(_LLAMA_3_8B, num_layers=80, hidden_size=8192, num_heads=64, ffn_size=28_672),
        "llama-405b": replace(_LLAMA_3_8B, num_layers=126, hidden_size=16_384, num_heads=128, ffn_size=53_248),
        # Jiang et al. 2023; v0.2, whose attention has no window.
        "mistral-7b": replace(_LLAMA_7B, num_kv_heads=8, ffn_size=14_336, max_seq_len=32_768, rope_theta=1_000_000.0),
        "gpt-3-175b": _GPT_3_175B,
    }
)


def preset(name: str) -> DecoderConfig:
    """Return the shape of that name.

    Raises:
        ConfigError: there is none; the message suggests the nearest name, or lists all.
    """
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name.lower(), PRESETS, n=1)
    close = close or [preset for preset in PRESETS if name and preset.endswith(name.lower())]
    fix = f"did you mean {' or '.join(close)}?" if close else f"presets are {', '.join(PRESETS)}"
    raise ConfigError("unknown-preset", f"{name} is not a preset; {fix}")


def decoder_config(
    model: ModelConfig,
    max_seq_len: int | None = None,
    vocab_size: int | None = None,
    attention: AttentionConfig | None = None,
) -> DecoderConfig:
    """Return the preset that the config's `model` section names, changed by the section, the data and the tokenizer.

    Args:
        model: the section; `head_dim` follows from hidden_size / num_heads where either is set.
        max_seq_len: tokens of the data's sequences; None for the preset's.
        vocab_size: number of the tokenizer's tokens; `model.vocab_size` may be larger; None for the preset's.
        attention: the config's section; None for the preset's, which is dense.

    Raises:
        ConfigError: a Hugging Face model, an unknown preset, heads that do not divide the hidden size, a shape or an
            attention that `DecoderConfig` refuses, or a vocabulary smaller than the tokenizer's.
    """
    if model.path is not None:
        raise ConfigError(
            "not-our-decoder",
            f"model.path={model.path} is a Hugging Face model, and this takes presets; leave model.path out",
        )
    shape = preset(model.preset)
    values = model.model_dump(exclude={*MODEL_SOURCE_KEYS}) | {
        "max_seq_len": max_seq_len,
        "attention": attention,
    }
    changes = {key: value for key, value in values.items() if value is not None}
    if "hidden_size" in changes or "num_heads" in changes:
        hidden = changes.get("hidden_size", shape.hidden_size)
        heads = changes.get("num_heads", shape.num_heads)
        if hidden % heads:
            nearest = sorted({max(1, hidden // heads) * heads, (hidden // heads + 1) * heads})
            raise ConfigError(
                "heads-divide-hidden",
                f"model.num_heads={heads} does not divide hidden_size={hidden}; "
                f"nearest legal hidden_size: {', '.join(map(str, nearest))}",
            )
        changes["head_dim"] = hidden // heads
    if vocab_size is not None and changes.setdefault("vocab_size", vocab_size) < vocab_size:
        raise ConfigError(
            "vocabulary-too-small",
            f"model.vocab_size={changes['vocab_size']} is smaller than the tokenizer's {vocab_size} tokens; "
            f"give at least {vocab_size}, or leave it out",
        )
    return replace(shape, **changes)
