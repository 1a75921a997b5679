"""Count the bytes that a block, or the head and its loss, keeps of a micro-batch and makes in its backward, per rank.

>>> from shardwise.models.presets import preset
>>> from shardwise.planner.hardware import Cluster, GpuSpec
>>> from shardwise.planner.shape import ModelShape
>>> gpu = GpuSpec(name="h100", memory_bytes=80 * 2**30, memory_bytes_per_s=3e12, peak_flops_per_s={"bf16": 989e12})
>>> cluster = Cluster(gpu=gpu, num_gpus=8, gpus_per_node=8, nic_bytes_per_s=5e10)
>>> job = PlanJob(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=8, cluster=cluster)
>>> round(block_bytes(job, Strategy(tp=8), has_experts=False).kept / 2**20)
388
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from shardwise.layout.activation_bytes import FP32_BYTES, LayerShape, activation_bytes_per_layer
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.planner.job import FrameworkTraits, PlanJob, Strategy
from shardwise.schedule.registry import recipe_of

MASK_BYTES: Final = 1.0
"""Bytes that are kept of each element that dropout works on, in addition to its output."""

NUM_WIDE_OF_NORM: Final = 4
"""How many fp32 tensors of the input's size our norm's backward has at once on a CPU; on other devices it is fused."""

LOSS_ROWS: Final = MappingProxyType({"cpu": 2**18, "gpu": 2**26})
"""How many logits our loss widens at a time; source: `shardwise.models.decoder`."""

WAITING_LOGITS: Final = MappingProxyType({"cpu": (2**20, 256), "gpu": (2**26, 1024)})
"""How many logits a head computes at a time when its logits wait for the loss, and the fewest tokens it takes; source:
`shardwise.tensor.cross_entropy`."""


@dataclass(frozen=True)
class BlockBytes:
    """Hold the bytes of one micro-batch in one block, as a rank keeps and makes them.

    Attributes:
        kept: between the block's forward and its backward.
        whole: kept by a block that recomputes nothing.
        again: made by a recomputation, in addition to what is kept.
        working: made by the backward besides, at its highest.
        early: as `working`, before the first gradient of a weight has come; 0 where it is not larger than that.
        deferred: kept for the gradients of the weights, where these come later than that of the input.
        stream: of the residual stream, as it passes from block to block.
    """

    kept: float
    whole: float
    again: float
    working: float
    early: float
    deferred: float
    stream: float


@dataclass(frozen=True)
class HeadBytes:
    """Hold the bytes of one micro-batch in the head and its loss, on a rank of the last stage.

    Attributes:
        given: the head's input, where it is kept.
        kept: between the loss's forward and its backward, in addition to `given`.
        loss: made by the loss besides, at its highest.
        after: after the loss's backward: what it leaves and what the head's backward makes.
        weight: the gradient of the head's weight; that of the embedding's is as large.
        deferred: kept for the gradient of the weight, where that comes later.
    """

    given: float
    kept: float
    loss: float
    after: float
    weight: float
    deferred: float


def block_bytes(job: PlanJob, strategy: Strategy, *, has_experts: bool) -> BlockBytes:
    """Return the bytes of one block under a strategy; `layout.activation_bytes` counts what is kept.

    A feed-forward that takes some tokens of each sequence at a time keeps only its input. Heads that are exchanged for
    tokens are kept together with what attention gave them; what is sent is saved as products are.

    Args:
        job: the model's shape, the sequence length in tokens, the cluster and the framework's traits.
        strategy: how the job is split; its micro-batch, dtypes and recomputation set the sizes.
        has_experts: whether the block's feed-forward is a layer of experts.
    """
    s, shape, traits = strategy, _layer_shape(job, strategy, has_experts), job.traits
    ffn, is_chunked = shape.ffn_size / s.tp, s.chunk_tokens is not None and not has_experts
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
    mixed = shape.num_heads * shape.head_dim / s.tp if s.cp > 1 and s.transport == "ulysses" else 0.0
    sent = (
        mixed + 2 * max(shape.num_kv_heads / s.tp, 1) * shape.head_dim if mixed and s.recompute == "selective" else 0.0
    )
    drops_scores = s.recompute == "selective" and traits.selective == "all-but-scores"
    at_rest = kept("none", replace(kept_shape, score_bytes=0.0)) if drops_scores else kept(s.recompute)
    in_ffn, after_ffn = _making_bytes(job, s, shape, is_chunked=is_chunked)
    # Sums over parts go on when the last part has its own; with gradients of weights that come later, norms' are first.
    is_early = (is_chunked and _part(job, s) < 1) or (_defers(s) and not s.sequence_parallel)
    given = feature * _stream_size(s, shape)
    # Whole sequences that a recomputation gathers, for attention and feed-forward; one in parts gathers parts.
    num_gathered = 2 - is_chunked if s.sequence_parallel and s.recompute != "none" else 0
    return BlockBytes(
        kept=at_rest + feature * (sent + (mixed if s.recompute != "full" else 0.0)),
        whole=kept("none") + feature * mixed,
        again=feature * (num_gathered * shape.hidden_size + sent),
        working=given + (after_ffn if is_early else max(in_ffn, after_ffn)),
        early=given + in_ffn if is_early else 0.0,
        deferred=feature * _deferred_size(s, shape, 0.0 if is_chunked else ffn),
        stream=given,
    )


def _making_bytes(job: PlanJob, strategy: Strategy, shape: LayerShape, *, is_chunked: bool) -> tuple[float, float]:
    """Return the most bytes that a block's backward makes, in addition to what was kept and the gradient of the stream.

    Two moments count. In the feed-forward, the gradients of its input wait for each other, part by part. After it, the
    inner tensors are freed, unless gradients of weights come later; then attention may be the highest: gradients of its
    scores, and some wide copies where the norm is not fused.

    Returns:
        Bytes in the feed-forward, and bytes after it.
    """
    s, element_bytes = strategy, DTYPE_BYTES[strategy.param]
    feature, hidden = job.seq_len / s.cp * s.micro_size * element_bytes, shape.hidden_size
    stream, later = _stream_size(s, shape), hidden if _defers(s) else 0.0  # the gradient that rows wait with
    if is_chunked:
        num_waiting = stream if _part(job, s) < 1 else 0.0
        in_ffn, is_over = feature * num_waiting + _part_bytes(job, s, shape), 0.0
    else:
        in_ffn, is_over = _ffn_bytes(job, s, shape), (_num_left(s, shape) - _num_inner(shape)) * shape.ffn_size / s.tp
        if s.sequence_parallel and s.recompute != "none":
            is_over -= hidden  # what the recomputation has gathered for the feed-forward
    scores = shape.num_heads / s.tp * job.seq_len if shape.score_bytes else 0.0
    in_attention = feature * (is_over + 2 * scores - stream)
    in_norm = feature * (is_over + later)
    if job.cluster.gpu.is_cpu:
        in_norm += feature / element_bytes * stream * norm_bytes(element_bytes)
    if not job.traits.is_own or s.tp == 1:
        return in_ffn, max(in_attention, in_norm)
    mixed, keys = shape.num_heads * shape.head_dim / s.tp, max(shape.num_kv_heads / s.tp, 1) * shape.head_dim
    weight = element_bytes * hidden * mixed
    gone = mixed + 2 * keys if not later else 2 * keys * s.sequence_parallel
    in_row = feature * (is_over + later + _gathered_size(s, shape) + mixed) + weight
    num_given = 2 * hidden + _more_in_sum(job, s, hidden, mixed)
    in_columns = feature * (is_over + 2 * later - gone + _gathered_again_size(s, shape) + num_given) + weight
    return in_ffn, max(in_attention, in_norm, in_row, in_columns)


def _ffn_bytes(job: PlanJob, strategy: Strategy, shape: LayerShape) -> float:
    """Return the most bytes that the backward of a feed-forward makes, in addition to what was kept.

    The last matrix makes its own gradient and that of its input. After it come the gradients of two inner tensors, less
    what is freed by then. Where ranks split the first matrices, the gradients of their input come one by one and are
    summed.
    """
    s, hidden, ffn = strategy, shape.hidden_size, shape.ffn_size / strategy.tp
    element_bytes = DTYPE_BYTES[s.param]
    feature, num_inner = job.seq_len / s.cp * s.micro_size * element_bytes, _num_inner(shape)
    gathered = _gathered_size(s, shape)
    weight = 0.0 if job.traits.reduces_in_place else element_bytes * hidden * ffn
    inner = (1 if shape.fuses_gate else 2) * ffn + (ffn + gathered if _defers(s) else 0.0)
    in_last = max(feature * (ffn + gathered) + weight, feature * inner)
    if not job.traits.is_own or s.tp == 1:
        return in_last
    num_gone = num_inner - (1 + s.sequence_parallel if _defers(s) else 1)
    left = (hidden if _defers(s) else 0.0) - (num_gone if s.sequence_parallel or not _defers(s) else 1) * ffn
    num_given = 2 * hidden + _more_in_sum(job, s, hidden, ffn)
    in_first = feature * (left + _gathered_again_size(s, shape) + num_given) + weight
    return max(in_last, in_first)


def _part_bytes(job: PlanJob, strategy: Strategy, shape: LayerShape) -> float:
    """Return the most bytes that the backward of a feed-forward in parts makes, in addition to its gradient.

    The inner tensors of a part are made again, and with split sequences what the part gathers. Gradients of weights are
    summed over the parts. All sums wait while the last matrix of the last part gives its own; after it the sums of the
    other matrices wait; all of them wait while the first matrices of a part in the middle give theirs.
    """
    s, hidden, ffn = strategy, shape.hidden_size, shape.ffn_size / strategy.tp
    element_bytes = DTYPE_BYTES[s.param]
    part = _part(job, s)
    feature, num_inner = job.seq_len / s.cp * s.micro_size * element_bytes * part, _num_inner(shape)
    gathered = _gathered_size(s, shape)
    weight = 0.0 if job.traits.reduces_in_place else element_bytes * hidden * ffn
    num_sums = (3 if shape.is_gated else 2) if part < 1 else 0
    with_last = feature * ((num_inner + 1) * ffn + 2 * gathered) + (num_sums + 1) * weight
    after_last = feature * ((num_inner + 2) * ffn + gathered) + max(0, num_sums - 1) * weight
    num_waiting = num_sums + (2 * part < 1) if num_sums else 1
    num_given = 2 * hidden + _more_in_sum(job, s, hidden, ffn)
    in_first = feature * (ffn + gathered + num_given) + num_waiting * weight
    return max(with_last, after_last, in_first)


def _part(job: PlanJob, strategy: Strategy) -> float:
    """Return the share of a rank's tokens that a feed-forward in parts takes at a time."""
    return min(1.0, (strategy.chunk_tokens or 1) * strategy.cp / job.seq_len)


