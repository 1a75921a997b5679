"""Defines the interface of the back ends of block-sparse attention: one autograd function serves all of them.

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
    """Describes the bits of one dropout, stored as hashes of indices (`shardwise.dropout.hash_rng`): no mask exists.

    With x = factor[query row] * column[key] + offset[query row], in int32 that wraps, a probability is kept where
    x * (2 * x + 1) < threshold, and then scaled by 1 / (1 - p).

    Attributes:
        factors: int32 [B, H, Nq], all odd; `offsets` are any int32 [B, H, Nq], `columns` int32 [Nk].
        p: the rate; more than 0 and less than 1.
    """

    factors: Tensor
    offsets: Tensor
    columns: Tensor
    p: float

    @property
    def threshold(self) -> int:
        """Return the signed 32-bit number below which a drawn number means that the element is kept."""
        return keep_threshold(self.p)


@dataclass(frozen=True, eq=False)
class ScoreModifiers:
    """Holds what acts on scores besides the layout, in this order: scale, bias, key padding, softmax, dropout.

    Attributes:
        key_padding: [B, Nk], bool, True for a real token; no query sees the others. None for no padding.
        bias: [1 or B, 1 or H, Nq, Nk], floating, added to the scaled scores; None for no bias.
        draw: the bits of dropout on the probabilities; None for no dropout.
    """

    scale: float
    key_padding: Tensor | None = None
    bias: Tensor | None = None
    draw: Draw | None = None


@dataclass(frozen=True, eq=False)
class BackendPlan:
    """Holds the plan that a back end made of a layout, as parts that can pass through a registered op.

    Only the back end that made it reads it.

    Attributes:
        tensors: of the plan, on the device where they are used.
    """

    tensors: tuple[Tensor, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SavedForBackward:
    """Holds the tensors that a forward keeps for its backward, besides extras and plan.

    Attributes:
        q: [B, H, Nq, D]; k and v are [B, K, Nk, D].
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
    """Holds gradients of q, k, v and, if needed, of the bias in its shape; in their dtypes, or in the wide dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


class Backend(Protocol):
    """A back end plans each layout once; forward and backward read the plan alone.

    Results are bitwise repeatable. q, k and v may be strided.
    """

    def plan(self, layout: BlockLayout, q: Tensor, k: Tensor) -> BackendPlan:
        """Plan a layout for tensors of these shapes (at any batch size), dtypes and device; `layout.cached` keeps it.

        Args:
            layout: of Nq queries and Nk keys, with 1 or H heads.
            q: [B, H, Nq, D]; its values are not read.
            k: [B, K, Nk, D]; its values are not read.
        """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: ScoreModifiers, plan: BackendPlan
    ) -> tuple[Tensor, Tensor]:
        """Compute the output [B, H, Nq, D], in memory [B, Nq, H, D] where that is free, and log-sum-exp [B, H, Nq].

        Args:
            q: [B, H, Nq, D]; k and v are [B, K, Nk, D].
            plan: of the layout, made by `plan`.
        """

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
        """Compute the gradients of the inputs from `grad_out` [B, H, Nq, D].

        The saved output and log-sum-exp may be those of attention over more keys than these: the result is then what
        these keys add to the gradients of the whole.

        Args:
            grad_lse: [B, H, Nq], gradient of the log-sum-exp; None where it has none.
            needs_bias: compute the gradient of the bias too.
            is_wide: return the gradients of q, k and v in the dtype in which sums run, else in their own dtypes.
        """


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums run: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
