"""Prove that a schedule can run and means one optimizer step or evaluation; explain a flaw, and where it is.

The verifier runs nothing and prices nothing. A schedule may be lowered in part: without any transfer, stages pass
payloads directly; without any REDUCE, gradients stay as they are. Beside the dependency relation, a schedule must
keep these rules:

- every micro-batch runs forward once through each (stage, group), backward once through each that is trained;
  the groups of a stage form a chain, run in one order forward and in its reverse backward;
- the parameters and gradients of each (rank, stage, group) change only as `parameters` and `gradients` allow, and
  end in a legal state;
- transfers are complete, and both ends of a channel have them in one order (`_transfers`);
- the replicas of a stage issue the same collectives in the same order;
- issued in order, where a computation delays everything that is written after it, every row reaches its end. SEND and
  RECEIVE delay nothing: a RECEIVE posts, a SEND is complete when its RECEIVE is posted and those before it on its
  channel are. Since both ends have one order, the wait of a SEND is that of its RECEIVE, and adds none;
- where limits are given, no rank holds the activations of more (stage, micro-batch) pairs at once.

>>> from shardwise.schedule.actions import Schedule
>>> verify(Schedule.parse("rank 0: 0F0 0B0 0REDUCE 0STEP"))
>>> verify(Schedule.parse("rank 0: 0F0 0B0 0STEP 0REDUCE"))
Traceback (most recent call last):
    ...
shardwise.schedule.actions.ScheduleError: 0STEP on rank 0 steps on gradients that are \
not reduced after action 1; put 0REDUCE before it
rank 0: 0F0 0B0 0STEP 0REDUCE
                ^^^^^ action 2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, pairwise, zip_longest

from shardwise.schedule.actions import (
    COLLECTIVES,
    COMPUTATIONS,
    TRANSFERS,
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
)
from shardwise.schedule.dependencies import (
    USERS,
    ActionPlaces,
    Follows,
    Position,
    dependencies,
    execution_order,
    other_end,
    source_of,
    stage_groups,
    touched,
)
from shardwise.schedule.formulas import held_along

_BACKWARDS = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT})
_TRAINS = _BACKWARDS | {ActionKind.REDUCE, ActionKind.STEP}
_SPLIT = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
_NUM_NAMED = 8  # actions of a deadlock that are written out
_NUM_ROWS = 4  # rows that are written below a flaw
_NUM_NEAR = 4  # actions on each side of it
_CodeAndText = tuple[str, str]
_Found = dict[tuple[int, Action], int]  # rank and transfer -> index

Flaw = tuple[str, str, tuple[Position, ...]]
"""A flaw has a code, a line with value, rule and fix, and the positions concerned."""


def verify(schedule: Schedule, max_in_flight: Sequence[int] | None = None) -> None:
    """Raise ScheduleError, with the rows near the place, unless the schedule can run and does what its rules say.

    Args:
        schedule: of any kind; it may be lowered in part.
        max_in_flight: for each rank, the most stage activations at once, from forward to backward; None: any.
    """
    places = ActionPlaces.of(schedule)
    follows = dependencies(schedule)
    machines = (parameters(schedule), gradients(schedule))
    flaws: Iterator[Flaw] = chain(
        _computations(schedule),
        _stages(schedule, places),
        _transfers(schedule, places),
        _collectives(schedule, places),
        _rows(schedule, follows),
        _chains(schedule),
        *(misuses(schedule, machine) for machine in machines),
        _deadlock(schedule, follows),
        () if max_in_flight is None else _over_limit(schedule, max_in_flight),
    )
    for code, text, positions in flaws:
        raise ScheduleError(code, "\n".join([text, *_rows_near(schedule, positions)]))


def _rows_near(schedule: Schedule, places: Sequence[Position]) -> Iterator[str]:
    """Yield of each rank of the places, up to a few, its row near the first of them, with arrows under that action."""
    first_of = dict(reversed(places))
    for rank in list(dict.fromkeys(rank for rank, _ in places))[:_NUM_ROWS]:
        row, index = schedule.ranks[rank], first_of[rank]
        start, stop = max(0, index - _NUM_NEAR), index + _NUM_NEAR + 1
        before = " ".join([f"rank {rank}:", *["..."] * (start > 0), *map(str, row[start:index])])
        yield " ".join([before, *map(str, row[index:stop]), *["..."] * (stop < len(row))])
        yield f"{' ' * len(before)} {'^' * len(str(row[index]))} action {index}"


def _computations(schedule: Schedule) -> Iterator[Flaw]:
    """Yield each missing or repeated computation: each micro-batch runs once through each group of each stage."""
    micro_batches = {a.micro_batch for row in schedule.ranks for a in row if a.kind in COMPUTATIONS}
    num_micro_batches = 1 + max((m for m in micro_batches if m is not None), default=-1)
    if num_micro_batches == 0:
        yield (
            "schedule-without-forward",
            "a schedule without FORWARD computes nothing; a step has at least one, add it",
            (),
        )
    for rank, row in enumerate(schedule.ranks):
        seen: dict[tuple[int, str | None, int | None], dict[ActionKind, int]] = {}
        about: dict[tuple[int, str | None], list[int]] = {}
        groups = stage_groups(row)
        for index, action in enumerate(row):
            for group in touched(action, groups):
                about.setdefault((action.stage, group), []).append(index)
                if action.kind in COMPUTATIONS:
                    kinds = seen.setdefault((action.stage, group, action.micro_batch), {})
                    if kinds.setdefault(action.kind, index) != index:
                        text = f"{action} on rank {rank} is there twice; a computation runs once, drop one"
                        yield "computation-repeated", text, ((rank, kinds[action.kind]), (rank, index))
        for (stage, group), indices in about.items():
            trained = any(row[index].kind in _TRAINS for index in indices)
            for micro_batch in range(num_micro_batches):
                kinds = seen.get((stage, group, micro_batch), {})
                for kind in _missing(kinds, trained):
                    action = Action(kind, stage, micro_batch, group)
                    text = f"{action} is missing on rank {rank}; a micro-batch runs every group, add it"
                    yield "computation-missing", text, ((rank, max(kinds.values(), default=indices[0])),)
                for half_kind in _SPLIT:
                    if half_kind in kinds and ActionKind.BACKWARD in kinds:
                        both = (kinds[ActionKind.BACKWARD], kinds[half_kind])
                        whole_at, half = (row[index] for index in both)
                        text = f"{whole_at} and {half} on rank {rank} make one gradient twice; drop either"
                        yield "gradient-made-twice", text, tuple((rank, index) for index in both)


def _missing(kinds: Mapping[ActionKind, int], trained: bool) -> list[ActionKind]:
    """Return the kinds that a micro-batch still needs of a group that has run `kinds` of it."""
    if ActionKind.FORWARD not in kinds:
        return [ActionKind.FORWARD]
    if not trained or ActionKind.BACKWARD in kinds:
        return []
    absent = [kind for kind in _SPLIT if kind not in kinds]
    return [ActionKind.BACKWARD] if len(absent) == len(_SPLIT) else absent


def _stages(schedule: Schedule, places: ActionPlaces) -> Iterator[Flaw]:
    """Yield each stage with another number of replicas than the one before, and each backward that lacks a source."""
    holders = places.holders
    last_backward = {
        action.stage: (rank, index)
        for rank, row in enumerate(schedule.ranks)
        for index, action in enumerate(row)
        if action.kind in _BACKWARDS
    }
    for stage in range(1 + max(holders, default=-1)):
        num_here, num_before = len(holders.get(stage, ())), len(holders.get(stage - 1, ()))
        if stage > 0 and num_here != num_before:
            text = f"stage {stage} is on {num_here} ranks and stage {stage - 1} on {num_before}"
            known_on = holders.get(stage) or holders[max(holders)]
            rule = "each replica of a stage feeds one of the next, give both as many"
            yield "stage-replicas-differ", f"{text}; {rule}", ((known_on[0], 0),)
        if stage - 1 in last_backward and stage not in last_backward:
            rank, index = last_backward[stage - 1]
            action = schedule.ranks[rank][index]
            text = f"{action} on rank {rank} needs gradients of stage {stage}, which has no backward; add it"
            yield "stage-without-backward", text, ((rank, index),)


def _transfers(schedule: Schedule, places: ActionPlaces) -> Iterator[Flaw]:
    """Yield each transfer without maker, partner or user, each missing one, and each channel that is out of order.

    Each ordered pair of ranks is one channel: the n-th RECEIVE takes what the n-th SEND gave, whatever their names.
    Both directions between two ranks, and channels of other pairs, are independent of each other.
    """
    transfers: _Found = {}
    for rank, row in enumerate(schedule.ranks):
        for index, action in enumerate(row):
            if action.kind in TRANSFERS and transfers.setdefault((rank, action), index) != index:
                text = f"{action} on rank {rank} is there twice; a payload is sent once, drop one"
                yield "transfer-repeated", text, ((rank, transfers[rank, action]), (rank, index))
    if transfers:
        yield from _unmatched(transfers, places)
        yield from _left_out(schedule, transfers, places)
        yield from _disorder(schedule, transfers, places)


def _unmatched(found: _Found, places: ActionPlaces) -> Iterator[Flaw]:
    for (rank, action), index in found.items():
        positions = ((rank, index),)
        stage = other_end(action)
        peer = places.partner(rank, action)
        if peer is None:
            yield (
                "transfer-without-partner",
                f"{action} on rank {rank} has no partner; no rank computes stage {stage}, drop it",
                positions,
            )
        elif peer == rank:
            yield (
                "transfer-within-rank",
                f"{action} on rank {rank} stays on its rank; there stages hand over directly, drop it",
                positions,
            )
        elif (peer, partner := _other_side(action, stage)) not in found:
            yield (
                "transfer-unmatched",
                f"{action} on rank {rank} is unmatched; add {partner} on rank {peer}, or drop it",
                positions,
            )
        elif (rank, None, action.payload, action.stage, action.micro_batch) not in places.flow:
            text = "sends what nothing computes" if action.kind is ActionKind.SEND else "receives what nothing uses"
            yield (
                "transfer-without-computation",
                f"{action} on rank {rank} {text}; add the computation, or drop both ends",
                positions,
            )


def _other_side(transfer: Action, stage: int) -> Action:
    kind = ActionKind.RECEIVE if transfer.kind is ActionKind.SEND else ActionKind.SEND
    return Action(kind, stage, transfer.micro_batch, payload=transfer.payload)


def _left_out(schedule: Schedule, found: _Found, places: ActionPlaces) -> Iterator[Flaw]:
    """Yield each use of a payload that another rank makes and no RECEIVE brings."""
    for (rank, kind, payload, stage, micro_batch), (index, _) in places.flow.items():
        source = stage + source_of(payload)
        peer = None if kind is not None else places.peer(rank, stage, source)
        if peer is None or peer == rank or (peer, None, payload, source, micro_batch) not in places.flow:
            continue
        receive = Action(ActionKind.RECEIVE, stage, micro_batch, payload=payload)
        if (rank, receive) not in found:
            send = Action(ActionKind.SEND, source, micro_batch, payload=payload)
            text = f"{schedule.ranks[rank][index]} on rank {rank} uses what nothing brings from rank {peer}"
            yield "receive-missing", f"{text}; add {send} there and {receive} here", ((rank, index),)


def _disorder(schedule: Schedule, found: _Found, places: ActionPlaces) -> Iterator[Flaw]:
    """Yield each pair of transfers that the two ends of a channel have in different orders."""
    ends: dict[tuple[int, int], tuple[list[int], list[int]]] = {}  # sender, receiver -> indices there
    for (rank, action), index in found.items():
        peer = places.partner(rank, action)
        if peer is not None:
            sends = action.kind is ActionKind.SEND
            channel = ends.setdefault((rank, peer) if sends else (peer, rank), ([], []))
            channel[0 if sends else 1].append(index)
    for (sender, receiver), channel in ends.items():
        for sent_at, received_at in zip(*channel, strict=True):
            send, receive = schedule.ranks[sender][sent_at], schedule.ranks[receiver][received_at]
            payload_sent = other_end(send), send.micro_batch, send.payload
            if payload_sent != (receive.stage, receive.micro_batch, receive.payload):
                text = f"{receive} on rank {receiver} takes what {send} on rank {sender} gives"
                rule = "a channel delivers in order, align the two"
                yield "channel-out-of-order", f"{text}; {rule}", ((receiver, received_at), (sender, sent_at))


def _over_limit(schedule: Schedule, limits: Sequence[int]) -> Iterator[Flaw]:
    """Yield where a rank first has more in flight than its limit; raise ScheduleError unless each rank has a limit."""
    if len(limits) != len(schedule.ranks):
        text = f"max_in_flight={list(limits)} bounds {len(limits)} ranks of {len(schedule.ranks)}"
        raise ScheduleError("activation-bounds", f"{text}; give one bound for each rank")
    for rank, (row, limit) in enumerate(zip(schedule.ranks, limits, strict=True)):
        for index, in_flight in enumerate(held_along(row, 1, 0)):
            if in_flight > limit:
                text = f"{row[index]} on rank {rank} puts {int(in_flight)} stage activations in flight, against {limit}"
                yield "activations-over-limit", f"{text} allowed; move it after a backward", ((rank, index),)
                break


def _collectives(schedule: Schedule, places: ActionPlaces) -> Iterator[Flaw]:
    """Yield where the replicas of a stage issue different collectives of a kind, or in another order."""
    for stage, holders in places.holders.items():
        for kind in sorted(COLLECTIVES, key=lambda kind: kind.value):
            issued = [
                [(rank, i) for i, a in enumerate(schedule.ranks[rank]) if a.kind is kind and a.stage == stage]
                for rank in holders
            ]
            for other_rank, other in zip(holders[1:], issued[1:], strict=True):
                for first_position, other_position in zip_longest(issued[0], other):
                    mine, theirs = (_text_at(schedule, position) for position in (first_position, other_position))
                    if mine != theirs:
                        text = f"rank {holders[0]} issues {mine} where rank {other_rank} issues {theirs}"
                        rule = "replicas issue the same collectives in the same order, align them"
                        both = tuple(position for position in (first_position, other_position) if position is not None)
                        yield "replica-collectives-differ", f"{text}; {rule}", both


def _text_at(schedule: Schedule, place: Position | None) -> str:
    return "nothing" if place is None else str(schedule.ranks[place[0]][place[1]])


def _rows(schedule: Schedule, follows: Follows) -> Iterator[Flaw]:
    """Yield each action that is written before one of its own rank that it must follow."""
    for (rank, index), earlier in follows.items():
        for other_rank, other in earlier:
            if other_rank == rank and other > index:
                row = schedule.ranks[rank]
                text = f"{row[index]} on rank {rank} stands before {row[other]}, which it must follow"
                yield "action-out-of-order", f"{text}; move it after that", ((rank, index), (rank, other))


def _chains(schedule: Schedule) -> Iterator[Flaw]:
    """Yield where a stage's groups do not run in one order in every forward and its reverse in every backward."""
    for rank, row in enumerate(schedule.ranks):
        place_in: dict[int, dict[str, int]] = {}
        runs: dict[tuple[int, bool, int | None], list[tuple[int, str]]] = {}
        for index, action in enumerate(row):
            if action.group is not None and action.kind in (
                ActionKind.FORWARD,
                ActionKind.BACKWARD,
                ActionKind.BACKWARD_INPUT,
            ):
                is_forward = action.kind is ActionKind.FORWARD
                key = (action.stage, is_forward, action.micro_batch)
                runs.setdefault(key, []).append((index, action.group))
                if is_forward:
                    order = place_in.setdefault(action.stage, {})
                    order.setdefault(action.group, len(order))
        for (stage, is_forward, _), run in runs.items():
            order = place_in.get(stage, {})
            ordered = [(index, order[group]) for index, group in run if group in order]
            for (first, group_place), (second, next_place) in pairwise(ordered):
                if (group_place < next_place) != is_forward:
                    text = f"{row[second]} on rank {rank} comes after {row[first]}"
                    rule = "groups run forward in one order and backward in its reverse, swap the two"
                    yield "groups-out-of-order", f"{text}; {rule}", ((rank, first), (rank, second))


