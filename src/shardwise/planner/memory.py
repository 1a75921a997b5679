"""Estimate the memory of each pipeline rank, by category, at the highest moment of a step.

What is stored all the time follows from the folded Layout, to the byte. On top of it come, moment by moment, what
blocks keep of the micro-batches that the schedule has in flight, what a backward makes, logits, parameters that are
gathered and gradients that are sent; the peak is the highest of these moments, not the sum of the highest of each part.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter, mul
from typing import Final

from shardwise.layout.activation_bytes import FP32_BYTES
from shardwise.layout.layout import TIERS
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.zero_stages import Placement
from shardwise.planner.block_memory import BlockBytes, HeadBytes, block_bytes, head_bytes, norm_bytes
from shardwise.planner.buffer_memory import (
    NUM_TELLING,
    Buffers,
    BufferTable,
    GatheredUnits,
    sums_in_backward,
    sums_of,
    tied_bytes,
)
from shardwise.planner.compact_layout import CompactLayout, RankLayerCounts
from shardwise.planner.in_flight import InFlight, InFlightCounts, InFlightTable, is_remote
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.results import MemoryEstimate, RankMemory
from shardwise.planner.stages import StageLayouts
from shardwise.runtime.precision import SCRATCH_NUMEL

CONTEXT_BYTES: Final = 1.0 * 2**30
"""Bytes of a process's context on a GPU with its kernels: 0.5 to 2 GiB (stas00/ml-engineering,
training/performance)."""

COMMUNICATOR_BYTES: Final = 688 * 2**20
"""Bytes of the channels' buffers of one NCCL communicator, as measured on A100s (github.com/NVIDIA/nccl, issue 964)."""

UNUSED_SHARE: Final = 0.04
"""Share of what comes and goes that the allocator holds and cannot use at the peak."""

NUM_INPUTS_ON_DEVICE: Final = 3
"""How many inputs of recomputed blocks stay on the device where the others are on the host."""

NUM_ON_THE_WAY: Final = 4
"""How many tensors between stages exist besides those in use, in code that is not ours: one that is received for the
next computation and one that is sent, in each direction."""


@dataclass(frozen=True)
class StageBytes:
    """Hold the bytes of one micro-batch in a stage.

    Attributes:
        whole: kept between forward and backward, the head and what was sent on included.
        blocks: the part of that which the first blocks keep, by their number.
        again: what recomputation adds in the backward of each block.
        deferred: kept for the gradients of the weights alone.
        head_deferred: the head's part of that.
        sent: the output, which is freed when its gradient has come.
        taken: that gradient, which autograd holds to the end of the backward.
        inlet, outlet: what the stage before gives it, and what it gives the next.
        has_experts: whether its last block has experts.
        has_norm, has_head: whether it has the last norm, the head.
    """

    whole: float
    blocks: tuple[float, ...]
    again: tuple[float, ...]
    deferred: float
    head_deferred: float
    sent: float
    taken: float
    inlet: float
    outlet: float
    has_experts: bool
    has_norm: bool
    has_head: bool

    @property
    def num_blocks(self) -> int:
        """Return the number of its blocks."""
        return len(self.again)


