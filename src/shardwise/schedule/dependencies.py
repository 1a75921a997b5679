"""One relation says which action must follow which; verifier, simulator and runtime all read it.

An action at `(rank, index)` follows:

1. the action before it in its stream, on its rank; a transfer follows the one before it with the same peer: each
   ordered pair of ranks is one channel, which delivers in order, and channels run side by side;
2. on its rank, the latest earlier action of each kind that `_FOLLOWS` names, about the same parameters: a
   computation follows the UNSHARD it uses, RESHARD the computations that used the parameters, REDUCE the last
   backward that feeds it, UNSHARD the STEP that updated the shards, and so on;
3. on its rank, the latest earlier action of the kinds in `_FOLLOWS_ANY`, whatever their parameters: STEP
   follows the REDUCEs written before it (all of them where gradients are clipped by their global norm, only
   its own group's and older ones where it is written earlier), UNSHARD reuses the memory that the RESHARDs
   written before it freed, which bounds prefetching;
4. its data: FORWARD of stage s follows FORWARD of stage s-1, BACKWARD follows its own FORWARD and the
   backward of stage s+1, both through SEND and RECEIVE where these are written; BACKWARD_WEIGHT follows
   BACKWARD_INPUT.

Actions may name a group or, with `group=None`, the whole stage; both granularities may meet in one row. Where
several ranks hold a stage (data-parallel replicas), the k-th of them exchanges data with the k-th that holds
the next one.

>>> from shardwise.schedule.actions import Schedule
>>> schedule = Schedule.parse("rank 0: 0UNSHARD 0F0\\nrank 1: 1F0")
>>> dependencies(schedule)
{(0, 0): (), (0, 1): ((0, 0),), (1, 0): ((0, 1),)}
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.schedule.actions import (
    COLLECTIVES,
    COMPUTATIONS,
    STREAMS,
    TRANSFERS,
    Action,
    ActionKind,
    Payload,
    Schedule,
)

Position = tuple[int, int]
"""A position is a rank, and an index in the rank's row."""

Follows = Mapping[Position, tuple[Position, ...]]

