"""Offers sequence parallelism at DeepSpeed's paths."""

from shardwise.compat import submodules

__getattr__ = submodules(__name__)
