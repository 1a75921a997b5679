"""Keep the plans of layouts and splits by number, because a registered op can take a number but no plan.

A graph keeps the plan that its backward needs; besides these, the plans used last are kept.
"""

from __future__ import annotations

import itertools
import uuid
import weakref
from dataclasses import dataclass, replace
from typing import Any, Final

from shardwise.attention.block_layout import BlockLayout
from shardwise.comm.collectives import Comm
from shardwise.config.resolve import ContextConfig
from shardwise.context.plan import AttentionTile, plan_steps
from shardwise.context.ring import RingPlan
from shardwise.context.ulysses import HeadGroup, heads_of, team_size
from shardwise.layout.token_ranges import TokenSplit

_MAX_PLANS: Final = 32


@dataclass(frozen=True, eq=False)
class RankPlan:
    """Says what this rank does for one layout and split.

    Attributes:
        team: the ranks with which heads are exchanged.
        ring_plan: the steps after that exchange, with layouts of all heads.
    """

    team: HeadGroup
    ring_plan: RingPlan

    def ring_plan_of(self, num_heads: int) -> RingPlan:
        """Return the steps for this rank's part of `num_heads` query heads."""
        heads = heads_of(num_heads, len(self.team.shares), self.team.index)
        steps = tuple(replace(step, tile=_of_heads(step.tile, heads)) for step in self.ring_plan.steps)
        return replace(self.ring_plan, steps=steps)


def _of_heads(tile: AttentionTile | None, heads: tuple[int, int]) -> AttentionTile | None:
    return None if tile is None else replace(tile, layout=tile.layout.of_heads(*heads))


class PlanCache:
    """Holds plans by number, as long as one is in use: by a graph, by compiled code, or as one of those used last.

    Attributes:
        name: unique, so that a layout can keep a plan's number under it.
    """

    def __init__(self, comm: Comm, section: ContextConfig) -> None:
        self.name = uuid.uuid4().hex
        self._comm, self._section = comm, section
        self._numbers = itertools.count()
        self._planned: weakref.WeakValueDictionary[int, RankPlan] = weakref.WeakValueDictionary()
        self._last: dict[tuple[BlockLayout, TokenSplit], tuple[int, RankPlan]] = {}
        self._for_good: list[RankPlan] = []

        # A function, because compiled code takes no method as a constant.
        def place_for_good(place: tuple[Any, ...], layout: BlockLayout) -> int:
            number, planned = self._make(layout, TokenSplit(*place))
            self._for_good.append(planned)
            return number

        self.place_for_good = place_for_good

    def place(self, layout: BlockLayout, split: TokenSplit) -> int:
        """Return the number of a layout's plan, which is made unless it is among those used last."""
        key = (layout, split)
        found = self._last.pop(key, None) or self._make(layout, split)
        while len(self._last) >= _MAX_PLANS:
            del self._last[next(iter(self._last))]
        self._last[key] = found
        return found[0]

    def find(self, number: int) -> RankPlan:
        """Return the plan of a number. The caller keeps it if it needs the plan again later."""
        return self._planned[number]

    def clear(self) -> None:
        """Forget all plans that graphs do not keep."""
        self._last.clear()
        self._for_good.clear()

    def _make(self, layout: BlockLayout, split: TokenSplit) -> tuple[int, RankPlan]:
        rank, size = self._comm.rank, team_size(self._section, self._comm.world_size)
        teams, index = split.teams(size), rank % size
        first = rank - index
        steps = plan_steps(layout, teams, rank // size, one_by_one=self._section.transport == "ring")
        peers = tuple(range(index, split.degree, size))
        ring_plan = RingPlan(self._comm, peers, teams.shares[rank // size], steps)
        number, planned = (
            next(self._numbers),
            RankPlan(HeadGroup(self._comm, split.shares[first : first + size], index), ring_plan),
        )
        self._planned[number] = planned
        return number, planned
