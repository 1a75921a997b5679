"""Find flaws of a schedule's transfers: payloads that nothing makes, sends or uses, and channels with unequal ends.

Each ordered pair of ranks is one channel: the n-th RECEIVE takes what the n-th SEND gave, whatever their names. Both
directions between two ranks, and channels of other pairs, are independent of each other.

>>> from shardwise.schedule.actions import Schedule
>>> crossed = Schedule.parse("rank 0: 0F0 0SEND_F0 0F1 0SEND_F1\\nrank 1: 1RECV_F1 1RECV_F0 1F0 1F1")
>>> next(flaws(crossed, ActionPlaces.of(crossed)))[1]
'1RECV_F1 on rank 1 takes what 0SEND_F0 on rank 0 gives; a channel delivers in order, align the two'
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.schedule.actions import TRANSFERS, Action, ActionKind, Schedule
from shardwise.schedule.dependencies import ActionPlaces, Position, other_end, source_of

Flaw = tuple[str, str, tuple[Position, ...]]
"""A flaw has a code, a line with value, rule and fix, and the positions concerned."""

_Found = dict[tuple[int, Action], int]  # rank and transfer -> index


def flaws(schedule: Schedule, places: ActionPlaces) -> Iterator[Flaw]:
    """Yield each transfer without maker, partner or user, each missing one, and each channel that is out of order."""
    found: _Found = {}
    for rank, row in enumerate(schedule.ranks):
        for index, action in enumerate(row):
            if action.kind in TRANSFERS and found.setdefault((rank, action), index) != index:
                text = f"{action} on rank {rank} is there twice; a payload is sent once, drop one"
                yield "transfer-repeated", text, ((rank, found[rank, action]), (rank, index))
    if found:
        yield from _unmatched(found, places)
        yield from _left_out(schedule, found, places)
        yield from _disorder(schedule, found, places)


def _unmatched(found: _Found, places: ActionPlaces) -> Iterator[Flaw]:
    for (rank, action), index in found.items():
        here = ((rank, index),)
        stage = other_end(action)
        peer = places.partner(rank, action)
        if peer is None:
            yield (
                "transfer-without-partner",
                f"{action} on rank {rank} has no partner; no rank computes stage {stage}, drop it",
                here,
            )
        elif peer == rank:
            yield (
                "transfer-within-rank",
                f"{action} on rank {rank} stays on its rank; there stages hand over directly, drop it",
                here,
            )
        elif (peer, partner := _other_side(action, stage)) not in found:
            yield (
                "transfer-unmatched",
                f"{action} on rank {rank} is unmatched; add {partner} on rank {peer}, or drop it",
                here,
            )
        elif (rank, None, action.payload, action.stage, action.micro_batch) not in places.flow:
            text = "sends what nothing computes" if action.kind is ActionKind.SEND else "receives what nothing uses"
            yield (
                "transfer-without-computation",
                f"{action} on rank {rank} {text}; add the computation, or drop both ends",
                here,
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
            given = other_end(send), send.micro_batch, send.payload
            if given != (receive.stage, receive.micro_batch, receive.payload):
                text = f"{receive} on rank {receiver} takes what {send} on rank {sender} gives"
                rule = "a channel delivers in order, align the two"
                yield "channel-out-of-order", f"{text}; {rule}", ((receiver, received_at), (sender, sent_at))
