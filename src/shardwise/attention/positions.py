"""Give a Hugging Face model more positions than it was trained with: tile learned ones, scale rotary ones.

Call these functions before `initialize` and before an optimizer is made, since parameters are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from shardwise.config.errors import ConfigError
from shardwise.runtime.class_swap import set_attribute

Model = TypeVar("Model", bound=nn.Module)

_TABLES: Final = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
_ROPE_TYPES: Final[Mapping[str, str]] = MappingProxyType({"ntk": "dynamic"})


def extend_position_embedding(model: Model, max_position: int) -> Model:
    """Tile a model's learned position embeddings, as in Longformer (Beltagy et al. 2020, section 5) and DeepSpeed.

    Rows that stand for no position stay in front: two in RoBERTa (up to its padding index) and OPT. The config and the
    buffers `position_ids` and `token_type_ids` are changed to match.

    Args:
        max_position: tokens of the longest sequence from now on.

    Returns:
        the model, changed in place.

    Raises:
        ConfigError: it has no learned positions, or as many already.
    """
    tables = list(_position_tables(model))
    if not tables:
        raise ConfigError(
            "no-learned-positions",
            f"{type(model).__name__} has no learned position embeddings ({', '.join(_TABLES)}); for rotary ones use "
            "extend_rope",
        )
    grown: dict[int, tuple[Any, int]] = {}
    for parent, table in tables:
        before, offset = table.num_embeddings, _offset(table)
        num_more = max_position - (before - offset)
        if num_more <= 0:
            raise ConfigError(
                "max-position",
                f"max_position={max_position} is not more than the {before - offset} positions that "
                f"{type(model).__name__} has",
            )
        _replace_rows(table, offset, max_position)
        _extend_buffers(parent, before, before + num_more)
        for config in _configs(model, parent):
            grown[id(config)] = config, num_more
    for config, num_more in grown.values():
        config.max_position_embeddings += num_more
    return model


def _position_tables(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Embedding]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if name in _TABLES and isinstance(child, nn.Embedding):
                yield parent, child


def _offset(table: nn.Embedding) -> int:
    """Count the rows in front that stand for no position."""
    if table.padding_idx is not None:
        return table.padding_idx + 1
    return int(getattr(table, "offset", 0))


def _replace_rows(table: nn.Embedding, offset: int, max_position: int) -> None:
    old = table.weight.detach()
    learned = old[offset:]  # [positions, D]
    repeats = -(-max_position // len(learned))
    rows = torch.cat([old[:offset], learned.repeat(repeats, 1)[:max_position]])  # [offset + max_position, D]
    set_attribute(table, "weight", nn.Parameter(rows, requires_grad=table.weight.requires_grad))
    set_attribute(table, "num_embeddings", len(rows))


def _extend_buffers(parent: nn.Module, before: int, after: int) -> None:
    for name, filled in (("position_ids", torch.arange(after)), ("token_type_ids", torch.zeros(after))):
        buffer = getattr(parent, name, None)
        if isinstance(buffer, Tensor) and buffer.shape[-1] == before:
            rows = filled.to(buffer).expand(*buffer.shape[:-1], after).clone()
            set_attribute(parent, name, rows)


def _configs(model: nn.Module, parent: nn.Module) -> list[Any]:
    """Return the config of the innermost model of transformers that contains a module, if it counts positions."""
    configs = [
        module.config for module in model.modules() if hasattr(module, "config") and parent in set(module.modules())
    ]
    return [config for config in configs[-1:] if hasattr(config, "max_position_embeddings")]


def extend_rope(model: Model, max_position: int, method: str = "linear", **parameters: Any) -> Model:
    """Scale a model's rotary positions by transformers' own `rope_parameters`.

    Args:
        model: changed in place; its rotary modules are made again from the config.
        max_position: tokens of the longest sequence from now on.
        method: transformers' rope_type, such as "linear" (Chen et al. 2023, arXiv 2306.15595), "yarn" (Peng et al.
            2023, arXiv 2309.00071), "llama3" or "dynamic"; "ntk" is "dynamic", which scales by the length of each
            batch, and whose `config.max_position_embeddings` stays, since transformers scales from it.
        parameters: further parameters of the method, such as `beta_fast` of yarn.

    Returns:
        the model.

    Raises:
        ConfigError: it has no plain rotary positions, as many already, or transformers does not know the method.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = _ROPE_TYPES.get(method, method)
    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(
            "rope-method", f"method={method!r} is not one of {sorted([*ROPE_INIT_FUNCTIONS, *_ROPE_TYPES])}"
        )
    rotaries = [(name, module) for name, module in model.named_modules() if _is_rotary(module)]
    if not rotaries:
        raise ConfigError(
            "no-rotary-positions",
            f"{type(model).__name__} has no rotary positions with rope_parameters; for learned ones use "
            "extend_position_embedding",
        )
    for config in {id(rotary.config): rotary.config for _, rotary in rotaries}.values():
        _scale_config(config, max_position, rope_type, parameters)
    for name, rotary in rotaries:
        made = type(rotary)(config=rotary.config)
        model.set_submodule(name, made.to(rotary.inv_freq))
    return model


def _is_rotary(module: Any) -> bool:
    return hasattr(module, "inv_freq") and hasattr(module, "rope_type") and hasattr(module, "config")


def _scale_config(config: Any, max_position: int, rope_type: str, parameters: Mapping[str, Any]) -> None:
    before, rope = config.max_position_embeddings, config.rope_parameters
    if rope.get("rope_type") != "default":
        raise ConfigError(
            "rope-scaled-already",
            f"{type(config).__name__} scales rotary positions already (rope_parameters={rope}); set its "
            "rope_parameters before the model is made",
        )
    if max_position <= before:
        raise ConfigError(
            "max-position", f"max_position={max_position} is not more than the {before} positions that the model has"
        )
    scaled = {**rope, "rope_type": rope_type, "factor": max_position / before}
    if rope_type not in ("linear", "dynamic"):
        scaled["original_max_position_embeddings"] = before
    if rope_type != "dynamic":
        config.max_position_embeddings = max_position
    config.rope_parameters = {**scaled, **parameters}


def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
    """Let a tokenizer of transformers make sequences as long as the model takes; returns it."""
    tokenizer.model_max_length = max_position
    tokenizer.init_kwargs["model_max_length"] = max_position
    return tokenizer
