"""Search layouts in the order of the least time they can take, until the k-th best is faster than all that are left.

A heap holds every candidate by a lower bound of its step, which is raised twice: first it is what ranks compute and
exchange inside blocks, timed once for all candidates that share it, with the schedule's least bubble; then the time of
the candidate's own stages; last the price of each placement of its states. Whatever leaves the heap as a priced
candidate that fits is thus the fastest that is left, so the search proves its winner, within its model, when the heap's
least bound passes it. What does not fit with as little kept as possible is dropped before it is priced.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final

from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import LoraConfig, OptimizerConfig, PrecisionConfig, ResolvedConfig
from shardwise.config.sections import BelowOne, Positive
from shardwise.layout.layout import states_of
from shardwise.layout.precision import DTYPE_BYTES, precision_policy
from shardwise.layout.zero_stages import Placement, ZeroStage, effective_stage
from shardwise.models.shape import PACKED_BYTES
from shardwise.optim.rules import matrix_state_names
from shardwise.planner.candidates import ZERO, Family, SearchSpace, Values, families, placements, why_none
from shardwise.planner.folded_layout import FoldedLayouts
from shardwise.planner.job import PlanJob, changed
from shardwise.planner.memory import MemoryModel
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
from shardwise.planner.step_time import TimeModel

# So many meshes or schedules are wanted beside each other.
_NUM_KINDS: Final = 5
# Schedules are simulated for at most this many times the number of wanted candidates.
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


class Pricer:
    """Price configs of one job, their memory and their time, and keep what several of them share.

    Attributes:
        margin_share: share of a device's memory that is to stay free.
    """

    def __init__(self, job: PlanJob, margin_share: float = USUAL_MARGIN) -> None:
        self.job, self.margin_share = job, margin_share
        layouts = FoldedLayouts(job)
        self.memory, self.time = MemoryModel(job, layouts), TimeModel(job, layouts)

    def price(self, config: ResolvedConfig, memory: MemoryEstimate | None = None) -> Estimate:
        """Return the memory, if it is not known already, and the time of one config."""
        memory = memory or self.memory.estimate(config)
        return Estimate(job=self.job, config=config, memory=memory, time=self.time.estimate(config))

    def missing(self, memory: MemoryEstimate) -> MissingMemory | None:
        """Return what a candidate's memory exceeds by most; None where it fits."""
        return missing_memory(memory, self.job.cluster, self.margin_share)


@checked
@dataclass(frozen=True, kw_only=True)
class Limits:
    """Say when a search ends.

    Attributes:
        margin_share: share of a device's memory that is to stay free.
        max_prices: estimates of time, of which one of memory counts as four, after which the search ends though better
            candidates may be left.
    """

    num_best: Positive = 10
    margin_share: BelowOne = USUAL_MARGIN
    max_prices: Positive = 100_000


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Hold the candidates that a search found.

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
    """Find the fastest candidates of a job that fit.

    Args:
        job: on all GPUs of its cluster.
        space: what may be chosen; None allows everything.
        limits: when to end; None takes the defaults.
        pricer: prices the job's candidates; None makes a `Pricer`.

    Raises:
        ConfigError: there is no candidate: batch, cluster and pins do not go together.
    """
    began = time.perf_counter()
    limits = limits or Limits()
    search = _Search(job, space or SearchSpace(), limits, pricer or Pricer(job, limits.margin_share))
    search.run()
    if not search.num_candidates:
        raise ConfigError("no-layout", why_none(job, search.space))
    fitting = search.finish()
    num_fitting = search.count_fitting()
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
    """Return what a search found, once the memory of some candidates is known: what no longer fits is left out.

    Args:
        settled: some of its best, runners-up and near misses; those that were simulated have the memory that counts.
    """
    simulated = {price.config: price for price in settled if price.memory.worst.is_simulated}
    by_config = {price.config: price for price in (*plan.best, *plan.runners_up)} | simulated
    every, margin = list(by_config.values()), plan.limits.margin_share

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
        kinds.setdefault(kind_of(price.config), price)
    yield from list(kinds.values())[1:num_best]


def kind_of(config: ResolvedConfig) -> tuple[Any, ...]:
    """Return mesh and schedule; where only data are split, the ZeRO stage too."""
    mesh = (config.mesh.pp, config.mesh.cp, config.mesh.tp, config.pipeline.schedule)
    return (*mesh, config.zero.stage) if mesh[:3] == (1, 1, 1) else mesh


@dataclass(frozen=True)
class _Head:
    """Mark the members of a family from `index` on, whose bound is that of the first of them."""

    family: Family
    index: int
    inner_s: float

    @property
    def bound_s(self) -> float:
        return self.inner_s * (1 + self.family.pipelines[self.index][0])