def _deadlock(schedule: Schedule, follows: Follows) -> Iterator[Flaw]:
    """Issue every row in order, waiting for each computation, and yield the circle of a deadlock."""
    issued = dict(follows)
    for rank, row in enumerate(schedule.ranks):
        computation: tuple[Position, ...] = ()
        for index, action in enumerate(row):
            issued[rank, index] = follows[rank, index] + computation
            if action.kind in COMPUTATIONS:
                computation = ((rank, index),)
    _, blocked = execution_order(schedule, issued)
    if not blocked:
        return
    path = dict.fromkeys([min(blocked)])
    while (waits_for := blocked[next(reversed(path))][0]) not in path:
        path[waits_for] = None
    steps = list(path)
    circle = [*steps[steps.index(waits_for) :], waits_for]
    names = [f"{schedule.ranks[rank][index]} on rank {rank}" for rank, index in circle]
    if len(names) > _NUM_NAMED:
        half = _NUM_NAMED // 2
        names[half:-half] = [f"{len(names) - 2 * half} others"]
    text = f"deadlock: {' waits for '.join(names)}; issue one of them earlier"
    yield "schedule-deadlock", text, tuple(circle[:-1])


class ParameterStates(Enum):
    """Say what a rank has of a group's parameters; STALE copies are older than the shards that a STEP updated."""

    SHARDED = "sharded"
    UNUSED = "unsharded, for no use yet"
    WHOLE = "unsharded"
    STALE = "older than the last STEP"


