"""Tiny models of many families, as users bring them: Hugging Face's by their configs, and plain torch ones.

A family of Hugging Face costs one line: its config is shrunk by the names of its fields. Nothing is downloaded.

>>> ZOO["llama"].head
'causal'
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from harness.models import IGNORED, ModelCase
from harness.plain_zoo import PLAIN

VOCAB_SIZE: Final = 101  # no tp divides it
SEQ_LEN: Final = 12
NUM_SAMPLES: Final = 2
PAD: Final = 0
IMAGE_TOKEN: Final = 3
IMAGE_SIZE, PATCH_SIZE = 16, 8
NUM_PATCHES: Final = (IMAGE_SIZE // PATCH_SIZE) ** 2

# Of every field that has one of these names, in a config and in those within it.
SIZES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "lru_width"), 32),
        **dict.fromkeys(("embedding_size", "true_hidden_size", "intra_bottleneck_size", "projection_dim"), 16),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
        **dict.fromkeys(("d_ff", "ffn_hidden_size", "hidden_dim"), 48),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), 2),
        **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("num_key_value_heads", "num_feedforward_networks"), 2),
        **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"), 8),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"), 64),
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
        **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
        **dict.fromkeys(("state_size", "time_step_rank", "mamba_d_state", "mamba_dt_rank", "rotary_dim"), 4),
        **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention"), 5),
        **dict.fromkeys(("initializer_range", "init_std", "init_factor", "initializer_factor"), 0.1),
        "vocab_size": VOCAB_SIZE,
        "q_lora_rank": 16,
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
    }
)
# The fields of these that stand for a chance, whatever they are called.
CHANCES: Final = ("drop", "jitter", "mask_time_prob", "mask_feature_prob")

_HEADS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "causal": "CAUSAL_LM",
        "masked": "MASKED_LM",
        "pair": "SEQ_TO_SEQ_CAUSAL_LM",
        "image": "IMAGE_CLASSIFICATION",
        "speech": "SPEECH_SEQ_2_SEQ",
        "sound": "CTC",
        "picture": "IMAGE_TEXT_TO_TEXT",
    }
)


@dataclass(frozen=True)
class Family:
    """A family of Hugging Face.

    Attributes:
        name: its `model_type`, perhaps with a word after a "/" for a variant.
        head: which of its models, a key of the batches.
        options: of its config, where `SIZES` does not say enough.
    """

    name: str
    head: str
    options: Mapping[str, Any]

    def case(self, **options: Any) -> ModelCase:
        """The family's model and batches, whose output carries the loss; `options` are more of the config."""
        return ModelCase(self.name, lambda: self._build(options), _BATCHES[self.head](self.options), None)

    def _build(self, options: Mapping[str, Any]) -> nn.Module:
        model_type = self.name.partition("/")[0]
        auto = importlib.import_module("transformers.models.auto.configuration_auto")
        config_class = auto.CONFIG_MAPPING[model_type]
        own = {key: value for key, value in self.options.items() if not key.startswith("batch_")}
        config = config_class(**_merge(_shrink(config_class()), {**own, **options}))
        model = _model_class(model_type, self.head)(config)
        if getattr(model, "set_experts_implementation", None):
            model.set_experts_implementation("eager")  # the default, "grouped_mm", knows no float64
        return model.train()


def _model_class(model_type: str, head: str) -> type[nn.Module]:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    table = f"MODEL_FOR_{_HEADS[head]}_MAPPING" if head in _HEADS else _OTHER_HEADS[head]
    module = importlib.import_module(f"transformers.models.{model_type.replace('-', '_').removesuffix('_text')}")
    if head in _HEADS:
        return getattr(module, getattr(auto, f"{table}_NAMES")[model_type])
    return getattr(module, table)


_OTHER_HEADS: Final[Mapping[str, str]] = MappingProxyType(
    {"clip": "CLIPModel", "siglip": "SiglipModel", "series": "PatchTSTForPrediction"}
)


