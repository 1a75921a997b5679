"""Schedules of what hooks do without a pipeline, one data-parallel step or an evaluation; and what any schedule holds.

`groups` names the ZeRO groups in execution order. The first is the root group, whose parameters are used before
the first block and after the last one (embedding, head): its FORWARD is first and its BACKWARD last, it is
unsharded before any block and resharded after all of them. The next block is always unsharded before the
current one computes; the last one stays whole, since its backward follows its forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from shardwise.schedule.actions import Action, ActionKind, Schedule, ScheduleError
from shardwise.schedule.formulas import held_along


def data_parallel_step(
    groups: Sequence[str],
    num_micro_batches: int,
    *,
    unshard_for_use: bool = False,
    reduce_each_backward: bool = False,
    unshard_after_step: bool = False,
    num_ranks: int = 1,
    recompute: Collection[str] = (),
    ends_kept: bool = True,
) -> Schedule:
    """Generate one optimizer step in which every rank runs all groups on its own micro-batches.

    All STEPs come after all REDUCEs, as clipping by the global norm needs.

    Args:
        groups: names of the ZeRO groups in execution order, the root group first.
        unshard_for_use: rule of `Schedule`, as the next two are: a group is unsharded for each forward and for each
            backward.
        recompute: groups whose forward is run again before their backward (activation checkpointing).
        ends_kept: the root group and the last block are unsharded once, and stay whole from forward to backward.

    Raises ScheduleError on an empty or repeated list of groups, on counts below 1, and on unknown names.
    """
    _check(groups, num_micro_batches, num_ranks)
    if unknown := sorted(set(recompute) - set(groups)):
        raise ScheduleError(
            "recompute-group-unknown", f"recompute={unknown[0]!r} is no group; the groups: {', '.join(groups)}"
        )
    root = groups[0]
    row: list[Action] = []
    for micro_batch in range(num_micro_batches):
        row += _forward(groups, micro_batch, unshard_for_use, keeps_last=ends_kept)
        if unshard_for_use and not ends_kept:
            row += [Action(ActionKind.RESHARD, group=root), Action(ActionKind.UNSHARD, group=root)]
        reduces = reduce_each_backward or micro_batch == num_micro_batches - 1
        for action in _backward(groups, micro_batch, unshard_for_use, ends_kept, recompute):
            row.append(action)
            if reduces and action.kind is ActionKind.BACKWARD:
                row.append(Action(ActionKind.REDUCE, group=action.group))
    for group in groups:
        row.append(Action(ActionKind.STEP, group=group))
        if unshard_after_step:
            row.append(Action(ActionKind.UNSHARD, group=group))
    return Schedule(
        (tuple(row),) * num_ranks,
        unshard_for_use=unshard_for_use,
        reduce_each_backward=reduce_each_backward,
        unshard_after_step=unshard_after_step,
    )


def forward_only(
    groups: Sequence[str], num_micro_batches: int, *, unshard_for_use: bool = False, num_ranks: int = 1
) -> Schedule:
    """Generate an evaluation: the forward of each micro-batch.

    Args:
        groups: names of the ZeRO groups in execution order, the root group first.
        unshard_for_use: rule of `Schedule`: a group is unsharded for its forward.

    Raises ScheduleError on an empty or repeated list of groups and on counts below 1.
    """
    _check(groups, num_micro_batches, num_ranks)
    row: list[Action] = []
    for micro_batch in range(num_micro_batches):
        row += _forward(groups, micro_batch, unshard_for_use, keeps_last=False)
        if unshard_for_use:
            row.append(Action(ActionKind.RESHARD, group=groups[0]))
    return Schedule((tuple(row),) * num_ranks, unshard_for_use=unshard_for_use)


def _forward(groups: Sequence[str], micro_batch: int, unshard_for_use: bool, keeps_last: bool) -> Iterator[Action]:
    """Yield the forward of all groups; blocks are resharded after it, the root group and a kept last block are not."""
    if unshard_for_use:
        yield Action(ActionKind.UNSHARD, group=groups[0])
    for index, group in enumerate(groups):
        if unshard_for_use and index + 1 < len(groups):
            yield Action(ActionKind.UNSHARD, group=groups[index + 1])
        yield Action(ActionKind.FORWARD, micro_batch=micro_batch, group=group)
        is_kept = index == 0 or (keeps_last and index == len(groups) - 1)
        if unshard_for_use and not is_kept:
            yield Action(ActionKind.RESHARD, group=group)


def _backward(
    groups: Sequence[str], micro_batch: int, unshard_for_use: bool, ends_kept: bool, recompute: Collection[str]
) -> Iterator[Action]:
    """Yield the backward of all groups: blocks in reverse, then the root group, which is whole when this begins."""
    root, *blocks = groups
    order = (*reversed(blocks), root)
    if unshard_for_use and blocks and not ends_kept:
        yield Action(ActionKind.UNSHARD, group=order[0])
    for index, group in enumerate(order):
        if unshard_for_use and index + 1 < len(blocks):
            yield Action(ActionKind.UNSHARD, group=order[index + 1])
        if group in recompute:
            yield Action(ActionKind.RECOMPUTE, micro_batch=micro_batch, group=group)
        yield Action(ActionKind.BACKWARD, micro_batch=micro_batch, group=group)
        if unshard_for_use:
            yield Action(ActionKind.RESHARD, group=group)


def _check(groups: Sequence[str], num_micro_batches: int, num_ranks: int) -> None:
    if not groups:
        raise ScheduleError("groups-empty", "groups=[] leaves nothing to run; name at least the root group")
    if len(set(groups)) < len(groups):
        repeated = next(group for group in groups if groups.count(group) > 1)
        raise ScheduleError(
            "group-named-twice", f"group {repeated!r} is named twice; each group stands once, in execution order"
        )
    for name, count in (("num_micro_batches", num_micro_batches), ("num_ranks", num_ranks)):
        if count < 1:
            raise ScheduleError(
                "count-below-one", f"{name}={count} is below 1; a step runs at least one micro-batch on one rank"
            )


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
    return tuple(max(held_along(row, in_flight_bytes, deferred_bytes), default=0) for row in schedule.ranks)