class GradientStates(Enum):
    """Say what a rank has of a group's gradients."""

    NONE = "none"
    UNREDUCED = "not reduced"
    REDUCED = "reduced"
    STEPPED = "stepped on"


@dataclass(frozen=True, slots=True)
class StateMachine:
    """Hold the first state, the legal moves, and code, rule and fix of each illegal move and of each bad end."""

    start: Enum
    moves: Mapping[tuple[ActionKind, Enum], Enum]
    wrong: Mapping[tuple[ActionKind, Enum], _CodeAndText]
    wrong_at_end: Mapping[Enum, _CodeAndText]


def parameters(schedule: Schedule) -> StateMachine:
    """Return the parameters' state machine: SHARDED -UNSHARD-> UNUSED -use-> WHOLE -RESHARD-> SHARDED, and STALE."""
    sharded, unused, used, stale = ParameterStates
    steps_shards = schedule.unshard_for_use or schedule.unshard_after_step
    moves: dict[tuple[ActionKind, Enum], Enum] = {
        **{(kind, state): used for kind in USERS for state in (unused, used)},
        **{(ActionKind.UNSHARD, state): unused for state in (sharded, stale)},
        **{(ActionKind.RESHARD, state): sharded for state in (used, stale)},
        **{(ActionKind.STEP, state): stale if steps_shards else state for state in (unused, used, stale)},
        (ActionKind.STEP, sharded): sharded,
    }
    wrong: dict[tuple[ActionKind, Enum], _CodeAndText] = {
        **{
            (kind, state): ("used-before-unshard", "uses parameters that are {state}{since}; put {unshard} before it")
            for kind in USERS
            for state in (sharded, stale)
        },
        **{
            (ActionKind.UNSHARD, state): ("unshard-repeated", "unshards what is {state}{since}; drop it")
            for state in (unused, used)
        },
        (ActionKind.RESHARD, sharded): ("reshard-repeated", "reshards what is {state}{since}; drop it"),
        (ActionKind.RESHARD, unused): (
            "reshard-before-use",
            "reshards what nothing has used{since}; move it after its use",
        ),
    }
    if schedule.unshard_for_use:
        left = ("reshard-missing-at-end", "leaves parameters {state}, which are stored as shards; add {reshard}")
        return StateMachine(sharded, moves, wrong, dict.fromkeys((unused, used, stale), left))
    left = ("unshard-missing-at-end", "leaves parameters {state}, which are stored whole and up to date; add {unshard}")
    return StateMachine(used, moves, wrong, dict.fromkeys((sharded, stale), left))


