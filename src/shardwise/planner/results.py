"""Hold what the planner finds: memory of each pipeline rank by category, time of a step by part, and a price of both.

>>> rank = RankMemory(pipeline_rank=0, at_rest={"param": 4}, peak={"params": 4.0, "activations": 6.0})
>>> rank.peak_bytes
10.0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from shardwise.config.resolve import Tier
from shardwise.planner.job import PlanJob, Strategy

MEMORY_CATEGORIES: Final = (
    "params",
    "grads",
    "optimizer",
    "gathered",  # parameters unsharded for use
    "buckets",  # gradients until they are reduced, and what reductions need
    "activations",
    "logits",
    "workspace",  # of attention, of the backward's own tensors, of the step
    "overhead",  # the device's context, communicators
    "rounding",  # of the allocator
)
TIME_PARTS: Final = (
    "compute",
    "recompute",
    "tensor",  # exposed collectives of tensor and sequence parallelism
    "context",  # exposed exchange of keys and values, or of heads
    "experts",  # exposed all-to-alls
    "bubble",  # a pipeline's, transfers between stages included
    "data",  # exposed gathers and reductions
    "offload",  # exposed moves between memories
    "step",  # the optimizer's
    "other",
)
TIMELINE_PARTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "compute": ("compute", "recompute", "tensor", "context", "experts"),
        "bubble": ("bubble",),
        "data": ("data",),
        "offload": ("offload",),
        "step": ("step",),
        "other": ("other",),
    }
)
"""The planner's parts, by the part of a timeline that contains them: what a block exchanges is part of its forward."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Hold the bytes of each rank at one place of the pipeline.

    Attributes:
        at_rest: by role, as `Layout.bytes_at_rest` gives it, of all tiers.
        peak: of the device at the highest moment of a step, by category.
        elsewhere: stored in other memories, by tier.
        is_simulated: whether the tensors of the peak are the engine's own, simulated, and not the model's estimate.
    """

    pipeline_rank: int
    at_rest: Mapping[str, int]
    peak: Mapping[str, float]
    elsewhere: Mapping[Tier, float] = field(default_factory=dict)
    is_simulated: bool = False

    @property
    def peak_bytes(self) -> float:
        """Return the bytes of the device at the peak, all categories."""
        return sum(self.peak.values())

    def bytes_of(self, *categories: str) -> float:
        """Return the bytes of some categories together."""
        return sum(self.peak.get(each, 0.0) for each in categories)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Hold the memory of one rank at each place of the pipeline."""

    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """Return the rank with the highest peak; once a rank was simulated, that one."""
        return max(self.ranks, key=lambda each: (each.is_simulated, each.peak_bytes))


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Hold the seconds of an optimizer step.

    Attributes:
        low_s, high_s: four of five runs are expected between these.
        parts: of the step, by `TIME_PARTS`; their sum is `step_s`.
        bubble_rate: the share of a pipeline's span in which a rank neither computes nor communicates, by Qi et al.
            2023 (arXiv 2401.10241), section 2.3; None without a pipeline.
    """

    step_s: float
    low_s: float
    high_s: float
    parts: Mapping[str, float]
    bubble_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Hold the price of one strategy."""

    job: PlanJob
    strategy: Strategy
    memory: MemoryEstimate
    time: TimeEstimate

    @property
    def margin_bytes(self) -> float:
        """Return the device memory that is left on the worst rank; below 0 where it does not fit."""
        return self.job.cluster.gpu.memory_bytes - self.memory.worst.peak_bytes

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Return the job's tokens a second, divided by the number of devices."""
        return self.job.tokens / self.time.step_s / self.job.cluster.num_gpus

    def mfu(self, *, is_causal_halved: bool = False) -> float | None:
        """Return model FLOPs over the device's peak in the matrix products' dtype; nothing computed twice is counted.

        It is None where the device's peak in that dtype is not known.
        """
        peak = self.job.cluster.gpu.peak_flops_per_s.get(self.strategy.product_dtype)
        flops = self.job.shape.flops_per_token(
            self.job.seq_len, is_causal_halved=is_causal_halved, trains_all=self.job.trains_all
        )
        return flops * self.tokens_per_s_per_gpu / peak if peak else None


TIE_SHARE: Final = 0.02
"""Share of a step's time by which a simpler strategy may be slower than the fastest and still be preferred."""


def num_extras(strategy: Strategy) -> int:
    """Count axes beyond the data-parallel one, schedules beyond 1F1B, memories beyond the device, and the like.

    Each doubling of a context axis counts, and of virtual stages beyond two.
    """
    return sum(_extras(strategy).values())


def extras_words(strategy: Strategy, simpler: Strategy) -> str:
    """Name what a strategy does beyond a simpler one.

    >>> extras_words(Strategy(pp=4, schedule="zb-v", tp=2), Strategy(pp=4, tp=2))
    'schedule'
    """
    other = _extras(simpler)
    return ", ".join(words for words, number in _extras(strategy).items() if number > other[words])


def _extras(s: Strategy) -> dict[str, int]:
    tiers = (s.params_tier, s.grads_tier, s.optimizer_tier, s.activations_tier)
    return {
        "pipeline": int(s.pp > 1),
        "tensor axis": int(s.tp > 1),
        "context axis": (s.cp - 1).bit_length() + (s.cp > 1 and (s.heads_over is not None or s.transport != "ring")),
        "schedule": (s.pp > 1 and s.schedule != "1f1b") + s.schedule.startswith("zb-"),
        "virtual stages": max(0, (s.virtual_stages - 1).bit_length() - 1),
        "recomputation of some blocks": int(s.recompute_every > 1),
        "offload": sum(tier != "device" for tier in tiers) + tiers.count("nvme"),
        "shares of states": int(max(s.params_on_device, s.grads_on_device, s.optimizer_on_device) > 0),
    }


def simplest(prices: Iterable[Estimate]) -> Estimate:
    """Return the simplest of those within `TIE_SHARE` of the fastest, and of equally simple ones the fastest."""
    every = list(prices)
    least_s = min(price.time.step_s for price in every)
    tied = [price for price in every if price.time.step_s <= (1 + TIE_SHARE) * least_s]
    return min(tied, key=lambda price: (num_extras(price.strategy), price.time.step_s))


def by_timeline_part(parts: Mapping[str, float]) -> dict[str, float]:
    """Sum the planner's parts into those of a timeline."""
    return {name: sum(parts.get(each, 0.0) for each in names) for name, names in TIMELINE_PARTS.items()}
