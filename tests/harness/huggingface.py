"""Tiny Hugging Face models with random weights, and their batches.

Nothing is downloaded: models are built from configs. `transformers` takes seconds to import, so it is imported when a
model is made and not before, and only the modules of that model.

The models compute norms, softmax and losses in float32 whatever their dtype;
`shardwise.runtime.float64.float64_throughout` keeps what is float64 as it is, so that parity can be asked for to 1e-9.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.models import IGNORED, ModelCase

VOCAB_SIZE: Final = 41
PAD: Final = 0

# B samples, S positions, T target positions, D features


BatchMaker = Callable[[int, int, torch.dtype], dict[str, Tensor]]


@dataclass(frozen=True)
class Family:
    """Where a model's classes stand, the config of a tiny one without dropout, and its batches."""

    module: str
    model: str
    config: str
    options: Mapping[str, Any]
    batch: BatchMaker


class LowRank(nn.Module):
    """A frozen linear layer and a trained update of rank 2, as adapters add it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(0.1 * torch.randn(2, base.in_features))
        self.up = nn.Parameter(0.1 * torch.randn(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)  # [B, S, D]


def build_model(
    family: str,
    *,
    checkpointing: str | None = None,
    has_adapters: bool = False,
    vocab_size: int | None = None,
    experts: str = "eager",
    **options: Any,
) -> nn.Module:
    """A tiny model of a family.

    Args:
        family: a name of `FAMILIES`.
        checkpointing: the model's own gradient checkpointing, "reentrant" or "non-reentrant"; None for none.
        has_adapters: freeze the model and adapt its q and v projections.
        vocab_size: what the embeddings are resized to.
        experts: how experts are computed; the default of transformers, "grouped_mm", knows no float64.
        options: of the model's config.
    """
    place = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{place.module}")
    model = getattr(module, place.model)(getattr(module, place.config)(**{**place.options, **options}))
    if family == "mixtral":
        model.set_experts_implementation(experts)
    if vocab_size is not None:
        model.resize_token_embeddings(vocab_size)
    if checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    if has_adapters:
        model.requires_grad_(False)
        for name, layer in list(model.named_modules()):
            if name.endswith(("q_proj", "v_proj")):
                model.set_submodule(name, LowRank(layer))
    return model


def make_case(family: str, **options: Any) -> ModelCase:
    """The case of a family's model, whose own output carries the loss; options as in `build_model`."""
    return ModelCase(family, lambda: build_model(family, **options), FAMILIES[family].batch, None)


def _causal_batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Samples of different lengths, padded on the right; the model shifts the labels itself."""
    tokens, mask = _tokens(torch.Generator().manual_seed(seed), num_samples)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, IGNORED)}


def _masked_batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every third token is to be found."""
    tokens, mask = _tokens(torch.Generator().manual_seed(seed), num_samples)
    is_hidden = torch.arange(tokens.shape[1]) % 3 == 0  # [S]
    labels = tokens.masked_fill((mask == 0) | ~is_hidden, IGNORED)
    return {"input_ids": tokens.masked_fill(is_hidden, 3), "attention_mask": mask, "labels": labels}


def _pair_batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A source and a target, each with lengths of its own."""
    generator = torch.Generator().manual_seed(seed)
    source, source_mask = _tokens(generator, num_samples)
    target, target_mask = _tokens(generator, num_samples)  # [B, T]
    labels = target.masked_fill(target_mask == 0, IGNORED)
    return {"input_ids": source, "attention_mask": source_mask, "labels": labels}


def _tokens(generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
    """Tokens [B, S] and mask [B, S]; S differs from batch to batch."""
    seq_len = int(torch.randint(5, 12, (), generator=generator))
    lengths = torch.randint(3, seq_len + 1, (num_samples, 1), generator=generator)  # [B, 1]
    lengths[0] = seq_len
    mask = (torch.arange(seq_len) < lengths).long()  # [B, S]
    tokens = torch.randint(4, VOCAB_SIZE, (num_samples, seq_len), generator=generator)
    return tokens.masked_fill(mask == 0, PAD), mask


def _image_batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(num_samples, 3, 8, 8, generator=generator).to(dtype)  # [B, channels, height, width]
    return {"pixel_values": pixels, "labels": torch.randint(4, (num_samples,), generator=generator)}


def _speech_batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
    features = torch.randn(num_samples, 8, 20, generator=torch.Generator().manual_seed(seed))  # [B, mels, frames]
    return {"input_features": features.to(dtype), "labels": _pair_batch(seed, num_samples, dtype)["labels"]}


_SPECIAL: Final[Mapping[str, Any]] = MappingProxyType({"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2})
_SIZES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
)
_DECODER: Final[Mapping[str, Any]] = MappingProxyType({**_SIZES, **_SPECIAL, "num_key_value_heads": 2})
_ENCODER: Final[Mapping[str, Any]] = MappingProxyType(
    {**_SIZES, "pad_token_id": PAD, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
)
_T5: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_heads": 4,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "relative_attention_num_buckets": 8,
        "dropout_rate": 0.0,
        "pad_token_id": PAD,
        "decoder_start_token_id": PAD,
        "eos_token_id": 2,
    }
)
_GPT2: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **_SPECIAL,
        "vocab_size": VOCAB_SIZE,
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
)
_MIXTRAL: Final[Mapping[str, Any]] = MappingProxyType(
    {**_DECODER, "num_local_experts": 16, "num_experts_per_tok": 2, "output_router_logits": True}
)
_SWITCH: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **_T5,
        "num_experts": 6,
        "expert_capacity": 4,
        "router_jitter_noise": 0.0,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    }
)
_WHISPER: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **_SPECIAL,
        "vocab_size": VOCAB_SIZE,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "max_target_positions": 16,
        "dropout": 0.0,
        "decoder_start_token_id": 1,
    }
)
_VIT: Final[Mapping[str, Any]] = MappingProxyType({**_ENCODER, "image_size": 8, "patch_size": 4, "num_labels": 4})
_ALBERT: Final[Mapping[str, Any]] = MappingProxyType({**_ENCODER, "embedding_size": 8})
_MAMBA: Final[Mapping[str, Any]] = MappingProxyType(
    {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": PAD}
)

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": Family("llama", "LlamaForCausalLM", "LlamaConfig", _DECODER, _causal_batch),
        "mistral": Family("mistral", "MistralForCausalLM", "MistralConfig", _DECODER, _causal_batch),
        "qwen2": Family("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _DECODER, _causal_batch),
        "gpt2": Family("gpt2", "GPT2LMHeadModel", "GPT2Config", _GPT2, _causal_batch),
        "bert": Family("bert", "BertForMaskedLM", "BertConfig", _ENCODER, _masked_batch),
        "t5": Family("t5", "T5ForConditionalGeneration", "T5Config", _T5, _pair_batch),
        "mixtral": Family("mixtral", "MixtralForCausalLM", "MixtralConfig", _MIXTRAL, _causal_batch),
        "albert": Family("albert", "AlbertForMaskedLM", "AlbertConfig", _ALBERT, _masked_batch),
        "mamba": Family("mamba", "MambaForCausalLM", "MambaConfig", _MAMBA, _causal_batch),
        "switch": Family(
            "switch_transformers",
            "SwitchTransformersForConditionalGeneration",
            "SwitchTransformersConfig",
            _SWITCH,
            _pair_batch,
        ),
        "vit": Family("vit", "ViTForImageClassification", "ViTConfig", _VIT, _image_batch),
        "whisper": Family("whisper", "WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, _speech_batch),
    }
)
