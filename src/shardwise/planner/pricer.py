"""Price a config: its memory and its time."""

from __future__ import annotations

from shardwise.config.resolve import ResolvedConfig
from shardwise.planner.folded_layout import FoldedLayouts
from shardwise.planner.job import PlanJob
from shardwise.planner.memory import MemoryModel
from shardwise.planner.results import USUAL_MARGIN, Estimate, MemoryEstimate, MissingMemory, missing_memory
from shardwise.planner.step_time import TimeModel


class Pricer:
    """Price the candidates of one job, and keep what several of them share.

    Attributes:
        margin_share: share of a device's memory that is to stay free.
    """

    def __init__(self, job: PlanJob, margin_share: float = USUAL_MARGIN) -> None:
        self.job, self.margin_share = job, margin_share
        layouts = FoldedLayouts(job)
        self.memory = MemoryModel(job, layouts)
        self.time = TimeModel(job, layouts)

    def price(self, config: ResolvedConfig, memory: MemoryEstimate | None = None) -> Estimate:
        """Return the memory, if it is not known already, and the time of one config."""
        memory = memory or self.memory.estimate(config)
        return Estimate(job=self.job, config=config, memory=memory, time=self.time.estimate(config))

    def missing(self, memory: MemoryEstimate) -> MissingMemory | None:
        """Return what a candidate's memory exceeds by most; None where it fits."""
        return missing_memory(memory, self.job.cluster, self.margin_share)
