"""Look-up tables of the kernels: which tokens each program reads. Pure numpy; no Triton.

A TILE is tokens of one document, as they lie in the tensor, that a program owns: queries for the forward and dQ, keys
for dK and dV (`axes`). It reads ENTRIES of the other axis, each gathered from runs of one block's tokens (SUB-BLOCKS),
so that small blocks waste nothing. Every pair of a FULL entry is seen; a PARTIAL entry says by bits which runs of the
tile see which sub-block, and the kernel compares places where the pattern is causal.

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
from shardwise.attention.kernels.axes import Axis, Granules, Ints, Tiles, granules_of, stretches_of, tiles_of

Bools: TypeAlias = NDArray[np.bool_]

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
    parts = [_heads_lists(*each, side) for each in _places(layout)]  # per document and head
    tokens = np.concatenate([part[0].tokens for part in parts])
    ranges, full, partial = [], [], []
    num_full = num_partial = 0
    for head in range(layout.num_heads):
        of_head = [part[head] for part in parts]
        lengths = np.concatenate([part.lengths for part in of_head])  # [tiles, 2]: full and partial entries
        ends = lengths.cumsum(0) + np.array([num_full, num_partial])
        ranges.append(np.stack([ends[:, 0] - lengths[:, 0], ends[:, 0], ends[:, 1] - lengths[:, 1], ends[:, 1]], 1))
        num_full, num_partial = num_full + int(lengths[:, 0].sum()), num_partial + int(lengths[:, 1].sum())
        full += [part.full for part in of_head]
        partial += [part.partial for part in of_head]
    lists = heads.query // heads.kv if layout.num_heads > 1 and not side.of_queries else 1
    shape = layout.num_heads // lists, lists, len(tokens), 4
    grouped = np.stack(ranges).reshape(shape).swapaxes(1, 2)  # [groups, tiles, lists, 4]
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
            lengths = sum(part.lengths.sum() for each in _places(layout) for part in _heads_lists(*each, side))
            costs[tile] = int(lengths) * (tile + _ENTRY_COST) * (1.0 if tile >= 64 else _NARROW_COST)
    return Width(min(costs, key=lambda tile: costs[tile]), entry)


_ENTRY_COST: Final = 24  # what an entry costs beside its products, in tokens of a tile
_NARROW_COST: Final = 1.6  # a tile below 64 cannot use the widest matrix instructions


@dataclass(frozen=True, eq=False)
class _Lists:
    """Of one document and head: tiles [tiles, 4], lengths [tiles, 2], and their entries."""

    tokens: Ints
    lengths: Ints
    full: Ints
    partial: Ints


def _places(layout: BlockLayout) -> list[tuple[Pattern, int, int]]:
    """Each document, and where its queries and its keys begin in the tensors."""
    found = []
    query = key = 0
    for pattern in layout.patterns:
        found.append((pattern, query, key))
        query, key = query + pattern.num_queries, key + pattern.num_keys
    return found


def _granule(block: int) -> int:
    """The largest power of two that divides a block; at most 128."""
    return gcd(block, 128)


def _runs(block: int, width: Width) -> tuple[int, int]:
    return min(_granule(block), width.tile), min(_granule(block), width.entry)


def _heads_lists(pattern: Pattern, query: int, key: int, side: Side) -> list[_Lists]:
    """The entries of each tile of a document, for each head."""
    run, sub_block = _runs(pattern.block, side.width)
    queries = Axis(pattern.query_runs, pattern.key_runs, (query, key), of_queries=True)
    keys = Axis(pattern.key_runs, pattern.query_runs, (key, query), of_queries=False)
    own, other = (queries, keys) if side.of_queries else (keys, queries)
    tiles = tiles_of(own, causal=pattern.causal, granule=run, width=side.width.tile)
    entries = granules_of(stretches_of(other, causal=False), sub_block)
    return [_lists(pattern, head.numpy(), tiles, entries, side) for head in pattern.blocks]


def _lists(pattern: Pattern, blocks: Bools, tiles: Tiles, entries: Granules, side: Side) -> _Lists:
    """The entries of each tile of a document, for one head."""
    run, sub_block = _runs(pattern.block, side.width)
    some, every = _pairs(pattern, blocks if side.of_queries else blocks.T, (tiles.granules, entries), side.of_queries)
    shape = len(tiles.tokens), side.width.tile // run, len(entries.begin)  # [tiles, runs, sub-blocks]
    seen, whole = np.zeros(shape, dtype=bool), np.ones(shape, dtype=bool)
    for found, into in ((some, seen), (every, whole)):
        into.reshape(shape[0] * shape[1], shape[2])[tiles.slots] = found
    is_full = whole.all(1) & (entries.end - entries.begin == sub_block)  # [tiles, sub-blocks]
    num_subs = side.width.entry // sub_block
    rank = is_full.cumsum(1) - 1
    is_full &= rank < (is_full.sum(1, keepdims=True) // num_subs) * num_subs  # the rest join the partial ones
    is_partial = seen.any(1) & ~is_full
    full = entries.index[np.nonzero(is_full)[1]].reshape(-1, num_subs)
    lengths = np.stack([is_full.sum(1) // num_subs, -(-is_partial.sum(1) // num_subs)], 1)
    return _Lists(tiles.tokens, lengths, full, _partial(is_partial, seen, entries, num_subs))


def _pairs(pattern: Pattern, blocks: Bools, axes: tuple[Granules, Granules], of_queries: bool) -> tuple[Bools, Bools]:
    """Of granules [of tiles, of entries]: whether any pair of tokens is seen, and whether all are."""
    tiles, entries = axes
    seen = blocks[np.ix_(tiles.begin // pattern.block, entries.begin // pattern.block)]
    if not pattern.causal:
        return seen, seen
    if of_queries:
        any_pair = entries.begin < tiles.end[:, None]
        all_pairs = entries.end <= tiles.begin[:, None] + 1
    else:
        any_pair = tiles.begin[:, None] < entries.end
        all_pairs = tiles.end[:, None] <= entries.begin + 1
    return seen & any_pair, seen & all_pairs


def _partial(is_partial: Bools, seen: Bools, entries: Granules, num_subs: int) -> Ints:
    """The partial entries of all tiles, [entries, 2 * sub-blocks + runs]; sub-blocks that miss are empty."""
    tile, column = np.nonzero(is_partial)
    counts = is_partial.sum(1)
    num_entries = -(-counts // num_subs)
    rank = np.arange(len(tile)) - np.repeat(counts.cumsum() - counts, counts)
    entry = np.repeat(num_entries.cumsum() - num_entries, counts) + rank // num_subs
    place = rank % num_subs
    table = np.zeros((int(num_entries.sum()), 2 * num_subs + seen.shape[1]), dtype=np.int64)
    table[entry, place] = entries.index[column]
    table[entry, num_subs + place] = (entries.index + entries.end - entries.begin)[column]
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
        cut = np.stack(cuts, -1).reshape(len(tile), 4 * of_group.shape[1])
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