def _more_in_sum(job: PlanJob, strategy: Strategy, hidden: float, out: float) -> float:
    """Return by how many features of a token the sum of two gradients of an input exceeds what the second is made from.

    Autograd adds in place, but not where each op is watched, as the memory tracker does on a CPU. The gradient of the
    second layer's output, of `out` features, is freed by then, unless it waits for the gradient of a weight.
    """
    if not job.cluster.gpu.is_cpu:
        return 0.0
    waits = _defers(strategy) and not strategy.sequence_parallel
    return max(0.0, hidden - (0.0 if waits else out))


def _num_inner(shape: LayerShape) -> int:
    """Return how many inner tensors a feed-forward keeps."""
    return (4 if shape.is_gated else 2) - shape.fuses_gate


def _num_left(strategy: Strategy, shape: LayerShape) -> int:
    """Return how many inner tensors wait, each with its gradient, for weight gradients; columns that gather do not."""
    if not _defers(strategy):
        return 0
    return 1 if strategy.sequence_parallel else _num_inner(shape) - 1


def _gathered_size(strategy: Strategy, shape: LayerShape) -> float:
    """Return the features of a token in the gradient that a row layer gathers."""
    return shape.hidden_size if strategy.sequence_parallel else 0.0


def _gathered_again_size(strategy: Strategy, shape: LayerShape) -> float:
    """Return the features of a token in the input that column layers gather again; 0 if a recomputation gathers it."""
    return shape.hidden_size if strategy.sequence_parallel and strategy.recompute == "none" else 0.0


