"""Under sequence parallelism, code of a block that computes tokens from others, or by their number, is refused before a
number is wrong: at each length and number of samples that a run has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.pool import WorkerPool
from harness.reference import PARITY
from harness.refusals import refusal_of
from harness.training import make_config
from shardwise import initialize
from shardwise.runtime.float64 import float64_throughout

VOCAB, WIDTH, FEATURES, HEADS = 12, 8, 16, 2
SGD: Final = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}

By = Callable[["Block", Tensor], Tensor]
# What a block does between its regions; x is [B, S, D].
REFUSED: Final[dict[str, By]] = {
    "a mean where long": lambda block, x: x - x.mean(1, keepdim=True) if x.shape[1] > 16 else x,
    "a mean": lambda block, x: x - x.mean(1, keepdim=True),
    "a factor by length": lambda block, x: x * 2 if x.shape[1] > 16 else x,
    "in training": lambda block, x: x - x.mean(1, keepdim=True) if block.training and x.shape[1] > 16 else x,
    "noise by length": lambda block, x: x + torch.randn_like(x) / x.shape[1] if block.training else x,
    "a shift": lambda block, x: x + F.pad(x, (0, 0, 1, 0))[:, :-1],
    "by the number of samples": lambda block, x: x * x.shape[1] if x.shape[0] > 2 else x,
    "of all elements": lambda block, x: x * 2 if x.numel() > 2 * 16 * WIDTH else x,
}
TAKEN: Final[dict[str, By]] = {
    "nothing": lambda block, x: x,
    "chunks": lambda block, x: torch.cat([2 * each for each in x.split(5, 1)], 1) if x.shape[1] > 16 else 2 * x,
    "padding": lambda block, x: F.pad(x, (0, 0, 0, -x.shape[1] % 16))[:, : x.shape[1]].tanh(),
    "in place": lambda block, x: x.mul(2).add_(x),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)) * (2 if x.shape[1] > 16 else 1)


class Block(nn.Module):
    def __init__(self, by: By) -> None:
        super().__init__()
        self.by = by
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.tanh(self.up(self.by(self, x))))


class Model(nn.Module):
    def __init__(self, by: By) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks, self.norm = nn.ModuleList([Block(by), Block(by)]), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if x.shape[1] > 16:  # here all ranks have all tokens
            x = x - x.mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN: Final = {
    "blocks.*.attention.qkv": f"column parts=3 units={HEADS}",
    "blocks.*.attention.out": f"row units={HEADS}",
    "blocks.*.attention": ["region x", "local num_heads"],
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "blocks.?": "stack x last=norm",
    "embed": "vocab",
    "head": "head",
}


def loss_fn(logits: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()


def batch_of(num_samples: int, length: int) -> Tensor:
    return torch.randint(VOCAB, (num_samples, length), generator=torch.Generator().manual_seed(length))


def losses_of(by: By, tp: int, sizes: list[tuple[int, int]], is_evaluation: bool, **sections: Any) -> list[float]:
    with torch.random.fork_rng(devices=[]), float64_throughout():
        torch.manual_seed(3)
        model = Model(by).double()
        config = {"mesh": {"tp": tp, "dp_shard": 1}, "optimizer": SGD, **sections}
        if tp > 1:
            config["tensor"] = {"sequence_parallel": True}
        with initialize(model, make_config(1, config), loss_fn=loss_fn, plan=PLAN) as engine:
            step = engine.eval_step if is_evaluation else engine.train_step
            return [step([batch_of(*each)]).loss for each in sizes]


SHORT, LONG = (2, 12), (2, 24)


def refusals(rank: int, world_size: int, names: list[str]) -> list[Any]:
    found: list[Any] = []
    for name in names:
        sizes = [SHORT, (4, 12)] if "samples" in name else [SHORT, LONG]
        found.append(refusal_of(lambda name=name, sizes=sizes: losses_of(REFUSED[name], world_size, sizes, False)))
    return found


def test_blocks_whose_tokens_meet_outside_of_regions_are_refused(ranks: WorkerPool) -> None:
    for found in ranks(2).run(refusals, [*REFUSED]):
        for name, (code, text) in zip(REFUSED, found, strict=True):
            assert code == "tp-tokens-apart", (name, code, text)
            assert "blocks.0" in text, (name, text)


def losses(rank: int, world_size: int, names: list[str]) -> list[Any]:
    sizes = [SHORT, LONG, (3, 24), SHORT]
    return [losses_of(TAKEN[name], world_size, sizes, False) for name in names]


def test_blocks_that_compute_tokens_apart_equal_one_process(ranks: WorkerPool) -> None:
    expected = ranks(1).run(losses, [*TAKEN])[0]
    for found in ranks(2).run(losses, [*TAKEN]):
        torch.testing.assert_close(found, expected, rtol=PARITY, atol=0.0)
