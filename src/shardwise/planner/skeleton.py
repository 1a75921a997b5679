"""The skeleton of a shape: names and sizes of the parameters of one of each unit, and how tp splits them.

It is to the planner what a module on meta is to `plan_layout`: the Layout's groups are built from it. Names are those
of `shardwise.models.Decoder`, so that a shape of ours has the groups of ours.

>>> from shardwise.models.presets import preset
>>> shape = ModelShape.of_decoder(preset("llama-3-8b"))
>>> [(param.name, param.shape) for param in block_params(shape)][1:3]
[('attention.query.weight', (4096, 4096)), ('attention.key.weight', (1024, 4096))]
>>> [param.split(tp=8).local_shape for param in block_params(shape)][1:3]
[(512, 4096), (128, 4096)]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.layout.skeleton import ParamEntry
from shardwise.layout.splits import ParamSplit, Part
from shardwise.planner.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class SkeletonParam:
    """One parameter of a unit.

    Attributes:
        name: within its unit.
        dim: along which tp splits it into `part`; None where every rank holds all of it.
        is_of_experts: one of each expert's, side by side along dim 0.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    part: Part | None = None
    is_of_experts: bool = False

    def split(self, tp: int) -> ParamSplit:
        """Over the tensor-parallel group."""
        return ParamSplit(self.shape, tp, self.dim, () if self.part is None else (self.part,))

    def entry(self, unit: str) -> ParamEntry:
        """As the Layout reads it from a module."""
        return ParamEntry(f"{unit}.{self.name}", (), unit, self.shape, requires_grad=True)


def block_params(shape: ModelShape, *, has_experts: bool = False, expert_ranks: int = 1) -> tuple[SkeletonParam, ...]:
    """Of one layer, in the order of its module.

    Args:
        has_experts: whether its feed-forward is experts.
        expert_ranks: over which whole experts are spread; the parameters are those of one.
    """
    ffn = _expert_params(shape, expert_ranks) if has_experts else _ffn_params(shape, "ffn", shape.ffn_size)
    norms = (_norm(shape, "attention_norm"), _norm(shape, "ffn_norm"))
    return (*norms[0], *_attention_params(shape), *norms[1], *ffn)


def embedding_params(shape: ModelShape) -> tuple[SkeletonParam, ...]:
    """The table of tokens, and that of positions where they are learned."""
    vocab = Part(shape.vocab_size, is_padded=True)
    tokens = SkeletonParam(name="embed.weight", shape=(shape.vocab_size, shape.hidden_size), dim=0, part=vocab)
    if not shape.num_positions:
        return (tokens,)
    return tokens, SkeletonParam(name="positions.weight", shape=(shape.num_positions, shape.hidden_size))


def norm_params(shape: ModelShape) -> tuple[SkeletonParam, ...]:
    """Of the norm behind the blocks."""
    return tuple(_norm(shape, "norm"))


def head_params(shape: ModelShape) -> tuple[SkeletonParam, ...]:
    """Of the head, were it not tied."""
    vocab = Part(shape.vocab_size, is_padded=True)
    return (SkeletonParam(name="head.weight", shape=(shape.vocab_size, shape.hidden_size), dim=0, part=vocab),)


def _norm(shape: ModelShape, name: str) -> Iterator[SkeletonParam]:
    yield SkeletonParam(name=f"{name}.weight", shape=(shape.hidden_size,))
    if shape.has_biases:
        yield SkeletonParam(name=f"{name}.bias", shape=(shape.hidden_size,))


def _attention_params(shape: ModelShape) -> Iterator[SkeletonParam]:
    query = Part(shape.num_heads * shape.head_dim, shape.num_heads)
    kv = Part(shape.num_kv_heads * shape.head_dim, shape.num_kv_heads)
    for name, part in (("query", query), ("key", kv), ("value", kv)):
        yield from _column(shape, f"attention.{name}", shape.hidden_size, part)
    yield from _row(shape, "attention.out", query, shape.hidden_size)


def _ffn_params(shape: ModelShape, name: str, ffn_size: int) -> Iterator[SkeletonParam]:
    part = Part(ffn_size)
    for column in ("gate", "up") if shape.ffn == "gated" else ("up",):
        yield from _column(shape, f"{name}.{column}", shape.hidden_size, part)
    yield from _row(shape, f"{name}.down", part, shape.hidden_size)


def _expert_params(shape: ModelShape, expert_ranks: int) -> Iterator[SkeletonParam]:
    experts = shape.experts
    if experts is None:
        return
    yield SkeletonParam(name="ffn.router.weight", shape=(experts.num_experts, shape.hidden_size))
    if experts.num_shared:
        yield from _ffn_params(shape, "ffn.shared", experts.num_shared * experts.ffn_size)
    num_here, size, hidden = -(-experts.num_experts // expert_ranks), experts.ffn_size, shape.hidden_size
    for name in ("gate", "up") if shape.ffn == "gated" else ("up",):
        yield SkeletonParam(
            name=f"ffn.experts.{name}", shape=(num_here, size, hidden), dim=1, part=Part(size), is_of_experts=True
        )
    yield SkeletonParam(
        name="ffn.experts.down", shape=(num_here, hidden, size), dim=2, part=Part(size), is_of_experts=True
    )


def _column(shape: ModelShape, name: str, num_inputs: int, part: Part) -> Iterator[SkeletonParam]:
    yield SkeletonParam(name=f"{name}.weight", shape=(part.size, num_inputs), dim=0, part=part)
    if shape.has_biases:
        yield SkeletonParam(name=f"{name}.bias", shape=(part.size,), dim=0, part=part)


def _row(shape: ModelShape, name: str, part: Part, num_outputs: int) -> Iterator[SkeletonParam]:
    yield SkeletonParam(name=f"{name}.weight", shape=(num_outputs, part.size), dim=1, part=part)
    if shape.has_biases:
        yield SkeletonParam(name=f"{name}.bias", shape=(num_outputs,))
