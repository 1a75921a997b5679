"""What ranks of a pipeline hold at once: how many micro-batches of each of their stages, by the schedule itself.

Where a rank's stages are of different sizes, the most stages at once is not yet the most bytes: which ones counts.

>>> [held.whole for held in Flights().of("interleaved", 2, 2, 4, rank=0)]
[(3, 2), (4, 1)]
>>> Flights().of("zb-h1", 4, 1, 1000, rank=2)
(Held(whole=(2,), deferred=(2,)), Held(whole=(1,), deferred=(3,)))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import ge

from shardwise.schedule.actions import Action, Kind
from shardwise.schedule.formulas import max_in_flight
from shardwise.schedule.recipes import pipeline_step, placement_of, recipe_of

_NUM_ROUNDS = 3
"""Rounds of p micro-batches behind which a schedule that alternates forwards and backwards repeats itself."""


@dataclass(frozen=True)
class Held:
    """What a rank holds at one moment, in micro-batches of each of its stages, in their order.

    Attributes:
        whole: between forward and backward.
        deferred: whose gradients of the weights are still to come.
    """

    whole: tuple[int, ...]
    deferred: tuple[int, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """All of them."""
        return self.whole + self.deferred

    def covers(self, other: Held) -> bool:
        """Whether it is no less of any stage."""
        return all(map(ge, self.counts, other.counts))


class Flights:
    """The moments of schedules at which ranks hold most; keeps those that it was asked for."""

    def __init__(self) -> None:
        self._moments: dict[tuple[str, int, int, int], tuple[tuple[Held, ...], ...]] = {}

    def of(
        self, recipe_name: str, num_ranks: int, virtual_stages: int, num_micro_batches: int, *, rank: int
    ) -> tuple[Held, ...]:
        """Of a rank, the moments that no other one covers, the one with most stages first.

        Raises:
            ConfigError: no such schedule.
            ScheduleError: a count below 1, or no such rank.
        """
        placement = placement_of(recipe_name, num_ranks, virtual_stages)
        num_stages = placement.stages_per_rank
        if num_stages == 1 and not recipe_of(recipe_name).splits_backward:
            return (Held((max_in_flight(recipe_name, num_ranks, num_micro_batches, virtual_stages, rank),), (0,)),)
        num = _as_telling(num_ranks, num_micro_batches) if recipe_name not in ("gpipe", "naive") else num_micro_batches
        key = (recipe_name, num_ranks, virtual_stages, num)
        if key not in self._moments:
            rows = pipeline_step(recipe_name, num_ranks, num, virtual_stages).ranks
            stages = [placement.stages_of(each) for each in range(num_ranks)]
            self._moments[key] = tuple(_highest(_held(row, own)) for row, own in zip(rows, stages, strict=True))
        return self._moments[key][rank]


def _as_telling(num_ranks: int, num_micro_batches: int) -> int:
    """The fewest micro-batches of which a rank holds as many, with rounds as long as `interleaved_rounds` has them."""
    num_rounds, left = divmod(num_micro_batches, num_ranks)
    if num_rounds <= _NUM_ROUNDS:
        return num_micro_batches
    longer = _NUM_ROUNDS * -(-left // num_rounds)
    return _NUM_ROUNDS * num_ranks + longer if longer < num_ranks else num_micro_batches


def _held(row: Sequence[Action], stages: Sequence[int]) -> Iterator[Held]:
    """What is held during each action of a rank; what an action lets go it still holds."""
    index_of = {stage: index for index, stage in enumerate(stages)}
    whole, deferred = [0] * len(stages), [0] * len(stages)
    for action in row:
        index = index_of[action.stage]
        if action.kind is Kind.FORWARD:
            whole[index] += 1
            yield Held(tuple(whole), tuple(deferred))
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            whole[index] -= 1
            deferred[index] += action.kind is Kind.BACKWARD_INPUT
            if deferred[index]:
                yield Held(tuple(whole), tuple(deferred))
        elif action.kind is Kind.BACKWARD_WEIGHT:
            deferred[index] -= 1


def _highest(moments: Iterator[Held]) -> tuple[Held, ...]:
    """Those that no other one covers, the one with most first."""
    found: list[Held] = []
    for each in dict.fromkeys(moments):
        if not any(other.covers(each) for other in found):
            found = [other for other in found if not each.covers(other)] + [each]
    return tuple(sorted(found, key=lambda each: -sum(each.counts)))
