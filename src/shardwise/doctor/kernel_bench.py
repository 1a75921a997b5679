"""Times kernels on one rank while its neighbours run the same: products, attention, blocks, streams, steps.

Each function yields rows of a profile's tables, or returns its fields by name; all ranks make the same calls.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.collectives import Comm
from shardwise.doctor.collective_bench import slowest_of_each
from shardwise.models.decoder import DecoderBlock, DecoderConfig, DecoderLinear, RMSNorm, lm_loss, rope_tables
from shardwise.models.decoder_attention import attend_densely
from shardwise.planner.profile import AttentionTime, BlockTime, HeadTime, MatmulTime

# Shapes for which a call is expected to take more seconds are left out.
_MAX_CALL_S: Final = 0.3
# A call runs up to so many blocks in a row: one small block alone would find its weights in the caches, while in
# training other blocks have used the caches since.
_MAX_CHAINED: Final = 4
_STREAM_NUMEL: Final = 4 * 2**20
_STEP_NUMEL: Final = 4 * 2**20
_STEP_BYTES: Final = 30
"""Bytes a parameter of a fused Adam step: it reads weight, gradient and two moments, writes the weight and the moments,
and makes a 16-bit copy."""
_COPY_BYTES: Final = 64 * 2**20


@dataclass(frozen=True)
class BenchSizes:
    """Lists the shapes that are measured: those of small decoder layers, and on a GPU those of large ones.

    Attributes:
        shapes: (hidden size, feed-forward size, heads).
        seq_lens: tokens of one sequence, which is one micro-batch.
        vocab_sizes: vocabulary sizes of the heads.
        dtypes: dtypes in which everything is measured.
    """

    shapes: tuple[tuple[int, int, int], ...]
    seq_lens: tuple[int, ...]
    vocab_sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


CPU_SIZES: Final = BenchSizes(
    shapes=((320, 896, 4), (512, 1536, 8), (768, 2048, 12), (1024, 2816, 16), (2048, 5632, 32)),
    seq_lens=(128, 512, 2048),
    vocab_sizes=(4096, 16384),
    dtypes=(torch.float32, torch.bfloat16),
)
GPU_SIZES: Final = BenchSizes(
    shapes=((1024, 2816, 16), (2048, 5632, 16), (4096, 14336, 32), (8192, 28672, 64)),
    seq_lens=(1024, 4096, 8192),
    vocab_sizes=(32_000, 128_256),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
)
QUICK_SIZES: Final = BenchSizes(
    shapes=((320, 896, 4), (512, 1536, 8)),
    seq_lens=(128, 512),
    vocab_sizes=(4096,),
    dtypes=(torch.float32, torch.bfloat16),
)


class BestRate:
    """Keeps the best rate of the work so far, so that all ranks leave out the same calls that would take too long."""

    def __init__(self, watch: RankTimer) -> None:
        self.watch = watch
        self._flops_per_s = 0.0

    def allows(self, flops: float) -> bool:
        """Say whether a call of so many FLOPs is short enough and there is time left; all ranks call it."""
        return not self.watch.is_late() and self.num_within(flops) >= 1

    def num_within(self, flops: float) -> float:
        """Return how many times so many FLOPs fit into one call; infinite before the first rate is known."""
        return _MAX_CALL_S * self._flops_per_s / flops if self._flops_per_s else math.inf

    def note(self, flops: float, seconds: float) -> None:
        """Note a call's rate if it is the best so far; a slow moment of the machine must not end a table."""
        self._flops_per_s = max(self._flops_per_s, flops / seconds)


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name in the config.

    >>> name_of(torch.bfloat16)
    'bf16'
    """
    return {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16"}.get(dtype, "bf16")


def matmul_times(watch: RankTimer, sizes: BenchSizes) -> Iterator[MatmulTime]:
    """Time the products of decoder layers: forward, input gradient and weight gradient, the small ones first."""
    for dtype in sizes.dtypes:
        pace = BestRate(watch)
        for m, n, k in sorted(_product_shapes(sizes), key=lambda each: each[0] * each[1] * each[2]):
            if pace.allows(2.0 * m * n * k):
                seconds = _product_s(watch, dtype, m, n, k, is_weight=k in sizes.seq_lens)
                pace.note(2.0 * m * n * k, seconds)
                yield MatmulTime(dtype=name_of(dtype), m=m, n=n, k=k, seconds=seconds)


def attention_times(watch: RankTimer, sizes: BenchSizes) -> Iterator[AttentionTime]:
    """Time the decoder's own dense attention, forward and backward."""
    device = watch.comm.device
    for dtype in sizes.dtypes:
        pace = BestRate(watch)
        for (hidden, _, heads), seq_len in product(sizes.shapes, sizes.seq_lens):
            flops = 4.0 * hidden * seq_len**2
            if not pace.allows(2.5 * flops):
                continue
            q, k, v = (
                torch.randn(1, heads, seq_len, hidden // heads, device=device, dtype=dtype, requires_grad=True)
                for _ in range(3)
            )  # [1, H, S, D]
            forward_s, backward_s = _pass_times(watch, lambda q, k, v: attend_densely(q, k, v, 0), (q, k, v))
            pace.note(2.5 * flops, backward_s)
            yield AttentionTime(
                dtype=name_of(dtype),
                num_heads=heads,
                head_dim=hidden // heads,
                seq_len=seq_len,
                forward_s=forward_s,
                backward_s=backward_s,
            )


def block_times(watch: RankTimer, sizes: BenchSizes) -> Iterator[BlockTime]:
    """Time whole decoder blocks; what products and attention do not explain is the time of element-wise kernels."""
    for dtype in sizes.dtypes:
        pace = BestRate(watch)
        for (hidden, ffn, heads), seq_len in product(sizes.shapes, sizes.seq_lens):
            flops = 4.0 * seq_len * (4 * hidden**2 + 3 * hidden * ffn + hidden * seq_len)
            if pace.allows(flops):
                num_chained = int(min(_MAX_CHAINED, pace.num_within(flops)))
                times = block_time(watch, dtype, seq_len, (hidden, ffn, heads), num_chained)
                pace.note(flops, times.backward_s)
                yield times


def head_times(watch: RankTimer, sizes: BenchSizes) -> Iterator[HeadTime]:
    """Time the last norm, the head and the loss, forward and backward."""
    device = watch.comm.device
    for dtype in sizes.dtypes:
        pace = BestRate(watch)
        for (hidden, _, _), vocab_size, num_tokens in product(sizes.shapes, sizes.vocab_sizes, sizes.seq_lens):
            flops = 4.0 * num_tokens * hidden * vocab_size
            if not pace.allows(flops):
                continue
            norm = RMSNorm(hidden, 1e-5, device=device, dtype=dtype)
            head = DecoderLinear(hidden, vocab_size, device=device, dtype=dtype)
            x = torch.randn(1, num_tokens, hidden, device=device, dtype=dtype, requires_grad=True)  # [1, S, E]
            targets = torch.randint(vocab_size, (1, num_tokens), device=device)  # [1, S]
            run = partial(_loss, norm, head, targets)
            forward_s, backward_s = _pass_times(watch, run, (x, norm.weight, head.weight))
            pace.note(flops, backward_s)
            yield HeadTime(
                dtype=name_of(dtype),
                num_tokens=num_tokens,
                hidden_size=hidden,
                vocab_size=vocab_size,
                forward_s=forward_s,
                backward_s=backward_s,
            )


def speeds(watch: RankTimer) -> dict[str, float]:
    """Measure the speed of element-wise streams and of a fused step, and the time of a call, by the profile's field."""
    device = watch.comm.device
    left, right = (torch.randn(_STREAM_NUMEL, device=device) for _ in range(2))  # [N]
    stream_s = watch.time_s(lambda: torch.mul(left, right))
    weight = torch.nn.Parameter(torch.randn(_STEP_NUMEL, device=device))  # [N]
    weight.grad = torch.randn_like(weight)
    narrow = torch.empty(_STEP_NUMEL, device=device, dtype=torch.bfloat16)  # [N]
    optimizer = torch.optim.AdamW([weight], fused=True)

    def step() -> None:
        optimizer.step()
        narrow.copy_(weight.detach())

    step_s = watch.time_s(step)
    small = torch.ones(8, 8, device=device, requires_grad=True)
    return {
        "stream_bytes_per_s": 3 * left.nbytes / stream_s,
        "step_bytes_per_s": _STEP_BYTES * _STEP_NUMEL / step_s,
        "call_s": watch.time_s(lambda: F.linear(small, small)),
    }


def copy_speeds(watch: RankTimer) -> dict[str, float]:
    """Measure bytes a second of copies between memories, by the profile's name; with a GPU, host memory is pinned."""
    device = watch.comm.device
    is_cuda = device.type == "cuda"
    hosts = [torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
    ends = {"host->host": (hosts[0], hosts[1])}
    if is_cuda:
        on_device = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
        ends["host->device"] = (hosts[0], on_device)
        ends["device->host"] = (on_device, hosts[1])
        ends["device->device"] = (on_device, torch.empty_like(on_device))
    return {name: _COPY_BYTES / watch.time_s(partial(target.copy_, source)) for name, (source, target) in ends.items()}


def _product_shapes(sizes: BenchSizes) -> set[tuple[int, int, int]]:
    shapes = set()
    for (hidden, ffn, _), tokens in product(sizes.shapes, sizes.seq_lens):
        for n, k in ((hidden, hidden), (ffn, hidden), (hidden, ffn)):
            shapes |= {(tokens, n, k), (n, k, tokens)}
    return shapes


def _product_s(watch: RankTimer, dtype: torch.dtype, m: int, n: int, k: int, *, is_weight: bool) -> float:
    """Time a product as autograd makes it: by a weight and by its transpose, or a transposed gradient by an input."""
    left, right = (torch.randn(*shape, device=watch.comm.device).to(dtype) for shape in ((m, k), (k, n)))
    turned_left, turned_right = left.t().contiguous().t(), right.t().contiguous().t()
    if is_weight:
        return watch.time_s(lambda: torch.mm(turned_left, right))
    return sum(watch.times_s(lambda: torch.mm(left, turned_right), lambda: torch.mm(left, right))) / 2


def block_time(
    watch: RankTimer, dtype: torch.dtype, seq_len: int, shape: tuple[int, int, int], num_chained: int
) -> BlockTime:
    """Time the forward and the backward of one decoder block.

    Args:
        watch: the timer of this rank.
        dtype: of parameters and activations.
        seq_len: tokens of the one sequence.
        shape: hidden size, feed-forward size and heads.
        num_chained: blocks that run one after another in a measured call; the result is that of one.
    """
    hidden, ffn, heads = shape
    config = DecoderConfig(
        vocab_size=8,
        num_layers=1,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=ffn,
        max_seq_len=seq_len,
    )
    device = watch.comm.device
    blocks = [DecoderBlock(config, device=device, dtype=dtype) for _ in range(num_chained)]
    x = torch.randn(1, seq_len, hidden, device=device, dtype=dtype, requires_grad=True)  # [1, S, E]
    rope = rope_tables(seq_len, config.head_dim, config.rope_theta, x)
    inputs = (x, *(parameter for block in blocks for parameter in block.parameters()))
    forward_s, backward_s = _pass_times(watch, lambda x, *_: reduce(lambda x, block: block(x, rope), blocks, x), inputs)
    return BlockTime(
        dtype=name_of(dtype),
        seq_len=seq_len,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=config.head_dim,
        ffn_size=ffn,
        forward_s=forward_s / num_chained,
        backward_s=backward_s / num_chained,
    )


def _loss(norm: RMSNorm, head: DecoderLinear, targets: Tensor, x: Tensor, *_: Tensor) -> Tensor:
    return lm_loss(head(norm(x)), targets)[0]


def _pass_times(watch: RankTimer, run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward, which makes the gradients of all inputs."""
    made: list[Tensor] = []
    grad = torch.randn_like(run(*inputs))

    def forward() -> None:
        made.append(run(*inputs))

    def backward() -> Any:
        return torch.autograd.grad(made.pop(), inputs, grad)

    forward_s, backward_s = watch.times_s(forward, backward)
    return forward_s, backward_s


_MIN_CALLS: Final = 3
_MAX_CALLS: Final = 200
# A synchronisation of a GPU takes longer than a small kernel, so this many calls share one.
_CALLS_A_SYNC: Final = 10


class RankTimer:
    """Times calls on all ranks at once.

    Args:
        comm: the collectives among all ranks.
        budget_s: seconds of one measurement, about.
        limit_s: seconds of all measurements; after them `is_late` is true, on all ranks or on none.
    """

    def __init__(self, comm: Comm, budget_s: float, limit_s: float = float("inf")) -> None:
        self.comm = comm
        self._budget_s = budget_s
        self._deadline_s = time.perf_counter() + limit_s
        self._is_cuda = comm.device.type == "cuda"

    def is_late(self) -> bool:
        """Say whether the time for all measurements is over; all ranks call it."""
        return self.slowest(time.perf_counter() - self._deadline_s) > 0

    def slowest(self, value: float) -> float:
        """Return the largest of the ranks' values; all ranks call it."""
        return self._slowest_of_each([value])[0]

    def _slowest_of_each(self, values: list[float]) -> list[float]:
        return slowest_of_each(self.comm, values) if self.comm.world_size > 1 else values

    def time_s(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call, the median of several; all ranks call it."""
        return self.times_s(call)[0]

    def times_s(self, *calls: Callable[[], object], min_calls: int = _MIN_CALLS) -> tuple[float, ...]:
        """Return the seconds of each of some calls that are made in turn: the second may use the first one's result."""
        group = _CALLS_A_SYNC if self._is_cuda and len(calls) == 1 else 1
        self._round(calls, group)
        rounds = [self._round(calls, group)]
        num_rounds = int(self._budget_s / max(1e-9, self.slowest(sum(rounds[0]))))
        rounds += [self._round(calls, group) for _ in range(max(min_calls, min(_MAX_CALLS, num_rounds)) - 1)]
        slowest = self._slowest_of_each([seconds for each in rounds for seconds in each])
        return tuple(statistics.median(slowest[index :: len(calls)]) / group for index in range(len(calls)))

    def _round(self, calls: tuple[Callable[[], object], ...], group: int) -> list[float]:
        times = []
        for call in calls:
            start_s = time.perf_counter()
            for _ in range(group):
                call()
            if self._is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start_s)
        return times
