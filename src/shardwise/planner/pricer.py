"""Price a strategy: its memory and its time."""

from __future__ import annotations

from shardwise.planner.compact_layout import CompactLayout
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.memory import MemoryModel
from shardwise.planner.results import Estimate, MemoryEstimate
from shardwise.planner.step_time import TimeModel


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


def priced(job: PlanJob, strategy: Strategy, pricer: Pricer, memory: MemoryEstimate | None = None) -> Estimate:
    """Return the memory and time of one strategy.

    Args:
        memory: what it holds, where that is known already.
    """
    memory = memory or pricer.memory.estimate(strategy)
    return Estimate(job=job, strategy=strategy, memory=memory, time=pricer.time.estimate(strategy))
