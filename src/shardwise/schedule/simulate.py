"""Simulate a schedule: an action starts when its stream is free and all that it follows has ended.

The simulator gives a schedule its times; it does not check one (`verify` does), and it knows no hardware: costs
come from the caller. It is the only one: drawings take its actions, the planner its `PipelineSpan`s. Of many
micro-batches `PipelineSimulator` runs a few: what repeats itself is counted, and the answer is that of all of them.

>>> from shardwise.schedule.actions import ActionKind, Schedule
>>> schedule = Schedule.parse("rank 0: 0F0[b0] 0F0[b1] 0B0[b1] 0REDUCE[b1] 0B0[b0] 0REDUCE[b0] 0STEP[b0] 0STEP[b1]")
>>> timed = simulate(schedule, lambda rank, action: 2.0 if action.kind is ActionKind.REDUCE else 1.0)
>>> makespan_s(timed)  # forward 2, backward 2, REDUCE 4 of which a backward hides 1, STEP 2
9.0
>>> round(bubble_fraction(timed), 3)  # nothing is computed in 3 of the 9 seconds
0.333
>>> span = PipelineSimulator().span("1f1b", 4, 1, 1000, [OpTimes()] * 4)
>>> span.step_s, span.busy_s[0]
(3009.0, 3000.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from types import MappingProxyType
from typing import Final

from shardwise.config.errors import ConfigError
from shardwise.schedule.actions import COMPUTATIONS, STREAMS, Action, ActionKind, Schedule, ScheduleError, TimedAction
from shardwise.schedule.dependencies import Position, dependencies, execution_order
from shardwise.schedule.pipelines import pipeline_rows, pipeline_step, placement_of

_COMPUTE: Final = STREAMS[ActionKind.FORWARD]

Cost = Callable[[int, Action], float]
"""Returns the seconds of an action on a rank; those of a transfer belong to SEND, whose end its RECEIVE follows."""

_Key = tuple[str, int, int, int]
"""The arguments of `pipeline_rows`."""
_KINDS: Final = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
_INDEX_OF_KIND: Final = MappingProxyType({kind: index for index, kind in enumerate(_KINDS)})

_NUM_ROUNDS: Final = 4
"""Rounds of p micro-batches that are simulated first: two fill the pipeline, one repeats itself, one drains it."""

_NUM_EQUAL: Final = 2
"""Rounds that must take equally long: no rank is further ahead of another, since less than 2p are in flight."""

_SAME: Final = 1e-9
"""Two rounds take equally long within this share: rounding is far below it."""


@dataclass(frozen=True)
class OpTimes:
    """Hold the seconds of one micro-batch, on a rank with all its stages together or on one stage, and of a transfer of
    its result to another rank.
    """

    forward_s: float = 1.0
    backward_input_s: float = 1.0
    backward_weight_s: float = 1.0
    transfer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole micro-batch, without transfers."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s

    def of(self, kind: ActionKind) -> float:
        """Return the seconds of an action's kind; other kinds than computations and SEND take 0."""
        if kind is ActionKind.FORWARD:
            return self.forward_s
        if kind is ActionKind.BACKWARD:
            return self.backward_input_s + self.backward_weight_s
        if kind is ActionKind.BACKWARD_INPUT:
            return self.backward_input_s
        if kind is ActionKind.BACKWARD_WEIGHT:
            return self.backward_weight_s
        return self.transfer_s if kind is ActionKind.SEND else 0.0

    def split(self, num_stages: int) -> OpTimes:
        """Return the times of one of a rank's `num_stages` equal stages."""
        return OpTimes(
            self.forward_s / num_stages,
            self.backward_input_s / num_stages,
            self.backward_weight_s / num_stages,
            self.transfer_s,
        )

    def cost(self, num_stages: int) -> Cost:
        """Return the cost function for `simulate` of ranks with `num_stages` equal stages; other kinds cost 0."""
        stage = self.split(num_stages)
        seconds = {kind: stage.of(kind) for kind in ActionKind}
        return lambda rank, action: seconds[action.kind]


