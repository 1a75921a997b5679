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

    def price(self, config: ResolvedConfig, memory: MemoryEstimate | None = None) -> Estimate:
        """Return the memory, if it is not known already, and the time of one config."""
        memory = memory or self.memory.estimate(config)
        return Estimate(job=self.job, config=config, memory=memory, time=self.time.estimate(config))
