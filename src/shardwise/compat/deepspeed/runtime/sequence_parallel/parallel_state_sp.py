"""Offer the groups of ranks that share a sequence, before there is an engine; this module serves as `mpu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from shardwise.compat.deepspeed.comm import init_distributed
from shardwise.compat.deepspeed.finder import answers
from shardwise.config.errors import ConfigError

__getattr__ = answers(__name__)


@dataclass
class _Sharers:
    size: int = 1
    group: Any = None
    evaluates_whole: bool = False


_SHARERS: Final = _Sharers()


def initialize_sequence_parallel(sequence_parallel_size: int, evaluates_whole: bool = False) -> None:
    """Let so many neighbouring ranks share each sequence, in evaluation too unless it `evaluates_whole` ones."""
    init_distributed()
    if dist.get_world_size() % sequence_parallel_size:
        rule = f"does not divide {dist.get_world_size()} ranks; start a multiple of it"
        raise ConfigError("sequence-parallel-size", f"sequence_parallel_size={sequence_parallel_size} {rule}")
    _SHARERS.group, _ = dist.new_subgroups(sequence_parallel_size)
    _SHARERS.size, _SHARERS.evaluates_whole = sequence_parallel_size, evaluates_whole


def get_sequence_parallel_group() -> Any:
    """Return the group of ranks that share this one's sequences."""
    if _SHARERS.group is None:
        raise KeyError("no sequence is shared; call UlyssesSPAttentionHF.register_with_transformers first")
    return _SHARERS.group


def get_sequence_parallel_world_size() -> int:
    """Return the ranks that share a sequence."""
    return _SHARERS.size


def get_sequence_parallel_rank() -> int:
    """Return this rank's place among those that share its sequences."""
    return dist.get_rank() % _SHARERS.size if dist.is_initialized() else 0


def evaluates_whole() -> bool:
    """Say whether each rank evaluates sequences of its own."""
    return _SHARERS.evaluates_whole
