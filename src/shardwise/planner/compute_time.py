"""Price what one rank computes for one micro-batch (a block, the embedding, the head), and the optimizer's step.

A block is a list of kernels: matrix products, attention, and element-wise streams. A matrix product is looked up in
the machine's table where one was measured; else it takes its FLOPs at the rate that its shape can reach, or its bytes
at the memory's, whichever is longer (Williams et al. 2009, the roofline). Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Final

from shardwise.config.resolve import LoraConfig, ResolvedConfig
from shardwise.models.shape import PACKED_BYTES, SkeletonParam, is_adapter, packed_params, with_adapters
from shardwise.optim.rules import NUM_ITERATIONS, num_states
from shardwise.planner.calibration import Corrections, PassTimes, attention_rates, matmul_rates
from shardwise.planner.host_time import GRACE_SHARE, NO_HOST, HostCosts, own_costs
from shardwise.planner.job import PlanJob, SectionNumbers, expert_skew, param_of, product_dtype, trains_all

_WIDTHS: Final[Mapping[str, float]] = MappingProxyType(
    {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
)
# Output tiles that libraries choose from, and the share of a core's rate that each reaches: a smaller one reads its
# inputs more often.
_TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.75), (64, 64, 0.6))
# Elements of the inner dim in which a tile's pipeline of loads fills and its result is written.
_PROLOGUE: Final = 96
# Share of its peak that a device's best product reaches, where none was measured in any dtype.
_USUAL_CEILING_SHARE: Final = 0.8
_LINE_BYTES, _VECTOR_BYTES = 128, 16
# Share of its rate that a product reaches whose rows begin on no cache line, on no vector's address.
_OFF_LINE_SHARE, _OFF_VECTOR_SHARE = 0.9, 0.1
# Share of a large product's rate that flash attention reaches forward and backward over long sequences, and the keys
# at which it loses half of that: Dao 2023 (arXiv 2307.08691), figures 4 to 6; Shah et al. 2024 (arXiv 2407.08608),
# figures 5 and 6.
FLASH_SHARES, _FLASH_RAMPS = (0.97, 0.86), (600.0, 1000.0)
# Elements of a head from which on attention reaches its full rate, and its least share: heads of 64 reach 0.8.
_FULL_HEAD_DIM, _LEAST_FLASH_SHARE = 128, 0.6
# FLOPs a second that a core does at most in a kernel that does not use what came with Hopper: FlashAttention-2 reaches
# 350 to 400 TFLOPS on 132 cores (Shah et al. 2024, figure 5).
_PLAIN_FLASH_CORE: Final = 3.6e12
# Shares of the peak that AMD's open kernel reaches forward and backward over long sequences: 350 and 200 TFLOPS on
# MI300X (ROCm/flash-attention, issue 142, heads of 128).
_AMD_FLASH_SHARES: Final = (0.27, 0.155)
# More reads of what is cast to fp4 than to fp8: its largest element is looked for, and a Hadamard matrix rotates it
# (NVIDIA 2025, arXiv 2509.25149, section 4).
_FP4_READS: Final = 2.0
# Seconds that a kernel takes on a device beyond its work.
_KERNEL_S: Final = 2.5e-6

# Reads and writes of a tensor in the parameters' dtype, forward and backward, by kernel; nothing here is fitted. A
# kernel that works in fp32 takes two for each.
_NORM = (2.0, 3.5)  # input, output; input, both gradients, and the weight's in pieces
_SUM = 3.0
_GATE, _FUSED_GATE = (5.0, 8.0), (3.0, 5.0)
_ACTIVATION, _FUSED_ACTIVATION = (4.0, 6.0), (2.0, 3.0)  # of a plain feed-forward, the bias with it
_ROTATION, _FUSED_ROTATION = 10.0, 2.0
# Of the tokens' copies for their experts, as `grouped_mm_experts_forward` of transformers' integrations/moe.py makes
# them: gathered, sorted, weighed and sorted back (2 each), summed by `index_add` (3); backward as many and sorted keys.
_EXPERTS = (11.0, 15.0)
_EMBEDDING = (2.0, 4.0)
# Of an adapter's output, scaled and added to its layer's, and of its input, to whose gradient its own is added (peft,
# `tuners/lora/layer.py`); more of the input where it is dropped, with a mask of one byte.
_ADAPTER_OUTPUT, _ADAPTER_INPUT, _ADAPTER_DROPOUT = (5.0, 2.0), (0.0, 3.0), (2.5, 2.5)
_FUSED_ADAPTER = (3.0, 0.0)  # of the output; of the input backward
_EXPERTS_ADAPTER = 1.5  # of the experts' weights, to which the adapters' product is added
# Bytes of the cast of an element that is stepped in fp32.
_STEP_CAST_BYTES = 2.0


@dataclass(frozen=True)
class GemmShape:
    """Describe a linear layer on one rank: [m, k] by [k, n], `count` side by side, as the products of experts run.

    Where it is routed, m is a mean: each of the side by side has tokens of its own number.
    """

    m: float
    n: float
    k: float
    count: float = 1.0
    is_frozen: bool = False
    is_routed: bool = False


class ComputeTimeModel:
    """Time a job's kernels, and keep those that were priced, by shape."""

    def __init__(self, job: PlanJob) -> None:
        self.job = job
        self._blocks: dict[tuple[object, ...], PassTimes] = {}
        self._attentions: dict[tuple[int, ...], PassTimes] = {}
        self._numbers = SectionNumbers()
        self._adapters_by_lora: dict[tuple[int, bool], list[SkeletonParam]] = {}
        self._measured, gpu = job.cluster.measured, job.cluster.gpu
        self._matmul_rates = cache(partial(matmul_rates, self._measured.matmuls))
        self._attention_rates = cache(partial(attention_rates, self._measured.attentions))
        self._product_s = cache(self._priced_product_s)
        self._corrections = Corrections(
            job, lambda job, s: ComputeTimeModel(job).block(s), lambda job, s: ComputeTimeModel(job).head(s)
        )
        self._bandwidth = self._measured.stream_bytes_per_s or gpu.memory_bytes_per_s * gpu.fitted.memory_share

    def block(self, s: ResolvedConfig) -> PassTimes:
        """Price one micro-batch of one block: the mean over blocks where only some have experts."""
        linears = (s.mesh.tp, s.mesh.cp, s.mesh.ep, s.batch.micro_size, s.batch.accumulation > 1)
        number = self._numbers.of
        sections = number(s.recompute), number(s.precision), number(s.lora)
        switches = s.tensor.sequence_parallel, s.zero.stage >= 3, s.compile.enabled, s.context.chunk_tokens is None
        key = (*linears, *switches, s.experts.skew, *sections)
        if key not in self._blocks:
            self._blocks[key] = self._block(s)
        return self._blocks[key]

    def waits_for_launches(self, config: ResolvedConfig) -> bool:
        """Say whether the kernels of a block's forward are shorter than the host takes to launch them."""
        return self.block(config).forward_s <= self.host(config).forward_s

    def host(self, config: ResolvedConfig) -> HostCosts:
        """Return what the host takes for a block of a micro-batch and for the ends; 0 where it is the device itself."""
        shape, gpu = self.job.shape, self.job.cluster.gpu
        if gpu.is_cpu:
            return NO_HOST
        return replace(
            self._host_costs(config),
            experts_share=shape.num_expert_layers / shape.num_layers,
            again_share=(config.recompute.mode == "full") / config.recompute.every,
            slowness=GRACE_SHARE if gpu.name.startswith(("gh", "gb")) else 1.0,
        )

    def _host_costs(self, s: ResolvedConfig) -> HostCosts:
        num_adapted = len(self._adapters_of(s.lora, has_experts=False)) // 2
        return own_costs(s, num_adapted, self._measured.call_s)

    def head(self, config: ResolvedConfig) -> PassTimes:
        """Price the last norm, the head and the loss, in `param` even where the blocks' products are narrower."""
        shape, tokens = self.job.shape, self._tokens(config)
        linear = GemmShape(
            tokens, shape.vocab_size / config.mesh.tp, shape.hidden_size, is_frozen=not trains_all(config)
        )
        products = self._linears([linear], config, param_of(config))
        return self._corrections.head(products.plus(self._loss(config)), config, tokens)

    def _loss(self, s: ResolvedConfig) -> PassTimes:
        """Price the passes over a rank's logits, which are read and written once each way."""
        logits_bytes = self._tokens(s) * self.job.shape.vocab_size / s.mesh.tp * _WIDTHS[param_of(s)]
        return self._streamed(logits_bytes, (2.0, 2.0))

    def embedding(self, config: ResolvedConfig) -> PassTimes:
        """Price the lookup, and the sum of its gradients."""
        wide = self._tokens(config) * self.job.shape.hidden_size * _WIDTHS[param_of(config)]
        forward, backward = _EMBEDDING
        return PassTimes(self._stream_s(forward * wide), 0.0, self._stream_s(backward * wide) * trains_all(config))

    def step_s(self, config: ResolvedConfig, numel: float) -> float:
        """Return the seconds of the optimizer's step over `numel` elements that are stored on the device."""
        _, moments = num_states(config.optimizer.name)
        # Gradient, master and states are read, all but the gradient written, in fp32.
        width = 4.0 * (3 + 2 * moments) + (0.0 if param_of(config) == "fp32" else _STEP_CAST_BYTES)
        return numel * width / (self._measured.step_bytes_per_s or self._bandwidth)

    def orthogonalize_s(self, shape: Sequence[int]) -> float:
        """Return the seconds to orthogonalize one matrix, or a stack of them, in bf16; see `newton_schulz_flops`."""
        *stack, rows, columns = shape
        m, n, count = float(min(rows, columns)), float(max(rows, columns)), float(math.prod(stack))
        products = ((m, m, n), (m, m, m), (m, n, m))
        return NUM_ITERATIONS * sum(self._product_s(*product, "bf16", count) for product in products)

    def _tokens(self, config: ResolvedConfig) -> float:
        return self.job.seq_len * config.batch.micro_size / config.mesh.cp

    def _block(self, s: ResolvedConfig) -> PassTimes:
        shape = self.job.shape
        attention, streams = self.attention(s), self._streams(s)
        products = self._linears(self._attention_linears(s), s, product_dtype(s))
        expert_share = shape.num_expert_layers / shape.num_layers
        in_chunks_s = 0.0
        for has_experts, share in ((False, 1 - expert_share), (True, expert_share)):
            if share > 0:
                dense = self._ffn_linears(s, shape.ffn_size / s.mesh.tp, self._tokens(s))
                linears = self._expert_linears(s) if has_experts else dense
                kernels = self._linears(linears, s, product_dtype(s)).plus(self._adapters(s, has_experts=has_experts))
                kernels = kernels.plus(self._unpacking(s, has_experts=has_experts))
                products = products.plus((kernels.plus(self._permutation(s)) if has_experts else kernels).times(share))
                in_chunks_s += 0.0 if has_experts or s.context.chunk_tokens is None else share * kernels.forward_s
        kernels = products.plus(attention).plus(streams)
        corrected = self._corrections.block(kernels, s, self._tokens(s))
        streamed_s = max(0.0, streams.forward_s + corrected.forward_s - kernels.forward_s)
        again = {"none": 0.0, "full": corrected.forward_s, "selective": streamed_s}[s.recompute.mode]
        # A block that is not recomputed as a whole computes a feed-forward in chunks once more (`tensor.chunked`).
        in_chunks_s *= 1 - (s.recompute.mode == "full") / s.recompute.every
        return replace(corrected, recompute_s=again / s.recompute.every + in_chunks_s)

    # --- matrix products -------------------------------------------------------------------------------------------

    def _attention_linears(self, s: ResolvedConfig) -> list[GemmShape]:
        shape, tokens, is_frozen = self.job.shape, self._tokens(s), not trains_all(s)
        kv_heads = max(shape.num_kv_heads / s.mesh.tp, 1)
        width = (shape.num_heads / s.mesh.tp + 2 * kv_heads) * shape.head_dim
        return [
            GemmShape(tokens, width, shape.hidden_size, is_frozen=is_frozen),
            GemmShape(tokens, shape.hidden_size, shape.num_heads / s.mesh.tp * shape.head_dim, is_frozen=is_frozen),
        ]

    def _ffn_linears(
        self, s: ResolvedConfig, inner: float, tokens: float, count: float = 0.0, *, is_frozen: bool | None = None
    ) -> list[GemmShape]:
        """Return the layers of a rank's feed-forward, or of `count` experts side by side, each over so many tokens."""
        shape = self.job.shape
        kind = count or 1.0, not trains_all(s) if is_frozen is None else is_frozen, count > 0
        wide = GemmShape(tokens, inner * (shape.num_ffn_matrices - 1), shape.hidden_size, *kind)
        return [wide, GemmShape(tokens, shape.hidden_size, inner, *kind)]

    def _expert_linears(self, s: ResolvedConfig) -> list[GemmShape]:
        """Return the router and the experts; those of the fullest rank count, as the others wait for it."""
        experts, tokens = self.job.shape.experts, self._tokens(s)
        if experts is None:
            return []
        num_local, num_sent = experts.num_experts / s.mesh.ep, tokens / s.mesh.tp * experts.num_chosen
        tokens_of_expert = num_sent / num_local * expert_skew(self.job, s)
        adapters = self._adapters_of(s.lora, has_experts=True)
        # PEFT adds an adapter's product to the experts' weights, whose gradients are computed for it.
        is_frozen = not (trains_all(s) or any(one.experts for one in adapters))
        router = GemmShape(tokens, experts.num_experts, self.job.shape.hidden_size, is_frozen=not trains_all(s))
        routed = self._ffn_linears(s, experts.ffn_size, tokens_of_expert, num_local, is_frozen=is_frozen)
        shared = experts.num_shared * experts.ffn_size / s.mesh.tp
        return [router, *routed, *(self._ffn_linears(s, shared, tokens) if shared else [])]

    def _adapters_of(self, lora: LoraConfig, *, has_experts: bool) -> list[SkeletonParam]:
        key = (self._numbers.of(lora), has_experts)
        if key not in self._adapters_by_lora:
            params = self.job.shape.params_of("experts" if has_experts else "dense")
            self._adapters_by_lora[key] = [adapter for adapter in with_adapters(params, lora) if is_adapter(adapter)]
        return self._adapters_by_lora[key]

    def _adapters(self, s: ResolvedConfig, *, has_experts: bool) -> PassTimes:
        """Price the adapters of a block, of which there are none where all weights train."""
        tokens, width, times = self._tokens(s), _WIDTHS[param_of(s)], PassTimes()
        for adapter in self._adapters_of(s.lora, has_experts=has_experts):
            if adapter.experts:
                experts_s = self._stream_s(_EXPERTS_ADAPTER * width * self._expert_numel / s.mesh.ep)
                times = times.plus(PassTimes(experts_s, experts_s))
                continue
            outputs, inputs = adapter.split(s.mesh.tp).local_shape
            times = times.plus(self._linears([GemmShape(tokens, outputs, inputs)], s, param_of(s)))
            passes = self._adapter_passes(s, is_output=".lora_B" in adapter.name)
            times = times.plus(self._streamed(tokens * max(outputs, inputs) * width, passes))
        return times

    def _adapter_passes(self, s: ResolvedConfig, *, is_output: bool) -> tuple[float, float]:
        """Return the passes over the output of an adapter's second matrix, or over the input of its first."""
        if self._fuses_adapters(s):
            return _FUSED_ADAPTER if is_output else _FUSED_ADAPTER[::-1]
        if is_output:
            return _ADAPTER_OUTPUT
        dropout = _ADAPTER_DROPOUT if s.lora.dropout else (0.0, 0.0)
        return _ADAPTER_INPUT[0] + dropout[0], _ADAPTER_INPUT[1] + dropout[1]

    def _fuses_adapters(self, s: ResolvedConfig) -> bool:
        return s.compile.enabled

    def _unpacking(self, s: ResolvedConfig, *, has_experts: bool) -> PassTimes:
        """Price what unpacks the packed weights of a block for each product with them."""
        numel = sum(math.prod(param.shape) for param in packed_params(self.job.shape, s.lora, has_experts=has_experts))
        return self._streamed(numel * (PACKED_BYTES + _WIDTHS[param_of(s)]), (1.0, 1.0))

    @property
    def _expert_numel(self) -> float:
        """Return the elements of one of the matrices that each expert has, of all experts."""
        experts = self.job.shape.experts
        return 0 if experts is None else experts.num_experts * experts.ffn_size * self.job.shape.hidden_size

    def _permutation(self, s: ResolvedConfig, passes: tuple[float, float] = _EXPERTS) -> PassTimes:
        """Price the copies of tokens for each of their experts, and the weighted sum of the results."""
        experts = self.job.shape.experts
        copies = self._tokens(s) / s.mesh.tp * (0 if experts is None else experts.num_chosen)
        return self._streamed(copies * self.job.shape.hidden_size * _WIDTHS[param_of(s)], passes)

    def _linears(self, linears: Iterable[GemmShape], s: ResolvedConfig, dtype: str) -> PassTimes:
        forward_s = input_s = weight_s = 0.0
        wide = _WIDTHS[param_of(s)]
        is_fused = s.compile.enabled and not self.job.cluster.gpu.is_cpu  # a thread runs one kernel at a time
        for linear in linears:
            is_routed = linear.is_routed
            forward_s += self._product_s(linear.m, linear.n, linear.k, dtype, linear.count, is_routed=is_routed)
            input_s += self._product_s(linear.m, linear.k, linear.n, dtype, linear.count, is_routed=is_routed)
            if not linear.is_frozen:
                accumulated_s = self._stream_s(linear.count * linear.n * linear.k * self._accumulation_bytes(s))
                product_s = self._product_s(linear.k, linear.n, linear.m, dtype, linear.count, is_weight=True)
                weight_s += max(product_s, accumulated_s) if is_fused else product_s + accumulated_s
            if _WIDTHS[dtype] < wide:
                narrow = self._narrow_bytes(s, dtype)
                forward_s += linear.count * self._stream_s(linear.m * linear.k * narrow)
                input_s += linear.count * self._stream_s(linear.m * linear.n * narrow)
        return PassTimes(forward_s, input_s, weight_s)

    def _narrow_bytes(self, s: ResolvedConfig, dtype: str) -> float:
        """Return the bytes to cast an element of a product's factor to a dtype that is narrower than the parameters'.

        It is written once as it is and once transposed; fused with what made it, nothing more is read.
        """
        wide = _WIDTHS[param_of(s)]
        narrow = (0.0 if s.compile.enabled else wide) + 2 * _WIDTHS[dtype]
        return narrow + (_FP4_READS * wide if dtype == "fp4" else 0.0)

    def _accumulation_bytes(self, s: ResolvedConfig) -> float:
        """Return the bytes to add an element's gradient to earlier micro-batches', beyond the product's own write."""
        if s.batch.accumulation == 1 or s.zero.stage >= 3:
            return 0.0
        return 2 * _WIDTHS["fp32" if s.precision.accumulate == "fp32" else param_of(s)]

    def _priced_product_s(
        self,
        m: float,
        n: float,
        k: float,
        dtype: str,
        count: float = 1.0,
        *,
        is_weight: bool = False,
        is_routed: bool = False,
    ) -> float:
        rates = self._matmul_rates(dtype)
        if rates is not None:
            return count * 2.0 * m * n * k / rates.at(m, n, k)[0]
        features = (m, n) if is_weight else (n, k)  # rows run along them, not along the tokens
        share = shape_share(m, n, k, self.job.cluster.gpu.num_cores, count, is_routed=is_routed)
        share *= alignment_share(*features, _WIDTHS[dtype])
        moved = (m * k + k * n) * _WIDTHS[dtype] + m * n * max(_WIDTHS[dtype], 2.0)
        return max(count * 2 * m * n * k / (self._rate(dtype) * share), self._stream_s(count * moved)) + self._kernel_s

    def _rate(self, dtype: str) -> float:
        """Return the FLOPs a second of the largest products, while a model trains."""
        return ceiling_flops_per_s(self.job, dtype) * self.job.cluster.gpu.fitted.matmul_share

    @property
    def _kernel_s(self) -> float:
        return self._measured.call_s or _KERNEL_S

    # --- attention -------------------------------------------------------------------------------------------------

    def attention(self, s: ResolvedConfig) -> PassTimes:
        """Price the attention of one block alone, without its linear layers; it is part of `block`."""
        key = s.mesh.tp, s.mesh.cp, s.batch.micro_size, self._numbers.of(s.precision)
        if key not in self._attentions:
            self._attentions[key] = self._attention(s)
        return self._attentions[key]

    def _attention(self, s: ResolvedConfig) -> PassTimes:
        shape, keys = self.job.shape, self.job.shape.num_keys_read(self.job.seq_len)
        heads = shape.num_heads / s.mesh.tp
        forward = 4.0 * self._tokens(s) * keys * heads * shape.head_dim
        rates = self._attention_rates(param_of(s))
        if rates is not None:
            forward_rate, backward_rate = rates.at(keys, self._tokens(s) * heads * shape.head_dim)
            return PassTimes(forward / forward_rate, forward / backward_rate)
        best = self._flash_rates(self._rate("bf16" if _WIDTHS[param_of(s)] <= 2 else product_dtype(s)))
        of_head = min(1.0, _LEAST_FLASH_SHARE + (1 - _LEAST_FLASH_SHARE) * shape.head_dim / _FULL_HEAD_DIM)
        forward_rate, backward_rate = (
            rate * of_head * keys / (keys + ramp) for rate, ramp in zip(best, _FLASH_RAMPS, strict=True)
        )
        return PassTimes(forward / 2 / forward_rate, 2.5 * forward / 2 / backward_rate)

    def _flash_rates(self, rate: float) -> tuple[float, float]:
        """Return the FLOPs a second of flash attention at its best, where products reach `rate`, in both passes.

        Its kernel does without what came with Hopper, and on AMD is the open one.
        """
        gpu, (forward_share, backward_share) = self.job.cluster.gpu, FLASH_SHARES
        rate = min(rate, _PLAIN_FLASH_CORE * max(gpu.num_cores, 1) * gpu.fitted.matmul_share)
        if gpu.name.startswith("mi"):
            peak = gpu.peak_flops_per_s["bf16"]
            return min(rate * forward_share, peak * _AMD_FLASH_SHARES[0]), peak * _AMD_FLASH_SHARES[1]
        return rate * forward_share, rate * backward_share

    # --- element-wise ----------------------------------------------------------------------------------------------

    def _streams(self, s: ResolvedConfig) -> PassTimes:
        """Price norms, residual sums, activation and rotation by their passes over each tensor."""
        shape, is_compiled, tokens, width = self.job.shape, s.compile.enabled, self._tokens(s), _WIDTHS[param_of(s)]
        around = [2 * (norm_bytes + _SUM) for norm_bytes in _NORM]  # of attention and of the feed-forward
        if shape.ffn == "gated":
            activation = _FUSED_GATE if is_compiled else _GATE
        else:
            activation = _FUSED_ACTIVATION if is_compiled else _ACTIVATION
        rotation = 0.0 if shape.num_positions else _FUSED_ROTATION if is_compiled else _ROTATION
        hidden = tokens / (s.mesh.tp if s.tensor.sequence_parallel else 1) * shape.hidden_size
        heads = tokens / s.mesh.tp * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        times = self._streamed(hidden * width, around).plus(self._streamed(heads * width, (rotation, rotation)))
        return times.plus(self._streamed(tokens / s.mesh.tp * self._ffn_width() * width, activation))

    def _ffn_width(self) -> float:
        """Return the elements a token of the activation, a mean over blocks."""
        shape, experts = self.job.shape, self.job.shape.experts
        if experts is None:
            return float(shape.ffn_size)
        chosen = experts.ffn_size * (experts.num_chosen + experts.num_shared)
        share = shape.num_expert_layers / shape.num_layers
        return chosen * share + shape.ffn_size * (1 - share)

    def _streamed(self, size: float, num_passes: Iterable[float]) -> PassTimes:
        """Price a forward and a backward that each pass so many times over `size` bytes."""
        return PassTimes(*(self._stream_s(size * factor) for factor in num_passes))

    def _stream_s(self, num_bytes: float) -> float:
        return num_bytes / self._bandwidth


