"""TIME: what each rank does and in which order, as pure values; no process group, no device, no torch.

A generator writes a `Schedule`, `verify` proves it, `simulate` prices it, and a real run yields the same
`TimedAction`s.

>>> from shardwise.schedule import COMPUTATIONS, bubble_fraction, data_parallel_step, simulate, verify
>>> schedule = data_parallel_step(["root", "blocks.0"], 4, unshard_for_use=True, reduce_each_backward=True)
>>> verify(schedule)
>>> bubble_fraction(simulate(schedule, lambda rank, action: 1e-3 if action.kind in COMPUTATIONS else 0.0))
0.0
"""

from shardwise.schedule.actions import (
    COLLECTIVES,
    COMPUTATIONS,
    LANES,
    TRANSFERS,
    Action,
    Kind,
    Payload,
    Schedule,
    ScheduleError,
    TimedAction,
)
from shardwise.schedule.dependencies import Position, dependencies
from shardwise.schedule.generators import data_parallel_step, forward_only
from shardwise.schedule.passes import insert_offload
from shardwise.schedule.simulator import Cost, bubble_fraction, makespan_s, simulate
from shardwise.schedule.verifier import verify

__all__ = [
    "COLLECTIVES",
    "COMPUTATIONS",
    "LANES",
    "TRANSFERS",
    "Action",
    "Cost",
    "Kind",
    "Payload",
    "Position",
    "Schedule",
    "ScheduleError",
    "TimedAction",
    "bubble_fraction",
    "data_parallel_step",
    "dependencies",
    "forward_only",
    "insert_offload",
    "makespan_s",
    "simulate",
    "verify",
]