def _stream_size(strategy: Strategy, shape: LayerShape) -> float:
    """Return the features of a token in the residual stream of a rank."""
    return shape.hidden_size / (strategy.tp if strategy.sequence_parallel else 1)


def _defers(strategy: Strategy) -> bool:
    """Say whether gradients of weights come later than those of inputs."""
    return strategy.pp > 1 and recipe_of(strategy.schedule).splits_backward


def _deferred_size(strategy: Strategy, shape: LayerShape, ffn: float) -> float:
    """Return the features of a token in inputs and outputs' gradients that wait for a later weight gradient.

    Columns that gather a sequence do not wait, and rows wait with whole gradients.
    """
    s = strategy
    if not _defers(s):
        return 0.0
    mixed = shape.num_heads * shape.head_dim / s.tp
    keys = max(shape.num_kv_heads / s.tp, 1) * shape.head_dim
    num_wide = 2 if shape.is_gated else 1
    rows = 2 * shape.hidden_size + mixed + ffn
    return rows if s.sequence_parallel else rows + 2 * shape.hidden_size + mixed + 2 * keys + num_wide * ffn


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


def norm_bytes(element_bytes: int) -> float:
    """Return the bytes per feature and token that our norm's backward makes on a CPU: gradients and copies of its
    input.

    >>> norm_bytes(2), norm_bytes(4)
    (18, 12)
    """
    is_wide = element_bytes >= FP32_BYTES
    return (NUM_WIDE_OF_NORM - 1) * element_bytes if is_wide else NUM_WIDE_OF_NORM * FP32_BYTES + element_bytes


