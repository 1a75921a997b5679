"""Lower a schedule by passes: they insert actions and keep the order of those that are there.

A pipeline's generator writes computations only; `lower` runs the passes, with `verify` after each.

>>> from shardwise.schedule.actions import Schedule
>>> gpipe = Schedule.parse("rank 0: 0F0 0F1 0B0 0B1\\nrank 1: 1F0 1F1 1B0 1B1")
>>> print(lower(gpipe, unshard_after_step=True))
rules: unshard_after_step
rank 0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE 0STEP 0UNSHARD
rank 1: 1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE 1STEP 1UNSHARD
>>> lower(gpipe).compute_only() == gpipe
True
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

from shardwise.schedule.actions import COMPUTATIONS, TRANSFERS, Action, ActionKind, Schedule, ScheduleError
from shardwise.schedule.dependencies import USERS, ActionPlaces, source_of
from shardwise.schedule.verify import verify

Gather = Literal["batch", "micro-batch"]
"""Says how often a stage with parameters stored as shards is gathered: once a batch, or for each computation."""

_WEIGHT_GRADIENTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
_STATE_KINDS = frozenset({ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE, ActionKind.STEP})

_Slots = dict[int, list[Action]]  # what is to be inserted before, or after, the action at an index of a row


def lower(
    schedule: Schedule,
    *,
    unshard_for_use: bool = False,
    reduce_each_backward: bool = False,
    unshard_after_step: bool = False,
    gather: Gather = "batch",
    fetched: Collection[str | None] = (),
    evicted: Collection[str | None] = (),
    stepped: Collection[str | None] = (),
) -> Schedule:
    """Run all passes over a compute-only schedule and verify the result of each.

    Args:
        schedule: computations only, as a generator writes them.
        unshard_for_use, reduce_each_backward, unshard_after_step, gather: as for `insert_gathers`; the other options
            are as for `insert_offload`.

    Raises ScheduleError where the schedule, or what a pass makes of it, cannot run.
    """
    verify(schedule)
    schedule = insert_gathers(
        schedule,
        unshard_for_use=unshard_for_use,
        reduce_each_backward=reduce_each_backward,
        unshard_after_step=unshard_after_step,
        gather=gather,
    )
    verify(schedule)
    schedule = insert_transfers(schedule)
    verify(schedule)
    if fetched or evicted or stepped:
        schedule = insert_offload(schedule, fetched, evicted, stepped)
        verify(schedule)
    return schedule


def insert_transfers(schedule: Schedule) -> Schedule:
    """Write SEND after each computation that makes a payload for another rank, and RECEIVE before its use.

    RECEIVE only posts a receive, and the computation that uses the payload waits for it. So RECEIVE is written one
    computation earlier, which hides the transfer. Each ordered pair of ranks is one channel, which delivers in order:
    where a payload sent later is used earlier, the receives of all payloads sent before it move up. Stages of one
    rank pass payloads directly. Raises ScheduleError where transfers are written already.
    """
    _refuse_twice(schedule, TRANSFERS, "insert_transfers")
    places = ActionPlaces.of(schedule)
    sends: list[_Slots] = [{} for _ in schedule.ranks]
    received: dict[tuple[int, int], list[tuple[int, int, Action]]] = {}  # by channel: where made, where used
    for (rank, _, payload, stage, micro_batch), (_, made_at) in places.flow.items():
        user = stage - source_of(payload)
        peer = places.peer(rank, stage, user)
        if peer is None or peer == rank or (peer, None, payload, user, micro_batch) not in places.flow:
            continue
        used_at, _ = places.flow[peer, None, payload, user, micro_batch]
        sends[rank].setdefault(made_at, []).append(Action(ActionKind.SEND, stage, micro_batch, payload=payload))
        receive = Action(ActionKind.RECEIVE, user, micro_batch, payload=payload)
        received.setdefault((rank, peer), []).append((made_at, used_at, receive))
    receives: list[_Slots] = [{} for _ in schedule.ranks]
    for (_, rank), transfers in sorted(received.items()):
        _post(transfers, _computation_before(schedule.ranks[rank]), receives[rank])
    rows = zip(schedule.ranks, receives, sends, strict=True)
    return replace(schedule, ranks=tuple(tuple(_inserted(*slots)) for slots in rows))


def _post(transfers: list[tuple[int, int, Action]], slot_of: Sequence[int], slots: _Slots) -> None:
    """Give each receive of a channel its slot: one computation early, and not after one that is sent later."""
    transfers.sort(key=lambda transfer: transfer[0])
    latest = len(slot_of)
    posted = []
    for _, used_at, receive in reversed(transfers):
        latest = min(latest, slot_of[used_at])
        posted.append((latest, receive))
    for slot, receive in reversed(posted):
        slots.setdefault(slot, []).append(receive)


def _computation_before(row: Sequence[Action]) -> list[int]:
    """Return for each index of a row that of the computation before it; its own where there is none."""
    indices = []
    last = None
    for index, action in enumerate(row):
        indices.append(index if last is None else last)
        if action.kind in COMPUTATIONS:
            last = index
    return indices


def insert_gathers(
    schedule: Schedule,
    *,
    unshard_for_use: bool,
    reduce_each_backward: bool,
    unshard_after_step: bool,
    gather: Gather = "batch",
) -> Schedule:
    """Set the rules of a schedule and write UNSHARD, RESHARD, REDUCE and STEP of whole stages.

    A stage that is not trained (a frozen one, an evaluation) gets neither REDUCE nor STEP. STEPs come after all
    REDUCEs of the row, as clipping by the global norm needs.

    Args:
        schedule: computations of whole stages, with or without transfers.
        unshard_for_use: parameters are stored as shards (ZeRO 3).
        reduce_each_backward: REDUCE after each backward (split backwards: each BACKWARD_WEIGHT), else after the last.
        unshard_after_step: STEP updates shards of parameters that are stored whole (ZeRO 1 and 2); UNSHARD after STEP.
        gather: under `unshard_for_use`, "batch" keeps a stage whole from its first use to its last, and unshards it one
            computation early to hide the gather; "micro-batch" unshards and reshards around each computation that uses
            parameters.

    Raises ScheduleError on another `gather`, on rules that contradict, and where such actions are written already.
    """
    if gather not in get_args(Gather):
        raise ScheduleError(
            "gather-unknown", f"gather={gather!r} is no way to gather a stage; use {' or '.join(get_args(Gather))}"
        )
    _refuse_twice(schedule, _STATE_KINDS, "insert_gathers")
    rows = []
    for row in schedule.ranks:
        before: _Slots = {}
        after: _Slots = {}
        _reduce(row, reduce_each_backward, after)
        if unshard_for_use:
            _gather(row, gather, before, after)
        trained = sorted({action.stage for action in row if action.kind in _WEIGHT_GRADIENTS})
        rows.append((*_inserted(row, before, after), *_steps(trained, unshard_after_step)))
    return Schedule(tuple(rows), unshard_for_use, reduce_each_backward, unshard_after_step)


def _reduce(row: Sequence[Action], each_backward: bool, after: _Slots) -> None:
    makers = _by_stage(row, _WEIGHT_GRADIENTS)
    for stage, indices in makers.items():
        for index in indices if each_backward else indices[-1:]:
            after.setdefault(index, []).append(Action(ActionKind.REDUCE, stage))


def _gather(row: Sequence[Action], gather: Gather, before: _Slots, after: _Slots) -> None:
    early = _computation_before(row)
    for stage, uses in _by_stage(row, USERS).items():
        for first, last in [(early[uses[0]], uses[-1])] if gather == "batch" else zip(uses, uses, strict=True):
            before.setdefault(first, []).append(Action(ActionKind.UNSHARD, stage))
            after.setdefault(last, []).append(Action(ActionKind.RESHARD, stage))


def _by_stage(row: Sequence[Action], kinds: Collection[ActionKind]) -> dict[int, list[int]]:
    """Return by stage the indices of the actions of some kinds."""
    indices: dict[int, list[int]] = {}
    for index, action in enumerate(row):
        if action.kind in kinds:
            indices.setdefault(action.stage, []).append(index)
    return indices


def _steps(stages: Iterable[int], unshard_after_step: bool) -> Iterator[Action]:
    yield from (Action(ActionKind.STEP, stage) for stage in stages)
    if unshard_after_step:
        yield from (Action(ActionKind.UNSHARD, stage) for stage in stages)


def insert_offload(
    schedule: Schedule,
    fetched: Collection[str | None] = (),
    evicted: Collection[str | None] = (),
    stepped: Collection[str | None] = (),
) -> Schedule:
    """Write FETCH before each action that needs states on the device, and EVICT after it.

    None among the groups stands for the actions about whole stages, as pipelines have them.

    Args:
        schedule: with an action for each group's unshards, reductions and steps.
        fetched: groups whose parameters are stored off the device, as shards; FETCH before each UNSHARD.
        evicted: groups whose gradients are stored off the device; EVICT after each REDUCE.
        stepped: groups whose optimizer states are stored off the device but stepped on it; FETCH before each STEP
            and EVICT after it.
    """
    fetches = {(ActionKind.UNSHARD, group) for group in fetched} | {(ActionKind.STEP, group) for group in stepped}
    evicts = {(ActionKind.REDUCE, group) for group in evicted} | {(ActionKind.STEP, group) for group in stepped}
    rows = tuple(tuple(_with_moves(row, fetches, evicts)) for row in schedule.ranks)
    return replace(schedule, ranks=rows)


def _with_moves(
    row: Sequence[Action],
    fetches: Collection[tuple[ActionKind, str | None]],
    evicts: Collection[tuple[ActionKind, str | None]],
) -> Iterator[Action]:
    for action in row:
        if (action.kind, action.group) in fetches:
            yield Action(ActionKind.FETCH, stage=action.stage, group=action.group)
        yield action
        if (action.kind, action.group) in evicts:
            yield Action(ActionKind.EVICT, stage=action.stage, group=action.group)


def _inserted(row: Sequence[Action], before: _Slots, after: _Slots) -> Iterator[Action]:
    for index, action in enumerate(row):
        yield from before.get(index, ())
        yield action
        yield from after.get(index, ())


def _refuse_twice(schedule: Schedule, kinds: Collection[ActionKind], name: str) -> None:
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            if action.kind in kinds:
                text = f"{action} on rank {rank} is there before {name} has run"
                raise ScheduleError("pass-run-twice", f"{text}; a pass runs once, begin with schedule.compute_only()")