class MemoryModel:
    """Estimate the memory of a job's strategies, and keep what several of them share."""

    def __init__(self, job: PlanJob, compact: CompactLayout | None = None) -> None:
        self.job = job
        self.compact = compact or CompactLayout(job)
        self._counts = InFlightTable()
        self._blocks: dict[tuple[object, ...], BlockBytes] = {}
        self._heads: dict[tuple[object, ...], HeadBytes] = {}
        self._buffer_table = BufferTable(job)

    def estimate(self, strategy: Strategy, *, too_much_bytes: float = math.inf) -> MemoryEstimate:
        """Estimate one rank at each place of the pipeline.

        Args:
            strategy: how the job is split.
            too_much_bytes: no further ranks are estimated after the first that holds more on its device.
        """
        stages = self.compact.stages.of(strategy)
        last = stages.placement.num_ranks - 1
        found: dict[tuple[object, ...], RankMemory] = {}
        ranks = []
        for rank in dict.fromkeys((0, last, *range(last))):  # the first and the last hold most, mostly
            firsts = tuple(
                stages.starts[stage] % strategy.recompute_every for stage in stages.placement.stages_of(rank)
            )
            key = (*stages.held_by(rank), firsts, self._in_flight(strategy, rank))
            if key not in found:
                found[key] = self._of_rank(strategy, stages, rank)
            ranks.append(replace(found[key], pipeline_rank=rank))
            if found[key].peak_bytes > too_much_bytes:
                break
        return MemoryEstimate(ranks=tuple(sorted(ranks, key=lambda each: each.pipeline_rank)))

    def _of_rank(self, strategy: Strategy, stages: StageLayouts, rank: int) -> RankMemory:
        at_rest = self.compact.at_rest(strategy, rank)
        by_tier = self.compact.by_tier(strategy, rank)
        here = by_tier.get("device", {"param": 0, "grad": 0, "optimizer": 0})
        states = self._states(strategy, rank, here)
        moments = self._moments(strategy, stages, rank)
        peak = states | max(moments, key=lambda moment: sum(moment.values()))
        elsewhere = {tier: float(sum(by_tier[tier].values())) for tier in TIERS[1:] if tier in by_tier}
        if strategy.activations_tier == "host":
            elsewhere["host"] = elsewhere.get("host", 0.0) + self._offloaded(strategy, stages, rank)
        return RankMemory(
            pipeline_rank=rank,
            at_rest=at_rest,
            peak=peak | self._of_device(strategy, peak),
            elsewhere=elsewhere,
        )

    def _states(self, strategy: Strategy, rank: int, here: Mapping[str, int]) -> dict[str, float]:
        """Return the bytes of the states on the device, of which `here` has those of each role."""
        return {"params": float(here["param"]), "grads": float(here["grad"]), "optimizer": float(here["optimizer"])}

    def _of_device(self, strategy: Strategy, peak: Mapping[str, float]) -> dict[str, float]:
        """Return what the device and its allocator hold beyond tensors."""
        if self.job.cluster.gpu.is_cpu:
            return {"overhead": 0.0, "rounding": 0.0}
        axes = (strategy.tp, strategy.cp, strategy.pp, strategy.num_data_ranks)
        num_split = sum(size > 1 for size in axes)
        num_communicators = num_split + (num_split > 1)  # of several axes, that of all ranks
        overhead = CONTEXT_BYTES + COMMUNICATOR_BYTES * num_communicators
        moving = sum(peak.values()) - sum(peak[name] for name in ("params", "grads", "optimizer"))
        return {"overhead": overhead, "rounding": UNUSED_SHARE * moving}

    def _moments(self, strategy: Strategy, stages: StageLayouts, rank: int) -> Iterator[dict[str, float]]:
        """Yield the bytes of what comes and goes, at each moment that may be the highest."""
        s = strategy
        held = stages.placement.stages_of(rank)
        each = [self._stage(s, stages, stage) for stage in held]
        folds = self.compact.rank(s, rank)
        gathered, buffers = self._gathered(s, folds, len(held)), self._buffers(s, rank)
        stream = self._block(s, has_experts=False).stream
        inlets = [one.inlet if stage else 0.0 for stage, one in zip(held, each, strict=True)]
        outlets = [one.outlet if stage < stages.head_stage else 0.0 for stage, one in zip(held, each, strict=True)]
        passing = max(*inlets, *outlets)

        wholes, deferreds = [stage.whole for stage in each], [stage.deferred for stage in each]

        def base(moment: InFlightCounts) -> float:
            kept = sum(map(mul, moment.whole, wholes)) + sum(map(mul, moment.deferred, deferreds))
            if not self.job.traits.is_own:
                return kept + stream * (min(NUM_ON_THE_WAY, s.num_micro_batches) if s.pp > 1 else 0)
            return kept + moment.num_arrived * passing + _sent_bytes(moment, inlets, s.num_micro_batches)

        in_flight = self._in_flight(s, rank)
        # Whatever else a moment has is the same for all of its kind: the one before which most is kept is the highest.
        for index, moments in enumerate(in_flight.backwards):
            bases = [base(moment) for moment in moments]
            kept, stage = max(bases), each[index]
            # A stage that holds all micro-batches has run no backward, so no gradients wait in buckets.
            both = zip(bases, moments, strict=True) if s.pp > 1 and s.gather == "batch" else ()
            waiting = [one for one, moment in both if moment.whole[index] < s.num_micro_batches]
            again = max(waiting, default=-math.inf) - kept
            yield from self._backward(s, stage, kept, gathered[index], buffers[index], held[index] == 0, again)
            if self._reduces_after(s):
                left = [one - self._own(s, stage, moment, index) for one, moment in zip(bases, moments, strict=True)]
                yield {
                    "activations": max(left) + stage.inlet,
                    "workspace": float(buffers[index].scratch),
                    "gathered": gathered[index].num_bytes(0),
                    "buckets": buffers[index].last,
                }
        for is_deferred in (False, True):
            bases = [base(moment) for moment in in_flight.between if any(moment.deferred) is is_deferred]
            if bases:
                yield {
                    "activations": max(bases) + stream,
                    "workspace": max(self._largest_weight(s, stage) for stage in each) if is_deferred else 0.0,
                    "gathered": max(one.num_bytes(2) for one in gathered),
                    "buckets": max(one.filling[-1] for one in buffers),
                }
        tied = tied_bytes(folds) if s.pp > 1 and self.job.traits.is_own else 0
        yield {"workspace": self._step_bytes(s, rank) + tied, "buckets": buffers[0].stepping}

    def _own(self, strategy: Strategy, stage: StageBytes, moment: InFlightCounts, index: int) -> float:
        """Return what a stage has freed when it is reduced: what it holds of one micro-batch, or of a whole batch."""
        if strategy.gather == "micro-batch":
            return stage.whole
        return moment.whole[index] * stage.whole + moment.deferred[index] * stage.deferred

    def _backward(
        self,
        strategy: Strategy,
        stage: StageBytes,
        base: float,
        gathered: GatheredUnits,
        buffers: Buffers,
        has_table: bool,
        again: float,
    ) -> Iterator[dict[str, float]]:
        """Yield the moments of the backward of a stage, before which a rank keeps `base`.

        `again` is added to it where gradients of other micro-batches wait in buckets; it is minus infinity where none
        do.
        """
        s = strategy
        block, head = self._block(s, has_experts=stage.has_experts), self._head(s)
        left, widened = base - stage.sent + stage.taken, self._widened_bytes(s, head)
        if stage.has_head:
            num_gathered = int(s.pp == 1)  # what the forward was gathered for; in a pipeline none stays
            of_loss = {"gathered": gathered.num_bytes(num_gathered), "buckets": buffers.idle}
            yield {"activations": left - head.kept, "logits": head.kept + head.loss, **of_loss}
            yield {"activations": left + head.after, "workspace": head.weight, **of_loss}
            left += stage.head_deferred - head.given - head.kept
            if s.pp == 1 and self.job.shape.is_tied:
                left += head.weight  # it waits for what the embedding adds to it
            of_root = {"gathered": gathered.num_bytes(num_gathered), "buckets": buffers.with_root}
            yield {"activations": left + head.after, "workspace": head.weight + widened, **of_root}
        if stage.has_norm:
            if self.job.cluster.gpu.is_cpu:
                wide = norm_bytes(DTYPE_BYTES[s.param]) / DTYPE_BYTES[s.param]
                of_root = {"gathered": gathered.num_bytes(int(s.pp == 1)), "buckets": buffers.with_root}
                yield {"activations": left + block.stream, "workspace": wide * block.stream, **of_root}
            left -= block.stream
        num_blocks, left = stage.num_blocks, left - stage.blocks[-1]
        deferred = (stage.deferred - stage.head_deferred) / max(1, num_blocks)
        yield from self._blocks_backward(s, stage, left, deferred, gathered, buffers, again)
        if has_table:
            whole = block.stream * (s.tp if s.sequence_parallel and self.job.traits.is_own else 1)
            is_tied = s.pp == 1 and self.job.shape.is_tied
            yield {
                "activations": left + num_blocks * deferred + whole,
                "workspace": max(head.weight * (2 if is_tied else 1), head.weight + widened),
                "gathered": gathered.num_bytes(0),
                "buckets": buffers.reducing[-1] if s.pp == 1 else buffers.filling[-1],
            }
            yield {
                "activations": left - (head.weight if is_tied else 0.0) + num_blocks * deferred + whole,
                "workspace": max(head.weight + widened, 0 if self._reduces_after(s) else buffers.scratch),
                "gathered": gathered.num_bytes(0),
                "buckets": buffers.last if s.pp == 1 else buffers.filling[-1],
            }

    def _blocks_backward(
        self,
        strategy: Strategy,
        stage: StageBytes,
        left: float,
        deferred: float,
        gathered: GatheredUnits,
        buffers: Buffers,
        again: float,
    ) -> Iterator[dict[str, float]]:
        """Yield the moments of the backward of a stage's blocks, where a rank also keeps `left`."""
        s, block = strategy, self._block(strategy, has_experts=stage.has_experts)
        num_blocks, blocks = stage.num_blocks, stage.blocks
        is_later = self._reduces_after(s)
        for done in _telling(num_blocks, NUM_TELLING if s.pp == 1 else s.recompute_every, is_last=deferred > 0):
            here = num_blocks - done
            of_block = {"gathered": gathered.num_bytes(min(2, here))}
            is_same = not done and stage.taken == block.stream  # as the gradient of the blocks' stream
            kept = left + blocks[here] + done * deferred + stage.again[here - 1] - is_same * block.stream
            filling = _at(buffers.filling, done)
            yield {"activations": kept, "workspace": block.working, "buckets": filling, **of_block}
            if block.early:
                for more, buckets in _with_again(_at(buffers.opening, done), filling, again):
                    yield {"activations": kept + more, "workspace": block.early, "buckets": buckets, **of_block}
            yield {
                "activations": left + blocks[here - 1] + (done + 1) * deferred + block.stream,
                "buckets": filling if is_later else _at(buffers.reducing, done),
                "workspace": 0.0 if is_later else float(buffers.scratch),
                **of_block,
            }

    def _reduces_after(self, strategy: Strategy) -> bool:
        """Say whether a stage is reduced when its backward is over."""
        return strategy.pp > 1 and self.job.traits.is_own

    def _widened_bytes(self, strategy: Strategy, head: HeadBytes) -> float:
        """Return the bytes in which a CPU widens a table's gradient to add it to those of other micro-batches."""
        s, size = strategy, DTYPE_BYTES[strategy.param]
        is_reduced_each = s.zero_stage >= 2 if s.pp == 1 else s.zero_stage == 3 and s.gather == "micro-batch"
        is_added = s.num_micro_batches > 1 and not is_reduced_each and s.accumulate == "fp32" and size < FP32_BYTES
        if not is_added or not self.job.cluster.gpu.is_cpu:
            return 0.0
        return FP32_BYTES * min(SCRATCH_NUMEL, head.weight / size)

    def _gathered(self, strategy: Strategy, folds: RankLayerCounts, num_stages: int) -> list[GatheredUnits]:
        """Return what is unsharded for each stage of a rank, while it computes."""
        first = GatheredUnits.of(strategy, folds)
        if first.is_whole or not first.param_bytes:
            return [first] * num_stages
        return [first, *(GatheredUnits.of(strategy, folds, index) for index in range(1, num_stages))]

    def _buffers(self, strategy: Strategy, rank: int) -> list[Buffers]:
        """Return the buffers of each stage of a pipeline rank, in their order."""
        s, whole_bytes = strategy, 0.0
        if s.tp > 1 and self.job.cluster.gpu.is_cpu:
            whole_bytes = self._block(s, has_experts=False).stream * (s.tp if s.sequence_parallel else 1)
        reductions: tuple[tuple[int, bool], ...] = ()
        if s.pp > 1 and s.gather == "micro-batch":
            reductions = self._counts.reductions(s.schedule, s.pp, s.virtual_stages, s.num_micro_batches, rank=rank)
        folds = self.compact.rank(s, rank)
        sums = sums_of(s, whole_bytes, folds) if whole_bytes else ()
        again = sums_in_backward(s, whole_bytes, folds) if whole_bytes else ()
        return self._buffer_table.of(s, folds, sums, reductions, again)[::-1]

    def _largest_weight(self, strategy: Strategy, stage: StageBytes) -> float:
        """Return the bytes of the gradient of a stage's largest weight, before it is added to where it is stored."""
        s, shape = strategy, self.job.shape
        if self.job.traits.reduces_in_place:
            return 0.0
        of_block = DTYPE_BYTES[s.param] * shape.hidden_size * shape.ffn_size / s.tp if stage.num_blocks else 0.0
        return max(of_block, self._head(s).weight if stage.head_deferred else 0.0)

    def _step_bytes(self, strategy: Strategy, rank: int) -> float:
        """Return the bytes of this rank's gradients that the step widens, where they are stored narrower than the
        master.
        """
        s = strategy
        if s.optimizer_tier != "device" or DTYPE_BYTES[s.param] >= FP32_BYTES or s.accumulate == "fp32":
            return 0.0
        folds = self.compact.rank(s, rank)
        is_sharded = folds.layout.stage.optimizer is Placement.SHARD
        return FP32_BYTES * sum(
            fold.count * (fold.group.shard_numel if is_sharded else fold.group.padded_numel)
            for fold in folds.folds
            if fold.group.trainable
        )

    def _offloaded(self, strategy: Strategy, stages: StageLayouts, rank: int) -> float:
        block = self._block(strategy, has_experts=False)
        num_inputs = stages.layers_on(rank) // strategy.recompute_every - NUM_INPUTS_ON_DEVICE
        return max(0, num_inputs) * _input_bytes(strategy, block)

    def _in_flight(self, strategy: Strategy, rank: int) -> InFlight:
        """Return the moments of a rank's schedule at which it holds most."""
        s = strategy
        if s.pp == 1:
            return InFlight(((InFlightCounts((1,), (0,)),),))
        # On a GPU a gradient that was sent is freed when the next is sent; on a CPU when all sends are waited for.
        most_sent = None if self.job.cluster.gpu.is_cpu else 1
        return self._counts.of(s.schedule, s.pp, s.virtual_stages, s.num_micro_batches, rank=rank, most_sent=most_sent)

    def _stage(self, strategy: Strategy, stages: StageLayouts, stage: int) -> StageBytes:
        """Count what one stage keeps of one micro-batch."""
        s, head = strategy, self._head(strategy)
        stream = self._block(s, has_experts=False).stream
        inlet, outlet = self._passing(s, stages, stage), self._passing(s, stages, stage + 1)
        # The first block is given a whole sequence, which its recomputation splits; what is received is kept at all.
        is_whole = s.sequence_parallel and self.job.traits.is_own and stages.starts[stage] == 0
        num_whole = s.tp - 1 if s.recompute != "none" else s.tp if stage else 0
        deferred, blocks, again = 0.0, [is_whole * num_whole * stream], []
        num_again = 0
        index = stages.starts[stage]
        for num_blocks, has_experts in zip(stages.kinds[stage], (False, True), strict=True):
            if not num_blocks:
                continue
            block = self._block(s, has_experts=has_experts)
            deferred += num_blocks * block.deferred
            for _ in range(num_blocks):
                is_again = index % s.recompute_every == 0
                num_again += is_again
                is_away = is_again and s.activations_tier == "host" and num_again > NUM_INPUTS_ON_DEVICE
                kept = (block.kept if is_again else block.whole) - (_input_bytes(s, block) if is_away else 0.0)
                blocks.append(blocks[-1] + kept)
                again.append(block.whole - block.kept + block.again if is_again else 0.0)
                index += 1
        has_norm, has_head = stage == stages.norm_stage, stage == stages.head_stage
        is_sent = is_remote(stages.placement, stage, stage + 1)
        has_angles = self.job.traits.is_own and not self.job.shape.num_positions and bool(again)
        angles = 2 * FP32_BYTES * self.job.seq_len / s.cp * self.job.shape.head_dim if has_angles else 0.0
        given = head.given or inlet * (not has_norm and self.job.traits.is_own)
        whole = blocks[-1] + stream * has_norm + outlet * is_sent + has_head * (given + head.kept) + angles
        head_deferred = has_head * head.deferred
        return StageBytes(
            whole=whole,
            blocks=tuple(blocks),
            again=tuple(again),
            deferred=deferred + head_deferred,
            head_deferred=head_deferred,
            sent=outlet * is_sent if self.job.traits.is_own else 0.0,
            taken=outlet * is_sent if self.job.traits.is_own else 0.0,
            inlet=inlet,
            outlet=outlet,
            has_experts=stages.kinds[stage][1] > 0,
            has_norm=has_norm,
            has_head=has_head,
        )

    def _passing(self, strategy: Strategy, stages: StageLayouts, stage: int) -> float:
        """Return the bytes that a stage gets from the one before; before the blocks and after the norm, sequences are
        whole.
        """
        s, stream = strategy, self._block(strategy, has_experts=False).stream
        is_whole = stage > stages.norm_stage or stages.starts[stage] == 0
        return stream * s.tp if is_whole and s.sequence_parallel and self.job.traits.is_own else stream

    def _head(self, strategy: Strategy) -> HeadBytes:
        s = strategy
        key = (s.tp, s.cp, s.sequence_parallel, s.micro_size, s.param, s.chunk_tokens, s.pp > 1 and s.schedule)
        if key not in self._heads:
            self._heads[key] = head_bytes(self.job, s)
        return self._heads[key]

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
            s.pp > 1 and s.schedule,
            s.cp > 1 and s.transport,
        )
        if key not in self._blocks:
            self._blocks[key] = block_bytes(self.job, s, has_experts=has_experts)
        return self._blocks[key]


