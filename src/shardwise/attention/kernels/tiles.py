"""Look-up tables of the kernels: which tokens each program reads. Pure numpy; no Triton.

A TILE is a run of tokens of one document that a program owns: queries for the forward and dQ, keys for dK and dV. It
reads ENTRIES of the other axis, each gathered from runs of one block's tokens (SUB-BLOCKS), so that small blocks waste
nothing. Every pair of a FULL entry is seen; a PARTIAL entry says by bits which runs of the tile see which sub-block,
and the kernel compares positions where the pattern is causal.

>>> import torch
>>> layout = BlockLayout.from_blocks(torch.eye(2), block=64)
>>> tables = tables_of(layout, Side(of_queries=True, width=Width(64, 64)), Heads(4, 4))
>>> tables.items.shape, tables.full.tolist(), len(tables.partial)
((1, 2, 9), [[0], [64]], 0)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwise.attention.block_layout import BlockLayout, Pattern

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

NOT_CAUSAL: Final = 1 << 30  # a shift that lets every query see every key
ITEM_HEAD: Final = 5  # numbers of an item before its ranges: origin, begin, end, shift, slot
_PROGRAMS: Final = 264  # that run at once: two for each multiprocessor of an H100 or H200
_FEWEST_ENTRIES: Final = 16  # a part of a split tile has as many, or merging costs more than it gains
_MOST_SUB_BLOCKS: Final = 16  # of an entry: their bits are those of one int32


@dataclass(frozen=True)
class Width:
    """Tokens of a tile and of an entry; powers of two, at least 16."""

    tile: int
    entry: int


@dataclass(frozen=True)
class Side:
    """Whether tiles are of queries (else of keys), and their width."""

    of_queries: bool
    width: Width


@dataclass(frozen=True)
class Heads:
    """Query heads, and the key and value heads that they share."""

    query: int
    kv: int


@dataclass(frozen=True, eq=False)
class Tables:
    """What the programs of one side read; `groups` is 1 where all heads share a layout.

    Attributes:
        items: [groups, items, 5 + 4 * lists], longest first: origin, begin and end of the tile's tokens, shift (a query
            m sees a key n where n <= m + shift), slot of partial sums or -1; then for each of the `lists` query heads
            its range of `full` and of `partial`. Rows of begin = end are empty.
        full: [entries, sub-blocks], where each sub-block begins.
        partial: [entries, 2 * sub-blocks + runs of a tile]: begins, ends, and for each run the bits of what it sees.
        merges: [groups, split tiles, 5]: origin, begin, end, first slot, slots.
        run: tokens of a run of a tile.
        sub_block: tokens of a sub-block.
        num_slots: for partial sums, of a head.
    """

    items: Ints
    full: Ints
    partial: Ints
    merges: Ints
    run: int
    sub_block: int
    num_slots: int


def tables_of(layout: BlockLayout, side: Side, heads: Heads, limit: int | None = None) -> Tables:
    """The tables of one side of a layout.

    Args:
        layout: its heads are 1 or those of the queries.
        side: queries for forward and dQ, keys for dK and dV.
        heads: of the tensors.
        limit: entries a program may visit, beyond which a tile is split; from the layout's own balance when left out.
    """
    parts = [_heads_lists(pattern, side) for pattern in layout.patterns]  # per document and head
    shifts = _tile_shifts(layout, side)
    tokens = np.concatenate([np.column_stack(_with(each, parts[i][0].tokens)) for i, each in enumerate(shifts)])
    ranges, full, partial = [], [], []
    num_full = num_partial = 0
    for head in range(layout.num_heads):
        of_head = [part[head] for part in parts]
        lengths = np.concatenate([part.lengths for part in of_head])  # [tiles, 2]: full and partial entries
        ends = lengths.cumsum(0) + np.array([num_full, num_partial])
        ranges.append(np.stack([ends[:, 0] - lengths[:, 0], ends[:, 0], ends[:, 1] - lengths[:, 1], ends[:, 1]], 1))
        num_full, num_partial = ends[-1]
        for part, shift in zip(of_head, shifts, strict=True):
            full.append(part.full + shift.entry)
            partial.append(part.partial.copy())
            num_subs = part.full.shape[1]
            partial[-1][:, : 2 * num_subs] += shift.entry
    lists = heads.query // heads.kv if layout.num_heads > 1 and not side.of_queries else 1
    grouped = np.stack(ranges).reshape(-1, lists, len(tokens), 4).swapaxes(1, 2)  # [groups, tiles, lists, 4]
    programs = heads.query if side.of_queries else heads.kv
    if limit is None:
        work = (grouped[..., 1::2] - grouped[..., ::2]).sum() * programs // len(grouped)
        limit = max(_FEWEST_ENTRIES, -(-int(work) // _PROGRAMS))
    items, merges, num_slots = _items(tokens, grouped, limit)
    run, sub_block = _runs(layout.block, side.width)
    return Tables(items, np.concatenate(full), np.concatenate(partial), merges, run, sub_block, num_slots)


def best_width(layout: BlockLayout, of_queries: bool, entry: int, most_tile: int) -> Width:
    """The tile whose entries cost least: a narrow one visits fewer pairs that nobody sees, a wide one reads less."""
    entry = min(entry, _MOST_SUB_BLOCKS * _granule(layout.block))
    costs = {}
    for tile in (128, 64, 32, 16):
        if tile <= most_tile:
            side = Side(of_queries, Width(tile, entry))
            lengths = sum(part.lengths.sum() for pattern in layout.patterns for part in _heads_lists(pattern, side))
            costs[tile] = int(lengths) * (tile + _ENTRY_COST) * (1.0 if tile >= 64 else _NARROW_COST)
    return Width(min(costs, key=lambda tile: costs[tile]), entry)


_ENTRY_COST: Final = 24  # what an entry costs beside its products, in tokens of a tile
_NARROW_COST: Final = 1.6  # a tile below 64 cannot use the widest matrix instructions


@dataclass(frozen=True, eq=False)
class _Lists:
    """Of one document and head, in its own tokens: tiles [tiles, 3], lengths [tiles, 2], and their entries."""

    tokens: Ints
    lengths: Ints
    full: Ints
    partial: Ints


@dataclass(frozen=True)
class _Shift:
    """Where a document's tokens lie in the tensors: of tiles, of entries; and the shift of the causal comparison."""

    tile: int
    entry: int
    causal: int


