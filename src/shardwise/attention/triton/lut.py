"""Makes the look-up tables of the kernels: cuts a document's queries, or its keys, into tiles. Pure numpy; no Triton.

Tensors hold a document's tokens one run after another. A tile takes neighbouring tokens of a tensor, from several runs
where their CHUNKS (a power of two of tokens that divides a block) are whole. The kernels compare a query's place m in
its tensor with a key's place n, n <= m + shift, with one shift for each tile: it is right for a SEGMENT of tokens.

>>> zigzag = TokenAxis(own=((0, 4), (8, 12)), other=((0, 12),), places=(0, 0), of_queries=True)
>>> [(each.begin, each.index, each.shift) for each in segments_of(zigzag, causal=True)]
[(0, 0, 0), (8, 4, 4)]
>>> tiles_of(zigzag, causal=True, chunk=4, width=8).tokens.tolist()
[[0, 0, 4, 0], [4, 4, 8, 4]]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwise.attention.block_layout import BlockLayout, Pattern
from shardwise.layout.token_ranges import Runs

Ints: TypeAlias = NDArray[np.int64]

NOT_CAUSAL: Final = 1 << 30  # a shift that lets every query see every key


@dataclass(frozen=True)
class TokenAxis:
    """Describes one axis of a document.

    Attributes:
        places: the index of the first token of each axis in its tensor.
        of_queries: whether it is the axis of queries.
    """

    own: Runs
    other: Runs
    places: tuple[int, int]
    of_queries: bool


@dataclass(frozen=True)
class Segment:
    """Describes the tokens [begin, end) of one run to which one shift applies.

    Attributes:
        index: the index of `begin` in the tensor.
        shift: the right shift; None where no token is on the other axis too, and each from `least` on is right.
        least: the smallest right shift where `shift` is None.
    """

    begin: int
    end: int
    index: int
    shift: int | None
    least: int


@dataclass(frozen=True, eq=False)
class AlignedChunks:
    """Lists the tokens [begin, end) of each chunk, cut where a segment ends.

    Attributes:
        index: the index of `begin` in the tensor.
    """

    segment: Ints
    begin: Ints
    end: Ints
    index: Ints


@dataclass(frozen=True, eq=False)
class AxisTiles:
    """Holds the tiles of an axis.

    Attributes:
        tokens: [tiles, 4]: origin, begin and end in the tensor, and the shift.
        chunks: in the order of the tiles.
        slots: [chunks], the place of each: chunks from the origin of the first tile, if all tiles were whole.
    """

    tokens: Ints
    chunks: AlignedChunks
    slots: Ints


def segments_of(axis: TokenAxis, *, causal: bool) -> list[Segment]:
    """Cut the runs of an axis where a causal pattern needs another shift.

    The bits of entries cover chunks that are wholly before or after others. So the comparison must be exact only for
    tokens that are on both axes, and must be True for all other pairs that are seen. Queries are cut where a run of
    keys begins, except the first, before which there are no keys; keys are cut where a run of queries ends, except the
    last, after which there are no queries.
    """
    starts, stops = [start for start, _ in axis.other], [stop for _, stop in axis.other]
    sums = [0, *accumulate(stop - start for start, stop in axis.other)]
    cuts = [] if not causal else starts[1:] if axis.of_queries else stops[:-1]
    segment_list = []
    index = axis.places[0]
    for run in axis.own:
        for begin, end in pairwise([run[0], *cuts[bisect_right(cuts, run[0]) : bisect_left(cuts, run[1])], run[1]]):
            shift, least = None, -NOT_CAUSAL
            if causal:
                nearest = bisect_right(stops, begin)  # of the other axis' runs, the first that does not end before
                start = starts[nearest] if nearest < len(starts) else end
                before = axis.places[1] + sums[nearest] + max(0, begin - start)  # the other axis' tokens before `begin`
                if start < end:
                    shift = (before - index - max(0, start - begin)) * (1 if axis.of_queries else -1)
                else:
                    least = before - 1 - index if axis.of_queries else index + end - begin - 1 - before
            segment_list.append(Segment(begin, end, index, shift, least))
            index += end - begin
    return segment_list


def chunks_of(segments: Sequence[Segment], chunk: int) -> AlignedChunks:
    """Cut the tokens of segments at chunks."""
    cuts = [np.arange(segment.begin // chunk * chunk, segment.end, chunk) for segment in segments]
    segment = np.repeat(np.arange(len(segments)), _ints([len(cut) for cut in cuts]))  # [chunks]
    first, last, index = (
        _ints([(segment.begin, segment.end, segment.index) for segment in segments]).reshape(-1, 3)[segment].T
    )
    begin = np.concatenate([_ints([]), *cuts])
    end, begin = np.minimum(begin + chunk, last), np.maximum(begin, first)
    return AlignedChunks(segment, begin, end, begin - first + index)


def tiles_of(axis: TokenAxis, *, causal: bool, chunk: int, width: int) -> AxisTiles:
    """Make the tiles of an axis.

    In a long run they begin at multiples of their width in the document, as the repeated parts of patterns do. They
    continue into the next run where that leaves chunks whole and the shift right.

    Args:
        causal: whether a token sees none after it.
        chunk: tokens of a chunk; divides the width and the block.
    """
    segments = segments_of(axis, causal=causal)
    anchors: list[int] = []  # of each segment: where slots are counted from
    origins: list[int] = []  # of each tile
    shifts: list[tuple[int | None, int]] = []  # of each tile: the exact one, and the least
    for segment in segments:
        place = segment.index - origins[-1] if origins else 0  # in the tile before
        is_whole = bool(origins) and segment.begin % chunk == 0 == place % chunk
        both = _agreed(shifts[-1], (segment.shift, segment.least)) if is_whole and place < width else None
        if both is not None:
            origin, shifts[-1] = origins.pop(), both
        else:
            is_long = segment.begin // width < (segment.end - 1) // width
            origin = segment.index - (
                0 if is_whole and place == width else segment.begin % (width if is_long else chunk)
            )
        anchors.append(origin - len(origins) * width)
        origins += range(origin, segment.index + segment.end - segment.begin, width)
        shifts += [(segment.shift, segment.least)] * (len(origins) - len(shifts))
    chunks = chunks_of(segments, chunk)
    slots = (chunks.index - _ints(anchors)[chunks.segment]) // chunk
    borders = np.searchsorted(slots, np.arange(len(origins) + 1) * (width // chunk))  # [tiles + 1], of chunks
    begin = chunks.index[borders[:-1]]
    end = (chunks.index + chunks.end - chunks.begin)[borders[1:] - 1]
    exact = [NOT_CAUSAL if shift is None else shift for shift, _ in shifts]
    return AxisTiles(np.stack([_ints(origins), begin, end, _ints(exact)], 1), chunks, slots)


def _agreed(one: tuple[int | None, int], other: tuple[int | None, int]) -> tuple[int | None, int] | None:
    """Return the (exact, least) shift that is right for two segments together; None if there is none."""
    exact = {shift for shift, _ in (one, other) if shift is not None}
    least = max(one[1], other[1])
    if len(exact) > 1 or any(shift < least for shift in exact):
        return None
    return (*exact, None)[0], least


def _ints(numbers: Sequence[int] | Sequence[tuple[int, ...]]) -> Ints:
    return np.array(numbers, dtype=np.int64)


Bools: TypeAlias = NDArray[np.bool_]

ITEM_HEAD: Final = 5  # numbers of an item before its ranges: origin, begin, end, shift, slot
_PROGRAMS: Final = 264  # that run at once: two for each multiprocessor of an H100 or H200
_FEWEST_ENTRIES: Final = 16  # of a part of a split tile; with fewer, merging costs more than it gains
_MOST_SUB_BLOCKS: Final = 16  # of an entry: their bits fit one int32


@dataclass(frozen=True)
class TileWidth:
    """Counts the tokens of a tile and of an entry; powers of two, at least 16."""

    tile: int
    entry: int


@dataclass(frozen=True)
class TileSide:
    """Says which side of attention tiles cut, queries or else keys, and how wide the tiles are."""

    of_queries: bool
    width: TileWidth


@dataclass(frozen=True)
class HeadGroups:
    """Counts query heads, and the key and value heads that they share."""

    query: int
    kv: int


@dataclass(frozen=True, eq=False)
class Lut:
    """Holds the look-up tables that the programs of one side read; `groups` is 1 where all heads share a layout.

    Attributes:
        items: [groups, items, 5 + 4 * lists], longest first: origin, begin and end of the tile's tokens, shift (a query
            m sees a key n where n <= m + shift), slot of partial sums or -1; then for each of the `lists` query heads
            its range of `full` and of `partial`. Rows of begin = end are empty.
        full: [entries, sub-blocks], the begin of each sub-block.
        partial: [entries, 2 * sub-blocks + runs of a tile]: begins, ends, and for each run the bits of sub-blocks seen.
        merges: [groups, split tiles, 5]: origin, begin, end, first slot, slots.
        run: tokens of a run of a tile, as `sub_block` is those of a sub-block.
        num_slots: slots for partial sums of a head.
    """

    items: Ints
    full: Ints
    partial: Ints
    merges: Ints
    run: int
    sub_block: int
    num_slots: int


def tables_of(layout: BlockLayout, side: TileSide, heads: HeadGroups, limit: int | None = None) -> Lut:
    """Make the tables of one side of a layout.

    Args:
        layout: its heads are 1 or those of the queries.
        side: queries for forward and dQ, keys for dK and dV.
        limit: most entries of a program, beyond which a tile is split; None chooses it from the layout's total work.
    """
    parts = [_heads_lists(*places, side) for places in _places(layout)]  # per document and head
    tokens = np.concatenate([head_lists[0].tokens for head_lists in parts])
    ranges, full, partial = [], [], []
    num_full = num_partial = 0
    for head in range(layout.num_heads):
        of_head = [of_document[head] for of_document in parts]
        lengths = np.concatenate([head_list.lengths for head_list in of_head])  # [tiles, 2]: full and partial entries
        ends = lengths.cumsum(0) + np.array([num_full, num_partial])
        ranges.append(np.stack([ends[:, 0] - lengths[:, 0], ends[:, 0], ends[:, 1] - lengths[:, 1], ends[:, 1]], 1))
        num_full, num_partial = num_full + int(lengths[:, 0].sum()), num_partial + int(lengths[:, 1].sum())
        full += [head_list.full for head_list in of_head]
        partial += [head_list.partial for head_list in of_head]
    lists = heads.query // heads.kv if layout.num_heads > 1 and not side.of_queries else 1
    shape = layout.num_heads // lists, lists, len(tokens), 4
    grouped = np.stack(ranges).reshape(shape).swapaxes(1, 2)  # [groups, tiles, lists, 4]
    programs = heads.query if side.of_queries else heads.kv
    if limit is None:
        work = (grouped[..., 1::2] - grouped[..., ::2]).sum() * programs // len(grouped)
        limit = max(_FEWEST_ENTRIES, -(-int(work) // _PROGRAMS))
    items, merges, num_slots = _items(tokens, grouped, limit)
    run, sub_block = _runs(layout.block, side.width)
    return Lut(items, np.concatenate(full), np.concatenate(partial), merges, run, sub_block, num_slots)


def best_width(layout: BlockLayout, of_queries: bool, entry: int, most_tile: int) -> TileWidth:
    """Choose the tile whose entries cost least: a narrow one computes fewer unseen pairs, a wide one reads less.

    Args:
        of_queries: tiles are of queries, else of keys.
    """
    entry = min(entry, _MOST_SUB_BLOCKS * _granule(layout.block))
    costs = {}
    for tile in (128, 64, 32, 16):
        if tile <= most_tile:
            side = TileSide(of_queries, TileWidth(tile, entry))
            lengths = sum(
                head_list.lengths.sum() for places in _places(layout) for head_list in _heads_lists(*places, side)
            )
            costs[tile] = int(lengths) * (tile + _ENTRY_COST) * (1.0 if tile >= 64 else _NARROW_COST)
    return TileWidth(min(costs, key=lambda tile: costs[tile]), entry)


_ENTRY_COST: Final = 24  # cost of an entry besides its products, in tokens of a tile
_NARROW_COST: Final = 1.6  # a tile below 64 cannot use the widest matrix instructions


@dataclass(frozen=True, eq=False)
class _TileLists:
    """Holds the tiles of one document and head: tokens [tiles, 4], lengths [tiles, 2], and their entries."""

    tokens: Ints
    lengths: Ints
    full: Ints
    partial: Ints


def _places(layout: BlockLayout) -> list[tuple[Pattern, int, int]]:
    """Return each document with the indices of its first query and its first key in the tensors."""
    item_list = []
    query = key = 0
    for pattern in layout.patterns:
        item_list.append((pattern, query, key))
        query, key = query + pattern.num_queries, key + pattern.num_keys
    return item_list


def _granule(block: int) -> int:
    """Return the largest power of two that divides a block; at most 128."""
    return gcd(block, 128)


def _runs(block: int, width: TileWidth) -> tuple[int, int]:
    return min(_granule(block), width.tile), min(_granule(block), width.entry)


def _heads_lists(pattern: Pattern, query: int, key: int, side: TileSide) -> list[_TileLists]:
    """Return the entries of each tile of a document, for each head."""
    run, sub_block = _runs(pattern.block, side.width)
    queries = TokenAxis(pattern.query_runs, pattern.key_runs, (query, key), of_queries=True)
    keys = TokenAxis(pattern.key_runs, pattern.query_runs, (key, query), of_queries=False)
    near, other = (queries, keys) if side.of_queries else (keys, queries)
    tiles = tiles_of(near, causal=pattern.causal, chunk=run, width=side.width.tile)
    entries = chunks_of(segments_of(other, causal=False), sub_block)
    return [_lists(pattern, head.numpy(), tiles, entries, side) for head in pattern.blocks]


def _lists(pattern: Pattern, blocks: Bools, tiles: AxisTiles, entries: AlignedChunks, side: TileSide) -> _TileLists:
    """Return the entries of each tile of a document, for one head."""
    run, sub_block = _runs(pattern.block, side.width)
    some, every = _pairs(pattern, blocks if side.of_queries else blocks.T, (tiles.chunks, entries), side.of_queries)
    shape = len(tiles.tokens), side.width.tile // run, len(entries.begin)  # [tiles, runs, sub-blocks]
    seen, is_all_seen = np.zeros(shape, dtype=bool), np.ones(shape, dtype=bool)
    for values, into in ((some, seen), (every, is_all_seen)):
        into.reshape(shape[0] * shape[1], shape[2])[tiles.slots] = values
    is_full = is_all_seen.all(1) & (entries.end - entries.begin == sub_block)  # [tiles, sub-blocks]
    num_subs = side.width.entry // sub_block
    rank = is_full.cumsum(1) - 1
    is_full &= rank < (is_full.sum(1, keepdims=True) // num_subs) * num_subs  # remaining ones join the partial ones
    is_partial = seen.any(1) & ~is_full
    full = entries.index[np.nonzero(is_full)[1]].reshape(-1, num_subs)
    lengths = np.stack([is_full.sum(1) // num_subs, -(-is_partial.sum(1) // num_subs)], 1)
    return _TileLists(tiles.tokens, lengths, full, _partial(is_partial, seen, entries, num_subs))


def _pairs(
    pattern: Pattern, blocks: Bools, axes: tuple[AlignedChunks, AlignedChunks], of_queries: bool
) -> tuple[Bools, Bools]:
    """Say for chunks [of tiles, of entries] whether any pair of tokens is seen, and whether all are."""
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


def _partial(is_partial: Bools, seen: Bools, entries: AlignedChunks, num_subs: int) -> Ints:
    """Return the partial entries of all tiles, [entries, 2 * sub-blocks + runs]; missing sub-blocks are empty."""
    tile, column = np.nonzero(is_partial)
    counts = is_partial.sum(1)
    num_entries = -(-counts // num_subs)
    rank = np.arange(len(tile)) - np.repeat(counts.cumsum() - counts, counts)
    entry = np.repeat(num_entries.cumsum() - num_entries, counts) + rank // num_subs
    column_in_entry = rank % num_subs
    table = np.zeros((int(num_entries.sum()), 2 * num_subs + seen.shape[1]), dtype=np.int64)
    table[entry, column_in_entry] = entries.index[column]
    table[entry, num_subs + column_in_entry] = (entries.index + entries.end - entries.begin)[column]
    bits = seen[tile, :, column].astype(np.int64) << column_in_entry[:, None]  # [sub-blocks, runs]
    np.add.at(table[:, 2 * num_subs :], entry, bits)
    return table


def _items(tokens: Ints, ranges: Ints, limit: int) -> tuple[Ints, Ints, int]:
    """Return the items and merges of all groups, and the number of slots that the largest group needs.

    Args:
        tokens: [tiles, 4]: origin, begin, end, shift; `ranges` are [groups, tiles, lists, 4].
    """
    items, merges = [], []
    for of_group in ranges:
        lengths = of_group[..., 1::2] - of_group[..., ::2]  # [tiles, lists, 2]
        work = lengths.sum((1, 2))
        parts = np.where(work * 4 > limit * 5, -(-work // limit), 1)
        tile = np.repeat(np.arange(len(tokens)), parts)
        part_index = np.arange(len(tile)) - np.repeat(parts.cumsum() - parts, parts)
        is_split = parts[tile] > 1
        slot = np.where(is_split, is_split.cumsum() - 1, -1)
        cuts = [of_group[tile, :, ::2] + lengths[tile] * share[:, None, None] // parts[tile, None, None]
                for share in (part_index, part_index + 1)]  # fmt: skip
        cut = np.stack(cuts, -1).reshape(len(tile), 4 * of_group.shape[1])
        order = np.argsort(-(cuts[1] - cuts[0]).sum((1, 2)), kind="stable")
        items.append(np.concatenate([tokens[tile], slot[:, None], cut], 1)[order])
        split = np.nonzero(parts > 1)[0]
        first = parts[split].cumsum() - parts[split]
        merges.append(np.concatenate([tokens[split, :3], first[:, None], parts[split, None]], 1))
    num_slots = max(int(merge[:, 4].sum()) for merge in merges)
    return _stacked(items), _stacked(merges), num_slots


def _stacked(groups: list[Ints]) -> Ints:
    """Stack groups to [groups, rows, numbers], with rows of zeros after those that have fewer."""
    most = max(len(group) for group in groups)
    return np.stack([np.pad(group, ((0, most - len(group)), (0, 0))) for group in groups])
