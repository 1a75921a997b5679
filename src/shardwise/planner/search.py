"""Search layouts in the order of the least time they can take, until the k-th best is faster than all that are left.

A heap holds every candidate by a lower bound of its step, which is raised twice: first it is what ranks compute and
exchange inside blocks, timed once for all candidates that share it, with the schedule's least bubble; then the time of
the candidate's own stages; last the price of each placement of its states. Whatever leaves the heap as a priced
strategy that fits is thus the fastest that is left, so the search proves its winner, within its model, when the heap's
least bound passes it. What does not fit with as little kept as possible is dropped before it is priced.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError
from shardwise.config.sections import BelowOne, Positive
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.zero_stages import Placement, effective_stage
from shardwise.optim.rules import num_states
from shardwise.planner.candidates import (
    ZERO,
    ParallelismCandidate,
    PlacementCandidate,
    SearchSpace,
    candidates,
    placements,
    strategy_at,
    why_none,
)
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.pricer import Pricer, priced
from shardwise.planner.results import (
    TIE_SHARE,
    USUAL_MARGIN,
    Estimate,
    MemoryEstimate,
    MissingMemory,
    TimeEstimate,
    missing_memory,
    missing_on_node,
    num_extras,
    simplest,
    usable_bytes,
)
from shardwise.planner.stages import PACKED_BYTES
from shardwise.schedule.formulas import least_bubble_share

# So many meshes or schedules are wanted beside each other.
_NUM_KINDS: Final = 5
# Schedules are simulated for at most this many times the number of wanted strategies.
_MOST_SIMULATED: Final = 5
# What exceeds a device's memory by less than this share of it may fit after all: estimates are that uncertain.
_NEAR_SHARE: Final = 0.04
_NUM_NEAR: Final = 2
# A search that has found nothing yet may take so many times the prices.
_MORE_IF_NONE: Final = 5
# The share of a state that stays on the device is a multiple of one over this number.
_NUM_SHARES: Final = 20
# A memory estimate costs as much as so many times.
_MEMORY_COST: Final = 4


@checked
@dataclass(frozen=True, kw_only=True)
class Limits:
    """Say when a search ends.

    Attributes:
        margin_share: share of a device's memory that is to stay free.
        max_prices: estimates of time, of which one of memory counts as four, after which the search ends though better
            strategies may be left.
    """

    num_best: Positive = 10
    margin_share: BelowOne = USUAL_MARGIN
    max_prices: Positive = 100_000


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Hold the strategies that a search found.

    Attributes:
        best: those that fit: the simplest of those as fast as the fastest, then the others in order of time.
        runners_up: the best of each other mesh and schedule, in order of their time.
        near_misses: the fastest that are faster than the winner, and miss the device's memory by little.
        nearest: where nothing fits, what misses by least, and by how much.
        rejected: how many candidates were left out, by reason; with `num_fitting` they are all candidates.
        num_fitting: candidates of which a placement was priced and fits.
        num_priced: how many estimates of time or memory were made.
        gap_share: by how much of the winner's time what was not looked at may be faster, within the model.
    """

    job: PlanJob
    limits: Limits
    best: tuple[Estimate, ...]
    runners_up: tuple[Estimate, ...]
    near_misses: tuple[Estimate, ...] = ()
    nearest: tuple[Estimate, MissingMemory] | None
    rejected: Mapping[str, int]
    num_fitting: int = 0
    num_candidates: int
    num_priced: int
    gap_share: float
    elapsed_s: float

    @property
    def winner(self) -> Estimate | None:
        """Return the best that fits; None where nothing does."""
        return self.best[0] if self.best else None

    @property
    def is_proven(self) -> bool:
        """Say whether everything was looked at that can be faster than the winner, or fit where nothing does."""
        return self.gap_share == 0


