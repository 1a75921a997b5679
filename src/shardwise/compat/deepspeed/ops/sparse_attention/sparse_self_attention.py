"""The module, which takes a structure and applies it to queries, keys and values."""

from shardwise.attention.module import SparseSelfAttention

__all__ = ["SparseSelfAttention"]
