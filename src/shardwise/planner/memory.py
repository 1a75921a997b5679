"""Estimate the memory of each pipeline rank, by category, at the highest moment of a step, to rank candidates.

What is stored all the time follows from the folded Layout, to the byte. On top of it come what blocks keep of the
micro-batches in flight, what one backward makes, logits, parameters that are gathered and gradients that are sent. The
peak is the highest of a few moments. `shardwise.simulate` runs the engine itself where each byte matters.

>>> from shardwise.models.presets import preset
>>> from shardwise.planner.hardware import Cluster, GpuSpec
>>> from shardwise.planner.shape import ModelShape
>>> gpu = GpuSpec(name="h100", memory_bytes=80 * 2**30, memory_bytes_per_s=3e12, peak_flops_per_s={"bf16": 989e12})
>>> cluster = Cluster(gpu=gpu, num_gpus=64, gpus_per_node=8, nic_bytes_per_s=5e10)
>>> job = PlanJob(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=64, cluster=cluster)
>>> worst = MemoryModel(job).estimate(Strategy(dp_shard=64, zero_stage=3, recompute="full")).worst
>>> print(", ".join(f"{key} {size / 2**30:.1f}" for key, size in worst.peak.items() if size > 2**28))
grads 0.5, optimizer 1.4, activations 3.1, workspace 0.5, buckets 3.3, gathered 2.8, overhead 1.7, rounding 0.4
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardwise.layout.activation_bytes import FP32_BYTES
from shardwise.layout.layout import TIERS
from shardwise.layout.param_groups import ROOT
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.zero_stages import Placement
from shardwise.planner.block_memory import BlockBytes, HeadBytes, block_bytes, head_bytes
from shardwise.planner.compact_layout import CompactLayout, LayerCount, RankLayerCounts
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.results import MemoryEstimate, RankMemory
from shardwise.planner.stages import StageLayouts
from shardwise.schedule.actions import ActionKind
from shardwise.schedule.formulas import max_in_flight
from shardwise.schedule.pipelines import interleaved_rounds
from shardwise.schedule.placement import StagePlacement
from shardwise.schedule.registry import pipeline_rows, recipe_of

CONTEXT_BYTES: Final = 1.0 * 2**30
"""Bytes of a process's context on a GPU with its kernels: 0.5 to 2 GiB (stas00/ml-engineering,
training/performance)."""

COMMUNICATOR_BYTES: Final = 688 * 2**20
"""Bytes of the channels' buffers of one NCCL communicator, as measured on A100s (github.com/NVIDIA/nccl, issue 964)."""

UNUSED_SHARE: Final = 0.04
"""Share of what comes and goes that the allocator holds and cannot use at the peak."""

NUM_INPUTS_ON_DEVICE: Final = 3
"""How many inputs of recomputed blocks stay on the device where the others are on the host."""

NUM_SENT: Final = 2
"""How many tensors between stages exist besides those in use: one that is received ahead, one that is sent."""

NUM_ROUNDS: Final = 3
"""Rounds of micro-batches after which a schedule repeats itself."""


@dataclass(frozen=True)
class InFlight:
    """List what a pipeline rank holds at the moments of a step.

    Attributes:
        backward: the index, among the rank's stages, of the one whose backward begins; -1 where none does; [moments]
        counts: micro-batches between forward and backward, of each stage, and then those whose gradients of weights are
            still to come; [moments, 2 x stages]
    """

    backward: NDArray[np.int64]
    counts: NDArray[np.int64]


