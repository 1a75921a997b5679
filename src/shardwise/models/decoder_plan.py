"""How tensor parallelism splits our decoder (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.layout.splits import Part, check_divides
from shardwise.layout.tensor_plan import LayerSplit, Region, SequenceStack, TensorPlan

if TYPE_CHECKING:
    from shardwise.models.decoder import DecoderConfig


def decoder_plan(config: DecoderConfig, degree: int) -> TensorPlan:
    """The plan of a decoder: attention by heads, feed-forward by features, embedding and head by tokens.

    Args:
        config: its shape.
        degree: ranks of the tensor-parallel group; where there are fewer KV heads, neighbours share one.

    Raises:
        ConfigError: heads, KV heads or `ffn_size` do not divide by `degree`.
    """
    query = Part(config.num_heads * config.head_dim, config.num_heads)
    kv = Part(config.num_kv_heads * config.head_dim, config.num_kv_heads)
    ffn = Part(config.ffn_size)
    vocab = Part(config.vocab_size, is_padded=True)
    check_divides(degree, config.num_heads, "num_heads")
    kv.check(degree, "num_kv_heads")
    check_divides(degree, config.ffn_size, "ffn_size")

    blocks = [f"blocks.{index}" for index in range(config.num_layers)]
    layers = [LayerSplit("embed", "vocab", (vocab,)), LayerSplit("head", "head", (vocab,))]
    for block in blocks:
        layers += [LayerSplit(f"{block}.attention.query", "column", (query,))]
        layers += [LayerSplit(f"{block}.attention.{name}", "column", (kv,)) for name in ("key", "value")]
        layers += [LayerSplit(f"{block}.attention.out", "row", (query,))]
        layers += [LayerSplit(f"{block}.ffn.{name}", "column", (ffn,)) for name in ("gate", "up")]
        layers += [LayerSplit(f"{block}.ffn.down", "row", (ffn,))]
    return TensorPlan(
        layers=tuple(layers),
        regions=tuple(Region(f"{block}.{name}", ("x",)) for block in blocks for name in ("attention", "ffn")),
        stacks=(SequenceStack(blocks[0], "x", "norm", (*blocks, "norm")),),
        attributes=tuple((f"{block}.attention", "first_head", Part(config.num_heads)) for block in blocks),
    )
