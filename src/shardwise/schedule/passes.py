"""Passes that lower a schedule: they insert actions, and change no order of those that are there.

>>> from shardwise.schedule.generators import data_parallel_step
>>> step = data_parallel_step(["root", "b0"], 1, unshard_for_use=True, reduce_each_backward=True)
>>> print(insert_offload(step, fetched=["b0"], evicted=["b0"]))
rules: unshard_for_use reduce_each_backward
rank 0: 0UNSHARD[root] 0FETCH[b0] 0UNSHARD[b0] 0F0[root] 0F0[b0] 0B0[b0] 0REDUCE[b0] 0EVICT[b0] \
0RESHARD[b0] 0B0[root] 0REDUCE[root] 0RESHARD[root] 0STEP[root] 0STEP[b0]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from shardwise.schedule.actions import Action, Kind, Schedule


def insert_offload(schedule: Schedule, fetched: Collection[str] = (), evicted: Collection[str] = ()) -> Schedule:
    """Bring parameters to the device before each gather, and take gradients away behind each reduction.

    Args:
        schedule: with a group for each of its unshards and reductions.
        fetched: the groups whose parameters rest off the device, as shards.
        evicted: the groups whose gradients do.
    """
    rows = tuple(tuple(_with_moves(row, fetched, evicted)) for row in schedule.ranks)
    return replace(schedule, ranks=rows)


def _with_moves(row: Sequence[Action], fetched: Collection[str], evicted: Collection[str]) -> Iterator[Action]:
    for action in row:
        if action.kind is Kind.UNSHARD and action.group in fetched:
            yield Action(Kind.FETCH, stage=action.stage, group=action.group)
        yield action
        if action.kind is Kind.REDUCE and action.group in evicted:
            yield Action(Kind.EVICT, stage=action.stage, group=action.group)
