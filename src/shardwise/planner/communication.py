"""Time of what ranks exchange: in a block, between stages, and to shard parameters, gradients and states.

Times are of collectives alone; `exposed_s` says what of them a step sees that computes meanwhile.

>>> from shardwise.models.presets import preset
>>> from shardwise.planner.catalogue import gpu
>>> from shardwise.planner.hardware import Cluster
>>> from shardwise.planner.shape import ModelShape
>>> cluster = Cluster(gpu=gpu("h100"), num_gpus=64, gpus_per_node=8, nic_bytes_per_s=50e9)
>>> job = Job(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=64, cluster=cluster)
>>> model = CommunicationModel(job)
>>> model.block(Strategy(tp=8, dp_shard=8)).forward.tensor_s > model.block(Strategy(tp=2, dp_shard=32)).forward.tensor_s
True
>>> once, often = (model.data(Strategy(dp_shard=64, zero_stage=3, num_micro_batches=m)) for m in (1, 2))
>>> once.total_s < often.total_s
True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shardwise.context.traffic import Sizes, bytes_of_heads, bytes_of_ring
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.planner.collectives import Network, Op
from shardwise.planner.job import Job, Strategy

OVERLAP_SLOWDOWN: Final = 0.25
"""How much longer kernels take beside a collective, which takes cores and memory bandwidth from them: 38 % at most in
Echo (arXiv 2412.12487), and less where copies alone move."""
TENSOR_CHUNKS: Final = 4
"""Parts in which codes that overlap tensor-parallel collectives multiply; all but one part's collective may hide."""
NUM_STEP_SUMS: Final = 3
"""Collectives of a few bytes over all ranks in a step: the gradients' norm, the loss, whether all are finite."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Seconds of the collectives of one unit in one pass of one micro-batch.

    Attributes:
        tensor_s: of tensor and sequence parallelism.
        context_s: of keys and values, or of heads.
        experts_s: of tokens that go to experts and come back.
        hidden_tensor: the share of `tensor_s` that may run beside the unit's matrix products.
        hidden_context: the share of `context_s` that may run beside its attention.
    """

    tensor_s: float = 0.0
    context_s: float = 0.0
    experts_s: float = 0.0
    hidden_tensor: float = 0.0
    hidden_context: float = 0.0

    def exposed(self, compute_s: float, attention_s: float) -> dict[str, float]:
        """Seconds by part that the pass takes longer for.

        Args:
            compute_s: of the unit's pass, attention included.
            attention_s: of its attention alone.
        """
        products_s = max(0.0, compute_s - attention_s)
        return {
            "tensor": _beside(self.tensor_s, self.hidden_tensor, products_s),
            "context": _beside(self.context_s, self.hidden_context, attention_s),
            "experts": self.experts_s,
        }


@dataclass(frozen=True, kw_only=True)
class BlockCommunication:
    """Of one unit and one micro-batch; `recompute` is what running the forward again adds to the backward."""

    forward: Exchange
    backward: Exchange
    recompute: Exchange = Exchange()


@dataclass(frozen=True, kw_only=True)
class DataCommunication:
    """Seconds of a step's gathers and reductions on one rank, by when they run.

    Attributes:
        forward_s: of gathers in the forward of each micro-batch.
        backward_s: of gathers and reductions in the backward of each micro-batch.
        first_forward_s: of gathers that the first micro-batch alone waits for, such as those after a step.
        last_backward_s: of reductions in the last micro-batch's backward alone.
        alone_s: of the first gather and the last reduction, which nothing can run beside; part of the others.
        step_s: of collectives in the step itself; nothing hides them.
        num_micro_batches: of the step.
        may_hide: whether they run while others compute.
    """

    forward_s: float
    backward_s: float
    first_forward_s: float
    last_backward_s: float
    alone_s: float
    step_s: float
    num_micro_batches: int
    may_hide: bool

    @property
    def total_s(self) -> float:
        """Of all of a step."""
        each = self.num_micro_batches * (self.forward_s + self.backward_s)
        return each + self.first_forward_s + self.last_backward_s + self.step_s

    def exposed_s(self, forward_s: float, backward_s: float) -> float:
        """Seconds of a step that computing does not hide.

        Args:
            forward_s: that the rank computes in one micro-batch's forward.
            backward_s: in its backward, recomputation included.
        """
        if not self.may_hide:
            return self.total_s
        count = self.num_micro_batches
        inner = (count - 1) * (exposed_s(self.forward_s, forward_s) + exposed_s(self.backward_s, backward_s))
        first = exposed_s(self.forward_s + self.first_forward_s, forward_s)
        last = exposed_s(self.backward_s + self.last_backward_s, backward_s)
        return max(inner + first + last, self.alone_s) + self.step_s


