"""Block-sparse attention on the CPU in torch alone: tiles of equal sizes are gathered and computed in batched calls.

Nothing of size N x N exists: the memory of a call besides inputs and results is bounded by a budget of scores. Two
kernels compute tiles: torch's own flash attention for the CPU, and one that stores the scores, for what flash attention
lacks: dropout, gradients of bias and log-sum-exp. Both read our log-sum-exp in the backward, so they mix.

>>> from shardwise.attention.block_layout import BlockLayout
>>> layout = BlockLayout.from_blocks(torch.eye(2), block=16)
>>> q = torch.ones(1, 1, 32, 8)
>>> backend = CpuBackend()
>>> out, lse = backend.forward(q, q, q, ScoreModifiers(scale=1.0), backend.plan(layout, q, q))
>>> out.shape, lse.shape
(torch.Size([1, 1, 32, 8]), torch.Size([1, 1, 32]))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shardwise.attention import reference
from shardwise.attention.backends import AttentionGrads, BackendPlan, SavedForBackward, ScoreModifiers, wide_dtype
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.cpu_plan import ALL_HEADS, CpuPlan, make_plan, unfold
from shardwise.attention.cpu_tiles import (
    HeadCounts,
    ScoreSource,
    TileBatch,
    add_keys,
    calls_of,
    into_blocks,
    keys_of,
    out_of_blocks,
    put_row_numbers,
    put_rows,
    queries_of,
)
from shardwise.attention.reference import Scores, TileGrads
from shardwise.runtime.torch_private import cpu_flash_attention, cpu_flash_attention_backward, has_cpu_flash_attention

FLASH_SCORES: Final = 1 << 21  # of a call: its keys and values stay in a shared cache
WRITTEN_OUT_SCORES: Final = 1 << 18  # of a call: they stay in the cache of a core


@dataclass(frozen=True)
class CpuBackend:
    """Implements `Backend` on the CPU.

    Attributes:
        flash_scores: most scores of a call of flash attention; a call has at least one tile.
        written_out_scores: most scores of a call of the other kernel; a call has at least one tile.
        may_flash: use flash attention where this torch has it.
    """

    flash_scores: int = FLASH_SCORES
    written_out_scores: int = WRITTEN_OUT_SCORES
    may_flash: bool = True

    def plan(self, layout: BlockLayout, q: Tensor, k: Tensor) -> BackendPlan:
        """Plan the tiles of a layout; the same for all dtypes and head sizes. q, k as in `Backend.plan`."""
        group = q.shape[1] // k.shape[1]
        return layout.cached(("cpu", group), lambda whole: make_plan(whole, group))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: ScoreModifiers, plan: BackendPlan
    ) -> tuple[Tensor, Tensor]:
        """Compute the output [B, H, Nq, D], in memory [B, Nq, H, D], and the log-sum-exp [B, H, Nq]."""
        sources = _sources(q, k, v, extras, plan)
        is_flash = self.may_flash and extras.draw is None and has_cpu_flash_attention()
        mask_dtype = q.dtype if is_flash else wide_dtype(q.dtype)
        num_blocks, block = sources.q.shape[2:4]
        out = q.new_zeros(len(q), num_blocks, block, q.shape[1], q.shape[3])
        lse = q.new_full((*q.shape[:2], num_blocks, block), -torch.inf, dtype=wide_dtype(q.dtype))
        for call in calls_of(sources.plan, len(q), sources.heads, self._num_scores(is_flash), mask_dtype):
            qkv = sources.of_call(call)
            scores = sources.scores.scores(call, mask_dtype)
            results = _flash_forward(*qkv, scores) if is_flash else reference.forward(*qkv, scores)
            put_rows(out, call, results[0].to(q.dtype))
            put_row_numbers(lse, call, results[1])
        lse = out_of_blocks(lse.flatten(0, 1), sources.plan.queries).unflatten(0, q.shape[:2])
        return out_of_blocks(out, sources.plan.queries).transpose(1, 2), lse

    def backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        saved: SavedForBackward,
        extras: ScoreModifiers,
        plan: BackendPlan,
        needs_bias: bool,
        is_wide: bool = False,
    ) -> AttentionGrads:
        """Compute the gradients; dq, dk and dv are in memory [B, N, H, D] where all heads share the layout."""
        dtype = wide_dtype(saved.q.dtype) if is_wide else saved.q.dtype
        sources = _sources(saved.q, saved.k, saved.v, extras, plan)
        is_flash = not (needs_bias or grad_lse is not None or extras.draw is not None)
        is_flash = is_flash and self.may_flash and has_cpu_flash_attention()
        rows = _RowSource.of(grad_out, grad_lse, saved, sources.plan)
        grads = _new_grads(sources, dtype)
        grad_bias = torch.zeros_like(extras.bias) if needs_bias and extras.bias is not None else None
        mask_dtype = dtype if is_flash else wide_dtype(dtype)
        for call in calls_of(sources.plan, len(saved.q), sources.heads, self._num_scores(is_flash), mask_dtype):
            qkv = sources.of_call(call)
            scores = sources.scores.scores(call, mask_dtype)
            tiles = (
                _flash_backward(rows, call, qkv, scores, dtype) if is_flash else _written_out(rows, call, qkv, scores)
            )
            put_rows(grads[0], call, tiles.q.to(dtype))
            add_keys(grads[1], call, tiles.k)
            add_keys(grads[2], call, tiles.v)
            if grad_bias is not None and tiles.scores is not None:
                sources.scores.add_bias_grad(grad_bias, call, tiles.scores)
        queries, keys = sources.plan.queries, sources.plan.keys
        dq, dk, dv = (
            out_of_blocks(grad, slots).transpose(1, 2).to(dtype)
            for grad, slots in zip(grads, (queries, keys, keys), strict=True)
        )
        return AttentionGrads(dq, dk, dv, grad_bias)

    def _num_scores(self, is_flash: bool) -> int:
        return self.flash_scores if is_flash else self.written_out_scores


@dataclass(frozen=True, eq=False)
class _Sources:
    """Holds the inputs in blocks: [B, H or K, num_blocks, block, D]."""

    plan: CpuPlan
    heads: HeadCounts
    q: Tensor
    k: Tensor
    v: Tensor
    scores: ScoreSource

    def of_call(self, call: TileBatch) -> tuple[Tensor, Tensor, Tensor]:
        return queries_of(self.q, call), keys_of(self.k, call), keys_of(self.v, call)


def _sources(q: Tensor, k: Tensor, v: Tensor, extras: ScoreModifiers, plan: BackendPlan) -> _Sources:
    unfolded = unfold(plan)
    queries, keys, block = unfolded.queries, unfolded.keys, unfolded.block
    return _Sources(
        unfolded,
        HeadCounts(q.shape[1], k.shape[1]),
        into_blocks(q, queries, block),
        into_blocks(k, keys, block),
        into_blocks(v, keys, block),
        ScoreSource.of(unfolded, extras, len(q)),
    )


@dataclass(frozen=True, eq=False)
class _RowSource:
    """Holds rows for a backward, in blocks: [B, H, num_blocks, block, D], and without D for the lse ones."""

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None

    @staticmethod
    def of(grad_out: Tensor, grad_lse: Tensor | None, saved: SavedForBackward, plan: CpuPlan) -> _RowSource:
        """Copy them into blocks; rows without keys, and gaps, get an infinite log-sum-exp, so probabilities are 0."""
        slots = plan.queries
        lse = into_blocks(saved.lse.masked_fill(saved.lse == -torch.inf, torch.inf), slots, plan.block)
        if slots.token_of.numel():
            lse.masked_fill_((slots.token_of < 0).view(-1, plan.block), torch.inf)
        return _RowSource(
            into_blocks(grad_out, slots, plan.block),
            into_blocks(saved.out, slots, plan.block),
            lse,
            None if grad_lse is None else into_blocks(grad_lse, slots, plan.block),
        )


def _new_grads(sources: _Sources, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Make zeros [B, num_blocks, block, H or K, D]; those of keys and values in the wide dtype, since they are sums."""

    def zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
        num_samples, heads, num_blocks, block, size = like.shape
        if all(bucket.head == ALL_HEADS for bucket in sources.plan.buckets):
            return like.new_zeros(num_samples, num_blocks, block, heads, size, dtype=dtype)
        return like.new_zeros(like.shape, dtype=dtype).permute(0, 2, 3, 1, 4)  # a call has one head: its rows are close

    wide = wide_dtype(dtype)
    return zeros(sources.q, dtype), zeros(sources.k, wide), zeros(sources.v, wide)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    mask = _by_tile(scores.mask)
    out, lse = cpu_flash_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask, scores.scale)
    if mask is not None:
        sees_none = mask.amax(-1) == -torch.inf  # [T, 1 or L, R]
        out, lse = out.masked_fill(sees_none[..., None], 0.0), lse.masked_fill(sees_none, -torch.inf)
    return out.transpose(0, 1), lse.transpose(0, 1)


