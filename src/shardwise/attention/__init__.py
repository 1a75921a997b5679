"""Block-sparse attention: layouts, one functional entry, back ends for CPUs and GPUs, and ways into models.

Every name is imported from its module when it is first used, so that one name does not import the modules of others.

>>> from shardwise.attention import FixedSparsityConfig
>>> FixedSparsityConfig(num_heads=4, block=64).layout(1000).num_keys
1000
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardwise.attention.api import attention_backend, block_sparse_attention, block_sparse_attention_with_lse
    from shardwise.attention.backends import Draw
    from shardwise.attention.block_layout import BlockLayout, pack
    from shardwise.attention.huggingface import use_sparse_attention
    from shardwise.attention.module import SparseSelfAttention
    from shardwise.attention.padding import pad_to_block_size, unpad_sequence_output
    from shardwise.attention.positions import extend_position_embedding, extend_rope, update_tokenizer_model_max_length
    from shardwise.attention.sdpa_patch import sparse_sdpa, sparse_sdpa_module
    from shardwise.attention.structures import (
        BigBirdSparsityConfig,
        BSLongformerSparsityConfig,
        CustomSparsityConfig,
        DenseSparsityConfig,
        FixedSparsityConfig,
        LocalSlidingWindowSparsityConfig,
        VariableSparsityConfig,
    )

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "BlockLayout",
    "CustomSparsityConfig",
    "DenseSparsityConfig",
    "Draw",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparseSelfAttention",
    "VariableSparsityConfig",
    "attention_backend",
    "block_sparse_attention",
    "block_sparse_attention_with_lse",
    "extend_position_embedding",
    "extend_rope",
    "pack",
    "pad_to_block_size",
    "sparse_sdpa",
    "sparse_sdpa_module",
    "unpad_sequence_output",
    "update_tokenizer_model_max_length",
    "use_sparse_attention",
]

_MODULES: Final[Mapping[str, str]] = {
    "BSLongformerSparsityConfig": "structures",
    "BigBirdSparsityConfig": "structures",
    "BlockLayout": "block_layout",
    "CustomSparsityConfig": "structures",
    "DenseSparsityConfig": "structures",
    "Draw": "backends",
    "FixedSparsityConfig": "structures",
    "LocalSlidingWindowSparsityConfig": "structures",
    "SparseSelfAttention": "module",
    "VariableSparsityConfig": "structures",
    "attention_backend": "api",
    "block_sparse_attention": "api",
    "block_sparse_attention_with_lse": "api",
    "extend_position_embedding": "positions",
    "extend_rope": "positions",
    "pack": "block_layout",
    "pad_to_block_size": "padding",
    "sparse_sdpa": "sdpa_patch",
    "sparse_sdpa_module": "sdpa_patch",
    "unpad_sequence_output": "padding",
    "update_tokenizer_model_max_length": "positions",
    "use_sparse_attention": "huggingface",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shardwise.attention' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"shardwise.attention.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
