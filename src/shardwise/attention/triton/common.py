"""Defines what the kernels share: their arguments as tuples, and functions that read tables, rows and extras.

A program computes the tile [TILE] of a table's item and loops over entries [ENTRY]; "at" is (sample, query head), both
int64. Index arguments `queries` and `keys` are two-dimensional and broadcast, so that one function serves tiles of
queries [TILE, 1] with keys [1, ENTRY] as well as tiles of keys [TILE, 1] with queries [1, ENTRY].

Arguments of one name have one type: `lists` is `LutPointers`, `given` is `ModifierArgs`, `numbers` is `KernelScalars`,
`shape` is `KernelShape`, `rows` is a head's (pointer, stride between tokens) from `head_of`, and `pairs` is (queries,
keys, shift), where a query at place m in its tensor sees the key at place n if n <= m + shift.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from shardwise.attention.triton.lut import ITEM_HEAD

HEAD = tl.constexpr(ITEM_HEAD)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class StridedRows(NamedTuple):
    """Describes a tensor [B, heads, N, D] whose last dim is contiguous: its pointer, and its other strides."""

    at: Any
    sample: int
    head: int
    token: int


class KernelInputs(NamedTuple):
    q: StridedRows
    k: StridedRows
    v: StridedRows


class LutPointers(NamedTuple):
    """Holds the tables of one side; `group` is the stride of items between heads, 0 where heads share them."""

    items: Any
    full: Any
    partial: Any
    group: int


class SplitTiles(NamedTuple):
    """Lists the tiles that are split; `group` is the stride between heads, 0 where heads share them."""

    items: Any
    group: int


class ModifierArgs(NamedTuple):
    """Holds the extras, None for those that are not used; strides of the bias are 0 where it is broadcast."""

    padding: Any
    bias: Any
    bias_sample: int
    bias_head: int
    bias_query: int
    bias_key: int
    factors: Any
    offsets: Any
    columns: Any
    threshold: int


class KernelScalars(NamedTuple):
    """Holds sizes, the scale of the scores in base e and in base 2, and the factor of kept probabilities."""

    num_heads: int
    num_kv: int
    num_queries: int
    num_keys: int
    num_slots: int
    scale: float
    scale_log2: float
    kept_scale: float


class KernelShape(NamedTuple):
    """Holds the constants that a kernel is compiled for.

    IS_PLAIN: the scale is not negative. IS_AHEAD: registers suffice to load an entry's place one iteration ahead.
    UPCAST: the kernel runs in the interpreter, whose product of bf16 is wrong.
    """

    D: int
    WIDE_D: int
    TILE: int
    ENTRY: int
    RUN: int
    SUB: int
    GROUP: int
    LISTS: int
    HAS_PADDING: bool
    HAS_BIAS: bool
    HAS_DROPOUT: bool
    IS_SPLIT: bool
    IS_PLAIN: bool
    IS_AHEAD: bool
    UPCAST: bool


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Multiply two matrices; the result [M, N] is fp32, and so are the inputs if shape.UPCAST.

    Args:
        a: [M, K], in the same dtype as b [K, N].
    """
    if shape.UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def zero_rows(shape: tl.constexpr) -> tl.tensor:
    """Return zeros [TILE, WIDE_D] in fp32."""
    tile: tl.constexpr = shape.TILE
    size: tl.constexpr = shape.WIDE_D
    return tl.zeros([tile, size], tl.float32)


@triton.jit
def head_of(rows: tl.tuple, sample: tl.tensor, head: tl.tensor) -> tl.tuple:
    """Return the pointer to the first row of a sample's head, both int64 numbers, and the stride between rows."""
    return rows.at + sample * rows.sample + head * rows.head, rows.token