def _flash_backward(
    rows: _RowSource, call: TileBatch, qkv: tuple[Tensor, Tensor, Tensor], scores: Scores, dtype: torch.dtype
) -> TileGrads:
    lse = queries_of(rows.lse, call).transpose(0, 1)
    of_rows = (queries_of(blocks, call) for blocks in (rows.grad_out, rows.out))
    # The kernel returns gradients in the dtype of its inputs.
    grad_out, out, q, k, v = (tensor.transpose(0, 1).to(dtype) for tensor in (*of_rows, *qkv))  # [T, L, ...] each
    grads = cpu_flash_attention_backward(grad_out, q, k, v, out, lse, _by_tile(scores.mask), scores.scale)
    return TileGrads(*(grad.transpose(0, 1) for grad in grads))


def _by_tile(mask: Tensor | None) -> Tensor | None:
    """Transpose a mask [1 or L, T, R, C] to what flash attention takes, [T, 1 or L, R, C]."""
    return None if mask is None else mask.transpose(0, 1)


def _written_out(rows: _RowSource, call: TileBatch, qkv: tuple[Tensor, Tensor, Tensor], scores: Scores) -> TileGrads:
    grad_out, out, lse = (queries_of(blocks, call) for blocks in (rows.grad_out, rows.out, rows.lse))
    delta = (grad_out.to(lse.dtype) * out).sum(-1)  # [L, T, R]
    if rows.grad_lse is not None:
        delta -= queries_of(rows.grad_lse, call)
    return reference.backward(grad_out, delta, qkv, lse, scores)
