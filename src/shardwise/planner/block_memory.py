"""Count the bytes that a block, or the head and its loss, keeps of a micro-batch and makes in its backward, per rank.

What is kept follows from formulas of the literature (`layout.activation_bytes`). Of what a backward makes, the largest
tensors alone are counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from shardwise.layout.activation_bytes import FP32_BYTES, LayerShape, activation_bytes_per_layer
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.planner.job import FrameworkTraits, PlanJob, Strategy
from shardwise.schedule.registry import recipe_of

MASK_BYTES: Final = 1.0
"""Bytes that are kept of each element that dropout works on, in addition to its output."""

LOSS_LOGITS: Final = 2**26
"""How many logits our loss widens at a time; source: `shardwise.models.decoder`."""

LEAST_ROWS: Final = 1024
"""The fewest tokens of which a head computes logits at a time; source: `shardwise.tensor.cross_entropy`."""


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


def block_bytes(job: PlanJob, strategy: Strategy, *, has_experts: bool) -> BlockBytes:
    """Return the bytes of one block under a strategy.

    A feed-forward that takes some tokens of each sequence at a time keeps only its input. Heads that are exchanged for
    tokens are kept together with what attention gave them.

    Args:
        job: the model's shape, the sequence length in tokens, the cluster and the framework's traits.
        strategy: how the job is split; its micro-batch, dtypes and recomputation set the sizes.
        has_experts: whether the block's feed-forward is a layer of experts.
    """
    s, shape = strategy, _layer_shape(job, strategy, has_experts)
    is_chunked = s.chunk_tokens is not None and not has_experts
    kept_shape = replace(shape, ffn_size=0) if is_chunked else shape

    def kept(mode: str, shape: LayerShape = kept_shape) -> float:
        return activation_bytes_per_layer(
            shape,
            seq_len=job.seq_len,
            micro_size=s.micro_size,
            tp=s.tp,
            cp=s.cp,
            sequence_parallel=s.sequence_parallel,
            element_bytes=DTYPE_BYTES[s.param],
            recompute=mode,  # type: ignore[arg-type]
        )

    feature = job.seq_len / s.cp * s.micro_size * DTYPE_BYTES[s.param]
    mixed = feature * shape.num_heads * shape.head_dim / s.tp if s.cp > 1 and s.transport == "ulysses" else 0.0
    drops_scores = s.recompute == "selective" and job.traits.selective == "all-but-scores"
    at_rest = kept("none", replace(kept_shape, score_bytes=0.0)) if drops_scores else kept(s.recompute)
    # Whole sequences that a recomputation gathers, for attention and feed-forward.
    num_gathered = 2 - is_chunked if s.sequence_parallel and s.recompute != "none" else 0
    stream = feature * shape.hidden_size / (s.tp if s.sequence_parallel else 1)
    return BlockBytes(
        kept=at_rest + (mixed if s.recompute != "full" else 0.0),
        whole=kept("none") + mixed,
        again=feature * num_gathered * shape.hidden_size,
        working=stream + _made_bytes(job, s, shape, is_chunked=is_chunked),
        deferred=feature * _deferred_size(shape, s, 0.0 if is_chunked else shape.ffn_size / s.tp),
        stream=stream,
    )


def _made_bytes(job: PlanJob, strategy: Strategy, shape: LayerShape, *, is_chunked: bool) -> float:
    """Return the most bytes that a block's backward makes, beside what was kept and the gradient of the stream.

    The last matrix of the feed-forward makes its own gradient and that of its input; the gradients of two inner tensors
    follow. A feed-forward in parts makes its inner tensors again, while gradients of weights are summed over the parts.
    Scores that are kept have two gradients of their own.
    """
    s, hidden, ffn = strategy, shape.hidden_size, shape.ffn_size / strategy.tp
    feature = job.seq_len / s.cp * s.micro_size * DTYPE_BYTES[s.param]
    weight = 0.0 if job.traits.reduces_in_place else DTYPE_BYTES[s.param] * hidden * ffn
    gathered = hidden if s.sequence_parallel else 0.0
    num_inner = (4 if shape.is_gated else 2) - shape.fuses_gate
    if is_chunked:
        part = feature * min(1.0, (s.chunk_tokens or 1) * s.cp / job.seq_len)
        return feature * hidden + part * ((num_inner + 1) * ffn + 2 * gathered) + num_inner * weight
    scores = 2 * shape.num_heads / s.tp * job.seq_len - hidden if shape.score_bytes else 0.0
    return max(feature * (ffn + gathered) + weight, feature * (2 - shape.fuses_gate) * ffn, feature * scores)


def _defers(strategy: Strategy) -> bool:
    """Say whether gradients of weights come later than those of inputs."""
    return strategy.pp > 1 and recipe_of(strategy.schedule).splits_backward


def _deferred_size(shape: LayerShape, strategy: Strategy, ffn: float) -> float:
    """Return the features of a token in inputs and outputs' gradients that wait for a later weight gradient.

    Columns that gather a sequence do not wait, and rows wait with whole gradients.
    """
    s = strategy
    if not _defers(s):
        return 0.0
    mixed, keys = shape.num_heads * shape.head_dim / s.tp, max(shape.num_kv_heads / s.tp, 1) * shape.head_dim
    rows = 2 * shape.hidden_size + mixed + ffn
    columns = 2 * shape.hidden_size + mixed + 2 * keys + (2 if shape.is_gated else 1) * ffn
    return rows + (0.0 if s.sequence_parallel else columns)


def kept_score_bytes(traits: FrameworkTraits, element_bytes: int) -> float:
    """Return the bytes kept of each attention score.

    A fused softmax keeps its output, any other also its output in fp32, and dropout its own output and mask.

    >>> half = 2
    >>> [kept_score_bytes(FrameworkTraits(attention=each), half) for each in ("flash", "fused-softmax", "unfused")]
    [0.0, 2.0, 6.0]
    >>> kept_score_bytes(FrameworkTraits(attention="fused-softmax", has_dropout=True), half)  # Korthikanti, equation 1
    5.0
    """
    if traits.attention == "flash":
        return 0.0
    is_widened = traits.attention == "unfused" and element_bytes < FP32_BYTES
    softmax = element_bytes + (FP32_BYTES if is_widened else 0.0)
    return softmax + (element_bytes + MASK_BYTES if traits.has_dropout else 0.0)


def head_bytes(job: PlanJob, strategy: Strategy) -> HeadBytes:
    """Return the bytes of one micro-batch in the head and its loss.

    Our loss widens some rows of the logits at a time. A head that is split, or that takes some tokens at a time, gives
    the gradients of its input and weight at once, and they wait for that of the loss.
    """
    s, traits, size = strategy, job.traits, DTYPE_BYTES[strategy.param]
    hidden, tokens = job.shape.hidden_size, job.seq_len / s.cp * s.micro_size
    vocab = math.ceil(job.shape.vocab_size / (s.tp if traits.splits_logits else 1))
    stream, logits, weight = tokens * size * hidden, tokens * size * vocab, size * vocab * hidden
    weight = 0.0 if traits.reduces_in_place else weight
    deferred = stream + logits if _defers(s) else 0.0
    if traits.logits_bytes is not None:
        made = traits.logits_bytes * vocab * min(tokens, s.chunk_tokens or tokens)
        given = stream / (s.tp if s.sequence_parallel else 1)
        return HeadBytes(given, 0.0, max(made, stream + weight), weight, deferred)
    if s.tp == 1 and s.chunk_tokens is None:
        widened = FP32_BYTES * min(tokens * vocab, 2 * LOSS_LOGITS)  # two parts follow each other
        return HeadBytes(stream, logits, max(logits + widened, stream + weight), weight, deferred)
    rows = min(tokens, max(LEAST_ROWS, LOSS_LOGITS // vocab), tokens if s.tp > 1 else s.chunk_tokens or tokens)
    made = max((size + FP32_BYTES * (1 + (rows < tokens))) * rows * vocab, weight)
    return HeadBytes(0.0, stream + FP32_BYTES * vocab * hidden, stream + made, weight, 0.0)


def _layer_shape(job: PlanJob, strategy: Strategy, has_experts: bool) -> LayerShape:
    shape, traits, experts = job.shape, job.traits, job.shape.experts if has_experts else None
    return LayerShape(
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_size=experts.ffn_size * (experts.num_chosen + experts.num_shared) if experts else shape.ffn_size,
        is_gated=shape.ffn == "gated",
        score_bytes=kept_score_bytes(traits, DTYPE_BYTES[strategy.param]),
        mask_bytes=MASK_BYTES if traits.has_dropout else 0.0,
        norm_bytes=float(2 * FP32_BYTES) if traits.saves_norm_in_fp32 else 0.0,
        product_bytes=1.0 if strategy.matmul in ("fp8", "fp4") else None,
        fuses_gate=traits.fuses_gate and shape.ffn == "gated",
        products_share=0.5 if traits.selective == "half" else 1.0,
        num_routed=experts.num_chosen if experts else 0,
    )