def in_flight(recipe_name: str, placement: StagePlacement, num_micro_batches: int, rank: int) -> InFlight:
    """Count along a rank's computations; moments that hold the same are listed once.

    >>> in_flight("1f1b", StagePlacement(4), 8, rank=1).counts
    array([[3, 0]])

    Args:
        recipe_name: as `pipeline.schedule`.
        placement: which rank has which stages.
        num_micro_batches: of a step.
        rank: in the pipeline.
    """
    recipe, num_ranks, virtual_stages = recipe_of(recipe_name), placement.num_ranks, placement.stages_per_rank
    if virtual_stages == 1 and not recipe.splits_backward:
        number = max_in_flight(recipe_name, num_ranks, num_micro_batches, virtual_stages, rank)
        return InFlight(np.array([0]), np.array([[number, 0]]))
    number = num_micro_batches
    if recipe.repeats_by_rounds:
        number = min(number, NUM_ROUNDS * max(interleaved_rounds(num_ranks, number)))
    index_of = {stage: index for index, stage in enumerate(placement.stages_of(rank))}
    held, moments = [0] * (2 * virtual_stages), dict[tuple[int, ...], None]()
    for kind, stage, _ in pipeline_rows(recipe_name, num_ranks, number, virtual_stages).of(rank):
        index = index_of[stage]
        if kind is ActionKind.FORWARD:
            held[index] += 1
            moments[-1, *held] = None
        elif kind is ActionKind.BACKWARD_WEIGHT:
            held[virtual_stages + index] -= 1
        else:
            moments[index, *held] = None
            held[index] -= 1
            if kind is ActionKind.BACKWARD_INPUT:
                held[virtual_stages + index] += 1
                moments[-1, *held] = None
    found = np.array(list(moments))
    return InFlight(found[:, 0], found[:, 1:])


@dataclass(frozen=True)
class StageBytes:
    """Hold the bytes of one micro-batch in a stage.

    Attributes:
        whole: kept between forward and backward, the head and what was sent on included.
        blocks: the part of that which the first blocks keep, by their number.
        again: what recomputation adds in the backward of each block.
        deferred: kept for the gradients of the blocks' weights, where these come later.
        block: of its last block.
        head: of the head, where it has that.
        ends: of the inputs of the last norm and of the head, where it has those.
    """

    whole: float
    blocks: tuple[float, ...]
    again: tuple[float, ...]
    deferred: float
    block: BlockBytes
    head: HeadBytes | None
    ends: float


@dataclass(frozen=True)
class Buffers:
    """Hold the bytes of a stage's parameters that are gathered and of its gradients on their way.

    Attributes:
        root, block: gathered, of what is in no block and of the largest block.
        waiting: gradients that wait to be reduced, while a block's come.
        sending: what reductions of blocks take besides.
        last: all that the reduction of what is in no block, the last one, takes.
    """

    root: float
    block: float
    waiting: float = 0.0
    sending: float = 0.0
    last: float = 0.0


