"""Replaces dropout by function: a mode for torch's inside a module's forward, and attention that stores its scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from shardwise.dropout.hash_rng import Hashes, HashGrid, Samples, grid_of, keyed_hashes


class DropoutSite(Protocol):
    """Names the place in a model from which dropouts draw their numbers."""

    @property
    def has_placeholders(self) -> bool:
        """Say whether tensors are placeholders now, so that dropouts are torch's own."""

    def drop(self, values: Tensor, p: float, inplace: bool = False) -> Tensor:
        """Apply dropout of rate p to values of any shape, in place if `inplace`."""

    def hashes(self, shape: Sequence[int], device: torch.device, first_row: int) -> Hashes:
        """Return the hashes of `probability_hashes` for shape, device and first_row."""


def probability_hashes(shape: Sequence[int], device: torch.device, first_row: int = 0) -> Hashes:
    """Return the hashes by which attention without a mask drops probabilities: those of `KeyedFunctions`, or new ones.

    New ones come from torch's generator for the CPU, which checkpoints restore for recomputations. Modes that act on
    torch's functions can act on this one (`torch.overrides`).

    Args:
        shape: [samples, heads, queries, keys]; none of them is 0.
        device: of the attention.
        first_row: the position of the first query.
    """
    # Dropout in compiled blocks is torch's own, and its keys are drawn where it runs.
    if not torch.compiler.is_compiling() and has_torch_function((None,)):
        found: Hashes = handle_torch_function(probability_hashes, (), shape, device, first_row)
        return found
    key = torch.randint(2**62, (), device="cpu")
    grid = grid_of(shape, None, Samples(0, shape[0]), device, first_row)
    return keyed_hashes(HashGrid(grid.rows ^ key, grid.columns), 0)


class KeyedFunctions(TorchFunctionMode):
    """Replaces torch's dropouts by function, in attention too, with those of a site.

    Args:
        site: of the module whose forward runs; None while one runs that drops as torch does.
    """

    def __init__(self, site: DropoutSite | None) -> None:
        super().__init__()
        self.site = site

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.site is not None and func in _REPLACED and not self.site.has_placeholders:
            return _REPLACED[func](self.site, func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dropout(
    site: DropoutSite,
    func: Any,
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Replace `F.dropout`, and `torch.dropout` and `torch.dropout_`, whose third argument is `train`."""
    if not kwargs.get("train", training):
        return input
    return site.drop(input, p, inplace or func is torch.dropout_)


def _attention(
    site: DropoutSite,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Replace `F.scaled_dot_product_attention`; with dropout its probabilities are stored, as no kernel takes a mask.

    Args:
        site: for the probabilities.
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
    is_refused = is_causal and attn_mask is not None  # torch raises the error
    if dropout_p == 0.0 or is_refused or query.is_nested:
        own: Tensor = func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        return own
    return keyed_attention(site, query, key, value, attn_mask, dropout_p, is_causal, **kwargs)


def keyed_attention(
    site: DropoutSite,
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
        dropout_p: the rate.
        is_causal: position i attends to the first i + 1.
        kwargs: scale, enable_gqa.
    """
    if has_torch_function((None,)):  # an outer mode that replaces torch's attention may not need probabilities
        found: Tensor = handle_torch_function(
            keyed_attention, (), site, query, key, value, attn_mask, dropout_p, is_causal, **kwargs
        )
        return found
    if kwargs.get("enable_gqa"):
        num_sharers = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(num_sharers, dim=-3) for each in (key, value))
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
        attn_mask: broadcasts to the scores.
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
    probability_hashes: lambda site, func, shape, device, first_row: site.hashes(shape, device, first_row),
}
