"""What all parameter groups of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.comm import Comms
from shardwise.deferred import ValueSource
from shardwise.memory import Ledger
from shardwise.pool import BufferPool
from shardwise.tiers.tiers import Tiers
from shardwise.timeline import Timeline


@dataclass(frozen=True)
class Resources:
    """What all groups of an engine share."""

    comms: Comms
    pool: BufferPool
    ledger: Ledger
    timeline: Timeline
    values: ValueSource
    tiers: Tiers
    overlap: bool
    lockstep: bool = False
