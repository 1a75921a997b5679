"""A model whose experts lie one by one in a list that its own loop reads, as in code beside many hub models.

`stack` is what its user does to let `mesh.ep` divide them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.models import ModelCase
from shardwise.models import Experts, lm_loss

VOCAB, HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 32, 12, 20, 4, 2


class ListedExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, INNER, bias=False)
        self.w2 = nn.Linear(INNER, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, INNER, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.w2(F.gelu(self.w1(x)) * self.w3(x))
        return projected


class ListedMoe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts: Any = nn.ModuleList(ListedExpert() for _ in range(NUM_EXPERTS))

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(rows).sigmoid()
        weights, index = scores.topk(NUM_CHOSEN)
        return weights / weights.sum(-1, keepdim=True), index

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, index = self.route(rows)
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(index == number)
            if len(token):
                total[token] += weights[token, choice, None] * expert(rows[token])
        return total.view_as(x)


class StackedMoe(ListedMoe):
    """The forward that its user writes: one call in the place of the loop."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, index = self.route(rows)
        mixed: Tensor = self.experts(rows, index, weights)
        return mixed.view_as(x)


class ListedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = ListedMoe()

    def forward(self, x: Tensor) -> Tensor:
        after: Tensor = x + self.moe(self.norm(x))
        return after


class ListedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(ListedBlock() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def stack(model: nn.Module) -> nn.Module:
    """Stack the experts of each block, and let its own class call them."""
    for moe in [each for each in model.modules() if isinstance(each, ListedMoe)]:
        moe.experts = Experts.stacked(moe.experts, gate="w1", up="w3", down="w2", act_fn=F.gelu)
        moe.__class__ = StackedMoe
    return model


def listed(*, is_stacked: bool) -> ModelCase:
    def make() -> nn.Module:
        return stack(ListedModel()) if is_stacked else ListedModel()

    def batch(seed: int, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(VOCAB, (num_samples, 9), generator=torch.Generator().manual_seed(seed))
        return tokens[:, :-1], tokens[:, 1:]

    return ModelCase("listed", make, batch, lambda logits, pair: lm_loss(logits, pair[1]))


def in_stacks(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of the listed model's parameters, by the names and shapes of the stacked one's."""
    stacked = {name: value for name, value in values.items() if ".experts." not in name}
    for start in sorted({name.partition(".experts.")[0] for name in values if ".experts." in name}):
        each = [f"{start}.experts.{number}" for number in range(NUM_EXPERTS)]
        pairs = [torch.cat((values[f"{name}.w1.weight"], values[f"{name}.w3.weight"])) for name in each]
        stacked[f"{start}.experts.gate_up_proj"] = torch.stack(pairs)
        stacked[f"{start}.experts.down_proj"] = torch.stack([values[f"{name}.w2.weight"] for name in each])
    return stacked
