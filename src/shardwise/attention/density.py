"""How much of attention a layout leaves: pairs of a query and a key that are visible, and that kernels compute.

All counts are means over heads, and take no memory beyond that of the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shardwise.attention.block_layout import Pattern


def visible_pairs(patterns: Sequence[Pattern], *, up_to_diagonal: bool = False) -> float:
    """Pairs that are visible, exact to the token.

    Args:
        patterns: of one layout.
        up_to_diagonal: leave out those in which the key is after the query.
    """
    return sum(_mean(keys_of_rows(each, up_to_diagonal=up_to_diagonal)) for each in patterns)


def causal_pairs(patterns: Sequence[Pattern]) -> int:
    """Pairs in which the key is not after the query, in other documents too: what dense causal attention computes."""
    pairs = before = 0
    for pattern in patterns:
        positions = range(before + pattern.first_query, before + pattern.num_tokens)
        pairs += (positions.start + 1 + positions.stop) * len(positions) // 2
        before += pattern.num_tokens
    return pairs


def keys_of_rows(pattern: Pattern, *, up_to_diagonal: bool = False) -> Tensor:
    """Visible pairs of each row of blocks, int64 [heads or 1, num_blocks]; 0 where there is no query."""
    num_queries, num_keys = _sizes(pattern)  # [num_blocks] each
    is_causal = pattern.causal or up_to_diagonal
    blocks = pattern.blocks.tril() if is_causal else pattern.blocks  # [heads or 1, num_blocks, num_blocks]
    seen = blocks.sum(-1) * pattern.block  # [heads or 1, num_blocks]
    seen -= blocks[:, :, -1] * (pattern.block - num_keys[-1])
    pairs = seen * num_queries
    if is_causal:  # The last of a block's queries sees all of that block's keys, the one before it all but one, ...
        pairs -= blocks.diagonal(dim1=1, dim2=2) * (num_queries * (num_queries - 1) // 2)
    return pairs


def tile_pairs(patterns: Sequence[Pattern], rows: int, columns: int) -> float:
    """Pairs in the whole tiles that cover each tile of rows' gathered blocks of keys."""
    pairs = 0.0
    for pattern in patterns:
        seen = union_of_rows(pattern, rows).sum(-1) * pattern.block  # [heads or 1, num_tiles]
        pairs += _mean(-(-seen // columns) * columns * rows)
    return pairs


def union_of_rows(pattern: Pattern, rows: int) -> Tensor:
    """Blocks of keys that any of a tile's `rows` queries sees, bool [heads or 1, num_tiles, num_blocks]."""
    starts = torch.arange(pattern.first_query, pattern.num_tokens, rows)
    ends = (starts + rows).clamp(max=pattern.num_tokens) - 1
    first, last = starts // pattern.block, ends // pattern.block  # [num_tiles], of blocks
    blocks = pattern.blocks.tril() if pattern.causal else pattern.blocks
    union = blocks[:, first]  # [heads or 1, num_tiles, num_blocks]
    for step in range(1, int((last - first).max()) + 1):
        union |= blocks[:, torch.minimum(first + step, last)]
    return union


def _sizes(pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Queries and keys of each block."""
    ends = (torch.arange(1, pattern.blocks.shape[-1] + 1) * pattern.block).clamp(max=pattern.num_tokens)
    starts = torch.arange(pattern.blocks.shape[-1]) * pattern.block
    return (ends - starts.clamp(min=pattern.first_query)).clamp(min=0), ends - starts


def _mean(of_heads: Tensor) -> float:
    return int(of_heads.sum()) / of_heads.shape[0]
