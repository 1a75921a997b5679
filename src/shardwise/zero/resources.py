"""Defines what all parameter groups of an engine share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from shardwise.comm.collectives import AsyncWork
from shardwise.comm.mesh import CommGroups
from shardwise.construction.values import ParamInitializer
from shardwise.layout.precision import StatesDtype
from shardwise.offload.tiers import Tiers
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.codec_errors import CodecErrors
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.runtime.timeline import Timeline


@dataclass(frozen=True)
class ShardingResources:
    """Bundles what all groups of an engine share."""

    comms: CommGroups
    pool: BufferPool
    tracker: MemoryTracker
    timeline: Timeline
    values: ParamInitializer
    tiers: Tiers
    overlap: bool
    lockstep: bool | Literal["auto"] = False
    states_dtype: StatesDtype = "master"
    codec_errors: CodecErrors = field(default_factory=CodecErrors)
    decoding: deque[AsyncWork] = field(default_factory=deque)  # gathers of codes
