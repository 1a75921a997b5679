"""Offers BERT's self-attention as a module at DeepSpeed's path, for code that puts its own modules into a model.

Models of transformers need none: `shardwise.attention.huggingface.use_sparse_attention` leaves their modules as they
are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise.attention.module import SparseSelfAttention
from shardwise.attention.structures import SparsityConfig
from shardwise.compat.deepspeed.ops.sparse_attention.sparsity_config import FixedSparsityConfig
from shardwise.config.errors import ConfigError


class BertSparseSelfAttention(nn.Module):
    """Projects queries, keys and values, and attends block-sparsely between them; parameters have BERT's names.

    Args:
        config: of BERT, for `hidden_size` and `num_attention_heads`.
        sparsity_config: the structure; None for a `FixedSparsityConfig` of the config's heads (DeepSpeed's has 4).

    Raises:
        ConfigError: the heads do not divide the hidden size.
    """

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None) -> None:
        super().__init__()
        hidden_size, num_heads = config.hidden_size, config.num_attention_heads
        if hidden_size % num_heads:
            raise ConfigError(
                "heads-divide-hidden", f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size}"
            )
        self.num_attention_heads = num_heads
        self.attention_head_size = hidden_size // num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        structure = FixedSparsityConfig(num_heads) if sparsity_config is None else sparsity_config
        self.sparse_self_attention = SparseSelfAttention(structure)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the context [B, N, hidden] of states [B, N, hidden] and an additive mask, [B, N] or [B, 1, 1, N]."""
        if attention_mask is not None:
            attention_mask = attention_mask.reshape(len(attention_mask), -1)  # [B, N]
        q, k, v = (self._heads(projection(hidden_states)) for projection in (self.query, self.key, self.value))
        context: Tensor = self.sparse_self_attention(q, k, v, key_padding_mask=attention_mask)  # [B, H, N, D]
        return context.transpose(1, 2).flatten(2)

    def _heads(self, states: Tensor) -> Tensor:
        """View [B, N, hidden] as [B, H, N, D]."""
        return states.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(1, 2)