def search(
    job: PlanJob, space: SearchSpace | None = None, limits: Limits | None = None, pricer: Pricer | None = None
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
    left = search.run()
    if not search.num_candidates:
        raise ConfigError("no-layout", why_none(job, search.space))
    fitting = search.finish()
    num_fitting = search.count(left)
    num_best = search.limits.num_best
    gap_share = max(0.0, 1 - search.least_left_s / fitting[0].time.step_s) if fitting else float(search.is_cut)
    return SearchResult(
        job=job,
        limits=search.limits,
        best=tuple(fitting[:num_best]),
        runners_up=tuple(runners_up(fitting, num_best)),
        near_misses=tuple(search.near_misses(fitting)),
        nearest=None if fitting else search.nearest(),
        rejected=dict(search.rejected),
        num_fitting=num_fitting,
        num_candidates=search.num_candidates,
        num_priced=search.num_prices,
        gap_share=gap_share,
        elapsed_s=time.perf_counter() - began,
    )


def settle(plan: SearchResult, settled: Sequence[Estimate]) -> SearchResult:
    """Return what a search found, once the memory of some strategies is known: what no longer fits is left out.

    Args:
        settled: some of its best, runners-up and near misses; those that were simulated have the memory that counts.
    """
    simulated = {price.strategy: price for price in settled if price.memory.worst.is_simulated}
    by_strategy = {price.strategy: price for price in (*plan.best, *plan.runners_up)} | simulated
    every, margin = list(by_strategy.values()), plan.limits.margin_share

    def missing(price: Estimate) -> MissingMemory | None:
        return missing_memory(price.memory, plan.job.cluster, margin)

    fitting = sorted((price for price in every if missing(price) is None), key=lambda price: price.time.step_s)
    if not fitting:
        least = min(every, key=lambda price: price.memory.worst.peak_bytes, default=None)
        lacking = None if least is None else missing(least)
        nearest = plan.nearest if least is None or lacking is None else (least, lacking)
        return replace(plan, best=(), runners_up=(), nearest=nearest)
    first = simplest(fitting)
    ordered = [first, *(price for price in fitting if price is not first)]
    num_best = plan.limits.num_best
    return replace(plan, best=tuple(ordered[:num_best]), runners_up=tuple(runners_up(ordered, num_best)))


def runners_up(fitting: Sequence[Estimate], num_best: int) -> Iterator[Estimate]:
    """Yield the best of each other mesh and schedule than the first one's, `num_best` less one at most."""
    kinds: dict[tuple[Any, ...], Estimate] = {}
    for price in fitting:
        kinds.setdefault(kind_of(price.strategy), price)
    yield from list(kinds.values())[1:num_best]


def kind_of(item: Strategy | ParallelismCandidate) -> tuple[Any, ...]:
    """Return mesh and schedule; where only data are split, the ZeRO stage too."""
    mesh = (item.pp, item.cp, item.tp, item.schedule)
    return (*mesh, item.zero_stage) if isinstance(item, Strategy) and mesh[:3] == (1, 1, 1) else mesh


@dataclass(frozen=True)
class _Timed:
    """Mark a candidate whose bound is the time of its own stages."""

    candidate: ParallelismCandidate


_Item = ParallelismCandidate | _Timed | Strategy


class _Search:
    """Run a search, and hold what it has found so far."""

    def __init__(self, job: PlanJob, space: SearchSpace, limits: Limits, pricer: Pricer) -> None:
        self.job, self.space, self.limits, self.pricer = job, space, limits, pricer
        self.fitting: list[Estimate] = []
        self.rejected: Counter[str] = Counter()
        self.num_candidates = self.num_prices = self._cost = 0
        self.least_left_s = math.inf
        self.is_cut = False
        self._kinds: set[tuple[Any, ...]] = set()
        self._usable_bytes = usable_bytes(job.cluster, limits.margin_share)
        self._inner_s: dict[tuple[Any, ...], float] = {}
        self._placements: dict[tuple[Any, ...], list[PlacementCandidate]] = {}
        self._fits_leanest: dict[tuple[Any, ...], bool] = {}
        self._fallbacks: list[Strategy] = []
        self._missed: tuple[float, Strategy] | None = None
        self._near: list[Estimate] = []
        self._tried: set[ParallelismCandidate] = set()

    def run(self) -> list[_Item]:
        """Open what has the least bound until it passes what was found or prices are spent; return what is left."""
        heap: list[tuple[float, int, _Item]] = []
        for candidate in candidates(self.job, self.space):
            heap.append((self._bound_s(candidate), len(heap), candidate))
        self.num_candidates = num_items = len(heap)
        heapq.heapify(heap)
        while heap and not self._has_enough(heap[0][0]):
            is_found = bool(self.fitting or self._fallbacks)
            if self._cost >= self.limits.max_prices * (1 if is_found else _MORE_IF_NONE):
                self.is_cut = True
                self.least_left_s = heap[0][0]
                break
            bound_s, _, item = heapq.heappop(heap)
            for seconds, opened in self._open(item, bound_s):
                num_items += 1
                heapq.heappush(heap, (max(seconds, bound_s), num_items, opened))
        return [item for _, _, item in heap]

    def count(self, left_items: Sequence[_Item]) -> int:
        """Give each candidate of what is left its reason, and return how many fit."""
        left = {_candidate_of(item) for item in left_items}
        fits = {_candidate_of(price.strategy) for price in self.fitting} & (left | self._tried)
        self.rejected["not looked at" if self.is_cut else "slower even at best"] += len(left - fits)
        self.rejected["out of memory"] += len(self._tried - left - fits)
        return len(fits)

    def _has_enough(self, bound_s: float) -> bool:
        """Say whether nothing from this bound on is wanted, neither to win nor to be shown."""
        num_kinds = min(_NUM_KINDS, self.limits.num_best)
        return not self._may_win(bound_s) and len(self._kinds) >= num_kinds

    def _may_win(self, bound_s: float) -> bool:
        """Say whether what takes this long is among the best, or may still be the best for its simplicity."""
        is_tie = not self.fitting or bound_s <= (1 + TIE_SHARE) * self.fitting[0].time.step_s
        return is_tie or len(self.fitting) < self.limits.num_best

    def _open(self, item: _Item, bound_s: float) -> Iterator[tuple[float, _Item]]:
        """Yield what an item becomes, by its next bound; of a priced strategy that fits, keep the price."""
        if isinstance(item, Strategy):
            self._tried.add(_candidate_of(item))
            self._add(item)
            return
        candidate = item.candidate if isinstance(item, _Timed) else item
        if not self._may_win(bound_s) and kind_of(candidate) in self._kinds:
            self.rejected["like a faster one"] += 1
        elif not self._placements_of(candidate) or not self._fits_leanest.get(_pipeline_of(candidate), True):
            self.rejected["out of memory even at best"] += 1
        elif not isinstance(item, _Timed):
            yield self._stages_s(candidate), _Timed(candidate)
        elif not self._may_fit(candidate):
            self.rejected["out of memory"] += 1
        else:
            for placement in self._placements_of(candidate):
                strategy = strategy_at(candidate, placement, self.space.base)
                yield self._quick(strategy).step_s, strategy

    def _bound_s(self, candidate: ParallelismCandidate) -> float:
        """Return the time of blocks with the least bubble, shared by candidates that compute the same."""
        inner_s = self._inner_s.get(candidate.inner)
        if inner_s is None:
            inner_s = self.pricer.time.busy_s(self._least_computing(candidate))
            self._inner_s[candidate.inner] = inner_s
        pipeline = (candidate.schedule, candidate.pp, candidate.num_micro_batches, candidate.virtual_stages)
        return inner_s * (1 + least_bubble_share(*pipeline))

    def _stages_s(self, candidate: ParallelismCandidate) -> float:
        """Return the time without what depends on where states are stored."""
        price = self._quick(self._least_computing(candidate))
        outer_s = sum(price.parts.get(name, 0.0) for name in ("data", "offload", "step"))
        return price.step_s * (1 - outer_s / (price.step_s - price.parts.get("other", 0.0)))

    def _least_computing(self, candidate: ParallelismCandidate) -> Strategy:
        # Where gradients are not stored whole none are added to others, so the highest stage computes least.
        stage = max(self.space.of("zero_stage", (3,)))
        placement = PlacementCandidate(stage, candidate.num_data_ranks, "batch", *["device"] * 4)
        return strategy_at(candidate, placement, self.space.base)

    def _placements_of(self, candidate: ParallelismCandidate) -> list[PlacementCandidate]:
        """Return the placements with which the states of a rank may fit on the device."""
        key = (candidate.num_data_ranks, candidate.cp, candidate.tp, candidate.pp, candidate.recompute)
        if key not in self._placements:
            self._placements[key] = [
                placement
                for placement in placements(self.job, self.space, candidate)
                if least_states_bytes(self.job, self.space.base, candidate, placement) <= self._usable_bytes
            ]
        return self._placements[key]

    def _may_fit(self, candidate: ParallelismCandidate) -> bool:
        """Say whether a candidate fits the device with the placement that leaves least there.

        The candidate of the same pipeline that keeps least is estimated first, once for all that keep more.
        """
        placement = max(self._placements_of(candidate), key=_saving)
        pipeline = _pipeline_of(candidate)
        if pipeline not in self._fits_leanest:
            num_micro_batches = candidate.num_micro_batches * candidate.micro_size
            least = candidate._replace(micro_size=1, num_micro_batches=num_micro_batches)
            least = least._replace(recompute="full", recompute_every=1)
            # Only what is recomputed whole may move its activations away.
            leanest = max(self._placements_of(least), key=_saving, default=placement)
            self._fits_leanest[pipeline] = self._fits_device(least, leanest)
        return self._fits_leanest[pipeline] and self._fits_device(candidate, placement)

    def _fits_device(self, candidate: ParallelismCandidate, placement: PlacementCandidate) -> bool:
        strategy = strategy_at(candidate, placement, self.space.base)
        memory = self._memory_of(strategy)
        if missing_memory(memory, self.job.cluster, self.limits.margin_share) is None:
            self._fallbacks.append(strategy)
        return memory.worst.peak_bytes <= self._usable_bytes

    def _quick(self, strategy: Strategy) -> TimeEstimate:
        self.num_prices += 1
        self._cost += 1
        return self.pricer.time.estimate(strategy, is_quick=True)

    def _memory_of(self, strategy: Strategy) -> MemoryEstimate:
        """Estimate its memory, of some ranks alone where that does not fit; note how much is missing."""
        # For what does not fit it is enough to know that another misses by less.
        least_lacking = math.inf if self._missed is None else self._missed[0]
        too_much_bytes = self._usable_bytes + least_lacking / self.job.cluster.gpus_per_node
        memory = self.pricer.memory.estimate(strategy, too_much_bytes=too_much_bytes)
        self.num_prices += 1
        self._cost += _MEMORY_COST
        lacking = missing_on_node(memory, self.job.cluster, self.limits.margin_share)
        if lacking > 0 and lacking < least_lacking:
            self._missed = lacking, strategy
        return memory

    def _add(self, strategy: Strategy, below_s: float = math.inf) -> bool:
        """Keep a strategy's price; return whether it fits and takes less than `below_s`."""
        memory = self._memory_of(strategy)
        missing = missing_memory(memory, self.job.cluster, self.limits.margin_share)
        if missing is not None:
            if missing.tier == "device" and missing.missing_bytes <= _NEAR_SHARE * self._usable_bytes:
                self._near.append(Estimate(job=self.job, strategy=strategy, memory=memory, time=self._quick(strategy)))
            return False
        price = self._quick(strategy)
        if price.step_s >= below_s:
            return False
        self.fitting.append(Estimate(job=self.job, strategy=strategy, memory=memory, time=price))
        self._kinds.add(kind_of(strategy))
        return True

    def finish(self) -> list[Estimate]:
        """Return all that fit: the simplest of the fastest, then the fastest first, their schedules simulated."""
        if not self.fitting:  # the search was cut
            fastest = sorted(self._fallbacks, key=lambda each: self._quick(each).step_s)
            for strategy in fastest[: self.limits.num_best]:
                self._add(strategy)
        for price in self.fitting[: self.limits.num_best]:  # as large a share on the device as fits and helps
            any(self._add(strategy, price.time.step_s) for strategy in more_on_device(price, self._usable_bytes))
        every = sorted(self.fitting, key=lambda each: each.time.step_s)
        if not every:
            return []
        most = _MOST_SIMULATED * self.limits.num_best
        shown = {price.strategy: price for price in (*every[:most], simplest(every), *runners_up(every, most))}
        exact = [
            price if strategy.pp == 1 else replace(price, time=self.pricer.time.estimate(strategy))
            for strategy, price in shown.items()
        ]
        self.num_prices += len(exact)
        exact.sort(key=lambda each: (each.time.step_s, num_extras(each.strategy)))
        best = simplest(exact)
        return [best, *(price for price in exact if price is not best)]

    def near_misses(self, fitting: Sequence[Estimate]) -> Iterator[Estimate]:
        """Yield the fastest of those that miss by little, if they are faster than what fits."""
        least_s = fitting[0].time.step_s if fitting else math.inf
        fastest = sorted(self._near, key=lambda price: price.time.step_s)[:_NUM_NEAR]
        for price in fastest:
            # The memory of all ranks, the schedule simulated.
            exact_price = priced(self.job, price.strategy, self.pricer)
            if exact_price.time.step_s < (1 - TIE_SHARE) * least_s:
                yield exact_price

    def nearest(self) -> tuple[Estimate, MissingMemory] | None:
        """Return what misses by least."""
        if self._missed is None:
            return None
        price = priced(self.job, self._missed[1], self.pricer)
        missing = missing_memory(price.memory, self.job.cluster, self.limits.margin_share)
        return None if missing is None else (price, missing)


def more_on_device(price: Estimate, usable_bytes: float) -> Iterator[Strategy]:
    """Yield the strategy with as large a share of its states on the device as may fit, and with a little less.

    Args:
        price: of a strategy that stores states off the device; for any other nothing is yielded.
    """
    s, worst = price.strategy, price.memory.worst
    away = [state for state in ("params", "grads", "optimizer") if getattr(s, f"{state}_tier") != "device"]
    if away_bytes := sum(worst.elsewhere.values()) if away else 0:
        most = int(_NUM_SHARES * min(1.0, (usable_bytes - worst.peak_bytes) / away_bytes))
        for step in (most, most - 1):
            if 0 < step < _NUM_SHARES:
                shares: dict[str, Any] = {f"{state}_on_device": step / _NUM_SHARES for state in away}
                yield replace(s, **shares)


def _candidate_of(item: _Item) -> ParallelismCandidate:
    if isinstance(item, Strategy):
        return ParallelismCandidate._make(getattr(item, name) for name in ParallelismCandidate._fields)
    return item.candidate if isinstance(item, _Timed) else item


def _pipeline_of(candidate: ParallelismCandidate) -> tuple[Any, ...]:
    """Return what candidates share that differ in micro-batches and recomputation alone."""
    return (*candidate[:7], candidate.schedule, candidate.virtual_stages)


def _saving(placement: PlacementCandidate) -> tuple[int, int, bool, int]:
    """Return a key that is largest for the placement that holds least on the device."""
    num_away = sum(tier != "device" for tier in placement.tiers)
    return num_away, placement.zero_stage, placement.gather == "micro-batch", placement.dp_shard


def least_states_bytes(
    job: PlanJob, base: Strategy, candidate: ParallelismCandidate, placement: PlacementCandidate
) -> float:
    """Return the least bytes of states that some rank stores on the device: those of the mean rank.

    Args:
        base: its dtypes and expert ranks are taken.
        candidate, placement: how work and states are split.
    """
    shards = placement.dp_shard * candidate.cp
    stage = effective_stage(ZERO[placement.zero_stage], shards, is_scheduled=candidate.pp > 1)
    param_bytes = DTYPE_BYTES[base.param]
    grad_bytes = param_bytes if base.accumulate == "param" else max(4, param_bytes)
    of_moment = {"master": max(4, param_bytes), "bf16": 2, "int8": 1}[job.states]
    least, _ = num_states(job.optimizer)
    optimizer_bytes = least * of_moment + 4 * (param_bytes < 4)
    states = (
        (placement.params_tier, PACKED_BYTES if job.lora.base == "nf4" else param_bytes, stage.params),
        (placement.grads_tier, job.trains_all * grad_bytes, stage.grads),
        (placement.optimizer_tier, job.trains_all * optimizer_bytes, stage.optimizer),
    )
    of_param = sum(size / (shards if at is Placement.SHARD else 1) for tier, size, at in states if tier == "device")
    return of_param * job.shape.num_params / (candidate.tp * candidate.pp * base.ep)