def _shrink(config: Any) -> dict[str, Any]:
    """The arguments that make a small config of the same class."""
    known = {**vars(config), **dict.fromkeys(getattr(config, "attribute_map", {}))}
    found = {name: value for name, value in SIZES.items() if name in known and _is_number(known[name])}
    for name, value in vars(config).items():
        if isinstance(value, float) and any(word in name for word in CHANCES):
            found[name] = 0.0
        if name in config.sub_configs and value is not None:
            sub = type(value)(**_shrink(value)).to_dict()
            found[name] = {**sub, "model_type": value.model_type}
    return found


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _merge(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the second where both have a value; the same in tables within them."""
    both = {key: _merge(one[key], other[key]) for key in one if isinstance(other.get(key), Mapping)}
    return {**one, **other, **{key: both[key] for key in both if isinstance(one[key], Mapping)}}


# Batches; B samples, S positions

BatchMaker = Callable[[int, int, torch.dtype], dict[str, Any]]


def _tokens(generator: torch.Generator, length: int = SEQ_LEN) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask and labels, each [B, S]; all samples but the first end with padding."""
    tokens = torch.randint(5, VOCAB_SIZE, (NUM_SAMPLES, length), generator=generator)
    lengths = torch.tensor([length] + [length - 3] * (NUM_SAMPLES - 1))[:, None]
    mask = (torch.arange(length) < lengths).long()
    tokens = tokens.masked_fill(mask == 0, PAD)
    return tokens, mask, tokens.masked_fill(mask == 0, IGNORED)


def _text(generator: torch.Generator, dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, Any]:
    tokens, mask, labels = _tokens(generator)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _masked_text(generator: torch.Generator, dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every third token is to be found."""
    tokens, mask, labels = _tokens(generator)
    is_hidden = torch.arange(SEQ_LEN) % 3 == 0  # [S]
    return {
        "input_ids": tokens.masked_fill(is_hidden, 4),
        "attention_mask": mask,
        "labels": labels.masked_fill(~is_hidden, IGNORED),
    }


def _pair(generator: torch.Generator, dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, Any]:
    tokens, mask, _ = _tokens(generator)
    return {"input_ids": tokens, "attention_mask": mask, "labels": _tokens(generator, 8)[2]}


def _pixels(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(NUM_SAMPLES, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator).to(dtype)


def _image(generator: torch.Generator, dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "pixel_values": _pixels(generator, dtype),
        "labels": torch.randint(2, (NUM_SAMPLES,), generator=generator),
    }


def _speech(generator: torch.Generator, dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, Any]:
    features = torch.randn(NUM_SAMPLES, 8, 20, generator=generator)  # [B, mels, frames]
    return {"input_features": features.to(dtype), "labels": _tokens(generator, 8)[2]}


def _sound(generator: torch.Generator, dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, Any]:
    wave = torch.randn(NUM_SAMPLES, 640, generator=generator)
    return {
        "input_values": wave.to(dtype),
        "labels": torch.randint(5, VOCAB_SIZE, (NUM_SAMPLES, 4), generator=generator),
    }


def _picture(generator: torch.Generator, dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, Any]:
    """Text with a picture's places in it."""
    tokens, mask, labels = _tokens(generator, 16)
    if "image_token_id" not in options:
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": labels,
            "pixel_values": _pixels(generator, dtype),
        }
    num_tokens = options.get("batch_tokens", NUM_PATCHES)
    is_place = (torch.arange(16) >= 2) & (torch.arange(16) < 2 + num_tokens)
    batch = {
        "input_ids": tokens.masked_fill(is_place, IMAGE_TOKEN),
        "attention_mask": mask,
        "labels": labels.masked_fill(is_place, IGNORED),
    }
    if "batch_grid" not in options:
        return {**batch, "pixel_values": _pixels(generator, dtype)}
    grid = torch.tensor([options["batch_grid"]] * NUM_SAMPLES)  # [B, (time, height, width)]
    patches = torch.randn(int(grid.prod(1).sum()), options["batch_width"], generator=generator)
    kinds = (is_place.long() * mask).expand(NUM_SAMPLES, -1)
    return {**batch, "pixel_values": patches.to(dtype), "image_grid_thw": grid, "mm_token_type_ids": kinds}


def _contrast(generator: torch.Generator, dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, Any]:
    tokens, mask, _ = _tokens(generator)
    pixels = _pixels(generator, dtype)
    return {"input_ids": tokens, "attention_mask": mask, "pixel_values": pixels, "return_loss": True}


def _series(generator: torch.Generator, dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, Any]:
    values = torch.randn(NUM_SAMPLES, 40, 3, generator=generator).to(dtype)  # [B, times, channels]
    return {"past_values": values[:, :32], "future_values": values[:, 32:]}


Maker = Callable[[torch.Generator, torch.dtype, Mapping[str, Any]], dict[str, Any]]


def _maker(make: Maker) -> Callable[[Mapping[str, Any]], BatchMaker]:
    def bind(options: Mapping[str, Any]) -> BatchMaker:
        def batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Any]:
            return make(torch.Generator().manual_seed(seed), dtype, options)

        return batch

    return bind


