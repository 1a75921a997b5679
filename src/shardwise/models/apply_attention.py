"""Apply the attention of a config's section to a model that was built without it, such as one of transformers.

>>> apply_attention(nn.Linear(2, 2), AttentionConfig(kind="fixed"))  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
shardwise.config.errors.ConfigError: attention.kind=fixed is for ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from shardwise.attention.cp_hook import ContextHook, DenseVisibility
from shardwise.attention.from_config import structure_of
from shardwise.attention.huggingface import attends_causally, structure_given, use_sparse_attention
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import AttentionConfig


def check_attention(model: nn.Module, section: AttentionConfig) -> None:
    """Check that a model has the attention of a section, or can get it, so that it is never silently left out.

    Raises:
        ConfigError: it does not have it and cannot get it.
    """
    if _lacks(model, section) and not any(_configs(model)):
        raise ConfigError(
            "attention-needs-decoder",
            f"attention.kind={section.kind} is for the decoder of shardwise train and for models of transformers, and "
            f"this {type(model).__name__} is neither with that attention; leave the section out, and see "
            "docs/attention.md for other models, or build Decoder with DecoderConfig(attention=config.attention)",
        )


def apply_attention(
    model: nn.Module, section: AttentionConfig, spread: ContextHook | None = None
) -> list[Callable[[], None]]:
    """Give a model the attention of a section, if it does not have it.

    Args:
        model: before its layers are split. The structure is unidirectional for a causal model, else bidirectional; an
            encoder-decoder gets a bidirectional one, of which its decoder sees no token ahead.
        section: of the config. Where it is dense, a structure that a model of transformers already has stays.
        spread: computes the attention of models of transformers where sequences are spread over ranks; such models then
            get a structure even where attention is dense. None without context parallelism.

    Returns:
        functions that undo it.

    Raises:
        ConfigError: the model does not look its attention up, or heads that differ are not as many everywhere.
    """
    check_attention(model, section)
    if not _lacks(model, section):
        return [] if spread is None else [_spread_dense(model, spread)]
    configs = (config for config in _configs(model) if hasattr(config, "num_attention_heads"))
    nums: set[int] = {config.num_attention_heads for config in configs}
    if len(nums) > 1 and section.different_layout_per_head:
        raise ConfigError(
            "heads-differ-between-layers",
            f"attention.different_layout_per_head needs one number of heads, and {type(model).__name__} has "
            f"{sorted(nums)}; leave it out",
        )
    structure = structure_of(section, max(nums, default=1), causal=attends_causally(model))
    return [] if structure is None else [use_sparse_attention(model, structure, spread=spread).undo]


def _spread_dense(model: nn.Module, spread: ContextHook) -> Callable[[], None]:
    structure = structure_given(model) or DenseVisibility(attends_causally(model))
    return use_sparse_attention(model, structure, spread=spread).undo


def _lacks(model: nn.Module, section: AttentionConfig) -> bool:
    own = getattr(getattr(model, "config", None), "attention", None)
    return section.kind != "dense" and own != section


def _configs(model: nn.Module) -> Iterator[Any]:
    """Yield the configs of transformers' models inside `model`, found by attributes: transformers may be missing."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(module, "base_model_prefix") and hasattr(config, "model_type"):
            yield config