def gradients(schedule: Schedule) -> StateMachine:
    """Return the gradients' state machine: NONE -backward-> UNREDUCED -REDUCE-> REDUCED -STEP-> STEPPED.

    The rules say whether a backward may add to UNREDUCED or to REDUCED gradients. In a schedule without any REDUCE,
    which is lowered in part, gradients stay as the backward leaves them.
    """
    none, unreduced, reduced, stepped = GradientStates
    makers = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
    again = reduced if schedule.reduce_each_backward else unreduced
    moves: dict[tuple[ActionKind, Enum], Enum] = {
        **{(kind, state): unreduced for kind in makers for state in (none, again)},
        (ActionKind.REDUCE, unreduced): reduced,
        (ActionKind.STEP, reduced): stepped,
    }
    unreduced_text = "adds to gradients that are {state}{since}, against reduce_each_backward; put {reduce} between"
    reduced_text = "adds to gradients that are {state}{since}; this is done once, move {reduce} after it"
    stepped_text = "adds to gradients that are {state}{since}; move {step} after it"
    wrong: dict[tuple[ActionKind, Enum], _CodeAndText] = {
        **{(maker, unreduced): ("backward-before-reduce", unreduced_text) for maker in makers},
        **{(maker, reduced): ("backward-after-reduce", reduced_text) for maker in makers},
        **{(maker, stepped): ("backward-after-step", stepped_text) for maker in makers},
        (ActionKind.REDUCE, none): (
            "reduce-without-gradients",
            "finds no gradients to reduce; move it after their backward",
        ),
        (ActionKind.REDUCE, reduced): (
            "reduce-repeated",
            "reduces what is {state}{since}; drop it, or move it after a backward",
        ),
        (ActionKind.REDUCE, stepped): (
            "reduce-after-step",
            "reduces what is {state}{since}; move {step} after it, or drop it",
        ),
        (ActionKind.STEP, none): ("step-without-gradients", "finds no gradients to step on; move it after {reduce}"),
        (ActionKind.STEP, unreduced): (
            "step-before-reduce",
            "steps on gradients that are {state}{since}; put {reduce} before it",
        ),
        (ActionKind.STEP, stepped): ("step-repeated", "steps on what is {state}{since}; drop it"),
    }
    wrong_at_end: dict[Enum, _CodeAndText] = {
        reduced: ("gradients-not-stepped", "makes gradients that nothing steps on; add {step}")
    }
    if any(action.kind is ActionKind.REDUCE for row in schedule.ranks for action in row):
        wrong_at_end[unreduced] = ("gradients-not-reduced", "makes gradients that nothing reduces; add {reduce}")
    return StateMachine(none, moves, wrong, wrong_at_end)


