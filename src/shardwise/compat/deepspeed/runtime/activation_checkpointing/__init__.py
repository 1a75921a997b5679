"""Offers activation checkpointing at DeepSpeed's path."""

from shardwise.compat import submodules

__getattr__ = submodules(__name__)
