"""What is planned for layouts and splits, by number, which is what a registered op can be given."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass, replace
from typing import Any, Final

from shardwise.attention.block_layout import BlockLayout
from shardwise.comm import Comm
from shardwise.config import ContextConfig
from shardwise.context.head_exchange import Team
from shardwise.context.heads import heads_of, team_size
from shardwise.context.plan import plan_steps
from shardwise.context.steps import Piece
from shardwise.context.travel import Course
from shardwise.layout.token_split import TokenSplit

_MAX_PLANS: Final = 256


@dataclass(frozen=True, eq=False)
class Planned:
    """What one layout and split have this rank do.

    Attributes:
        team: with which heads are exchanged.
        course: what follows, of layouts of all heads.
    """

    team: Team
    course: Course

    def course_of(self, num_heads: int) -> Course:
        """What to do with this rank's of so many query heads."""
        heads = heads_of(num_heads, len(self.team.shares), self.team.index)
        steps = tuple(
            replace(each, pulled=_of_heads(each.pulled, heads), pushed=_of_heads(each.pushed, heads))
            for each in self.course.steps
        )
        return replace(self.course, steps=steps)


def _of_heads(piece: Piece | None, heads: tuple[int, int]) -> Piece | None:
    return None if piece is None else replace(piece, layout=piece.layout.of_heads(*heads))


class KeptPlans:
    """What is planned, by number: those used last, and those that compiled code knows.

    Args:
        comm: over the `cp` axis.
        section: of the config.

    Attributes:
        name: that no other has, by which a layout may keep a number.
    """

    def __init__(self, comm: Comm, section: ContextConfig) -> None:
        self.name = uuid.uuid4().hex
        self._comm, self._section = comm, section
        self._numbers = itertools.count()
        self._placed: dict[tuple[BlockLayout, TokenSplit], int] = {}
        self._planned: dict[int, tuple[tuple[BlockLayout, TokenSplit], Planned]] = {}
        self._for_good: dict[int, Planned] = {}

        # A function, as compiled code takes no method for a constant.
        def place_for_good(place: tuple[Any, ...], layout: BlockLayout) -> int:
            number = next(self._numbers)
            self._for_good[number] = self._make(layout, TokenSplit(*place))
            return number

        self.place_for_good = place_for_good

    def place(self, layout: BlockLayout, split: TokenSplit) -> int:
        """The number of a layout's plan, which is made unless it is there."""
        key = (layout, split)
        if key not in self._placed:
            planned = self._make(layout, split)  # it may raise: a number stands for nothing but a plan
            number = self._placed[key] = next(self._numbers)
            self._planned[number] = key, planned
            if len(self._planned) > _MAX_PLANS:
                oldest, _ = self._planned.pop(next(iter(self._planned)))
                del self._placed[oldest]
        return self._placed[key]

    def find(self, number: int) -> Planned:
        """The plan of a number, which is then the one used last.

        Raises:
            RuntimeError: it is gone.
        """
        if number in self._for_good:
            return self._for_good[number]
        if number not in self._planned:
            raise RuntimeError(
                f"context attention has planned for more than {_MAX_PLANS} layouts since this forward; run its "
                "backward earlier"
            )
        self._planned[number] = self._planned.pop(number)
        return self._planned[number][1]

    def clear(self) -> None:
        """Forget all."""
        self._placed.clear()
        self._planned.clear()
        self._for_good.clear()

    def _make(self, layout: BlockLayout, split: TokenSplit) -> Planned:
        rank, size = self._comm.rank, team_size(self._section, self._comm.world_size)
        teams, index = split.teams(size), rank % size
        first = rank - index
        steps = plan_steps(layout, teams, rank // size, one_by_one=self._section.transport == "ring")
        peers = tuple(range(index, split.degree, size))
        course = Course(self._comm, peers, teams.shares[rank // size], steps)
        return Planned(Team(self._comm, split.shares[first : first + size], index), course)