class MemoryModel:
    """Estimate the memory of a job's strategies, and keep what several of them share."""

    def __init__(self, job: PlanJob, compact: CompactLayout | None = None) -> None:
        self.job = job
        self.compact = compact or CompactLayout(job)
        self._in_flight: dict[tuple[object, ...], InFlight] = {}
        self._blocks: dict[tuple[object, ...], BlockBytes] = {}
        self._heads: dict[tuple[object, ...], HeadBytes] = {}

    def estimate(self, strategy: Strategy, *, too_much_bytes: float = math.inf) -> MemoryEstimate:
        """Estimate one rank at each place of the pipeline.

        Args:
            strategy: how the job is split.
            too_much_bytes: no further ranks are estimated after the first that holds more on its device.
        """
        s, stages = strategy, self.compact.stages.of(strategy)
        last = stages.placement.num_ranks - 1
        found: dict[tuple[object, ...], RankMemory] = {}
        ranks = []
        for rank in dict.fromkeys((0, last, *range(last))):  # the first and the last hold most, mostly
            held = self._held(s, stages.placement, rank)
            firsts = tuple(stages.starts[stage] % s.recompute_every for stage in stages.placement.stages_of(rank))
            key = (*stages.held_by(rank), firsts, held.counts.tobytes())
            if key not in found:
                found[key] = self._of_rank(s, stages, rank, held)
            ranks.append(replace(found[key], pipeline_rank=rank))
            if found[key].peak_bytes > too_much_bytes:
                break
        return MemoryEstimate(ranks=tuple(sorted(ranks, key=lambda each: each.pipeline_rank)))

    def _held(self, strategy: Strategy, placement: StagePlacement, rank: int) -> InFlight:
        s = strategy
        if s.pp == 1:
            return InFlight(np.array([0]), np.array([[1, 0]]))
        key = (s.schedule, placement, s.num_micro_batches, rank)
        if key not in self._in_flight:
            self._in_flight[key] = in_flight(*key)
        return self._in_flight[key]

    def _of_rank(self, strategy: Strategy, stages: StageLayouts, rank: int, held: InFlight) -> RankMemory:
        at_rest, by_tier = self.compact.at_rest(strategy, rank), self.compact.by_tier(strategy, rank)
        moving = max(self._moments(strategy, stages, rank, held), key=lambda moment: sum(moment.values()))
        elsewhere = {tier: float(sum(by_tier[tier].values())) for tier in TIERS[1:] if tier in by_tier}
        if strategy.activations_tier == "host":
            num_inputs = stages.layers_on(rank) // strategy.recompute_every - NUM_INPUTS_ON_DEVICE
            moved = max(0, num_inputs) * _input_bytes(strategy, self._block(strategy, has_experts=False))
            elsewhere["host"] = elsewhere.get("host", 0.0) + moved
        peak = self._states(strategy, rank, by_tier.get("device", {})) | moving
        peak |= self._of_device(strategy, sum(moving.values()))
        return RankMemory(pipeline_rank=rank, at_rest=at_rest, peak=peak, elsewhere=elsewhere)

    def _states(self, strategy: Strategy, rank: int, here: Mapping[str, int]) -> dict[str, float]:
        """Return the bytes of the states on the device, of which `here` has those of each role."""
        roles = {"params": "param", "grads": "grad", "optimizer": "optimizer"}
        return {name: float(here.get(role, 0)) for name, role in roles.items()}

    def _of_device(self, strategy: Strategy, moving_bytes: float) -> dict[str, float]:
        """Return what the device and its allocator hold beyond tensors, of which so many bytes come and go."""
        if self.job.cluster.gpu.is_cpu:
            return {"overhead": 0.0, "rounding": 0.0}
        axes = (strategy.tp, strategy.cp, strategy.pp, strategy.num_data_ranks)
        num_split = sum(size > 1 for size in axes)
        num_communicators = num_split + (num_split > 1)  # of several axes, that of all ranks
        overhead = CONTEXT_BYTES + COMMUNICATOR_BYTES * num_communicators
        return {"overhead": overhead, "rounding": UNUSED_SHARE * moving_bytes}

    def _moments(
        self, strategy: Strategy, stages: StageLayouts, rank: int, held: InFlight
    ) -> Iterator[dict[str, float]]:
        """Yield the bytes of what comes and goes, at each moment that may be the highest."""
        s, folds, numbers = strategy, self.compact.rank(strategy, rank), stages.placement.stages_of(rank)
        each = [self._stage(s, stages, stage) for stage in numbers]
        buffers = [self._buffers(s, folds, stage) for stage in numbers]
        if s.pp > 1 and self.job.traits.is_own:  # our pool keeps in a pipeline what reductions needed
            pooled = max(one.last for one in buffers)
            buffers = [replace(one, waiting=pooled, last=pooled) for one in buffers]
        deferred = [stage.deferred + (stage.head.deferred if stage.head else 0.0) for stage in each]
        stream = each[0].block.stream
        base = held.counts @ np.array([*(stage.whole for stage in each), *deferred]) + NUM_SENT * stream * (s.pp > 1)
        for index, stage in enumerate(each):
            kept = float(base[held.backward == index].max())
            yield from self._backward(s, stage, kept, buffers[index], has_table=numbers[index] == 0)
        if (held.backward < 0).any():  # in a forward, or before gradients of weights that come later
            gathered = max(one.root + 2 * one.block for one in buffers)
            waiting = max(one.waiting for one in buffers)
            yield {"activations": float(base.max()) + stream, "gathered": gathered, "buckets": waiting}
        yield {"workspace": self._step_bytes(s, folds)}

    def _backward(
        self, strategy: Strategy, stage: StageBytes, kept: float, buffers: Buffers, *, has_table: bool
    ) -> Iterator[dict[str, float]]:
        """Yield the moments of a stage's backward, before which a rank keeps `kept`: loss, blocks, table, reduction."""
        s, head, num_blocks, is_alone = strategy, stage.head, len(stage.again), strategy.pp == 1
        left = kept - stage.ends - stage.blocks[-1]
        if head is not None:
            yield {
                "activations": kept - head.kept,
                "logits": head.kept + head.made,
                "gathered": buffers.root + is_alone * buffers.block,  # the last block stays; in a pipeline none does
                "buckets": 0.0 if is_alone else buffers.waiting,  # of other micro-batches
            }
            # The gradient of a tied table waits for what the embedding adds to it.
            left += head.deferred - head.kept + (head.weight if is_alone and self.job.shape.is_tied else 0.0)
        for done in {*range(min(num_blocks, s.recompute_every)), num_blocks - 1} if num_blocks else ():
            here = num_blocks - done
            yield {
                "activations": left + stage.blocks[here] + done / num_blocks * stage.deferred + stage.again[here - 1],
                "workspace": stage.block.working,
                "gathered": buffers.root + min(2, here) * buffers.block,
                "buckets": buffers.waiting + is_alone * buffers.sending,  # a pipeline reduces after the backward
            }
        after = {"activations": left + stage.deferred, "gathered": buffers.root, "buckets": buffers.last}
        if has_table:
            num_tables = 2 if is_alone and self.job.shape.is_tied else 1
            yield after | {"workspace": num_tables * self._head(s).weight + stage.block.stream}
        yield after

    def _buffers(self, strategy: Strategy, folds: RankLayerCounts, stage: int) -> Buffers:
        """Count the buffers of one of a rank's stages.

        Gradients that are stored as shards have a bucket: that of what is in no block, and two of blocks; a pipeline's
        stage has those of all blocks, in the dtype that micro-batches are added in. A reduction that changes the dtype
        copies what it sends, and two are under way; one that does not sum in place receives as much again.
        """
        s, layout, traits, all_stages = strategy, folds.layout, self.job.traits, strategy.gather == "batch"
        own = [fold for fold in folds.folds if s.pp == 1 or stage in fold.group.stages]
        gathered = [
            fold for fold in (folds.folds if s.pp > 1 and all_stages else own) if not fold.group.is_stored_whole
        ]
        root, block, whole = self._numels(gathered)
        size = DTYPE_BYTES[s.param] if layout.stage.params is Placement.SHARD else 0
        params = Buffers(size * whole, 0.0) if s.pp > 1 and all_stages else Buffers(size * root, size * block)
        if not traits.trains_all:
            return params
        wire, width = DTYPE_BYTES[layout.precision.reduce], DTYPE_BYTES[layout.precision.accumulate]
        root, block, whole = self._numels(own)
        is_sharded = layout.stage.grads is Placement.SHARD
        is_replicated = layout.stage.optimizer is Placement.REPLICATE
        waiting = 0.0
        if is_sharded:
            width = wire if s.pp == 1 else width
            waiting = width * float(root + 2 * block if s.pp == 1 else folds.numel if all_stages else whole)
        num_shards = layout.mesh.dp_shard * layout.mesh.cp
        is_split = num_shards * (layout.mesh.dp_replicate if is_replicated else 1) > 1
        copies = is_split and width != wire and not traits.reduces_in_place
        receives = is_split and (is_sharded or not (traits.reduces_in_place or (is_replicated and width == wire)))
        # What NCCL sums arrives as a slice; others copy all gradients of a group together before they send them.
        is_slice = traits.is_own and not self.job.cluster.gpu.is_cpu and wire >= FP32_BYTES
        sent = wire * (2 * copies + receives / (num_shards if is_slice else 1))
        last = waiting + sent * (root if s.pp == 1 else max(root, block))
        return replace(params, waiting=waiting, sending=sent * block, last=last)

    def _numels(self, folds: Iterable[LayerCount]) -> tuple[int, int, int]:
        """Return the elements of what is in no block, of what is gathered at once of a block, and of all."""
        units: dict[str, int] = {ROOT: 0}
        whole = 0
        for fold in folds:
            units[fold.group.unit] = units.get(fold.group.unit, 0) + fold.group.padded_numel
            whole += fold.count * fold.group.padded_numel
        root = units.pop(ROOT)
        return root, max(units.values(), default=0), whole

    def _step_bytes(self, strategy: Strategy, folds: RankLayerCounts) -> float:
        """Return the bytes of gradients that the step widens, where they are stored narrower than the master."""
        s, is_narrow = strategy, DTYPE_BYTES[folds.layout.precision.accumulate] < FP32_BYTES
        if not is_narrow or not self.job.traits.trains_all or s.optimizer_tier != "device":
            return 0.0
        return FP32_BYTES * folds.numel / (s.dp_shard * s.cp if folds.layout.stage.optimizer is Placement.SHARD else 1)

    def _stage(self, strategy: Strategy, stages: StageLayouts, stage: int) -> StageBytes:
        """Count what one stage keeps of one micro-batch."""
        s, start, placement = strategy, stages.starts[stage], stages.placement
        block, deferred, again, num_again = self._block(s, has_experts=False), 0.0, list[float](), 0
        # Our first block is given whole sequences.
        blocks = [block.stream * (s.tp - 1) if s.sequence_parallel and self.job.traits.is_own and not start else 0.0]
        has_experts = [
            kind for kind, number in zip((False, True), stages.kinds[stage], strict=True) for _ in range(number)
        ]
        for index, kind in enumerate(has_experts, start):
            block, is_again = self._block(s, has_experts=kind), index % s.recompute_every == 0
            num_again += is_again
            is_away = is_again and s.activations_tier == "host" and num_again > NUM_INPUTS_ON_DEVICE
            kept = (block.kept if is_again else block.whole) - (_input_bytes(s, block) if is_away else 0.0)
            blocks.append(blocks[-1] + kept)
            again.append(block.whole - block.kept + block.again if is_again else 0.0)
            deferred += block.deferred
        head = self._head(s) if stage == stages.head_stage else None
        ends = (block.stream if stage == stages.norm_stage else 0.0) + (head.given if head else 0.0)
        is_sent = head is None and placement.rank_of(stage) != placement.rank_of(stage + 1) and self._keeps_sent()
        whole = blocks[-1] + ends + (block.stream if is_sent else 0.0) + (head.kept if head else 0.0)
        return StageBytes(whole, tuple(blocks), tuple(again), deferred, block, head, ends)

    def _keeps_sent(self) -> bool:
        """Say whether what a stage has sent on stays until its backward."""
        return True

    def _head(self, strategy: Strategy) -> HeadBytes:
        s = strategy
        key = (s.tp, s.cp, s.sequence_parallel, s.micro_size, s.param, s.chunk_tokens, s.pp > 1 and s.schedule)
        if key not in self._heads:
            self._heads[key] = head_bytes(self.job, s)
        return self._heads[key]

    def _block(self, strategy: Strategy, *, has_experts: bool) -> BlockBytes:
        s = strategy
        axes = (s.tp, s.cp, s.sequence_parallel, s.micro_size, s.param, s.matmul, s.recompute, s.chunk_tokens)
        key = (has_experts, *axes, s.pp > 1 and s.schedule, s.cp > 1 and s.transport)
        if key not in self._blocks:
            self._blocks[key] = block_bytes(self.job, s, has_experts=has_experts)
        return self._blocks[key]


def _input_bytes(strategy: Strategy, block: BlockBytes) -> float:
    """Return the bytes of a recomputed block that are moved to the host: its input."""
    return block.kept if strategy.recompute == "full" else block.stream
