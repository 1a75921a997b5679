"""Tiles on the CPU: gather the inputs of a kernel's call from tensors in blocks, and put its results back.

Shapes: L KV heads of a call, T tiles, R rows (block rows of the tile x tokens of a block, for each of the G
query heads of a KV head), C keys, D head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.attention.backends import Draw, ScoreModifiers, wide_dtype
from shardwise.attention.cpu_plan import ALL_HEADS, BlockTable, CpuPlan
from shardwise.attention.reference import Scores


@dataclass(frozen=True)
class HeadCounts:
    """Counts query heads and KV heads; `group` query heads read one KV head."""

    num: int
    num_kv: int

    @property
    def group(self) -> int:
        return self.num // self.num_kv


@dataclass(frozen=True, eq=False)
class TileBatch:
    """Holds the tiles that one call of a kernel computes.

    Attributes:
        group: query heads of each KV head.
        rows: [T, block rows], blocks of queries.
        columns: [T, key blocks], blocks of keys.
        mask: [T, R of one head, C], 0 or -inf; None where all is seen.
    """

    sample: int
    first_kv: int
    num_kv: int
    first_head: int
    group: int
    rows: Tensor
    columns: Tensor
    mask: Tensor | None

    @property
    def heads(self) -> slice:
        return slice(self.first_head, self.first_head + self.num_kv * self.group)

    @property
    def kv_heads(self) -> slice:
        return slice(self.first_kv, self.first_kv + self.num_kv)


def calls_of(
    plan: CpuPlan, num_samples: int, heads: HeadCounts, num_scores: int, dtype: torch.dtype
) -> Iterator[TileBatch]:
    """Yield calls that cover each tile of each head and sample once, always in the same order.

    Args:
        num_scores: most scores of a call; a call has at least one tile.
    """
    for bucket in plan.buckets:
        group, most_kv = (heads.group, heads.num_kv) if bucket.head == ALL_HEADS else (1, 1)
        of_a_tile = bucket.rows.shape[1] * bucket.columns.shape[1] * plan.block**2 * group
        num_kv = min(most_kv, max(1, num_scores // of_a_tile))
        num_tiles = max(1, num_scores // (of_a_tile * num_kv))
        for start in range(0, len(bucket.rows), num_tiles):
            batch = slice(start, start + num_tiles)
            rows, columns = bucket.rows[batch], bucket.columns[batch]
            mask = None if bucket.seen is None else _mask(plan, rows, columns, bucket.seen[batch], dtype)
            for sample in range(num_samples):
                for first in range(0, most_kv, num_kv):
                    num = min(num_kv, most_kv - first)
                    if bucket.head == ALL_HEADS:
                        yield TileBatch(sample, first, num, first * group, group, rows, columns, mask)
                    else:
                        yield TileBatch(sample, bucket.head // heads.group, 1, bucket.head, 1, rows, columns, mask)


def into_blocks(tensor: Tensor, slots: BlockTable, block: int) -> Tensor:
    """Copy tokens into blocks: contiguous [B, H, num_blocks, block, ...]; gaps hold any values.

    Args:
        tensor: [B, H, N, ...], any dtype.
    """
    if slots.token_of.numel():
        tensor = tensor.index_select(2, slots.token_of.clamp(min=0))
    return tensor.contiguous().unflatten(2, (slots.num_blocks, block))


def out_of_blocks(blocks: Tensor, slots: BlockTable) -> Tensor:
    """Return the tokens [B, N, ...] of blocks [B, num_blocks, block, ...]."""
    tokens = blocks.flatten(1, 2)
    return tokens.index_select(1, slots.slot_of) if slots.token_of.numel() else tokens


def queries_of(blocks: Tensor, call: TileBatch) -> Tensor:
    """Gather the rows of a call, [L, T, R, ...], from blocks [B, H, num_blocks, block, ...]."""
    num_tiles, height = call.rows.shape
    taken = blocks[call.sample, call.heads].index_select(1, call.rows.reshape(-1))  # [heads, T x height, block, ...]
    by_tile = taken.view(call.num_kv, call.group, num_tiles, height * blocks.shape[3], *blocks.shape[4:])
    return by_tile.transpose(1, 2).flatten(2, 3)


def keys_of(blocks: Tensor, call: TileBatch) -> Tensor:
    """Gather the keys of a call, [L, T, C, ...], from blocks [B, K, num_blocks, block, ...]."""
    taken = blocks[call.sample, call.kv_heads].index_select(1, call.columns.reshape(-1))
    return taken.view(call.num_kv, len(call.columns), -1, *blocks.shape[4:])


def put_rows(blocks: Tensor, call: TileBatch, values: Tensor) -> None:
    """Write values of a call's rows to their places.

    Args:
        blocks: [B, num_blocks, block, H, D], written.
        values: [L, T, R, D], in the dtype of blocks.
    """
    height = call.rows.shape[1]
    split = values.unflatten(2, (call.group, height, -1)).permute(1, 3, 4, 0, 2, 5)  # [T, height, block, L, G, D]
    flat = split.reshape(call.rows.numel(), blocks.shape[2], -1, blocks.shape[4])
    blocks[call.sample, :, :, call.heads].index_copy_(0, call.rows.reshape(-1), flat)


def put_row_numbers(blocks: Tensor, call: TileBatch, values: Tensor) -> None:
    """Write one number for each of a call's rows to its place in `blocks` [B, H, num_blocks, block].

    Args:
        values: [L, T, R], in the dtype of blocks.
    """
    height = call.rows.shape[1]
    split = values.unflatten(2, (call.group, height, -1)).transpose(1, 2)  # [L, G, T, height, block]
    flat = split.reshape(-1, call.rows.numel(), blocks.shape[3])
    blocks[call.sample, call.heads].index_copy_(1, call.rows.reshape(-1), flat)


def add_keys(blocks: Tensor, call: TileBatch, values: Tensor) -> None:
    """Add gradients of a call's keys to their places, one after another.

    Args:
        blocks: [B, num_blocks, block, K, D], added to.
        values: [L, T, C, D], cast to the dtype of blocks.
    """
    flat = values.permute(1, 2, 0, 3).to(blocks.dtype)  # [T, C, L, D]
    flat = flat.reshape(call.columns.numel(), blocks.shape[2], call.num_kv, blocks.shape[4])
    blocks[call.sample, :, :, call.kv_heads].index_add_(0, call.columns.reshape(-1), flat)


def tokens_of(slots: BlockTable, blocks: Tensor, block: int) -> Tensor:
    """Return the tokens [T, blocks of a tile x block] in the slots of blocks; 0 in gaps.

    Args:
        blocks: [T, blocks of a tile], int64.
    """
    in_slots = (blocks[..., None] * block + torch.arange(block)).flatten(1)
    return slots.token_of.clamp(min=0)[in_slots] if slots.token_of.numel() else in_slots


def _mask(plan: CpuPlan, rows: Tensor, columns: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Make the mask that a layout adds to scores: 0 or -inf, [T, R of one head, C]."""
    block = plan.block
    by_block = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf).mT  # [T, block rows, key blocks]
    mask = torch.empty(len(rows), rows.shape[1], block, columns.shape[1], block, dtype=dtype)
    mask = mask.copy_(by_block[:, :, None, :, None]).flatten(3).flatten(1, 2)
    last = plan.queries.positions.view(-1, block)[rows].flatten(1)  # [T, R of one head]
    positions = plan.keys.positions.view(-1, block)[columns].flatten(1)  # [T, C]
    return mask.masked_fill_(positions[:, None] > last[:, :, None], -torch.inf)


