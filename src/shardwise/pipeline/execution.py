"""Executes a schedule's row: each action by the handler of its kind, recorded as it happens.

It knows no schedule by name and no kind of action: what is done is the handlers' business.

>>> done = []
>>> handlers = dict.fromkeys(Kind, lambda action: done.append(str(action)))
>>> execute([Action.parse("0F0"), Action.parse("0B0")], handlers, Timeline(rank=0))
>>> done
['0F0', '0B0']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardwise.schedule.actions import Action, Kind
from shardwise.timeline import Timeline

Handler = Callable[[Action], None]
Handlers = Mapping[Kind, Handler]


def execute(row: Sequence[Action], handlers: Handlers, timeline: Timeline) -> None:
    """Perform the actions of a row in their order.

    Args:
        row: of this rank.
        handlers: one for each kind of action in it.
        timeline: records what is done.
    """
    for action in row:
        with timeline.perform(action):
            handlers[action.kind](action)