@dataclass(frozen=True)
class _Placed:
    """Mark the placements of one candidate from `index` on, with their times, the fastest first.

    Attributes:
        has_fit: whether one of those before fits.
    """

    priced: Sequence[tuple[float, ResolvedConfig]]
    index: int = 0
    has_fit: bool = False


_Item = _Head | ResolvedConfig | _Placed
"""A candidate stands for itself where its bound is the time of its own stages."""


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
        self._placements: dict[tuple[Any, ...], list[Values]] = {}
        self._fits_leanest: dict[tuple[Any, ...], bool] = {}
        self._fallbacks: list[ResolvedConfig] = []
        self._missed: tuple[float, ResolvedConfig] | None = None
        self._near: list[Estimate] = []
        self._memories: dict[tuple[Any, ...], MemoryEstimate] = {}

    def run(self) -> None:
        """Open what has the least bound until it passes what was found or prices are spent."""
        busy_s, every = self.pricer.time.busy_s, families(self.job, self.space)
        # No member of a family takes less than its first one without a bubble.
        heads = [_Head(family, 0, busy_s(self._least_computing(family.member(0)))) for family in every]
        self.num_candidates = sum(len(head.family.pipelines) for head in heads)
        heap: list[tuple[float, int, _Item]] = [(head.bound_s, number, head) for number, head in enumerate(heads)]
        num_items = len(heap)
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

    def count_fitting(self) -> int:
        """Return how many candidates fit; give those that were never priced whole their reason."""
        num_fitting = len({_candidate_of(price.config) for price in self.fitting})
        num_left = self.num_candidates - num_fitting - self.rejected.total()
        self.rejected["not looked at" if self.is_cut else "slower even at best"] += num_left
        return num_fitting

    def _has_enough(self, bound_s: float) -> bool:
        """Say whether nothing from this bound on is wanted, neither to win nor to be shown."""
        num_kinds = min(_NUM_KINDS, self.limits.num_best)
        return not self._may_win(bound_s) and len(self._kinds) >= num_kinds

    def _may_win(self, bound_s: float) -> bool:
        """Say whether what takes this long is among the best, or may still be the best for its simplicity."""
        is_tie = not self.fitting or bound_s <= (1 + TIE_SHARE) * self.fitting[0].time.step_s
        return is_tie or len(self.fitting) < self.limits.num_best

    def _open(self, item: _Item, bound_s: float) -> Iterator[tuple[float, _Item]]:
        """Yield what an item becomes, by its next bound; of a priced candidate that fits, keep the price."""
        if isinstance(item, _Placed):
            has_fit, following = self._add(item.priced[item.index][1]) or item.has_fit, item.index + 1
            if following < len(item.priced):
                yield item.priced[following][0], _Placed(item.priced, following, has_fit)
            elif not has_fit:
                self.rejected["out of memory"] += 1
            return
        if isinstance(item, _Head) and item.index + 1 < len(item.family.pipelines):
            head = replace(item, index=item.index + 1)
            yield head.bound_s, head
        config = item.family.member(item.index) if isinstance(item, _Head) else item
        kind = kind_of(config)
        if not self._may_win(bound_s) and kind[:3] != (1, 1, 1) and kind in self._kinds:
            self.rejected["like a faster one"] += 1
        elif not self._placements_of(config) or not self._fits_leanest.get(_pipeline_of(config), True):
            self.rejected["out of memory even at best"] += 1
        elif isinstance(item, _Head):
            yield self._stages_s(config), config
        elif not self._may_fit(config):
            self.rejected["out of memory"] += 1
        else:
            placed = [changed(config, values) for values in self._placements_of(config)]
            priced = sorted(((self._quick(candidate).step_s, candidate) for candidate in placed), key=itemgetter(0))
            yield priced[0][0], _Placed(priced)

    def _stages_s(self, config: ResolvedConfig) -> float:
        """Return the time without what depends on where states are stored."""
        self._count(1)
        return self.pricer.time.stages_s(self._least_computing(config))

    def _least_computing(self, config: ResolvedConfig) -> ResolvedConfig:
        # Where gradients are not stored whole none are added to others, so the highest stage computes least.
        return changed(config, {"zero.stage": max(self.space.of("zero.stage", (3,))), "zero.secondary_shard": 0})

    def _placements_of(self, config: ResolvedConfig) -> list[Values]:
        """Return the placements with which the states of a rank may fit on the device."""
        key = (config.mesh, config.recompute.mode)
        if key not in self._placements:
            self._placements[key] = [
                placement
                for placement in placements(self.job, self.space, config)
                if least_states_bytes(self.job, changed(config, placement)) <= self._usable_bytes
            ]
        return self._placements[key]

    def _may_fit(self, config: ResolvedConfig) -> bool:
        """Say whether a candidate fits the device with the placement that leaves least there.

        The candidate of the same pipeline that keeps least is estimated first, once for all that keep more.
        """
        placement, pipeline = max(self._placements_of(config), key=_saving), _pipeline_of(config)
        if pipeline not in self._fits_leanest:
            count = config.batch.accumulation * config.batch.micro_size
            least = {"batch.micro_size": 1, "batch.accumulation": count, "recompute.mode": "full", "recompute.every": 1}
            leanest = changed(config, least)
            # Only what is recomputed whole may move its activations away.
            of_leanest = max(self._placements_of(leanest), key=_saving, default=placement)
            self._fits_leanest[pipeline] = self._fits_device(changed(leanest, of_leanest))
        return self._fits_leanest[pipeline] and self._fits_device(changed(config, placement))

    def _fits_device(self, config: ResolvedConfig) -> bool:
        memory = self._memory_of(config)
        if missing_memory(memory, self.job.cluster, self.limits.margin_share) is None:
            self._fallbacks.append(config)
        return memory.worst.peak_bytes <= self._usable_bytes

    def _quick(self, config: ResolvedConfig) -> TimeEstimate:
        self._count(1)
        return self.pricer.time.estimate(config, is_quick=True)

    def _count(self, cost: int) -> None:
        self.num_prices += 1
        self._cost += cost

    def _memory_of(self, config: ResolvedConfig) -> MemoryEstimate:
        """Estimate its memory, of some ranks alone where that does not fit; note how much is missing."""
        if (key := _held_of(config)) in self._memories:
            return self._memories[key]
        # For what does not fit it is enough to know that another misses by less.
        least_lacking = math.inf if self._missed is None else self._missed[0]
        too_much_bytes = self._usable_bytes + least_lacking / self.job.cluster.gpus_per_node
        memory = self._memories[key] = self.pricer.memory.estimate(config, too_much_bytes=too_much_bytes)
        self._count(_MEMORY_COST)
        lacking = missing_on_node(memory, self.job.cluster, self.limits.margin_share)
        if lacking > 0 and lacking < least_lacking:
            self._missed = lacking, config
        return memory

    def _add(self, config: ResolvedConfig, below_s: float = math.inf) -> bool:
        """Keep a candidate's price; return whether it fits and takes less than `below_s`."""
        memory = self._memory_of(config)
        missing = missing_memory(memory, self.job.cluster, self.limits.margin_share)
        if missing is not None:
            if missing.tier == "device" and missing.missing_bytes <= _NEAR_SHARE * self._usable_bytes:
                self._near.append(Estimate(job=self.job, config=config, memory=memory, time=self._quick(config)))
            return False
        price = self._quick(config)
        if price.step_s >= below_s:
            return False
        self.fitting.append(Estimate(job=self.job, config=config, memory=memory, time=price))
        self._kinds.add(kind_of(config))
        return True

    def finish(self) -> list[Estimate]:
        """Return all that fit: the simplest of the fastest, then the fastest first, their schedules simulated."""
        if not self.fitting:  # the search was cut
            fastest = sorted(self._fallbacks, key=lambda each: self._quick(each).step_s)
            for config in fastest[: self.limits.num_best]:
                self._add(config)
        for price in self.fitting[: self.limits.num_best]:  # as large a share on the device as fits and helps
            any(self._add(config, price.time.step_s) for config in more_on_device(price, self._usable_bytes))
        every = sorted(self.fitting, key=lambda each: each.time.step_s)
        if not every:
            return []
        most = _MOST_SIMULATED * self.limits.num_best
        shown = {price.config: price for price in (*every[:most], simplest(every), *runners_up(every, most))}
        exact = [
            price if config.mesh.pp == 1 else replace(price, time=self.pricer.time.estimate(config))
            for config, price in shown.items()
        ]
        self.num_prices += len(exact)
        exact.sort(key=lambda each: (each.time.step_s, num_extras(each.config)))
        best = simplest(exact)
        return [best, *(price for price in exact if price is not best)]

    def near_misses(self, fitting: Sequence[Estimate]) -> Iterator[Estimate]:
        """Yield the fastest of those that miss by little, if they are faster than what fits."""
        least_s = fitting[0].time.step_s if fitting else math.inf
        fastest = sorted(self._near, key=lambda price: price.time.step_s)[:_NUM_NEAR]
        for price in fastest:
            # The memory of all ranks, the schedule simulated.
            exact_price = self.pricer.price(price.config)
            if exact_price.time.step_s < (1 - TIE_SHARE) * least_s:
                yield exact_price

    def nearest(self) -> tuple[Estimate, MissingMemory] | None:
        """Return what misses by least."""
        if self._missed is None:
            return None
        price = self.pricer.price(self._missed[1])
        missing = missing_memory(price.memory, self.job.cluster, self.limits.margin_share)
        return None if missing is None else (price, missing)


