"""Defines what all parameter groups of an engine share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from shardwise.comm.collectives import AsyncWork
from shardwise.comm.mesh import CommGroups
from shardwise.construction.values import ParamInitializer
from shardwise.layout.precision import StatesDtype
from shardwise.offload.tiers import Tiers
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.runtime.timeline import Timeline


class ModelEvents:
    """Passes on what a model and its optimizer do to an engine; without one it does nothing."""

    def before_model(self) -> None:
        """Follow what the user has done to the model: its forward is about to begin."""

    def before_backward(self) -> Callable[[], None] | None:
        """Begin a backward that the engine did not start; return what ends it, if anything does."""
        return None

    def zero_grad(self) -> None:
        """Clear the gradients, as a script asks of the model or the optimizer."""


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
    events: ModelEvents = field(default_factory=ModelEvents)
    decoding: deque[AsyncWork] = field(default_factory=deque)  # gathers of codes
