"""Under `cp` hooks see gradients of one process' scale, and a count of forwards is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.pool import WorkerPool
from harness.training import make_config
from shardwise import initialize
from shardwise.models.decoder_attention import attend_densely
from shardwise.runtime.float64 import float64_throughout

WIDTH, VOCAB_SIZE = 8, 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = self.num_kv_heads = 2
        self.attend = attend_densely
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB_SIZE)
        self.num_forwards = 0

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        self.num_forwards += 1
        x = self.embed(tokens) * (1 + self.num_forwards / 10)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(x + self.attend(q, k, v, 0, positions=positions).transpose(1, 2).flatten(2))


def loss_fn(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    _, targets = batch
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def train(rank: int, world_size: int, sections: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model, trace = Model().double(), []
    data = torch.Generator().manual_seed(1)
    with float64_throughout(), initialize(model, make_config(2, sections), loss_fn=loss_fn) as engine:
        for _ in range(2):
            tokens = torch.randint(VOCAB_SIZE, (2, 2, 16), generator=data)
            result = engine.train_step([({"tokens": each}, each.roll(-1, 1)) for each in tokens])
            trace += [result.loss, result.grad_norm]
    return trace


@pytest.mark.quick(2)
@pytest.mark.parametrize("transport", ["ring", "all-gather", "ulysses"])
def test_hooks_and_counts_of_forwards_are_those_of_one_process(ranks: WorkerPool, transport: str) -> None:
    expected = train(0, 1, {})
    for found in ranks(2).run(train, {"mesh": {"cp": 2}, "context": {"transport": transport}}):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
