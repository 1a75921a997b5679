"""Search candidates in the order of the least time they can take, until none that is left can be among the best.

What a rank computes and exchanges inside blocks depends on few of a candidate's fields, so it is timed once for all
candidates that share them; with the pipeline's bubble in closed form that is a bound. The candidate with the least
bound, corrected by what others of its mesh took beyond theirs, is priced with every placement of its states, and the
search ends where the bounds pass the times it has found.
Three rules leave out what cannot win: nothing is recomputed that fits when kept, nothing is stored elsewhere that fits
on the device, and nothing is tried that holds more than what did not fit. The cost depends on the number of candidates,
not of ranks.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from shardwise.config.resolve import ConfigError
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.planner.candidates import (
    ParallelismCandidate,
    PlacementCandidate,
    SearchSpace,
    candidates,
    placements,
    strategy_at,
    why_none,
)
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.memory_limit import USUAL_MARGIN, MissingMemory, missing_memory, missing_on_node, usable_bytes
from shardwise.planner.neighbours import more_on_device, neighbours
from shardwise.planner.pricer import Pricer, Pricing
from shardwise.planner.results import TIE_SHARE, Estimate, MemoryEstimate, num_extras, simplest
from shardwise.schedule.formulas import least_bubble_share

_FAR: Final[Mapping[str, int]] = MappingProxyType({"device": 0, "host": 1, "nvme": 2})
_MOST_STEPS: Final = 6
# Schedules are simulated for at most this many times the number of wanted strategies.
_MOST_SIMULATED: Final = 20
# What most runs do, and the share of the allowed prices that is spent on it in addition.
_USUAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"cp": (1,), "schedule": ("1f1b", "interleaved")})
_USUAL_SHARE: Final = 0.25
# The cost of a memory estimate as a share of a price's, and the pipeline ranks that cost as much again.
_MEMORY_COST: Final = 0.2
_RANKS_OF_MEMORY_COST: Final = 6


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Say when a search ends.

    Attributes:
        num_best: how many strategies are wanted.
        margin_share: share of a device's memory that is to stay free.
        max_prices: number of prices after which the search ends though better ones may be left.
    """

    num_best: int = 10
    margin_share: float = USUAL_MARGIN
    max_prices: int = 800


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Hold the strategies that a search found.

    Attributes:
        best: those that fit: the simplest of those as fast as the fastest (`tie_break`), then the others in order of
            time.
        runners_up: the best of each other mesh and schedule, in order of their time.
        front: those that fit and that no other beats in both time and memory.
        nearest: where nothing fits, what misses by least, and by how much.
        rejected: how many candidates or strategies were left out, by reason.
        num_candidates: how many candidates there are.
        num_priced: number of priced strategies.
        is_proven: whether by their bounds no better one is left.
    """

    job: PlanJob
    limits: Limits
    best: tuple[Estimate, ...]
    runners_up: tuple[Estimate, ...]
    front: tuple[Estimate, ...]
    nearest: tuple[Estimate, MissingMemory] | None
    rejected: Mapping[str, int]
    num_candidates: int
    num_priced: int
    is_proven: bool
    elapsed_s: float

    @property
    def winner(self) -> Estimate | None:
        """Return the best that fits; None where nothing does."""
        return self.best[0] if self.best else None


def search(
    job: PlanJob, space: SearchSpace | None = None, limits: Limits | None = None, pricer: Pricing | None = None
) -> SearchResult:
    """Find the fastest strategies of a job that fit.

    Args:
        job: on all GPUs of its cluster.
        space: what may be chosen; None allows everything.
        limits: when to end; None takes the defaults.
        pricer: prices the job's strategies; None makes a `Pricer`.

    Raises:
        ConfigError: there is no candidate: batch, cluster and pins do not go together.
    """
    began = time.perf_counter()
    search = _Search(job, space or SearchSpace(), limits or Limits(), pricer or Pricer(job))
    search.run()
    if not search.num_candidates:
        raise ConfigError("no-layout", why_none(job, search.space))
    if not search.is_proven:
        search.search_usual_values()
    fitting = search.finish()
    return SearchResult(
        job=job,
        limits=search.limits,
        best=tuple(fitting[: search.limits.num_best]),
        runners_up=tuple(runners_up(fitting, search.limits.num_best)),
        front=front(fitting),
        nearest=None if fitting else search.nearest(),
        rejected=dict(search.rejected),
        num_candidates=search.num_candidates,
        num_priced=search.num_prices,
        is_proven=search.is_proven,
        elapsed_s=time.perf_counter() - began,
    )


def runners_up(fitting: list[Estimate], num_best: int) -> Iterator[Estimate]:
    """Yield the best of each other mesh and schedule than the fastest one's, in order of time."""
    seen: set[tuple[Any, ...]] = set()
    for price in fitting:
        s = price.strategy
        stage = s.zero_stage if s.num_data_ranks * s.cp > 1 else 0  # with nothing to split all stages are one
        kind = (s.pp, s.cp, s.tp, stage, s.schedule)
        if kind not in seen:
            seen.add(kind)
            if 1 < len(seen) <= num_best:
                yield price