def _telling(num_blocks: int, num_first: int, *, is_last: bool) -> list[int]:
    """List how many blocks are done before those whose backward may be the highest: the first, and perhaps the last."""
    found = list(range(min(num_blocks, num_first)))
    return [*found, num_blocks - 1] if is_last and num_blocks > num_first else found


def _sent_bytes(moment: InFlightCounts, inlets: Sequence[float], num_micro_batches: int) -> float:
    """Return the bytes of gradients that have gone, the largest first; none of micro-batches that their stage still
    holds.
    """
    largest = max(inlets)
    if inlets.count(largest) + inlets.count(0.0) >= len(
        inlets
    ):  # as most pipelines are: quick, since it is asked often
        return moment.num_sent * largest
    num_left, sent_bytes = moment.num_sent, 0.0
    for num_held, inlet in sorted(zip(moment.whole, inlets, strict=True), key=itemgetter(1), reverse=True):
        num = min(num_left, num_micro_batches - num_held) if inlet else 0
        num_left, sent_bytes = num_left - num, sent_bytes + num * inlet
    return sent_bytes


def _with_again(first: float, filled: float, again: float) -> tuple[tuple[float, float], ...]:
    """Pair what is added to what is kept with the buckets: before a first gradient, and where others wait in them."""
    return ((0.0, first),) if again == -math.inf else ((0.0, first), (again, filled))


def _at(by_done: tuple[float, ...], done: int) -> float:
    """Return the value for `done` finished blocks; the last value holds for all further ones."""
    return by_done[min(done, len(by_done) - 1)]


def _input_bytes(strategy: Strategy, block: BlockBytes) -> float:
    """Return the bytes of a recomputed block that are moved away: its input; selective recomputation keeps more than
    that.
    """
    return block.kept if strategy.recompute == "full" else block.stream
