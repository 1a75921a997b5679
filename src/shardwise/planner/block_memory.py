"""What one block keeps of a micro-batch, and what its backward makes, on each rank; of the head and its loss too.

>>> from shardwise.models.presets import preset
>>> from shardwise.planner.hardware import Cluster, Gpu
>>> from shardwise.planner.shape import ModelShape
>>> gpu = Gpu(name="h100", memory_bytes=80 * 2**30, memory_bytes_per_s=3e12, peak_flops_per_s={"bf16": 989e12})
>>> cluster = Cluster(gpu=gpu, num_gpus=8, gpus_per_node=8, nic_bytes_per_s=5e10)
>>> job = Job(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=8, cluster=cluster)
>>> round(block_bytes(job, Strategy(tp=8), has_experts=False).kept / 2**20)
388
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from shardwise.layout.activations import FP32_BYTES, LayerShape, activation_bytes_per_layer
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.planner.job import Job, Practice, Strategy

MASK_BYTES: Final = 1.0
"""Kept of each element that dropout works on, beside its output."""

NUM_WIDE_OF_NORM: Final = 5
"""Tensors in fp32, of the input's size, that the backward of our norm has at once on a CPU; it is fused elsewhere."""

LOSS_ROWS: Final = MappingProxyType({"cpu": 2**18, "gpu": 2**26})
"""Logits that our loss widens at a time, twice: `shardwise.models.decoder`."""


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one micro-batch on a rank.

    Attributes:
        kept: between the block's forward and its backward.
        whole: kept by a block that recomputes nothing.
        working: made by the backward besides, at its highest.
        deferred: kept for the gradients of the weights, where these come later than that of the input.
        stream: of the residual stream, as it passes from block to block.
    """

    kept: float
    whole: float
    working: float
    deferred: float
    stream: float


def block_bytes(job: Job, strategy: Strategy, *, has_experts: bool) -> BlockBytes:
    """Of a block of a strategy; see `layout.activations` for what is kept.

    At its highest the backward of the feed-forward has the gradients of two inner tensors and of the stream, while all
    that was kept is there; that of attention with scores, the gradients of the scores; and that of a norm that is not
    fused some wide copies. Behind the feed-forward its inner tensors are gone. A feed-forward that takes some tokens
    of each sequence at a time keeps its input alone, and makes the inner tensors of so many tokens again.
    """
    s, shape = strategy, _layer_shape(job, strategy, has_experts)
    element_bytes = DTYPE_BYTES[s.param]
    ffn, num_inner = shape.ffn_size / s.tp, (4 if shape.is_gated else 2) - shape.fuses_gate
    is_chunked = s.chunk_tokens is not None and not has_experts
    if is_chunked:
        shape = replace(shape, ffn_size=0)

    def kept(mode: str, shape: LayerShape = shape) -> float:
        return activation_bytes_per_layer(
            shape,
            seq_len=job.seq_len,
            micro_size=s.micro_size,
            tp=s.tp,
            cp=s.cp,
            sequence_parallel=s.sequence_parallel,
            element_bytes=element_bytes,
            recompute=mode,  # type: ignore[arg-type]
        )

    tokens = job.seq_len / s.cp * s.micro_size
    hidden, heads = shape.hidden_size, shape.num_heads / s.tp
    num_streams = 2 if s.sequence_parallel else 1  # gathered, of the input and of its gradient
    in_ffn = element_bytes * ((1 if shape.fuses_gate else 2) * ffn + num_streams * hidden)
    is_over = 0.0 if is_chunked else -element_bytes * num_inner * ffn
    if is_chunked:
        share = min(1.0, (s.chunk_tokens or 1) * s.cp / job.seq_len)
        in_ffn = share * (in_ffn + element_bytes * num_inner * ffn) + element_bytes * hidden
    in_attention = is_over + (2 * element_bytes * heads * job.seq_len if shape.score_bytes else 0.0)
    stream = hidden / (s.tp if s.sequence_parallel else 1)
    in_norm = is_over + (FP32_BYTES * NUM_WIDE_OF_NORM * stream if job.cluster.gpu.name == "cpu" else 0.0)
    drops_scores = s.recompute == "selective" and job.practice.selective == "all-but-scores"
    products = 4 * hidden + 2 * shape.num_heads * shape.head_dim / s.tp + (0 if is_chunked else 4 * ffn)
    return BlockBytes(
        kept=kept("none", replace(shape, score_bytes=0.0)) if drops_scores else kept(s.recompute),
        whole=kept("none"),
        working=tokens * max(in_ffn, in_attention, in_norm),
        deferred=tokens * element_bytes * products,
        stream=tokens * element_bytes * stream,
    )


def kept_score_bytes(practice: Practice, element_bytes: int) -> float:
    """Kept of each score: by a fused softmax its output, by another also the one in fp32; by dropout its output too.

    >>> half = 2
    >>> [kept_score_bytes(Practice(attention=each), half) for each in ("flash", "fused-softmax", "unfused")]
    [0.0, 2.0, 6.0]
    >>> kept_score_bytes(Practice(attention="fused-softmax", has_dropout=True), half)  # Korthikanti et al., equation 1
    5.0
    """
    if practice.attention == "flash":
        return 0.0
    is_widened = practice.attention == "unfused" and element_bytes < FP32_BYTES
    softmax = element_bytes + (FP32_BYTES if is_widened else 0.0)
    return softmax + (element_bytes + MASK_BYTES if practice.has_dropout else 0.0)


def logits_bytes(job: Job, strategy: Strategy) -> float:
    """What the head and its loss take at their highest, for one micro-batch on a rank of the last stage."""
    s, practice = strategy, job.practice
    tokens = job.seq_len / s.cp * s.micro_size
    if s.chunk_tokens is not None:
        tokens = min(tokens, s.chunk_tokens)
    vocab = job.shape.vocab_size / (s.tp if practice.splits_logits else 1)
    if practice.logits_bytes is not None:
        return practice.logits_bytes * tokens * vocab
    rows = LOSS_ROWS["cpu" if job.cluster.gpu.name == "cpu" else "gpu"] / vocab
    return 2 * vocab * (DTYPE_BYTES[s.param] * tokens + FP32_BYTES * min(tokens, max(1, rows)))


def head_deferred_bytes(job: Job, strategy: Strategy) -> float:
    """What the gradient of the head's weight waits for, of one micro-batch: its input and the logits' gradient."""
    s, shape = strategy, job.shape
    vocab = shape.vocab_size / (s.tp if job.practice.splits_logits else 1)
    return DTYPE_BYTES[s.param] * job.seq_len / s.cp * s.micro_size * (shape.hidden_size + vocab)


def _layer_shape(job: Job, strategy: Strategy, has_experts: bool) -> LayerShape:
    shape, practice, experts = job.shape, job.practice, job.shape.experts
    ffn_size, num_routed = shape.ffn_size, 0
    if has_experts and experts is not None:
        ffn_size, num_routed = experts.ffn_size * (experts.num_chosen + experts.num_shared), experts.num_chosen
    return LayerShape(
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_size=ffn_size,
        is_gated=shape.ffn == "gated",
        score_bytes=kept_score_bytes(practice, DTYPE_BYTES[strategy.param]),
        mask_bytes=MASK_BYTES if practice.has_dropout else 0.0,
        norm_bytes=float(2 * FP32_BYTES) if practice.saves_norm_in_fp32 else 0.0,
        product_bytes=1.0 if strategy.matmul in ("fp8", "fp4") else None,
        fuses_gate=practice.fuses_gate and shape.ffn == "gated",
        products_share=0.5 if practice.selective == "half" else 1.0,
        num_routed=num_routed,
    )
