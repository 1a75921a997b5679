"""Small models in plain torch that hold what parameters, blocks and outputs can look like; each with batches
and a loss.

Not the library's models, and too small to train anything. A `ModelCase` is found by name, so a test sends the
name to the ranks. Weights are drawn in float32 from a fixed seed and then cast, so every dtype starts from
the same numbers.

>>> case = CASES["transformer"]
>>> model, batch = case.build(torch.float64), case.batch(0, 2, torch.float64)
>>> output = model(**batch)
>>> [value.item() for value in case.loss(output, batch)][1]  # tokens that count
19
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# B samples, S positions, D features, V words, H heads
VOCAB_SIZE = 37
SEQ_LEN = 11
IGNORED = -100

LossFn = Callable[[Any, Any], tuple[Tensor, Tensor | int]]


@dataclass(frozen=True)
class ModelCase:
    """A model with its data: `make()` draws weights, `batch(seed, num_samples, dtype)` inputs, `loss` as the
    engine's.

    `loss` is None where the model's own output carries the loss.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int, torch.dtype], Any]
    loss: LossFn | None

    def build(self, dtype: torch.dtype, seed: int = 0) -> nn.Module:
        """The model in `dtype`, the same numbers for the same seed; the caller's RNG is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make().to(dtype)


class OddBlock(nn.Module):
    """A residual block whose 217 = 7 * 31 elements no small world size divides, with a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7)
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.down(torch.tanh(self.up(self.norm(x))))  # [B, S, 7]


class OddShapes(nn.Module):
    """Prime sizes, a 0-d scale, a head without bias; 3 blocks of 217 elements, 533 = 13 * 41 outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, 7)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.blocks = nn.ModuleList(OddBlock() for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) * self.scale  # [B, S, 7]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # [B, S, V]


class DecoderBlock(nn.Module):
    """Causal attention and a feed-forward layer, both residual, norms first."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 2 * hidden_size)
        self.down = nn.Linear(2 * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))  # [B, S, 3, H, D/H]
        q, k, v = qkv.transpose(1, 3).unbind(2)  # each [B, H, S, D/H]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))  # [B, S, D]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder of identical blocks; `tied` makes the head use the embedding's weight."""

    def __init__(self, tied: bool, hidden_size: int = 12, num_heads: int = 2, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, hidden_size)
        self.positions = nn.Parameter(0.1 * torch.randn(SEQ_LEN, hidden_size))
        self.blocks = nn.ModuleList(DecoderBlock(hidden_size, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, VOCAB_SIZE, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]  # [B, S, D]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # [B, S, V]


class ResidualBlock(nn.Module):
    """x + f(x), with a layer that no forward uses if `unused`."""

    def __init__(self, width: int, unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        if unused:
            self.unused = nn.Linear(width, 3)
        self.second = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(x)))  # [B, D]


class ResidualMLP(nn.Module):
    """Regression on batches (x, target); the blocks run `num_passes` times over."""

    def __init__(self, num_passes: int = 1, unused: bool = False, width: int = 10) -> None:
        super().__init__()
        self.num_passes = num_passes
        self.blocks = nn.ModuleList(ResidualBlock(width, unused) for _ in range(3))
        self.head = nn.Linear(width, width)
        if unused:
            self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_passes):
            for block in self.blocks:
                x = block(x)
        return self.head(x)  # [B, D]


