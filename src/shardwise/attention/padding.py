"""Pad a batch's sequences to whole blocks, and remove the padding from outputs.

The library's own layouts take any length, with a short last block, and need no padding. This module is for structures
in DeepSpeed's strict mode, and for code that was written for DeepSpeed.

>>> pad_len, ids, mask, *_ = pad_to_block_size(4, torch.tensor([[5, 6, 7]]))
>>> pad_len, ids.tolist(), mask.tolist()
(1, [[5, 6, 7, 0]], [[1, 1, 1, 0]])
>>> unpad_sequence_output(pad_len, ids).tolist()
[[5, 6, 7]]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.config.errors import ConfigError


class PaddedInputs(NamedTuple):
    """Holds inputs of whole blocks in the order of DeepSpeed's `pad_to_block_size`; None for inputs that were left out.

    Attributes:
        pad_len: tokens added on the right of each sequence.
        attention_mask: [B, N], 0 for added tokens.
        token_type_ids: [B, N], 0 for added tokens.
        position_ids: [B or 1, N], 0 for added tokens: every model has this position.
    """

    pad_len: int
    input_ids: Tensor | None
    attention_mask: Tensor | None
    token_type_ids: Tensor | None
    position_ids: Tensor | None
    inputs_embeds: Tensor | None


def pad_to_block_size(
    block: int,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    pad_token_id: int = 0,
    model_embeddings: Callable[[Tensor], Tensor] | None = None,
) -> PaddedInputs:
    """Pad a batch on the right to a multiple of the block size; a batch that has such a length is returned unchanged.

    DeepSpeed pads positions with `pad_token_id`; here they get 0.

    Args:
        input_ids: [B, N], as `token_type_ids`; `position_ids` are [B or 1, N], and `inputs_embeds` [B, N, D].
        attention_mask: [B, N], 1 or True for a real token; if None, it is made where tokens are added.
        model_embeddings: from token ids [B, n] to embeddings [B, n, D], for `inputs_embeds`.

    Raises:
        ConfigError: there is neither `input_ids` nor `inputs_embeds`, or no `model_embeddings` for the latter.
    """
    inputs = inputs_embeds if input_ids is None else input_ids
    if inputs is None or block < 1:
        raise ConfigError(
            "nothing-to-pad", f"nothing to pad to block={block}; give input_ids or inputs_embeds and a positive block"
        )
    batch_size, seq_len = inputs.shape[:2]
    pad_len = -seq_len % block
    if pad_len == 0:
        return PaddedInputs(0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
    if inputs_embeds is not None:
        if model_embeddings is None:
            raise ConfigError(
                "padding-embeddings",
                f"inputs_embeds lack {pad_len} tokens, and there is no model_embeddings to make them",
            )
        added = torch.full((batch_size, pad_len), pad_token_id, dtype=torch.long, device=inputs.device)
        inputs_embeds = torch.cat([inputs_embeds, model_embeddings(added).to(inputs_embeds.dtype)], dim=1)
    if attention_mask is None:
        attention_mask = torch.ones(batch_size, seq_len, dtype=torch.long, device=inputs.device)
    return PaddedInputs(
        pad_len,
        _padded(input_ids, pad_len, pad_token_id),
        _padded(attention_mask, pad_len),
        _padded(token_type_ids, pad_len),
        _padded(position_ids, pad_len),
        inputs_embeds,
    )


def _padded(rows: Tensor | None, pad_len: int, value: int = 0) -> Tensor | None:
    return None if rows is None else F.pad(rows, (0, pad_len), value=value)


def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
    """Remove from a model's output [B, N, ...] the `pad_len` tokens that `pad_to_block_size` added."""
    return sequence_output[:, : sequence_output.shape[1] - pad_len]
