"""Converts our decoder's config to that of Hugging Face's Llama or Mixtral, and has the name rules of model families.

>>> decoder_names().stored_names("blocks.1.ffn.down.weight")
('model.layers.1.mlp.down_proj.weight',)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from shardwise.checkpoint.hf.key_map import NameMap, Rule, WeightPart
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
    """Stays a view of the tensor that it is cut from where other code asks for contiguous memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else super().__torch_function__(func, types, args, kwargs)


class _Whole:
    """Answers as a model whose parameters have their whole shapes, where ranks hold parts of them."""

    def __init__(self, model: nn.Module, wholes: Mapping[str, Tensor]) -> None:
        self._model = model
        self._wholes = wholes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> Tensor:
        return self._wholes[name]


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
    if not (hasattr(model, "base_model_prefix") and hasattr(getattr(model, "config", None), "model_type")):
        return NameMap()
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5 models and folders have the same names
        return NameMap()
    wholes = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {id(tensor): name for name, tensor in wholes.items()}
    given: dict[str, Tensor] = {name: tensor.as_subclass(_Tracked) for name, tensor in wholes.items()}
    parts: dict[str, list[WeightPart]] = {}
    unknown, reverted = [], dict[str, Tensor]()
    try:
        reverted = revert_weight_conversion(cast(Any, _Whole(model, wholes)), given)
    except (AttributeError, KeyError, ValueError) as error:  # it asks for what a split or quantized model lacks
        unknown.append(f"a weight ({error})")
    for stored, tensor in reverted.items():
        name = owners.get(id(view_base(tensor)))
        part = None if name is None else _part_of(stored, tensor.as_subclass(Tensor), shapes[name])
        if part is None or name is None:
            unknown.append(stored)
        else:
            parts.setdefault(name, []).append(part)
    changed = {name: found for name, found in parts.items() if [each.stored for each in found] != [name]}
    rules = NameMap(tuple(dict.fromkeys(filter(None, (_rule_of(name, found) for name, found in changed.items())))))
    unknown += [name for name, found in parts.items() if {*rules.split(name, shapes[name])} != {*found}]
    unknown += [name for name in given if name not in parts]
    if unknown:
        raise CheckpointError(
            "weights-converted",
            f"transformers converts {unknown[0]} of {type(model).__name__} between model and folder by more than names "
            "and parts; load it by from_pretrained before initialize, and save it by model.save_pretrained(folder) on "
            "rank 0, in `with engine.gathered() as model:`",
        )
    return rules


def _part_of(stored: str, view: Tensor, shape: Shape) -> WeightPart | None:
    """Return the rectangle of a tensor of some shape that a view of it is; None if it is none."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start, remaining, all_sizes, all_steps = [], view.storage_offset(), list(view.shape), list(view.stride())
    for stride in strides:
        start.append(remaining // max(stride, 1))
        remaining %= max(stride, 1)
    for is_stacked, is_transposed in ((False, False), (True, False), (False, True)):
        sizes, steps = all_sizes, all_steps
        if is_transposed:
            sizes, steps = sizes[::-1], steps[::-1]
        if is_stacked:
            sizes, steps = [1, *sizes], [0, *steps]
        fits = len(sizes) == len(shape) and (not is_transposed or len(shape) == 2)
        if fits and all(size == 1 or step == stride for size, step, stride in zip(sizes, steps, strides, strict=True)):
            rect = Rect(tuple(start), tuple(first + size for first, size in zip(start, sizes, strict=True)))
            return WeightPart(stored, rect, is_transposed, is_stacked)
    return None


def _rule_of(name: str, parts: Sequence[WeightPart]) -> Rule | None:
    """Return the rule by which a tensor has these parts, with wildcards for the numbers that both names have."""
    is_stacked, is_transposed = parts[0].is_stacked, parts[0].is_transposed
    first = [part for part in parts if part.rect.start[:1] == (0,)] if is_stacked else list(parts)
    starts = [part.rect.start for part in first]
    dims = [dim for dim in range(len(starts[0])) if len({start[dim] for start in starts}) > 1]
    if len(dims) > 1:
        return None
    dim = dims[0] if dims else int(is_stacked and len(first) > 1)
    first.sort(key=lambda part: part.rect.start)
    stored = [part.stored for part in first]
    if is_stacked:  # the model's numbers come first, then the expert's
        num_before = len(_NUMBER.findall(name))
        stored = [_with_counter(each, num_before) for each in stored]
    shares = tuple(part.rect.shape[dim] for part in first) if len(first) > 1 else ()
    numbers = _NUMBER.findall(name)
    if all(_NUMBER.findall(each) == numbers for each in stored):
        name, *stored = (_NUMBER.sub("*", each) for each in (name, *stored))
    try:
        return Rule(name, tuple(stored), is_transposed, dim, shares)
    except CheckpointError:
        return None


def _with_counter(stored: str, num_before: int) -> str:
    """Return the name of a stack's first tensor with `#` for its number, which comes after the model's numbers."""
    places = [match.span() for match in _NUMBER.finditer(stored)]
    if num_before >= len(places):
        return stored
    start, stop = places[num_before]
    return f"{stored[:start]}#{stored[stop:]}"


_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")


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
