"""Count what ranks of a pipeline hold at once: micro-batches of each of their stages, by the schedule itself.

Where a rank's stages have different sizes, the most stages at once need not be the most bytes, so the counts name the
stages. Moments at which a backward runs are separate, since it makes its own tensors.

>>> in_flight = InFlightTable().of("interleaved", 2, 2, 4, rank=0)
>>> [[held.whole for held in moments] for moments in in_flight.backwards]
[[(4, 1), (3, 2)], [(3, 2), (4, 1)]]
>>> InFlightTable().of("zb-h1", 4, 1, 1000, rank=2).between
(InFlightCounts(whole=(1,), deferred=(3,), num_arrived=0, num_sent=999),)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.schedule.actions import ActionKind
from shardwise.schedule.formulas import max_in_flight
from shardwise.schedule.placement import StagePlacement
from shardwise.schedule.registry import ScheduleRecipe, pipeline_rows, placement_of, recipe_of

_Numbers = NDArray[np.int64]
_CODES: Final[Mapping[ActionKind, int]] = MappingProxyType(
    {ActionKind.FORWARD: 0, ActionKind.BACKWARD_WEIGHT: 1, ActionKind.BACKWARD: -1, ActionKind.BACKWARD_INPUT: -2}
)
"""Codes of actions; those of backwards that need a gradient of the output are below 0."""

_MOST_CODE: Final = 2**62

_NUM_ROUNDS = 3
"""Rounds of p micro-batches after which a schedule that alternates forwards and backwards repeats itself."""


@dataclass(frozen=True)
class InFlightCounts:
    """Count the micro-batches that a rank holds at one moment, of each of its stages in their order.

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
        """Return all that stages keep, `whole` first."""
        return self.whole + self.deferred


@dataclass(frozen=True)
class InFlight:
    """List the moments at which a rank holds most; none covers another of its kind.

    Attributes:
        backwards: for each of its stages, the moments as a backward of it begins.
        between: moments at the ends of forwards, and of backwards that defer gradients of weights, that hold more.
    """

    backwards: tuple[tuple[InFlightCounts, ...], ...]
    between: tuple[InFlightCounts, ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.backwards, self.between))

    def __hash__(self) -> int:
        return self._hash  # these are looked up much more often than they are made

    @property
    def moments(self) -> tuple[InFlightCounts, ...]:
        """Return all moments."""
        return (*(held for moments in self.backwards for held in moments), *self.between)


class _ScheduleRow(NamedTuple):
    """Name a rank of a schedule."""

    recipe_name: str
    num_ranks: int
    virtual_stages: int
    num_micro_batches: int
    rank: int


