"""Bytes that one decoder layer keeps on a rank for its backward, by formula.

They are those of a layer that saves nothing needless, as `shardwise.models.Decoder`'s are: norms before attention and
feed-forward that save their input, attention that saves no scores, SwiGLU, no biases, no dropout. What a backward makes
for a moment is not counted, nor is the layer's output, which is the next one's input.

>>> shape = LayerShape(hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336)
>>> def mib(**layout):
...     return round(activation_bytes_per_layer(shape, seq_len=8192, micro_size=1, **layout) / 2**20)
>>> mib(), mib(tp=8), mib(tp=8, sequence_parallel=True), mib(tp=8, sequence_parallel=True, recompute="full")
(1313, 388, 164, 8)
>>> mib(cp=8)
164
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes of one decoder layer, and what its code keeps beyond what it must.

    Attributes:
        head_dim: need not be hidden_size / num_heads.
        ffn_size: features that a token passes: of a mixture, those of the experts that it is sent to.
        is_gated: three matrices, of which two give what is multiplied; otherwise two.
        score_bytes: kept of each query, key and head; attention as in FlashAttention keeps none.
        mask_bytes: kept of each feature of the residual stream behind attention and behind feed-forward, by dropout.
        norm_bytes: kept of each feature by each norm beside its input, as by one that is not fused.
        product_bytes: of what a matrix product keeps of its input, where that is narrower than an activation; None for
            the activation itself.
        fuses_gate: the activated gate is made again in the backward, not kept.
        products_share: of the outputs of matrix products that "selective" keeps.
        num_routed: experts that a token is sent to, for which its features are copied; 0 without experts.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    is_gated: bool = True
    score_bytes: float = 0.0
    mask_bytes: float = 0.0
    norm_bytes: float = 0.0
    product_bytes: float | None = None
    fuses_gate: bool = False
    products_share: float = 1.0
    num_routed: int = 0


def activation_bytes_per_layer(
    shape: LayerShape,
    *,
    seq_len: int,
    micro_size: int,
    tp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = False,
    element_bytes: int = 2,
    recompute: Literal["none", "selective", "full"] = "none",
) -> float:
    """Bytes that one layer keeps for the backward of one micro-batch, on each rank.

    For h hidden, a query heads, k KV heads, d head, f feed-forward features and e bytes an element, a token keeps

    - without recomputation 4h e, inputs of norms and of the matrices behind them, and (2ad + 2kd + 4f) e + 4a: queries,
      keys, values, the output of attention and its log-sum-exp in fp32; gate, up, the activated gate and the product;
    - with "full" the layer's input, h e;
    - with "selective" that and the outputs of matrix products and attention: (2ad + 2kd + 2f + 2h) e + 4a.

    Without a gate 2f are kept for 4f, and f for 2f. Scores, masks and copies of `shape` come on top without
    recomputation: with 5, 1 and 0 bytes of them a layer of four matrices keeps sbh(34 + 5as/h) (Korthikanti et al.,
    equation 1).

    Over tp ranks, heads and features are split; h too under sequence parallelism (Korthikanti et al. 2022, arXiv
    2205.05198, equations 1, 2 and 4, less the masks of dropout and with attention as in FlashAttention). Of the row
    layers' products only the ranks' sum is kept, and gathered sequences are not: see `shardwise.tensor.mappings`. KV
    heads that tp exceeds are shared: a rank then holds one. Over cp ranks all is split with the sequence: of the
    others' keys and values none are kept; with heads exchanged for tokens, tensors are of other tokens but of the same
    size. The fp32 scales of RMSNorm, one a token and norm, are counted. What collectives themselves need (on gloo up to
    8 bytes a feature and token of bf16) is not: the next one uses it.

    Args:
        shape: of the layer, over all ranks.
        seq_len: tokens of a sequence, over all ranks.
        micro_size: sequences of a micro-batch.
        tp: ranks of a tensor-parallel group.
        cp: ranks that split the sequence.
        sequence_parallel: whether they split what lies between the regions along the sequence.
        element_bytes: of an activation, 2 for bf16.
        recompute: as `RecomputeConfig.mode`.
    """
    num_tokens = seq_len / cp * micro_size
    stream = shape.hidden_size / (tp if sequence_parallel else 1)  # of a rank: features a token of the residual
    if recompute == "full":
        return num_tokens * element_bytes * stream
    heads = shape.num_heads / tp
    kv_heads = max(shape.num_kv_heads / tp, 1)
    attention = (2 * heads + 2 * kv_heads) * shape.head_dim  # queries, keys, values, output
    ffn = shape.ffn_size / tp
    num_wide = 2 if shape.is_gated else 1
    log_sum_exp = FP32_BYTES * heads if not shape.score_bytes else 0.0
    if recompute == "none":
        scores = shape.score_bytes * heads * seq_len
        return num_tokens * (_whole_bytes(shape, stream, attention, ffn, element_bytes) + log_sum_exp + scores)
    sums = 2 * stream  # what the two row layers give
    mixed = heads * shape.head_dim  # what attention gives
    products = shape.products_share * (attention - mixed + num_wide * ffn + sums)
    return num_tokens * (element_bytes * (stream + mixed + products) + log_sum_exp)


def _whole_bytes(shape: LayerShape, stream: float, attention: float, ffn: float, element_bytes: int) -> float:
    """Of a token, without recomputation and without what attention keeps beside its inputs and output."""
    num_inner = (4 if shape.is_gated else 2) - shape.fuses_gate
    routed = 2 * shape.num_routed * stream  # what experts are given, and what they return
    kept = element_bytes * (4 * stream + attention + num_inner * ffn + routed)
    if shape.product_bytes is not None:  # what norms and the gate give is kept for products alone
        kept -= (element_bytes - shape.product_bytes) * (2 * stream + ffn)
    scales = 2 * FP32_BYTES * stream / shape.hidden_size
    return kept + scales + 2 * (shape.mask_bytes + shape.norm_bytes) * stream


def offloaded_bytes(input_bytes: float, num_layers: int, every: int = 1) -> float:
    """Bytes that one micro-batch's forward moves to host memory with `tiers.activations`, and its backward back.

    The inputs of all recomputed layers but the last, whose are needed first and stay; what all layers are given stays
    too. At the peak, the device holds the inputs of two or three layers.

    Args:
        input_bytes: of a layer: `activation_bytes_per_layer` with recompute "full".
        num_layers: of the model.
        every: as `RecomputeConfig.every`.

    >>> offloaded_bytes(1024, num_layers=8), offloaded_bytes(1024, num_layers=8, every=3)
    (7168, 2048)
    """
    return (-(-num_layers // every) - 1) * input_bytes
