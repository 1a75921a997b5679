"""Price runs of other frameworks: the planner's models, with what `PublishedTraits` says of the code that ran."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from planner_eval.hosts import host_costs
from planner_eval.recomputation import freed_elements
from planner_eval.traits import PublishedTraits, published_traits
from shardwise.config.resolve import ResolvedConfig, Tier
from shardwise.layout.activation_bytes import FP32_BYTES, LayerShape
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.zero_stages import Placement
from shardwise.planner.calibration import PassTimes
from shardwise.planner.comm_time import BlockComm, CommTimeModel, OverlapTimes, PricedCollective
from shardwise.planner.compute_time import ComputeTimeModel, GemmShape, alignment_share
from shardwise.planner.folded_layout import FoldedLayout, FoldedLayouts, LayerCount, StageTable
from shardwise.planner.host_time import HostCosts, HostTimes
from shardwise.planner.job import SCALE_BYTES, ModelShape, PlanJob, changed, param_of, product_dtype, trains_all
from shardwise.planner.memory import (
    CONTEXT_BYTES,
    BlockBytes,
    Buffers,
    HeadBytes,
    MemoryModel,
    Recompute,
    defers_weights,
    unread_size,
)
from shardwise.planner.pricer import Pricer
from shardwise.planner.step_time import TimeModel
from shardwise.schedule.placement import StagePlacement

FIRST_FLASH_SHARE: Final = 0.5
"""The first FlashAttention's rate as a share of the second's (Dao 2023, abstract: about twice as fast)."""
GRAPHED_KERNEL_S: Final = 1.5e-6
"""Seconds that a kernel of a graph takes on a device beyond its work."""
ROWWISE_SHARE: Final = 0.9
"""Rate of torch's products in fp8 with a scale for each row over those with one for each tensor: 90 to 100 % for most
shapes, with a tail down to 50 % (pytorch/pytorch#147971)."""
BATCHED_SHARE: Final = 0.6
"""Share of a large product's rate that the batched products of attention reach where its scores are stored."""

# Reads and writes of a tensor in the parameters' dtype, forward and backward, as in `planner/compute_time.py`: over
# scores (scale, mask, widen, softmax, narrow, half of them in fp32), the same where scores are fp32, and fused; beyond
# a fused norm's (cast 3, square 4, mean 2, scale 4, cast back 3, weigh 2; backward as much for each); of a dropout (a
# read, a write, a mask of one byte); and of a plain activation that a code with a fused softmax fuses, too.
SOFTMAX, WIDE_SOFTMAX, FUSED_SOFTMAX = (14.0, 15.0), (9.0, 10.0), (5.0, 6.0)
NORM_IN_FP32, DROPOUT, FUSED_ACTIVATION = (16.0, 38.5), 2.5, (-2.0, -3.0)


# Bytes of each logit in fp32: the log-softmax reads and writes; its backward twice, as the sum comes first.
LOSS_BYTES: Final = (8.0, 16.0)
MASK_BYTES: Final = 1.0
"""Bytes that are kept of each element that dropout works on, in addition to its output."""

# Of tokens' copies for their experts, as codes permute them where nothing or everything is fused (sorted and copied,
# copied back and summed).
EXPERTS, FUSED_EXPERTS = (6.0, 8.0), (4.0, 4.0)


# Bytes of each logit for the entropy and the accuracy that TRL's SFTTrainer logs: accelerate widens it (6), log-softmax
# (8), exp (8), product (12), sum (4) and largest (4).
ENTROPY_BYTES: Final = 42.0
# A fused norm's passes over queries and keys: input and output, and both gradients with the weight's in pieces.
HEADS_NORM: Final = (2.0, 3.5)
# Elements that a head of DeepSeek's attention keeps beyond 128 of its queries and of its output: 64 of queries, 192 of
# keys and 128 of values (arXiv 2412.19437, section 4.2); and its FLOPs over those of heads of 128.
LATENT_MORE, LATENT_FLOPS = 384.0, (192 + 128) / 256
# Of an expert's weight that bitsandbytes packs, with a scale in fp32 for each 64.
PACKED_EXPERT_BYTES: Final = 0.5 + 4 / 64
# More of a residual stream in fp32: two norms and two sums of twice the width.
WIDE_STREAM: Final = (10.0, 13.0)
# Passes over what adapters of fp32 read and write in bf16 (peft, `tuners/lora/layer.py`): of the output (scaled, added)
# and of the input (cast, cast back to bf16 by autocast, gradients added), under autocast and without, where the
# adapters' products and the sum are of fp32 too; and of a dropout in fp32.
AUTOCAST_ADAPTER, WIDE_ADAPTER, WIDE_DROPOUT = ((5.0, 2.0), (6.0, 9.0)), ((13.0, 12.0), (4.0, 8.0)), 4.5
# Beyond a fused norm's where it is eager and its input is fp32 already: `NORM_IN_FP32` without casts.
EAGER_NORM: Final = (10.0, 26.5)
# Of each input and output of a packed layer between fp32 and bf16, both passes.
PACKED_CASTS: Final = (3.0, 3.0)
# Of tensors of an element in torch's `_multi_tensor_adamw`: decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2,
# addcdiv 4.
FOREACH_PASSES: Final = 20.0
# Of an optimizer's usual bytes below which its states are bf16.
NARROW_SHARE: Final = 0.5


class PublishedStages(StageTable):
    """Give all stages the same number of blocks; the library cuts by cost."""

    def _cut(self, config: ResolvedConfig, placement: StagePlacement) -> tuple[tuple[int, ...], int]:
        shape, cut = self.job.shape, config.pipeline.cut
        layers = even_layers(shape.num_layers, placement.num_stages) if cut is None else layers_between(cut, shape)
        return layers, placement.num_stages - 1


class PublishedLayout(FoldedLayouts):
    """Shard the optimizer's states over another number of ranks, where the code does."""

    def __init__(self, job: PlanJob) -> None:
        super().__init__(job, PublishedStages(job))

    def _fold(self, config: ResolvedConfig, pipeline_rank: int) -> FoldedLayout:
        """Let blocks be compiled beside experts that are divided, which our engine refuses."""
        return super()._fold(changed(config, {"compile.enabled": False}), pipeline_rank)

    def _bytes_at_rest(self, config: ResolvedConfig, pipeline_rank: int, tier: Tier | None) -> dict[str, int]:
        totals = super()._bytes_at_rest(config, pipeline_rank, tier)
        num_shards = published_traits(self.job).optimizer_shards
        if num_shards is None:
            return totals
        rank = self.rank(config, pipeline_rank)
        states = tuple(dataclasses.replace(each, placement=Placement.SHARD) for each in rank.layout.states)
        layout = dataclasses.replace(rank.layout, states=states)
        resharded = rank.total(
            lambda group: layout.group_bytes_at_rest(dataclasses.replace(group, num_shards=num_shards), 0, tier)
        )
        return {**totals, "optimizer": resharded["optimizer"]}


def _score_bytes(traits: PublishedTraits, element_bytes: int) -> float:
    """Return the bytes kept of each attention score.

    A fused softmax keeps its output, any other also its output in fp32, and dropout its own output and mask.
    """
    if traits.attention == "flash":
        return 0.0
    is_widened = traits.attention == "unfused" and element_bytes < FP32_BYTES
    softmax = element_bytes + (FP32_BYTES if is_widened else 0.0)
    return softmax + (element_bytes + MASK_BYTES if traits.has_dropout else 0.0)


class PublishedMemoryModel(MemoryModel):
    """Count states as other code stores them, and what it gathers and keeps."""

    def __init__(self, job: PlanJob, layouts: FoldedLayouts | None = None) -> None:
        super().__init__(job, layouts or PublishedLayout(job))

    def _sums(
        self, folds: Iterable[LayerCount], width_of: Callable[[GroupSpec], int] = lambda group: 1
    ) -> tuple[int, int, int]:
        root, block, whole = super()._sums(folds, width_of)
        traits = published_traits(self.job)
        share = largest_share(self.job.shape) if traits.moves_tensors else 1.0
        if traits.packs_experts and self.job.shape.experts is not None:
            share *= PACKED_EXPERT_BYTES / DTYPE_BYTES["bf16"]
        if traits.code is not None and traits.code.name == "torchtitan" and not self.job.shape.is_tied:
            root //= 2  # the table and the head are groups of their own
        return root, int(block * share), whole

    def _sent_on_bytes(self, block: BlockBytes) -> float:
        return 0.0 if published_traits(self.job).frees_outputs else super()._sent_on_bytes(block)

    def _given_bytes(self, config: ResolvedConfig, block: BlockBytes) -> float:
        return 0.0

    def _buffers(self, config: ResolvedConfig, folds: FoldedLayout, stage: int) -> Buffers:
        """Let the last block's gradients find what any other block's find: how other codes begin is not known."""
        found = super()._buffers(config, folds, stage)
        return dataclasses.replace(found, first=found.waiting)

    def _pooled(self, buffers: dict[int, Buffers]) -> dict[int, Buffers]:
        return buffers

    def _sent_bytes(self, layout: Layout, width: int) -> float:
        """Send gradients from where they are stored; what is sharded arrives in a buffer."""
        num_bytes = super()._sent_bytes(layout, width)
        is_sharded = layout.stage.grads is Placement.SHARD
        return float(DTYPE_BYTES[layout.precision.reduce] * is_sharded) if num_bytes else 0.0

    def _weight_grad_bytes(self, config: ResolvedConfig, numel: float) -> float:
        """Add gradients of weights where they are stored."""
        return 0.0

    def _layer_shape(self, config: ResolvedConfig, *, has_experts: bool) -> LayerShape:
        found, traits = super()._layer_shape(config, has_experts=has_experts), published_traits(self.job)
        weighs_early = traits.code is not None and traits.code.name == "megatron" and traits.code.year > 2024
        return dataclasses.replace(
            found,
            # A token's weight is multiplied in before an expert's last product, whose output no backward reads then
            # (Megatron-LM's experts.py, `permuted_probs`, since core 0.12).
            num_routed=found.num_routed / (2 if weighs_early else 1),
            score_bytes=_score_bytes(traits, DTYPE_BYTES[param_of(config)]),
            mask_bytes=MASK_BYTES if traits.has_dropout else 0.0,
            norm_bytes=float(2 * FP32_BYTES) if traits.saves_norm_in_fp32 else 0.0,
            fuses_gate=traits.fuses_gate and found.is_gated,
            products_share=0.5 if traits.selective == "half" else 1.0,
        )

    def _kept_bytes(self, shape: LayerShape, s: ResolvedConfig, recompute: Recompute) -> float:
        if recompute == "selective" and published_traits(self.job).selective == "all-but-scores":
            return super()._kept_bytes(dataclasses.replace(shape, score_bytes=0.0), s, "none")
        return super()._kept_bytes(shape, s, recompute)

    def head_bytes(self, config: ResolvedConfig) -> HeadBytes:
        """Count all copies of the logits at the peak of the loss."""
        s, traits, shape = config, published_traits(self.job), self.job.shape
        found, tokens = super().head_bytes(config), self.job.seq_len / s.mesh.cp * s.batch.micro_size
        vocab = math.ceil(shape.vocab_size / (s.mesh.tp if traits.splits_logits else 1))
        stream, size = self._feature_bytes(s) * shape.hidden_size, DTYPE_BYTES[param_of(s)]
        made = traits.logits_bytes * vocab * min(tokens, s.context.chunk_tokens or tokens)
        deferred = stream + tokens * size * vocab if defers_weights(s) else 0.0
        given = stream / (s.mesh.tp if s.tensor.sequence_parallel else 1)
        return HeadBytes(given, 0.0, max(made, stream), found.weight, deferred)

    def block_bytes(self, config: ResolvedConfig, *, has_experts: bool) -> BlockBytes:
        """Free what the code's own words of recomputation free, where they are more than a mode."""
        found, again = super().block_bytes(config, has_experts=has_experts), published_traits(self.job).recomputation
        if published_traits(self.job).keeps_frozen_inputs and config.recompute.mode == "none":
            tokens = self.job.seq_len / config.mesh.cp * config.batch.micro_size * DTYPE_BYTES[param_of(config)]
            layer = self._layer_shape(config, has_experts=False)
            unread = tokens * unread_size(self.job, config, layer, has_experts=has_experts)
            found = dataclasses.replace(found, kept=found.kept + unread, whole=found.whole + unread)
        if published_traits(self.job).is_latent:
            tokens = self.job.seq_len / config.mesh.cp * config.batch.micro_size * DTYPE_BYTES[param_of(config)]
            more = tokens * LATENT_MORE * self.job.shape.num_heads / config.mesh.tp
            kept = found.kept + more * (config.recompute.mode != "full")
            found = dataclasses.replace(found, kept=kept, whole=found.whole + more)
        if published_traits(self.job).norms_heads:
            shape, each_bytes = self.job.shape, 2.0 * FP32_BYTES * published_traits(self.job).saves_norm_in_fp32
            heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim / config.mesh.tp
            tokens = self.job.seq_len / config.mesh.cp * config.batch.micro_size
            more = tokens * heads * (DTYPE_BYTES[param_of(config)] + each_bytes)
            found = dataclasses.replace(
                found, kept=found.kept + more * (config.recompute.mode == "none"), whole=found.whole + more
            )
        if published_traits(self.job).widens_stream:
            kept, whole = found.kept + found.stream, found.whole + 2 * found.stream
            found = dataclasses.replace(found, kept=kept, whole=whole, stream=2 * found.stream)
        if config.recompute.mode != "selective" or again is None:
            return found
        if not again.freed and not has_experts and published_traits(self.job).code is not None:
            return dataclasses.replace(found, kept=self._saved_bytes(config))
        if has_experts and again.experts and not again.freed:
            return dataclasses.replace(found, kept=found.kept - self._unsaved_bytes(config))
        if not again.freed:
            return found
        s, shape, experts = config, self.job.shape, self.job.shape.experts if has_experts else None
        hidden = shape.hidden_size / (s.mesh.tp if s.tensor.sequence_parallel else 1)
        chosen = experts.num_chosen + experts.num_shared if experts else 0
        sizes = {
            "hidden": hidden,
            "queries": shape.num_heads * shape.head_dim / s.mesh.tp,
            "keys": 2 * shape.num_kv_heads * shape.head_dim / s.mesh.tp,
            "ffn": (experts.ffn_size * chosen if experts else shape.ffn_size) / s.mesh.tp,
            "routed": self._layer_shape(s, has_experts=has_experts).num_routed * hidden,
            "inner": 1.0 if published_traits(self.job).fuses_gate else 2.0,
        }
        tokens = self.job.seq_len / s.mesh.cp * s.batch.micro_size * DTYPE_BYTES[param_of(s)]
        freed = tokens * freed_elements(again.freed, sizes, has_experts=has_experts)
        return dataclasses.replace(found, kept=found.whole - min(freed, found.whole - found.stream))

    def _saved_bytes(self, s: ResolvedConfig) -> float:
        """Return what torchtitan's choice of ops saves: wq, wv, w1, attention, the input, and w2 unless compiled.

        A compiler drops what no backward reads, as w2's output.
        """
        shape = self.job.shape
        hidden = (2 - s.compile.enabled) * shape.hidden_size / (s.mesh.tp if s.tensor.sequence_parallel else 1)
        heads = (2 * shape.num_heads + shape.num_kv_heads) * shape.head_dim + 2 * shape.num_heads  # lse is fp32
        return (
            self.job.seq_len
            / s.mesh.cp
            * s.batch.micro_size
            * DTYPE_BYTES[param_of(s)]
            * (hidden + (heads + shape.ffn_size) / s.mesh.tp)
        )

    def _unsaved_bytes(self, s: ResolvedConfig) -> float:
        """Return the half of experts' wide tensors that is counted as saved, less what their exchange brought."""
        experts = self.job.shape.experts
        if experts is None:
            return 0.0
        tokens = self.job.seq_len / s.mesh.cp * s.batch.micro_size * DTYPE_BYTES[param_of(s)] / s.mesh.tp
        brought = experts.num_chosen * self.job.shape.hidden_size if s.mesh.ep > 1 else 0
        return tokens * (experts.num_chosen * experts.ffn_size - brought)

    def _of_device(self, config: ResolvedConfig, moving_bytes: float) -> dict[str, float]:
        """Leave out torch's kernels and its allocator where the code has neither."""
        found, code = super()._of_device(config, moving_bytes), published_traits(self.job).code
        if code is None or not code.is_graphed:
            return found
        return {"overhead": found["overhead"] - CONTEXT_BYTES / 2, "rounding": 0.0}

    def _scale_bytes(self, config: ResolvedConfig, rank: int) -> float:
        """Return those of bitsandbytes, which does not quantize scales again unless it is asked to."""
        return super()._scale_bytes(config, rank) * (4 / 64 / SCALE_BYTES if published_traits(self.job).code else 1.0)

    def _states(self, config: ResolvedConfig, rank: int, here: Mapping[str, int]) -> dict[str, float]:
        traits, states = published_traits(self.job), super()._states(config, rank, here)
        numel, shape = self.layouts.rank(config, rank).numel, self.job.shape
        states["params"] *= traits.params_share
        states["optimizer"] *= traits.optimizer_share
        if trains_all(config) and traits.unsharded_grad_bytes:
            waits = traits.reduces_once and config.zero.stage >= 2  # until the last micro-batch there are no others
            states["grads"] = (0.0 if waits else states["grads"]) + traits.unsharded_grad_bytes * numel
        if traits.widens_stream and not traits.casts_weights:  # the tables too
            states["params"] += 2 * DTYPE_BYTES["bf16"] * shape.vocab_size * shape.hidden_size / (1 + shape.is_tied)
        if traits.packs_experts and shape.experts is not None:
            stored = sum(
                fold.count * param.numel / fold.group.num_shards
                for fold in self.layouts.rank(config, rank).folds
                for param in fold.group.params
                if ".experts." in param.name and ".lora_" not in param.name
            )
            states["params"] -= stored * (DTYPE_BYTES["bf16"] - PACKED_EXPERT_BYTES)
        more = (1 - 1 / config.mesh.tp) * shape.vocab_size * shape.hidden_size if traits.whole_embedding else 0.0
        return {name: size * (1 + more / numel) for name, size in states.items()}

    def _step_bytes(self, config: ResolvedConfig, folds: FoldedLayout) -> float:
        return super()._step_bytes(config, folds) if published_traits(self.job).widens_grads else 0.0


class PublishedComputeModel(ComputeTimeModel):
    """Time kernels of graphs, attention of other generations, and norms and dropout that are not fused."""

    def attention(self, s: ResolvedConfig) -> PassTimes:
        """Price scores that are stored: batched products, and what passes over the scores."""
        shape, traits = self.job.shape, published_traits(self.job)
        if traits.attention == "flash":
            return super().attention(s).times(LATENT_FLOPS if traits.is_latent else 1.0)
        scores = self._tokens(s) * self._num_keys * shape.num_heads / s.mesh.tp
        width, forward = DTYPE_BYTES[param_of(s)], 4.0 * scores * shape.head_dim
        written_out = WIDE_SOFTMAX if param_of(s) == "fp32" else SOFTMAX
        passes = FUSED_SOFTMAX if traits.attention == "fused-softmax" else written_out
        rate = (
            BATCHED_SHARE
            * self._rate("bf16" if width <= 2 else product_dtype(s))
            * min(shape.head_dim / 128, 1.0) ** 0.5
        )
        rate *= alignment_share(shape.head_dim, shape.head_dim, width)
        around = self._streamed(scores * width, [each + DROPOUT * traits.has_dropout for each in passes])
        return PassTimes(forward / rate, 2 * forward / rate).plus(around)

    def _block(self, s: ResolvedConfig) -> PassTimes:
        found, traits = super()._block(s), published_traits(self.job)
        if s.recompute.mode != "selective":
            return found
        if traits.attention != "flash":
            return dataclasses.replace(found, recompute_s=self.attention(s).forward_s / s.recompute.every)
        return found if traits.recomputation is None else dataclasses.replace(found, recompute_s=self._again_s(s))

    def _again_s(self, s: ResolvedConfig) -> float:
        """Return the seconds of what the code's words of recomputation run again, a mean over blocks."""
        shape, again = self.job.shape, published_traits(self.job).recomputation
        if again is None:
            return 0.0
        share = shape.num_expert_layers / shape.num_layers
        seconds = self.attention(s).forward_s if again.attention else 0.0
        seconds += self._streams(s).forward_s if again.streams else 0.0
        tokens, ffn = self._tokens(s), shape.ffn_size
        widths = {"query": shape.num_heads, "key": shape.num_kv_heads, "value": shape.num_kv_heads}
        for name in again.products:
            if name in widths:
                linear, part = GemmShape(tokens, widths[name] * shape.head_dim / s.mesh.tp, shape.hidden_size), 1.0
            elif name == "out":
                linear, part = GemmShape(tokens, shape.hidden_size, shape.num_heads * shape.head_dim / s.mesh.tp), 1.0
            else:
                linear, part = GemmShape(tokens, ffn / s.mesh.tp, shape.hidden_size), 1 - share
            seconds += part * self._linears([linear], s, product_dtype(s)).forward_s
        if again.dense and share < 1:
            seconds += (1 - share) * self._linears(
                self._ffn_linears(s, ffn / s.mesh.tp, tokens), s, product_dtype(s)
            ).forward_s
        if again.experts and share > 0:
            experts = self._linears(self._expert_linears(s), s, product_dtype(s)).plus(self._permutation(s))
            seconds += share * experts.forward_s
        return seconds

    def _streams(self, s: ResolvedConfig) -> PassTimes:
        shape, traits, width = self.job.shape, published_traits(self.job), DTYPE_BYTES[param_of(s)]
        more = 2 * DROPOUT * traits.has_dropout  # after attention and after the feed-forward
        norm = NORM_IN_FP32 if traits.saves_norm_in_fp32 and not s.compile.enabled else (0.0, 0.0)
        hidden = self._tokens(s) / (s.mesh.tp if s.tensor.sequence_parallel else 1) * shape.hidden_size
        times = super()._streams(s).plus(self._streamed(hidden * width, [2 * each + more for each in norm]))
        if traits.norms_heads:
            heads = self._tokens(s) / s.mesh.tp * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
            passes = [each + more_s for each, more_s in zip(HEADS_NORM, norm, strict=True)]
            times = times.plus(self._streamed(heads * width, passes))
        if traits.widens_all:
            # Queries, keys and values cast the input each, as gate and up do.
            norms = self._streamed(hidden * width, [2 * each * (norm[0] > 0) for each in EAGER_NORM])
            times, experts = super()._streams(s).times(2).plus(norms), shape.experts
            copies = experts.num_chosen + experts.num_shared if experts else 1
            heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
            around = (4 + 3 * copies) * shape.hidden_size + heads + 3 * self._ffn_width()
            times = times.plus(self._streamed(self._tokens(s) / s.mesh.tp * around * width, PACKED_CASTS))
        elif traits.widens_stream:  # norms and sums in fp32
            times = times.plus(self._streamed(hidden * width, WIDE_STREAM))
        if shape.ffn == "gated" or s.compile.enabled or traits.attention != "fused-softmax":
            return times
        return times.plus(self._streamed(self._tokens(s) / s.mesh.tp * self._ffn_width() * width, FUSED_ACTIVATION))

    def _adapter_passes(self, s: ResolvedConfig, *, is_output: bool) -> tuple[float, float]:
        traits = published_traits(self.job)
        if traits.fuses_adapters or not traits.widens_adapters:
            return super()._adapter_passes(s, is_output=is_output)
        forward, backward = (AUTOCAST_ADAPTER if traits.autocasts else WIDE_ADAPTER)[not is_output]
        more = WIDE_DROPOUT * (s.lora.dropout > 0 and not is_output)
        return forward + more, backward + more

    def _fuses_adapters(self, s: ResolvedConfig) -> bool:
        return published_traits(self.job).fuses_adapters

    def _unpacking(self, s: ResolvedConfig, *, has_experts: bool) -> PassTimes:
        found, traits = super()._unpacking(s, has_experts=has_experts), published_traits(self.job)
        shape = self.job.shape
        numel, stored_bytes = 0.0, traits.unpacked_bytes
        if has_experts and traits.packs_experts:
            numel, stored_bytes = shape.num_ffn_matrices * self._expert_numel / s.mesh.ep, PACKED_EXPERT_BYTES
        elif traits.unpacked_bytes:
            ffn = self._expert_numel / s.mesh.ep if has_experts else shape.ffn_size * shape.hidden_size
            heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
            numel = shape.num_ffn_matrices * ffn + heads * shape.hidden_size
        return found.plus(self._streamed(numel * (stored_bytes + DTYPE_BYTES[param_of(s)]), (1.0, 1.0)))

    def _loss(self, s: ResolvedConfig) -> PassTimes:
        """Pass over the logits in fp32 where the loss widens them, over all of them where no rank has its part."""
        traits, width = published_traits(self.job), DTYPE_BYTES[param_of(s)]
        logits = self._tokens(s) * self.job.shape.vocab_size / (s.mesh.tp if traits.splits_logits else 1)
        if traits.logits_bytes <= 2 * width:
            return self._streamed(logits, (2.0 * width, 2.0 * width))
        casts = 0.0 if width == FP32_BYTES else width + FP32_BYTES
        return self._streamed(logits, [each + casts for each in LOSS_BYTES])

    def head(self, config: ResolvedConfig) -> PassTimes:
        """Pass over the logits for what TRL logs of each step, too."""
        found = super().head(config)
        if not published_traits(self.job).logs_entropy:
            return found
        logits = self._tokens(config) * self.job.shape.vocab_size
        return found.plus(PassTimes(self._stream_s(ENTROPY_BYTES * logits)))

    def _narrow_bytes(self, s: ResolvedConfig, dtype: str) -> float:
        """Read a factor once more where its largest element must be known before it is cast."""
        more = DTYPE_BYTES[param_of(s)] * published_traits(self.job).scales_dynamically
        return super()._narrow_bytes(s, dtype) + more

    def _linears(self, linears: Iterable[GemmShape], s: ResolvedConfig, dtype: str) -> PassTimes:
        """Cast weights too, which a step's micro-batches do not share: of fp32 to bf16, and of bf16 to fp8."""
        linears, traits, width = list(linears), published_traits(self.job), DTYPE_BYTES[param_of(s)]
        routed = [each for each in linears if each.is_routed]
        found = super()._linears([each for each in linears if not each.is_routed], s, dtype)
        found = found.times(1 / ROWWISE_SHARE) if traits.has_scaled_rows and dtype == "fp8" else found
        if routed:
            grouped = super()._linears(routed, s, traits.experts_dtype or dtype)
            found = found.plus(grouped.times(1 / traits.grouped_share))
        numel = sum(each.count * each.n * each.k for each in linears)
        if traits.casts_weights:
            found = found.plus(PassTimes(self._stream_s(numel * (FP32_BYTES + width))))
        if traits.scales_dynamically and traits.casts_gathered and dtype == "fp8":
            cast_s = self._stream_s(numel * (2 * width + 1))  # its largest element, then itself
            found = found.plus(PassTimes(cast_s, cast_s))
        return found

    def step_s(self, config: ResolvedConfig, numel: float) -> float:
        """Pass over each tensor as often as torch's optimizer does where it is not one kernel."""
        if not published_traits(self.job).steps_by_tensor:
            return super().step_s(config, numel)
        width = DTYPE_BYTES["bf16"] if published_traits(self.job).optimizer_share < NARROW_SHARE else FP32_BYTES
        return self._stream_s(FOREACH_PASSES * width * numel)

    def _permutation_passes(self, s: ResolvedConfig) -> tuple[float, float]:
        return published_traits(self.job).permutation or (FUSED_EXPERTS if s.compile.enabled else EXPERTS)

    def host(self, config: ResolvedConfig) -> HostTimes:
        """Take nothing for what a graph launches."""
        return HostTimes() if published_traits(self.job).is_graphed else super().host(config)

    def _host_costs(self, s: ResolvedConfig) -> HostCosts:
        traits, found = published_traits(self.job), super()._host_costs(s)
        plain = dataclasses.replace(found, block_s=(0.0, 0.0), param_s=0.0, num_syncs=0.0)
        return plain if traits.code is None else host_costs(traits.code, plain, self.job, s)

    @property
    def _kernel_s(self) -> float:
        return GRAPHED_KERNEL_S if published_traits(self.job).is_graphed else super()._kernel_s

    def _flash_rates(self, rate: float) -> tuple[float, float]:
        share = FIRST_FLASH_SHARE if published_traits(self.job).has_first_flash else 1.0
        forward_rate, backward_rate = super()._flash_rates(rate)
        return forward_rate * share, backward_rate * share

    @property
    def _has_plain_attention(self) -> bool:
        return not published_traits(self.job).has_tuned_attention


class PublishedCommModel(CommTimeModel):
    """Gather after the step, reduce once, or over other ranks, where the code does; send tokens as it does."""

    def _block(self, s: ResolvedConfig) -> BlockComm:
        found, again = super()._block(s), published_traits(self.job).recomputation
        if s.recompute.mode != "selective" or again is None or not again.exchange:
            return found
        experts_s = found.recompute.experts_s + found.forward.experts_s
        return dataclasses.replace(found, recompute=dataclasses.replace(found.recompute, experts_s=experts_s))

    def _dispatch_s(self, num_bytes: float, num_chosen: int, num_ranks: int) -> float:
        """Send a token to a node once, and over its links to a rank once for all experts there, where the code does.

        Of N places k experts drawn evenly are on N (1 - (1 - 1/N)^k) (DeepSeek-V3, arXiv 2412.19437, section 3.2.2).
        """
        traits = published_traits(self.job)
        if not traits.dedups_tokens:
            return super()._dispatch_s(num_bytes, num_chosen, num_ranks)
        # Of rows without a code nothing says that its dispatch is DeepEP's within a node too.
        num_reached = num_chosen if traits.code is None else num_ranks * (1 - (1 - 1 / num_ranks) ** num_chosen)
        direct_s = self.dispatch_network.collective_s("all_to_all", num_bytes * num_reached, num_ranks)
        levels = self.dispatch_network.levels(num_ranks, 1)
        if len(levels) != 2:
            return direct_s
        near, nodes = levels[0].num_ranks, num_ranks // levels[0].num_ranks
        num_nodes_reached = nodes * (1 - (1 - 1 / nodes) ** num_chosen)
        over_s = self.dispatch_network.collective_s("all_to_all", num_bytes * num_nodes_reached, nodes, near)
        within_s = self.dispatch_network.collective_s("all_to_all", num_bytes * num_reached, near)
        return min(direct_s, max(over_s, within_s))

    def data(self, config: ResolvedConfig, pipeline_rank: int = 0) -> OverlapTimes:
        found = super().data(config, pipeline_rank)
        if config.zero.stage not in (1, 2) or published_traits(self.job).defers_gathers:
            return found
        step_s = found.step_s + found.first_forward_s
        return dataclasses.replace(found, step_s=step_s, first_forward_s=0.0, alone_forward_s=0.0)

    def _calls_of(
        self, s: ResolvedConfig, layout: Layout, fold: LayerCount, *, is_first: bool
    ) -> Iterator[PricedCollective]:
        traits, group = published_traits(self.job), fold.group
        shards = traits.optimizer_shards
        if shards is not None and layout.stage.unshard_after_step and group.num_ranks % shards == 0:
            fold = dataclasses.replace(fold, group=dataclasses.replace(group, num_shards=min(shards, group.num_ranks)))
        for call in super()._calls_of(s, layout, fold, is_first=is_first):
            if traits.reduces_once and call.op == "reduce_scatter":
                yield dataclasses.replace(call, moment="last backward")
            else:
                yield call


class PublishedTimeModel(TimeModel):
    """Time steps with the models above."""

    def __init__(self, job: PlanJob, layouts: FoldedLayouts | None = None) -> None:
        super().__init__(job, layouts or PublishedLayout(job))
        self.compute = PublishedComputeModel(job)
        self.communication = PublishedCommModel(job, self.layouts)

    def _num_optimizer_shards(self, s: ResolvedConfig) -> int:
        shards = published_traits(self.job).optimizer_shards
        return shards if shards and s.zero.stage else super()._num_optimizer_shards(s)


def largest_share(shape: ModelShape) -> float:
    """Return the share of a dense block's elements that its largest weight has."""
    num_matrices = 3 if shape.ffn == "gated" else 2
    attention = 2 * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    return shape.ffn_size / (attention + num_matrices * shape.ffn_size)


class PublishedPricer(Pricer):
    """Price the candidates of a published run's job."""

    def __init__(self, job: PlanJob) -> None:
        self.job = job
        layouts = PublishedLayout(job)
        self.memory = PublishedMemoryModel(job, layouts)
        self.time = PublishedTimeModel(job, layouts)


def layers_between(cut: Sequence[str], shape: ModelShape) -> tuple[int, ...]:
    """Count the blocks of each stage, where every stage but the first begins with a named module: a block or the head.

    The last may have none, and the norm.
    """
    indices = [name.removeprefix("blocks.") for name in cut]
    starts = [int(index) if index.isdecimal() else shape.num_layers for index in indices]
    return tuple(stop - start for start, stop in itertools.pairwise((0, *starts, shape.num_layers)))


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Spread blocks evenly over stages; what is left over goes to the stages in the middle.

    >>> even_layers(14, 4)
    (3, 4, 4, 3)
    """
    each, left = divmod(num_layers, num_stages)
    middle_first = sorted(range(num_stages), key=lambda stage: (abs(2 * stage - num_stages + 1), stage))
    extra = set(middle_first[:left])
    return tuple(each + (stage in extra) for stage in range(num_stages))
