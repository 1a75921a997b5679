"""Time a pipeline: run the Schedule that the runtime executes with the times of its stages, for few micro-batches.

What a schedule does repeats with its micro-batches, so its first and last ones are simulated and those between counted.
A program is kept for each schedule: its computations in an order in which each comes after all that it waits for.

>>> stage = StageTimes(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
>>> span = PipelineTimes().span("1f1b", 4, 1, 1000, [stage] * 4)
>>> span.step_s, span.busy_s[0]
(3009.0, 3000.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import Final

from shardwise.config.resolve import ConfigError
from shardwise.schedule.actions import Action, ActionKind, Schedule
from shardwise.schedule.pipelines import interleaved_rounds
from shardwise.schedule.placement import StagePlacement
from shardwise.schedule.registry import pipeline_rows, placement_of, recipe_of

_KIND_INDEX: Final[Mapping[ActionKind, int]] = MappingProxyType(
    {ActionKind.FORWARD: 0, ActionKind.BACKWARD: 1, ActionKind.BACKWARD_INPUT: 2, ActionKind.BACKWARD_WEIGHT: 3}
)
_NUM_KINDS = len(_KIND_INDEX)

# Rounds of p micro-batches with which it begins: fill, drain, and some between; and micro-batches, at least.
_NUM_ROUNDS = 3
_NUM_FIRST = 16
# Two rounds that take as long as each other, but for rounding.
_SAME = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Hold the seconds that one stage takes for one micro-batch, its own collectives and its recomputation included."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole micro-batch."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSpan:
    """Hold the time that the computations of a step take.

    Attributes:
        step_s: from the first start on any rank to the last end on any.
        rank_spans_s: from each rank's first start to its last end.
        busy_s: how long each rank computes.
    """

    step_s: float
    rank_spans_s: tuple[float, ...]
    busy_s: tuple[float, ...]

    @property
    def bubble_rate(self) -> float:
        """Return the mean share of the longest rank's span in which a rank computes nothing.

        Where all stages are equal it is that of Qi et al. 2023 (arXiv 2401.10241), section 2.3.
        """
        return 1.0 - sum(self.busy_s) / len(self.busy_s) / max(self.rank_spans_s)


@dataclass(frozen=True, slots=True)
class _Program:
    """Order a schedule's computations so that each comes after all that it waits for.

    Attributes:
        num_ranks: of the pipeline.
        ranks: the rank of each computation.
        before: indices of the computations on other stages that they wait for, or -1.
        durations: indices into the times: stage * 4 + kind.
        is_sent: whether what they wait for comes from another rank.
    """

    num_ranks: int
    ranks: list[int]
    before: list[int]
    durations: list[int]
    is_sent: list[bool]

    def ends(self, seconds: Sequence[float], transfer_s: float) -> tuple[list[float], list[float]]:
        """Return the first starts and last ends of the ranks."""
        free = [0.0] * self.num_ranks
        first: list[float | None] = [None] * self.num_ranks
        end = [0.0] * (len(self.ranks) + 1)  # the last one is that of nothing
        lags = map(transfer_s.__mul__, self.is_sent) if transfer_s else repeat(0.0)
        for index, (rank, before, duration, lag) in enumerate(
            zip(self.ranks, self.before, self.durations, lags, strict=False)
        ):
            start_s = free[rank]
            arrival_s = end[before] + lag
            if arrival_s > start_s:
                start_s = arrival_s
            if first[rank] is None:
                first[rank] = start_s
            free[rank] = end[index] = start_s + seconds[duration]
        return [each or 0.0 for each in first], free


class PipelineTimes:
    """Time pipelines, and keep the programs of the schedules that were asked for, and the answers."""

    def __init__(self) -> None:
        self._programs: dict[tuple[str, int, int, int], _Program] = {}
        self._spans: dict[tuple[object, ...], PipelineSpan] = {}

    def span(
        self,
        recipe_name: str,
        num_ranks: int,
        virtual_stages: int,
        num_micro_batches: int,
        stages: Sequence[StageTimes],
        transfer_s: float = 0.0,
    ) -> PipelineSpan:
        """Time the schedule of that name.

        Args:
            recipe_name: as `pipeline.schedule`.
            num_ranks: of the pipeline.
            virtual_stages: stages a rank.
            num_micro_batches: of a step.
            stages: times of the stages of all ranks, in the order of the model.
            transfer_s: seconds to send one micro-batch between stages; neighbours on one rank send nothing. It takes no
                rank's time, and is assumed to be shorter than the time between two sends of one channel.

        Raises:
            ConfigError: no such schedule, or another number of stages than it has.
            ScheduleError: a count below 1.
        """
        placement = placement_of(recipe_name, num_ranks, virtual_stages)
        if len(stages) != placement.num_stages:
            raise ConfigError(
                "stage-times-count",
                f"times of {len(stages)} stages for {placement.num_stages}; give one for each stage",
            )
        key = (recipe_name, num_ranks, virtual_stages, num_micro_batches, tuple(stages), transfer_s)
        if key not in self._spans:
            self._spans[key] = self._simulated(recipe_name, placement, num_micro_batches, stages, transfer_s)
        return self._spans[key]

    def _simulated(
        self,
        recipe_name: str,
        placement: StagePlacement,
        num_micro_batches: int,
        stages: Sequence[StageTimes],
        transfer_s: float,
    ) -> PipelineSpan:
        num_ranks, virtual_stages = placement.num_ranks, placement.stages_per_rank
        seconds = _seconds(stages)
        work_s = [sum(stages[stage].total_s for stage in placement.stages_of(rank)) for rank in range(num_ranks)]

        def simulated(micro_batches: int) -> tuple[list[float], list[float]]:
            program = self._program(recipe_name, num_ranks, virtual_stages, micro_batches)
            return program.ends(seconds, transfer_s)

        num_first = _num_first(recipe_name, placement, num_micro_batches)
        first, last = _counted(simulated, num_micro_batches, num_ranks, num_first)
        busy = [num_micro_batches * each for each in work_s]
        last = [max(end_s, start_s + busy_s) for end_s, start_s, busy_s in zip(last, first, busy, strict=True)]
        return PipelineSpan(
            step_s=max(last) - min(first),
            rank_spans_s=tuple(end_s - start_s for start_s, end_s in zip(first, last, strict=True)),
            busy_s=tuple(busy),
        )

    def _program(self, recipe_name: str, num_ranks: int, virtual_stages: int, num_micro_batches: int) -> _Program:
        key = (recipe_name, num_ranks, virtual_stages, num_micro_batches)
        if key not in self._programs:
            rows = pipeline_rows(recipe_name, num_ranks, num_micro_batches, virtual_stages)
            self._programs[key] = _program_of([rows.of(rank) for rank in range(num_ranks)])
        return self._programs[key]


def _num_first(recipe_name: str, placement: StagePlacement, num_micro_batches: int) -> int:
    """Count the micro-batches of rounds longer than p, which come before the rounds that repeat."""
    if not recipe_of(recipe_name).is_interleaved:
        return num_micro_batches % placement.num_ranks
    rounds = interleaved_rounds(placement.num_ranks, num_micro_batches)
    return sum(length for length in rounds if length != placement.num_ranks)


def _counted(
    simulated: Callable[[int], tuple[list[float], list[float]]], num_micro_batches: int, period: int, num_first: int
) -> tuple[list[float], list[float]]:
    """Return the first starts and last ends of the ranks, simulating only enough micro-batches to see what a period
    adds.
    """
    num_rounds = max(_NUM_ROUNDS, _NUM_FIRST // period)
    while num_first + 2 * num_rounds * period < num_micro_batches:
        few, one_more, many = (num_first + num * period for num in (num_rounds, num_rounds + 1, 2 * num_rounds))
        (first, once), (_, again), (_, last) = map(simulated, (few, one_more, many))
        added = [later - end_s for end_s, later in zip(once, again, strict=True)]
        counted = [end_s + (num_rounds - 1) * each for end_s, each in zip(again, added, strict=True)]
        if all(math.isclose(*each, rel_tol=_SAME) for each in zip(counted, last, strict=True)):
            left = (num_micro_batches - many) // period
            return first, [end_s + left * each for end_s, each in zip(last, added, strict=True)]
        num_rounds *= 2
    return simulated(num_micro_batches)


def span_of(schedule: Schedule, stages: Sequence[StageTimes], transfer_s: float = 0.0) -> PipelineSpan:
    """Time any schedule of computations of whole stages by simulating all of it.

    Args:
        schedule: the actions of each rank.
        stages: times of the stages of all ranks, in the order of the model.
        transfer_s: seconds to send one micro-batch to a stage on another rank.
    """
    rows = [[(each.kind, each.stage, each.micro_batch or 0) for each in row] for row in schedule.ranks]
    first, last = _program_of(rows).ends(_seconds(stages), transfer_s)
    busy = [sum(_duration(stages[action.stage], action) for action in row) for row in schedule.ranks]
    return PipelineSpan(
        step_s=max(last) - min(first),
        rank_spans_s=tuple(end_s - start_s for start_s, end_s in zip(first, last, strict=True)),
        busy_s=tuple(busy),
    )


def _seconds(stages: Sequence[StageTimes]) -> list[float]:
    return [each for stage in stages for each in _forward_and_backward(stage)]


def _forward_and_backward(stage: StageTimes) -> tuple[float, float, float, float]:
    backward_s = stage.backward_input_s + stage.backward_weight_s
    return stage.forward_s, backward_s, stage.backward_input_s, stage.backward_weight_s


def _duration(stage: StageTimes, action: Action) -> float:
    return _forward_and_backward(stage)[_KIND_INDEX[action.kind]]


def _program_of(rows: Sequence[Sequence[tuple[ActionKind, int, int]]]) -> _Program:
    """Merge all rows into one order: walk each as far as what it waits for is already in the program."""
    num_ranks = len(rows)
    program = _Program(num_ranks, [], [], [], [])
    last_stage = max(stage for row in rows for _, stage, _ in row)
    # For each stage's backwards and forwards: which computation, on which rank, made the result of a micro-batch.
    made: list[tuple[dict[int, tuple[int, int]], ...]] = [({}, {}) for _ in range(last_stage + 1)]
    next_of = [0] * num_ranks
    waiting: dict[tuple[bool, int, int], int] = {}
    ready = list(range(num_ranks))
    while ready:
        rank = ready.pop()
        row = rows[rank]
        for position in range(next_of[rank], len(row)):
            kind, stage, micro_batch = row[position]
            index, source = len(program.ranks), (-1, rank)
            if kind is not ActionKind.BACKWARD_WEIGHT:
                is_forward = kind is ActionKind.FORWARD
                neighbour = stage - 1 if is_forward else stage + 1
                if 0 <= neighbour <= last_stage:
                    known = made[neighbour][is_forward].get(micro_batch)
                    if known is None:
                        next_of[rank] = position
                        waiting[is_forward, neighbour, micro_batch] = rank
                        break
                    source = known
                made[stage][is_forward][micro_batch] = index, rank
                waits = waiting.pop((is_forward, stage, micro_batch), None)
                if waits is not None:
                    ready.append(waits)
            program.ranks.append(rank)
            program.before.append(source[0])
            program.durations.append(stage * _NUM_KINDS + _KIND_INDEX[kind])
            program.is_sent.append(source[1] != rank)
        else:
            next_of[rank] = len(row)
    return program