class _Search:
    """Run a search, and hold what it has found so far."""

    def __init__(self, job: PlanJob, space: SearchSpace, limits: Limits, pricer: Pricing) -> None:
        self.job, self.space, self.limits, self.pricer = job, space, limits, pricer
        self.fitting: list[Estimate] = []
        self.rejected: Counter[str] = Counter()
        self.num_candidates = self.num_prices = 0
        self._memory_cost = 0.0
        self.is_proven = True
        self._usable_bytes = usable_bytes(job.cluster, limits.margin_share)
        self._times: list[float] = []
        self._inner_s: dict[tuple[Any, ...], float] = {}
        self._placements: dict[tuple[Any, ...], tuple[tuple[PlacementCandidate, ...], tuple[float, ...], bool]] = {}
        self._kept: dict[tuple[Any, ...], list[ParallelismCandidate]] = {}
        self._too_large: dict[tuple[Any, ...], list[ParallelismCandidate]] = {}
        self._missed: tuple[float, Strategy] | None = None
        self._least_missed: tuple[float, Strategy] | None = None
        self._beyond_s: dict[tuple[int, int, int], float] = {}
        self._bound = MemoryBound(job, self.space.base)

    def run(self) -> None:
        """Price candidates until the bounds pass what was found, or the prices are spent."""
        heap = self._list()
        while heap:
            rank_s, index, candidate = heapq.heappop(heap)
            bound_s = self._bound_s(candidate)
            if bound_s >= self._worst_wanted_s():
                self.rejected["slower even at best"] += 1
                continue
            now_s = bound_s + self._beyond_s.get(_mesh_of(candidate), 0.0)
            if now_s > rank_s * (1 + 1e-9):
                heapq.heappush(heap, (now_s, index, candidate))
                continue
            if self.num_prices + self._memory_cost >= self.limits.max_prices:
                self.is_proven = False
                self.rejected["not looked at"] += len(heap) + 1
                return
            self._expand(candidate)

    def _list(self) -> list[tuple[float, int, ParallelismCandidate]]:
        heap = []
        for index, candidate in enumerate(candidates(self.job, self.space)):
            self.num_candidates += 1
            if self._may_fit_at_best(candidate):
                heap.append((self._bound_s(candidate), index, candidate))
            else:
                self.rejected["out of memory even at best"] += 1
                self._miss(candidate)
        heapq.heapify(heap)
        return heap

    def _miss(self, candidate: ParallelismCandidate) -> None:
        """Remember the candidate with the smallest lower bound of memory."""
        every, sizes, _ = self._known_placements(candidate)
        least = min(sizes, default=0.0) * self._bound.params_of_rank(candidate) + self._bound.activation_bytes(
            candidate
        )
        if every and (self._least_missed is None or least < self._least_missed[0]):
            self._least_missed = least, strategy_at(candidate, every[sizes.index(min(sizes))], self.space.base)

    def _worst_wanted_s(self) -> float:
        """Return the longest time that is still wanted: among the best, or close enough to the fastest to win by
        simplicity.
        """
        if len(self._times) < self.limits.num_best:
            return math.inf
        return max(self._times[-1], (1 + TIE_SHARE) * self._times[0])

    def _bound_s(self, candidate: ParallelismCandidate) -> float:
        inner_s = self._inner_s.get(candidate.inner)
        if inner_s is None:
            # Where gradients are not stored whole none are added to others, so the highest stage computes least.
            stage = max(self.space.of("zero_stage", (3,)))
            placement = PlacementCandidate(stage, candidate.num_data_ranks, "batch", *["device"] * 4)
            inner_s = self.pricer.time.busy_s(strategy_at(candidate, placement, self.space.base))
            self._inner_s[candidate.inner] = inner_s
        return inner_s * (1 + least_bubble_share(*pipeline_of(candidate)))

    def _known_placements(
        self, candidate: ParallelismCandidate
    ) -> tuple[tuple[PlacementCandidate, ...], tuple[float, ...], bool]:
        """Return the placements, the least bytes a parameter that each keeps on the device, and whether any moves
        activations.
        """
        key = (candidate.num_data_ranks, candidate.cp, candidate.tp, candidate.pp > 1, candidate.recompute)
        if key not in self._placements:
            every = placements(self.job, self.space, candidate)
            moves_activations = any(placement.activations_tier != "device" for placement in every)
            sizes = tuple(self._bound.param_bytes(candidate, placement) for placement in every)
            self._placements[key] = every, sizes, moves_activations
        return self._placements[key]

    def _may_fit_at_best(self, candidate: ParallelismCandidate) -> bool:
        """Say whether any placement may fit, by the least that it holds."""
        _, sizes, moves_activations = self._known_placements(candidate)
        kept = 0.0 if moves_activations else self._bound.activation_bytes(candidate)
        return min(sizes, default=math.inf) * self._bound.params_of_rank(candidate) + kept <= self._usable_bytes

    def _expand(self, candidate: ParallelismCandidate) -> None:
        """Price a candidate with every placement of its states."""
        every = self._known_placements(candidate)[0]
        fits_on_device = self._may_fit(candidate, [each for each in every if each.is_on_device], "device")
        fits_elsewhere = self._may_fit(candidate, [each for each in every if not each.is_on_device], "elsewhere")
        done: dict[tuple[Any, ...], list[tuple[str, ...]]] = {}
        num_known = len(self.fitting)
        for placement in every:
            if not (fits_on_device if placement.is_on_device else fits_elsewhere):
                self.rejected["out of memory"] += 1
                continue
            here = done.setdefault((placement.zero_stage, placement.dp_shard, placement.gather), [])
            if any(moves_less(each, placement.tiers) for each in here):
                self.rejected["that move what fits on the device"] += 1
            elif self._price(candidate, placement):
                here.append(placement.tiers)
        if times := [each.time.step_s for each in self.fitting[num_known:]]:
            beyond_s = max(0.0, min(times) - self._bound_s(candidate))
            mesh = _mesh_of(candidate)
            self._beyond_s[mesh] = min(self._beyond_s.get(mesh, math.inf), beyond_s)

    def _may_fit(self, candidate: ParallelismCandidate, every: list[PlacementCandidate], where: str) -> bool:
        """Say whether the placement that leaves least on the device fits there, and no known candidate that holds no
        more failed.

        Only device memory is compared: another candidate may store less elsewhere, and so fit a host that is too small
        for this one.
        """
        if not every:
            return False
        placement = max(every, key=_saving)
        pipeline = candidate._replace(micro_size=0, num_micro_batches=0, recompute="", recompute_every=0)
        too_large = self._too_large.setdefault((pipeline, where), [])
        if any(holds_more(candidate, each) for each in too_large):
            return False
        least = candidate._replace(
            micro_size=1, num_micro_batches=candidate.num_micro_batches * candidate.micro_size, recompute="full"
        )
        tried = [candidate] if too_large else [least._replace(recompute_every=1), candidate]
        for each in tried:
            memory = self._memory_of(strategy_at(each, placement, self.space.base))
            if memory.worst.peak_bytes > self._usable_bytes:
                too_large.append(each)
                return False
        return True

    def _price(self, candidate: ParallelismCandidate, placement: PlacementCandidate) -> bool:
        """Say whether it fits, or need not be tried since something that recomputes less fits."""
        like = (candidate._replace(recompute="", recompute_every=0), placement._replace(activations_tier="device"))
        kept = self._kept.setdefault(like, [])
        if any(recomputes_less(each, candidate) for each in kept):
            self.rejected["that compute twice what fits kept"] += 1
            return True
        if self._bound.param_bytes(candidate, placement) * self._bound.params_of_rank(candidate) > self._usable_bytes:
            self.rejected["out of memory"] += 1
            return False
        if not self._add(strategy_at(candidate, placement, self.space.base)):
            return False
        kept.append(candidate)
        return True

    def _add(self, strategy: Strategy, below_s: float = math.inf) -> bool:
        """Price a strategy and keep it; return whether it fits and takes less than `below_s`."""
        memory = self._memory_of(strategy)
        if missing_memory(memory, self.job.cluster, self.limits.margin_share) is not None:
            self.rejected["out of memory"] += 1
            return False
        quick = self.pricer.time.estimate(strategy, is_quick=True)
        self.num_prices += 1
        if quick.step_s >= below_s:
            return False
        price = Estimate(job=self.job, strategy=strategy, memory=memory, time=quick)
        self.fitting.append(price)
        insort(self._times, price.time.step_s)
        del self._times[self.limits.num_best :]
        return True

    def _memory_of(self, strategy: Strategy) -> MemoryEstimate:
        """Estimate its memory, of some ranks alone where that does not fit; note how much is missing."""
        # For what does not fit it is enough to know that another misses by less.
        least_lacking = math.inf if self._missed is None else self._missed[0]
        too_much_bytes = self._usable_bytes + least_lacking / self.job.cluster.gpus_per_node
        memory = self.pricer.memory.estimate(strategy, too_much_bytes=too_much_bytes)
        self._memory_cost += _MEMORY_COST * (1 + len(memory.ranks) / _RANKS_OF_MEMORY_COST)
        lacking = missing_on_node(memory, self.job.cluster, self.limits.margin_share)
        if lacking > 0 and (self._missed is None or lacking < self._missed[0]):
            self._missed = lacking, strategy
        return memory

    def search_usual_values(self) -> None:
        """Search once more among what most runs do, where the bounds leave too many candidates."""
        pins = dict(self.space.pins)
        for name, usual in _USUAL.items():
            pins[name] = tuple(each for each in self.space.of(name, usual) if each in usual)
        if not all(pins.values()):
            return
        limits = replace(self.limits, max_prices=max(1, int(_USUAL_SHARE * self.limits.max_prices)))
        search = _Search(self.job, replace(self.space, pins=pins), limits, self.pricer)
        search.run()
        seen = {each.strategy for each in self.fitting}
        self.fitting += [each for each in search.fitting if each.strategy not in seen]
        self.num_prices += search.num_prices

    def finish(self) -> list[Estimate]:
        """Return all that fit: the simplest of the fastest, then the fastest first.

        Schedules are simulated until all strategies that are shown are; what is left has no better quick time.
        """
        if not self.is_proven:
            self._climb()
        self._keep_shares()
        found = {each.strategy: each for each in self.fitting}
        known = {strategy for strategy in found if strategy.pp == 1}
        left = _MOST_SIMULATED * self.limits.num_best
        while True:
            fitting = _ordered(found.values())
            shown = [*fitting[: self.limits.num_best], *runners_up(fitting, self.limits.num_best)]
            quick = [each for each in dict.fromkeys(p.strategy for p in shown) if each not in known][:left]
            if not quick:
                break
            for strategy in quick:
                found[strategy] = replace(found[strategy], time=self.pricer.time.estimate(strategy))
            known.update(quick)
            left -= len(quick)
            self.num_prices += len(quick)
        if left:
            return fitting
        simulated = _ordered(each for strategy, each in found.items() if strategy in known)
        return [*simulated, *(each for each in fitting if each.strategy not in known)]

    def _climb(self) -> None:
        """Go from the best that were found to their neighbours, as long as one is better."""
        seen = {each.strategy for each in self.fitting}
        for _ in range(_MOST_STEPS):
            best = sorted(self.fitting, key=lambda each: each.time.step_s)[:2]
            for price in best:
                for _, strategy in neighbours(self.job, price.strategy):
                    if strategy not in seen and self.space.has(strategy, self.job):
                        seen.add(strategy)
                        self._add(strategy)
            if sorted(self.fitting, key=lambda each: each.time.step_s)[:2] == best:
                return

    def _keep_shares(self) -> None:
        """Leave as large a share on the device as fits and helps, for the fastest strategies that move states."""
        for price in sorted(self.fitting, key=lambda each: each.time.step_s)[: self.limits.num_best]:
            any(self._add(each, price.time.step_s) for each in more_on_device(price, self._usable_bytes))

    def nearest(self) -> tuple[Estimate, MissingMemory] | None:
        """Return what misses by least."""
        found = self._missed or self._least_missed
        if found is None:
            return None
        strategy = found[1]
        memory = self.pricer.memory.estimate(strategy)
        missing = missing_memory(memory, self.job.cluster, self.limits.margin_share)
        price = Estimate(job=self.job, strategy=strategy, memory=memory, time=self.pricer.time.estimate(strategy))
        return None if missing is None else (price, missing)


