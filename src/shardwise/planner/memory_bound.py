"""Bound the memory of candidates from below, so that the search need not estimate those that cannot fit.

It is a module of its own so that tests compare the bounds with the estimates.
"""

from __future__ import annotations

from shardwise.layout.precision import DTYPE_BYTES
from shardwise.planner.candidates import ParallelismCandidate, PlacementCandidate
from shardwise.planner.job import PlanJob, Strategy


class MemoryBound:
    """Give the least bytes that candidates hold on the device.

    Args:
        job: the model and its batch.
        base: its precision, chunk of tokens and expert ranks are taken.
    """

    def __init__(self, job: PlanJob, base: Strategy) -> None:
        self.job, self.base = job, base
        self._num_params = job.shape.num_params

    def params_of_rank(self, candidate: ParallelismCandidate) -> float:
        """Return the mean parameters of a pipeline rank, which is no more than the fullest rank has."""
        return self._num_params / (candidate.tp * candidate.pp * self.base.ep)

    def param_bytes(self, candidate: ParallelismCandidate, placement: PlacementCandidate) -> float:
        """Return the least bytes of one parameter's states that are stored on the device."""
        base = self.base
        param_bytes = DTYPE_BYTES[base.param]
        grad_bytes = param_bytes if base.accumulate == "param" else max(4, param_bytes)
        states = 2 if self.job.optimizer.startswith("adam") else 0
        optimizer_bytes = max(4, param_bytes) * (states + (param_bytes < 4))
        shards = placement.dp_shard * candidate.cp
        sharded_grads = 3 if candidate.pp > 1 else 2
        states_of = (
            (placement.params_tier, param_bytes, 3),
            (placement.grads_tier, grad_bytes, sharded_grads),
            (placement.optimizer_tier, optimizer_bytes, 1),
        )
        return sum(
            size / (shards if placement.zero_stage >= stage else 1)
            for tier, size, stage in states_of
            if tier == "device"
        )

    def activation_bytes(self, candidate: ParallelismCandidate) -> float:
        """Return the bytes of the first pipeline rank that every way of writing a block keeps for its backward."""
        shape, base = self.job.shape, self.base
        hidden, dtype_bytes = shape.hidden_size, DTYPE_BYTES[base.param]
        ffn = 0 if base.chunk_tokens is not None or shape.experts is not None else shape.ffn_size
        inputs = hidden / (candidate.tp if candidate.sequence_parallel else 1)
        kept = {"none": (3 * hidden + 2 * ffn) / candidate.tp, "selective": (hidden + ffn) / candidate.tp}
        if candidate.recompute == "full":
            again = 1 / candidate.recompute_every
            elements = inputs * again + kept["none"] * (1 - again)
        else:
            elements = kept[candidate.recompute]
        num_layers = max(0.0, shape.num_layers / candidate.pp - (2 if candidate.pp > 1 else 0))
        tokens = self.job.seq_len * candidate.micro_size / candidate.cp
        return dtype_bytes * elements * num_layers * tokens * min(candidate.num_micro_batches, candidate.pp)
