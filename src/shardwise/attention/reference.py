"""Computes attention of tiles and stores every score: for dropout, and for gradients of bias and log-sum-exp.

Shapes: L KV heads, T tiles, R rows (of all query heads of the KV head), C keys, D head. Sums run in fp32, or
fp64 for fp64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.attention.backends import wide_dtype


@dataclass(frozen=True, eq=False)
class Scores:
    """Holds what acts on the scores of tiles.

    Attributes:
        mask: added to the scaled scores, [1 or L, T, R, C], -inf where a key is not seen; None where all are.
        factor: multiplies probabilities, after the softmax; [L, T, R, C]; None without dropout.
    """

    scale: float
    mask: Tensor | None
    factor: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TileGrads:
    """Holds gradients of tiles; `scores` is [L, T, R, C], before the scale."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor | None = None


def forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Compute output [L, T, R, D] and log-sum-exp [L, T, R], in the dtype in which sums run.

    Args:
        q: [L, T, R, D]; k and v are [L, T, C, D].
        scores: scale, mask and dropout of the scores [L, T, R, C].
    """
    q, k, v = _wide(q, k, v)
    logits = _logits(q, k, scores)  # [L, T, R, C]
    lse = logits.logsumexp(-1)  # [L, T, R]
    probabilities = _exp_of(logits, lse.masked_fill(lse == -torch.inf, 0.0))
    if scores.factor is not None:
        probabilities *= scores.factor
    return probabilities @ v, lse


def backward(
    grad_out: Tensor, delta: Tensor, qkv: tuple[Tensor, Tensor, Tensor], lse: Tensor, scores: Scores
) -> TileGrads:
    """Compute the gradients of q, k and v from `grad_out` [L, T, R, D].

    Args:
        delta: [L, T, R], sum(out * grad_out) of each row, less the gradient of the log-sum-exp.
        lse: [L, T, R]; inf in rows that see no key.
    """
    grad_out, q, k, v = _wide(grad_out, *qkv)
    probabilities = _exp_of(_logits(q, k, scores), lse)  # [L, T, R, C]
    grad = grad_out @ v.mT  # [L, T, R, C]
    if scores.factor is None:
        grad_v = probabilities.mT @ grad_out
    else:
        grad_v = (probabilities * scores.factor).mT @ grad_out
        grad *= scores.factor
    grad.sub_(delta[..., None]).mul_(probabilities)
    return TileGrads((grad @ k).mul_(scores.scale), (grad.mT @ q).mul_(scores.scale), grad_v, grad)


def _wide(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(wide_dtype(tensor.dtype)) for tensor in tensors]


def _logits(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    logits = (q @ k.mT).mul_(scores.scale)
    return logits if scores.mask is None else logits.add_(scores.mask)


def _exp_of(logits: Tensor, lse: Tensor) -> Tensor:
    """Compute exp(logits - lse) in place."""
    return logits.sub_(lse[..., None]).exp_()