def _ordered(prices: Iterable[Estimate]) -> list[Estimate]:
    """Sort prices: the simplest of the fastest, then the fastest first."""
    every = sorted(prices, key=lambda each: (each.time.step_s, num_extras(each.strategy)))
    if not every:
        return []
    best = simplest(every)
    return [best, *(each for each in every if each is not best)]


def _mesh_of(candidate: ParallelismCandidate) -> tuple[int, int, int]:
    """Return what most decides how much a step takes beyond its bound, for gathers and reductions."""
    return candidate.pp, candidate.tp, candidate.num_micro_batches


def _saving(placement: PlacementCandidate) -> tuple[int, int, bool, int]:
    """Return a key that is largest for the placement that holds least on the device."""
    num_away = sum(_FAR[tier] > 0 for tier in placement.tiers)
    return num_away, placement.zero_stage, placement.gather == "micro-batch", placement.dp_shard


def holds_more(candidate: ParallelismCandidate, known: ParallelismCandidate) -> bool:
    """Say whether a candidate holds at least as much as a known one of the same pipeline."""
    is_known_least = known.recompute == "full" and known.recompute_every == 1
    is_known_kept_less = is_known_least or known.recompute == candidate.recompute or candidate.recompute == "none"
    if known.recompute == candidate.recompute == "full":
        is_known_kept_less = known.recompute_every <= candidate.recompute_every
    return is_known_kept_less and candidate.micro_size >= known.micro_size


