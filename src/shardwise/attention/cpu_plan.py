"""Cuts a layout into tiles for the CPU back end: rows of blocks that see nearly the same keys share a tile.

A tile is a run of block rows and the union of the key blocks they see, listed by index; it is masked where a row does
not see all of them. Taller tiles multiply faster and copy each key once for more rows, but compute more pairs that no
query sees: a measured price decides, bottom up over aligned pairs of rows. Tiles of equal sizes form a bucket, and a
call of a kernel takes several tiles of one bucket.

Where the last block is short, documents are packed, or runs cut blocks, tokens are copied into slots: whole blocks,
with gaps, and only of blocks that have tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.attention.backends import BackendPlan
from shardwise.attention.block_layout import BlockLayout, Pattern, cut, is_there

MOST_TILE_TOKENS: Final = 256
ALL_HEADS: Final = -1
NEVER_SEEN: Final = 2**30  # the position of a slot without a key
# The time of a tile is about keys x (rows + this): the cost of a key besides its scores, measured forward and backward.
ROWS_OF_A_KEY: Final = 30
MASK_FACTOR: Final = 1.05  # a mask takes 5 % more time


@dataclass(frozen=True, eq=False)
class TileBucket:
    """Holds tiles of equal sizes.

    Attributes:
        head: the query head of the tiles, or `ALL_HEADS`.
        rows: [tiles, block rows of a tile], int64, indices of blocks of queries.
        columns: [tiles, key blocks of a tile], int64, indices of blocks of keys.
        seen: [tiles, key blocks, block rows], bool, which of them the layout has; None where no score needs a mask.
    """

    head: int
    rows: Tensor
    columns: Tensor
    seen: Tensor | None


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Lists whole blocks of tokens, or of gaps.

    Attributes:
        token_of: [slots], the token in each, -1 in a gap; empty where slot i holds token i.
        slot_of: [tokens], the slot of each; empty where slot i holds token i.
        positions: [slots], int32: a query sees the keys whose positions are at most its own.
    """

    num_blocks: int
    token_of: Tensor
    slot_of: Tensor
    positions: Tensor


@dataclass(frozen=True, eq=False)
class CpuPlan:
    """Holds a plan that `unfold` has read."""

    block: int
    queries: BlockTable
    keys: BlockTable
    buckets: tuple[TileBucket, ...]