def ceiling_flops_per_s(job: PlanJob, dtype: str) -> float:
    """Return the rate of the best measured product of that dtype, or the share of the peak that another reached."""
    ceilings, peaks = job.cluster.gpu.ceiling_flops_per_s, job.cluster.gpu.peak_flops_per_s
    if dtype in ceilings:
        return ceilings[dtype]
    shares = (reached / peaks[other] for other, reached in ceilings.items())
    return (peaks.get(dtype) or max(peaks.values())) * min(shares, default=_USUAL_CEILING_SHARE)


def shape_share(m: float, n: float, k: float, num_cores: int, count: float = 1.0, *, is_routed: bool = False) -> float:
    """Return the share of the full rate that `count` products [m, k] by [k, n] can reach at once on `num_cores`.

    Cores take the output's tiles in waves, of which the last is partly empty; each tile has a prologue and an
    epilogue. The inner dim may be split where tiles are few. The best tile counts, as libraries choose it. Where m is
    the mean of experts' tokens, each expert's last tile is half empty (the README of DeepGEMM: segments of experts are
    aligned to the block size of M).

    >>> shape_share(8192, 8192, 8192, 132) > 0.9 > 0.3 > shape_share(128, 128, 128, 132)
    True
    """
    best, cores = 0.0, max(num_cores, 1)
    for rows, columns, rate in _TILES:
        tiles = (m / rows + 0.5 if is_routed else math.ceil(m / rows)) * math.ceil(n / columns)
        filled = (m * n / (rows * columns)) / tiles
        for split in (1, 2, 4, 8):
            waves, depth = count * tiles * split / cores, k / split
            best = max(best, rate * filled * waves / math.ceil(waves) * depth / (depth + _PROLOGUE))
            if waves > 1:
                break
    return best


def alignment_share(n: float, k: float, width: float) -> float:
    """Return the share of the rate that rows of n and k elements of `width` bytes reach, by where they begin.

    Below 16 bytes tensor cores get inputs element by element: the chronicles of BLOOM's training list models whose
    heads have 108 or 150 dims at half the speed of those of 128 or 144. For cache lines: NVIDIA, Matrix Multiplication
    Background User's Guide, section 4.1.
    """
    share = 1.0
    for size in (n, k):
        num_bytes = round(size * width)
        unaligned = _OFF_LINE_SHARE if num_bytes % _VECTOR_BYTES == 0 else _OFF_VECTOR_SHARE
        share = min(share, 1.0 if num_bytes % _LINE_BYTES == 0 else unaligned)
    return share
