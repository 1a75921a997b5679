"""Describes decoder shapes, and lists some by name: small and published ones; `shape` has their size and cost.

Not weights: a preset is a shape, and training starts from drawn parameters. What plans needs no torch for it.

>>> preset("llama-8b")
Traceback (most recent call last):
    ...
shardwise.config.errors.ConfigError: llama-8b is not a preset; did you mean llama-3-8b?
>>> decoder_config(ModelConfig(preset="tiny", num_layers=2), max_seq_len=128).num_layers
2
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from shardwise.attention.from_config import structure_of
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import AttentionConfig, ModelConfig
from shardwise.config.sections import MODEL_SOURCE_KEYS

EXPERT_FIELDS: Final = ("num_experts", "num_chosen", "expert_size", "num_shared_experts", "router_bias")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Describes the shape of a decoder; `head_dim` is a field, since it need not be hidden_size / num_heads.

    `attention` defines which keys before it each query sees, in every layer; no parameter depends on it.

    Attributes:
        num_experts: of every feed-forward, `num_chosen` of which each token is sent to; 0 for dense ones.
        expert_size: inner width of an expert; None for `ffn_size`.
        num_shared_experts: further experts, which all tokens pass.
        router_bias: whether routers have a bias that balances their experts.

    Raises:
        ConfigError: a size is not positive, `head_dim` is odd, `num_kv_heads` does not divide `num_heads`, more experts
            are chosen than there are, or there is no such attention.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    num_experts: int = 0
    num_chosen: int = 2
    expert_size: int | None = None
    num_shared_experts: int = 0
    router_bias: bool = False

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            is_left_out = value == option.default and option.name in EXPERT_FIELDS
            if is_left_out or option.name in ("tie_embeddings", "attention", "router_bias"):
                continue
            kinds, most = ((int, float), 2.0**63) if option.name in ("rope_theta", "norm_eps") else ((int,), 2**31)
            if isinstance(value, bool) or not isinstance(value, kinds) or value >= most:
                raise ConfigError(
                    "shape-not-a-number", f"{option.name}={value!r} is no number below {most:g}; give one"
                )
            if not value > 0:
                raise ConfigError("shape-not-positive", f"{option.name}={value} is not positive; give more than 0")
        if self.head_dim % 2:
            legal = f"{self.head_dim - 1}, {self.head_dim + 1}" if self.head_dim > 1 else "2"
            raise ConfigError(
                "head-dim-odd",
                f"head_dim={self.head_dim} is odd, but rotary embedding turns pairs; nearest legal: {legal}",
            )
        if self.num_heads % self.num_kv_heads:
            legal = ", ".join(map(str, _nearest_divisors(self.num_heads, self.num_kv_heads)))
            raise ConfigError(
                "kv-heads-divide-heads",
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; nearest legal: {legal}",
            )
        if self.num_experts and self.num_chosen > self.num_experts:
            raise ConfigError(
                "chosen-exceed-experts",
                f"num_chosen={self.num_chosen} is more than num_experts={self.num_experts}; give at most that",
            )
        structure_of(self.attention, self.num_heads)  # raises if there is no such attention

    @property
    def size_of_expert(self) -> int:
        """Return the inner width of an expert."""
        return self.ffn_size if self.expert_size is None else self.expert_size

    @property
    def shared_size(self) -> int:
        """Return the inner width of the shared experts together; 0 where there are none."""
        return self.num_shared_experts * self.size_of_expert if self.num_experts else 0

    def values(self) -> dict[str, Any]:
        """Return the fields as JSON values, for `from_values`, without dense attention, and experts if there are none.

        So what is no mixture is described as it was before there were any.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if not self.num_experts:
            values = {name: value for name, value in values.items() if name not in EXPERT_FIELDS}
        if self.attention.kind == "dense":
            del values["attention"]
        else:
            values["attention"] = self.attention.model_dump(mode="json", exclude_none=True)
        return values

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> DecoderConfig:
        """Make the config whose method `values` returned these."""
        return cls(**{**values, "attention": AttentionConfig(**values.get("attention", {}))})


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
        # 16.3 M parameters, of which a token passes as many as in "tiny".
        "tiny-moe": replace(_TINY, num_experts=8, expert_size=448),
        # Jiang et al. 2024, Mixtral of experts.
        "mixtral-8x7b": replace(
            _LLAMA_7B, num_kv_heads=8, ffn_size=14_336, max_seq_len=32_768, rope_theta=1_000_000.0, num_experts=8
        ),
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
    unused = [key for key in EXPERT_FIELDS[1:] if changes.get(key)]
    if unused and not changes.get("num_experts", shape.num_experts):
        raise ConfigError(
            "expert-keys-unused",
            f"model.{unused[0]}={changes[unused[0]]} is of experts, and the model has none; set model.num_experts=8",
        )
    if vocab_size is not None and changes.setdefault("vocab_size", vocab_size) < vocab_size:
        raise ConfigError(
            "vocabulary-too-small",
            f"model.vocab_size={changes['vocab_size']} is smaller than the tokenizer's {vocab_size} tokens; "
            f"give at least {vocab_size}, or leave it out",
        )
    return replace(shape, **changes)


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return below + above
