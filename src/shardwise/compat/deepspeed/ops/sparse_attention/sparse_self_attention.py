"""The attention module, which applies a structure to queries, keys and values."""

from shardwise.attention.module import SparseSelfAttention

__all__ = ["SparseSelfAttention"]
