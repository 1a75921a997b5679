"""Block-sparse attention: layouts, one functional entry, back ends for CPUs and GPUs, and ways into models."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardwise.attention.backends import Draw
    from shardwise.attention.block_layout import BlockLayout, pack
    from shardwise.attention.functional import (
        attention_backend,
        block_sparse_attention,
        block_sparse_attention_with_lse,
    )
    from shardwise.attention.interception import sparse_sdpa, sparse_sdpa_module
    from shardwise.attention.module import SparseSelfAttention

__all__ = [
    "BlockLayout",
    "Draw",
    "SparseSelfAttention",
    "attention_backend",
    "block_sparse_attention",
    "block_sparse_attention_with_lse",
    "pack",
    "sparse_sdpa",
    "sparse_sdpa_module",
]

_MODULES: Final[Mapping[str, str]] = {
    "BlockLayout": "block_layout",
    "Draw": "backends",
    "SparseSelfAttention": "module",
    "attention_backend": "functional",
    "block_sparse_attention": "functional",
    "block_sparse_attention_with_lse": "functional",
    "pack": "block_layout",
    "sparse_sdpa": "interception",
    "sparse_sdpa_module": "interception",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shardwise.attention' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"shardwise.attention.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
