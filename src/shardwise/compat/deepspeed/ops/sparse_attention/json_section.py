"""The `sparse_attention` section of DeepSpeed's JSON config.

>>> sparsity_config_of({"mode": "bslongformer", "block": 32}, num_heads=4).num_sliding_window_blocks
3
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from shardwise.attention import structures
from shardwise.compat.deepspeed.ops.sparse_attention import sparsity_config

_FIXED: Final = (
    "different_layout_per_head",
    "num_local_blocks",
    "num_global_blocks",
    "attention",
    "horizontal_global_attention",
    "num_different_global_patterns",
)
_VARIABLE: Final = (
    "different_layout_per_head",
    "num_random_blocks",
    "local_window_blocks",
    "global_block_indices",
    "global_block_end_indices",
    "attention",
    "horizontal_global_attention",
)
# `attention` is missing from the last two: DeepSpeed ignores it, and makes them bidirectional.
_BIGBIRD: Final = (
    "different_layout_per_head",
    "num_random_blocks",
    "num_sliding_window_blocks",
    "num_global_blocks",
)
_BSLONGFORMER: Final = (
    "different_layout_per_head",
    "num_sliding_window_blocks",
    "global_block_indices",
    "global_block_end_indices",
)
_MODES: Final[Mapping[str, tuple[type[structures.SparsityConfig], tuple[str, ...]]]] = MappingProxyType(
    {
        "dense": (sparsity_config.DenseSparsityConfig, ()),
        "fixed": (sparsity_config.FixedSparsityConfig, _FIXED),
        "variable": (sparsity_config.VariableSparsityConfig, _VARIABLE),
        "bigbird": (sparsity_config.BigBirdSparsityConfig, _BIGBIRD),
        "bslongformer": (sparsity_config.BSLongformerSparsityConfig, _BSLONGFORMER),
    }
)


def sparsity_config_of(section: Mapping[str, Any], num_heads: int) -> structures.SparsityConfig:
    """Make the structure that a section describes, in strict mode, with DeepSpeed's defaults for the section.

    As in DeepSpeed, keys that a mode does not have are ignored, `attention` of bigbird and bslongformer among them.
    bigbird has no random blocks where `num_random_blocks` is left out, while the class has one for each row.

    Args:
        section: the values under `sparse_attention`; its `mode` is `fixed` where it is left out.
        num_heads: query heads of the model, which the section does not have.

    Raises:
        NotImplementedError: there is no such mode.
        ValueError: the structure refuses its values.
    """
    mode = section.get("mode", "fixed")
    if mode not in _MODES:
        raise NotImplementedError(f"Given sparsity mode, {mode}, has not been implemented yet!")
    kind, names = _MODES[mode]
    options = {name: section[name] for name in ("block", *names) if name in section}
    if mode == "bigbird":
        options.setdefault("num_random_blocks", 0)
    return kind(num_heads, **options)
