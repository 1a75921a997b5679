"""Computes attention whose stored probabilities a site drops: no kernel takes the mask of a keyed dropout.

It stands alone, as modes that replace torch's attention see its function, and need no other part of dropout.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


class Dropping(Protocol):
    """Is what drops: a module's site."""

    def drop(self, values: Tensor, p: float, inplace: bool = False) -> Tensor:
        """Apply torch's dropout of rate p to values, in place if `inplace`."""


def keyed_attention(
    site: Dropping,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    **kwargs: Any,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` with stored probabilities that a site drops.

    Args:
        site: of the module whose forward runs.
        query: [..., H, L, E].
        key: [..., H or a divisor of it, S, E].
        value: [..., as key, S, V].
        attn_mask: broadcasts to [..., H, L, S]; of bools, True to attend, or added to the scores; None for no mask.
        is_causal: position i attends to the first i + 1.
    """
    if has_torch_function((None,)):  # an outer mode that replaces torch's attention may not need probabilities
        attended: Tensor = handle_torch_function(
            keyed_attention, (), site, query, key, value, attn_mask, dropout_p, is_causal, **kwargs
        )
        return attended
    if kwargs.get("enable_gqa"):
        num_sharers = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(num_sharers, dim=-3) for tensor in (key, value))
    scale = kwargs.get("scale")
    scaled = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scaled @ key.transpose(-2, -1)  # [..., H, L, S]
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()  # [L, S]
    return site.drop(_softmax(scores, attn_mask), dropout_p) @ value


def _softmax(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Compute softmax over the last dim; a row in which all is masked gives zeros, as in torch's attention.

    Args:
        scores: [..., L, S].
    """
    if attn_mask is None:
        return scores.softmax(-1)
    if attn_mask.dtype == torch.bool:
        blocked = ~attn_mask
    else:
        scores, blocked = scores + attn_mask, attn_mask == -math.inf
    finite = scores.masked_fill(blocked, torch.finfo(scores.dtype).min)
    return finite.softmax(-1).masked_fill(blocked, 0.0)
