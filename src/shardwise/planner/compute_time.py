"""Price what one rank computes for one micro-batch (a block, the embedding, the head), and the optimizer's step.

A block is a list of kernels: matrix products, attention, and element-wise streams. A matrix product is looked up in
the machine's table where one was measured; else it takes its FLOPs at the rate that its shape can reach, or its bytes
at the memory's, whichever is longer (Williams et al. 2009, the roofline). Nothing here communicates.

>>> from shardwise.models.presets import preset
>>> from shardwise.planner.hardware import find_gpu
>>> from shardwise.planner.hardware import Cluster
>>> from shardwise.planner.shape import ModelShape
>>> cluster = Cluster(gpu=find_gpu("h100"), num_gpus=8, gpus_per_node=8, nic_bytes_per_s=5e10)
>>> job = PlanJob(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=8, cluster=cluster)
>>> block = ComputeTimeModel(job).block(Strategy(dp_shard=8, zero_stage=3))
>>> 1.5 < block.backward_s / block.forward_s < 3.0
True
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from shardwise.planner import memory_traffic as passes
from shardwise.planner.calibration import Corrections, LogInterpolator
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.memory_traffic import PassTimes
from shardwise.planner.profile import AttentionTime, MatmulTime

_WIDTHS: Final[Mapping[str, float]] = MappingProxyType(
    {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
)
_TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.75), (64, 64, 0.6))
"""Output tiles that libraries choose from, and the share of a core's rate that each reaches: a smaller one reads its
inputs more often."""
_PROLOGUE: Final = 96
"""Elements of the inner dim in which a tile's pipeline of loads fills and its result is written."""
_SPLIT_PROLOGUE: Final = 1.5 * _PROLOGUE
"""The same where the inner dim is split: partial outputs are added up after it."""
_USUAL_CEILING_SHARE: Final = 0.8
"""Share of its peak that a device's best product reaches, where none was measured in any dtype."""
_LINE_BYTES, _VECTOR_BYTES = 128, 16
_OFF_LINE_SHARE, _OFF_VECTOR_SHARE = 0.9, 0.1
"""Share of its rate that a product reaches whose rows begin on no cache line, on no vector's address; see
`alignment_share`."""
_FLASH_SHARES: Final = (0.97, 0.86)
"""Share of a large product's rate that flash attention reaches forward and backward over long sequences: Dao 2023
(arXiv 2307.08691), figures 4 to 6, on an A100; Shah et al. 2024 (arXiv 2407.08608), figures 5 and 6, on an H100."""
_FLASH_RAMPS: Final = (600.0, 1000.0)
"""Keys at which it loses half of that to the start and end of each row of tiles, and to masked halves."""
_FULL_HEAD_DIM: Final = 128
"""Elements of a head from which on attention's products reach their full rate."""
_LEAST_FLASH_SHARE: Final = 0.6
"""Share of that rate where heads are very small, so that those of 64 elements reach 0.8 of it."""
_PLAIN_FLASH_CORE: Final = 3.6e12
"""FLOPs a second that a core does at most, where nothing else limits it, in a kernel that does not use what came with
Hopper: FlashAttention-2 reaches 350 to 400 TFLOPS on 132 of them (Shah et al. 2024, figure 5)."""
_BATCHED_SHARE: Final = 0.6
"""Share of a large product's rate that unfused attention's batched products reach: small outputs, short inner dim."""
_FP4_READS: Final = 2.0
"""More reads of what is cast to fp4 than to fp8: its largest element is looked for, and a Hadamard matrix rotates it
(NVIDIA 2025, arXiv 2509.25149, section 4)."""
_KERNEL_S: Final = 2.5e-6
"""Seconds that a kernel takes on a device beyond its work: it starts, fills the cores and drains them."""
_DISPATCH_S: Final = 12e-6
"""Seconds that the host takes to launch one kernel from Python; they show where kernels are shorter."""


@dataclass(frozen=True)
class GemmShape:
    """Describe a linear layer on one rank: [m, k] by [k, n], `count` times side by side, as the products of experts
    run.
    """

    m: float
    n: float
    k: float
    count: float = 1.0


