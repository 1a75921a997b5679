"""What becomes of a group's parameters and gradients in a schedule: states, legal moves, why others are not.

Tables, and one walk of a row over them; it says nothing about data, ranks or time.

>>> from shardwise.schedule.actions import Schedule
>>> schedule = Schedule.parse("rules: unshard_for_use\\nrank 0: 0UNSHARD 0RESHARD")
>>> next(misuses(schedule, parameters(schedule)))
('0RESHARD on rank 0 reshards what nothing has used after action 0; move it behind its use', (0, 1))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from shardwise.schedule.actions import Action, Kind, Schedule
from shardwise.schedule.dependencies import USERS, Position, stage_groups, touched


class Parameters(Enum):
    """What a rank has of a group's parameters; STALE copies are older than the shards that a STEP updated."""

    SHARDED = "sharded"
    UNUSED = "unsharded, for no use yet"
    WHOLE = "unsharded"
    STALE = "older than the last STEP"


class Gradients(Enum):
    """What a rank has of a group's gradients."""

    NONE = "none"
    UNREDUCED = "not reduced"
    REDUCED = "reduced"
    STEPPED = "stepped on"


@dataclass(frozen=True, slots=True)
class Machine:
    """The first state, the legal moves, and rule and cure of each illegal one and of each bad end."""

    start: Enum
    moves: Mapping[tuple[Kind, Enum], Enum]
    wrong: Mapping[tuple[Kind, Enum], str]
    wrong_at_end: Mapping[Enum, str]


def parameters(schedule: Schedule) -> Machine:
    """SHARDED -UNSHARD-> UNUSED -use-> WHOLE -RESHARD-> SHARDED; STEP on shards makes copies STALE."""
    sharded, unused, whole, stale = Parameters
    steps_shards = schedule.unshard_for_use or schedule.unshard_after_step
    moves: dict[tuple[Kind, Enum], Enum] = {
        **{(kind, state): whole for kind in USERS for state in (unused, whole)},
        **{(Kind.UNSHARD, state): unused for state in (sharded, stale)},
        **{(Kind.RESHARD, state): sharded for state in (whole, stale)},
        **{(Kind.STEP, state): stale if steps_shards else state for state in (unused, whole, stale)},
        (Kind.STEP, sharded): sharded,
    }
    wrong: dict[tuple[Kind, Enum], str] = {
        **{
            (kind, state): "uses parameters that are {state}{since}; put {unshard} before it"
            for kind in USERS
            for state in (sharded, stale)
        },
        **{(Kind.UNSHARD, state): "unshards what is {state}{since}; drop it" for state in (unused, whole)},
        (Kind.RESHARD, sharded): "reshards what is {state}{since}; drop it",
        (Kind.RESHARD, unused): "reshards what nothing has used{since}; move it behind its use",
    }
    if schedule.unshard_for_use:
        left = "leaves parameters {state}, which rest as shards; add {reshard}"
        return Machine(sharded, moves, wrong, dict.fromkeys((unused, whole, stale), left))
    left = "leaves parameters {state}, which rest whole and up to date; add {unshard}"
    return Machine(whole, moves, wrong, dict.fromkeys((sharded, stale), left))


def gradients(schedule: Schedule) -> Machine:
    """NONE -backward-> UNREDUCED -REDUCE-> REDUCED -STEP-> STEPPED; by the rules, backward may come again.

    A schedule without any REDUCE is not lowered so far: its gradients stay as the backward leaves them.
    """
    none, unreduced, reduced, stepped = Gradients
    makers = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    again = reduced if schedule.reduce_each_backward else unreduced
    moves: dict[tuple[Kind, Enum], Enum] = {
        **{(kind, state): unreduced for kind in makers for state in (none, again)},
        (Kind.REDUCE, unreduced): reduced,
        (Kind.STEP, reduced): stepped,
    }
    early = "adds to gradients that are {state}{since}, against reduce_each_backward; put {reduce} between"
    late = "adds to gradients that are {state}{since}; this is done once, move {reduce} behind it"
    behind = "adds to gradients that are {state}{since}; move {step} behind it"
    wrong: dict[tuple[Kind, Enum], str] = {
        **{(kind, unreduced): early for kind in makers},
        **{(kind, reduced): late for kind in makers},
        **{(kind, stepped): behind for kind in makers},
        (Kind.REDUCE, none): "finds no gradients to reduce; move it behind their backward",
        (Kind.REDUCE, reduced): "reduces what is {state}{since}; drop it, or move it behind a backward",
        (Kind.REDUCE, stepped): "reduces what is {state}{since}; move {step} behind it, or drop it",
        (Kind.STEP, none): "finds no gradients to step on; move it behind {reduce}",
        (Kind.STEP, unreduced): "steps on gradients that are {state}{since}; put {reduce} before it",
        (Kind.STEP, stepped): "steps on what is {state}{since}; drop it",
    }
    wrong_at_end: dict[Enum, str] = {reduced: "makes gradients that nothing steps on; add {step}"}
    if any(action.kind is Kind.REDUCE for row in schedule.ranks for action in row):
        wrong_at_end[unreduced] = "makes gradients that nothing reduces; add {reduce}"
    return Machine(none, moves, wrong, wrong_at_end)


def misuses(schedule: Schedule, machine: Machine) -> Iterator[tuple[str, Position]]:
    """Walk each row; yields each illegal move and each bad end: value, rule and cure in a line, and where."""
    kinds = {kind for kind, _ in machine.moves}
    for rank, row in enumerate(schedule.ranks):
        groups = stage_groups(row)
        states: dict[tuple[int, str | None], tuple[Enum, int | None]] = {}
        for index, action in enumerate(row):
            for group in touched(action, groups) if action.kind in kinds else ():
                state, since = states.get((action.stage, group), (machine.start, None))
                move = (action.kind, state)
                if move not in machine.moves:
                    text = _worded(machine.wrong[move], action, group, state, since)
                    yield f"{action} on rank {rank} {text}", (rank, index)
                states[action.stage, group] = machine.moves.get(move, state), index
        for (_, group), (state, last) in states.items():
            if last is not None and state in machine.wrong_at_end:
                text = _worded(machine.wrong_at_end[state], row[last], group, state, last)
                yield f"{row[last]} on rank {rank} {text}", (rank, last)


def _worded(text: str, action: Action, group: str | None, state: Enum, since: int | None) -> str:
    cures = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE, Kind.STEP)
    named = {kind.name.lower(): str(Action(kind, action.stage, group=group)) for kind in cures}
    return text.format(state=state.value, since="" if since is None else f" after action {since}", **named)