def _with(shift: _Shift, tokens: Ints) -> list[Ints]:
    return [tokens + shift.tile, np.full((len(tokens), 1), shift.causal)]


def _tile_shifts(layout: BlockLayout, side: Side) -> list[_Shift]:
    shifts = []
    query = key = 0
    for pattern in layout.patterns:
        first = query - pattern.first_query  # where the document's token 0 would be among the queries
        causal = key - first if pattern.causal else NOT_CAUSAL
        shifts.append(_Shift(first, key, causal) if side.of_queries else _Shift(key, first, causal))
        query, key = query + pattern.num_queries, key + pattern.num_tokens
    return shifts


def _granule(block: int) -> int:
    """The largest power of two that divides a block; at most 128."""
    return gcd(block, 128)


def _runs(block: int, width: Width) -> tuple[int, int]:
    return min(_granule(block), width.tile), min(_granule(block), width.entry)


def _heads_lists(pattern: Pattern, side: Side) -> list[_Lists]:
    return [_lists(pattern, head.numpy(), side) for head in pattern.blocks]


@dataclass(frozen=True, eq=False)
class _Axis:
    """The granules of one axis of a document: the block of each, its first token and the one after its last."""

    block: Ints
    begin: Ints
    end: Ints


def _axis(pattern: Pattern, granule: int, of_queries: bool) -> _Axis:
    begin = np.arange(0, pattern.num_tokens, granule)
    first = pattern.first_query if of_queries else 0
    end = np.minimum(begin + granule, pattern.num_tokens)
    return _Axis(begin // pattern.block, np.maximum(begin, first), end)


def _lists(pattern: Pattern, blocks: Bools, side: Side) -> _Lists:
    """The entries of each tile of a document, for one head."""
    run, sub_block = _runs(pattern.block, side.width)
    tiles, entries = _axis(pattern, run, side.of_queries), _axis(pattern, sub_block, not side.of_queries)
    seen, whole = _pairs(pattern, blocks if side.of_queries else blocks.T, (tiles, entries), side.of_queries)
    num_runs = side.width.tile // run
    num_tiles = -(-len(tiles.begin) // num_runs)
    padding = num_tiles * num_runs - len(tiles.begin)
    exists = np.pad(tiles.begin < tiles.end, (0, padding))
    seen = np.pad(seen, ((0, padding), (0, 0))).reshape(num_tiles, num_runs, -1)  # [tiles, runs, sub-blocks]
    whole = (np.pad(whole, ((0, padding), (0, 0))) | ~exists[:, None]).reshape(seen.shape)
    origin = np.arange(num_tiles) * side.width.tile
    begin = np.maximum(origin, pattern.first_query if side.of_queries else 0)
    end = np.minimum(origin + side.width.tile, pattern.num_tokens)
    kept = begin < end
    tokens = np.stack([origin, begin, end], 1)[kept]  # [tiles, 3]
    seen, whole = seen[kept], whole[kept]
    is_full = whole.all(1) & (entries.end - entries.begin == sub_block)  # [tiles, sub-blocks]
    num_subs = side.width.entry // sub_block
    rank = is_full.cumsum(1) - 1
    is_full &= rank < (is_full.sum(1, keepdims=True) // num_subs) * num_subs  # the rest join the partial ones
    is_partial = seen.any(1) & ~is_full
    full = entries.begin[np.nonzero(is_full)[1]].reshape(-1, num_subs)
    lengths = np.stack([is_full.sum(1) // num_subs, -(-is_partial.sum(1) // num_subs)], 1)
    return _Lists(tokens, lengths, full, _partial(is_partial, seen, entries, num_subs))


def _pairs(pattern: Pattern, blocks: Bools, axes: tuple[_Axis, _Axis], of_queries: bool) -> tuple[Bools, Bools]:
    """Of granules [of tiles, of entries]: whether any pair of tokens is seen, and whether all are."""
    tiles, entries = axes
    exists = (tiles.begin < tiles.end)[:, None] & (entries.begin < entries.end)
    seen = blocks[np.ix_(tiles.block, entries.block)] & exists
    if not pattern.causal:
        return seen, seen
    if of_queries:
        any_pair = entries.begin < tiles.end[:, None]
        all_pairs = entries.end <= tiles.begin[:, None] + 1
    else:
        any_pair = tiles.begin[:, None] < entries.end
        all_pairs = tiles.end[:, None] <= entries.begin + 1
    return seen & any_pair, seen & all_pairs


def _partial(is_partial: Bools, seen: Bools, entries: _Axis, num_subs: int) -> Ints:
    """The partial entries of all tiles, [entries, 2 * sub-blocks + runs]; sub-blocks that miss are empty."""
    tile, column = np.nonzero(is_partial)
    counts = is_partial.sum(1)
    num_entries = -(-counts // num_subs)
    rank = np.arange(len(tile)) - np.repeat(counts.cumsum() - counts, counts)
    entry = np.repeat(num_entries.cumsum() - num_entries, counts) + rank // num_subs
    place = rank % num_subs
    table = np.zeros((int(num_entries.sum()), 2 * num_subs + seen.shape[1]), dtype=np.int64)
    table[entry, place] = entries.begin[column]
    table[entry, num_subs + place] = entries.end[column]
    bits = seen[tile, :, column].astype(np.int64) << place[:, None]  # [sub-blocks, runs]
    np.add.at(table[:, 2 * num_subs :], entry, bits)
    return table


def _items(tokens: Ints, ranges: Ints, limit: int) -> tuple[Ints, Ints, int]:
    """Items and merges of all groups, and the slots that the largest group needs.

    Args:
        tokens: [tiles, 4]: origin, begin, end, shift.
        ranges: [groups, tiles, lists, 4].
        limit: entries of an item.
    """
    items, merges = [], []
    for of_group in ranges:
        lengths = of_group[..., 1::2] - of_group[..., ::2]  # [tiles, lists, 2]
        work = lengths.sum((1, 2))
        parts = np.where(work * 4 > limit * 5, -(-work // limit), 1)
        tile = np.repeat(np.arange(len(tokens)), parts)
        part = np.arange(len(tile)) - np.repeat(parts.cumsum() - parts, parts)
        is_split = parts[tile] > 1
        slot = np.where(is_split, is_split.cumsum() - 1, -1)
        cuts = [of_group[tile, :, ::2] + lengths[tile] * each[:, None, None] // parts[tile, None, None]
                for each in (part, part + 1)]  # fmt: skip
        cut = np.stack(cuts, -1).reshape(len(tile), -1)  # [items, 4 * lists]
        order = np.argsort(-(cuts[1] - cuts[0]).sum((1, 2)), kind="stable")
        items.append(np.concatenate([tokens[tile], slot[:, None], cut], 1)[order])
        split = np.nonzero(parts > 1)[0]
        first = parts[split].cumsum() - parts[split]
        merges.append(np.concatenate([tokens[split, :3], first[:, None], parts[split, None]], 1))
    num_slots = max(int(each[:, 4].sum()) for each in merges)
    return _stacked(items), _stacked(merges), num_slots


def _stacked(groups: list[Ints]) -> Ints:
    """[groups, rows, numbers], with rows of zeros below those that have fewer."""
    most = max(len(each) for each in groups)
    return np.stack([np.pad(each, ((0, most - len(each)), (0, 0))) for each in groups])
