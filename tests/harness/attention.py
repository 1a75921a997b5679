"""Attention written out densely, as an oracle: every score exists, and autograd does the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.attention.backends import Draw


def keep_mask(draw: Draw) -> Tensor:
    """What a draw keeps, bool [B, H, Nq, Nk]; in int64 with the wrap of int32 written out."""

    def wrapped(numbers: Tensor) -> Tensor:
        return (numbers + 2**31) % 2**32 - 2**31

    factors, offsets = draw.factors.long()[..., None], draw.offsets.long()[..., None]
    x = wrapped(factors * draw.columns.long() + offsets)  # [B, H, Nq, Nk]
    return wrapped(x + wrapped(2 * wrapped(x * x))) < draw.threshold


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    *,
    scale: float | None = None,
    key_padding: Tensor | None = None,
    bias: Tensor | None = None,
    draw: Draw | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Nq, D] and log-sum-exp [B, H, Nq]; a row that sees no key gives 0 and -inf, gradients 0.

    Args:
        q: [B, H, Nq, D].
        k: [B, K, Nk, D].
        v: [B, K, Nk, D].
        allowed: bool, broadcasts to [B, H, Nq, Nk].
        scale: 1 / sqrt(D) when left out.
        key_padding: [B, Nk], bool, True for a real token.
        bias: broadcasts to [B, H, Nq, Nk].
        draw: of dropout.
    """
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))  # [B, H, Nk, D]
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)  # [B, H, Nq, Nk]
    if bias is not None:
        scores = scores + bias
    allowed = allowed.expand(scores.shape)
    if key_padding is not None:
        allowed = allowed & key_padding[:, None, None, :]
    sees_any = allowed.any(-1, keepdim=True)  # [B, H, Nq, 1]
    finite = scores.masked_fill(~allowed, -torch.inf).masked_fill(~sees_any, 0.0)
    probabilities = finite.softmax(-1) * sees_any
    lse = finite.logsumexp(-1).masked_fill(~sees_any[..., 0], -torch.inf)
    if draw is not None:
        probabilities = probabilities * keep_mask(draw) / (1 - draw.p)
    return probabilities @ v, lse
