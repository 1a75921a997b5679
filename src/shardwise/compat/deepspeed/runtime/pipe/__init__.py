"""Offers DeepSpeed's pipeline modules at DeepSpeed's paths."""

from shardwise.compat.deepspeed.finder import answers

__getattr__ = answers(__name__)
