"""Memory of each pipeline rank, by category, at the highest moment of a step.

What rests follows from the folded Layout, to the byte. On top of it come, moment by moment, what blocks keep of the
micro-batches that the schedule has in flight, what a backward makes, logits, parameters that are gathered and gradients
on their way; the peak is the highest of these moments, not the sum of the highest of each part.

>>> from shardwise.models.presets import preset
>>> from shardwise.planner.hardware import Cluster, Gpu
>>> from shardwise.planner.shape import ModelShape
>>> gpu = Gpu(name="h100", memory_bytes=80 * 2**30, memory_bytes_per_s=3e12, peak_flops_per_s={"bf16": 989e12})
>>> cluster = Cluster(gpu=gpu, num_gpus=64, gpus_per_node=8, nic_bytes_per_s=5e10)
>>> job = Job(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=64, cluster=cluster)
>>> worst = MemoryModel(job).estimate(Strategy(dp_shard=64, zero_stage=3, recompute="full")).worst
>>> print(", ".join(f"{key} {size / 2**30:.1f}" for key, size in worst.peak.items() if size > 2**28))
grads 0.5, optimizer 1.4, activations 3.2, workspace 0.5, gathered 2.8, buckets 3.2, overhead 1.7, rounding 0.4
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import mul
from typing import Final

from shardwise.layout.activations import FP32_BYTES
from shardwise.layout.layout import TIERS
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.skeleton import ROOT
from shardwise.layout.stages import Placement
from shardwise.planner.block_memory import NUM_WIDE_OF_NORM, BlockBytes, block_bytes, head_deferred_bytes, logits_bytes
from shardwise.planner.flights import Flights, Held
from shardwise.planner.folded import FoldedLayout
from shardwise.planner.job import Job, Strategy
from shardwise.planner.results import MemoryEstimate, RankMemory
from shardwise.planner.stages import Stages

CONTEXT_BYTES: Final = 1.0 * 2**30
"""Of a process's context on a GPU with its kernels: 0.5 to 2 GiB (stas00/ml-engineering, training/performance)."""

COMMUNICATOR_BYTES: Final = 688 * 2**20
"""Of the channels' buffers of one communicator of NCCL, as measured on A100s (github.com/NVIDIA/nccl, issue 964)."""

UNUSED_SHARE: Final = 0.04
"""Of what comes and goes, that the allocator holds and cannot use at the peak."""

NUM_INPUTS_ON_DEVICE: Final = 3
"""Inputs of recomputed blocks that are on the device where the others are on the host."""

NUM_ON_THE_WAY: Final = 4
"""Tensors between stages beside those in use: one that is received for the next computation and one that is sent, of
each direction."""