def mean_times(actions: Sequence[TimedAction]) -> OpTimes:
    """Return the mean times of a recorded run; a backward that was not split counts half for each gradient.

    >>> forward, backward = (Action.parse(text) for text in ("0F0", "0B0"))
    >>> mean_times([TimedAction(forward, 0, 0.0, 1.0, "compute"), TimedAction(backward, 0, 1.0, 4.0, "compute")])
    OpTimes(forward_s=1.0, backward_input_s=1.5, backward_weight_s=1.5, transfer_s=0.0)
    """
    computations = [timed for timed in actions if timed.action.kind in COMPUTATIONS]
    num_passes = len({(timed.rank, timed.action.micro_batch) for timed in computations})

    def mean_s(kind: ActionKind) -> float:
        return sum(timed.duration_s for timed in computations if timed.action.kind is kind) / max(1, num_passes)

    half_s = mean_s(ActionKind.BACKWARD) / 2
    return OpTimes(
        forward_s=mean_s(ActionKind.FORWARD),
        # Recomputation is part of the backward.
        backward_input_s=half_s + mean_s(ActionKind.BACKWARD_INPUT) + mean_s(ActionKind.RECOMPUTE),
        backward_weight_s=half_s + mean_s(ActionKind.BACKWARD_WEIGHT),
    )


