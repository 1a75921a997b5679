"""Random small models and layouts, for tests of what must hold of all of them.

>>> model = RandomModel(ModelSpec(width=3, num_blocks=2, is_tied=True, has_frozen=False, has_buffer=True))
>>> len(list(model.parameters())), [name for name, _ in model.named_buffers()]
(12, ['count'])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

NUM_WORDS = 11


@dataclass(frozen=True)
class ModelSpec:
    """Of a `RandomModel`: every size but `4 * width`, which tensor parallelism splits, may be odd."""

    width: int
    num_blocks: int
    is_tied: bool
    has_frozen: bool
    has_buffer: bool


class RandomBlock(nn.Module):
    """A residual feed-forward network with a 0-d parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))  # [b, s, width]


class RandomModel(nn.Module):
    """Words in, logits out; tied or not, partly frozen or not, with a buffer or not; one parameter is empty."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, spec.width)
        self.blocks = nn.ModuleList(RandomBlock(spec.width) for _ in range(spec.num_blocks))
        self.head = nn.Linear(spec.width, NUM_WORDS, bias=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        if spec.is_tied:
            self.head.weight = self.embed.weight
        if spec.has_frozen:
            self.embed.weight.requires_grad_(False)
            self.blocks[0].up.bias.requires_grad_(False)
        if spec.has_buffer:
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # [b, s, width]
        for block in self.blocks:
            x = block(x)
        if hasattr(self, "count"):
            self.count += 1
        return self.head(x)  # [b, s, words]


# How a `RandomModel` is split over tensor-parallel ranks.
PLAN = {"embed": "vocab", "head": "head", "blocks.*.up": "column", "blocks.*.down": "row"}

specs = st.builds(
    ModelSpec,
    width=st.integers(1, 9),
    num_blocks=st.integers(1, 3),
    is_tied=st.booleans(),
    has_frozen=st.booleans(),
    has_buffer=st.booleans(),
)


@dataclass(frozen=True)
class LayoutSpec:
    """Sizes of a mesh, and how states lie on it."""

    dp_shard: int
    dp_replicate: int
    tp: int
    stage: int

    @property
    def num_ranks(self) -> int:
        return self.dp_shard * self.dp_replicate * self.tp

    def sections(self) -> dict[str, Any]:
        """Of a config."""
        mesh = {"dp_shard": self.dp_shard, "dp_replicate": self.dp_replicate, "tp": self.tp}
        return {"mesh": mesh, "zero": {"stage": self.stage}}


layouts = st.builds(
    LayoutSpec,
    dp_shard=st.sampled_from([1, 2, 3, 4]),
    dp_replicate=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2, 4]),
    stage=st.integers(0, 3),
).filter(lambda layout: layout.num_ranks <= 4)
