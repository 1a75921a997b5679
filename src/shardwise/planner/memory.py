"""Estimate the memory of each pipeline rank, by category, at the highest moment of a step, to rank candidates.

What is stored all the time follows from the folded Layout, to the byte. On top of it come what blocks keep of the
micro-batches in flight, by formulas of the literature (`layout.activation_bytes`), the largest tensors of a backward,
logits, gathered parameters and gradients on their way. The peak is the highest of a few moments. Where each byte
matters, `shardwise.simulate` runs the engine itself.

>>> from shardwise.config.resolve import Config
>>> from shardwise.planner.hardware import parse_cluster
>>> from shardwise.models.presets import preset
>>> from shardwise.models.shape import ModelShape
>>> shape, cluster = ModelShape.of_decoder(preset("llama-3-8b")), parse_cluster("h100:64")
>>> job = PlanJob(shape=shape, seq_len=8192, global_batch=64, cluster=cluster)
>>> config = Config.from_dict({"zero": {"stage": 3}, "recompute": {"mode": "full"}, "precision": {"param": "bf16"}})
>>> worst = MemoryModel(job).estimate(config.resolve(world_size=64)).worst
>>> print(", ".join(f"{key} {size / 2**30:.1f}" for key, size in worst.peak.items() if size > 2**28))
grads 0.5, optimizer 1.4, activations 3.2, workspace 0.5, gathered 2.8, buckets 3.2, overhead 1.7, rounding 0.4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.config.resolve import ResolvedConfig
from shardwise.layout.activation_bytes import (
    CPU_LOGITS,
    FP32_BYTES,
    KERNEL_LOGITS,
    LayerShape,
    activation_bytes_per_layer,
    head_tokens_at_a_time,
)
from shardwise.layout.layout import TIERS, Layout
from shardwise.layout.param_groups import ROOT, GroupSpec
from shardwise.layout.precision import BLOCK_NUMEL, DTYPE_BYTES
from shardwise.layout.zero_stages import Placement
from shardwise.models.shape import SCALE_BYTES, packed_params, with_adapters
from shardwise.planner.folded_layout import FoldedLayout, FoldedLayouts, LayerCount, StageLayouts
from shardwise.planner.job import PlanJob, expert_skew, num_data_ranks, param_of, product_dtype, trains_all
from shardwise.planner.results import MemoryEstimate, RankMemory
from shardwise.schedule.formulas import moments_in_flight, num_distinct_micro_batches
from shardwise.schedule.pipelines import recipe_of

_Moments = NDArray[np.int64]
Recompute = Literal["none", "selective", "full"]

CONTEXT_BYTES: Final = 1.0 * 2**30
"""Bytes of a process's context on a GPU with its kernels: 0.5 to 2 GiB (stas00/ml-engineering,
training/performance)."""

COMMUNICATOR_BYTES: Final = 688 * 2**20
"""Bytes of the channels' buffers of one NCCL communicator, as measured on A100s (github.com/NVIDIA/nccl, issue 964)."""

UNLINKED_SHARE: Final = 2 / 24
"""Share of these where no links join devices: NCCL opens 2 channels then (tinygrad/open-gpu-kernel-modules, issue 17),
and 24 on a node of A100s."""

UNUSED_SHARE: Final = 0.04
"""Share of what comes and goes that the allocator holds and cannot use at the peak."""

NUM_INPUTS_ON_DEVICE: Final = 3
"""How many inputs of recomputed blocks stay on the device where the others are on the host."""

NUM_SENT: Final = 2
"""How many tensors between stages exist besides those in use: one that is received ahead, one that is sent."""


@dataclass(frozen=True)
class BlockBytes:
    """Hold the bytes of one micro-batch in one block.

    Attributes:
        kept: between the block's forward and its backward.
        whole: kept by a block that recomputes nothing.
        again: made by a recomputation, in addition to what is kept.
        working: made by the backward besides, at its highest.
        deferred: kept for the gradients of the weights, where these come later than that of the input.
        stream: of the residual stream, as it passes from block to block.
    """

    kept: float
    whole: float
    again: float
    working: float
    deferred: float
    stream: float


Blocks = tuple[BlockBytes, BlockBytes]
"""Of a block without experts, and of one with them."""


