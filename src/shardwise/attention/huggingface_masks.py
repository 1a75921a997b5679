"""What transformers' mask functions are asked for, registered beside attention, whose mask is of size B x N.

Without it transformers drops padding without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise._torch_private import is_fake
from shardwise.config import ConfigError


def padding_mask(batch_size: int, q_length: int, kv_length: int, **options: Any) -> Tensor | None:
    """What transformers' mask functions are asked for, as attention needs it here: of size B x N.

    Args:
        batch_size: B.
        q_length: queries.
        kv_length: room for keys, more than there are in a static cache.
        options: `q_offset`, `kv_offset`, `mask_function`, `attention_mask` [B, Nk] and others, as transformers gives
            them.

    Returns:
        None; or bool [B, Nk], True for a real token; or, where documents are packed, their numbers as int64 [B, Nk].

    Raises:
        ConfigError: the model masks more than padding and documents.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    mask, function = options.get("attention_mask"), options.get("mask_function", causal_mask_function)
    is_own = options.get("use_vmap", False)
    if is_own or options.get("kv_offset", 0) or (mask is not None and mask.ndim != 2):
        what = "a mask function of its own" if is_own else "a sliding cache" if mask is None else "a mask not [B, N]"
        raise ConfigError(f"block-sparse attention got {what}; it takes padding masks [B, N] and packed documents")
    num_keys = kv_length
    if function is not bidirectional_mask_function:
        num_keys = min(kv_length, int(options.get("q_offset", 0)) + q_length)
    if mask is None and function not in (causal_mask_function, bidirectional_mask_function) and q_length == kv_length:
        return _documents(function, batch_size, q_length, torch.device(options.get("device", "cpu")))
    if mask is None:
        missing = torch.ones(batch_size, num_keys, dtype=torch.bool, device=options.get("device", "cpu"))
        return missing if num_keys < kv_length else None
    return F.pad(mask[:, :num_keys], (0, max(num_keys - mask.shape[1], 0)))  # [B, Nk]


def _documents(function: Callable[..., Tensor], batch_size: int, length: int, device: torch.device) -> Tensor | None:
    """Numbers of documents, int64 [B, N], which begin where a token does not see the one before; None for one each."""
    rows = torch.arange(batch_size, device=device)[:, None]
    tokens = torch.arange(1, length, device=device)[None]
    begins = ~function(rows, 0, tokens, tokens - 1)  # [B, N - 1]
    ahead = function(rows, 0, tokens - 1, tokens)  # [B, N - 1]
    if is_fake(begins):
        return None  # simulated tokens have no values; they count as one document
    if ahead.expand(batch_size, -1).any():
        raise ConfigError(
            "the model's mask lets tokens see some after them, beyond padding and documents; such models need their "
            "own attention"
        )
    numbers = F.pad(begins.expand(batch_size, -1).cumsum(-1), (1, 0))  # [B, N]
    return numbers if numbers.any() else None
