"""Offers DeepSpeed's sparse attention by its own paths and names: change the import, and keep the code.

Structures are in strict mode here: layouts and errors are DeepSpeed's, quirks included. `strict_deepspeed=False` fixes
them. DeepSpeed itself removed its sparse attention after 0.19.6.

>>> from shardwise.compat.deepspeed.ops.sparse_attention import FixedSparsityConfig
>>> FixedSparsityConfig(num_heads=4).make_layout(100)
Traceback (most recent call last):
    ...
ValueError: Sequence Length, 100, needs to be dividable by Block size 16!
"""

from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.ops.sparse_attention.bert_sparse_self_attention import BertSparseSelfAttention
from shardwise.compat.deepspeed.ops.sparse_attention.sparse_attention_utils import SparseAttentionUtils
from shardwise.compat.deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
from shardwise.compat.deepspeed.ops.sparse_attention.sparsity_config import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    sparsity_config_of,
)

__getattr__ = answers(__name__)

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "sparsity_config_of",
]
