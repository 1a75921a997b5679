"""Compute by formula the bytes that one decoder layer keeps on a rank for its backward.

The formula is for a layer that saves only what it needs, as the layers of `shardwise.models.Decoder` do: norms before
attention and feed-forward that save their input, attention that saves no scores, SwiGLU, no biases, no dropout.
Temporary tensors of the backward are not counted. The layer's output is not counted: it is the next layer's input.

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
CPU_LOGITS, KERNEL_LOGITS = 2**18, 2**26
"""How many logits our loss widens at a time: they fit a core's cache, or are enough for an accelerator's kernel."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Describe the sizes of one decoder layer, and what its code keeps beyond what it must.

    Attributes:
        head_dim: features of a head; it need not be hidden_size / num_heads.
        ffn_size: feed-forward features of a token; in a mixture, those of the experts that it is sent to.
        is_gated: the feed-forward has three matrices, two of which give the factors of a product; otherwise two.
        score_bytes: bytes kept of each (query, key, head); attention as in FlashAttention keeps none.
        mask_bytes: bytes that dropout keeps of each feature of the residual stream after attention and after
            feed-forward.
        norm_bytes: bytes that each norm keeps of each feature beside its input, as a norm that is not fused does.
        product_bytes: bytes of each element that a matrix product keeps of its input, where that is narrower than an
            activation; None where it keeps the activation itself.
        fuses_gate: the activated gate is computed again in the backward, not kept.
        products_share: share of the outputs of matrix products that "selective" keeps.
        num_routed: experts that a token is sent to, for which its features are copied; 0 without experts. Each tp
            rank sends a part of the tokens.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: float
    is_gated: bool = True
    score_bytes: float = 0.0
    mask_bytes: float = 0.0
    norm_bytes: float = 0.0
    product_bytes: float | None = None
    fuses_gate: bool = False
    products_share: float = 1.0
    num_routed: float = 0


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
    """Return the bytes that one layer keeps for the backward of one micro-batch, on each rank.

    For h hidden, a query heads, k KV heads, d head, f feed-forward features and e bytes an element, a token keeps

    - without recomputation 4h e, inputs of norms and of the matrices after them, and (2ad + 2kd + 4f) e + 4a: queries,
      keys, values, the output of attention and its log-sum-exp in fp32; gate, up, the activated gate and the product;
    - with "full" the layer's input, h e;
    - with "selective" that and the outputs of matrix products and attention: (2ad + 2kd + 2f + 2h) e + 4a.

    Without a gate, 2f replaces 4f, and f replaces 2f. Without recomputation, the scores, masks and copies that `shape`
    names are added: with 5, 1 and 0 bytes of them a layer of four matrices keeps sbh(34 + 5as/h) (Korthikanti et al.,
    equation 1).

    Over tp ranks, heads and features are split; h too under sequence parallelism (Korthikanti et al. 2022, arXiv
    2205.05198, equations 1, 2 and 4, less the masks of dropout and with attention as in FlashAttention). A row layer's
    output is kept after the sum over the ranks only, and gathered sequences are not kept: see
    `shardwise.tensor.mappings`. Where tp exceeds the KV heads, they are shared: a rank then holds one. Over cp ranks
    everything is split with the sequence. Keys and values of other ranks are not kept. Where heads are exchanged for
    tokens (Ulysses), the tensors hold other tokens but have the same size. The fp32 scales of RMSNorm, one a token and
    norm, are counted. Buffers of the collectives (on gloo up to 8 bytes a feature and token of bf16) are not counted:
    the next collective uses them again.

    Args:
        shape: sizes of the layer, over all ranks.
        seq_len: tokens of a sequence, over all ranks.
        sequence_parallel: whether the tp ranks split activations outside attention and feed-forward by sequence.
        element_bytes: bytes of one element of an activation, 2 for bf16.
    """
    num_tokens = seq_len / cp * micro_size
    stream = shape.hidden_size / (tp if sequence_parallel else 1)  # features a token of the residual stream, on a rank
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
        routed = 2 * shape.num_routed * shape.hidden_size / tp  # inputs and outputs of experts
        wide = attention + routed
        return num_tokens * (_whole_bytes(shape, stream, wide, ffn, element_bytes) + log_sum_exp + scores)
    sums = 2 * stream  # outputs of the two row layers
    mixed = heads * shape.head_dim  # output of attention
    products = shape.products_share * (attention - mixed + num_wide * ffn + sums)
    return num_tokens * (element_bytes * (stream + mixed + products) + log_sum_exp)


def _whole_bytes(shape: LayerShape, stream: float, wide: float, ffn: float, element_bytes: int) -> float:
    """Return the bytes of a token without recomputation; what attention keeps beside inputs and output is excluded."""
    num_inner = (4 if shape.is_gated else 2) - shape.fuses_gate
    kept = element_bytes * (4 * stream + wide + num_inner * ffn)
    if shape.product_bytes is not None:  # outputs of norms and gate are kept only for products
        kept -= (element_bytes - shape.product_bytes) * (2 * stream + ffn)
    scales = 2 * FP32_BYTES * stream / shape.hidden_size
    return kept + scales + 2 * (shape.mask_bytes + shape.norm_bytes) * stream


def head_tokens_at_a_time(device: str, vocab_size: int) -> int:
    """Return the tokens of which a head in parts makes logits at a time: few collectives, few reads of its weight.

    Args:
        device: its type, such as cpu or cuda.
        vocab_size: rows of the head's weight on a rank.
    """
    num_logits, fewest = (2**20, 256) if device == "cpu" else (2**26, 1024)
    return max(fewest, num_logits // vocab_size)