class PytreeBlock(nn.Module):
    """Takes and returns a nested structure: tensors with and without gradient, a number, None.

    The detached side gives `blocks.1.side` no gradient although the forward uses it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main = nn.Linear(width, width)
        self.side = nn.Linear(width, 3)

    def forward(self, state: dict[str, Any], *, scale: float) -> dict[str, Any]:
        x, (history, depth, nothing) = state["x"], state["others"]
        side = self.side(x)  # [B, 3]
        history = (*history, side if depth % 2 == 0 else side.detach())
        return {"x": x + scale * torch.tanh(self.main(x)), "others": (history, depth + 1, nothing)}


class PytreeOutput(nn.Module):
    """Blocks and model return pytrees; the model's output carries the loss, a mean over the batch."""

    def __init__(self, width: int = 9, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PytreeBlock(width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"x": x, "others": ((), 0, None)}
        for block in self.blocks:
            state = block(state, scale=0.5)
        history = state["others"][0]
        penalty = torch.stack([side.square().mean() for side in history]).sum()
        loss = (state["x"] - x.flip(-1)).square().mean() + penalty
        return {"loss": loss, "prediction": state["x"], "history": history, "depth": state["others"][1]}


def _frozen_transformer() -> nn.Module:
    """One block wholly frozen, the next in part, and the root's positions."""
    model = Transformer(tied=True)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].get_submodule("qkv").requires_grad_(False)
    model.positions.requires_grad_(False)
    return model


def _token_batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Next-token labels; up to two thirds of a sample's positions are ignored, so counts differ."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB_SIZE, (num_samples, SEQ_LEN + 1), generator=generator)  # [B, S + 1]
    num_counted = torch.randint(SEQ_LEN // 3, SEQ_LEN + 1, (num_samples, 1), generator=generator)  # [B, 1]
    labels = tokens[:, 1:].masked_fill(torch.arange(SEQ_LEN) >= num_counted, IGNORED)  # [B, S]
    return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}


def _pair_batch(seed: int, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _vector_batch(seed, num_samples, dtype, width=10)
    return x, torch.sin(3 * x)


def _vector_batch(seed: int, num_samples: int, dtype: torch.dtype, width: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, width, generator=generator).to(dtype)  # [B, width]


def _token_loss(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    total = F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def _pair_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), output.numel()


_ALL = (
    ModelCase("odd-shapes", OddShapes, _token_batch, _token_loss),
    ModelCase("transformer", lambda: Transformer(tied=True), _token_batch, _token_loss),
    ModelCase("untied-transformer", lambda: Transformer(tied=False), _token_batch, _token_loss),
    # Whose weights are large enough for states to be encoded; its norms and its embedding are not.
    ModelCase("wide", lambda: Transformer(tied=True, hidden_size=64, num_blocks=2), _token_batch, _token_loss),
    ModelCase("frozen-parameters", _frozen_transformer, _token_batch, _token_loss),
    ModelCase("residual-mlp", ResidualMLP, _pair_batch, _pair_loss),
    ModelCase("unused-parameters", lambda: ResidualMLP(unused=True), _pair_batch, _pair_loss),
    ModelCase("reused-blocks", lambda: ResidualMLP(num_passes=2), _pair_batch, _pair_loss),
    ModelCase("pytree-output", PytreeOutput, _vector_batch, None),
)
CASES: Mapping[str, ModelCase] = {case.name: case for case in _ALL}


def make_batches(
    case: ModelCase,
    *,
    num_steps: int,
    world_size: int,
    num_micro_batches: int,
    micro_size: int = 2,
    dtype: torch.dtype = torch.float64,
) -> list[list[list[Any]]]:
    """Batches by step, rank, micro-batch; which a step has depends on world_size * num_micro_batches only.

    A rank takes `batches[step][rank]`, the reference `every_rank(batches)`.
    """
    per_step = world_size * num_micro_batches

    def batch(step: int, rank: int, micro: int) -> Any:
        return case.batch(step * per_step + rank * num_micro_batches + micro, micro_size, dtype)

    return [
        [[batch(step, rank, micro) for micro in range(num_micro_batches)] for rank in range(world_size)]
        for step in range(num_steps)
    ]


def every_rank(batches: list[list[list[Any]]]) -> list[list[Any]]:
    """The batches of all ranks together, by step and micro-batch."""
    return [[batch for rank in step for batch in rank] for step in batches]