class InFlightTable:
    """Count what schedules have in flight, and keep the counts that were asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[_ScheduleRow, int | None], InFlight] = {}
        self._reductions: dict[_ScheduleRow, tuple[tuple[int, bool], ...]] = {}
        self._same: dict[InFlight, InFlight] = {}

    def of(
        self,
        recipe_name: str,
        num_ranks: int,
        virtual_stages: int,
        num_micro_batches: int,
        *,
        rank: int,
        most_sent: int | None = None,
    ) -> InFlight:
        """Count what one rank holds; equal counts are one object.

        Args:
            recipe_name: as `pipeline.schedule`.
            num_ranks: of the pipeline.
            virtual_stages: stages a rank.
            num_micro_batches: of a step, on each data rank.
            rank: the rank in the pipeline.
            most_sent: gradients that have gone are counted up to this number; None counts all.

        Raises:
            ConfigError: no such schedule.
            ScheduleError: a count below 1, or no such rank.
        """
        return self._of(_ScheduleRow(recipe_name, num_ranks, virtual_stages, num_micro_batches, rank), most_sent)

    def _of(self, row: _ScheduleRow, most_sent: int | None) -> InFlight:
        key = (row, most_sent)
        if key not in self._known:
            in_flight = self._counted(row, most_sent)
            self._known[key] = self._same.setdefault(in_flight, in_flight)
        return self._known[key]

    def _counted(self, row: _ScheduleRow, most_sent: int | None) -> InFlight:
        name, num_ranks, virtual_stages, num_micro_batches, rank = row
        recipe, placement = recipe_of(name), placement_of(name, num_ranks, virtual_stages)
        if placement.stages_per_rank == 1 and not recipe.splits_backward:
            num = max_in_flight(name, num_ranks, num_micro_batches, virtual_stages, rank)
            awaits_gradient, awaits_input = num > 1 and rank < num_ranks - 1, num < num_micro_batches and rank > 0
            # Where gradients do not arrive, nothing does as the last is sent: one less was sent as the last input does.
            num_sent = num_micro_batches - num - (awaits_input and not awaits_gradient) if rank else 0
            num_arrived = int(awaits_gradient or awaits_input)
            return InFlight(((InFlightCounts((num,), (0,), num_arrived, _at_most(num_sent, most_sent)),),))
        num = _as_telling(recipe, num_ranks, num_micro_batches)
        if num < num_micro_batches and most_sent is not None:
            return self._of(row._replace(num_micro_batches=num), most_sent)
        actions = pipeline_rows(name, num_ranks, num, virtual_stages).of(rank)
        return _with_rounds(
            _counts_of(actions, placement, rank, most_sent), (num_micro_batches - num) * num_inlets(placement, rank)
        )

    def reductions(
        self, recipe_name: str, num_ranks: int, virtual_stages: int, num_micro_batches: int, *, rank: int
    ) -> tuple[tuple[int, bool], ...]:
        """Return the order in which a rank's stages get gradients and are reduced, where each micro-batch is reduced
        separately.

        Args:
            recipe_name: as `pipeline.schedule`.
            num_ranks: of the pipeline.
            virtual_stages: stages a rank.
            num_micro_batches: of a step, on each data rank.
            rank: the rank in the pipeline.

        Returns:
            The stage's number among those of the rank, the last one first, and whether it is reduced. Some of what
            repeats itself, and some micro-batches after those that fill the pipeline, are left out.
        """
        placement = placement_of(recipe_name, num_ranks, virtual_stages)
        if placement.stages_per_rank == 1 and not recipe_of(recipe_name).splits_backward:
            return ((0, False), (0, True)) * min(num_micro_batches, _NUM_ROUNDS)
        num = min(num_micro_batches, num_ranks + 1)
        row = _ScheduleRow(recipe_name, num_ranks, virtual_stages, num, rank)
        if row not in self._reductions:
            actions = pipeline_rows(recipe_name, num_ranks, num, virtual_stages).of(rank)
            self._reductions[row] = tuple(_reductions(actions, sorted(placement.stages_of(rank), reverse=True)))
        return self._reductions[row]


def _reductions(row: Sequence[tuple[ActionKind, int, int]], stages: Sequence[int]) -> list[tuple[int, bool]]:
    found: list[tuple[int, bool]] = []
    for kind, stage, _ in row:
        if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
            found.append((stages.index(stage), False))
        if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            found.append((stages.index(stage), True))
        if found[-2:] * (_NUM_ROUNDS + 1) == found[-2 * (_NUM_ROUNDS + 1) :]:
            del found[-2:]
    return found


def _as_telling(recipe: ScheduleRecipe, num_ranks: int, num_micro_batches: int) -> int:
    """Return the fewest micro-batches with equal counts, with rounds as long as those of `interleaved_rounds`."""
    num_rounds, left = divmod(num_micro_batches, num_ranks)
    has_unequal_rounds = not recipe.splits_backward and left % max(1, num_rounds) > 0
    if not recipe.repeats_by_rounds or num_rounds <= _NUM_ROUNDS or has_unequal_rounds:
        return num_micro_batches
    longer = _NUM_ROUNDS * -(-left // num_rounds)
    return _NUM_ROUNDS * num_ranks + longer if longer < num_ranks else num_micro_batches


def _at_most(number: int, most: int | None) -> int:
    return number if most is None else min(number, most)


def _with_rounds(in_flight: InFlight, num_more: int) -> InFlight:
    """Add the gradients that were sent in rounds that were left out."""
    if not num_more:
        return in_flight

    def with_more(moments: tuple[InFlightCounts, ...]) -> tuple[InFlightCounts, ...]:
        return tuple(replace(each, num_sent=each.num_sent + num_more * (each.num_sent > 0)) for each in moments)

    return InFlight(tuple(map(with_more, in_flight.backwards)), with_more(in_flight.between))


def is_remote(placement: StagePlacement, stage: int, neighbour: int) -> bool:
    """Say whether a stage's neighbour exists and is on another rank.

    Args:
        placement: which rank has which stages.
        stage: the stage's index.
        neighbour: the index of the stage before or after it; it may be out of range.
    """
    return 0 <= neighbour < placement.num_stages and placement.rank_of(stage) != placement.rank_of(neighbour)


def num_inlets(placement: StagePlacement, rank: int) -> int:
    """Count the stages of a rank that get what another rank has computed."""
    return sum(is_remote(placement, stage, stage - 1) for stage in placement.stages_of(rank))


def _counts_of(
    row: Sequence[tuple[ActionKind, int, int]], placement: StagePlacement, rank: int, most_sent: int | None
) -> InFlight:
    moments = _Moments.of(row, placement, placement.stages_of(rank), most_sent)
    backwards = tuple(moments.highest(moments.backward == index) for index in range(moments.num_stages))
    known = [held for highest in backwards for held in highest]
    return InFlight(backwards, moments.highest(moments.backward < 0, known))


@dataclass(frozen=True)
class _Moments:
    """Hold the counts as each backward begins, and at the ends of forwards and of backwards of the input.

    Attributes:
        backward: the index of the stage whose backward begins, or -1; [moments]
        counts: as `InFlightCounts.counts`; [moments, 2 x stages]
        num_arrived, num_sent: as those of `InFlightCounts`; [moments]
    """

    backward: _Numbers
    counts: _Numbers
    num_arrived: _Numbers
    num_sent: _Numbers

    @classmethod
    def of(
        cls,
        row: Sequence[tuple[ActionKind, int, int]],
        placement: StagePlacement,
        stages: Sequence[int],
        most_sent: int | None,
    ) -> _Moments:
        """Count along a rank's computations."""
        index_of = {stage: index for index, stage in enumerate(stages)}
        kinds = np.array([_CODES[kind] for kind, _, _ in row])
        where = np.array([index_of[stage] for _, stage, _ in row])
        has_inlet = np.array([is_remote(placement, stage, stage - 1) for stage in stages], np.int64)
        has_outlet = np.array([is_remote(placement, stage, stage + 1) for stage in stages], np.int64)
        is_forward, is_backward = kinds == _CODES[ActionKind.FORWARD], kinds < 0
        is_input = kinds == _CODES[ActionKind.BACKWARD_INPUT]
        is_weight = kinds == _CODES[ActionKind.BACKWARD_WEIGHT]
        change = np.zeros((len(row), 2 * len(stages)), np.int64)
        computation = np.arange(len(row))
        change[computation, where] = is_forward.astype(np.int64) - is_backward
        change[computation, len(stages) + where] = is_input.astype(np.int64) - is_weight
        held = change.cumsum(axis=0)
        # What the next action needs of other ranks is received while the one before it runs.
        needed = np.where(is_forward, has_inlet[where], has_outlet[where]) * ~is_weight
        num_arrived = np.append(needed[1:], 0)
        sent = has_inlet[where] * is_backward
        num_sent = sent.cumsum()
        before = num_sent - sent
        if most_sent is not None:
            num_sent, before = np.minimum(num_sent, most_sent), np.minimum(before, most_sent)
        begins, ends = is_backward, is_forward | is_input
        return cls(
            np.concatenate((where[begins], np.full(ends.sum(), -1))),
            np.concatenate(((held - change)[begins], held[ends])),
            np.concatenate((num_arrived[begins], num_arrived[ends])),
            np.concatenate((before[begins], num_sent[ends])),
        )

    @property
    def num_stages(self) -> int:
        """Return the number of the rank's stages."""
        return self.counts.shape[1] // 2

    def highest(self, chosen: NDArray[np.bool_], known: Sequence[InFlightCounts] = ()) -> tuple[InFlightCounts, ...]:
        """Return the chosen moments that neither others nor known ones cover; of equal counts, the one with most
        arrived and sent.
        """
        _, first, same = np.unique(_codes(self.counts[chosen]), return_index=True, return_inverse=True)
        counts = self.counts[chosen][first]
        num_arrived, num_sent = self.num_arrived[chosen], self.num_sent[chosen]
        ascending, most = np.argsort(num_arrived + num_sent, kind="stable"), np.zeros(len(counts), np.int64)
        most[same.reshape(-1)[ascending]] = ascending  # the last one stays
        num_arrived, num_sent = num_arrived[most], num_sent[most]
        is_left = np.ones(len(counts), np.bool_)
        for each in known:
            is_left &= (counts > each.counts).any(axis=1)
        found = []
        for index in np.lexsort((first, -counts.sum(axis=1))):
            if is_left[index]:
                is_left &= (counts > counts[index]).any(axis=1)
                kept = counts[index].tolist()
                whole, deferred = tuple(kept[: self.num_stages]), tuple(kept[self.num_stages :])
                found.append(InFlightCounts(whole, deferred, int(num_arrived[index]), int(num_sent[index])))
        return tuple(found)


def _codes(counts: _Numbers) -> _Numbers:
    """Give each row of counts one number, the same for equal rows alone; [rows, counts] -> [rows]."""
    codes = np.zeros(len(counts), np.int64)
    most = 0
    for column in counts.T:
        radix = int(column.max(initial=0)) + 1
        if most * radix + radix > _MOST_CODE:
            _, codes = np.unique(codes, return_inverse=True)
            most = len(counts)
        codes = codes * radix + column
        most = most * radix + radix - 1
    return codes
