"""Price a config: its memory and its time."""

from __future__ import annotations

from shardwise.config.resolve import ResolvedConfig
from shardwise.planner.folded_layout import FoldedLayouts
from shardwise.planner.job import PlanJob
from shardwise.planner.memory import MemoryModel
from shardwise.planner.results import Estimate, MemoryEstimate
from shardwise.planner.step_time import TimeModel


class Pricer:
    """Price the candidates of one job, and keep what several of them share."""

    def __init__(self, job: PlanJob) -> None:
        self.job = job
        layouts = FoldedLayouts(job)
        self.memory = MemoryModel(job, layouts)
        self.time = TimeModel(job, layouts)

    def price(self, config: ResolvedConfig) -> Estimate:
        """Return the memory and time of one config."""
        return priced(self.job, config, self)


def priced(job: PlanJob, config: ResolvedConfig, pricer: Pricer, memory: MemoryEstimate | None = None) -> Estimate:
    """Return the memory and time of one config.

    Args:
        memory: what it holds, where that is known already.
    """
    memory = memory or pricer.memory.estimate(config)
    return Estimate(job=job, config=config, memory=memory, time=pricer.time.estimate(config))
