"""Generate pipeline schedules, and list them by name: a row of `RECIPES` says all that is particular to one.

The config's choices, the closed forms, the planner and the tests read the row. Generated are the computations of each
rank for one optimizer step or one evaluation, of whole stages only; passes insert transfers, gathers, reductions and
steps.

Every recipe here takes the micro-batches of a stage in ascending order, for each kind of computation. So a row
is a sequence of (kind, stage) without numbers, a *pattern*: the k-th of its kind and stage is about micro-batch k.
A pattern may run past the last micro-batch; what is beyond it is dropped, which removes dependencies and adds none.
So a recipe that is defined for enough micro-batches (ZB-V: 2p - 1) also works for fewer: it is the larger schedule
without the micro-batches that do not exist.

In the formulas p is the number of ranks, m of micro-batches, v of stages a rank, i a rank from 0; F, B and W are
the seconds of a forward, of the gradient of the input and of that of the weights.

>>> print(one_f_one_b(num_ranks=2, num_micro_batches=3).schedule())
rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
>>> print(zero_bubble_h1(num_ranks=2, num_micro_batches=3).schedule())
rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
>>> placement_of("zb-v", num_ranks=4).stages_of(0)
(0, 7)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, starmap
from types import MappingProxyType
from typing import Final

from shardwise.config.errors import ConfigError
from shardwise.schedule.actions import Action, ActionKind, Schedule, ScheduleError
from shardwise.schedule.placement import StagePlacement

_F, _B, _I, _W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT

_Pattern = Iterable[tuple[ActionKind, int]]
"""A pattern is a row without micro-batches: kinds and stages."""


@dataclass(frozen=True, slots=True)
class ScheduleRows:
    """Generate the computations of a pipeline's ranks, one row at a time.

    `pattern` returns a rank's row without micro-batches. Raises ScheduleError on a count below 1.

    >>> [(kind.value, stage, micro_batch) for kind, stage, micro_batch in one_f_one_b(2, 2).of(1)]
    [('F', 1, 0), ('B', 1, 0), ('F', 1, 1), ('B', 1, 1)]
    """

    placement: StagePlacement
    num_micro_batches: int
    pattern: Callable[[int], _Pattern]

    def __post_init__(self) -> None:
        _check_micro_batches(self.num_micro_batches)

    def of(self, rank: int) -> list[tuple[ActionKind, int, int]]:
        """Return (kind, stage, micro-batch) of each computation of a rank, up to the last micro-batch."""
        numbers = defaultdict[tuple[ActionKind, int], Iterator[int]](count)
        return [(*key, next(numbers[key])) for key in self.row(rank)]

    def row(self, rank: int) -> list[tuple[ActionKind, int]]:
        """Return `of` without the micro-batches, which ascend from 0 for each kind and stage."""
        row = list(self.pattern(rank))
        beyond = {key: number - self.num_micro_batches for key, number in Counter(row).items()}
        num_left, index = sum(number for number in beyond.values() if number > 0), len(row)
        while num_left:  # those beyond the last micro-batch are the last of their kind and stage
            index -= 1
            if beyond[row[index]] > 0:
                beyond[row[index]] -= 1
                num_left -= 1
                del row[index]
        return row

    def schedule(self) -> Schedule:
        """Return the actions of all ranks as a schedule."""
        return Schedule(tuple(tuple(starmap(Action, self.of(rank))) for rank in range(self.placement.num_ranks)))


def naive(num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> ScheduleRows:
    """Run each micro-batch forward through all stages, then backward, one after another: one rank computes at a time.

    With one micro-batch this is classic model parallelism.

    Raises ScheduleError on counts below 1.
    """
    placement = StagePlacement(num_ranks, virtual_stages)

    def pattern(rank: int) -> _Pattern:
        stages = placement.stages_of(rank)
        return [*_each(_F, stages), *_each(_B, reversed(stages))] * num_micro_batches

    return ScheduleRows(placement, num_micro_batches, pattern)


def gpipe(num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> ScheduleRows:
    """Run all forwards, then all backwards (GPipe, Huang et al. 2019), one stage of a rank after another.

    Raises ScheduleError on counts below 1.
    """
    placement = StagePlacement(num_ranks, virtual_stages)

    def pattern(rank: int) -> _Pattern:
        stages = placement.stages_of(rank)
        forwards = [(_F, stage) for stage in stages for _ in range(num_micro_batches)]
        return forwards + [(_B, stage) for stage in reversed(stages) for _ in range(num_micro_batches)]

    return ScheduleRows(placement, num_micro_batches, pattern)


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> ScheduleRows:
    """Run a backward as soon as there is one (PipeDream-Flush, Narayanan et al. 2021, section 2.2.1).

    Rank i runs p - i forwards, then a backward and a forward in turn, so at most p - i micro-batches are
    in flight. Raises ScheduleError on counts below 1.
    """

    def pattern(rank: int) -> _Pattern:
        return [(_F, rank)] * (num_ranks - rank) + [(_B, rank), (_F, rank)] * num_micro_batches

    return ScheduleRows(StagePlacement(num_ranks), num_micro_batches, pattern)


def interleaved(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> ScheduleRows:
    """Run 1F1B over several stages a rank, in rounds of micro-batches (Narayanan et al. 2021, section 2.2.2).

    A round takes its micro-batches through a rank's first stage, then through its second, and so on. Rank i runs
    2(p - 1 - i) + (v - 1)r forwards, r the length of the longest round, then a forward and a backward in turn.
    Where p divides the number of micro-batches every round has p, which is the schedule of the paper; else
    `interleaved_rounds` says how long they are. With one stage a rank this is a 1F1B with more in flight than
    `one_f_one_b`.

    Raises ScheduleError on counts below 1.
    """
    placement = StagePlacement(num_ranks, virtual_stages)
    rounds = interleaved_rounds(num_ranks, num_micro_batches)

    def pattern(rank: int) -> _Pattern:
        stages = placement.stages_of(rank)
        forwards = [(_F, stage) for length in rounds for stage in stages for _ in range(length)]
        backwards = [(_B, stage) for length in rounds for stage in reversed(stages) for _ in range(length)]
        num_warm_up = min(2 * (num_ranks - 1 - rank) + (virtual_stages - 1) * max(rounds), len(forwards))
        yield from forwards[:num_warm_up]
        for forward, backward in zip(forwards[num_warm_up:], backwards, strict=False):
            yield forward
            yield backward
        yield from backwards[len(forwards) - num_warm_up :]

    return ScheduleRows(placement, num_micro_batches, pattern)


def interleaved_rounds(num_ranks: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return the number of micro-batches of each round of `interleaved`: p, or slightly more, the longer rounds first.

    A round shorter than p would leave ranks idle in every stage of it; a longer one only costs memory. Fewer
    than p micro-batches are one round. Raises ScheduleError on counts below 1.

    >>> interleaved_rounds(4, 8), interleaved_rounds(4, 14), interleaved_rounds(4, 3)
    ((4, 4), (5, 5, 4), (3,))
    """
    _check_micro_batches(num_micro_batches)
    num_rounds = max(1, num_micro_batches // num_ranks)
    least, num_longer = divmod(num_micro_batches, num_rounds)
    return (least + 1,) * num_longer + (least,) * (num_rounds - num_longer)


def zero_bubble_h1(num_ranks: int, num_micro_batches: int) -> ScheduleRows:
    """Run 1F1B with split backwards whose gradients of weights fill the bubble, in 1F1B's memory.

    Qi et al. 2023 (arXiv 2401.10241), section 2.1. Rank i runs p - i forwards ahead and leaves the gradients of
    weights of i micro-batches for later, so every rank holds at most p micro-batches. Raises ScheduleError on
    counts below 1.
    """

    def pattern(rank: int) -> _Pattern:
        return _split_one_f_one_b(rank, num_micro_batches, num_warm_up=num_ranks - rank, num_deferred=rank)

    return ScheduleRows(StagePlacement(num_ranks), num_micro_batches, pattern)


def zero_bubble_h2(num_ranks: int, num_micro_batches: int) -> ScheduleRows:
    """Run H1 with twice the memory and no bubble where F = B = W: Qi et al. 2023 (arXiv 2401.10241), section 2.2.

    Rank i runs 2(p - i) - 1 forwards ahead and leaves the gradients of weights of 2i micro-batches for later, so
    every rank holds at most 2p - 1 micro-batches. Ranks end one after another, as they begin: the bubble is 0 only
    where the optimizer step does not wait for all ranks. Raises ScheduleError on counts below 1.
    """

    def pattern(rank: int) -> _Pattern:
        num_warm_up = 2 * (num_ranks - rank) - 1
        return _split_one_f_one_b(rank, num_micro_batches, num_warm_up=num_warm_up, num_deferred=2 * rank)

    return ScheduleRows(StagePlacement(num_ranks), num_micro_batches, pattern)


def zero_bubble_v(num_ranks: int, num_micro_batches: int) -> ScheduleRows:
    """Run two stages a rank in a V with split backwards, in 1F1B's memory, without a bubble where F = B = W.

    This is ZB-V of Qi et al. 2023 (arXiv 2401.10241), section 6, one of the V-shaped family of Qi et al. 2024
    (arXiv 2405.15362). A rank's `down` is its stage on the way to the last rank, `up` that on the way back. At most
    2p stage activations are in flight on a rank. Raises ScheduleError on counts below 1.
    """
    placement = StagePlacement(num_ranks, stages_per_rank=2, is_v_shaped=True)
    num_steady = max(num_micro_batches - num_ranks, num_ranks - 1)

    def pattern(rank: int) -> _Pattern:
        down, up = placement.stages_of(rank)
        full_pass = [(_F, up), (_I, up), (_W, up)]
        return [
            # Until the first micro-batch comes back: rank i receives it after 2(p - i) - 1 forwards.
            *[(_F, down)] * (2 * (num_ranks - rank) - 1),
            # No gradients have reached this rank yet; forwards keep all ranks busy, in equal memory.
            *[(_F, up), (_F, down)] * rank,
            *full_pass * (num_ranks - rank),
            *[(_F, down), (_I, down), (_W, down), *full_pass] * num_steady,
            # No forward is left: gradients that other ranks wait for come first, those of weights fill the end.
            *[(_I, down), (_I, up)] * rank,
            *[(_I, down), (_W, down)] * (num_ranks - rank),
            *[(_W, up)] * rank,
            *[(_W, down)] * rank,
        ]

    return ScheduleRows(placement, num_micro_batches, pattern)


def pipeline_evaluation(placement: StagePlacement, num_micro_batches: int) -> Schedule:
    """Run the forward of each micro-batch through all stages of any placement, in the least time for m >= p.

    Looped stages take rounds of micro-batches as `interleaved` does; in a V a rank takes the two stages in turn.
    Raises ScheduleError on counts below 1.
    """
    rounds = interleaved_rounds(placement.num_ranks, num_micro_batches)

    def pattern(rank: int) -> _Pattern:
        stages = placement.stages_of(rank)
        if placement.is_v_shaped:
            ahead = [(_F, stages[0])] * (2 * (placement.num_ranks - rank) - 1)
            return ahead + [*_each(_F, reversed(stages))] * num_micro_batches
        return [(_F, stage) for length in rounds for stage in stages for _ in range(length)]

    return ScheduleRows(placement, num_micro_batches, pattern).schedule()


def _split_one_f_one_b(stage: int, num_micro_batches: int, *, num_warm_up: int, num_deferred: int) -> _Pattern:
    """Yield warm-up forwards, then backward and forward in turn; gradients of weights come `num_deferred` later."""
    yield from [(_F, stage)] * num_warm_up
    for index in range(num_micro_batches):
        yield _I, stage
        if index >= num_deferred:
            yield _W, stage
        yield _F, stage
    yield from [(_W, stage)] * num_deferred


def _each(kind: ActionKind, stages: Iterable[int]) -> _Pattern:
    return ((kind, stage) for stage in stages)


def _check_micro_batches(num_micro_batches: int) -> None:
    if num_micro_batches < 1:
        raise ScheduleError(
            "count-below-one", f"num_micro_batches={num_micro_batches} is below 1; a step runs at least one"
        )


@dataclass(frozen=True, slots=True)
class Bubble:
    """The seconds that the rank with the longest span is idle, as a closed form.

    `seconds` takes p, m, v, F, B and W. It holds from `least_micro_batches` on, which takes p and v, and with
    `needs_ordered_costs` for W <= F <= B alone.
    """

    seconds: Callable[[int, int, int, float, float, float], float]
    least_micro_batches: Callable[[int, int], int] = lambda p, v: 1
    needs_ordered_costs: bool = False


@dataclass(frozen=True, slots=True)
class ScheduleRecipe:
    """Describe a pipeline schedule.

    `rows` takes the numbers of ranks, micro-batches and virtual stages. A rank has `min_virtual_stages` to
    `max_virtual_stages` stages (None: any number). `splits_backward` says that it writes BACKWARD_INPUT and
    BACKWARD_WEIGHT instead of BACKWARD.

    The rest may be left out; the planner then counts and simulates all rows, which is slower. `max_in_flight` takes p,
    m, v and i and returns the most stage activations that a rank holds. `repeats_by_rounds` says that what a rank holds
    repeats itself after a few rounds of micro-batches, of the lengths of `interleaved_rounds`. `least_bubble_share`
    takes p, m and v and returns a lower bound of the bubble as a share of what a rank computes, for any times of equal
    stages; the planner's search tries the schedules that have one.
    """

    name: str
    rows: Callable[[int, int, int], ScheduleRows]
    min_virtual_stages: int = 1
    max_virtual_stages: int | None = None
    is_v_shaped: bool = False
    splits_backward: bool = False
    repeats_by_rounds: bool = False
    max_in_flight: Callable[[int, int, int, int], int] | None = None
    bubble: Bubble | None = None
    least_bubble_share: Callable[[int, int, int], float] | None = None

    @property
    def is_interleaved(self) -> bool:
        """Say whether a rank has two stages or more, as many as the user wants."""
        return self.min_virtual_stages > 1 and self.max_virtual_stages is None

    def placement(self, num_ranks: int, virtual_stages: int = 1) -> StagePlacement:
        """Return where the stages are; 1 virtual stage, the default of the config, means 2 in a V.

        Raises ConfigError where the schedule has no such number of virtual stages, ScheduleError without a rank.
        """
        stages_per_rank = 2 if self.is_v_shaped and virtual_stages == 1 else virtual_stages
        most = stages_per_rank if self.max_virtual_stages is None else self.max_virtual_stages
        if not self.min_virtual_stages <= stages_per_rank <= most:
            raise ConfigError(
                "schedule-virtual-stages",
                f"pipeline.virtual_stages={virtual_stages} for schedule {self.name}, {self._rule()}",
            )
        return StagePlacement(num_ranks, stages_per_rank, self.is_v_shaped)

    def _rule(self) -> str:
        if self.is_v_shaped:
            return "which has two stages a rank, in a V; use 2, or schedule interleaved"
        if self.max_virtual_stages == 1:
            return "which has one stage a rank; use 1, or schedule interleaved"
        if self.is_interleaved:
            return "which has several stages a rank; use 2 or more, or schedule 1f1b"
        return "which has a stage or more on every rank; use 1 or more"


# Forward, and gradients of inputs and of weights, do not take exactly the same time.
_OF_THIRDS: Final = 0.9


def _least_of_whole_backwards(p: int, m: int, v: int) -> float:
    """Narayanan et al. 2021, section 2.2; few micro-batches: the first rank waits until one is back, p(F + B + W)."""
    return max((p - 1) / (m * v), (p - m) / m)


def _least_of_deferred_weights(p: int, m: int) -> float:
    """With few micro-batches the first rank waits until one is back, p(F + B), and has the other backwards to do."""
    return _OF_THIRDS * (2 * p - m - 1) / (3 * m)


_OF_WHOLE_BACKWARDS: Final = Bubble(lambda p, m, v, f, b, w: (p - 1) * (f + b + w) / v, lambda p, v: p if v > 1 else 1)

# Sources of the closed forms. Bubbles of gpipe, 1f1b, interleaved: Narayanan et al. 2021 (arXiv 2104.04473), sections
# 2.2.1 and 2.2.2. H1 and H2: Qi et al. 2023 (arXiv 2401.10241), section 2.3; ZB-V: section 6, which gives 0 for
# F = B = W. The values for other costs are counted from the schedules: what W is longer than F, in H2 also than half of
# F + B, fills no more of the bubble and does not count. In flight: Narayanan, section 2.2, for gpipe and 1f1b;
# Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.3, for interleaved, whose L(1 + (p - 1) / (pv)) layers are
# pv + p - 1 stages on rank 0 where p divides m; Qi, sections 2.3 and 6, for H1 and H2, which with deferred ones hold
# min(m, p) and min(m, 2p - 1) on every rank, and for ZB-V's 2p; its values for m < 2p - 1 are counted.
RECIPES: Final[Mapping[str, ScheduleRecipe]] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            ScheduleRecipe(
                "naive",
                naive,
                max_in_flight=lambda p, m, v, i: v,
                bubble=Bubble(lambda p, m, v, f, b, w: m * (p - 1) * (f + b + w)),
            ),
            ScheduleRecipe(
                "gpipe",  # it keeps and waits at least as much as 1f1b, as naive does: neither is searched
                gpipe,
                max_in_flight=lambda p, m, v, i: m * v,
                bubble=_OF_WHOLE_BACKWARDS,
            ),
            ScheduleRecipe(
                "1f1b",
                lambda p, m, v: one_f_one_b(p, m),
                max_virtual_stages=1,
                max_in_flight=lambda p, m, v, i: min(m, p - i),
                bubble=_OF_WHOLE_BACKWARDS,
                least_bubble_share=_least_of_whole_backwards,
            ),
            ScheduleRecipe(
                "interleaved",
                interleaved,
                min_virtual_stages=2,
                repeats_by_rounds=True,
                max_in_flight=lambda p, m, v, i: min(
                    m * v, 2 * (p - 1 - i) + (v - 1) * max(interleaved_rounds(p, m)) + 1
                ),
                bubble=_OF_WHOLE_BACKWARDS,
                least_bubble_share=_least_of_whole_backwards,
            ),
            ScheduleRecipe(
                "zb-h1",
                lambda p, m, v: zero_bubble_h1(p, m),
                max_virtual_stages=1,
                splits_backward=True,
                repeats_by_rounds=True,
                max_in_flight=lambda p, m, v, i: min(m, p - i),
                bubble=Bubble(lambda p, m, v, f, b, w: (p - 1) * (f + b - min(w, f)), lambda p, v: p),
                # A third of 1F1B's were F = B = W; less, since W may be longer than the others.
                least_bubble_share=lambda p, m, v: max((p - 1) / (4 * m), _least_of_deferred_weights(p, m)),
            ),
            ScheduleRecipe(
                "zb-h2",
                lambda p, m, v: zero_bubble_h2(p, m),
                max_virtual_stages=1,
                splits_backward=True,
                repeats_by_rounds=True,
                max_in_flight=lambda p, m, v, i: min(m, 2 * (p - i) - 1),
                bubble=Bubble(
                    lambda p, m, v, f, b, w: (p - 1) * (f + b - min(2 * w, 2 * f, f + b)), lambda p, v: 2 * p - 1
                ),
                least_bubble_share=lambda p, m, v: max(0.0, _least_of_deferred_weights(p, m)),
            ),
            ScheduleRecipe(
                "zb-v",
                lambda p, m, v: zero_bubble_v(p, m),
                min_virtual_stages=2,
                max_virtual_stages=2,
                is_v_shaped=True,
                splits_backward=True,
                repeats_by_rounds=True,
                max_in_flight=lambda p, m, v, i: min(2 * m, m + i + 1, 2 * p),
                bubble=Bubble(
                    lambda p, m, v, f, b, w: (p - 1) * (b - w), lambda p, v: 2 * p - 1, needs_ordered_costs=True
                ),
                # Half of the other backwards are to do after the first micro-batch came back.
                least_bubble_share=lambda p, m, v: _OF_THIRDS * max(0.0, 2 * p - 2 * m - 0.5) / (3 * m),
            ),
        )
    }
)
"""`pipeline.schedule` may name these schedules."""