def exposed_s(communication_s: float, compute_s: float) -> float:
    """Seconds by which a collective lengthens what is computed beside it.

    What it does not outlast it still slows, by `OVERLAP_SLOWDOWN`.

    >>> exposed_s(3.0, 0.0), exposed_s(0.0, 3.0), round(exposed_s(1.0, 9.0), 3)
    (3.0, 0.0, 0.2)
    """
    slowed_s = communication_s * OVERLAP_SLOWDOWN / (1 + OVERLAP_SLOWDOWN)
    return max(communication_s - compute_s, slowed_s)


def _beside(communication_s: float, hidden: float, compute_s: float) -> float:
    return (1 - hidden) * communication_s + exposed_s(hidden * communication_s, compute_s)


@dataclass(frozen=True)
class _Unit:
    """What data-parallel ranks exchange of one unit: elements that all share, and those of experts."""

    numel: float
    expert_numel: float
    count: int


class CommunicationModel:
    """What the strategies of a job exchange; keeps what several of them share.

    Args:
        job: with its cluster.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.network = Network(job.cluster)
        self._blocks: dict[tuple[object, ...], BlockCommunication] = {}

    def block(self, strategy: Strategy) -> BlockCommunication:
        """Of one block on one rank, in one micro-batch.

        Collectives are those of `shardwise.tensor.ops` and `shardwise.context.traffic`; dispatching to experts and back
        are two all-to-alls each way (Lepikhin et al. 2020, arXiv 2006.16668).
        """
        s = strategy
        split = (s.tp, s.cp, s.ep, s.micro_size, s.sequence_parallel, s.param)
        key = (*split, s.transport, s.heads_over, s.recompute, s.recompute_every)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = self._block(strategy)
        return found

    def embedding(self, strategy: Strategy) -> BlockCommunication:
        """Of the embedding: each tp rank looks up its part of the vocabulary, and the results are summed."""
        op: Op = "reduce_scatter" if strategy.sequence_parallel else "all_reduce"
        back_s = self._tensor_s("all_gather", strategy) if strategy.sequence_parallel else 0.0
        return BlockCommunication(
            forward=Exchange(tensor_s=self._tensor_s(op, strategy)), backward=Exchange(tensor_s=back_s)
        )

    def head(self, strategy: Strategy) -> BlockCommunication:
        """Of the head and the loss: the input gathered, its gradient summed, three numbers a token in between."""
        s = strategy
        tokens_bytes = 4.0 * self._tokens(s)
        forward_s = 3 * self.network.collective_s("all_reduce", tokens_bytes, s.tp)
        backward_s = self._tensor_s("all_reduce", s)
        if s.sequence_parallel:
            forward_s += self._tensor_s("all_gather", s)
            backward_s = self._tensor_s("all_gather", s) + self._tensor_s("reduce_scatter", s)
        return BlockCommunication(forward=Exchange(tensor_s=forward_s), backward=Exchange(tensor_s=backward_s))

    def transfer_s(self, strategy: Strategy) -> float:
        """Of one micro-batch's activation from a stage to the next, or of its gradient back."""
        s = strategy
        if s.pp == 1:
            return 0.0
        num_bytes = self._activation_bytes(s) / (s.tp if s.sequence_parallel else 1)
        return self.network.collective_s("send", num_bytes, s.pp, s.num_ranks // s.pp)

    def data(self, strategy: Strategy, pipeline_rank: int = 0) -> DataCommunication:
        """Of a step's gathers and reductions over the ranks that share parameters.

        Which there are, and how often, `Layout.bytes_on_wire` says: in stage 3 each use gathers; stages 2 and 3 reduce
        in each backward, unless a pipeline gathers once a batch; stages 1 and 2 gather after the step; replicas sum
        what a shard has.
        """
        s = strategy
        units = self._units(s, pipeline_rank)
        gather = [self._gather_s(s, unit) for unit in units]
        reduce_s, replicate_s = (
            [method(s, unit) for unit in units] for method in (self._reduce_s, self._sum_of_replicas_s)
        )

        def whole(each: list[float]) -> float:
            return sum(seconds * unit.count for seconds, unit in zip(each, units, strict=True))

        stage = s.zero_stage
        is_scheduled_once = s.pp > 1 and s.gather == "batch"
        forward_s = backward_s = first_s = last_s = 0.0
        if stage >= 3 and is_scheduled_once:
            first_s += whole(gather)
        elif stage >= 3:
            forward_s += whole(gather)
            backward_s += whole(gather)
        if stage in (1, 2):
            first_s += whole(gather)
        if stage >= 2 and not is_scheduled_once:
            backward_s += whole(reduce_s)
        else:
            last_s += whole(reduce_s)
        last_s += whole(replicate_s)
        block = units[0]
        alone_s = self._gather_s(s, block) * (stage > 0) + self._reduce_s(s, block) + self._sum_of_replicas_s(s, block)
        return DataCommunication(
            forward_s=forward_s,
            backward_s=backward_s,
            first_forward_s=first_s,
            last_backward_s=last_s,
            alone_s=alone_s,
            step_s=NUM_STEP_SUMS * self.network.collective_s("all_reduce", 4.0, s.num_ranks),
            num_micro_batches=s.num_micro_batches,
            may_hide=self.job.practice.overlaps_data,
        )

    def _block(self, s: Strategy) -> BlockCommunication:
        forward_s, backward_s, again_s = self._tensor_passes(s)
        hidden = (TENSOR_CHUNKS - 1) / TENSOR_CHUNKS if self.job.practice.overlaps_tensor else 0.0
        context = self._context_passes(s)
        hidden_context = 1.0 if s.transport == "ring" and (s.heads_over or 1) < s.cp else 0.0
        experts_s = self._experts_s(s)
        repeats = 1.0 / s.recompute_every if s.recompute == "full" else 0.0
        # Beside the gradients of inputs, in every code; what runs again gathers anyway.
        regathered_s = (1 - repeats) * 2 * self._tensor_s("all_gather", s) if s.sequence_parallel else 0.0
        backward_all_s = backward_s + regathered_s
        hidden_back = (hidden * backward_s + regathered_s) / backward_all_s if backward_all_s else 0.0
        return BlockCommunication(
            forward=Exchange(
                tensor_s=forward_s,
                context_s=context[0],
                experts_s=experts_s,
                hidden_tensor=hidden,
                hidden_context=hidden_context,
            ),
            backward=Exchange(
                tensor_s=backward_all_s,
                context_s=context[1],
                experts_s=experts_s,
                hidden_tensor=hidden_back,
                hidden_context=hidden_context,
            ),
            recompute=Exchange(
                tensor_s=repeats * again_s,
                context_s=repeats * context[0],
                experts_s=repeats * experts_s,
                hidden_tensor=hidden,
                hidden_context=hidden_context,
            ),
        )

    def _tensor_passes(self, s: Strategy) -> tuple[float, float, float]:
        """Seconds forward, backward without what is gathered again, and of the forward's run again."""
        if s.tp == 1:
            return 0.0, 0.0, 0.0
        if s.sequence_parallel:
            pair_s = 2 * (self._tensor_s("all_gather", s) + self._tensor_s("reduce_scatter", s))
        else:
            pair_s = 2 * self._tensor_s("all_reduce", s)
        return pair_s, pair_s, pair_s

    def _tensor_s(self, op: Op, s: Strategy) -> float:
        return self.network.collective_s(op, self._activation_bytes(s), s.tp)

    def _context_passes(self, s: Strategy) -> tuple[float, float]:
        """Seconds of the exchange forward and backward."""
        if s.cp == 1:
            return 0.0, 0.0
        shape, over = self.job.shape, s.heads_over or (s.cp if s.transport == "ulysses" else 1)
        num_tokens, heads, kv_heads = (
            self.job.seq_len // s.cp,
            shape.num_heads // s.tp,
            max(1, shape.num_kv_heads // s.tp),
        )
        element_bytes = DTYPE_BYTES[s.param]
        sizes = Sizes(s.micro_size, heads, kv_heads, shape.head_dim, element_bytes)
        forward_s = backward_s = 0.0
        if over > 1:
            sent = bytes_of_heads(num_tokens, over, sizes)
            whole = over / (over - 1)
            forward_s += 2 * self.network.collective_s("all_to_all", sent.forward * whole / 2, over, s.tp)
            backward_s += 2 * self.network.collective_s("all_to_all", sent.backward * whole / 2, over, s.tp)
        ring = s.cp // over
        if ring > 1:
            own = Sizes(s.micro_size, heads // over, max(1, kv_heads // over), shape.head_dim, element_bytes)
            sent = bytes_of_ring(num_tokens * over, ring, own)
            forward_s += self._around_s(s, sent.forward, ring, s.tp * over)
            backward_s += self._around_s(s, sent.backward, ring, s.tp * over)
        return forward_s, backward_s

    def _around_s(self, s: Strategy, sent_bytes: float, num_ranks: int, stride: int) -> float:
        """Of keys and values that reach all ranks, each having sent so many bytes, one by one or at once."""
        if s.transport == "all-gather":
            whole_bytes = sent_bytes * num_ranks / (num_ranks - 1)
            return self.network.collective_s("all_gather", whole_bytes, num_ranks, stride)
        steps = num_ranks - 1
        return steps * self.network.collective_s("send", sent_bytes / steps, num_ranks, stride)

    def _experts_s(self, s: Strategy) -> float:
        """Of one pass of an average block: some layers may be dense."""
        shape = self.job.shape
        if shape.experts is None or s.ep == 1:
            return 0.0
        of_tokens = self._activation_bytes(s) / (s.tp if s.sequence_parallel else 1)
        one_s = self.network.collective_s("all_to_all", of_tokens * shape.experts.num_chosen, s.ep, s.tp)
        return 2 * one_s * shape.num_expert_layers / shape.num_layers

    def _tokens(self, s: Strategy) -> float:
        return self.job.seq_len / s.cp * s.micro_size

    def _activation_bytes(self, s: Strategy) -> float:
        return DTYPE_BYTES[s.param] * self._tokens(s) * self.job.shape.hidden_size

    def _units(self, s: Strategy, pipeline_rank: int) -> tuple[_Unit, ...]:
        """The rank's blocks, and its embedding and head."""
        shape = self.job.shape
        tables = shape.vocab_size * shape.hidden_size
        num_tables = 1 if shape.is_tied else 2
        experts_numel = 0.0
        if shape.experts is not None:
            each = shape.num_ffn_matrices * shape.hidden_size * shape.experts.ffn_size
            experts_numel = each * shape.experts.num_experts * shape.num_expert_layers / shape.num_layers
        block_numel = (shape.num_params - num_tables * tables) / shape.num_layers - experts_numel
        count = -(-shape.num_layers // s.pp) if s.stage_layers is None else s.stage_layers[pipeline_rank]
        has_tables = (pipeline_rank == 0) + (pipeline_rank == s.pp - 1 and (s.pp > 1 or num_tables == 2))
        return (
            _Unit(block_numel / s.tp, experts_numel / (s.tp * s.ep), count),
            _Unit(tables / s.tp, 0.0, has_tables),
        )

    def _shards(self, s: Strategy) -> tuple[int, int]:
        """Ranks over which optimizer states are sharded, and how many hold the same ones."""
        num_ranks = s.num_data_ranks * s.cp
        shards = s.dp_shard * s.cp
        if s.zero_stage == 0:
            return 1, num_ranks
        if s.zero_stage < 3 and self.job.practice.optimizer_shards:
            shards = min(num_ranks, self.job.practice.optimizer_shards)
        return shards, max(1, num_ranks // shards)

    def _over_shards_s(self, s: Strategy, op: Op, unit: _Unit, width: float) -> float:
        shards, _ = self._shards(s)
        seconds = self.network.collective_s(op, width * unit.numel, shards, s.tp)
        return seconds + self.network.collective_s(op, width * unit.expert_numel, shards // s.ep, s.tp * s.ep)

    def _gather_s(self, s: Strategy, unit: _Unit) -> float:
        return self._over_shards_s(s, "all_gather", unit, DTYPE_BYTES[s.param])

    def _reduce_s(self, s: Strategy, unit: _Unit) -> float:
        return self._over_shards_s(s, "reduce_scatter", unit, self._reduce_bytes(s))

    def _sum_of_replicas_s(self, s: Strategy, unit: _Unit) -> float:
        """Of an all-reduce of what a shard has, over the ranks that hold the same."""
        shards, replicas = self._shards(s)
        numel = unit.numel / shards
        experts_shards = max(1, shards // s.ep)
        experts_replicas = max(1, s.num_data_ranks * s.cp // (s.ep * experts_shards))
        width, stride = self._reduce_bytes(s), s.tp * shards
        seconds = self.network.collective_s("all_reduce", width * numel, replicas, stride)
        experts_numel = unit.expert_numel / experts_shards
        return seconds + self.network.collective_s("all_reduce", width * experts_numel, experts_replicas, stride)

    def _reduce_bytes(self, s: Strategy) -> int:
        return 4 if s.reduce == "fp32" else DTYPE_BYTES[s.param]
