"""Offers DeepSpeed's operators at DeepSpeed's paths."""

from shardwise.compat import submodules

__getattr__ = submodules(__name__)