def misuses(schedule: Schedule, machine: StateMachine) -> Iterator[Flaw]:
    """Walk each row, and yield each illegal move and each bad end."""
    kinds = {kind for kind, _ in machine.moves}
    for rank, row in enumerate(schedule.ranks):
        groups = stage_groups(row)
        states: dict[tuple[int, str | None], tuple[Enum, int | None]] = {}
        for index, action in enumerate(row):
            for group in touched(action, groups) if action.kind in kinds else ():
                state, since = states.get((action.stage, group), (machine.start, None))
                move = (action.kind, state)
                if move not in machine.moves:
                    code, text = machine.wrong[move]
                    text = _worded(text, action, group, state, since)
                    yield code, f"{action} on rank {rank} {text}", ((rank, index),)
                states[action.stage, group] = machine.moves.get(move, state), index
        for (_, group), (state, last) in states.items():
            if last is not None and state in machine.wrong_at_end:
                code, text = machine.wrong_at_end[state]
                text = _worded(text, row[last], group, state, last)
                yield code, f"{row[last]} on rank {rank} {text}", ((rank, last),)


def _worded(text: str, action: Action, group: str | None, state: Enum, since: int | None) -> str:
    kinds = (ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE, ActionKind.STEP)
    named = {kind.name.lower(): str(Action(kind, action.stage, group=group)) for kind in kinds}
    return text.format(state=state.value, since="" if since is None else f" after action {since}", **named)
