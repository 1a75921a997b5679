"""Offer the logger at DeepSpeed's path."""

from shardwise.compat.deepspeed.utils import log_dist, logger

__all__ = ["log_dist", "logger"]