class ComputeTimeModel:
    """Time a job's kernels, and keep those that were priced, by shape."""

    def __init__(self, job: PlanJob) -> None:
        self.job = job
        self._products: dict[tuple[float, float, float, float, str, bool], float] = {}
        self._rates: dict[str, LogInterpolator | None] = {}
        self._blocks: dict[tuple[object, ...], PassTimes] = {}
        gpu = job.cluster.gpu
        self._is_cpu = gpu.is_cpu  # one thread runs one kernel after the other
        self._corrections = Corrections(
            job, lambda job, s: ComputeTimeModel(job).block(s), lambda job, s: ComputeTimeModel(job).head(s)
        )
        self._bandwidth = gpu.memory_bytes_per_s * gpu.fitted.memory_share
        if job.cluster.profile is not None and job.cluster.profile.stream_bytes_per_s:
            self._bandwidth = job.cluster.profile.stream_bytes_per_s

    def block(self, strategy: Strategy) -> PassTimes:
        """Price one micro-batch of one block: the mean over blocks where only some have experts."""
        s = strategy
        linears = (s.tp, s.cp, s.ep, s.micro_size, s.sequence_parallel, s.recompute, s.recompute_every)
        key = (*linears, s.product_dtype, s.param, s.accumulate, s.num_micro_batches > 1, s.zero_stage >= 3)
        if key not in self._blocks:
            self._blocks[key] = self._block(s)
        return self._blocks[key]

    def waits_for_launches(self, strategy: Strategy) -> bool:
        """Say whether the kernels of a block's forward are shorter than the host takes to launch them."""
        return self.block(strategy).forward_s <= self._launches_s

    def head(self, strategy: Strategy) -> PassTimes:
        """Price the last norm, the head and the loss, in `param` even where the blocks' products are narrower."""
        shape, traits = self.job.shape, self.job.traits
        tokens = self._tokens(strategy)
        linear = GemmShape(tokens, shape.vocab_size / strategy.tp, shape.hidden_size)
        products = self._linears([linear], strategy, strategy.param)
        width = _WIDTHS[strategy.param]
        logits = tokens * shape.vocab_size / (strategy.tp if traits.splits_logits else 1)
        if (traits.logits_bytes or 0.0) <= 2 * width:
            moved_bytes = (2 * width, 2 * width)
        else:
            # The log-softmax and its gradient are fp32's, and are cast to and from what is narrower.
            casts = 0.0 if width == _WIDTHS["fp32"] else width + _WIDTHS["fp32"]
            moved_bytes = (passes.LOSS_BYTES[0] + casts, passes.LOSS_BYTES[1] + casts)
        streams = PassTimes(*(self._stream_s(logits * each) for each in moved_bytes))
        return self._corrections.head(products.plus(streams), strategy, tokens)

    def embedding(self, strategy: Strategy) -> PassTimes:
        """Price the lookup, and the sum of its gradients."""
        wide = self._tokens(strategy) * self.job.shape.hidden_size * _WIDTHS[strategy.param]
        forward, backward = passes.EMBEDDING_PASSES
        return PassTimes(self._stream_s(forward * wide), 0.0, self._stream_s(backward * wide) * self._trains)

    def attention(self, strategy: Strategy) -> PassTimes:
        """Price the attention of one block alone, without its linear layers; it is part of `block`."""
        return self._attention(strategy)

    def step_s(self, strategy: Strategy, numel: float) -> float:
        """Return the seconds of the optimizer's step over `numel` elements that are stored on the device."""
        profile = self.job.cluster.profile
        measured = profile.step_bytes_per_s if profile is not None else 0.0
        width = passes.STEP_BYTES + (0.0 if strategy.param == "fp32" else passes.STEP_CAST_BYTES)
        return numel * width / (measured or self._bandwidth)

    @property
    def _trains(self) -> float:
        return 1.0 if self.job.traits.trains_all else 0.0

    def _tokens(self, strategy: Strategy) -> float:
        return self.job.seq_len * strategy.micro_size / strategy.cp

    def _block(self, s: Strategy) -> PassTimes:
        shape = self.job.shape
        attention = self._attention(s)
        streams = self._streams(s)
        products = self._linears(self._attention_linears(s), s, s.product_dtype)
        dense_share = 1.0 - shape.num_expert_layers / shape.num_layers
        if dense_share > 0:
            dense = self._linears(self._dense_linears(s), s, s.product_dtype)
            products = products.plus(dense.times(dense_share))
        if shape.experts is not None:
            experts = self._linears(self._expert_linears(s), s, s.product_dtype)
            products = products.plus(experts.plus(self._permutation(s)).times(1.0 - dense_share))
        kernels = self._launched(products.plus(attention).plus(streams))
        whole = self._corrections.block(kernels, s, self._tokens(s))
        streamed_s = max(0.0, streams.forward_s + whole.forward_s - kernels.forward_s)
        again = {
            "none": 0.0,
            "full": whole.forward_s,
            "selective": streamed_s if self.job.traits.attention == "flash" else attention.forward_s,
        }[s.recompute]
        return PassTimes(
            whole.forward_s,
            whole.backward_input_s,
            whole.backward_weight_s * self._trains,
            again / s.recompute_every,
        )

    def _launched(self, times: PassTimes) -> PassTimes:
        """Raise each pass to at least what the host takes to launch its kernels."""
        least_s = self._launches_s
        return PassTimes(
            max(times.forward_s, least_s),
            max(times.backward_input_s, least_s),
            max(times.backward_weight_s, least_s * passes.WEIGHT_KERNELS_SHARE),
            times.recompute_s,
        )

    @property
    def _launches_s(self) -> float:
        """Return the seconds to launch a block's forward; 0 where kernels were measured with it."""
        profile, traits = self.job.cluster.profile, self.job.traits
        if profile is not None and profile.call_s:
            return 0.0
        kernels = passes.NUM_COMPILED_KERNELS if traits.is_compiled else passes.NUM_KERNELS
        kernels += 0.0 if traits.attention == "flash" else passes.NUM_SOFTMAX_KERNELS
        return kernels * _DISPATCH_S

    # --- matrix products -------------------------------------------------------------------------------------------

    def _attention_linears(self, s: Strategy) -> list[GemmShape]:
        shape, tokens = self.job.shape, self._tokens(s)
        kv_heads = max(shape.num_kv_heads / s.tp, 1)
        width = (shape.num_heads / s.tp + 2 * kv_heads) * shape.head_dim
        return [
            GemmShape(tokens, width, shape.hidden_size),
            GemmShape(tokens, shape.hidden_size, shape.num_heads / s.tp * shape.head_dim),
        ]

    def _dense_linears(self, s: Strategy) -> list[GemmShape]:
        shape, tokens = self.job.shape, self._tokens(s)
        inner = shape.ffn_size / s.tp
        return [
            GemmShape(tokens, inner * (shape.num_ffn_matrices - 1), shape.hidden_size),
            GemmShape(tokens, shape.hidden_size, inner),
        ]

    def _expert_linears(self, s: Strategy) -> list[GemmShape]:
        """Return the experts' linear layers; each expert has its share of the tokens sent here, as many as were sent
        away.
        """
        shape, experts, tokens = self.job.shape, self.job.shape.experts, self._tokens(s)
        if experts is None:
            return []
        inner = experts.ffn_size / s.tp
        here = max(experts.num_experts / s.ep, 1)
        each = tokens * experts.num_chosen / here
        found = [
            GemmShape(tokens, experts.num_experts, shape.hidden_size),
            GemmShape(each, inner * (shape.num_ffn_matrices - 1), shape.hidden_size, here),
            GemmShape(each, shape.hidden_size, inner, here),
        ]
        if experts.num_shared:
            wide = experts.num_shared * inner
            found += [
                GemmShape(tokens, wide * (shape.num_ffn_matrices - 1), shape.hidden_size),
                GemmShape(tokens, shape.hidden_size, wide),
            ]
        return found

    def _permutation(self, s: Strategy) -> PassTimes:
        """Price the copies of tokens for each of their experts, and the weighted sum of the results.

        Each copy reads and writes; where kernels are fused, the experts' activation applies the weights.
        """
        experts = self.job.shape.experts
        if experts is None:
            return PassTimes()
        copied = self._tokens(s) * experts.num_chosen * self.job.shape.hidden_size * _WIDTHS[s.param]
        num_passes = passes.FUSED_EXPERTS_PASSES if self.job.traits.is_compiled else passes.EXPERTS_PASSES
        return PassTimes(*(self._stream_s(each * copied) for each in num_passes))

    def _linears(self, linears: Iterable[GemmShape], s: Strategy, dtype: str) -> PassTimes:
        forward_s = input_s = weight_s = 0.0
        wide = _WIDTHS[s.param]
        for each in linears:
            forward_s += self._product_s(each.m, each.n, each.k, dtype, each.count)
            input_s += self._product_s(each.m, each.k, each.n, dtype, each.count)
            accumulated_s = self._stream_s(each.count * each.n * each.k * self._accumulation_bytes(s))
            product_s = self._product_s(each.k, each.n, each.m, dtype, each.count, is_weight=True)
            is_fused = self.job.traits.is_compiled and not self._is_cpu
            weight_s += max(product_s, accumulated_s) if is_fused else product_s + accumulated_s
            if _WIDTHS[dtype] < wide:
                # Once as it is and once transposed; fused with what made it, nothing more is read.
                narrow = (0.0 if self.job.traits.is_compiled else wide) + 2 * _WIDTHS[dtype]
                narrow += _FP4_READS * wide if dtype == "fp4" else 0.0
                forward_s += each.count * self._stream_s(each.m * each.k * narrow)
                input_s += each.count * self._stream_s(each.m * each.n * narrow)
        return PassTimes(forward_s, input_s, weight_s)

    def _accumulation_bytes(self, s: Strategy) -> float:
        """Return the bytes to add a weight's gradient to earlier micro-batches'; the product's own write is not
        counted.
        """
        if s.num_micro_batches == 1 or s.zero_stage >= 3:
            return 0.0
        return 2 * _WIDTHS["fp32" if s.accumulate == "fp32" else s.param]

    def _product_s(
        self, m: float, n: float, k: float, dtype: str, count: float = 1.0, *, is_weight: bool = False
    ) -> float:
        key = (m, n, k, count, dtype, is_weight)
        if key not in self._products:
            rates = self._matmul_rates(dtype)
            measured_s = None if rates is None else count * 2.0 * m * n * k / rates.at(m, n, k)[0]
            self._products[key] = self._roofline_s(*key) if measured_s is None else measured_s
        return self._products[key]

    def _matmul_rates(self, dtype: str) -> LogInterpolator | None:
        if dtype not in self._rates:
            profile = self.job.cluster.profile
            self._rates[dtype] = None if profile is None else _matmul_rates(profile.matmuls, dtype)
        return self._rates[dtype]

    def _roofline_s(self, m: float, n: float, k: float, count: float, dtype: str, is_weight: bool) -> float:
        cores = self.job.cluster.gpu.num_cores
        features = (m, n) if is_weight else (n, k)  # rows run along them, not along the tokens
        share = shape_share(m, n, k, cores, count) * alignment_share(*features, _WIDTHS[dtype])
        wide = max(_WIDTHS[dtype], 2.0)
        moved = (m * k + k * n) * _WIDTHS[dtype] + m * n * wide
        return max(count * 2 * m * n * k / (self._rate(dtype) * share), self._stream_s(count * moved)) + self._kernel_s

    def _rate(self, dtype: str) -> float:
        """Return the FLOPs a second of the largest products, while a model trains."""
        return ceiling_flops_per_s(self.job, dtype) * self.job.cluster.gpu.fitted.matmul_share

    @property
    def _kernel_s(self) -> float:
        profile = self.job.cluster.profile
        if profile is not None and profile.call_s:
            return profile.call_s
        return _KERNEL_S

    def _stream_s(self, num_bytes: float) -> float:
        return num_bytes / self._bandwidth

    # --- attention -------------------------------------------------------------------------------------------------

    def _attention(self, s: Strategy) -> PassTimes:
        shape, traits = self.job.shape, self.job.traits
        keys = self.job.seq_len if shape.window is None else min(self.job.seq_len, 2 * shape.window)
        heads = shape.num_heads / s.tp
        forward = 4.0 * self._tokens(s) * keys * heads * shape.head_dim
        profile = self.job.cluster.profile
        rates = None if profile is None else _attention_rates(profile.attentions, s.param)
        if rates is not None:
            forward_rate, backward_rate = rates.at(keys, self._tokens(s) * heads * shape.head_dim)
            return PassTimes(forward / forward_rate, forward / backward_rate)
        rate = self._rate("bf16" if _WIDTHS[s.param] <= 2 else s.product_dtype)
        if traits.attention == "flash":
            rate = self._flash_rate(rate)
            rate *= min(1.0, _LEAST_FLASH_SHARE + (1 - _LEAST_FLASH_SHARE) * shape.head_dim / _FULL_HEAD_DIM)
            forward_share, backward_share = (
                share * keys / (keys + ramp) for share, ramp in zip(_FLASH_SHARES, _FLASH_RAMPS, strict=True)
            )
            return PassTimes(forward / 2 / (rate * forward_share), 2.5 * forward / 2 / (rate * backward_share))
        scores = self._tokens(s) * keys * heads * _WIDTHS[s.param]
        written_out = passes.WIDE_SOFTMAX_PASSES if s.param == "fp32" else passes.SOFTMAX_PASSES
        is_fused = traits.attention == "fused-softmax"
        forward_passes, backward_passes = passes.FUSED_SOFTMAX_PASSES if is_fused else written_out
        dropout = passes.DROPOUT_PASSES if traits.has_dropout else 0.0
        batched = rate * _BATCHED_SHARE * min(shape.head_dim / _FULL_HEAD_DIM, 1.0) ** 0.5
        batched *= alignment_share(shape.head_dim, shape.head_dim, _WIDTHS[s.param])
        return PassTimes(
            forward / batched + self._stream_s(scores * (forward_passes + dropout)),
            2 * forward / batched + self._stream_s(scores * (backward_passes + dropout)),
        )

    def _flash_rate(self, rate: float) -> float:
        """Return the FLOPs a second of flash attention at its best, where products reach `rate`."""
        gpu = self.job.cluster.gpu
        return min(rate, _PLAIN_FLASH_CORE * max(gpu.num_cores, 1) * gpu.fitted.matmul_share)

    # --- element-wise ----------------------------------------------------------------------------------------------

    def _streams(self, s: Strategy) -> PassTimes:
        """Price norms, residual sums, activation, rotation and dropout by their passes over each tensor."""
        shape, traits = self.job.shape, self.job.traits
        tokens, width = self._tokens(s), _WIDTHS[s.param]
        whole = tokens / (s.tp if s.sequence_parallel else 1) * shape.hidden_size * width
        is_one_kernel = traits.is_compiled or not traits.saves_norm_in_fp32
        norm = passes.NORM_PASSES if is_one_kernel else passes.NORM_IN_FP32_PASSES
        dropout = passes.DROPOUT_PASSES if traits.has_dropout else 0.0
        # Each of them twice: of attention and of the feed-forward.
        around = [2 * (each + added + dropout) for each, added in zip(norm, passes.SUM_PASSES, strict=True)]
        inner = tokens / s.tp * self._ffn_width() * width
        if shape.ffn == "gated":
            activation = passes.FUSED_GATE_PASSES if traits.is_compiled else passes.GATE_PASSES
        else:
            is_fused = traits.is_compiled or traits.attention == "fused-softmax"
            activation = passes.FUSED_ACTIVATION_PASSES if is_fused else passes.ACTIVATION_PASSES
        heads = tokens / s.tp * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * width
        rotation = passes.FUSED_ROTATION_PASSES if traits.is_compiled else passes.ROTATION_PASSES
        rotated = 0.0 if shape.num_positions else heads * rotation
        return PassTimes(
            *(self._stream_s(whole * a + inner * b + rotated) for a, b in zip(around, activation, strict=True))
        )

    def _ffn_width(self) -> float:
        """Return the elements a token of the activation, a mean over blocks."""
        shape, experts = self.job.shape, self.job.shape.experts
        if experts is None:
            return float(shape.ffn_size)
        chosen = experts.ffn_size * (experts.num_chosen + experts.num_shared)
        share = shape.num_expert_layers / shape.num_layers
        return chosen * share + shape.ffn_size * (1 - share)


