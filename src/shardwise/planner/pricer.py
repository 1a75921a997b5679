"""Price a strategy: its memory and its time."""

from __future__ import annotations

import math
from typing import Protocol

from shardwise.planner.compact_layout import CompactLayout
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.memory import MemoryModel
from shardwise.planner.results import Estimate, MemoryEstimate, TimeEstimate
from shardwise.planner.step_time import TimeModel


class _MemoryEstimator(Protocol):
    def estimate(self, strategy: Strategy, *, too_much_bytes: float = math.inf) -> MemoryEstimate: ...


class _TimeEstimator(Protocol):
    def estimate(self, strategy: Strategy, *, is_quick: bool = False) -> TimeEstimate: ...

    def busy_s(self, strategy: Strategy) -> float: ...


class Pricing(Protocol):
    """Describe what prices strategies: `Pricer`, or another class with its attributes."""

    @property
    def memory(self) -> _MemoryEstimator: ...

    @property
    def time(self) -> _TimeEstimator: ...


class Pricer:
    """Price the strategies of one job, and keep what several of them share."""

    def __init__(self, job: PlanJob) -> None:
        self.job = job
        compact = CompactLayout(job)
        self.memory = MemoryModel(job, compact)
        self.time = TimeModel(job, compact)

    def price(self, strategy: Strategy) -> Estimate:
        """Return the memory and time of one strategy."""
        return priced(self.job, strategy, self)


def priced(job: PlanJob, strategy: Strategy, pricing: Pricing, memory: MemoryEstimate | None = None) -> Estimate:
    """Return the memory and time of one strategy.

    Args:
        job: the job that `pricing` prices.
        strategy: how it is split.
        pricing: makes the estimates.
        memory: what it holds, where that is known already.
    """
    memory = memory or pricing.memory.estimate(strategy)
    return Estimate(job=job, strategy=strategy, memory=memory, time=pricing.time.estimate(strategy))