@dataclass(frozen=True)
class HeadBytes:
    """Hold the bytes of one micro-batch in the head and its loss.

    Attributes:
        given: the head's input, where it is kept.
        kept: between the loss's forward and its backward, in addition to `given`.
        made: by the loss or the head's backward besides, whichever makes more.
        weight: the gradient of the head's weight; that of the embedding's is as large.
        deferred: kept for the gradient of the weight, where that comes later.
    """

    given: float
    kept: float
    made: float
    weight: float
    deferred: float


@dataclass(frozen=True)
class StageBytes:
    """Hold the bytes of one micro-batch in a stage.

    Attributes:
        whole: kept between forward and backward, the head and what was sent on included.
        blocks: the part of that which the first blocks keep, by their number.
        again: what recomputation adds in the backward of each block.
        deferred: kept for the gradients of the blocks' weights, where these come later.
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
        first: gradients that wait for their reduction while the first come, of the last block.
        waiting: the same while another block's come, with those that are in a reduction.
        last: the same as what is in no block is reduced, the last of all.
    """

    root: float
    block: float
    first: float = 0.0
    waiting: float = 0.0
    last: float = 0.0


class MemoryModel:
    """Estimate the memory of a job's candidates, and keep what several of them share."""

    def __init__(self, job: PlanJob, layouts: FoldedLayouts | None = None) -> None:
        self.job = job
        self.layouts = layouts or FoldedLayouts(job)
        self._moments_of: dict[tuple[str, int, int, int, int], _Moments] = {}
        self._buffers_of: dict[tuple[object, ...], dict[int, Buffers]] = {}

    def estimate(self, config: ResolvedConfig, *, too_much_bytes: float = math.inf) -> MemoryEstimate:
        """Estimate one rank at each place of the pipeline.

        Args:
            too_much_bytes: no further ranks are estimated after the first that holds more on its device.
        """
        s, stages = config, self.layouts.stages.of(config)
        last = stages.placement.num_ranks - 1
        dense = self.block_bytes(s, has_experts=False)
        blocks = (dense, self.block_bytes(s, has_experts=True) if self.job.shape.experts else dense)
        by_key: dict[tuple[object, ...], RankMemory] = {}
        ranks = []
        for rank in dict.fromkeys((0, last, *range(last))):  # the first and the last hold most, mostly
            held_rows = self._held(s, rank)
            firsts = tuple(stages.starts[stage] % s.recompute.every for stage in stages.placement.stages_of(rank))
            key = (*stages.held_by(rank), firsts, held_rows.tobytes())
            if key not in by_key:
                by_key[key] = self._of_rank(s, stages, rank, held_rows, blocks)
            ranks.append(replace(by_key[key], pipeline_rank=rank))
            if by_key[key].peak_bytes > too_much_bytes:
                break
        return MemoryEstimate(ranks=tuple(sorted(ranks, key=lambda each: each.pipeline_rank)))

    def _held(self, config: ResolvedConfig, rank: int) -> _Moments:
        """Return what a rank holds at each moment, as `moments_in_flight`; [moments, 1 + 2 x stages]."""
        s, key = config, ("1f1b", 1, 1, 1, 0)
        if s.mesh.pp > 1:
            number = num_distinct_micro_batches(s.pipeline.schedule, s.mesh.pp, s.batch.accumulation)
            key = (s.pipeline.schedule, s.mesh.pp, number, s.pipeline.virtual_stages, rank)
        if key not in self._moments_of:
            self._moments_of[key] = np.array(moments_in_flight(*key))
        return self._moments_of[key]

    def _of_rank(
        self, config: ResolvedConfig, stages: StageLayouts, rank: int, held: _Moments, blocks: Blocks
    ) -> RankMemory:
        at_rest, by_tier = self.layouts.at_rest(config, rank), self.layouts.by_tier(config, rank)
        moving = max(self._moments(config, stages, rank, held, blocks), key=lambda moment: sum(moment.values()))
        elsewhere = {tier: float(sum(by_tier[tier].values())) for tier in TIERS[1:] if tier in by_tier}
        if config.tiers.activations == "host":
            num_inputs = stages.layers_on(rank) // config.recompute.every - NUM_INPUTS_ON_DEVICE
            moved = max(0, num_inputs) * blocks[0].stream
            elsewhere["host"] = elsewhere.get("host", 0.0) + moved
        peak = self._states(config, rank, by_tier.get("device", {})) | moving
        peak["params"] += self._scale_bytes(config, rank)
        peak |= self._of_device(config, sum(moving.values()))
        return RankMemory(pipeline_rank=rank, at_rest=at_rest, peak=peak, elsewhere=elsewhere)

    def _states(self, config: ResolvedConfig, rank: int, here: Mapping[str, int]) -> dict[str, float]:
        """Return the bytes of the states on the device, of which `here` has those of each role."""
        roles = {"params": "param", "grads": "grad", "optimizer": "optimizer"}
        return {name: float(here.get(role, 0)) for name, role in roles.items()}

    def _scale_bytes(self, config: ResolvedConfig, rank: int) -> float:
        """Return the bytes of the scales of packed weights, which each rank holds whole."""
        packed = [fold for fold in self.layouts.rank(config, rank).folds if fold.group.is_opaque]
        return SCALE_BYTES * sum(fold.count * 2 * fold.group.numel for fold in packed)

    def _of_device(self, config: ResolvedConfig, moving_bytes: float) -> dict[str, float]:
        """Return what the device and its allocator hold beyond tensors, of which so many bytes come and go."""
        if self.job.cluster.gpu.is_cpu:
            return {"overhead": 0.0, "rounding": 0.0}
        axes = (config.mesh.tp, config.mesh.cp, config.mesh.pp, num_data_ranks(config))
        num_split = sum(size > 1 for size in axes)
        num_communicators = num_split + (num_split > 1)  # of several axes, that of all ranks
        channels_share = 1.0 if self.job.cluster.gpu.link_bytes_per_s else UNLINKED_SHARE
        overhead = CONTEXT_BYTES + COMMUNICATOR_BYTES * num_communicators * channels_share
        return {"overhead": overhead, "rounding": UNUSED_SHARE * moving_bytes}

    def _moments(
        self, config: ResolvedConfig, stages: StageLayouts, rank: int, held: _Moments, blocks: Blocks
    ) -> Iterator[dict[str, float]]:
        """Yield the bytes of what comes and goes, at each moment that may be the highest."""
        s, folds, numbers = config, self.layouts.rank(config, rank), stages.placement.stages_of(rank)
        firsts = self._first_equals(s, stages, rank)  # the others are counted as these
        counted = {index: self._stage(s, stages, numbers[index], blocks) for index in {*firsts}}
        key = (self.layouts.key(s, rank), *firsts)
        if key not in self._buffers_of:
            found = {index: self._buffers(s, folds, index) for index in counted}
            self._buffers_of[key] = self._pooled(found) if s.mesh.pp > 1 else found
        buffers, stage_bytes = self._buffers_of[key], [counted[index] for index in firsts]
        deferred = [stage.deferred + (stage.head.deferred if stage.head else 0.0) for stage in stage_bytes]
        base = held[:, 1:] @ np.array([*(stage.whole for stage in stage_bytes), *deferred])
        base = base + NUM_SENT * blocks[0].stream * (s.mesh.pp > 1)
        kept_by_stage = np.zeros(len(firsts))
        begins = held[:, 0] >= 0
        np.maximum.at(kept_by_stage, np.array(firsts)[held[begins, 0]], base[begins])
        for index, one in buffers.items():
            kept_bytes = float(kept_by_stage[index])
            yield from self._backward(s, stage_bytes[index], kept_bytes, one, has_table=numbers[index] == 0)
        if (held[:, 0] < 0).any():  # in a forward, or before gradients of weights that come later
            gathered = max(one.root + 2 * one.block for one in buffers.values())
            waiting = max(one.waiting for one in buffers.values())
            yield {"activations": float(base.max()) + blocks[0].stream, "gathered": gathered, "buckets": waiting}
        yield {"workspace": self._step_bytes(s, folds)}

    def _first_equals(self, config: ResolvedConfig, stages: StageLayouts, rank: int) -> list[int]:
        """Return for each stage of a rank the index of the first that holds the same."""
        numbers, rank_of, every = stages.placement.stages_of(rank), stages.placement.rank_of, config.recompute.every
        seen: dict[tuple[object, ...], int] = {}
        firsts = []
        for index, (stage, marks) in enumerate(zip(numbers, stages.held_by(rank), strict=True)):
            start, is_sent = stages.starts[stage], stage == stages.head_stage or rank_of(stage + 1) != rank
            firsts.append(seen.setdefault((marks, start == 0, start % every, is_sent), index))
        return firsts

    def _backward(
        self, config: ResolvedConfig, stage: StageBytes, kept: float, buffers: Buffers, *, has_table: bool
    ) -> Iterator[dict[str, float]]:
        """Yield the moments of a stage's backward, before which a rank keeps `kept`: loss, blocks, table, reduction."""
        s, head, num_blocks, is_alone = config, stage.head, len(stage.again), config.mesh.pp == 1
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
        for done in {*range(min(num_blocks, s.recompute.every + 1)), num_blocks - 1} if num_blocks else ():
            num_kept = num_blocks - done
            yield {
                "activations": left
                + stage.blocks[num_kept]
                + done / num_blocks * stage.deferred
                + stage.again[num_kept - 1],
                "workspace": stage.block.working,
                "gathered": buffers.root + min(2, num_kept) * buffers.block,
                "buckets": buffers.waiting if done else buffers.first,
            }
        after = {"activations": left + stage.deferred, "gathered": buffers.root, "buckets": buffers.last}
        if has_table:
            num_tables = 2 if is_alone and self.job.shape.is_tied else 1
            yield after | {"workspace": num_tables * self.head_bytes(s).weight + stage.block.stream}
        yield after

    def _buffers(self, config: ResolvedConfig, folds: FoldedLayout, index: int) -> Buffers:
        """Count the buffers of one of a rank's stages, of that index.

        Gradients that are stored as shards have a bucket: that of what is in no block, and two of blocks; a pipeline's
        stage has those of all blocks, in the dtype that micro-batches are added in. A reduction that changes the dtype
        copies what it sends, and two are under way; one that does not sum in place receives as much again.
        """
        s, layout, all_stages = config, folds.layout, config.pipeline.gather == "batch"
        # Of the rank that was folded, which stands for all that hold the same.
        stage = 0 if layout.pipeline is None else layout.pipeline.placement.stages_of(layout.pipeline.index)[index]
        own_folds = [fold for fold in folds.folds if s.mesh.pp == 1 or stage in fold.group.stages]
        used = folds.folds if s.mesh.pp > 1 and all_stages else own_folds
        gathered = [fold for fold in used if not fold.group.is_stored_whole and layout.stage.params is Placement.SHARD]
        root, block, total = self._sums(gathered, lambda group: DTYPE_BYTES[layout.precision_of(group).param])
        params = Buffers(total, 0.0) if s.mesh.pp > 1 and all_stages else Buffers(root, block)
        if not trains_all(s):
            return params
        wire, width = DTYPE_BYTES[layout.precision.reduce], DTYPE_BYTES[layout.precision.accumulate]
        root, block, total = self._sums(own_folds)
        is_sharded = layout.stage.grads is Placement.SHARD
        if s.mesh.pp > 1:
            waiting = width * float(folds.numel if all_stages else total) if is_sharded else 0.0
            last = waiting + self._sent_bytes(layout, width) * max(root, block)
            return replace(params, first=waiting, waiting=waiting, last=last)
        width = wire if is_sharded else width
        first, waiting = (width * (root + num * block) if is_sharded else 0.0 for num in (1, 2))
        sent = self._sent_bytes(layout, width)
        return replace(params, first=first, waiting=waiting + sent * block, last=waiting + sent * root)

    def _sent_bytes(self, layout: Layout, width: int) -> float:
        """Return what an element takes in reductions that are under way, where its gradient has `width` bytes."""
        num_shards, wire = layout.mesh.dp_shard * layout.mesh.cp, DTYPE_BYTES[layout.precision.reduce]
        is_sharded = layout.stage.grads is Placement.SHARD
        is_replicated = layout.stage.optimizer is Placement.REPLICATE
        if num_shards * (layout.mesh.dp_replicate if is_replicated else 1) == 1:
            return 0.0
        copies, receives = width != wire, is_sharded or not is_replicated or width != wire
        if layout.precision.reduce_codec is not None:  # of two that are under way, sent and received codes
            from shardwise.layout.wire_codec import WireCodec

            codec = WireCodec(layout.precision.reduce_codec)
            return 2 * (wire * (copies and not is_sharded) + 2 * codec.num_bytes(BLOCK_NUMEL) / BLOCK_NUMEL)
        # What NCCL sums arrives as a slice; gloo copies all gradients of a group together before it sends them.
        is_slice = not self.job.cluster.gpu.is_cpu and wire >= FP32_BYTES
        return wire * (2 * copies + receives / (num_shards if is_slice else 1))

    def _pooled(self, buffers: dict[int, Buffers]) -> dict[int, Buffers]:
        """Return the buffers of a pipeline's stages: the pool keeps what reductions needed."""
        pooled = max(one.last for one in buffers.values())
        return {index: replace(one, first=pooled, waiting=pooled, last=pooled) for index, one in buffers.items()}

    def _sums(
        self, folds: Iterable[LayerCount], width_of: Callable[[GroupSpec], int] = lambda group: 1
    ) -> tuple[int, int, int]:
        """Sum the elements of groups, times their width: of what is in no block, of the largest block, and of all."""
        units: dict[str, int] = {ROOT: 0}
        total = 0
        for fold in folds:
            size = fold.group.padded_numel * width_of(fold.group)
            units[fold.group.unit] = units.get(fold.group.unit, 0) + size
            total += fold.count * size
        root = units.pop(ROOT)
        return root, max(units.values(), default=0), total

    def _step_bytes(self, config: ResolvedConfig, folds: FoldedLayout) -> float:
        """Return the bytes of gradients that the step widens, where they are stored narrower than the master."""
        s, is_narrow = config, DTYPE_BYTES[folds.layout.precision.accumulate] < FP32_BYTES
        if not is_narrow or s.tiers.optimizer != "device":
            return 0.0
        numel = sum(fold.count * fold.group.padded_numel for fold in folds.folds if fold.group.trainable)
        return (
            FP32_BYTES * numel / (s.mesh.dp_shard * s.mesh.cp if folds.layout.stage.optimizer is Placement.SHARD else 1)
        )

    def _stage(self, config: ResolvedConfig, stages: StageLayouts, stage: int, of_kind: Blocks) -> StageBytes:
        """Count what one stage keeps of one micro-batch."""
        s, start, placement = config, stages.starts[stage], stages.placement
        block, deferred, again, num_again = of_kind[0], 0.0, list[float](), 0
        blocks = [0.0 if start else self._given_bytes(s, block)]
        for index in range(start, start + stages.layers[stage]):
            block, is_again = of_kind[index >= stages.num_dense], index % s.recompute.every == 0
            num_again += is_again
            is_away = is_again and s.tiers.activations == "host" and num_again > NUM_INPUTS_ON_DEVICE
            kept_bytes = (block.kept if is_again else block.whole) - (block.stream if is_away else 0.0)
            blocks.append(blocks[-1] + kept_bytes)
            again.append(block.whole - block.kept + block.again if is_again else 0.0)
            deferred += block.deferred
        head = self.head_bytes(s) if stage == stages.head_stage else None
        ends = (block.stream if stage == stages.norm_stage else 0.0) + (head.given if head else 0.0)
        is_sent = head is None and placement.rank_of(stage) != placement.rank_of(stage + 1)
        total = blocks[-1] + ends + is_sent * self._sent_on_bytes(block) + (head.kept if head else 0.0)
        return StageBytes(total, tuple(blocks), tuple(again), deferred, block, head, ends)

    def _given_bytes(self, config: ResolvedConfig, block: BlockBytes) -> float:
        """Return what the first block is given more than others: whole sequences."""
        return block.stream * (config.mesh.tp - 1) if config.tensor.sequence_parallel else 0.0

    def _sent_on_bytes(self, block: BlockBytes) -> float:
        """Return what stays until a stage's backward of what it has sent on."""
        return block.stream

    def block_bytes(self, config: ResolvedConfig, *, has_experts: bool) -> BlockBytes:
        """Return the bytes of one block under a config.

        A feed-forward that takes some tokens of each sequence at a time keeps only its input. Heads that are exchanged
        for tokens are kept together with what attention gave them.
        """
        s, shape, job = config, self._layer_shape(config, has_experts=has_experts), self.job
        is_chunked = s.context.chunk_tokens is not None and not has_experts
        kept_shape = replace(shape, ffn_size=0) if is_chunked else shape
        feature = self._feature_bytes(s)
        is_ulysses = s.mesh.cp > 1 and s.context.transport == "ulysses"
        mixed = feature * shape.num_heads * shape.head_dim / s.mesh.tp if is_ulysses else 0.0
        unread = feature * unread_size(job, s, shape, has_experts=has_experts)
        # Whole sequences that a recomputation gathers, for attention and feed-forward.
        num_gathered = 2 - is_chunked if s.tensor.sequence_parallel and s.recompute.mode != "none" else 0
        stream = feature * shape.hidden_size / (s.mesh.tp if s.tensor.sequence_parallel else 1)
        at_rest = self._kept_bytes(kept_shape, s, s.recompute.mode) + (mixed if s.recompute.mode != "full" else 0.0)
        waiting = _deferred_size(kept_shape, s) if defers_weights(s) else 0.0
        return BlockBytes(
            kept=at_rest - (unread if s.recompute.mode == "none" else 0.0),
            whole=self._kept_bytes(kept_shape, s, "none") + mixed - unread,
            again=feature * num_gathered * shape.hidden_size,
            working=stream + self._made_bytes(s, shape, is_chunked=is_chunked) + _unpacked_bytes(job, s, has_experts),
            deferred=feature * waiting,
            stream=stream,
        )

    def _layer_shape(self, config: ResolvedConfig, *, has_experts: bool) -> LayerShape:
        """Return the sizes of a block, and what its code keeps."""
        shape, experts = self.job.shape, self.job.shape.experts if has_experts else None
        # The fullest rank counts.
        num_routed = experts.num_chosen * expert_skew(self.job, config) if experts else 0.0
        return LayerShape(
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            ffn_size=experts.ffn_size * (num_routed + experts.num_shared) if experts else shape.ffn_size,
            is_gated=shape.ffn == "gated",
            norm_bytes=self._norm_bytes(config),
            product_bytes=1.0 if product_dtype(config) in ("fp8", "fp4") else None,
            num_routed=num_routed,
        )

    def _norm_bytes(self, s: ResolvedConfig) -> float:
        """Return what a norm keeps of each feature beside what ours does.

        Those of transformers (`LlamaRMSNorm` in modeling_llama.py) keep their input in fp32 instead, and for the
        gradient of their weight what it multiplies.
        """
        size = DTYPE_BYTES[param_of(s)]
        return float(FP32_BYTES - size + size * trains_all(s)) if self.job.is_of_transformers else 0.0

    def _kept_bytes(self, shape: LayerShape, s: ResolvedConfig, recompute: Recompute) -> float:
        return activation_bytes_per_layer(
            shape,
            seq_len=self.job.seq_len,
            micro_size=s.batch.micro_size,
            tp=s.mesh.tp,
            cp=s.mesh.cp,
            sequence_parallel=s.tensor.sequence_parallel,
            element_bytes=DTYPE_BYTES[param_of(s)],
            recompute=recompute,
        )

    def _feature_bytes(self, s: ResolvedConfig) -> float:
        """Return the bytes of one feature of all tokens of a micro-batch on a rank."""
        return self.job.seq_len / s.mesh.cp * s.batch.micro_size * DTYPE_BYTES[param_of(s)]

    def _made_bytes(self, config: ResolvedConfig, shape: LayerShape, *, is_chunked: bool) -> float:
        """Return the most bytes that a block's backward makes, beside what was kept and the gradient of the stream.

        The last matrix of the feed-forward makes its own gradient and that of its input; the gradients of two inner
        tensors follow. A feed-forward in parts makes its inner tensors again, while gradients of weights are summed
        over the parts. Scores that are kept have two gradients of their own.
        """
        s, hidden, ffn, seq_len = config, shape.hidden_size, shape.ffn_size / config.mesh.tp, self.job.seq_len
        feature, weight = self._feature_bytes(s), self._weight_grad_bytes(s, hidden * ffn)
        gathered = hidden if s.tensor.sequence_parallel else 0.0
        num_inner = (4 if shape.is_gated else 2) - shape.fuses_gate
        if is_chunked:
            chunk_feature = feature * min(1.0, (s.context.chunk_tokens or 1) * s.mesh.cp / seq_len)
            return feature * hidden + chunk_feature * ((num_inner + 1) * ffn + 2 * gathered) + num_inner * weight
        scores = 2 * shape.num_heads / s.mesh.tp * seq_len - hidden if shape.score_bytes else 0.0
        return max(feature * (ffn + gathered) + weight, feature * (2 - shape.fuses_gate) * ffn, feature * scores)

    def _weight_grad_bytes(self, config: ResolvedConfig, numel: float) -> float:
        """Return what a gradient of so many elements takes before it is added where gradients are stored."""
        return DTYPE_BYTES[param_of(config)] * numel

    def head_bytes(self, config: ResolvedConfig) -> HeadBytes:
        """Return the bytes of one micro-batch in the head and its loss.

        Our loss widens some rows of the logits at a time. A head that is split, or that takes some tokens at a time,
        gives the gradients of its input and weight at once, and they wait for that of the loss. Torch's loss, which
        transformers takes, has three copies of all logits in fp32: their log-softmax, its gradient and theirs.
        """
        s, size, hidden = config, DTYPE_BYTES[param_of(config)], self.job.shape.hidden_size
        vocab, tokens = math.ceil(self.job.shape.vocab_size / s.mesh.tp), self._feature_bytes(s) / size
        stream, logits = tokens * size * hidden, tokens * size * vocab
        weight, device = self._weight_grad_bytes(s, vocab * hidden), self.job.cluster.gpu.run_device
        if s.mesh.tp == 1 and s.context.chunk_tokens is None:
            at_a_time = CPU_LOGITS if device == "cpu" else KERNEL_LOGITS
            widened = FP32_BYTES * min(tokens * vocab, 2 * at_a_time)  # two parts follow each other
            deferred = stream + logits if defers_weights(s) else 0.0
            if self.job.is_of_transformers:
                wide, normed = FP32_BYTES * tokens * vocab, self._norm_bytes(s) * tokens * hidden
                return HeadBytes(stream + normed, wide, max(2 * wide, stream + weight), weight, deferred)
            return HeadBytes(stream, logits, max(logits + widened, stream + weight), weight, deferred)
        most = tokens if s.mesh.tp > 1 else s.context.chunk_tokens or tokens
        rows = min(tokens, head_tokens_at_a_time(device, vocab), most)
        made = max((size + FP32_BYTES * (1 + (rows < tokens))) * rows * vocab, weight)
        return HeadBytes(0.0, stream + FP32_BYTES * vocab * hidden, stream + made, weight, 0.0)