def recipe_of(name: str) -> ScheduleRecipe:
    """Return the recipe of a name; raise ConfigError where there is none."""
    if name not in RECIPES:
        raise ConfigError(
            "schedule-unknown", f"pipeline.schedule={name!r} is no schedule; use one of {', '.join(RECIPES)}"
        )
    return RECIPES[name]


def placement_of(recipe_name: str, num_ranks: int, virtual_stages: int = 1) -> StagePlacement:
    """Return where the stages of a schedule are.

    Args:
        virtual_stages: stages a rank; 1 means 2 in a V.

    Raises ConfigError as `ScheduleRecipe.placement` and `recipe_of` do.
    """
    return recipe_of(recipe_name).placement(num_ranks, virtual_stages)


def pipeline_step(recipe_name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Return the computations of one optimizer step, a row for each pipeline rank, of whole stages.

    Args:
        virtual_stages: stages a rank; 1 means 2 in a V.

    Raises ConfigError where the schedule is unknown or has no such number of virtual stages, and ScheduleError
    on counts below 1.
    """
    return pipeline_rows(recipe_name, num_ranks, num_micro_batches, virtual_stages).schedule()


def pipeline_rows(recipe_name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> ScheduleRows:
    """Return the rows of `pipeline_step`, generated rank by rank and without `Action` objects.

    `recipe_name`, `num_ranks`, `num_micro_batches`, `virtual_stages` and the errors are those of `pipeline_step`.

    >>> [stage for _, stage, _ in pipeline_rows("zb-v", num_ranks=4, num_micro_batches=1).of(1)]
    [1, 6, 6, 6, 1, 1]
    """
    recipe = recipe_of(recipe_name)
    placement = recipe.placement(num_ranks, virtual_stages)
    return recipe.rows(num_ranks, num_micro_batches, placement.stages_per_rank)
