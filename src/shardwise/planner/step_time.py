"""Time of an optimizer step, by part."""

from __future__ import annotations

from shardwise.planner.job import Job, Strategy
from shardwise.planner.results import TimeEstimate


class TimeModel:
    """Times of a job's strategies; keeps what several of them share."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def estimate(self, strategy: Strategy) -> TimeEstimate:
        """Of one optimizer step."""
        job = self.job
        dtype = strategy.matmul or strategy.param
        flops = job.shape.flops_per_token(job.seq_len) * job.tokens / job.cluster.num_gpus
        compute_s = flops / (0.5 * job.cluster.gpu.peak_flops_per_s[dtype])
        recompute_s = compute_s / 3 if strategy.recompute == "full" else 0.0
        bubble_s = (compute_s + recompute_s) * (strategy.pp - 1) / strategy.num_micro_batches
        parts = {"compute": compute_s, "recompute": recompute_s, "bubble": bubble_s}
        step_s = sum(parts.values())
        return TimeEstimate(step_s=step_s, low_s=0.9 * step_s, high_s=1.1 * step_s, parts=parts)
