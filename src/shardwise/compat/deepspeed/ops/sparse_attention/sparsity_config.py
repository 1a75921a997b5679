"""Offers the structures, by default in DeepSpeed's strict mode, and the base class for a user's own.

>>> class Diagonal(SparsityConfig):
...     def make_layout(self, seq_len):
...         layout = self.setup_layout(seq_len)
...         layout[0].fill_diagonal_(1)
...         return self.check_and_propagate_first_head_layout(layout)
>>> Diagonal(num_heads=2, block=16).layout(64).density
0.25
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.attention import structures


class SparsityConfig(structures.SparsityConfig):
    """Serves as the base class of structures: a user's subclass defines `make_layout`.

    Args:
        different_layout_per_head: `check_and_propagate_first_head_layout` then leaves heads as they are.
    """

    # A subclass may set attributes of its own, so two instances need not be equal where these fields are.
    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __setattr__ = object.__setattr__

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        super().__init__(num_heads, block, different_layout_per_head, strict_deepspeed=True)

    def setup_layout(self, seq_len: int) -> Tensor:
        """Return a layout without a visible block, int64 [num_heads, num_blocks, num_blocks].

        Raises:
            ValueError: blocks do not divide `seq_len`.
        """
        num_blocks = self._num_blocks(seq_len)
        return torch.zeros(self.num_heads, num_blocks, num_blocks, dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Copy the first head's blocks to all heads in place, unless heads may differ; return the layout."""
        if not self.different_layout_per_head:
            layout[1:] = layout[:1].clone()
        return layout


class DenseSparsityConfig(structures.DenseSparsityConfig, SparsityConfig):
    def __init__(self, *args: Any, strict_deepspeed: bool = True, **options: Any) -> None:
        structures.DenseSparsityConfig.__init__(self, *args, strict_deepspeed=strict_deepspeed, **options)


class FixedSparsityConfig(structures.FixedSparsityConfig, SparsityConfig):
    def __init__(self, *args: Any, strict_deepspeed: bool = True, **options: Any) -> None:
        structures.FixedSparsityConfig.__init__(self, *args, strict_deepspeed=strict_deepspeed, **options)


class VariableSparsityConfig(structures.VariableSparsityConfig, SparsityConfig):
    def __init__(self, *args: Any, strict_deepspeed: bool = True, **options: Any) -> None:
        structures.VariableSparsityConfig.__init__(self, *args, strict_deepspeed=strict_deepspeed, **options)


class BigBirdSparsityConfig(structures.BigBirdSparsityConfig, SparsityConfig):
    def __init__(self, *args: Any, strict_deepspeed: bool = True, **options: Any) -> None:
        structures.BigBirdSparsityConfig.__init__(self, *args, strict_deepspeed=strict_deepspeed, **options)


class BSLongformerSparsityConfig(structures.BSLongformerSparsityConfig, SparsityConfig):
    def __init__(self, *args: Any, strict_deepspeed: bool = True, **options: Any) -> None:
        structures.BSLongformerSparsityConfig.__init__(self, *args, strict_deepspeed=strict_deepspeed, **options)


class LocalSlidingWindowSparsityConfig(structures.LocalSlidingWindowSparsityConfig, SparsityConfig):
    def __init__(self, *args: Any, strict_deepspeed: bool = True, **options: Any) -> None:
        structures.LocalSlidingWindowSparsityConfig.__init__(self, *args, strict_deepspeed=strict_deepspeed, **options)


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
        "dense": (DenseSparsityConfig, ()),
        "fixed": (FixedSparsityConfig, _FIXED),
        "variable": (VariableSparsityConfig, _VARIABLE),
        "bigbird": (BigBirdSparsityConfig, _BIGBIRD),
        "bslongformer": (BSLongformerSparsityConfig, _BSLONGFORMER),
    }
)


def sparsity_config_of(section: Mapping[str, Any], num_heads: int) -> structures.SparsityConfig:
    """Make the structure that a section describes, in strict mode, with DeepSpeed's defaults for the section.

    As in DeepSpeed, keys that a mode does not have are ignored, `attention` of bigbird and bslongformer among them.
    bigbird has no random blocks where `num_random_blocks` is left out, while the class has one for each row.

    >>> sparsity_config_of({"mode": "bslongformer", "block": 32}, num_heads=4).num_sliding_window_blocks
    3

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
    structure, names = _MODES[mode]
    options = {name: section[name] for name in ("block", *names) if name in section}
    if mode == "bigbird":
        options.setdefault("num_random_blocks", 0)
    return structure(num_heads, **options)
