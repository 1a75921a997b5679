"""Memory of each pipeline rank, by category."""

from __future__ import annotations

from shardwise.planner.job import Job, Strategy
from shardwise.planner.results import MemoryEstimate, RankMemory


class MemoryModel:
    """Memory of a job's strategies; keeps what several of them share."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def estimate(self, strategy: Strategy) -> MemoryEstimate:
        """Of one rank at each place of the pipeline."""
        shape, s = self.job.shape, strategy
        numel = shape.num_params / (s.tp * s.pp)
        shards = s.dp_shard * s.cp
        sizes = {"param": 2 * numel, "grad": 4 * numel, "optimizer": 12 * numel}
        sharded = {"param": s.zero_stage >= 3, "grad": s.zero_stage >= 2, "optimizer": s.zero_stage >= 1}
        at_rest = {role: int(size / (shards if sharded[role] else 1)) for role, size in sizes.items()}
        tokens = self.job.seq_len * s.micro_size / (s.cp * s.tp)
        layers = shape.num_layers / s.pp * min(s.pp, s.num_micro_batches)
        activations = tokens * shape.hidden_size * layers * (2 if s.recompute == "full" else 34)
        peak = {
            "params": float(at_rest["param"]),
            "grads": float(at_rest["grad"]),
            "optimizer": float(at_rest["optimizer"]),
            "activations": activations,
        }
        ranks = (RankMemory(pipeline_rank=rank, at_rest=at_rest, peak=peak) for rank in range(s.pp))
        return MemoryEstimate(ranks=tuple(ranks))