@dataclass(frozen=True, eq=False)
class _Side:
    """Lists a pattern's blocks with queries, or those with keys.

    Attributes:
        blocks: [blocks], their indices in the pattern, ascending.
        start: index of the first of them among the blocks of slots.
        first: [blocks], the lowest position of a token in each.
        last: [blocks], the highest position of a slot in each: gaps among keys have the highest of all.
    """

    blocks: Tensor
    start: int
    first: Tensor
    last: Tensor


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Holds tiles of one pattern and one height, unsorted; `columns` and `seen` list those of all tiles in turn."""

    heads: Tensor  # [tiles]
    rows: Tensor  # [tiles, block rows]
    nums: Tensor  # [tiles], key blocks of each
    is_masked: Tensor  # [tiles]
    columns: Tensor  # [key blocks of all tiles]
    seen: Tensor  # [key blocks of all tiles, block rows]


def make_plan(layout: BlockLayout, group: int) -> BackendPlan:
    """Plan a layout.

    Args:
        group: query heads of a KV head, whose rows a kernel computes as one where all heads share the layout.
    """
    group = group if layout.num_heads == 1 else 1
    (queries, rows_of), (keys, columns_of) = _slots(layout, is_query=True), _slots(layout, is_query=False)
    by_height: dict[int, list[_Tiles]] = {}
    for pattern, rows, columns in zip(layout.patterns, rows_of, columns_of, strict=True):
        if len(rows.blocks) and len(columns.blocks):
            for tiles in _tiles_of(pattern, group, rows, columns):
                by_height.setdefault(tiles.rows.shape[1], []).append(tiles)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    numbers = [layout.block, queries.num_blocks, keys.num_blocks]
    for tiles_of_height in by_height.values():
        parts.append(_sorted_into(numbers, tiles_of_height, layout.num_heads == 1))
    none = torch.empty(0, dtype=torch.int64)
    listed = (torch.cat([arrays[index] for arrays in parts]) if parts else none for index in range(3))
    positions = (queries.positions, keys.positions)
    return BackendPlan(
        (*listed, *positions, queries.token_of, queries.slot_of, keys.token_of, keys.slot_of),
        tuple(numbers),
    )


def unfold(plan: BackendPlan) -> CpuPlan:
    """Read a plan that `make_plan` has made."""
    rows, columns, seen, query_positions, key_positions, *slots = plan.tensors
    block, num_query_blocks, num_key_blocks, *sizes = plan.numbers
    buckets = []
    row = column = bit = 0
    for start in range(0, len(sizes), 5):
        head, height, width, num, is_masked = sizes[start : start + 5]
        next_row, next_column = row + num * height, column + num * width
        next_bit = bit + is_masked * num * height * width
        seen_here = seen[bit:next_bit].view(num, width, height) if is_masked else None
        in_rows = rows[row:next_row].view(num, height)
        buckets.append(TileBucket(head, in_rows, columns[column:next_column].view(num, width), seen_here))
        row, column, bit = next_row, next_column, next_bit
    queries = BlockTable(num_query_blocks, slots[0], slots[1], query_positions)
    return CpuPlan(block, queries, BlockTable(num_key_blocks, slots[2], slots[3], key_positions), tuple(buckets))


def _slots(layout: BlockLayout, is_query: bool) -> tuple[BlockTable, list[_Side]]:
    """Return the slots of all queries, or of all keys, and the part of them that each pattern has."""
    token_of, positions, sides = [], [], []
    num_tokens = num_before = num_blocks = 0
    for pattern in layout.patterns:
        has_tokens = is_there(
            pattern.query_runs if is_query else pattern.key_runs, pattern.blocks.shape[1], pattern.block
        )
        blocks = has_tokens.any(1).nonzero()[:, 0]
        is_token = has_tokens[blocks]  # [blocks with tokens, block]
        token_of.append(torch.where(is_token, is_token.flatten().cumsum(0).view_as(is_token) - 1 + num_tokens, -1))
        position = blocks[:, None] * pattern.block + torch.arange(pattern.block) + num_before
        if is_query and not pattern.causal:
            position.fill_(num_before + pattern.num_tokens - 1)
        positions.append(torch.where(is_token, position, -1 if is_query else NEVER_SEEN))
        first = position.masked_fill_(~is_token, NEVER_SEEN).amin(1)  # [blocks with tokens]
        sides.append(_Side(blocks, num_blocks, first, positions[-1].amax(1)))
        num_tokens += int(is_token.sum())
        num_before += pattern.num_tokens
        num_blocks += len(blocks)
    tokens = torch.cat(token_of).flatten()  # [slots]
    slot_of = (tokens >= 0).nonzero()[:, 0]
    if slot_of.numel() == tokens.numel():
        tokens = slot_of = tokens[:0].clone()
    return BlockTable(num_blocks, tokens, slot_of, torch.cat(positions).flatten().to(torch.int32)), sides


def _tiles_of(pattern: Pattern, group: int, rows: _Side, columns: _Side) -> Iterator[_Tiles]:
    """Yield the cheapest tiles of one pattern, one height after another, tallest first."""
    num_columns = len(columns.blocks)
    blocks = torch.zeros(
        len(pattern.blocks), len(rows.blocks), num_columns + -num_columns % 8, dtype=torch.bool
    )  # [heads, block rows, key blocks in whole words]
    blocks[:, :, :num_columns] = cut(pattern.blocks, rows.blocks, columns.blocks)
    if pattern.causal:
        blocks[:, :, :num_columns] &= rows.last[:, None] >= columns.first
    unions = [blocks.view(torch.int64)]  # [heads, groups of block rows, words of 8 key blocks] each
    nums = [_num_blocks(unions[0])]  # [heads, groups] each
    merged: list[Tensor] = []  # [heads, groups] each: whether a group is cheaper than its halves
    best = _price(nums[0], nums[0], 1, pattern.block * group)
    while 2 ** len(unions) * pattern.block <= MOST_TILE_TOKENS and unions[-1].shape[1] > 1:
        height, num_paired = 2 ** len(unions), unions[-1].shape[1] // 2 * 2
        unions.append(unions[-1][:, 0:num_paired:2] | unions[-1][:, 1:num_paired:2])
        nums.append(_num_blocks(unions[-1]))
        num_seen = nums[0][:, : num_paired // 2 * height].unflatten(1, (-1, height)).sum(-1)  # [heads, groups]
        price = _price(nums[-1], num_seen, height, pattern.block * group)
        apart = best[:, :num_paired].unflatten(1, (-1, 2)).sum(-1)
        merged.append(price < apart)
        best = torch.minimum(price, apart)
    taken_above = torch.zeros(blocks.shape[0], 0, dtype=torch.bool)
    for level in reversed(range(len(unions))):
        is_taken = torch.zeros(nums[level].shape, dtype=torch.bool)
        is_taken[:, : 2 * taken_above.shape[1]] = taken_above.repeat_interleave(2, 1)
        is_own = (merged[level - 1] if level else nums[0] > 0) & ~is_taken
        taken_above = is_taken | is_own
        if is_own.any():
            yield _tiles_at(blocks, unions[level], is_own, 2**level, rows, columns)


def _num_blocks(words: Tensor) -> Tensor:
    """Count the bytes that are 1 in words [..., words]: whole words are added, up to 128 of them, ten times faster."""
    chunked = F.pad(words, (0, -words.shape[-1] % 128)).unflatten(-1, (-1, 128))
    return chunked.sum(-1).view(torch.uint8).sum(-1)


def _price(nums: Tensor, num_seen: Tensor, height: int, rows_of_a_block: int) -> Tensor:
    """Estimate the price of tiles, [heads, tiles], in key blocks x rows."""
    rows = torch.where(nums * height == num_seen, 1.0, MASK_FACTOR) * (height * rows_of_a_block)
    return nums * (rows + ROWS_OF_A_KEY)


def _tiles_at(blocks: Tensor, union: Tensor, own: Tensor, height: int, queries: _Side, keys: _Side) -> _Tiles:
    """Return the tiles of one height, of the groups of rows in `own` [heads, groups]."""
    heads, groups = own.nonzero().unbind(1)  # [tiles] each
    local_rows = groups[:, None] * height + torch.arange(height)  # [tiles, height]
    listed = union.flatten(0, 1).index_select(0, heads * union.shape[1] + groups)  # [tiles, words]
    in_tiles, columns_of_words = listed.nonzero().unbind(1)  # [words with blocks] each
    at, byte = (
        listed[in_tiles, columns_of_words, None].view(torch.bool).nonzero().unbind(1)
    )  # [key blocks of all tiles] each
    tiles, columns = in_tiles[at], columns_of_words[at] * 8 + byte
    seen = blocks[heads[tiles, None], local_rows[tiles], columns[:, None]]  # [key blocks of all tiles, height]
    nums = torch.bincount(tiles, minlength=len(heads))
    first_seen = queries.first[local_rows].amin(1)  # [tiles]
    is_partial = (~seen.all(1)) | (keys.last[columns] > first_seen[tiles])  # [key blocks of all tiles]
    is_masked = torch.zeros(len(heads), dtype=torch.bool)
    is_masked[tiles[is_partial]] = True
    return _Tiles(heads, local_rows + queries.start, nums, is_masked, columns + keys.start, seen)


def _sorted_into(numbers: list[int], several: list[_Tiles], is_shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Sort tiles of one height into buckets; append their sizes to `numbers`; return rows, columns and seen, flat."""
    heads, nums, is_masked = (
        torch.cat([getattr(tiles, name) for tiles in several]) for name in ("heads", "nums", "is_masked")
    )
    rows, columns, seen = (
        torch.cat([getattr(tiles, name) for tiles in several]) for name in ("rows", "columns", "seen")
    )
    widest = int(nums.max()) + 1
    kinds, kind_of, counts = torch.unique(
        (heads * widest + nums) * 2 + is_masked, return_inverse=True, return_counts=True
    )
    order = kind_of.argsort(stable=True)  # [tiles]
    kind_of_column = kind_of.repeat_interleave(nums)  # [key blocks of all tiles]
    column_order = kind_of_column.argsort(stable=True)
    masked_order = column_order[kinds[kind_of_column[column_order]] % 2 == 1]
    height = rows.shape[1]
    for head_kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
        head, num = divmod(head_kind // 2, widest)
        numbers.extend((ALL_HEADS if is_shared else head, height, num, count, head_kind % 2))
    return rows[order].reshape(-1), columns[column_order], seen[masked_order].reshape(-1)