def simulate(schedule: Schedule, cost: Cost) -> tuple[TimedAction, ...]:
    """Give a verified schedule its times, and return its actions rank by rank, in the schedule's order.

    Args:
        cost: returns the seconds of an action on a rank.

    Raises ScheduleError on a negative cost and on a deadlock.
    """
    follows = dependencies(schedule)
    order, blocked = execution_order(schedule, follows)
    if blocked:
        rank, index = min(blocked)
        raise _circle(schedule.ranks[rank][index], rank)
    times: dict[Position, tuple[float, float]] = {}
    for meeting in order:
        start_s = max((times[before][1] for member in meeting for before in follows[member]), default=0.0)
        end_s = start_s + max(_seconds(cost, rank, schedule.ranks[rank][index]) for rank, index in meeting)
        times.update(dict.fromkeys(meeting, (start_s, end_s)))
    return tuple(
        TimedAction(action, rank, *times[rank, index], stream=STREAMS[action.kind])
        for rank, row in enumerate(schedule.ranks)
        for index, action in enumerate(row)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSpan:
    """Hold the time that the computations of a step take.

    Attributes:
        step_s: from the first start on any rank to the last end on any.
        rank_spans_s: from each rank's first start to its last end.
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


class _Program:
    """Hold the computations of a pipeline in an order in which each comes after all that it follows.

    What computes a micro-batch follows what makes its input, as `dependencies` says for one micro-batch, and what is
    before it on its rank. There are numbers only, since garbage collection looks through all other objects.
    """

    def __init__(self, rows: Sequence[Sequence[int]], sources: Mapping[int, int]) -> None:
        """Merge the rows: walk each as far as what it waits for is already in the program.

        Args:
            rows: the slots (see `_slot`) of each rank; the micro-batches of a slot ascend.
            sources: of a slot, the one on another rank whose result it needs.
        """
        self.slots: list[int] = []
        self.before: list[int] = []  # the one before on its rank; -1 is none
        self.arrivals: list[int] = []  # the one on another rank whose result it needs
        self.numbers: list[list[int]] = [[] for _ in rows]
        made: list[list[int]] = [[] for _ in range(1 + max(map(max, rows)))]
        waiting: dict[int, int] = {}
        most, ready = max(map(len, rows)), list(range(len(rows)))
        while ready:
            rank = ready.pop()
            numbers = self.numbers[rank]
            before = numbers[-1] if numbers else -1
            for slot in islice(rows[rank], len(numbers), None):
                number, arrival, micro_batch = len(self.slots), -1, len(made[slot])
                if slot in sources:
                    source = sources[slot]
                    if micro_batch >= len(made[source]):
                        waiting[source * most + micro_batch] = rank
                        break
                    arrival = made[source][micro_batch]
                self.slots.append(slot)
                self.arrivals.append(arrival)
                self.before.append(before)
                numbers.append(number)
                made[slot].append(number)
                before = number
                if (awaited := slot * most + micro_batch) in waiting:
                    ready.append(waiting.pop(awaited))
        for rank, (row, numbers) in enumerate(zip(rows, self.numbers, strict=True)):
            if len(numbers) < len(row):
                stage, kind = divmod(row[len(numbers)], len(_KINDS))
                raise _circle(Action(_KINDS[kind], stage, row[: len(numbers)].count(row[len(numbers)])), rank)

    def run(self, stages: Sequence[OpTimes]) -> tuple[list[float], list[list[float]]]:
        """Return the first start of each rank, and the ends of its computations."""
        table = [stage.of(kind) for stage in stages for kind in _KINDS]
        lags_s: Iterable[float] = repeat(0.0)
        if any(stage.transfer_s for stage in stages):
            sent_s = [stage.transfer_s for stage in stages for _ in _KINDS]
            lags_s = [sent_s[self.slots[other]] if other >= 0 else 0.0 for other in self.arrivals]
        seconds = [table[slot] for slot in self.slots]
        ends = [0.0] * (len(seconds) + 1)  # at -1, that of none
        for number, (before, other, duration_s, lag_s) in enumerate(
            zip(self.before, self.arrivals, seconds, lags_s, strict=False)
        ):
            start_s, arrival_s = ends[before], ends[other] + lag_s
            ends[number] = (arrival_s if arrival_s > start_s else start_s) + duration_s
        firsts = [ends[row[0]] - seconds[row[0]] for row in self.numbers]
        return firsts, [[ends[number] for number in row] for row in self.numbers]


def _slot(kind: ActionKind, stage: int) -> int:
    """Return the index of a computation's kind and stage in a table of times."""
    return stage * len(_KINDS) + _INDEX_OF_KIND[kind]


def _sources(one: Schedule) -> dict[int, int]:
    """Return for each slot of a schedule of one micro-batch the slot on another rank whose result it needs."""
    slots = [[_slot(action.kind, action.stage) for action in row] for row in one.ranks]
    return {
        slots[rank][index]: slots[other_rank][other_index]
        for (rank, index), followed in dependencies(one).items()
        for other_rank, other_index in followed
        if other_rank != rank
    }


def _rounds_end(row: Sequence[int], longer: Sequence[int]) -> tuple[int, int] | None:
    """Return where a rank's equal rounds end, and the computations of one; None where it has none.

    Args:
        row: the slots of the rank's computations, whose micro-batches ascend.
        longer: the same with the micro-batches of a round more.
    """
    pairs = enumerate(zip(row, longer, strict=False))
    end = next((index for index, (one, other) in pairs if one != other), len(row))
    length = len(longer) - len(row)
    first = end - (_NUM_EQUAL + 1) * length
    return (end, length) if first >= 0 and row[first:] == longer[first + length :] else None


def _added_s(ends: Sequence[Sequence[float]], rounds: Sequence[tuple[int, int]]) -> float | None:
    """Return the seconds by which one round more delays what follows; None where rounds do not take equally long.

    The equal ones reach back as far as what any later computation waits for, so each further round takes as long, by
    induction, and what comes after all of them ends later by as much.
    """
    added: list[float] = []
    for row, (end, length) in zip(ends, rounds, strict=True):
        first = end - (_NUM_EQUAL + 1) * length
        pairs = zip(row[first : end - length], row[first + length : end], strict=True)
        added += (later_s - end_s for end_s, later_s in pairs)
    return max(added) if math.isclose(min(added), max(added), rel_tol=_SAME) else None


def _circle(action: Action, rank: int) -> ScheduleError:
    return ScheduleError(
        "dependency-circle", f"{action} on rank {rank} never starts; it waits in a circle, verify() shows which"
    )


class PipelineSimulator:
    """Simulate pipelines; keep the programs of the schedules that were asked for, and the answers."""

    def __init__(self) -> None:
        self._programs: dict[_Key, _Program] = {}
        self._rounds: dict[_Key, list[tuple[int, int]]] = {}
        self._spans: dict[tuple[object, ...], PipelineSpan] = {}

    def span(
        self, recipe_name: str, num_ranks: int, virtual_stages: int, num_micro_batches: int, stages: Sequence[OpTimes]
    ) -> PipelineSpan:
        """Time the schedule of that name; its cost does not grow with the micro-batches once they repeat themselves.

        Args:
            stages: times of the stages of all ranks, in the order of the model. What a stage sends to another rank
                takes no rank's time, and is assumed to arrive before the next of the same channel is sent.

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
        key = (recipe_name, num_ranks, virtual_stages, num_micro_batches, tuple(stages))
        if key not in self._spans:
            work_s = [sum(stages[stage].total_s for stage in placement.stages_of(rank)) for rank in range(num_ranks)]
            first, last = self._simulated(recipe_name, num_ranks, virtual_stages, num_micro_batches, stages)
            self._spans[key] = _span(first, last, [num_micro_batches * work for work in work_s])
        return self._spans[key]

    def _simulated(
        self, recipe_name: str, num_ranks: int, virtual_stages: int, num_micro_batches: int, stages: Sequence[OpTimes]
    ) -> tuple[list[float], list[float]]:
        """Return the first starts and the last ends of the ranks."""
        num_rounds, last_round = _NUM_ROUNDS, num_micro_batches // num_ranks
        rounds: list[tuple[int, int]] = []
        while num_rounds < last_round:
            num_simulated = num_micro_batches - (last_round - num_rounds) * num_ranks
            key = (recipe_name, num_ranks, num_simulated, virtual_stages)
            # Where there were some, there are twice as many now.
            more = [(end + num_rounds // 2 * length, length) for end, length in rounds]
            if rounds := more or self._rounds_of(key):
                first, ends = self._program(key).run(stages)
                added_s = _added_s(ends, rounds)
                if added_s is not None:
                    more_s = (last_round - num_rounds) * added_s
                    return first, [row[-1] + more_s for row in ends]
            num_rounds *= 2
        first, ends = self._program((recipe_name, num_ranks, num_micro_batches, virtual_stages)).run(stages)
        return first, [row[-1] for row in ends]

    def _program(self, key: _Key) -> _Program:
        if key not in self._programs:
            name, num_ranks, _, virtual_stages = key
            sources = _sources(pipeline_step(name, num_ranks, 1, virtual_stages))
            self._programs[key] = _Program(_rows(key), sources)
        return self._programs[key]

    def _rounds_of(self, key: _Key) -> list[tuple[int, int]]:
        """Return `_rounds_end` of each rank; nothing where a round more is not one more of them on each."""
        if key not in self._rounds:
            name, num_ranks, num_micro_batches, virtual_stages = key
            long_rows = _rows((name, num_ranks, num_micro_batches + num_ranks, virtual_stages))
            program = self._program(key)
            rows = [[program.slots[number] for number in numbers] for numbers in program.numbers]
            ends_of_rounds = [_rounds_end(row, long_row) for row, long_row in zip(rows, long_rows, strict=True)]
            self._rounds[key] = [end for end in ends_of_rounds if end] if all(ends_of_rounds) else []
        return self._rounds[key]


def _rows(key: _Key) -> list[list[int]]:
    """Return the slots of each rank's computations."""
    rows = pipeline_rows(*key)
    slots = {(kind, stage): _slot(kind, stage) for kind in _KINDS for stage in range(rows.placement.num_stages)}
    return [[slots[each] for each in rows.row(rank)] for rank in range(rows.placement.num_ranks)]


def _span(first: Sequence[float], last: Sequence[float], busy: Sequence[float]) -> PipelineSpan:
    return PipelineSpan(
        step_s=max(last) - min(first),
        rank_spans_s=tuple(end_s - start_s for start_s, end_s in zip(first, last, strict=True)),
        busy_s=tuple(busy),
    )


def makespan_s(timed: Sequence[TimedAction]) -> float:
    """Return the seconds from the first start to the last end; 0 for no actions."""
    if not timed:
        return 0.0
    return max(action.end_s for action in timed) - min(action.start_s for action in timed)


def bubble_fraction(timed: Sequence[TimedAction]) -> float:
    """Return the share of the makespan in which nothing is computed, a mean over the ranks; 0 for no actions."""
    num_ranks = len({action.rank for action in timed})
    whole_s = num_ranks * makespan_s(timed)
    return 1.0 - sum(busy_s(timed).values()) / whole_s if whole_s > 0 else 0.0


def busy_s(timed: Sequence[TimedAction]) -> dict[int, float]:
    """Return the seconds in which each rank computes; what runs inside another action counts once."""
    busy: dict[int, float] = {}
    until: dict[int, float] = {}
    for action in sorted((action for action in timed if action.stream == _COMPUTE), key=lambda each: each.start_s):
        start_s = max(action.start_s, until.get(action.rank, -math.inf))
        busy[action.rank] = busy.get(action.rank, 0.0) + max(0.0, action.end_s - start_s)
        until[action.rank] = max(action.end_s, start_s)
    return busy


def rank_span_s(timed: Sequence[TimedAction], rank: int) -> float:
    """Return the seconds from the first start to the last end of a rank's computations; 0 for none.

    The spans of the ranks of a pipeline begin and end one after another, so each may be shorter than the makespan.
    `timed` holds the actions of all ranks.
    """
    return makespan_s([action for action in timed if action.rank == rank and action.stream == _COMPUTE])


def rank_bubble_s(timed: Sequence[TimedAction], rank: int) -> float:
    """Return the idle seconds in the span of `rank` among `timed`: the bubble that `formulas` computes."""
    of_rank = [action for action in timed if action.rank == rank]
    return rank_span_s(of_rank, rank) - busy_s(of_rank).get(rank, 0.0)


def _seconds(cost: Cost, rank: int, action: Action) -> float:
    seconds = cost(rank, action)
    if not seconds >= 0:
        raise ScheduleError(
            "cost-negative", f"cost={seconds} s of {action} on rank {rank} is no duration; return a number >= 0"
        )
    return seconds
