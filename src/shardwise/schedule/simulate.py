"""Simulate a schedule: an action starts when its stream is free and all that it follows has ended.

The simulator gives a schedule its times; it does not check one (`verify` does), and it knows no hardware: costs
come from the caller.

>>> from shardwise.schedule.actions import ActionKind
>>> from shardwise.schedule.generators import data_parallel_step
>>> schedule = data_parallel_step(["root", "b0"], 1)
>>> timed = simulate(schedule, lambda rank, action: 2.0 if action.kind is ActionKind.REDUCE else 1.0)
>>> makespan_s(timed)  # forward 2, backward 2, REDUCE 4 of which the root's backward hides 1, STEP 2
9.0
>>> round(bubble_fraction(timed), 3)  # nothing is computed in 3 of the 9 seconds
0.333
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from shardwise.schedule.actions import COLLECTIVES, STREAMS, Action, ActionKind, Schedule, ScheduleError, TimedAction
from shardwise.schedule.dependencies import Position, dependencies, execution_order

Cost = Callable[[int, Action], float]
"""Returns the seconds of an action on a rank; those of a transfer belong to SEND, whose end its RECEIVE follows."""


def simulate(
    schedule: Schedule,
    cost: Cost,
    *,
    streams: Mapping[ActionKind, str] = STREAMS,
    meeting_kinds: Collection[ActionKind] = COLLECTIVES,
) -> tuple[TimedAction, ...]:
    """Give a verified schedule its times, and return its actions rank by rank, in the schedule's order.

    Args:
        schedule: as `verify` accepts it.
        cost: returns the seconds of an action on a rank.
        streams: the stream of each kind on a rank.
        meeting_kinds: kinds whose actions wait for each other across the ranks and last as long as the slowest.

    Raises ScheduleError on a negative cost and on a deadlock.
    """
    follows = dependencies(schedule, streams)
    order, blocked = execution_order(schedule, follows, meeting_kinds=meeting_kinds)
    if blocked:
        rank, index = min(blocked)
        action = schedule.ranks[rank][index]
        raise ScheduleError(
            "dependency-circle", f"{action} on rank {rank} never starts; it waits in a circle, verify() shows which"
        )
    times: dict[Position, tuple[float, float]] = {}
    for meeting in order:
        start_s = max((times[before][1] for member in meeting for before in follows[member]), default=0.0)
        end_s = start_s + max(_seconds(cost, rank, schedule.ranks[rank][index]) for rank, index in meeting)
        times.update(dict.fromkeys(meeting, (start_s, end_s)))
    return tuple(
        TimedAction(action, rank, *times[rank, index], stream=streams[action.kind])
        for rank, row in enumerate(schedule.ranks)
        for index, action in enumerate(row)
    )


def makespan_s(timed: Sequence[TimedAction]) -> float:
    """Return the seconds from the first start to the last end; 0 for no actions."""
    if not timed:
        return 0.0
    return max(action.end_s for action in timed) - min(action.start_s for action in timed)


def bubble_fraction(timed: Sequence[TimedAction], *, stream: str = "compute") -> float:
    """Return the share of the makespan in which `stream` is idle, a mean over the ranks; 0 for no actions."""
    num_ranks = len({action.rank for action in timed})
    whole_s = num_ranks * makespan_s(timed)
    return 1.0 - sum(busy_s(timed, stream=stream).values()) / whole_s if whole_s > 0 else 0.0


def busy_s(timed: Sequence[TimedAction], *, stream: str = "compute") -> dict[int, float]:
    """Return the seconds in which each rank has something in `stream`; what runs inside another action counts once."""
    busy: dict[int, float] = {}
    until: dict[int, float] = {}
    for each in sorted((each for each in timed if each.stream == stream), key=lambda each: each.start_s):
        start_s = max(each.start_s, until.get(each.rank, -math.inf))
        busy[each.rank] = busy.get(each.rank, 0.0) + max(0.0, each.end_s - start_s)
        until[each.rank] = max(each.end_s, start_s)
    return busy


def rank_span_s(timed: Sequence[TimedAction], rank: int, *, stream: str = "compute") -> float:
    """Return the seconds from the first start to the last end of a rank's actions in `stream`; 0 for none.

    The spans of the ranks of a pipeline begin and end one after another, so each may be shorter than the makespan.
    `timed` holds the actions of all ranks.
    """
    return makespan_s([action for action in timed if action.rank == rank and action.stream == stream])


def rank_bubble_s(timed: Sequence[TimedAction], rank: int, *, stream: str = "compute") -> float:
    """Return the idle seconds of `stream` in the span of `rank` among `timed`: the bubble that `formulas` computes."""
    own = [action for action in timed if action.rank == rank]
    return rank_span_s(own, rank, stream=stream) - busy_s(own, stream=stream).get(rank, 0.0)


def _seconds(cost: Cost, rank: int, action: Action) -> float:
    seconds = cost(rank, action)
    if not seconds >= 0:
        raise ScheduleError(
            "cost-negative", f"cost={seconds} s of {action} on rank {rank} is no duration; return a number >= 0"
        )
    return seconds
