"""How much of attention a layout leaves: pairs of a query and a key that are visible, and that kernels compute.

All counts are means over heads, and take no memory beyond that of the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.attention.selected import cut, is_there

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
    pairs = keys_before = 0
    for pattern in patterns:
        queries, keys = _there(pattern)  # [num_blocks, block] each
        pairs += pattern.num_queries * keys_before + int(keys.flatten().cumsum(0)[queries.flatten()].sum())
        keys_before += pattern.num_keys
    return pairs


def keys_of_rows(pattern: Pattern, *, up_to_diagonal: bool = False) -> Tensor:
    """Visible pairs of each row of blocks, int64 [heads or 1, num_blocks]; 0 where there is no query."""
    queries, keys = _there(pattern)  # [num_blocks, block] each
    num_queries, num_keys = queries.sum(1), keys.sum(1)  # [num_blocks] each
    rows, columns = num_queries.nonzero()[:, 0], num_keys.nonzero()[:, 0]
    pairs = torch.zeros(pattern.blocks.shape[:2], dtype=torch.int64)
    is_causal = pattern.causal or up_to_diagonal
    seen = cut(pattern.blocks, rows, columns)  # [heads or 1, block rows, key blocks]
    if is_causal:
        seen = seen & (rows[:, None] > columns)
    pairs[:, rows] = _num_seen(seen, num_keys[columns], pattern.block) * num_queries[rows]
    if is_causal:
        in_own_block = (keys.cumsum(1) * queries).sum(1)  # [num_blocks], pairs whose key is not after the query
        pairs += pattern.blocks.diagonal(dim1=1, dim2=2) * in_own_block
    return pairs


def tile_pairs(patterns: Sequence[Pattern], rows: int, columns: int) -> float:
    """Pairs in the whole tiles that cover each tile of rows' gathered blocks of keys."""
    pairs = 0.0
    for pattern in patterns:
        seen = union_of_rows(pattern, rows).sum(-1) * pattern.block  # [heads or 1, num_tiles]
        pairs += _mean(-(-seen // columns) * columns * rows)
    return pairs


def union_of_rows(pattern: Pattern, rows: int) -> Tensor:
    """Blocks with keys that any of a tile's `rows` queries sees, bool [heads or 1, num_tiles, blocks with keys].

    A pattern's queries lie one run behind another: a tile may have those of several runs.
    """
    queries, keys = (each.sum(1) for each in _there(pattern))  # [num_blocks] each
    block_rows, key_blocks = queries.nonzero()[:, 0], keys.nonzero()[:, 0]
    blocks = cut(pattern.blocks, block_rows, key_blocks)  # [heads or 1, block rows, key blocks]
    if pattern.causal:
        blocks = blocks & (block_rows[:, None] >= key_blocks)
    starts = torch.arange(0, pattern.num_queries, rows)
    ends = (starts + rows).clamp(max=pattern.num_queries) - 1
    behind = queries[block_rows].cumsum(0)  # [block rows], queries up to the end of each
    first, last = (torch.searchsorted(behind, each, right=True) for each in (starts, ends))  # [num_tiles], block rows
    union = blocks[:, first]  # [heads or 1, num_tiles, key blocks]
    for step in range(1, max((last - first).tolist(), default=0) + 1):
        union |= blocks[:, torch.minimum(first + step, last)]
    return union


def _there(pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Which of the tokens of each block have a query, and which a key; bool [num_blocks, block] each."""
    num_blocks = pattern.blocks.shape[-1]
    return (
        is_there(pattern.query_runs, num_blocks, pattern.block),
        is_there(pattern.key_runs, num_blocks, pattern.block),
    )


def _num_seen(seen: Tensor, num_keys: Tensor, block: int) -> Tensor:
    """Keys in the blocks that are seen, int64 [..., block rows], of bool [..., block rows, key blocks]."""
    is_whole = num_keys == block
    few = (~is_whole).nonzero()[:, 0]  # blocks that are cut; of all together, a product would take 8 times the memory
    return (seen & is_whole).sum(-1) * block + (seen[..., few] * num_keys[few]).sum(-1)


def _mean(of_heads: Tensor) -> float:
    return int(of_heads.sum()) / of_heads.shape[0]