_BATCHES: Final[Mapping[str, Callable[[Mapping[str, Any]], BatchMaker]]] = MappingProxyType(
    {
        "causal": _maker(_text),
        "masked": _maker(_masked_text),
        "pair": _maker(_pair),
        "image": _maker(_image),
        "speech": _maker(_speech),
        "sound": _maker(_sound),
        "picture": _maker(_picture),
        "clip": _maker(_contrast),
        "siglip": _maker(_contrast),
        "series": _maker(_series),
    }
)


def _families(head: str, **options: Mapping[str, Any]) -> dict[str, Family]:
    """Of one head, by name; two underscores stand for "/", which a variant's name has."""
    names = {name: name.replace("__", "/") for name in options}
    return {names[name]: Family(names[name], head, options[name]) for name in options}


_VISION: Final = {"vision_config": {"hidden_act": "gelu", "num_channels": 3}}
_FAMILIES: Final[Mapping[str, Family]] = {
    **_families(
        "causal",
        llama={},
        llama__tied={"tie_word_embeddings": True},
        mistral={},
        qwen2={},
        qwen3={},
        gemma={},
        gemma2={},
        gemma3_text={},
        phi={},
        phi3={},
        olmo2={},
        olmo3={},
        granite={},
        starcoder2={},
        cohere={},
        stablelm={},
        smollm3={},
        glm4={},
        gpt2={},
        gptj={},
        gpt_neo={"attention_types": [[["global", "local"], 1]]},
        gpt_neox={},
        codegen={},
        opt={},
        bloom={},
        falcon={"alibi": False},
        falcon__new={"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
        mpt={},
        mamba={},
        falcon_mamba={},
        recurrent_gemma={"num_hidden_layers": 3},
        lfm2={"layer_types": ["conv", "full_attention"]},
        jamba={"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
        mixtral={},
        qwen2_moe={},
        qwen2_moe__window={"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
        qwen3_moe={},
        deepseek_v2={"num_key_value_heads": 4},
        deepseek_v3={"num_key_value_heads": 4},
        phimoe={},
        gpt_oss={
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        dbrx={"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 1e4}},
    ),
    **_families(
        "masked",
        bert={},
        roberta={},
        electra={},
        distilbert={},
        albert={},
        roformer={},
        mobilebert={},
        ibert={},
        modernbert={"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "deberta-v2": Family("deberta-v2", "masked", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    **_families(
        "pair", t5={"decoder_start_token_id": PAD}, bart={}, pegasus={}, mbart={}, m2m_100={}, marian={}, blenderbot={}
    ),
    **_families("image", vit={}, dinov2={}),
    **_families("speech", whisper={"num_mel_bins": 8, "max_source_positions": 10}),
    **_families(
        "sound",
        wav2vec2={
            "conv_dim": (16, 16),
            "conv_kernel": (10, 3),
            "conv_stride": (10, 2),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
    **_families(
        "picture",
        blip={},
        llava={"image_token_id": IMAGE_TOKEN, "batch_tokens": NUM_PATCHES},
        qwen2_vl={
            "image_token_id": IMAGE_TOKEN,
            "batch_tokens": 4,
            "batch_grid": [1, 4, 4],
            "batch_width": 3 * 2 * 4 * 4,
            "vision_config": {"patch_size": 4, "embed_dim": 32, "hidden_size": 32},
            "text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
        },
        qwen2_5_vl={
            "image_token_id": IMAGE_TOKEN,
            "batch_tokens": 4,
            "batch_grid": [1, 4, 4],
            "batch_width": 3 * 2 * 4 * 4,
            # Windows of one merged patch, but in the second block.
            "vision_config": {"patch_size": 4, "out_hidden_size": 32, "window_size": 8, "fullatt_block_indexes": [1]},
            "text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
        },
    ),
    **_families("clip", clip={}),
    **_families("siglip", siglip={}),
    **_families(
        "series",
        patchtst={
            "num_input_channels": 3,
            "context_length": 32,
            "prediction_length": 8,
            "patch_length": 8,
            "patch_stride": 8,
        },
    ),
}
ZOO: Final[Mapping[str, Any]] = MappingProxyType({**_FAMILIES, **PLAIN})