def head_bytes(job: PlanJob, strategy: Strategy) -> HeadBytes:
    """Return the bytes of one micro-batch in the head and its loss; its forward or backward counts, whichever is
    higher.
    """
    s, traits, element_bytes = strategy, job.traits, DTYPE_BYTES[strategy.param]
    hidden, tokens = job.shape.hidden_size, job.seq_len / s.cp * s.micro_size
    vocab = math.ceil(job.shape.vocab_size / (s.tp if traits.splits_logits else 1))
    kind = "cpu" if job.cluster.gpu.is_cpu else "gpu"
    stream = tokens * element_bytes * hidden
    weight = 0.0 if traits.reduces_in_place else element_bytes * vocab * hidden
    logits = tokens * element_bytes * vocab
    deferred = stream + logits if _defers(s) else 0.0
    if traits.logits_bytes is not None:
        at_a_time = tokens if s.chunk_tokens is None else min(tokens, s.chunk_tokens)
        given = stream / (s.tp if s.sequence_parallel else 1)
        loss = traits.logits_bytes * at_a_time * vocab
        return HeadBytes(given, 0.0, loss, stream, weight, deferred)
    if s.tp == 1 and s.chunk_tokens is None:
        rows = 2 * max(1, LOSS_ROWS[kind] // vocab)  # of two parts, one after the other
        return HeadBytes(stream, logits, logits + FP32_BYTES * vocab * min(tokens, rows), stream, weight, deferred)
    most, fewest = WAITING_LOGITS[kind]
    at_a_time = min(tokens, max(fewest, most // vocab))
    if s.tp == 1:  # a head that is split goes by the device alone
        at_a_time = min(at_a_time, s.chunk_tokens or tokens)
    is_wide, is_parted = element_bytes >= FP32_BYTES, at_a_time < tokens
    widened = (0 if is_wide else element_bytes) + FP32_BYTES * (1 + is_parted)
    summed = FP32_BYTES * at_a_time * vocab + (0.0 if is_wide else element_bytes * at_a_time * vocab + weight)
    # The gradients of input and weight, the latter in fp32, wait for that of the loss; the input itself is freed.
    return HeadBytes(
        given=0.0,
        kept=stream + FP32_BYTES * vocab * hidden,
        loss=stream + max(widened * at_a_time * vocab, summed),
        after=stream,
        weight=weight,
        deferred=0.0,
    )


def _layer_shape(job: PlanJob, strategy: Strategy, has_experts: bool) -> LayerShape:
    shape, traits, experts = job.shape, job.traits, job.shape.experts
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
        score_bytes=kept_score_bytes(traits, DTYPE_BYTES[strategy.param]),
        mask_bytes=MASK_BYTES if traits.has_dropout else 0.0,
        norm_bytes=float(2 * FP32_BYTES) if traits.saves_norm_in_fp32 else 0.0,
        product_bytes=1.0 if strategy.matmul in ("fp8", "fp4") else None,
        fuses_gate=traits.fuses_gate and shape.ffn == "gated",
        products_share=0.5 if traits.selective == "half" else 1.0,
        num_routed=num_routed,
    )
