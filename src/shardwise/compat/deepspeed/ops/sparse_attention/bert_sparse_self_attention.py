"""BERT's self-attention over a structure; the default one has the heads of the config, where DeepSpeed's has four."""

from __future__ import annotations

from typing import Any

from shardwise.attention import bert, structures
from shardwise.compat.deepspeed.ops.sparse_attention.sparsity_config import FixedSparsityConfig


class BertSparseSelfAttention(bert.BertSparseSelfAttention):
    """A `shardwise.attention.bert.BertSparseSelfAttention` whose default structure is strict.

    Args:
        config: of BERT, for `hidden_size` and `num_attention_heads`.
        sparsity_config: the structure; None for `FixedSparsityConfig`.
    """

    def __init__(self, config: Any, sparsity_config: structures.SparsityConfig | None = None) -> None:
        super().__init__(config, sparsity_config or FixedSparsityConfig(config.num_attention_heads))