def ceiling_flops_per_s(job: PlanJob, dtype: str) -> float:
    """Return the rate of the best measured product of that dtype, or the share of the peak that another reached."""
    gpu = job.cluster.gpu
    if dtype in gpu.ceiling_flops_per_s:
        return gpu.ceiling_flops_per_s[dtype]
    shares = [reached / gpu.peak_flops_per_s[each] for each, reached in gpu.ceiling_flops_per_s.items()]
    peak = gpu.peak_flops_per_s.get(dtype) or max(gpu.peak_flops_per_s.values())
    return peak * (min(shares) if shares else _USUAL_CEILING_SHARE)


def shape_share(m: float, n: float, k: float, num_cores: int, count: float = 1.0) -> float:
    """Return the share of the full rate that a product can reach on the cores.

    Cores take the output's tiles in waves, of which the last is partly empty; each tile has a prologue and an
    epilogue. The inner dim may be split where tiles are few. The best tile counts, as libraries choose it.

    >>> shape_share(8192, 8192, 8192, 132) > 0.9 > 0.3 > shape_share(128, 128, 128, 132)
    True

    Args:
        m, n, k: the product is [m, k] by [k, n].
        num_cores: of the device.
        count: how many such products run at once.
    """
    best = 0.0
    cores = max(num_cores, 1)
    for rows, columns, rate in _TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        filled = (m * n / (rows * columns)) / tiles
        for split in (1, 2, 4, 8):
            waves = count * tiles * split / cores
            depth = k / split
            prologue = _PROLOGUE if split == 1 else _SPLIT_PROLOGUE
            share = rate * filled * waves / math.ceil(waves) * depth / (depth + prologue)
            best = max(best, share)
            if waves > 1:
                break
    return best


