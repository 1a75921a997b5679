"""Converts our decoder's config to that of Hugging Face's Llama or Mixtral, and has the name rules of model families.

>>> decoder_names().stored_names("blocks.1.ffn.down.weight")
('model.layers.1.mlp.down_proj.weight',)
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.checkpoint.hf.key_map import NameMap, WeightPart
from shardwise.checkpoint.manifest import CheckpointError
from shardwise.layout.slicing import Rect, Shape
from shardwise.models import DecoderConfig
from shardwise.runtime.torch_private import view_base

_DECODER: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "embed.weight": "model.embed_tokens.weight",
        "blocks.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
        "blocks.*.attention.query.weight": "model.layers.*.self_attn.q_proj.weight",
        "blocks.*.attention.key.weight": "model.layers.*.self_attn.k_proj.weight",
        "blocks.*.attention.value.weight": "model.layers.*.self_attn.v_proj.weight",
        "blocks.*.attention.out.weight": "model.layers.*.self_attn.o_proj.weight",
        "blocks.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
        "blocks.*.ffn.gate.weight": "model.layers.*.mlp.gate_proj.weight",
        "blocks.*.ffn.up.weight": "model.layers.*.mlp.up_proj.weight",
        "blocks.*.ffn.down.weight": "model.layers.*.mlp.down_proj.weight",
        "blocks.*.ffn.router.weight": "model.layers.*.block_sparse_moe.gate.weight",
        "blocks.*.ffn.experts.gate_up_proj": {
            "stored": tuple(f"model.layers.*.block_sparse_moe.experts.#.{name}.weight" for name in ("w1", "w3")),
            "dim": 1,
        },
        "blocks.*.ffn.experts.down_proj": "model.layers.*.block_sparse_moe.experts.#.w2.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
)

TORCH_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
)


def decoder_names() -> NameMap:
    """Return the rules for the names of our decoder's tensors in a folder of Llama's or Mixtral's."""
    return NameMap.of(_DECODER)


class _Tracked(Tensor):
    """Stays a view of the tensor that it is cut from where other code asks for contiguous memory, and keeps what it is
    concatenated from along dim 0.
    """

    rows: Sequence[Tensor] = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        result = super().__torch_function__(func, types, args, kwargs)
        if func is torch.cat and (kwargs or {}).get("dim", args[1] if len(args) > 1 else 0) == 0:
            result.rows = args[0]
        return result


def converted_names(model: nn.Module, shapes: Mapping[str, Shape]) -> NameMap:
    """Return the rules for the names of a model of transformers where that library converts weights as it loads them.

    It tells by itself: it is given tensors without values, and reverts its conversion of them, as in `save_pretrained`.
    What comes out are views, whose places say which part of which tensor each tensor of a folder is.

    Args:
        model: any; its names are those of its folder if it is none of transformers.
        shapes: of its parameters and persistent buffers, whole, by all their names.

    Raises:
        CheckpointError: the folder's tensors are no parts of the model's, such as those that are permuted.
    """
    loading: Any = sys.modules.get("transformers.core_model_loading")  # which a model of transformers has imported
    if loading is None or not (hasattr(model, "base_model_prefix") and hasattr(model, "config")):
        return NameMap()
    wholes = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {id(tensor): name for name, tensor in wholes.items()}
    given: dict[str, Tensor] = {name: tensor.as_subclass(_Tracked) for name, tensor in wholes.items()}
    parts: dict[str, list[WeightPart]] = {name: [] for name in given}
    unknown, reverted = [], dict[str, Tensor]()
    try:
        answering: Any = copy.copy(model)
        answering.__dict__["get_parameter"] = wholes.__getitem__  # ranks hold parts, of other shapes
        reverted = loading.revert_weight_conversion(answering, given)
    except (AttributeError, KeyError, ValueError) as error:  # it asks for what a split or quantized model lacks
        unknown.append(f"a weight ({error})")
    for stored, tensor in reverted.items():
        first_row, num_rows = 0, len(tensor) if getattr(tensor, "rows", ()) else None
        for piece in getattr(tensor, "rows", ()) or (tensor,):
            name = owners.get(id(view_base(piece)))
            part = None if name is None else _part_of(stored, piece.as_subclass(Tensor), shapes[name])
            if part is None or name is None:
                unknown.append(stored)
            else:
                parts[name].append(replace(part, first_row=first_row, num_rows=num_rows))
            first_row += len(piece) if num_rows else 0
    # A folder has the parts of a stack in the order of its experts.
    ordered = {name: tuple(sorted(found, key=lambda part: part.rect.start)) for name, found in parts.items()}
    unknown += [name for name in given if sum(part.rect.numel for part in ordered[name]) != wholes[name].numel()]
    if unknown:
        raise CheckpointError(
            "weights-converted",
            f"transformers converts {unknown[0]} of {type(model).__name__} between model and folder by more than names "
            "and parts; load it by from_pretrained before initialize, and save it so: all ranks take `weights = "
            "dict(engine.weights(names=None, to_rank=0))`, and rank 0 calls model.save_pretrained(folder, "
            "state_dict=weights)",
        )
    same = {name: (WeightPart(name, Rect.whole(shape)),) for name, shape in shapes.items()}
    return NameMap(parts={name: found for name, found in ordered.items() if found != same[name]})


def _part_of(stored: str, view: Tensor, shape: Shape) -> WeightPart | None:
    """Return the rectangle of a tensor of some shape that a view of it is; None if it is none."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start, remaining, all_sizes, all_steps = [], view.storage_offset(), list(view.shape), list(view.stride())
    for stride in strides:
        start.append(remaining // max(stride, 1))
        remaining %= max(stride, 1)
    for is_stacked, is_transposed in ((False, False), (True, False), (False, True)):
        sizes, steps = ([1] * is_stacked + values[:: -1 if is_transposed else 1] for values in (all_sizes, all_steps))
        fits = len(sizes) == len(shape) and (not is_transposed or len(shape) == 2)
        if fits and all(size == 1 or step == stride for size, step, stride in zip(sizes, steps, strides, strict=True)):
            rect = Rect(tuple(start), tuple(first + size for first, size in zip(start, sizes, strict=True)))
            return WeightPart(stored, rect, is_transposed, is_stacked)
    return None


def hf_config_of(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json with which transformers reads an exported decoder; it has dense attention.

    That is a Llama, or with experts a Mixtral.

    Args:
        dtype: safetensors' name of the weights' dtype.

    Raises:
        CheckpointError: no model of transformers has such experts.
    """
    if config.shared_size or (config.num_experts and config.router_bias):
        raise CheckpointError(
            "export-experts",
            f"the decoder has num_shared_experts={config.num_shared_experts} and router_bias={config.router_bias}, and "
            "a folder is of Mixtral's experts, which have neither; save a checkpoint of Shardwise's own",
        )
    family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False}
    if config.num_experts:
        family = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
        family |= {"num_local_experts": config.num_experts, "num_experts_per_tok": config.num_chosen}
    return family | {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.size_of_expert if config.num_experts else config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        # The tokenizer says which tokens these are; the family's own would be 1 and 2.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": TORCH_NAMES[dtype],
    }
