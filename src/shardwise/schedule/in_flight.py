"""Count what a schedule holds at its peak: micro-batches between forward and backward, and deferred gradients.

A stage activation is what a stage keeps of one micro-batch for its backward. It is *in flight* from FORWARD
until BACKWARD or BACKWARD_INPUT has ended. What BACKWARD_INPUT leaves for the gradients of the weights is
*deferred* until BACKWARD_WEIGHT has ended. A forward without a backward, as in an evaluation, holds its activation
only while it runs.

>>> from shardwise.schedule.pipelines import one_f_one_b, zero_bubble_h1
>>> num_in_flight(one_f_one_b(4, 8))
(4, 3, 2, 1)
>>> num_deferred(zero_bubble_h1(4, 8))
(1, 2, 3, 4)
>>> peak_held_bytes(zero_bubble_h1(4, 8), in_flight_bytes=34, deferred_bytes=32)
(136, 134, 132, 130)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from shardwise.schedule.actions import Action, ActionKind, Schedule, ScheduleError
from shardwise.schedule.channels import Flaw

_ENDS_IN_FLIGHT = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
_SPLIT = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


def num_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return for each rank the most stage activations in flight at once."""
    return tuple(int(peak) for peak in peak_held_bytes(schedule, 1, 0))


def num_deferred(schedule: Schedule) -> tuple[int, ...]:
    """Return for each rank the most (stage, micro-batch) pairs at once whose BACKWARD_WEIGHT is still to come."""
    return tuple(int(peak) for peak in peak_held_bytes(schedule, 0, 1))


def peak_held_bytes(schedule: Schedule, in_flight_bytes: float, deferred_bytes: float) -> tuple[float, ...]:
    """Return for each rank the most bytes held at once.

    Args:
        schedule: with its computations; other actions hold nothing.
        in_flight_bytes: bytes of a stage activation in flight, M_B of Qi et al. 2023 (arXiv 2401.10241), section 2.3.
        deferred_bytes: bytes kept for a deferred gradient of weights, M_W there.
    """
    return tuple(max(_held(row, in_flight_bytes, deferred_bytes), default=0) for row in schedule.ranks)


def flaws(schedule: Schedule, limits: Sequence[int]) -> Iterator[Flaw]:
    """Yield where a rank first has more in flight than its limit; raise ScheduleError unless each rank has a limit."""
    if len(limits) != len(schedule.ranks):
        text = f"max_in_flight={list(limits)} bounds {len(limits)} ranks of {len(schedule.ranks)}"
        raise ScheduleError("activation-bounds", f"{text}; give one bound for each rank")
    for rank, (row, limit) in enumerate(zip(schedule.ranks, limits, strict=True)):
        for index, held in enumerate(_held(row, 1, 0)):
            if held > limit:
                text = f"{row[index]} on rank {rank} puts {int(held)} stage activations in flight, against {limit}"
                yield "activations-over-limit", f"{text} allowed; move it after a backward", ((rank, index),)
                break


def _held(row: Sequence[Action], in_flight_bytes: float, deferred_bytes: float) -> list[float]:
    """Return what is held during each action of a row.

    Where a row names a stage's groups, the stage holds from its first group's forward to its last group's backward.
    """
    first: dict[tuple[int, int | None], int] = {}
    last: dict[tuple[ActionKind, int, int | None], int] = {}
    for index, action in enumerate(row):
        if action.kind is ActionKind.FORWARD:
            first.setdefault((action.stage, action.micro_batch), index)
        last[action.kind, action.stage, action.micro_batch] = index
    # What is held during action k is the sum of the changes up to k.
    changes: list[float] = [0] * (len(row) + 1)
    for key, start in first.items():
        end = max(last.get((kind, *key), start) for kind in _ENDS_IN_FLIGHT)
        changes[start] += in_flight_bytes
        changes[end + 1] -= in_flight_bytes
        begin, finish = (last.get((kind, *key), end) for kind in _SPLIT)
        changes[begin + 1] += deferred_bytes
        changes[finish + 1] -= deferred_bytes
    return list(accumulate(changes[:-1]))
