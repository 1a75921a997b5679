"""Refuse DeepSpeed's attention of cut sequences."""

from __future__ import annotations

from typing import Any

from shardwise.config.resolve import ConfigError


class DistributedAttention:
    """Refuses to exchange heads for tokens around a script's own attention; the arguments are those of DeepSpeed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise ConfigError(
            "ulysses-own-attention",
            "DistributedAttention takes sequences that the script has cut; give whole ones to the model with its own "
            "attention, and sequence_parallel_size in the JSON cuts them",
        )