def recomputes_less(known: ParallelismCandidate, candidate: ParallelismCandidate) -> bool:
    """Say whether a known candidate, otherwise equal, computes less a second time."""
    if candidate.recompute != "full":
        return known.recompute == "none" != candidate.recompute
    return (
        known.recompute == "none"
        or known.recompute_every > candidate.recompute_every
        or (known.recompute == "selective" and candidate.recompute_every == 1)
    )


def moves_less(known: tuple[str, ...], tiers: tuple[str, ...]) -> bool:
    """Say whether a known placement stores nothing further away."""
    return known != tiers and all(_FAR[one] <= _FAR[other] for one, other in zip(known, tiers, strict=True))


def pipeline_of(candidate: ParallelismCandidate) -> tuple[str, int, int, int]:
    """Return the schedule, pipeline ranks, micro-batches and virtual stages of a candidate."""
    return candidate.schedule, candidate.pp, candidate.num_micro_batches, candidate.virtual_stages


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other beats, in order of their first number.

    Args:
        points: pairs of a number that is better small and one that is better large.
    """
    found: list[int] = []
    for index in sorted(range(len(points)), key=lambda each: (points[each][0], -points[each][1])):
        if not found or points[index][1] > points[found[-1]][1]:
            found.append(index)
    return found


def front(prices: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """Return the prices that no other beats in both step time and free device memory, the fastest first."""
    return tuple(prices[index] for index in pareto([(each.time.step_s, each.margin_bytes) for each in prices]))


def cost_per_step(price: Estimate) -> float | None:
    """Return the dollars of all devices for one step; None where their price is not known."""
    cluster = price.job.cluster
    if not cluster.gpu.price_per_hour:
        return None
    return cluster.gpu.price_per_hour * cluster.num_gpus * price.time.step_s / 3600


class MemoryBound:
    """Give the least bytes that candidates hold on the device.

    Args:
        job: the model and its batch.
        base: its precision, chunk of tokens and expert ranks are taken.
    """

    def __init__(self, job: PlanJob, base: Strategy) -> None:
        self.job, self.base = job, base
        self._num_params = job.shape.num_params

    def params_of_rank(self, candidate: ParallelismCandidate) -> float:
        """Return the mean parameters of a pipeline rank, which is no more than the fullest rank has."""
        return self._num_params / (candidate.tp * candidate.pp * self.base.ep)

    def param_bytes(self, candidate: ParallelismCandidate, placement: PlacementCandidate) -> float:
        """Return the least bytes of one parameter's states that are stored on the device."""
        base = self.base
        param_bytes = DTYPE_BYTES[base.param]
        trains = float(self.job.trains_all)  # adapters are too few to count
        grad_bytes = param_bytes if base.accumulate == "param" else max(4, param_bytes)
        states = 2 if self.job.optimizer.startswith("adam") else 0
        optimizer_bytes = max(4, param_bytes) * (states + (param_bytes < 4))
        shards = placement.dp_shard * candidate.cp
        sharded_grads = 3 if candidate.pp > 1 else 2
        states_of = (
            (placement.params_tier, param_bytes, 3),
            (placement.grads_tier, trains * grad_bytes, sharded_grads),
            (placement.optimizer_tier, trains * optimizer_bytes, 1),
        )
        return sum(
            size / (shards if placement.zero_stage >= stage else 1)
            for tier, size, stage in states_of
            if tier == "device"
        )

    def activation_bytes(self, candidate: ParallelismCandidate) -> float:
        """Return the bytes of the first pipeline rank that every way of writing a block keeps for its backward."""
        shape, base = self.job.shape, self.base
        hidden, dtype_bytes = shape.hidden_size, DTYPE_BYTES[base.param]
        ffn = 0 if base.chunk_tokens is not None or shape.experts is not None else shape.ffn_size
        inputs = hidden / (candidate.tp if candidate.sequence_parallel else 1)
        kept = {"none": (3 * hidden + 2 * ffn) / candidate.tp, "selective": (hidden + ffn) / candidate.tp}
        if candidate.recompute == "full":
            again = 1 / candidate.recompute_every
            elements = inputs * again + kept["none"] * (1 - again)
        else:
            elements = kept[candidate.recompute]
        num_layers = max(0.0, shape.num_layers / candidate.pp - (2 if candidate.pp > 1 else 0))
        tokens = self.job.seq_len * candidate.micro_size / candidate.cp
        return dtype_bytes * elements * num_layers * tokens * min(candidate.num_micro_batches, candidate.pp)
