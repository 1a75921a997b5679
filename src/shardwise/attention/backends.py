"""What every back end of block-sparse attention is given and gives, so that one autograd function serves all.

Shapes: B samples, H query heads, K key and value heads (H is a multiple of K; query head h reads KV head h // (H / K)),
Nq queries, Nk keys, D head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.attention.block_layout import BlockLayout
from shardwise.dropout.hash_rng import keep_threshold


@dataclass(frozen=True, eq=False)
class Draw:
    """The bits of one dropout, as hashes of indices (`shardwise.dropout.hash_rng`): no mask exists.

    With x = factor[query row] * column[key] + offset[query row], in int32 that wraps, a probability is kept where
    x * (2 * x + 1) < threshold, and then scaled by 1 / (1 - p).

    Attributes:
        factors: [B, H, Nq], int32, odd.
        offsets: [B, H, Nq], int32.
        columns: [Nk], int32.
        p: the rate; more than 0 and less than 1.
    """

    factors: Tensor
    offsets: Tensor
    columns: Tensor
    p: float

    @property
    def threshold(self) -> int:
        """Of the signed 32-bit numbers, those below it are kept."""
        return keep_threshold(self.p)


@dataclass(frozen=True, eq=False)
class ScoreModifiers:
    """What acts on scores besides the layout, in this order: scale, bias, key padding, softmax, dropout.

    Attributes:
        scale: of q k^T.
        key_padding: [B, Nk], bool, True for a real token; others are seen by no query.
        bias: [1 or B, 1 or H, Nq, Nk], floating, added to the scaled scores.
        draw: of dropout on the probabilities.
    """

    scale: float
    key_padding: Tensor | None = None
    bias: Tensor | None = None
    draw: Draw | None = None


@dataclass(frozen=True, eq=False)
class BackendPlan:
    """What a back end made of a layout, in parts that can pass through a registered op; its own to read.

    Attributes:
        tensors: on the device where they are used.
        numbers: any.
    """

    tensors: tuple[Tensor, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SavedForBackward:
    """What a forward keeps for its backward, besides extras and plan.

    Attributes:
        q: [B, H, Nq, D].
        k: [B, K, Nk, D].
        v: [B, K, Nk, D].
        out: [B, H, Nq, D], in the dtype of q; 0 in rows that see no key.
        lse: [B, H, Nq], the log-sum-exp (base e) of the scores in fp32, fp64 for fp64; -inf in rows that see no key.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True, eq=False)
class AttentionGrads:
    """Gradients of q, k, v and, where asked for, of the bias in its own shape; in their dtypes, or the wide one."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


class Backend(Protocol):
    """Plans once a layout; forward and backward read the plan alone. Bitwise repeatable. Strided q, k, v are taken."""

    def plan(self, layout: BlockLayout, q: Tensor, k: Tensor) -> BackendPlan:
        """The plan for tensors of these shapes (at any batch size), dtypes and device; kept by `layout.cached`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: ScoreModifiers, plan: BackendPlan
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Nq, D], in memory [B, Nq, H, D] where that costs nothing, and log-sum-exp [B, H, Nq]."""

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
        """The gradients, given those of the output and, if any, of the log-sum-exp.

        What is saved of the output may be that of attention over more keys than these: the gradients are then this
        part's of the whole. Those of q, k and v are in the dtype in which sums run where `is_wide`.
        """


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums run: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
