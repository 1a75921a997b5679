"""Price runs of other frameworks: the planner's models, with what `PublishedTraits` says of the code that ran."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Final

from planner_eval.hosts import host_costs
from planner_eval.memories import (
    PACKED_EXPERT_BYTES,
    PublishedLayout,
    PublishedMemoryModel,
    expert_bytes,
    saved_tables,
)
from planner_eval.memories import PublishedStages as PublishedStages
from planner_eval.traits import PublishedTraits, published_traits
from shardwise.config.resolve import ResolvedConfig
from shardwise.layout.activation_bytes import FP32_BYTES
from shardwise.layout.grad_sums import StepCollective
from shardwise.layout.layout import Layout
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.models.shape import packed_params
from shardwise.planner.calibration import PassTimes
from shardwise.planner.collectives import PLAIN_HOST_BYTES_PER_S
from shardwise.planner.comm_time import BlockComm, CommTimeModel, OverlapTimes
from shardwise.planner.compute_time import FLASH_SHARES, ComputeTimeModel, GemmShape, alignment_share
from shardwise.planner.folded_layout import FoldedLayouts, LayerCount
from shardwise.planner.host_time import NO_HOST, HostCosts
from shardwise.planner.job import PlanJob, expert_skew, param_of, product_dtype, trains_all
from shardwise.planner.search import Pricer
from shardwise.planner.step_time import TimeModel

FIRST_FLASH_SHARE: Final = 0.5
"""The first FlashAttention's rate as a share of the second's (Dao 2023, abstract: about twice as fast)."""
WIDE_MASKED_SHARE: Final = 1 / 3
"""Rate of torch's memory-efficient attention in fp32 over that of TF32: it multiplies three times (CUTLASS,
`OpMultiplyAddFastF32`)."""
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
# Of tokens' copies for their experts, as codes permute them where nothing or everything is fused (sorted and copied,
# copied back and summed).
EXPERTS, FUSED_EXPERTS = (6.0, 8.0), (4.0, 4.0)


# Bytes of each logit for the entropy and the accuracy that TRL's SFTTrainer logs: accelerate widens it (6), log-softmax
# (8), exp (8), product (12), sum (4) and largest (4).
ENTROPY_BYTES: Final = 42.0
# A fused norm's passes over queries and keys: input and output, and both gradients with the weight's in pieces.
HEADS_NORM: Final = (2.0, 3.5)
# FLOPs of DeepSeek's attention over those of heads of 128 (arXiv 2412.19437, section 4.2).
LATENT_FLOPS: Final = (192 + 128) / 256
# More of a residual stream in fp32: two norms and two sums of twice the width.
WIDE_STREAM: Final = (10.0, 13.0)
# Passes over what adapters of fp32 read and write in bf16 (peft, `tuners/lora/layer.py`): of the output (scaled, added)
# and of the input (cast, cast back to bf16 by autocast, gradients added), under autocast and without, where the
# adapters' products and the sum are of fp32 too; and of a dropout in fp32.
AUTOCAST_ADAPTER, WIDE_ADAPTER, WIDE_DROPOUT = ((5.0, 2.0), (6.0, 9.0)), ((13.0, 12.0), (4.0, 8.0)), 4.5
# Of a packed layer's output, which PEFT copies before it adds to it (`tuners/lora/bnb.py`).
CLONE: Final = 2.0
# Beyond a fused norm's where it is eager and its input is fp32 already: `NORM_IN_FP32` without casts.
EAGER_NORM: Final = (10.0, 26.5)
# Bytes for each weight that GPTQ's layer unpacks operator by operator: shifted to int32 (4.5), cast to int8 (5), masked
# (2), less its zeros (2), scaled (3), beyond the 2.5 of one kernel; the backward finds it in bf16 (AutoGPTQ's
# `qlinear_cuda_old.py`).
GPTQ_BYTES: Final = (14.0, -2.5)
# Of each input and output of a packed layer between fp32 and bf16, both passes.
PACKED_CASTS: Final = (3.0, 3.0)
# Of tensors of an element in torch's `_multi_tensor_adamw`: decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2,
# addcdiv 4.
FOREACH_PASSES: Final = 20.0
# Of a device's memory that Surogate gives away.
USED_SHARE: Final = 0.95
# Of an optimizer's usual bytes below which its states are bf16.
NARROW_SHARE: Final = 0.5


class PublishedComputeModel(ComputeTimeModel):
    """Time kernels of graphs, attention of other generations, and norms and dropout that are not fused."""

    def attention(self, s: ResolvedConfig) -> PassTimes:
        """Price scores that are stored: batched products, and what passes over the scores."""
        shape, traits = self.job.shape, published_traits(self.job)
        if traits.attention == "flash":
            found = super().attention(s).times(LATENT_FLOPS if traits.is_latent else 1.0)
            return self._masked(found, s) if traits.masks_attention else found
        scores = self._tokens(s) * shape.num_keys_read(self.job.seq_len) * shape.num_heads / s.mesh.tp
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

    def _masked(self, found: PassTimes, s: ResolvedConfig) -> PassTimes:
        """Multiply all keys, as torch's memory-efficient kernel does with a mask, in fp32 where all is.

        Its deterministic backward has one block of threads a head (torch's `attention_backward.cu`, `num_splits_key`).
        """
        traits, cores = published_traits(self.job), self.job.cluster.gpu.num_cores
        times, heads = 2.0, s.batch.micro_size * self.job.shape.num_heads / s.mesh.tp
        if traits.widens_all:
            times *= self._rate("bf16") / (WIDE_MASKED_SHARE * self._rate("tf32"))
        found = found.times(times)
        is_slow = traits.is_deterministic and 0 < heads < cores
        return dataclasses.replace(found, backward_input_s=found.backward_input_s * (cores / heads if is_slow else 1.0))

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

    def _expert_linears(self, s: ResolvedConfig) -> list[GemmShape]:
        """Leave experts frozen where their adapters are layers of their own, on each expert's tokens."""
        found = super()._expert_linears(s)
        if published_traits(self.job).code is None or trains_all(s):
            return found
        return [dataclasses.replace(each, is_frozen=True) for each in found]

    def _adapters(self, s: ResolvedConfig, *, has_experts: bool) -> PassTimes:
        """Price adapters of experts as grouped products, as prime-rl has them (layers/lora/multi_moe.py) and as PEFT's
        of single linear layers are; one over all experts' weights is of transformers 5 alone.
        """
        experts, times = self.job.shape.experts, PassTimes()
        adapters = self._adapters_of(s.lora, has_experts=has_experts)
        if published_traits(self.job).code is None or experts is None or not any(one.experts for one in adapters):
            return super()._adapters(s, has_experts=has_experts)
        num_local = experts.num_experts / s.mesh.ep
        copies, width = self._tokens(s) / s.mesh.tp * experts.num_chosen, DTYPE_BYTES[param_of(s)]
        for adapter in adapters:
            is_output = ".lora_B" in adapter.name
            outputs, inputs = adapter.split(s.mesh.tp).local_shape[:2]
            tokens, count, rank = self._tokens(s), 1.0, s.lora.rank
            if adapter.experts:
                tokens, count = copies * expert_skew(self.job, s) / num_local, num_local
                outputs, inputs = (outputs, rank) if is_output else (rank, inputs)
            linear = GemmShape(tokens, outputs, inputs, count, is_routed=bool(adapter.experts))
            passes = self._adapter_passes(s, is_output=is_output)
            streamed = self._streamed(tokens * count * max(outputs, inputs) * width, passes)
            times = times.plus(self._linears([linear], s, param_of(s))).plus(streamed)
        return times

    def _adapter_passes(self, s: ResolvedConfig, *, is_output: bool) -> tuple[float, float]:
        traits = published_traits(self.job)
        if traits.fuses_adapters or not traits.widens_adapters:
            return super()._adapter_passes(s, is_output=is_output)
        forward, backward = (AUTOCAST_ADAPTER if traits.autocasts else WIDE_ADAPTER)[not is_output]
        more = WIDE_DROPOUT * (s.lora.dropout > 0 and not is_output)
        more_forward = CLONE * (s.lora.base == "nf4" and is_output)
        return forward + more + more_forward, backward + more

    def _fuses_adapters(self, s: ResolvedConfig) -> bool:
        return published_traits(self.job).fuses_adapters

    def _unpacking(self, s: ResolvedConfig, *, has_experts: bool) -> PassTimes:
        found, traits = super()._unpacking(s, has_experts=has_experts), published_traits(self.job)
        if has_experts and traits.fetches_experts:
            found = found.plus(self._fetching(s, traits))
        shape = self.job.shape
        if traits.unpacks_by_ops:
            packed = packed_params(shape, s.lora, has_experts=has_experts)
            found = found.plus(self._streamed(float(sum(param.numel for param in packed)), GPTQ_BYTES))
        numel, stored_bytes = 0.0, traits.unpacked_bytes
        if has_experts and traits.packs_experts:
            numel, stored_bytes = shape.num_ffn_matrices * self._expert_numel / s.mesh.ep, PACKED_EXPERT_BYTES
        elif traits.unpacked_bytes:
            ffn = self._expert_numel / s.mesh.ep if has_experts else shape.ffn_size * shape.hidden_size
            heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
            numel = shape.num_ffn_matrices * ffn + heads * shape.hidden_size
        return found.plus(self._streamed(numel * (stored_bytes + DTYPE_BYTES[param_of(s)]), (1.0, 1.0)))

    def _fetching(self, s: ResolvedConfig, traits: PublishedTraits) -> PassTimes:
        """Move a block's experts to the device and back, which the stream waits for (Surogate's `offload_manager.cpp`);
        those that run again are there for their backward.

        As many stay as fit beside the tables and one block's in bf16 (its generic_qlora_provider.cpp,
        `auto_tune_offloading`).
        """
        shape, gpu = self.job.shape, self.job.cluster.gpu
        numel = shape.num_ffn_matrices * self._expert_numel / s.mesh.ep
        others = shape.vocab_size * shape.hidden_size * (2 - shape.is_tied) + numel
        space_bytes = gpu.memory_bytes * USED_SHARE - DTYPE_BYTES["bf16"] * others
        away = min(1.0, max(0.0, 1 - space_bytes / (shape.num_expert_layers * numel * expert_bytes(traits))))
        seconds = 2 * away * numel * expert_bytes(traits) / (gpu.host_bytes_per_s or PLAIN_HOST_BYTES_PER_S)
        return PassTimes(seconds, seconds * (s.recompute.mode == "none"))

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
        found = super().head(config).plus(self._in_chunks(config))
        if published_traits(self.job).saves_tables:
            linear = GemmShape(self._tokens(config), self.job.shape.vocab_size, self.job.shape.hidden_size)
            weight_s = self._linears([linear], config, param_of(config)).backward_weight_s
            found = found.plus(PassTimes(0.0, 0.0, weight_s))
        if published_traits(self.job).runs_head_again:
            found = found.plus(PassTimes(0.0, found.forward_s))
        if not published_traits(self.job).logs_entropy:
            return found
        logits = self._tokens(config) * self.job.shape.vocab_size
        return found.plus(PassTimes(self._stream_s(ENTROPY_BYTES * logits)))

    def _in_chunks(self, s: ResolvedConfig) -> PassTimes:
        """Return by how much Liger's head takes longer than a whole one: each chunk reads the weight.

        There are as many as the vocabulary is wider than the model (its ops/fused_linear_cross_entropy.py). Autocast
        keeps no copy of a frozen weight, so that both products of a chunk cast it.
        """
        shape, traits, tokens = self.job.shape, published_traits(self.job), self._tokens(s)
        if not traits.chunks_head:
            return PassTimes()
        chunk = 2 ** math.ceil(math.log2(max(1, tokens / math.ceil(shape.vocab_size / shape.hidden_size))))
        count = math.ceil(tokens / chunk)
        linear = GemmShape(tokens, shape.vocab_size, shape.hidden_size, is_frozen=not trains_all(s))
        whole, parts = (
            self._linears([dataclasses.replace(linear, m=m)], s, param_of(s)).times(times)
            for m, times in ((tokens, 1), (chunk, count))
        )
        numel = shape.vocab_size * shape.hidden_size
        casts_s = count * traits.casts_weights * self._stream_s(numel * (FP32_BYTES + DTYPE_BYTES[param_of(s)]))
        return parts.plus(whole.times(-1)).plus(PassTimes(casts_s))

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
        if traits.casts_unpacked and dtype == "fp8":
            # The largest element is looked for, then each is cast; the backward casts, too, and transposes.
            dense = numel - sum(each.count * each.n * each.k for each in routed)
            passes = (2 * width + 1, 2 * width + 3)
            found = found.plus(PassTimes(*(self._stream_s(dense * each) for each in passes)))
        if traits.scales_dynamically and traits.casts_gathered and dtype == "fp8":
            cast_s = self._stream_s(numel * (2 * width + 1))  # its largest element, then itself
            found = found.plus(PassTimes(cast_s, cast_s))
        return found

    def step_s(self, config: ResolvedConfig, numel: float) -> float:
        """Pass over each tensor as often as torch's optimizer does where it is not one kernel."""
        numel += saved_tables(self.job) / (config.mesh.dp_shard if config.zero.stage else 1)
        if not published_traits(self.job).steps_by_tensor:
            return super().step_s(config, numel)
        width = DTYPE_BYTES["bf16"] if published_traits(self.job).optimizer_share < NARROW_SHARE else FP32_BYTES
        return self._stream_s(FOREACH_PASSES * width * numel)

    def _permutation(self, s: ResolvedConfig, passes: tuple[float, float] | None = None) -> PassTimes:
        usual = FUSED_EXPERTS if s.compile.enabled else EXPERTS
        return super()._permutation(s, passes or published_traits(self.job).permutation or usual)

    def host(self, config: ResolvedConfig) -> HostCosts:
        """Take nothing for what a graph launches."""
        return NO_HOST if published_traits(self.job).is_graphed else super().host(config)

    def _host_costs(self, s: ResolvedConfig) -> HostCosts:
        traits, found = published_traits(self.job), super()._host_costs(s)
        plain = dataclasses.replace(found, block_s=(0.0, 0.0), param_s=0.0, num_syncs=0.0)
        return plain if traits.code is None else host_costs(traits.code, plain, self.job, s)

    @property
    def _kernel_s(self) -> float:
        return GRAPHED_KERNEL_S if published_traits(self.job).is_graphed else super()._kernel_s

    def _flash_rates(self, rate: float) -> tuple[float, float]:
        traits = published_traits(self.job)
        share = FIRST_FLASH_SHARE if traits.has_first_flash or traits.masks_attention else 1.0
        of_product = FLASH_SHARES[0] * rate, FLASH_SHARES[1] * rate
        forward_rate, backward_rate = of_product if traits.has_tuned_attention else super()._flash_rates(rate)
        return forward_rate * share, backward_rate * share


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

    def _calls_of(self, s: ResolvedConfig, layout: Layout, fold: LayerCount) -> Iterator[StepCollective]:
        traits, group = published_traits(self.job), fold.group
        shards = traits.optimizer_shards
        if shards is not None and layout.stage.unshard_after_step and group.num_ranks % shards == 0:
            fold = dataclasses.replace(fold, group=dataclasses.replace(group, num_shards=min(shards, group.num_ranks)))
        for call in super()._calls_of(s, layout, fold):
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


class PublishedPricer(Pricer):
    """Price the candidates of a published run's job."""

    def __init__(self, job: PlanJob) -> None:
        self.job = job
        layouts = PublishedLayout(job)
        self.memory = PublishedMemoryModel(job, layouts)
        self.time = PublishedTimeModel(job, layouts)
