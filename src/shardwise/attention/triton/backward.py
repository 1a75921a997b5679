"""Defines the backward kernels: dQ over tiles of queries, dK and dV over tiles of keys (FlashAttention-2, algorithm 2).

Each recomputes the probabilities from the log-sum-exp, so that no program adds to what another writes: there are no
atomic operations.
Rows that see no key have a log-sum-exp of +inf here, which makes their probabilities 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from shardwise.attention.triton.common import (
    HEAD,
    LOG2_E,
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


class OutputGrad(NamedTuple):
    """Holds the output's gradient, and for each row [B, H, Nq] the log-sum-exp in base 2 and delta (see `prepare`)."""

    grad: StridedRows
    lse: Any
    delta: Any


class RowInputs(NamedTuple):
    """Holds the inputs of `prepare`: the output, its log-sum-exp, and the gradient of that, contiguous or None."""

    out: StridedRows
    lse: Any
    grad_lse: Any


class GradOfQueries(NamedTuple):
    """Holds q's gradient, partial sums of split tiles, the bias's gradient and its strides, first sample and head."""

    grad: StridedRows
    sums: Any
    bias: Any
    bias_sample: int
    bias_head: int
    bias_query: int
    bias_key: int
    sample: int
    head: int


class GradOfKeys(NamedTuple):
    """Holds the gradients of k and v, and partial sums of each."""

    k: StridedRows
    v: StridedRows
    k_sums: Any
    v_sums: Any


@triton.jit
def prepare(
    prepared: tl.tuple, incoming: tl.tuple, numbers: tl.tuple, has_grad_lse: tl.constexpr, shape: tl.constexpr
) -> None:
    """Write delta = rowsum(out * grad_out) - grad_lse and the log-sum-exp in base 2.

    Args:
        incoming: `OutputGrad`, whose lse and delta are written.
        has_grad_lse: whether the log-sum-exp has a gradient.
    """
    head, sample = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    queries = tl.program_id(0) * shape.TILE + tl.arange(0, shape.TILE)
    is_query = queries < numbers.num_queries
    out = load_rows(head_of(prepared.out, sample, head), queries, is_query, True, shape)
    grad = load_rows(head_of(incoming.grad, sample, head), queries, is_query, True, shape)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    row = (sample * numbers.num_heads + head) * numbers.num_queries + queries
    lse = tl.load(prepared.lse + row, mask=is_query, other=float("-inf"))
    if has_grad_lse:
        delta -= tl.load(prepared.grad_lse + row, mask=is_query, other=0.0)
    sees_any = lse != float("-inf")
    tl.store(incoming.delta + row, tl.where(sees_any, delta, 0.0), mask=is_query)
    tl.store(incoming.lse + row, tl.where(sees_any, lse * LOG2_E, float("inf")), mask=is_query)