@dataclass(frozen=True)
class Moving:
    """Parameters that are gathered and gradients on their way on one rank of the pipeline, in bytes of one kind.

    Attributes:
        root, block: elements of what is in no block, and of the largest block.
        rank: elements of all.
        param_bytes: an element gathered; 0 where parameters rest whole.
        grad_bytes: an element of a gradient that is not reduced yet; 0 where these rest whole.
        wire_bytes: an element that travels beside the gradient; 0 where nothing does.
        num_of_wire: buffers of one reduction: what it receives, and what it sends where gradients rest wider.
        is_replicated: all ranks have all that is reduced.
        gathers_once: all of the rank is unsharded for a batch.
    """

    root: int
    block: int
    rank: int
    param_bytes: float
    grad_bytes: float
    wire_bytes: float
    num_of_wire: int
    is_replicated: bool
    is_pipelined: bool
    gathers_once: bool

    @classmethod
    def of(cls, strategy: Strategy, folded: FoldedLayout, rank: int) -> Moving:
        """Of a rank's folded groups."""
        s, folds = strategy, folded.rank(strategy, rank)
        stage, precision = folds.layout.stage, folds.layout.precision
        root = sum(fold.group.padded_numel for fold in folds.folds if fold.group.unit == ROOT)
        blocks: dict[str, int] = {}
        for fold in folds.folds:
            if fold.group.unit != ROOT:
                blocks[fold.group.unit] = blocks.get(fold.group.unit, 0) + fold.group.padded_numel
        is_alone = s.dp_shard * s.cp * s.dp_replicate == 1
        is_gathered = stage.params is Placement.SHARD and not all(fold.group.rests_whole for fold in folds.folds)
        wire = 0 if is_alone else DTYPE_BYTES[precision.reduce]
        return cls(
            root=root,
            block=max(blocks.values(), default=0),
            rank=folds.numel,
            param_bytes=DTYPE_BYTES[s.param] if is_gathered else 0,
            grad_bytes=DTYPE_BYTES[precision.accumulate if s.pp > 1 else precision.reduce]
            if stage.grads is Placement.SHARD
            else 0,
            wire_bytes=wire,
            num_of_wire=1 if precision.accumulate == precision.reduce else 2,
            is_replicated=stage.optimizer is Placement.REPLICATE,
            is_pipelined=s.pp > 1,
            gathers_once=s.gather == "batch",
        )

    def gathered(self, num_blocks: int) -> float:
        """Bytes of the unsharded root and of so many blocks."""
        is_whole = self.is_pipelined and self.gathers_once
        return self.param_bytes * (self.rank if is_whole else min(self.rank, self.root + num_blocks * self.block))

    @property
    def standing(self) -> float:
        """Bytes of buffers that a pipeline keeps from step to step: of two reductions at once, where gradients rest."""
        is_in_place = self.is_replicated and self.num_of_wire == 1
        if not self.is_pipelined or self.grad_bytes or is_in_place:
            return 0.0
        numel = (self.root or self.block) + self.block
        return self.wire_bytes * (self.num_of_wire * numel + (self.block if self.is_replicated else 0))

    def buckets(self, root: int, block: int) -> float:
        """Bytes of so many buffers of the root's gradients and of the blocks': buckets, and what is received."""
        if not self.is_pipelined:
            if self.grad_bytes:
                return self.grad_bytes * (root * self.root + block * self.block)
            return self.wire_bytes * 2 * (max(0, root - 1) * self.root + max(0, block - 1) // 2 * self.block)
        if not self.grad_bytes:
            return self.standing
        return self.grad_bytes * self.rank + self.wire_bytes * (
            3 * self.block if self.gathers_once else self.rank + self.block
        )


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one micro-batch in a stage.

    Attributes:
        whole: that its blocks keep for the backward.
        again: that recomputation adds in the block whose backward runs.
        deferred: that blocks keep for the gradients of the weights alone.
    """

    whole: float
    again: float
    deferred: float


class MemoryModel:
    """Memory of a job's strategies; keeps what several of them share."""

    def __init__(self, job: Job, folded: FoldedLayout | None = None) -> None:
        self.job = job
        self.folded = folded or FoldedLayout(job)
        self._flights = Flights()
        self._blocks: dict[tuple[object, ...], BlockBytes] = {}

    def estimate(self, strategy: Strategy, *, too_much_bytes: float = math.inf) -> MemoryEstimate:
        """Of one rank at each place of the pipeline.

        Args:
            strategy: of the job.
            too_much_bytes: of a device; no further ranks are looked at behind the first that holds more.
        """
        stages = self.folded.stages.of(strategy)
        last = stages.placement.num_ranks - 1
        found: dict[tuple[object, ...], RankMemory] = {}
        ranks = []
        for rank in dict.fromkeys((0, last, *range(last))):  # the first and the last hold most, mostly
            key = (*stages.held_by(rank), self._flight(strategy, rank))
            if key not in found:
                found[key] = self._of_rank(strategy, stages, rank)
            ranks.append(replace(found[key], pipeline_rank=rank))
            if found[key].peak_bytes > too_much_bytes:
                break
        return MemoryEstimate(ranks=tuple(sorted(ranks, key=lambda each: each.pipeline_rank)))

    def _of_rank(self, strategy: Strategy, stages: Stages, rank: int) -> RankMemory:
        at_rest = self.folded.at_rest(strategy, rank)
        by_tier = self.folded.by_tier(strategy, rank)
        here = by_tier.get("device", {"param": 0, "grad": 0, "optimizer": 0})
        rest = {"params": here["param"] * self.job.practice.params_share, "grads": 0.0, "optimizer": 0.0}
        if self.job.practice.trains_all:
            rest["grads"] = here["grad"] + self._extra_grads(strategy, rank)
            rest["optimizer"] = float(here["optimizer"])
        else:  # the adapters' own are too few to count
            at_rest = {**at_rest, "grad": 0, "optimizer": 0}
        moments = self._moments(strategy, stages, rank)
        peak = rest | max(moments, key=lambda moment: sum(moment.values()))
        elsewhere = {tier: float(sum(by_tier[tier].values())) for tier in TIERS[1:] if tier in by_tier}
        if strategy.activations_tier == "host":
            elsewhere["host"] = elsewhere.get("host", 0.0) + self._offloaded(strategy, stages, rank)
        return RankMemory(
            pipeline_rank=rank,
            at_rest=at_rest,
            peak=peak | self._of_device(strategy, peak),
            elsewhere=elsewhere,
            cached_bytes=self.job.practice.cached_logits_share * peak.get("logits", 0.0),
        )

    def _extra_grads(self, strategy: Strategy, rank: int) -> float:
        """Gradients that other code keeps whole besides."""
        each = self.job.practice.unsharded_grad_bytes
        return each * self.folded.rank(strategy, rank).numel if each else 0.0

    def _of_device(self, strategy: Strategy, peak: Mapping[str, float]) -> dict[str, float]:
        """What the device and its allocator hold beyond tensors."""
        if self.job.cluster.gpu.name == "cpu":
            return {"overhead": 0.0, "rounding": 0.0}
        axes = (strategy.tp, strategy.cp, strategy.pp, strategy.num_data_ranks)
        num_split = sum(size > 1 for size in axes)
        num_communicators = num_split + (num_split > 1)  # of several axes, that of all ranks
        overhead = CONTEXT_BYTES + COMMUNICATOR_BYTES * num_communicators
        moving = sum(peak.values()) - sum(peak[name] for name in ("params", "grads", "optimizer"))
        return {"overhead": overhead, "rounding": UNUSED_SHARE * moving}

    def _moments(self, strategy: Strategy, stages: Stages, rank: int) -> Iterator[dict[str, float]]:
        """What comes and goes, at each moment that may be the highest."""
        s = strategy
        kept, again = self._kept(s, stages, rank)
        held = stages.placement.stages_of(rank)
        block = self._block(s, has_experts=stages.kinds[held[-1]][1] > 0)
        working = block.working if stages.layers_on(rank) else 0.0
        moving = self._moving(s, rank)
        waiting = min(NUM_ON_THE_WAY, s.num_micro_batches) * block.stream if s.pp > 1 else 0.0
        if stages.head_stage in held:
            yield {
                "activations": kept + 2 * block.stream,
                "logits": logits_bytes(self.job, s),
                "gathered": moving.gathered(1),
                "buckets": moving.buckets(root=0, block=0),
            }
        if stages.norm_stage in held and self.job.cluster.gpu.name == "cpu":
            yield {
                "activations": kept + block.stream,
                "workspace": block.stream * NUM_WIDE_OF_NORM * FP32_BYTES / DTYPE_BYTES[s.param],
                "gathered": moving.gathered(1),
                "buckets": moving.buckets(root=1, block=0) + waiting,
            }
        yield {
            "activations": kept + again,
            "workspace": working,
            "gathered": moving.gathered(2),
            "buckets": moving.buckets(root=1, block=1) + waiting,
        }
        if s.pp == 1 and stages.layers_on(rank) > 1:  # the last block's gradients are on their way
            yield {
                "activations": kept + again - block.kept,
                "workspace": working,
                "gathered": moving.gathered(2),
                "buckets": moving.buckets(root=1, block=3),
            }
        yield {
            "activations": 2 * block.stream,
            "gathered": moving.gathered(1),
            "buckets": moving.buckets(root=2, block=1),
        }
        yield {"workspace": self._step_bytes(s, rank), "buckets": moving.standing}

    def _moving(self, strategy: Strategy, rank: int) -> Moving:
        practice, moving = self.job.practice, Moving.of(strategy, self.folded, rank)
        if practice.reduces_in_place:
            moving = replace(moving, num_of_wire=0, is_replicated=False)
        if not practice.trains_all:
            moving = replace(moving, grad_bytes=0.0, wire_bytes=0.0)
        if practice.moves_tensors:
            moving = replace(moving, block=int(moving.block * self._largest_share()))
        return moving

    def _largest_share(self) -> float:
        """Of a dense block's elements, that of its largest weight."""
        shape = self.job.shape
        num_matrices = 3 if shape.ffn == "gated" else 2
        attention = 2 * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
        return shape.ffn_size / (attention + num_matrices * shape.ffn_size)

    def _step_bytes(self, strategy: Strategy, rank: int) -> float:
        """What the step widens: gradients that rest narrower than the master, of this rank's slice."""
        s = strategy
        if not self.job.practice.trains_all or not self.job.practice.widens_grads:
            return 0.0
        if s.optimizer_tier != "device" or DTYPE_BYTES[s.param] >= FP32_BYTES or s.accumulate == "fp32":
            return 0.0
        folds = self.folded.rank(s, rank)
        is_sharded = folds.layout.stage.optimizer is Placement.SHARD
        return FP32_BYTES * sum(
            fold.count * (fold.group.shard_numel if is_sharded else fold.group.padded_numel) for fold in folds.folds
        )

    def _offloaded(self, strategy: Strategy, stages: Stages, rank: int) -> float:
        block = self._block(strategy, has_experts=False)
        num_inputs = stages.layers_on(rank) // strategy.recompute_every - NUM_INPUTS_ON_DEVICE
        return max(0, num_inputs) * _input_bytes(strategy, block)

    def _kept(self, strategy: Strategy, stages: Stages, rank: int) -> tuple[float, float]:
        """Bytes that a rank keeps at the highest moment of its schedule, and what recomputation adds in one block."""
        s = strategy
        held = stages.placement.stages_of(rank)
        each = [self._kept_by(s, *stages.kinds[stage]) for stage in held]
        again = max(stage.again for stage in each)
        if s.pp == 1:
            return each[0].whole, again
        stream = self._block(s, has_experts=False).stream
        sent = 0.0 if self.job.practice.frees_outputs else stream
        whole = [stage.whole + sent for stage in each]
        deferred = [stage.deferred for stage in each]
        if stages.norm_stage in held:
            whole[held.index(stages.norm_stage)] += stream
        if stages.head_stage in held:
            deferred[held.index(stages.head_stage)] += head_deferred_bytes(self.job, s)
        moments = self._flight(s, rank)
        if len({*zip(whole, deferred, strict=True)}) == 1:
            moments = moments[:1]
        return max(
            sum(map(mul, moment.whole, whole)) + sum(map(mul, moment.deferred, deferred)) for moment in moments
        ), again

    def _flight(self, strategy: Strategy, rank: int) -> tuple[Held, ...]:
        """The moments of a rank's schedule at which it holds most; none without a pipeline."""
        s = strategy
        if s.pp == 1:
            return ()
        return self._flights.of(s.schedule, s.pp, s.virtual_stages, s.num_micro_batches, rank=rank)

    def _kept_by(self, strategy: Strategy, num_dense: int, num_experts: int) -> StageBytes:
        """What the blocks of one stage keep of one micro-batch."""
        s = strategy
        whole = again = deferred = 0.0
        for num_blocks, has_experts in ((num_dense, False), (num_experts, True)):
            if not num_blocks:
                continue
            block = self._block(s, has_experts=has_experts)
            num_again = -(-num_blocks // s.recompute_every) if block.kept != block.whole else 0
            num_away = max(0, num_again - NUM_INPUTS_ON_DEVICE) if s.activations_tier == "host" else 0
            behind = num_blocks - 1 - (num_again - 1) * s.recompute_every if num_again else 0
            whole += num_again * block.kept + (num_blocks - num_again) * block.whole - num_away * _input_bytes(s, block)
            if num_again:
                again = max(again, block.whole - block.kept - behind * block.whole)
            deferred += num_blocks * block.deferred
        return StageBytes(whole, again, deferred)

    def _block(self, strategy: Strategy, *, has_experts: bool) -> BlockBytes:
        s = strategy
        key = (
            has_experts,
            s.tp,
            s.cp,
            s.sequence_parallel,
            s.micro_size,
            s.param,
            s.matmul,
            s.recompute,
            s.chunk_tokens,
        )
        if key not in self._blocks:
            self._blocks[key] = block_bytes(self.job, s, has_experts=has_experts)
        return self._blocks[key]


def _input_bytes(strategy: Strategy, block: BlockBytes) -> float:
    """Of a recomputed block, what alone is moved away; under selective recomputation it keeps more than that."""
    return block.kept if strategy.recompute == "full" else block.stream