@dataclass(frozen=True, eq=False)
class ScoreSource:
    """Provides the masks and dropout factors of calls.

    Attributes:
        is_padded: for each sample, whether some of its keys are padding.
        real: bool [B, 1, num_blocks, block], which keys are real; None without key padding.
        draw: factors and offsets [B, H, num_blocks, block], columns [1, 1, num_blocks, block]; None without dropout.
    """

    plan: CpuPlan
    extras: ScoreModifiers
    is_padded: tuple[bool, ...]
    real: Tensor | None
    draw: Draw | None

    @staticmethod
    def of(plan: CpuPlan, extras: ScoreModifiers, num_samples: int) -> ScoreSource:
        """Copy key padding and draw into blocks.

        Args:
            plan: whose slots say where tokens go.
            extras: has the padding [B, Nk] and the draw.
        """
        is_padded, real, draw = (False,) * num_samples, None, None
        if extras.key_padding is not None:
            is_padded = tuple((~extras.key_padding.all(1)).tolist())
            real = into_blocks(extras.key_padding[:, None], plan.keys, plan.block)
        if extras.draw is not None:
            draw = Draw(
                into_blocks(extras.draw.factors, plan.queries, plan.block),
                into_blocks(extras.draw.offsets, plan.queries, plan.block),
                into_blocks(extras.draw.columns[None, None], plan.keys, plan.block),
                extras.draw.p,
            )
        return ScoreSource(plan, extras, is_padded, real, draw)

    def scores(self, call: TileBatch, dtype: torch.dtype) -> Scores:
        """Make the modifiers of a call's scores: the mask in `dtype`, the dropout's factor in the wide dtype."""
        mask = call.mask  # [T, R of one head, C]
        if self.real is not None and self.is_padded[call.sample]:
            real = self.real[call.sample, 0][call.columns].flatten(1)[:, None]  # [T, 1, C]
            num_rows = call.rows.shape[1] * self.plan.block
            mask = torch.zeros(len(real), num_rows, real.shape[2], dtype=dtype) if mask is None else mask
            mask = mask.masked_fill(~real, -torch.inf)
        if mask is not None:
            mask = mask[None] if call.group == 1 else mask.repeat(1, call.group, 1)[None]  # [1, T, R, C]
        if self.extras.bias is not None:
            bias = self._bias(call, self.extras.bias).to(dtype)
            mask = bias if mask is None else bias + mask
        return Scores(self.extras.scale, mask, None if self.draw is None else _kept(self.draw, call, wide_dtype(dtype)))

    def add_bias_grad(self, grad: Tensor, call: TileBatch, values: Tensor) -> None:
        """Add the gradient of a call's scores to the bias' gradient.

        Args:
            grad: [1 or B, 1 or H, Nq, Nk], added to.
            values: [L, T, R, C], cast to the dtype of grad.
        """
        by_head = values.unflatten(2, (call.group, -1)).transpose(1, 2).flatten(0, 1)  # [heads, T, R of one head, C]
        if grad.shape[1] == 1:
            by_head = by_head.sum(0, keepdim=True)
        heads = slice(None) if grad.shape[1] == 1 else call.heads
        index = (torch.arange(len(by_head))[:, None, None, None], *self._tokens(call))
        # Of several pairs that add to one element, as gaps do, all but one are zero: any order gives the same sum.
        grad[call.sample if len(grad) > 1 else 0, heads].index_put_(index, by_head.to(grad.dtype), accumulate=True)

    def _bias(self, call: TileBatch, bias: Tensor) -> Tensor:
        """Gather the bias of a call's scores, [1 or L, T, R, C]."""
        heads = slice(None) if bias.shape[1] == 1 else call.heads
        queries, keys = self._tokens(call)
        taken = bias[call.sample if len(bias) > 1 else 0, heads][:, queries, keys]  # [1 or heads, T, R of one head, C]
        if len(taken) == 1:
            return taken.repeat(1, 1, call.group, 1)
        return taken.unflatten(0, (call.num_kv, call.group)).transpose(1, 2).flatten(2, 3)

    def _tokens(self, call: TileBatch) -> tuple[Tensor, Tensor]:
        """Return the tokens of a call's queries [T, R of one head, 1] and keys [T, 1, C]."""
        queries = tokens_of(self.plan.queries, call.rows, self.plan.block)
        return queries[:, :, None], tokens_of(self.plan.keys, call.columns, self.plan.block)[:, None]


def _kept(draw: Draw, call: TileBatch, dtype: torch.dtype) -> Tensor:
    """Return the dropout factors of a call's probabilities, [L, T, R, C]: 0 or 1 / (1 - p)."""
    columns = draw.columns[0, 0][call.columns].flatten(1)[:, None]  # [T, 1, C]
    numbers = queries_of(draw.factors, call)[..., None] * columns
    numbers.add_(queries_of(draw.offsets, call)[..., None])
    numbers.addcmul_(numbers, numbers, value=2)
    return (numbers < draw.threshold).to(dtype).mul_(1 / (1 - draw.p))