USERS = (ActionKind.FORWARD, ActionKind.RECOMPUTE, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
"""These computations read parameters; the gradient of weights does not."""

_ON_A_GROUP = (
    *USERS,
    ActionKind.BACKWARD_WEIGHT,
    ActionKind.UNSHARD,
    ActionKind.RESHARD,
    ActionKind.REDUCE,
    ActionKind.STEP,
)
_MOVES = (ActionKind.FETCH, ActionKind.EVICT)

_FOLLOWS: Mapping[ActionKind, tuple[ActionKind, ...]] = {
    ActionKind.FORWARD: (ActionKind.UNSHARD, *_MOVES),
    ActionKind.RECOMPUTE: (ActionKind.UNSHARD, *_MOVES),
    ActionKind.BACKWARD: (ActionKind.UNSHARD, ActionKind.REDUCE, *_MOVES),
    ActionKind.BACKWARD_INPUT: (ActionKind.UNSHARD, *_MOVES),
    ActionKind.BACKWARD_WEIGHT: (ActionKind.REDUCE, *_MOVES),
    ActionKind.UNSHARD: (ActionKind.STEP, *_MOVES),
    ActionKind.RESHARD: (*USERS, ActionKind.UNSHARD, *_MOVES),
    ActionKind.REDUCE: (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT, *_MOVES),
    ActionKind.STEP: _MOVES,
    # The action does not say which of the group's states moves, so the group's actions stay in order
    # around it.
    ActionKind.FETCH: (*_ON_A_GROUP, *_MOVES),
    ActionKind.EVICT: (*_ON_A_GROUP, *_MOVES),
}
_FOLLOWS_ANY: Mapping[ActionKind, tuple[ActionKind, ...]] = {
    ActionKind.STEP: (ActionKind.REDUCE,),
    ActionKind.UNSHARD: (ActionKind.RESHARD,),
}

# Rule 4: what a computation needs of its own micro-batch and group on its rank, and which computations make a
# payload; each of these also uses one of that kind, except at the ends of the pipeline.
_NEEDS: Mapping[ActionKind, tuple[ActionKind, ...]] = {
    ActionKind.RECOMPUTE: (ActionKind.FORWARD,),
    ActionKind.BACKWARD: (ActionKind.FORWARD, ActionKind.RECOMPUTE),
    ActionKind.BACKWARD_INPUT: (ActionKind.FORWARD, ActionKind.RECOMPUTE),
    ActionKind.BACKWARD_WEIGHT: (ActionKind.BACKWARD_INPUT,),
}
_NEEDED = frozenset(need for needed in _NEEDS.values() for need in needed)
_MAKES: Mapping[ActionKind, Payload] = {
    ActionKind.FORWARD: Payload.ACTIVATION,
    ActionKind.BACKWARD: Payload.GRADIENT,
    ActionKind.BACKWARD_INPUT: Payload.GRADIENT,
}

_FlowKey = tuple[int, ActionKind | None, Payload, int, int | None]


def dependencies(
    schedule: Schedule, streams: Mapping[ActionKind, str] = STREAMS
) -> dict[Position, tuple[Position, ...]]:
    """Return for each position those that must have ended before it starts; `streams` gives each kind its stream."""
    places = ActionPlaces.of(schedule)
    channelled = {streams[kind] for kind in TRANSFERS} - {streams[kind] for kind in ActionKind if kind not in TRANSFERS}
    follows: dict[Position, tuple[Position, ...]] = {}
    for rank, row in enumerate(schedule.ranks):
        groups = places.groups[rank]
        queues = [
            (stream, places.partner(rank, action)) if (stream := streams[action.kind]) in channelled else stream
            for action in row
        ]
        for index, (action, earlier) in enumerate(zip(row, _within_row(row, queues, groups), strict=True)):
            position = rank, index
            before = [(rank, other) for other in earlier]
            before += places.data_of(position, action, touched(action, groups))
            follows[position] = tuple(sorted(set(before))) if len(before) > 1 else tuple(before)
    return follows


def stage_groups(row: Sequence[Action]) -> dict[int, tuple[str | None, ...]]:
    """Return the named groups of each stage of a row, in order of first appearance; (None,) where none is named."""
    named: dict[int, dict[str | None, None]] = {}
    for action in row:
        names = named.setdefault(action.stage, {})
        if action.group is not None:
            names[action.group] = None
    return {stage: tuple(names) or (None,) for stage, names in named.items()}


def touched(action: Action, groups: Mapping[int, tuple[str | None, ...]]) -> tuple[str | None, ...]:
    """Return the groups that an action is about: its own, or all of its stage, as `stage_groups` returns them."""
    return groups[action.stage] if action.group is None else (action.group,)


def _within_row(
    row: Sequence[Action], queues: Sequence[Hashable], groups: Mapping[int, tuple[str | None, ...]]
) -> Iterator[list[int]]:
    """Yield for each index of a row the earlier indices of rules 1 to 3; `queues` has each action's for rule 1."""
    present = {action.kind for action in row}
    follows = {kind: tuple(earlier for earlier in _FOLLOWS.get(kind, ()) if earlier in present) for kind in present}
    follows_any = {
        kind: tuple(earlier for earlier in _FOLLOWS_ANY.get(kind, ()) if earlier in present) for kind in present
    }
    followed = {earlier for kinds in follows.values() for earlier in kinds}
    last_in_queue: dict[Hashable, int] = {}
    last_of_kind: dict[ActionKind, int] = {}
    last_on_group: dict[tuple[ActionKind, int, str | None], int] = {}
    for index, action in enumerate(row):
        kind, queue = action.kind, queues[index]
        wanted = [last_in_queue[queue]] if queue in last_in_queue else []
        if follows[kind]:
            keys = ((earlier, action.stage, group) for earlier in follows[kind] for group in touched(action, groups))
            wanted += [last_on_group[key] for key in keys if key in last_on_group]
        wanted += [last_of_kind[earlier] for earlier in follows_any[kind] if earlier in last_of_kind]
        yield wanted
        last_in_queue[queue] = last_of_kind[kind] = index
        if kind in followed:
            last_on_group.update(((kind, action.stage, group), index) for group in touched(action, groups))


@dataclass(frozen=True, slots=True)
class ActionPlaces:
    """Record where the data of each micro-batch is made and moved.

    `holders`: the ranks that compute a stage. `computed`: the index of a computation of (rank, kind, stage,
    micro-batch, group), where another needs it. `flow`: first and last index of what makes or moves a payload on
    (rank, stage, micro-batch); its kind is None for the computations that make it. `groups`: those of each rank's
    stages.
    """

    holders: dict[int, list[int]]
    computed: dict[tuple[int, ActionKind, int, int | None, str | None], int]
    flow: dict[_FlowKey, tuple[int, int]]
    groups: list[dict[int, tuple[str | None, ...]]]

    @classmethod
    def of(cls, schedule: Schedule) -> ActionPlaces:
        places = cls({}, {}, {}, [stage_groups(row) for row in schedule.ranks])
        for rank, row in enumerate(schedule.ranks):
            for index, action in enumerate(row):
                places._add(rank, index, action)
        return places

    def _add(self, rank: int, index: int, action: Action) -> None:
        kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
        payload, mover = action.payload, kind if kind in TRANSFERS else None
        if kind in COMPUTATIONS:
            ranks = self.holders.setdefault(stage, [])
            if rank not in ranks[-1:]:
                ranks.append(rank)
            if kind in _NEEDED:
                for group in touched(action, self.groups[rank]):
                    self.computed.setdefault((rank, kind, stage, micro_batch, group), index)
            payload = _MAKES.get(kind)
        if payload is not None:
            key = (rank, mover, payload, stage, micro_batch)
            self.flow[key] = (self.flow[key][0] if key in self.flow else index, index)

    def peer(self, rank: int, stage: int, other_stage: int) -> int | None:
        """Return the rank that has `other_stage` in the replica in which `rank` has `stage`; None without one."""
        mine, theirs = self.holders.get(stage, []), self.holders.get(other_stage, [])
        replica = mine.index(rank) if rank in mine else len(theirs)
        return theirs[replica] if replica < len(theirs) else None

    def partner(self, rank: int, transfer: Action) -> int | None:
        """Return the rank at the other end of a SEND or RECEIVE; None where no rank has that stage."""
        return self.peer(rank, transfer.stage, other_end(transfer))

    def data_of(self, position: Position, action: Action, groups: Collection[str | None]) -> list[Position]:
        """Return the positions that rule 4 names for the action at `position`, which is about `groups`."""
        rank, index = position
        kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
        keys = [(rank, need, stage, micro_batch, group) for need in _NEEDS.get(kind, ()) for group in groups]
        before = [(rank, self.computed[key]) for key in keys if key in self.computed]
        if kind is ActionKind.SEND and action.payload is not None:
            before += self._last((rank, None, action.payload, stage, micro_batch))
        elif kind is ActionKind.RECEIVE and action.payload is not None:
            before += self._from_neighbour(ActionKind.SEND, rank, action.payload, stage, micro_batch)
        elif kind in _MAKES and index == self.flow[rank, None, _MAKES[kind], stage, micro_batch][0]:
            received = self._last((rank, ActionKind.RECEIVE, _MAKES[kind], stage, micro_batch))
            before += received or self._from_neighbour(None, rank, _MAKES[kind], stage, micro_batch)
        return before

    def _from_neighbour(
        self, kind: ActionKind | None, rank: int, payload: Payload, stage: int, micro_batch: int | None
    ) -> list[Position]:
        neighbour = stage + source_of(payload)
        peer = self.peer(rank, stage, neighbour)
        return [] if peer is None else self._last((peer, kind, payload, neighbour, micro_batch))

    def _last(self, key: _FlowKey) -> list[Position]:
        return [(key[0], self.flow[key][1])] if key in self.flow else []


def source_of(payload: Payload) -> int:
    """Return the stage a payload comes from, relative to the one that takes it: activations -1, gradients +1."""
    return -1 if payload is Payload.ACTIVATION else 1


def other_end(transfer: Action) -> int:
    """Return the stage that a SEND goes to, or that a RECEIVE takes from."""
    source = source_of(transfer.payload or Payload.ACTIVATION)
    return transfer.stage + (-source if transfer.kind is ActionKind.SEND else source)


Meeting = tuple[Position, ...]
"""Positions that start together: the ranks of one collective, or a single action."""


def execution_order(schedule: Schedule, follows: Follows) -> tuple[list[Meeting], dict[Position, tuple[Position, ...]]]:
    """Order the actions so that each comes after all it follows, the ranks of a collective together.

    The n-th action of a collective kind on a (stage, group) is one collective of all ranks that have it.

    Args:
        follows: for each position those that must end before it starts, as `dependencies` returns it.

    Returns:
        The meetings in order, and for each position that can never start those that it waits for (a deadlock).
    """
    meetings, number_of = _meetings(schedule)
    waits_for = [{number_of[before] for member in members for before in follows[member]} for members in meetings]
    users: list[list[int]] = [[] for _ in meetings]
    for number, needed in enumerate(waits_for):
        for other in needed:
            users[other].append(number)
    num_open = [len(needed) for needed in waits_for]
    ready = deque(number for number, count in enumerate(num_open) if count == 0)
    order: list[Meeting] = []
    while ready:
        number = ready.popleft()
        order.append(meetings[number])
        for user in users[number]:
            num_open[user] -= 1
            if num_open[user] == 0:
                ready.append(user)
    blocked = {
        member: tuple(
            sorted(before for other in waits_for[number] if num_open[other] > 0 for before in meetings[other])
        )
        for number, count in enumerate(num_open)
        if count > 0
        for member in meetings[number]
    }
    return order, blocked


def _meetings(schedule: Schedule) -> tuple[list[Meeting], dict[Position, int]]:
    """Return the meetings, and for each position the number of its meeting."""
    meetings: list[Meeting] = []
    number_of: dict[Position, int] = {}
    of_occurrence: dict[tuple[Action, int], int] = {}
    for rank, row in enumerate(schedule.ranks):
        occurrence: Counter[Action] = Counter()
        for index, action in enumerate(row):
            position, number = (rank, index), len(meetings)
            if action.kind in COLLECTIVES:
                number = of_occurrence.setdefault((action, occurrence[action]), number)
                occurrence[action] += 1
            if number == len(meetings):
                meetings.append((position,))
            else:
                meetings[number] += (position,)
            number_of[position] = number
    return meetings, number_of
