"""Offer the groups of ranks that share a sequence, by the names that Accelerate and the Trainer know."""

from shardwise.compat.deepspeed.runtime.sequence_parallel.parallel_state_sp import (
    get_sequence_parallel_group as _get_sequence_parallel_group,
)
from shardwise.compat.deepspeed.runtime.sequence_parallel.parallel_state_sp import (
    get_sequence_parallel_rank as _get_sequence_parallel_rank,
)
from shardwise.compat.deepspeed.runtime.sequence_parallel.parallel_state_sp import (
    get_sequence_parallel_world_size as _get_sequence_parallel_world_size,
)

__all__ = ["_get_sequence_parallel_group", "_get_sequence_parallel_rank", "_get_sequence_parallel_world_size"]
