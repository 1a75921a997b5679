"""Dropout by function: a mode that replaces torch's inside a module's forward, and attention written out for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Drop(Protocol):
    """Dropout at one site: values of any shape, the rate, and whether to change the values in place."""

    def __call__(self, values: Tensor, p: float, inplace: bool = False) -> Tensor: ...


class KeyedFunctions(TorchFunctionMode):
    """Inside the context torch's dropouts by function are `drop`'s, those of attention too.

    Args:
        drop: of the module whose forward runs.
    """

    def __init__(self, drop: Drop) -> None:
        super().__init__()
        self._drop = drop

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _REPLACED:
            return _REPLACED[func](self._drop, func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dropout(
    drop: Drop,
    func: Any,
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **kwargs: Any,
) -> Tensor:
    """`F.dropout`; and `torch.dropout` and `torch.dropout_`, whose third argument is `train`."""
    if not kwargs.get("train", training):
        return input
    return drop(input, p, inplace or func is torch.dropout_)


def _attention(
    drop: Drop,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention`; with dropout its probabilities are written out, as no kernel takes a mask.

    Args:
        drop: for the probabilities.
        func: torch's own.
        query: [..., H, L, E].
        key: [..., H or a divisor of it, S, E].
        value: [..., as key, S, V].
        attn_mask: broadcasts to [..., H, L, S]; of bools, True to attend, or added to the scores.
        dropout_p: the rate.
        is_causal: position i attends to the first i + 1.
        kwargs: scale, enable_gqa.

    Returns:
        [..., H, L, V].
    """
    is_refused = is_causal and attn_mask is not None  # by torch, which says so
    if dropout_p == 0.0 or is_refused or query.is_nested:
        own: Tensor = func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        return own
    if kwargs.get("enable_gqa"):
        num_sharers = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(num_sharers, dim=-3) for each in (key, value))
    scale = kwargs.get("scale")
    scaled = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scaled @ key.transpose(-2, -1)  # [..., H, L, S]
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()  # [L, S]
    return drop(_softmax(scores, attn_mask), dropout_p) @ value


def _softmax(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Softmax over the last dim; a row in which all is masked gives zeros, as torch's attention does.

    Args:
        scores: [..., L, S].
        attn_mask: broadcasts to it.
    """
    if attn_mask is None:
        return scores.softmax(-1)
    if attn_mask.dtype == torch.bool:
        blocked = ~attn_mask
    else:
        scores, blocked = scores + attn_mask, attn_mask == -math.inf
    finite = scores.masked_fill(blocked, torch.finfo(scores.dtype).min)
    return finite.softmax(-1).masked_fill(blocked, 0.0)


_REPLACED: Final[Mapping[Any, Callable[..., Tensor]]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    torch.dropout_: _dropout,
    F.scaled_dot_product_attention: _attention,
}