def alignment_share(n: float, k: float, width: float) -> float:
    """Return the share of the rate that rows reach by where they begin: on a cache line, a vector's address, or
    neither.

    Below 16 bytes tensor cores get inputs element by element: the chronicles of BLOOM's training list models whose
    heads have 108 or 150 dims at half the speed of those of 128 or 144. Source of the other share: NVIDIA, Matrix
    Multiplication Background User's Guide, section 4.1 (A100: multiples of 128 bytes).

    Args:
        n, k: elements of the rows of the two operands.
        width: bytes of an element.
    """
    share = 1.0
    for size in (n, k):
        num_bytes = round(size * width)
        unaligned = _OFF_LINE_SHARE if num_bytes % _VECTOR_BYTES == 0 else _OFF_VECTOR_SHARE
        share = min(share, 1.0 if num_bytes % _LINE_BYTES == 0 else unaligned)
    return share


def _matmul_rates(table: Iterable[MatmulTime], dtype: str) -> LogInterpolator | None:
    """Fit FLOPs a second over m, n and k; None where the table has no row of this dtype."""
    rows = [each for each in table if each.dtype == dtype]
    points = [((each.m, each.n, each.k), (2.0 * each.m * each.n * each.k / each.seconds,)) for each in rows]
    return LogInterpolator(points) if points else None


def _attention_rates(table: Iterable[AttentionTime], dtype: str) -> LogInterpolator | None:
    """Fit the forward's FLOPs by the seconds of each pass, over keys, and tokens times the heads' elements."""
    points = []
    for each in table:
        if each.dtype == dtype:
            width = each.seq_len * each.num_heads * each.head_dim
            flops = 4.0 * width * each.seq_len
            points.append(((each.seq_len, width), (flops / each.forward_s, flops / each.backward_s)))
    return LogInterpolator(points) if points else None
