"""Schedules say what each rank does and in which order, as pure values: no process group, no device, no torch.

A generator writes a `Schedule`, `verify` proves it, `simulate` prices it, and a real run yields the same
`TimedAction`s.

>>> from shardwise.schedule import COMPUTATIONS, bubble_fraction, lower, pipeline_step, simulate, verify
>>> schedule = lower(pipeline_step("1f1b", num_ranks=2, num_micro_batches=3))
>>> verify(schedule)
>>> bubble_fraction(simulate(schedule, lambda rank, action: 1e-3 if action.kind in COMPUTATIONS else 0.0))
0.25
"""

from shardwise.schedule.actions import (
    COLLECTIVES,
    COMPUTATIONS,
    STREAMS,
    TRANSFERS,
    Action,
    ActionKind,
    Payload,
    Schedule,
    ScheduleError,
    TimedAction,
)
from shardwise.schedule.dependencies import Position, dependencies
from shardwise.schedule.formulas import bubble_s, bubble_share, max_in_flight
from shardwise.schedule.lower import Gather, insert_gathers, insert_offload, insert_transfers, lower
from shardwise.schedule.pipelines import (
    RECIPES,
    ScheduleRecipe,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    pipeline_evaluation,
    pipeline_rows,
    pipeline_step,
    placement_of,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from shardwise.schedule.placement import StagePlacement
from shardwise.schedule.simulate import Cost, bubble_fraction, busy_s, makespan_s, rank_bubble_s, rank_span_s, simulate
from shardwise.schedule.verify import verify

__all__ = [
    "COLLECTIVES",
    "COMPUTATIONS",
    "RECIPES",
    "STREAMS",
    "TRANSFERS",
    "Action",
    "ActionKind",
    "Cost",
    "Gather",
    "Payload",
    "Position",
    "Schedule",
    "ScheduleError",
    "ScheduleRecipe",
    "StagePlacement",
    "TimedAction",
    "bubble_fraction",
    "bubble_s",
    "bubble_share",
    "busy_s",
    "dependencies",
    "gpipe",
    "insert_gathers",
    "insert_offload",
    "insert_transfers",
    "interleaved",
    "lower",
    "makespan_s",
    "max_in_flight",
    "naive",
    "one_f_one_b",
    "pipeline_evaluation",
    "pipeline_rows",
    "pipeline_step",
    "placement_of",
    "rank_bubble_s",
    "rank_span_s",
    "simulate",
    "verify",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
]
