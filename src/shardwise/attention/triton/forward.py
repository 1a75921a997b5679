"""Defines the forward kernel: online softmax over a tile's entries in base 2 (FlashAttention-2, Dao 2023, algorithm 1).

Full entries come first, without any mask, then partial ones. A long tile is split over several programs, whose sums
`merge_softmax` joins in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from shardwise.attention.triton.common import (
    HEAD,
    LN_2,
    StridedRows,
    biased,
    dot,
    entry_at,
    entry_tokens,
    head_of,
    item_of,
    kept,
    load_rows,
    pairs_seen,
    ranges_of,
    slot_pointers,
    slot_tokens,
    store_rows,
    zero_rows,
)


class ForwardOutputs(NamedTuple):
    """Holds the output, log-sum-exp [B, H, Nq]; for split tiles the sums, and each row's maximum and total."""

    out: StridedRows
    lse: Any
    sums: Any
    most: Any
    total: Any


@triton.jit
def forward(
    inputs: tl.tuple, attended: tl.tuple, lists: tl.tuple, given: tl.tuple, numbers: tl.tuple, shape: tl.constexpr
) -> None:
    """Compute the output and log-sum-exp of a tile of queries, or the partial sums of a split one.

    Args:
        attended: the `ForwardOutputs` to write, by the `LutPointers` of queries in `lists`.
    """
    head, sample = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    index = tl.program_id(0) * (HEAD + 4 * shape.LISTS)
    origin, begin, end, shift, slot = item_of(lists.items, index, head * lists.group)
    if begin >= end:
        return
    full, full_end, partial, partial_end = ranges_of(lists.items, index, head * lists.group, 0)
    queries = origin + tl.arange(0, shape.TILE)
    is_query = (queries >= begin) & (queries < end)
    q = load_rows(head_of(inputs.q, sample, head), queries, is_query, True, shape)
    keys_of = (head_of(inputs.k, sample, head // shape.GROUP), head_of(inputs.v, sample, head // shape.GROUP))
    tile, at, tables = (q, queries, is_query, shift), (sample, head), (lists, given, numbers)
    sums, most, total = _start(shape)
    begins, ends = entry_at(lists, full, False, shape)
    for number in range(full, full_end):
        entry = (number, begins, ends)
        begins, ends = entry_at(lists, number + 1, False, shape)
        sums, most, total = _visit((sums, most, total), entry, tile, keys_of, at, tables, False, shape)
    begins, ends = entry_at(lists, partial, True, shape)
    for number in range(partial, partial_end):
        entry = (number, begins, ends)
        begins, ends = entry_at(lists, number + 1, True, shape)
        sums, most, total = _visit((sums, most, total), entry, tile, keys_of, at, tables, True, shape)
    if shape.IS_SPLIT:  # noqa: SIM102  (`and` would compile both)
        if slot >= 0:
            tokens = slot_tokens(slot, at, numbers.num_heads, numbers.num_slots, shape)
            tl.store(slot_pointers(attended.sums, tokens, shape), sums)
            tl.store(attended.most + tokens, most)
            tl.store(attended.total + tokens, total)
            return
    _finish((sums, most, total), (queries, is_query), at, attended, numbers, shape)


@triton.jit
def _start(shape: tl.constexpr) -> tl.tuple:
    """Return the state of rows before any key: the weighted sum of values, the largest score, the sum of weights."""
    tile: tl.constexpr = shape.TILE
    return zero_rows(shape), tl.full([tile], float("-inf"), tl.float32), tl.zeros([tile], tl.float32)


@triton.jit
def _visit(
    state: tl.tuple,
    entry: tl.tuple,
    tile: tl.tuple,
    keys_of: tl.tuple,
    at: tl.tuple,
    tables: tl.tuple,
    is_partial: tl.constexpr,
    shape: tl.constexpr,
) -> tl.tuple:
    """Add one entry to the online softmax."""
    sums, most, total = state
    q, queries, is_query, shift = tile
    lists, given, numbers = tables
    keys, is_key = entry_tokens(lists, entry, is_partial, shape)
    pairs = (queries[:, None], keys[None, :], shift)
    k = load_rows(keys_of[0], keys, is_key, is_partial, shape)
    scores = dot(q, tl.trans(k), shape)
    if is_partial or shape.HAS_PADDING or shape.HAS_BIAS or not shape.IS_PLAIN:
        scores = scores * numbers.scale_log2
        if shape.HAS_BIAS:
            scores = biased(scores, pairs, is_query[:, None] & is_key[None, :], at, given)
        if is_partial:
            scores = tl.where(pairs_seen(lists, entry, pairs, is_key, shape), scores, float("-inf"))
        if shape.HAS_PADDING:
            is_token = tl.load(given.padding + at[0] * numbers.num_keys + keys, mask=is_key, other=0) != 0
            scores = tl.where(is_token[None, :], scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        p = tl.exp2(scores - base[:, None])
    else:
        new_most = tl.maximum(most, tl.max(scores, 1) * numbers.scale_log2)
        base = new_most
        p = tl.exp2(scores * numbers.scale_log2 - base[:, None])
    decay = tl.exp2(most - base)
    total = total * decay + tl.sum(p, 1)
    if shape.HAS_DROPOUT:
        p = tl.where(kept(pairs, is_query[:, None], is_key[None, :], at, given, numbers), p, 0.0)
    v = load_rows(keys_of[1], keys, is_key, is_partial, shape)
    return sums * decay[:, None] + dot(p.to(v.dtype), v, shape), new_most, total


@triton.jit
def _finish(
    state: tl.tuple, tile: tl.tuple, at: tl.tuple, attended: tl.tuple, numbers: tl.tuple, shape: tl.constexpr
) -> None:
    """Write a tile's output and log-sum-exp; 0 and -inf in rows that saw no key."""
    sums, most, total = state
    queries, is_query = tile
    sample, head = at
    sees_any = total > 0
    factor = tl.where(sees_any, numbers.kept_scale / tl.where(sees_any, total, 1.0), 0.0)
    store_rows(head_of(attended.out, sample, head), queries, is_query, sums * factor[:, None], shape)
    lse = tl.where(sees_any, (most + tl.log2(tl.where(sees_any, total, 1.0))) * LN_2, float("-inf"))
    row = (sample * numbers.num_heads + head) * numbers.num_queries + queries
    tl.store(attended.lse + row, lse, mask=is_query)


@triton.jit
def merge_softmax(attended: tl.tuple, merges: tl.tuple, numbers: tl.tuple, shape: tl.constexpr) -> None:
    """Join the parts of split tiles, first to last.

    Args:
        attended: `ForwardOutputs`; its partial sums are read, its output and log-sum-exp written.
    """
    head, sample = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    origin, begin, end, slot, num = item_of(merges.items, tl.program_id(0) * 5, head * merges.group)
    if begin >= end:
        return
    queries = origin + tl.arange(0, shape.TILE)
    sums, most, total = _start(shape)
    for part in range(slot, slot + num):
        tokens = slot_tokens(part, (sample, head), numbers.num_heads, numbers.num_slots, shape)
        part_most = tl.load(attended.most + tokens)
        new_most = tl.maximum(most, part_most)
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        decay, part_decay = tl.exp2(most - base), tl.exp2(part_most - base)
        sums = sums * decay[:, None] + tl.load(slot_pointers(attended.sums, tokens, shape)) * part_decay[:, None]
        total = total * decay + tl.load(attended.total + tokens) * part_decay
        most = new_most
    tile = (queries, (queries >= begin) & (queries < end))
    _finish((sums, most, total), tile, (sample, head), attended, numbers, shape)
