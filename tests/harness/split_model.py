"""A small transformer and its plan of tensor parallelism by hand, and parameters cut by hand: for tests of layers that
need no engine.

What ranks compute is put together from `ParamSplit.shares` alone. Gradients of parameters that ranks hold in part only
are summed here, as the engine does once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.comm.backends import process_group_comm
from shardwise.comm.collectives import Comm, CommResources
from shardwise.config.resolve import TensorConfig
from shardwise.layout.slicing import Rect
from shardwise.layout.tensor_plan import LayerSplit, SequenceStack, SharedInput, TensorPlan
from shardwise.layout.tp_sharding import FusedPart, ParamSplit
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.tensor.apply import split_model

HIDDEN, FEATURES, VOCAB, HEAD_DIM, PADDING = 16, 32, 37, 2, 3


class Attention(nn.Module):
    """Eight query heads, two key and value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = 8, 2
        self.q = nn.Linear(HIDDEN, 8 * HEAD_DIM)
        self.k = nn.Linear(HIDDEN, 2 * HEAD_DIM, bias=False)
        self.v = nn.Linear(HIDDEN, 2 * HEAD_DIM)
        self.o = nn.Linear(8 * HEAD_DIM, HIDDEN)

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:  # [b, s, hidden]
        shape = (*hidden.shape[:2], -1, HEAD_DIM)
        q, k, v = (layer(hidden).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, FEATURES, bias=False)
        self.up = nn.Linear(HIDDEN, FEATURES)
        self.down = nn.Linear(FEATURES, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, hidden]
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:  # [b, s, hidden]
        x = x + self.attention(hidden=self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN, padding_idx=PADDING)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:  # [b, s]
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(dtype: torch.dtype = torch.float64) -> Transformer:
    """The same numbers on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Transformer().to(dtype)


def make_ids(num_samples: int = 2, length: int = 8) -> Tensor:
    """Words, padding among them."""
    ids = torch.randint(VOCAB, (num_samples, length), generator=torch.Generator().manual_seed(2))
    ids[0, 1] = PADDING
    return ids


def make_plan(degree: int) -> TensorPlan:
    """Of the transformer."""
    vocab = (FusedPart(VOCAB, is_padded=True),)
    layers = [LayerSplit("embed", "vocab", vocab), LayerSplit("head", "head", vocab)]
    regions, attributes = [], []
    for index in range(2):
        block = f"blocks.{index}"
        heads, kv_heads, features = (FusedPart(16, 8),), (FusedPart(4, 2),), (FusedPart(FEATURES),)
        for name, style, parts in (
            ("attention.q", "column", heads),
            ("attention.k", "column", kv_heads),
            ("attention.v", "column", kv_heads),
            ("attention.o", "row", heads),
            ("mlp.gate", "column", features),
            ("mlp.up", "column", features),
            ("mlp.down", "row", features),
        ):
            layers.append(LayerSplit(f"{block}.{name}", style, parts))  # type: ignore[arg-type]
        regions += [SharedInput(f"{block}.attention", ("hidden",)), SharedInput(f"{block}.mlp", ("x",))]
        attributes += [
            (f"{block}.attention", "num_heads", 8 // degree),
            (f"{block}.attention", "num_kv_heads", max(1, 2 // degree)),
        ]
    stack = SequenceStack("blocks.0", "x", "norm", ("blocks.0", "blocks.1", "norm"))
    return TensorPlan(tuple(layers), tuple(regions), (stack,), attributes=tuple(attributes))


def make_splits(model: nn.Module, plan: TensorPlan, degree: int, is_sequence: bool) -> dict[str, ParamSplit]:
    """Where the parameters lie."""
    by_module = {layer.module: layer for layer in plan.layers}
    inside = tuple(name for stack in plan.stacks for name in stack.modules) if is_sequence else ()
    splits = {}
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        layer, shape = by_module.get(module), tuple(parameter.shape)
        is_partial = any(name.startswith(f"{each}.") for each in inside)
        if layer is None or (layer.style == "row" and leaf == "bias"):
            splits[name] = ParamSplit(shape, degree, is_partial=is_partial)
            continue
        dim = 1 if (layer.style in ("row", "column-embedding")) != layer.is_transposed and leaf == "weight" else 0
        splits[name] = ParamSplit(shape, degree, dim, layer.parts)
    return splits


def region_of(rect: Rect) -> tuple[slice, ...]:
    """An index."""
    return tuple(slice(start, stop) for start, stop in zip(rect.start, rect.stop, strict=True))


def cut(model: nn.Module, splits: Mapping[str, ParamSplit], rank: int) -> None:
    """Leave in the parameters what a rank holds."""
    for name, parameter in model.named_parameters():
        split = splits[name]
        local = torch.zeros(split.local_shape, dtype=parameter.dtype)
        for share in split.shares(rank):
            local[region_of(share.target)] = parameter.data[region_of(share.source)]
        parameter.data = local


def put_together(name: str, split: ParamSplit, locals_: Sequence[Tensor]) -> Tensor:
    """The whole gradient of the ranks' parts."""
    whole = torch.zeros(split.global_shape, dtype=locals_[0].dtype)
    is_written = torch.zeros(split.global_shape, dtype=torch.bool)
    for rank, local in enumerate(locals_):
        for share in split.shares(rank):
            at, value = region_of(share.source), local[region_of(share.target)]
            if share.is_summed:
                whole[at] += value
            elif is_written[at].all():
                torch.testing.assert_close(whole[at], value, rtol=0, atol=0, msg=f"{name} differs on rank {rank}")
            else:
                whole[at] = value
                is_written[at] = True
    return whole


def make_comm(pool: BufferPool | None = None) -> Comm:
    """All ranks, as a tensor-parallel group."""
    device = torch.device("cpu")
    comm = process_group_comm(dist.group.WORLD, "tp", CommResources.alone(device, 20.0, pool))  # type: ignore[arg-type]
    comm.comm_log.recent = type(comm.comm_log.recent)()  # without a bound
    return comm


@dataclass
class Split:
    """A split model on one rank."""

    model: Any
    comm: Comm
    undo: list[Callable[[], None]]

    def calls(self) -> dict[str, int]:
        """How many collectives of each kind since the last time."""
        found: dict[str, int] = {}
        for call in self.comm.comm_log.recent:
            found[call.op] = found.get(call.op, 0) + 1
        self.comm.comm_log.recent.clear()
        return found


def split_on_rank(
    rank: int, world_size: int, is_sequence: bool = False, dtype: torch.dtype = torch.float64, **config: Any
) -> Split:
    """The transformer, split."""
    model, plan, comm = build(dtype), make_plan(world_size), make_comm()
    splits = make_splits(model, plan, world_size, is_sequence)
    undo = split_model(model, plan, comm, TensorConfig(sequence_parallel=is_sequence, **config), splits)
    cut(model, splits, rank)
    return Split(model, comm, undo)
