"""What all odd models share: a case, its batches and loss, and a stack of blocks to make odd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# B samples, D features, V words
WIDTH = 6
NUM_WORDS = 11
NUM_MICRO_BATCHES = 2

LossFn = Callable[[Any, Any], tuple[Tensor, int]]


def regression_loss(model: nn.Module) -> LossFn:
    """The squared distance to a function of the inputs, whatever the model's output is packed in."""

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        difference = output - torch.sin(3 * batch["x"])  # [B, D]
        return difference.square().sum(), difference.numel()

    return loss


@dataclass(frozen=True)
class OddCase:
    """A model with its loss; `make_loss(model)` may use the model's parameters."""

    make: type[nn.Module]
    make_loss: Callable[[nn.Module], LossFn] = regression_loss
    num_ranks: int = 2

    @property
    def name(self) -> str:
        """The class's name."""
        return self.make.__name__

    def build(self, seed: int = 0) -> nn.Module:
        """The model in float64, the same numbers for the same seed; the caller's RNG is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make().double()


def make_batches(num_steps: int, world_size: int, num_samples: int = 2) -> list[list[list[dict[str, Any]]]]:
    """Batches by step, rank, micro-batch."""

    def batch(step: int, rank: int, micro: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed((step * world_size + rank) * NUM_MICRO_BATCHES + micro)
        x = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)
        return {"x": x, "step": step, "rank": rank}

    return [
        [[batch(step, rank, micro) for micro in range(NUM_MICRO_BATCHES)] for rank in range(world_size)]
        for step in range(num_steps)
    ]


def words(x: Tensor) -> Tensor:
    """Integer inputs [B, D] for embeddings, made of real ones."""
    return (x.abs() * 7).long() % NUM_WORDS


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # [B, D]

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))  # [B, 2D]


class Stack(nn.Module):
    """A stem, three blocks, a head; the cases change what is between stem and head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.make_block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def make_block(self) -> nn.Module:
        return Block()

    def forward(self, x: Tensor, step: int, rank: int) -> Any:
        return self.head(self.through(self.stem(x), step))  # [B, D]

    def through(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
