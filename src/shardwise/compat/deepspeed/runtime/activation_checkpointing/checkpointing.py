"""Offers `deepspeed.checkpointing` at its other path."""

from typing import Any

from shardwise.compat.deepspeed import checkpointing


def __getattr__(name: str) -> Any:
    return getattr(checkpointing, name)