def more_on_device(price: Estimate, usable_bytes: float) -> Iterator[ResolvedConfig]:
    """Yield the candidate with as large a share of its states on the device as may fit, and with a little less.

    Args:
        price: of a candidate that stores states off the device; for any other nothing is yielded.
    """
    tiers, worst = price.config.tiers, price.memory.worst
    away = [name for name in ("params", "grads", "optimizer") if getattr(tiers, name) != "device"]
    if away_bytes := sum(worst.elsewhere.values()) if away else 0:
        most = int(_NUM_SHARES * min(1.0, (usable_bytes - worst.peak_bytes) / away_bytes))
        for step in (most, most - 1):
            if 0 < step < _NUM_SHARES:
                yield changed(price.config, {f"tiers.{name}_on_device": step / _NUM_SHARES for name in away})


def _candidate_of(config: ResolvedConfig) -> tuple[Any, ...]:
    """Return what is left of a candidate without where its states are stored."""
    pipeline = (config.mesh.pp, config.pipeline.schedule, config.pipeline.virtual_stages)
    split = (config.mesh.tp, config.mesh.ep, config.tensor, config.mesh.cp, config.context)
    return *pipeline, *split, config.batch, config.recompute


def _pipeline_of(config: ResolvedConfig) -> tuple[Any, ...]:
    """Return what candidates share whose memory differs by micro-batches and recomputation alone."""
    return config.mesh, config.tensor, config.context.transport == "ulysses", config.pipeline


