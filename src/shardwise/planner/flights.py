"""What ranks of a pipeline hold at once: how many micro-batches of each of their stages, by the schedule itself.

Where a rank's stages are of different sizes, the most stages at once is not yet the most bytes: which ones counts. So
does whether a backward runs: it makes tensors of its own.

>>> flight = Flights().of("interleaved", 2, 2, 4, rank=0)
>>> [[held.whole for held in moments] for moments in flight.backwards]
[[(4, 1), (3, 2)], [(3, 2), (4, 1)]]
>>> Flights().of("zb-h1", 4, 1, 1000, rank=2).between
(Held(whole=(1,), deferred=(3,), num_arrived=0, num_sent=999),)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import ge

from shardwise.schedule.actions import Action, Kind, Schedule
from shardwise.schedule.formulas import max_in_flight
from shardwise.schedule.placement import StagePlacement
from shardwise.schedule.recipes import pipeline_step, placement_of, recipe_of

_NUM_ROUNDS = 3
"""Rounds of p micro-batches behind which a schedule that alternates forwards and backwards repeats itself."""


@dataclass(frozen=True)
class Held:
    """What a rank holds at one moment, in micro-batches of each of its stages, in their order.

    Attributes:
        whole: between forward and backward.
        deferred: whose gradients of the weights are still to come.
        num_arrived: tensors from other ranks that the next computation waits for.
        num_sent: gradients that have gone to other ranks in this step.
    """

    whole: tuple[int, ...]
    deferred: tuple[int, ...]
    num_arrived: int = 0
    num_sent: int = 0

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """All that stages keep."""
        return self.whole + self.deferred

    def covers(self, other: Held) -> bool:
        """Whether it keeps no less of any stage."""
        return all(map(ge, self.counts, other.counts))


@dataclass(frozen=True)
class Flight:
    """The moments at which a rank holds most; none covers another of its kind.

    Attributes:
        backwards: of each of its stages, as a backward of it begins.
        between: at the ends of forwards, and of backwards that leave gradients of weights for later, that hold more.
    """

    backwards: tuple[tuple[Held, ...], ...]
    between: tuple[Held, ...] = ()

    @property
    def moments(self) -> tuple[Held, ...]:
        """All of them."""
        return (*(held for moments in self.backwards for held in moments), *self.between)


class Flights:
    """The flights of schedules; keeps those that it was asked for."""

    def __init__(self) -> None:
        self._schedules: dict[tuple[object, ...], Schedule] = {}
        self._flights: dict[tuple[object, ...], Flight] = {}

    def of(
        self,
        recipe_name: str,
        num_ranks: int,
        virtual_stages: int,
        num_micro_batches: int,
        *,
        rank: int,
        most_sent: int | None = None,
    ) -> Flight:
        """Of one rank.

        Args:
            most_sent: of gradients that have gone, more are not counted.

        Raises:
            ConfigError: no such schedule.
            ScheduleError: a count below 1, or no such rank.
        """
        placement = placement_of(recipe_name, num_ranks, virtual_stages)
        if placement.stages_per_rank == 1 and not recipe_of(recipe_name).splits_backward:
            num = max_in_flight(recipe_name, num_ranks, num_micro_batches, virtual_stages, rank)
            num_sent = _at_most(num_micro_batches - num if rank else 0, most_sent)
            return Flight(((Held((num,), (0,), int(num_ranks > 1 and num_micro_batches > 1), num_sent),),))
        num = _as_telling(num_ranks, num_micro_batches) if recipe_name not in ("gpipe", "naive") else num_micro_batches
        key = (recipe_name, num_ranks, virtual_stages, num)
        if key not in self._schedules:
            self._schedules[key] = pipeline_step(recipe_name, num_ranks, num, virtual_stages)
        if (*key, rank, most_sent) not in self._flights:
            flight = _flight(self._schedules[key].ranks[rank], placement, rank)
            self._flights[*key, rank, most_sent] = _changed(flight, lambda sent: _at_most(sent, most_sent))
        flight = self._flights[*key, rank, most_sent]
        if most_sent is not None:
            return flight
        return _with_rounds(flight, (num_micro_batches - num) * _num_inlets(placement, rank))


def _as_telling(num_ranks: int, num_micro_batches: int) -> int:
    """The fewest micro-batches of which a rank holds as many, with rounds as long as `interleaved_rounds` has them."""
    num_rounds, left = divmod(num_micro_batches, num_ranks)
    if num_rounds <= _NUM_ROUNDS:
        return num_micro_batches
    longer = _NUM_ROUNDS * -(-left // num_rounds)
    return _NUM_ROUNDS * num_ranks + longer if longer < num_ranks else num_micro_batches


def _at_most(number: int, most: int | None) -> int:
    return number if most is None else min(number, most)


def _with_rounds(flight: Flight, num_more: int) -> Flight:
    """A flight with the gradients that were sent in rounds that were left out."""
    return _changed(flight, lambda num_sent: num_sent + num_more * (num_sent > 0)) if num_more else flight


def _changed(flight: Flight, change: Callable[[int], int]) -> Flight:
    """A flight with other numbers of gradients sent."""

    def changed(moments: tuple[Held, ...]) -> tuple[Held, ...]:
        return tuple(replace(each, num_sent=change(each.num_sent)) for each in moments)

    return Flight(tuple(map(changed, flight.backwards)), changed(flight.between))


def _is_remote(placement: StagePlacement, stage: int, neighbour: int) -> bool:
    return 0 <= neighbour < placement.num_stages and placement.rank_of(stage) != placement.rank_of(neighbour)


def _num_inlets(placement: StagePlacement, rank: int) -> int:
    """Stages of a rank that are given what another rank has computed."""
    return sum(_is_remote(placement, stage, stage - 1) for stage in placement.stages_of(rank))


def _flight(row: Sequence[Action], placement: StagePlacement, rank: int) -> Flight:
    stages = placement.stages_of(rank)
    found: dict[int | None, list[Held]] = {}
    for index, held in _held(row, placement, stages):
        found.setdefault(index, []).append(held)
    backwards = tuple(_highest(_most(found.get(index, ()))) for index in range(len(stages)))
    known = [held for moments in backwards for held in moments]
    others = [held for held in _most(found.get(None, ())) if not any(each.covers(held) for each in known)]
    return Flight(backwards, _highest(others))


def _held(row: Sequence[Action], placement: StagePlacement, stages: Sequence[int]) -> Iterator[tuple[int | None, Held]]:
    """What is held as each backward begins, with its stage's index, and at the ends of forwards and of backwards."""
    index_of = {stage: index for index, stage in enumerate(stages)}
    has_inlet = {stage: _is_remote(placement, stage, stage - 1) for stage in stages}
    has_outlet = {stage: _is_remote(placement, stage, stage + 1) for stage in stages}
    whole, deferred, num_sent = [0] * len(stages), [0] * len(stages), 0
    for action, following in zip(row, [*row[1:], None], strict=True):
        index, num_arrived = index_of[action.stage], 0
        if following is not None and following.kind is not Kind.BACKWARD_WEIGHT:
            # What the next action needs of other ranks is received while the one before it runs.
            num_arrived = int((has_inlet if following.kind is Kind.FORWARD else has_outlet)[following.stage])
        if action.kind is Kind.FORWARD:
            whole[index] += 1
            yield None, Held(tuple(whole), tuple(deferred), num_arrived, num_sent)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            yield index, Held(tuple(whole), tuple(deferred), num_arrived, num_sent)
            whole[index] -= 1
            num_sent += has_inlet[action.stage]
            if action.kind is Kind.BACKWARD_INPUT:
                deferred[index] += 1
                yield None, Held(tuple(whole), tuple(deferred), num_arrived, num_sent)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            deferred[index] -= 1


def _most(moments: Iterable[Held]) -> Iterable[Held]:
    """One of those that keep the same, with what comes and goes at most."""
    most: dict[tuple[int, ...], Held] = {}
    for each in moments:
        before = most.get(each.counts)
        if before is None:
            most[each.counts] = each
        elif each.num_arrived > before.num_arrived or each.num_sent > before.num_sent:
            num_arrived, num_sent = max(each.num_arrived, before.num_arrived), max(each.num_sent, before.num_sent)
            most[each.counts] = replace(each, num_arrived=num_arrived, num_sent=num_sent)
    return most.values()


def _highest(moments: Iterable[Held]) -> tuple[Held, ...]:
    """Those that no other one covers, the one with most first."""
    found: list[Held] = []
    for each in moments:
        if not any(other.covers(each) for other in found):
            found = [other for other in found if not each.covers(other)] + [each]
    return tuple(sorted(found, key=lambda each: -sum(each.counts)))