@triton.jit
def row_pointers(rows: tl.tuple, tokens: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Return pointers [tokens, WIDE_D] to the elements of the numbered rows of a head, which `head_of` gives."""
    begin, stride = rows
    return begin + tokens[:, None].to(tl.int64) * stride + tl.arange(0, shape.WIDE_D)[None, :]


@triton.jit
def row_mask(is_real: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    if shape.WIDE_D == shape.D:
        mask = is_real[:, None]
    else:
        mask = is_real[:, None] & (tl.arange(0, shape.WIDE_D) < shape.D)[None, :]
    return mask


@triton.jit
def load_rows(
    rows: tl.tuple, tokens: tl.tensor, is_real: tl.tensor, masked: tl.constexpr, shape: tl.constexpr
) -> tl.tensor:
    """Load rows of tokens, [tokens, WIDE_D]; elements beyond the head size are 0.

    Args:
        rows: of a head, from `head_of`; their numbers are `tokens` [tokens].
        is_real: [tokens], bool, whether each row exists.
        masked: whether rows that do not exist are 0; without it all exist.
    """
    pointers = row_pointers(rows, tokens, shape)
    if masked:
        values = tl.load(pointers, mask=row_mask(is_real, shape), other=0.0)
    elif shape.WIDE_D == shape.D:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=(tl.arange(0, shape.WIDE_D) < shape.D)[None, :], other=0.0)
    return values


@triton.jit
def store_rows(
    rows: tl.tuple, tokens: tl.tensor, is_real: tl.tensor, values: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """Store values into the rows of tokens that exist.

    Args:
        rows: of a head, from `head_of`; their numbers are `tokens` [tokens].
        is_real: [tokens], bool, whether each row exists.
        values: [tokens, WIDE_D], cast to the dtype of the rows.
    """
    pointers = row_pointers(rows, tokens, shape)
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=row_mask(is_real, shape))


@triton.jit
def item_of(items: tl.tensor, index: tl.tensor, group: tl.tensor) -> tl.tuple:
    """Load an item's origin, begin, end and two further numbers.

    Args:
        index: offset of the item in its head's items.
    """
    item = items + group + index.to(tl.int64)
    return tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)


@triton.jit
def ranges_of(items: tl.tensor, index: tl.tensor, group: tl.tensor, each: tl.tensor) -> tl.tuple:
    """Load the ranges of an item's full and partial entries: begin and end of both.

    Args:
        index: offset of the item in its head's items.
        each: number of the item's list, 0 where it has one.
    """
    item = items + group + index.to(tl.int64) + HEAD + 4 * each
    return tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)


@triton.jit
def entry_at(lists: tl.tuple, number: tl.tensor, is_partial: tl.constexpr, shape: tl.constexpr) -> tl.tuple:
    """Load the begin and end of the sub-blocks of an entry.

    Loops call it one iteration ahead, for which tables have a spare row: if the load of rows waited for another load
    of its own iteration, fewer loads would overlap.

    Args:
        number: of the entry in its table.
        is_partial: whether the table is that of partial entries.
    """
    num_subs: tl.constexpr = shape.ENTRY // shape.SUB
    row = entry_row(lists, number, is_partial, shape) + (0 if num_subs == 1 else tl.arange(0, shape.ENTRY) // shape.SUB)
    begins = tl.load(row)
    ends = tl.load(row + num_subs) if is_partial else begins
    return begins, ends


@triton.jit
def entry_row(lists: tl.tuple, number: tl.tensor, is_partial: tl.constexpr, shape: tl.constexpr) -> tl.tensor:
    """Return the pointer to an entry in its table.

    Args:
        number: of the entry in its table.
        is_partial: whether the table is that of partial entries.
    """
    num_subs: tl.constexpr = shape.ENTRY // shape.SUB
    size: tl.constexpr = 2 * num_subs + shape.TILE // shape.RUN if is_partial else num_subs
    return (lists.partial if is_partial else lists.full) + tl.full([], size, tl.int64) * number


@triton.jit
def entry_tokens(lists: tl.tuple, entry: tl.tuple, is_partial: tl.constexpr, shape: tl.constexpr) -> tl.tuple:
    """Return the tokens [ENTRY] of an entry of lists, and whether each exists; in a full entry all do.

    Args:
        entry: (number, begins, ends), the latter two from `entry_at`.
    """
    number, begins, ends = entry
    if not shape.IS_AHEAD:
        begins, ends = entry_at(lists, number, is_partial, shape)
    place = tl.arange(0, shape.ENTRY)
    tokens = begins + place % shape.SUB
    is_real = tokens < ends if is_partial else place >= 0
    return tokens, is_real


@triton.jit
def pairs_seen(lists: tl.tuple, entry: tl.tuple, pairs: tl.tuple, is_real: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Say which pairs of a partial entry (number, begins, ends) of lists are seen, [TILE, ENTRY].

    Args:
        pairs: queries, keys and the shift between them.
        is_real: [ENTRY], whether each token of the entry exists.
    """
    queries, keys, shift = pairs
    seen = (keys <= queries + shift) & is_real[None, :]
    num_subs: tl.constexpr = shape.ENTRY // shape.SUB
    if num_subs > 1 or shape.TILE > shape.RUN:
        row = entry_row(lists, entry[0], True, shape) + 2 * num_subs
        bits = tl.load(row + tl.arange(0, shape.TILE) // shape.RUN)
        sub = tl.arange(0, shape.ENTRY) // shape.SUB
        seen = seen & (((bits[:, None] >> sub[None, :]) & 1) != 0)
    return seen


@triton.jit
def biased(scores: tl.tensor, pairs: tl.tuple, is_pair: tl.tensor, at: tl.tuple, given: tl.tuple) -> tl.tensor:
    """Add the bias of each pair to scores [TILE, ENTRY] in base 2.

    Args:
        pairs: queries, keys and the shift between them.
        is_pair: [TILE, ENTRY], whether both tokens exist.
    """
    queries, keys, _ = pairs
    sample, head = at
    bias = given.bias + sample * given.bias_sample + head * given.bias_head
    pointers = bias + queries.to(tl.int64) * given.bias_query + keys.to(tl.int64) * given.bias_key
    return scores + tl.load(pointers, mask=is_pair, other=0.0).to(tl.float32) * LOG2_E


@triton.jit
def kept(
    pairs: tl.tuple, is_query: tl.tensor, is_key: tl.tensor, at: tl.tuple, given: tl.tuple, numbers: tl.tuple
) -> tl.tensor:
    """Say which probabilities the dropout keeps (`backends.Draw`), [TILE, ENTRY]; int32 wraps.

    Args:
        pairs: queries, keys and the shift between them.
        is_query: whether each query exists; of the shape of queries.
        is_key: whether each key exists; of the shape of keys.
    """
    queries, keys, _ = pairs
    sample, head = at
    row = (sample * numbers.num_heads + head) * numbers.num_queries + queries
    factors = tl.load(given.factors + row, mask=is_query, other=0)
    offsets = tl.load(given.offsets + row, mask=is_query, other=0)
    x = factors * tl.load(given.columns + keys, mask=is_key, other=0) + offsets
    return x * (2 * x + 1) < given.threshold


@triton.jit
def slot_tokens(
    slot: tl.tensor, at: tl.tuple, num_heads: tl.tensor, num_slots: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """Number the rows of a slot of partial sums through all slots: [TILE], int64.

    Args:
        slot: number of the slot in its head.
    """
    sample, head = at
    first = ((sample * num_heads + head) * num_slots + slot) * shape.TILE
    return first + tl.arange(0, shape.TILE)


@triton.jit
def slot_pointers(sums: tl.tensor, tokens: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Return pointers [TILE, WIDE_D] to rows of partial sums in fp32, of the int64 `slot_tokens` [TILE]."""
    return sums + tokens[:, None] * shape.WIDE_D + tl.arange(0, shape.WIDE_D)[None, :]
