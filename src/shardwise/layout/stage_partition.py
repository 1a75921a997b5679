"""Decide which units of a model form each pipeline stage, so that stages take similar times and ranks similar memory.

The partition makes the largest stage as small as possible; among those that do so, the most even one is taken.

>>> shapes = [(128, 64), *[(64, 64)] * 6, (128, 64)]
>>> params = [ParamEntry(f"{index}.weight", (), "root", shape, True) for index, shape in enumerate(shapes)]
>>> flops = [0.0, *(2.0 * math.prod(shape) for shape in shapes[1:])]
>>> units = [StageUnit(str(i), (str(i),), (params[i],), True, flops[i]) for i in range(8)]
>>> partition = partition_stages(units, estimate_costs(units, bytes_per_element=16), num_stages=3)
>>> partition.first_units, partition.stages_of["7.weight"]
(('0', '3', '6'), (2,))
>>> print(partition.describe())
stage  rank  units  parameters  memory MiB    time
    0     0  0..2       16,384         0.2  0.75 x
    1     1  3..5       12,288         0.2  1.12 x
    2     2  6..7       12,288         0.2  1.12 x
stage 0 takes 0.75 x the mean time, the last 1.12 x; rank 0 holds most, 1.20 x the mean memory
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import mul
from typing import Final, Literal

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import ResolvedConfig
from shardwise.layout.facts import ParamEntry, StageUnit
from shardwise.layout.layout import states_of
from shardwise.layout.mesh_shape import SHARD_AXES, MeshShape
from shardwise.layout.precision import DTYPE_BYTES, OPAQUE, PrecisionPolicy, precision_policy
from shardwise.layout.zero_stages import Placement, effective_stage
from shardwise.optim.rules import matrix_state_names
from shardwise.schedule.pipelines import placement_of

Balance = Literal["both", "time", "memory"]

# Shares are whole numbers of 2^-40, so that equal blocks give equal sums in any order.
_WHOLE: Final = 2**40


@dataclass(frozen=True)
class UnitCost:
    """Hold the cost of a unit.

    Attributes:
        compute: forward FLOPs a token, or seconds; only shares of the sum over all units count.
        memory_bytes: bytes of its parameters, gradients and optimizer states.
    """

    name: str
    compute: float
    memory_bytes: float


@dataclass(frozen=True)
class StagePartition:
    """Hold the partition of a model into stages.

    Attributes:
        units: the units in the order in which they run.
        starts: the index of each stage's first unit.
        placement: the pipeline rank of each stage.
    """

    units: tuple[StageUnit, ...]
    costs: tuple[UnitCost, ...]
    starts: tuple[int, ...]
    placement: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the whole pipeline."""
        return len(self.starts)

    @cached_property
    def stages(self) -> tuple[tuple[StageUnit, ...], ...]:
        """Return the units of every stage."""
        return tuple(self.units[start:stop] for start, stop in pairwise((*self.starts, len(self.units))))

    @property
    def first_units(self) -> tuple[str, ...]:
        """Return the names of the stages' first units; without the first name, this is what `pipeline.cut` takes."""
        return tuple(self.units[start].name for start in self.starts)

    @cached_property
    def stages_of(self) -> dict[str, tuple[int, ...]]:
        """Return the stages that use a parameter, by each of its names; several where it is tied."""
        stages: dict[str, list[int]] = {}
        for index, stage in enumerate(self.stages):
            names = dict.fromkeys(n for unit in stage for entry in unit.params for n in (entry.name, *entry.aliases))
            for name in names:
                stages.setdefault(name, []).append(index)
        return {name: tuple(indices) for name, indices in stages.items()}

    @cached_property
    def times(self) -> tuple[float, ...]:
        """Return each stage's compute time as a multiple of the stages' mean; 1 where no unit computes."""
        return _to_mean([sum(cost.compute for cost in costs) for costs in self._stage_costs])

    @cached_property
    def memory_bytes(self) -> tuple[float, ...]:
        """Return the bytes that the units of each stage hold."""
        return tuple(sum(cost.memory_bytes for cost in costs) for costs in self._stage_costs)

    @cached_property
    def rank_memory(self) -> tuple[float, ...]:
        """Return the memory of each pipeline rank as a multiple of the ranks' mean."""
        totals = dict.fromkeys(sorted(set(self.placement)), 0.0)
        for rank, num_bytes in zip(self.placement, self.memory_bytes, strict=True):
            totals[rank] += num_bytes
        return _to_mean(list(totals.values()))

    @cached_property
    def _stage_costs(self) -> tuple[tuple[UnitCost, ...], ...]:
        return tuple(self.costs[start:stop] for start, stop in pairwise((*self.starts, len(self.units))))

    def describe(self) -> str:
        """Return a table of the stages, and how far the first and the last are from the mean."""
        rows = [("stage", "rank", "units", "parameters", "memory MiB", "time")]
        for index, stage in enumerate(self.stages):
            sizes = {entry.name: math.prod(entry.shape) for unit in stage for entry in unit.params}
            names = stage[0].name if len(stage) == 1 else f"{stage[0].name}..{stage[-1].name}"
            mebibytes = f"{self.memory_bytes[index] / 2**20:,.1f}"
            row = (str(index), str(self.placement[index]), names, f"{sum(sizes.values()):,}", mebibytes)
            rows.append((*row, f"{self.times[index]:.2f} x"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        fullest = max(range(len(self.rank_memory)), key=self.rank_memory.__getitem__)
        lines.append(
            f"stage 0 takes {self.times[0]:.2f} x the mean time, the last {self.times[-1]:.2f} x; "
            f"rank {fullest} holds most, {self.rank_memory[fullest]:.2f} x the mean memory"
        )
        return "\n".join(lines)


def partition_stages(
    units: Sequence[StageUnit],
    costs: Sequence[UnitCost],
    num_stages: int,
    *,
    balance: Balance = "both",
    placement: Sequence[int] | None = None,
    pinned: Sequence[str] | None = None,
) -> StagePartition:
    """Partition a model into stages of consecutive units.

    A stage's time and a rank's memory are taken as multiples of their means. The partition minimises the largest of
    these numbers, then the sum of their squares. Of equal ones it takes the one whose later stages are larger, since
    earlier ranks hold the activations of more micro-batches. With one stage a rank the result is the exact optimum.
    With several, two partitions are improved: the optimum for as many ranks as stages, and the optimum of the times
    alone. Runs of neighbouring cuts are moved by one unit until no move helps; that is nearly always the optimum.

    Args:
        units: in the order in which they run.
        costs: the cost of each unit, in the same order.
        balance: what is made even: the stages' "time", the ranks' "memory", or "both".
        placement: the pipeline rank of each stage; None for one stage a rank.
        pinned: names of the units with which the stages begin, without the first stage's; None to find them.

    Raises:
        ConfigError: the model has fewer units than stages, a stage would have no parameters, or a pinned unit is
            unknown, out of order or no place to cut.
    """
    if [unit.name for unit in units] != [cost.name for cost in costs]:
        raise ValueError("costs are of other units; estimate_costs(units, ...) gives those of the units")
    placement = tuple(range(num_stages)) if placement is None else tuple(placement)
    if len(placement) != num_stages:
        raise ValueError(f"placement is of {len(placement)} stages, but num_stages={num_stages}; give each its rank")
    most = _most_stages(units)
    if not 1 <= num_stages <= most:
        raise ConfigError(
            "too-many-stages",
            f"{num_stages} pipeline stages, but the model has {most} units with parameters that may begin one, from "
            f"{units[0].name} to {units[-1].name}; pp x virtual_stages may be {_up_to(most)}",
        )
    if pinned is not None:
        starts = _read_pinned(units, num_stages, pinned)
    else:
        problem = _PartitionProblem.of(units, costs, balance, placement)
        starts = _best_starts(problem)
    return StagePartition(tuple(units), tuple(costs), starts, placement)


@dataclass(frozen=True)
class _PartitionProblem:
    """Hold the sums of costs over the units before each unit, as shares of the whole, and where a stage may begin."""

    compute: tuple[int, ...]
    memory: tuple[int, ...]
    num_with_params: tuple[int, ...]
    may_begin: tuple[bool, ...]
    placement: tuple[int, ...]

    @classmethod
    def of(
        cls, units: Sequence[StageUnit], costs: Sequence[UnitCost], balance: Balance, placement: tuple[int, ...]
    ) -> _PartitionProblem:
        compute = _shares([0.0 if balance == "memory" else cost.compute for cost in costs])
        memory = _shares([0.0 if balance == "time" else cost.memory_bytes for cost in costs])
        return cls(
            _sums(compute),
            _sums(memory),
            _sums([bool(unit.params) for unit in units]),
            tuple(index == 0 or unit.is_cut_allowed_before for index, unit in enumerate(units)),
            placement,
        )

    @property
    def num_units(self) -> int:
        return len(self.may_begin)

    def is_stage(self, start: int, stop: int) -> bool:
        return start < stop and self.may_begin[start] and self.num_with_params[start] < self.num_with_params[stop]

    def weights(self, start: int, stop: int) -> tuple[int, int]:
        """Return the compute and the memory of the stage of units [start, stop), as shares of the whole."""
        return self.compute[stop] - self.compute[start], self.memory[stop] - self.memory[start]

    def score(self, starts: Sequence[int]) -> tuple[int, int]:
        """Return what is minimised: the largest multiple of a mean, then the sum of squares."""
        memory = dict.fromkeys(self.placement, 0)
        numbers: list[int] = []
        for rank, (start, stop) in zip(self.placement, pairwise((*starts, self.num_units)), strict=True):
            time, held = self.weights(start, stop)
            numbers.append(time * len(starts))
            memory[rank] += held
        numbers += [held * len(memory) for held in memory.values()]
        return max(numbers), sum(number * number for number in numbers)


def _best_starts(problem: _PartitionProblem) -> tuple[int, ...]:
    exact = _solve(problem)
    if len(set(problem.placement)) == len(problem.placement):
        return exact
    # Memory is summed over a rank's stages, so the partition with the best times alone may be the better start.
    by_time = _solve(replace(problem, memory=(0,) * len(problem.memory)))
    return min((_improve(problem, starts) for starts in (exact, by_time)), key=problem.score)


def _solve(problem: _PartitionProblem) -> tuple[int, ...]:
    """Return the best partition for the case that every stage has its own rank."""
    num_stages = len(problem.placement)
    largest, _ = _fill_table(problem, num_stages, None)
    # Shares are rounded, so equal sums of different units may differ by half a share's last digit each.
    _, starts = _fill_table(problem, num_stages, largest + problem.num_units)
    return starts


def _fill_table(problem: _PartitionProblem, num_stages: int, limit: int | None) -> tuple[int, tuple[int, ...]]:
    """Minimise the largest stage; or, with a limit that no stage may exceed, the sum of squares."""
    # By number of stages, then by where the last of them stops: the least score, and where that stage starts.
    table: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    most = _largest_of_even(problem, num_stages) if limit is None else limit
    # The same as `problem.weights`, whose calls cost too much for the planner, which partitions hundreds of models.
    compute, memory, with_params = problem.compute, problem.memory, problem.num_with_params
    for num_left in range(num_stages - 1, -1, -1):
        row: dict[int, tuple[int, int]] = {}
        last_start, before = max(table[-1], default=-1), table[-1]
        for stop in range(1, problem.num_units + 1):
            if max(compute[-1] - compute[stop], memory[-1] - memory[stop]) > num_left * most:
                continue  # the stages after it could not hold the remaining units
            if max(compute[stop] - compute[last_start], memory[stop] - memory[last_start]) > most:
                break  # no stage can reach this far
            for start in range(min(stop - 1, last_start), -1, -1):
                time, held = compute[stop] - compute[start], memory[stop] - memory[start]
                # An earlier start only makes the stage larger.
                if (time if time > held else held) > (row[stop][0] if limit is None and stop in row else most):
                    break
                if start not in before or not problem.may_begin[start] or with_params[start] == with_params[stop]:
                    continue
                least = before[start][0]
                score = max(least, time, held) if limit is None else least + time * time + held * held
                if stop not in row or score <= row[stop][0]:
                    row[stop] = score, start
        table.append(row)
    starts: list[int] = []
    stop = problem.num_units
    for row in reversed(table[1:]):
        stop = row[stop][1]
        starts.append(stop)
    return table[-1][problem.num_units][0], tuple(reversed(starts))


class _UnitCosts:
    """Keep the score of a partition while its stages change one by one, without summing again."""

    def __init__(self, problem: _PartitionProblem, starts: Sequence[int]) -> None:
        self.problem = problem
        index_of = {rank: index for index, rank in enumerate(dict.fromkeys(problem.placement))}
        self._ranks = [index_of[rank] for rank in problem.placement]
        self._times, self._held = [0] * len(starts), [0] * len(starts)
        self._of_ranks = [0] * len(index_of)
        for stage, (start, stop) in enumerate(pairwise((*starts, problem.num_units))):
            self.put(stage, start, stop)

    def copy(self) -> _UnitCosts:
        other = copy(self)
        other._times, other._held, other._of_ranks = self._times[:], self._held[:], self._of_ranks[:]
        return other

    def put(self, stage: int, start: int, stop: int) -> None:
        compute, memory = self.problem.compute, self.problem.memory
        time, held = compute[stop] - compute[start], memory[stop] - memory[start]
        self._of_ranks[self._ranks[stage]] += (held - self._held[stage]) * len(self._of_ranks)
        self._times[stage], self._held[stage] = time * len(self._times), held

    @property
    def largest(self) -> int:
        return max(max(self._times), max(self._of_ranks))

    @property
    def squares(self) -> int:
        return sum(map(mul, self._times, self._times)) + sum(map(mul, self._of_ranks, self._of_ranks))


def _largest_of_even(problem: _PartitionProblem, num_stages: int) -> int:
    """Return the largest stage of equal numbers of units, or the whole: a bound for the best partition."""
    starts = [stage * problem.num_units // num_stages for stage in range(num_stages)]
    if not _is_partition(problem, starts):
        return max(problem.weights(0, problem.num_units))
    return max(max(problem.weights(*each)) for each in pairwise((*starts, problem.num_units)))


def _is_partition(problem: _PartitionProblem, starts: Sequence[int]) -> bool:
    return all(problem.is_stage(start, stop) for start, stop in pairwise((*starts, problem.num_units)))


def _improve(problem: _PartitionProblem, starts: tuple[int, ...]) -> tuple[int, ...]:
    """Take the best move as long as one makes the partition better."""
    best = problem.score(starts), starts
    while True:
        for numbers, by, first, stop in _moves(problem, starts):
            if (largest := numbers.largest) <= best[0][0]:
                moved = *starts[:first], *(start + by for start in starts[first:stop]), *starts[stop:]
                best = min(best, ((largest, numbers.squares), moved))
        if best[1] == starts:
            return starts
        starts = best[1]


def _moves(problem: _PartitionProblem, starts: tuple[int, ...]) -> Iterator[tuple[_UnitCosts, int, int, int]]:
    """Yield the legal moves of runs of neighbouring cuts by one unit: new costs, by what, first stage, end of run."""
    ends = (*starts[1:], problem.num_units)
    unmoved = _UnitCosts(problem, starts)
    for by in (-1, 1):
        for first in range(1, len(starts)):
            if not problem.is_stage(starts[first - 1], ends[first - 1] + by):
                continue
            numbers = unmoved.copy()
            numbers.put(first - 1, starts[first - 1], ends[first - 1] + by)
            for last in range(first, len(starts)):  # the last of the run: only its start moves
                if problem.is_stage(starts[last] + by, ends[last]):
                    numbers.put(last, starts[last] + by, ends[last])
                    yield numbers, by, first, last + 1
                if last + 1 == len(starts) or not problem.is_stage(starts[last] + by, ends[last] + by):
                    break
                numbers.put(last, starts[last] + by, ends[last] + by)


def _most_stages(units: Sequence[StageUnit]) -> int:
    """Count the stages with parameters that the units can form: each ends once it has some and the next may begin."""
    num_stages, has_params = 0, False
    for index, unit in enumerate(units):
        if has_params and unit.is_cut_allowed_before and index:
            has_params = bool(unit.params)
            num_stages += 1
        else:
            has_params = has_params or bool(unit.params)
    return num_stages + has_params


def _read_pinned(units: Sequence[StageUnit], num_stages: int, pinned: Sequence[str]) -> tuple[int, ...]:
    legal = [unit.name for unit in units[1:] if unit.is_cut_allowed_before]
    if len(pinned) != num_stages - 1:
        raise ConfigError(
            "cut-count",
            f"pipeline.cut names {len(pinned)} units, but of {num_stages} stages {num_stages - 1} begin with a named "
            f"one, the first with {units[0].name}; name {num_stages - 1}",
        )
    index_of = {unit.name: index for index, unit in enumerate(units)}
    for name in pinned:
        if name in legal:
            continue
        if name in index_of:
            later = next((other for other in legal if index_of[other] > index_of[name]), legal[-1])
            why = "the first stage begins there" if index_of[name] == 0 else "it is not parted from the one before it"
            raise ConfigError(
                "cut-not-allowed", f"pipeline.cut={name!r} is no place to cut: {why}; the next is {later}"
            )
        close = difflib.get_close_matches(name, legal, n=1)
        fix = f"did you mean {close[0]}?" if close else f"units are such as {', '.join(legal[:3])}"
        raise ConfigError("unknown-unit", f"pipeline.cut={name!r} is no unit of the model; {fix}")
    starts = (0, *(index_of[name] for name in pinned))
    for one, other in pairwise(starts[1:]):
        if one >= other:
            raise ConfigError(
                "cut-order",
                f"pipeline.cut names {units[other].name} after {units[one].name}, which does not run before it; "
                "name each unit once, in the order in which they run",
            )
    for index, (start, stop) in enumerate(pairwise((*starts, len(units)))):
        if not any(unit.params for unit in units[start:stop]):
            raise ConfigError(
                "stage-without-parameters",
                f"pipeline.cut: stage {index} ({units[start].name} to {units[stop - 1].name}) would have no "
                "parameters; move a cut so that every stage has some",
            )
    return starts


def _up_to(most: int) -> str:
    return "1" if most == 1 else f"from 1 to {most}"


def _shares(weights: Sequence[float]) -> list[int]:
    total = sum(weights)
    return [round(weight / total * _WHOLE) if total else 0 for weight in weights]


def _sums(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(values, initial=0))


def _to_mean(values: Sequence[float]) -> tuple[float, ...]:
    total = sum(values)
    return tuple(value * len(values) / total if total else 1.0 for value in values)


def estimate_costs(
    units: Sequence[StageUnit],
    bytes_per_element: float | Callable[[ParamEntry], float],
    measured: Mapping[str, float] | None = None,
) -> tuple[UnitCost, ...]:
    """Estimate costs by the units' parameters: 2 FLOPs a token and element of each matrix in a product.

    That is a matrix product's cost (Kaplan et al. 2020, arXiv 2001.08361, table 1). A tied matrix costs time in the
    unit that multiplies by it, and memory in every unit that uses it. Experts count by the share of them that a token
    is sent to. Costs that parameters do not show are left out: activations, and the scores of attention, which grow
    with the sequence.

    Args:
        units: in the order in which they run.
        bytes_per_element: of a parameter with its gradient and optimizer states, on one rank; a number or a function.
        measured: seconds of a unit's forward and backward by pattern of unit names; the first that matches replaces
            the estimate. Estimates of the other units are scaled to them.

    Raises:
        ConfigError: a pattern matches no unit, or a measured time is not a positive number.
    """
    in_all = set.intersection(*({param.name for param in unit.params} for unit in units)) if len(units) > 1 else set()
    estimates = tuple(
        UnitCost(
            unit.name,
            unit.flops,
            sum(
                math.prod(each.shape) * (bytes_per_element(each) if callable(bytes_per_element) else bytes_per_element)
                for each in unit.params
                if each.name not in in_all
            )
            + 0.0,
        )
        for unit in units
    )
    return _with_measured(estimates, measured) if measured else estimates


def _with_measured(estimates: Sequence[UnitCost], measured: Mapping[str, float]) -> tuple[UnitCost, ...]:
    for pattern, seconds in measured.items():
        if not any(fnmatch.fnmatchcase(estimate.name, pattern) for estimate in estimates):
            names = ", ".join(unit.name for unit in (estimates[0], estimates[-1]))
            raise ConfigError(
                "no-unit-matches", f"measured times: {pattern!r} matches no unit; units are named such as {names}"
            )
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(
                "measured-time-range", f"measured times: {pattern}={seconds} s; a time is a finite number above 0"
            )
    times = [
        next((seconds for pattern, seconds in measured.items() if fnmatch.fnmatchcase(estimate.name, pattern)), None)
        for estimate in estimates
    ]
    pairs = [(seconds, each.compute) for seconds, each in zip(times, estimates, strict=True) if seconds is not None]
    known_flops = sum(flops for seconds, flops in pairs if flops)
    unmeasured_flops = sum(unit.compute for seconds, unit in zip(times, estimates, strict=True) if seconds is None)
    if unmeasured_flops and not known_flops:
        raise ConfigError(
            "measured-no-matrices",
            "measured times: no unit with matrices is among them; measure a block, or every unit",
        )
    # The time of an embedding lookup does not show how long a product takes.
    seconds_per_flop = sum(seconds for seconds, flops in pairs if flops) / known_flops if known_flops else 0.0
    return tuple(
        replace(each, compute=each.compute * seconds_per_flop if seconds is None else float(seconds))
        for seconds, each in zip(times, estimates, strict=True)
    )


def find_partition(units: Sequence[StageUnit], config: ResolvedConfig) -> StagePartition:
    """Partition the units of a model into the stages of a config.

    Args:
        units: in the order in which they run.

    Raises:
        ConfigError: there are fewer units than stages, the schedule has no such number of virtual stages, or
            `pipeline.cut` or `pipeline.unit_seconds` names no unit.
    """
    section = config.pipeline
    placement = placement_of(section.schedule, config.mesh.pp, section.virtual_stages)
    return partition_stages(
        units,
        estimate_costs(units, bytes_per_element(config), section.unit_seconds),
        placement.num_stages,
        balance=section.balance,
        placement=[placement.rank_of(stage) for stage in range(placement.num_stages)],
        pinned=section.cut,
    )


def bytes_per_element(config: ResolvedConfig) -> Callable[[ParamEntry], float]:
    """Return a function: parameter -> bytes stored for each of its elements (Rajbhandari et al. 2020, figure 1)."""
    num_shards = MeshShape.from_config(config.mesh).size_along(SHARD_AXES)
    stage = effective_stage(config.zero, num_shards, config.tiers, is_scheduled=True)
    policy = precision_policy(config.precision)

    has_matrices = bool(matrix_state_names(config.optimizer.name))

    def sizes(policy: PrecisionPolicy, is_matrix: bool) -> dict[str, float]:
        found: Counter[tuple[str, Placement]] = Counter()
        for state in states_of(stage, policy, config.optimizer, ()):
            if state.of_matrices in (None, is_matrix) and state.exact_of is None:
                found[state.role, state.placement] += DTYPE_BYTES[state.dtype]
        return {role: size / num_shards if at is Placement.SHARD else size for (role, at), size in found.items()}

    policies = {False: policy, True: policy.widened}
    sizes_of = {
        (is_wide, is_matrix): sizes(policies[is_wide], is_matrix)
        for is_wide in policies
        for is_matrix in (False, has_matrices)
    }

    opaque_sizes = sizes(OPAQUE, is_matrix=False)

    def num_bytes(entry: ParamEntry) -> float:
        own = sizes_of[config.precision.param in entry.wide_in, has_matrices and entry.is_matrix]
        own = opaque_sizes if entry.is_opaque else own
        return sum(size for role, size in own.items() if entry.requires_grad or role == "param")

    return num_bytes