def _held_of(config: ResolvedConfig) -> tuple[Any, ...]:
    """Return what candidates share that hold the same: of how contexts are exchanged, only Ulysses keeps more."""
    return *_pipeline_of(config), config.batch, config.recompute, config.zero, config.tiers


def _saving(placement: Values) -> tuple[int, int, bool, int]:
    """Return a key that is largest for the placement that holds least on the device."""
    tiers = [placement[f"tiers.{name}"] for name in ("params", "grads", "optimizer", "activations")]
    num_away, is_late = sum(tier != "device" for tier in tiers), placement["pipeline.gather"] == "micro-batch"
    return num_away, placement["zero.stage"], is_late, placement["mesh.dp_shard"]


def least_states_bytes(job: PlanJob, config: ResolvedConfig) -> float:
    """Return the least bytes of states that some rank stores on the device: those of the mean rank."""
    mesh, tiers = config.mesh, config.tiers
    stage = effective_stage(ZERO[config.zero.stage], mesh.dp_shard * mesh.cp, is_scheduled=mesh.pp > 1)
    tier_of = {"param": tiers.params, "grad": tiers.grads, "optimizer": tiers.optimizer}
    states = _states_of_element(stage, config.precision, config.optimizer, config.lora)
    on_device = [(size, at) for role, size, at in states if tier_of[role] == "device"]

    def of_param(num_shards: int) -> float:
        return sum([size / num_shards if at is Placement.SHARD else size for size, at in on_device])

    of_experts = job.shape.num_expert_params
    dense = (job.shape.num_params - of_experts) / mesh.tp * of_param(mesh.dp_shard * mesh.cp)
    return (dense + of_experts / mesh.ep * of_param(mesh.dp_shard * mesh.cp * mesh.tp // mesh.ep)) / mesh.pp


@lru_cache(maxsize=2**6)
def _states_of_element(
    stage: ZeroStage, precision: PrecisionConfig, optimizer: OptimizerConfig, lora: LoraConfig
) -> tuple[tuple[str, float, Placement], ...]:
    """Return role, bytes and placement of an element's states; those of Muon's matrices, which have fewer."""
    of_matrices = bool(matrix_state_names(optimizer.name))
    return tuple(
        (
            state.role,
            PACKED_BYTES if lora.base == "nf4" and state.role == "param" else DTYPE_BYTES[(state.codec or state).dtype],
            state.placement,
        )
        for state in states_of(stage, precision_policy(precision), optimizer, ())
        if state.exact_of is None and state.of_matrices in (None, of_matrices)
        if lora.rank == 0 or state.role == "param"
    )