@triton.jit
def backward_queries(
    inputs: tl.tuple,
    incoming: tl.tuple,
    out: tl.tuple,
    lists: tl.tuple,
    given: tl.tuple,
    numbers: tl.tuple,
    bias_mode: tl.constexpr,
    shape: tl.constexpr,
) -> None:
    """Compute dQ and, if needed, the gradient of the bias.

    Args:
        out: the `GradOfQueries` to write, by the `LutPointers` of queries in `lists`.
        bias_mode: 0 for no gradient of the bias, 1 to write it, 2 to add it to the values there.
    """
    head, sample = tl.program_id(1).to(tl.int64) + out.head, tl.program_id(2).to(tl.int64) + out.sample
    index = tl.program_id(0) * (HEAD + 4 * shape.LISTS)
    origin, begin, end, shift, slot = item_of(lists.items, index, head * lists.group)
    if begin >= end:
        return
    full, full_end, partial, partial_end = ranges_of(lists.items, index, head * lists.group, 0)
    queries = origin + tl.arange(0, shape.TILE)
    is_query = (queries >= begin) & (queries < end)
    q = load_rows(head_of(inputs.q, sample, head), queries, is_query, True, shape)
    grad = load_rows(head_of(incoming.grad, sample, head), queries, is_query, True, shape)
    row = (sample * numbers.num_heads + head) * numbers.num_queries + queries
    lse = tl.load(incoming.lse + row, mask=is_query, other=float("inf"))
    delta = tl.load(incoming.delta + row, mask=is_query, other=0.0)
    keys_of = (head_of(inputs.k, sample, head // shape.GROUP), head_of(inputs.v, sample, head // shape.GROUP))
    tile = (q, grad, lse, delta, queries, is_query, shift)
    at, tables = (sample, head), (lists, given, numbers, out)
    sums = zero_rows(shape)
    begins, ends = entry_at(lists, full, False, shape)
    for number in range(full, full_end):
        entry = (number, begins, ends)
        begins, ends = entry_at(lists, number + 1, False, shape)
        sums += _grad_of_queries(entry, tile, keys_of, at, tables, bias_mode, False, shape)
    begins, ends = entry_at(lists, partial, True, shape)
    for number in range(partial, partial_end):
        entry = (number, begins, ends)
        begins, ends = entry_at(lists, number + 1, True, shape)
        sums += _grad_of_queries(entry, tile, keys_of, at, tables, bias_mode, True, shape)
    sums *= numbers.scale
    if shape.IS_SPLIT:  # noqa: SIM102  (`and` would compile both)
        if slot >= 0:
            tokens = slot_tokens(slot, at, numbers.num_heads, numbers.num_slots, shape)
            tl.store(slot_pointers(out.sums, tokens, shape), sums)
            return
    store_rows(head_of(out.grad, sample, head), queries, is_query, sums, shape)


@triton.jit
def _grad_of_queries(
    entry: tl.tuple,
    tile: tl.tuple,
    keys_of: tl.tuple,
    at: tl.tuple,
    tables: tl.tuple,
    bias_mode: tl.constexpr,
    is_partial: tl.constexpr,
    shape: tl.constexpr,
) -> tl.tensor:
    """Return what one entry adds to dQ, before the scale."""
    q, grad, lse, delta, queries, is_query, shift = tile
    lists, given, numbers, out = tables
    keys, is_key = entry_tokens(lists, entry, is_partial, shape)
    pairs, is_pair = (queries[:, None], keys[None, :], shift), is_query[:, None] & is_key[None, :]
    k = load_rows(keys_of[0], keys, is_key, is_partial, shape)
    scores = dot(q, tl.trans(k), shape) * numbers.scale_log2
    if shape.HAS_BIAS:
        scores = biased(scores, pairs, is_pair, at, given)
    if is_partial:
        scores = tl.where(pairs_seen(lists, entry, pairs, is_key, shape), scores, float("-inf"))
    if shape.HAS_PADDING:
        is_token = tl.load(given.padding + at[0] * numbers.num_keys + keys, mask=is_key, other=0) != 0
        scores = tl.where(is_token[None, :], scores, float("-inf"))
    p = tl.exp2(scores - lse[:, None])
    v = load_rows(keys_of[1], keys, is_key, is_partial, shape)
    grad_p = dot(grad, tl.trans(v), shape)
    if shape.HAS_DROPOUT:
        is_kept = kept(pairs, is_query[:, None], is_key[None, :], at, given, numbers)
        grad_p = tl.where(is_kept, grad_p * numbers.kept_scale, 0.0)
    grad_scores = p * (grad_p - delta[:, None])
    if bias_mode > 0:
        bias = out.bias + at[0] * out.bias_sample + at[1] * out.bias_head
        pointers = bias + pairs[0].to(tl.int64) * out.bias_query + pairs[1].to(tl.int64) * out.bias_key
        written = grad_scores
        if bias_mode > 1:
            written += tl.load(pointers, mask=is_pair, other=0.0)
        tl.store(pointers, written.to(pointers.dtype.element_ty), mask=is_pair)
    return dot(grad_scores.to(k.dtype), k, shape)


@triton.jit
def backward_keys(
    inputs: tl.tuple,
    incoming: tl.tuple,
    out: tl.tuple,
    lists: tl.tuple,
    given: tl.tuple,
    numbers: tl.tuple,
    shape: tl.constexpr,
) -> None:
    """Compute dK and dV of one key and value head, over all the query heads that share it.

    Args:
        out: the `GradOfKeys` to write, by the `LutPointers` of keys in `lists`.
    """
    kv, sample = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    index = tl.program_id(0) * (HEAD + 4 * shape.LISTS)
    origin, begin, end, shift, slot = item_of(lists.items, index, kv * lists.group)
    if begin >= end:
        return
    keys = origin + tl.arange(0, shape.TILE)
    is_key = (keys >= begin) & (keys < end)
    k = load_rows(head_of(inputs.k, sample, kv), keys, is_key, True, shape)
    v = load_rows(head_of(inputs.v, sample, kv), keys, is_key, True, shape)
    tile, tables = (k, v, keys, is_key, shift), (lists, given, numbers)
    k_sums = zero_rows(shape)
    v_sums = zero_rows(shape)
    for each in range(shape.GROUP):
        head = kv * shape.GROUP + each
        queries_of = (head_of(inputs.q, sample, head), head_of(incoming.grad, sample, head), incoming)
        which = each if shape.LISTS > 1 else 0
        full, full_end, partial, partial_end = ranges_of(lists.items, index, kv * lists.group, which)
        begins, ends = entry_at(lists, full, False, shape)
        for number in range(full, full_end):
            entry = (number, begins, ends)
            begins, ends = entry_at(lists, number + 1, False, shape)
            k_sums, v_sums = _grad_of_keys(
                (k_sums, v_sums), entry, tile, queries_of, (sample, head), tables, False, shape
            )
        begins, ends = entry_at(lists, partial, True, shape)
        for number in range(partial, partial_end):
            entry = (number, begins, ends)
            begins, ends = entry_at(lists, number + 1, True, shape)
            k_sums, v_sums = _grad_of_keys(
                (k_sums, v_sums), entry, tile, queries_of, (sample, head), tables, True, shape
            )
    k_sums, v_sums = k_sums * numbers.scale, v_sums * numbers.kept_scale
    if shape.HAS_PADDING:  # padded keys were computed like others; each row here belongs to one key
        is_token = tl.load(given.padding + sample * numbers.num_keys + keys, mask=is_key, other=0) != 0
        k_sums, v_sums = tl.where(is_token[:, None], k_sums, 0.0), tl.where(is_token[:, None], v_sums, 0.0)
    if shape.IS_SPLIT:  # noqa: SIM102  (`and` would compile both)
        if slot >= 0:
            tokens = slot_tokens(slot, (sample, kv), numbers.num_kv, numbers.num_slots, shape)
            tl.store(slot_pointers(out.k_sums, tokens, shape), k_sums)
            tl.store(slot_pointers(out.v_sums, tokens, shape), v_sums)
            return
    store_rows(head_of(out.k, sample, kv), keys, is_key, k_sums, shape)
    store_rows(head_of(out.v, sample, kv), keys, is_key, v_sums, shape)


@triton.jit
def _grad_of_keys(
    state: tl.tuple,
    entry: tl.tuple,
    tile: tl.tuple,
    queries_of: tl.tuple,
    at: tl.tuple,
    tables: tl.tuple,
    is_partial: tl.constexpr,
    shape: tl.constexpr,
) -> tl.tuple:
    """Add one entry of one query head to dK, before the scale, and to dV, before the scale of kept probabilities."""
    k_sums, v_sums = state
    k, v, keys, is_key, shift = tile
    q_rows, grad_rows, incoming = queries_of
    lists, given, numbers = tables
    queries, is_query = entry_tokens(lists, entry, is_partial, shape)
    pairs = (queries[None, :], keys[:, None], shift)
    q = load_rows(q_rows, queries, is_query, is_partial, shape)
    row = (at[0] * numbers.num_heads + at[1]) * numbers.num_queries + queries
    lse = tl.load(incoming.lse + row, mask=is_query, other=float("inf"))
    scores = dot(k, tl.trans(q), shape) * numbers.scale_log2  # [TILE, ENTRY]: transposed
    if shape.HAS_BIAS:
        scores = biased(scores, pairs, is_query[None, :] & is_key[:, None], at, given)
    if is_partial:
        scores = tl.where(pairs_seen(lists, entry, pairs, is_query, shape), scores, float("-inf"))
    p = tl.exp2(scores - lse[None, :])
    grad = load_rows(grad_rows, queries, is_query, is_partial, shape)
    grad_p = dot(v, tl.trans(grad), shape)
    if shape.HAS_DROPOUT:
        is_kept = kept(pairs, is_query[None, :], is_key[:, None], at, given, numbers)
        grad_p = tl.where(is_kept, grad_p * numbers.kept_scale, 0.0)
        v_sums += dot(tl.where(is_kept, p, 0.0).to(grad.dtype), grad, shape)
    else:
        v_sums += dot(p.to(grad.dtype), grad, shape)
    delta = tl.load(incoming.delta + row, mask=is_query, other=0.0)
    grad_scores = p * (grad_p - delta[None, :])
    return k_sums + dot(grad_scores.to(q.dtype), q, shape), v_sums


@triton.jit
def merge_sums(sums: tl.tensor, out: tl.tuple, merges: tl.tuple, numbers: tl.tuple, shape: tl.constexpr) -> None:
    """Add the parts of split tiles, first to last, into `out`, `StridedRows`; the grid's second axis counts its heads.

    Args:
        sums: partial sums, fp32 [B, heads, slots, TILE, WIDE_D].
    """
    head, sample = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    origin, begin, end, slot, num = item_of(merges.items, tl.program_id(0) * 5, head * merges.group)
    if begin >= end:
        return
    tile = origin + tl.arange(0, shape.TILE)
    values = zero_rows(shape)
    for part in range(slot, slot + num):
        tokens = slot_tokens(part, (sample, head), tl.num_programs(1), numbers.num_slots, shape)
        values += tl.load(slot_pointers(sums, tokens, shape))
    store_rows(head_of(out, sample, head), tile, (tile >= begin) & (tile < end), values, shape)