def unread_size(job: PlanJob, config: ResolvedConfig, shape: LayerShape, *, has_experts: bool) -> float:
    """Return the features of a token that no weight's gradient reads, as layers without adapters are frozen."""
    if trains_all(config) or has_experts or config.context.chunk_tokens is not None:
        return 0.0
    adapted = {param.name for param in with_adapters(job.shape.params_of("dense"), config.lora)}
    hidden = shape.hidden_size / (config.mesh.tp if config.tensor.sequence_parallel else 1)

    def is_read(*layers: str) -> bool:
        return any(f"{layer}.lora_A.weight" in adapted for layer in layers)

    norms = hidden * (
        2 - is_read("attention.query", "attention.key", "attention.value") - is_read("ffn.gate", "ffn.up")
    )
    return norms + (0.0 if is_read("ffn.down") else shape.ffn_size / config.mesh.tp)


def _unpacked_bytes(job: PlanJob, config: ResolvedConfig, has_experts: bool) -> float:
    """Return the bytes of the largest weight that a layer unpacks for its product; 0 where none is packed."""
    numels = (math.prod(param.shape) for param in packed_params(job.shape, config.lora, has_experts=has_experts))
    return float(DTYPE_BYTES[param_of(config)] * max(numels, default=0))


def defers_weights(config: ResolvedConfig) -> bool:
    """Say whether gradients of weights come later than those of inputs."""
    return config.mesh.pp > 1 and recipe_of(config.pipeline.schedule).splits_backward


def _deferred_size(shape: LayerShape, config: ResolvedConfig) -> float:
    """Return the features of a token in inputs and outputs' gradients that wait for a later weight gradient.

    Columns that gather a sequence do not wait, and rows wait with whole gradients.
    """
    s, ffn = config, shape.ffn_size / config.mesh.tp
    mixed, keys = shape.num_heads * shape.head_dim / s.mesh.tp, max(shape.num_kv_heads / s.mesh.tp, 1) * shape.head_dim
    rows = 2 * shape.hidden_size + mixed + ffn
    columns = 2 * shape.hidden_size + mixed + 2 * keys + (2 if shape.is_gated else 1) * ffn
    return rows + (0.0 if s.tensor.sequence_parallel else columns)
