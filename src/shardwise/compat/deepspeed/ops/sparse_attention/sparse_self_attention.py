"""Offers the attention module at DeepSpeed's path, which users' code imports."""

from shardwise.attention.module import SparseSelfAttention

__all__ = ["SparseSelfAttention"]
