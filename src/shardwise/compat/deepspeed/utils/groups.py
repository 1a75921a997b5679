"""Offer the groups of ranks that share a sequence, by the names that Accelerate and the Trainer know."""

from typing import Any

from shardwise.compat.deepspeed.runtime.sequence_parallel import parallel_state_sp


def __getattr__(name: str) -> Any:
    return getattr(parallel_state_sp, name.removeprefix("_"))
