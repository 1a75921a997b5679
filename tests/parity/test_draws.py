"""What torch, Python and NumPy draw in a training forward is, in every layout, what one process draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from harness.pool import WorkerPool
from harness.refusals import refusal_of, refused
from harness.training import make_config
from shardwise import initialize
from shardwise.context.apply import prove_huggingface
from shardwise.runtime.float64 import float64_throughout

VOCAB, LENGTH, NUM_STEPS = 31, 16, 2
Draw = Callable[[Tensor], Any]


def flat(x: Tensor) -> Tensor:  # [B, S, D] -> [B S, D]
    return x.reshape(-1, x.shape[-1])


def chosen(x: Tensor) -> Tensor:
    return torch.multinomial(flat(x).detach().softmax(-1), 2).view(*x.shape[:2], 2).sum(-1, keepdim=True)


def seeded(x: Tensor) -> Tensor:
    """Draw the same numbers in every forward."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return torch.rand_like(x) + F.dropout(torch.ones_like(x), 0.3) + torch.rand(len(x), 1, 1)


def resumed(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    torch.set_rng_state(torch.Generator().manual_seed(6).get_state())
    drawn = torch.zeros_like(x).uniform_(-1, 1)
    torch.set_rng_state(state)
    return drawn


# By name, what a hook multiplies a module's output with.
DRAWS: dict[str, Draw] = {
    "noise": torch.randn_like,
    "flat": lambda x: torch.rand_like(flat(x)).view_as(x),
    "uniform_": lambda x: torch.zeros_like(x).uniform_(-1, 1),
    "mask": lambda x: torch.rand(x.shape[:2])[..., None] < torch.rand(len(x), 1, 1),
    "tokens": lambda x: torch.rand(x.shape[1], 1),
    "samples": lambda x: torch.bernoulli(torch.full((len(x), 1, 1), 0.5)),
    "one": lambda x: torch.rand([]),
    "integers": lambda x: torch.randint(5, x.shape[:2])[..., None],
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "multinomial": chosen,
    "normal": lambda x: torch.normal(torch.ones_like(x), 0.1),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "channels": lambda x: F.feature_alpha_dropout(x, 0.3),
    "slopes": lambda x: F.rrelu(x, training=True),
    "flat dropout": lambda x: F.dropout(flat(x), 0.3).view_as(x),
    "seeded": seeded,
    "resumed": resumed,
    "python": lambda x: random.random() + np.random.rand(),
}


def train(rank: int, sections: dict[str, Any], draws: list[str]) -> list[tuple[float, float]]:
    """Return losses and norms of steps over two micro-batches of two samples each."""
    torch.manual_seed(0)
    np.random.seed(rank)  # ranks need not agree on it
    random.seed(rank)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, use_cache=False, attention_dropout=0.2, **sizes)
    model = LlamaForCausalLM(config).double()

    def draw(module: nn.Module, _: Any, out: Tensor) -> Tensor:
        for name in draws if module.training else ():
            out = out * (1 + 0.1 * DRAWS[name](out))
        return out

    for module in (model.model.embed_tokens, *(each.mlp for each in model.model.layers)):
        module.register_forward_hook(draw)
    tokens = torch.Generator().manual_seed(1)
    with float64_throughout(), initialize(model, make_config(2, sections)) as engine:
        found = []
        for _ in range(NUM_STEPS):
            batches = [torch.randint(VOCAB, (2, LENGTH), generator=tokens) for _ in range(2)]
            num, index = engine.layout.mesh.num_data_ranks, engine.layout.mesh.data_index(rank)
            result = engine.train_step([{"input_ids": each, "labels": each} for each in batches[index::num]])
            found.append((result.loss, result.grad_norm))
        return found


LAYOUTS: dict[str, dict[str, Any]] = {
    "cp": {"mesh": {"cp": 2}},
    "ulysses, recomputed": {
        "mesh": {"cp": 2},
        "context": {"transport": "ulysses"},
        "recompute": {"mode": "full"},
    },
    "sp": {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}},
    "pp, recomputed": {"mesh": {"pp": 2}, "recompute": {"mode": "selective"}},
    "dp": {"zero": {"stage": 3}, "batch": {"accumulation": 1}, "mesh": {"dp_shard": 2}},
}


def train_all(rank: int, world_size: int, layouts: list[str]) -> list[list[tuple[float, float]]]:
    return [train(rank, LAYOUTS[layout], list(DRAWS)) for layout in layouts]


def test_layouts_draw_the_numbers_of_one_process(ranks: WorkerPool) -> None:
    expected = train(0, {}, list(DRAWS))
    for found in ranks(2).run(train_all, list(LAYOUTS)):
        for layout, trace in zip(LAYOUTS, found, strict=True):
            np.testing.assert_allclose(trace, expected, rtol=1e-9, err_msg=layout)


class Masked(nn.Module):
    """Draws a mask after units that drop, for its input and for the loss, as masked autoencoders do."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop, self.slopes = nn.Linear(8, 8), nn.Dropout(0.3), nn.RReLU()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.drop(self.slopes(self.up(x))) * random.random()

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = self.Block(), nn.ModuleList([self.Block() for _ in range(4)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x)
        mask = torch.rand(x.shape[:2]).argsort(1).argsort(1) >= x.shape[1] // 2
        h = h.masked_fill(mask[..., None], 0.0)
        for block in self.blocks:
            h = block(h)
        return self.head(h), mask.logical_and(torch.tensor(np.random.rand() < 2))


def masked_loss(output: tuple[Tensor, Tensor], batch: Tensor) -> tuple[Tensor, Any]:
    y, mask = output
    return (((y - batch).square().mean(-1) + torch.rand(mask.shape)) * mask).sum() * random.random(), mask.sum()


def train_masked(rank: int, world_size: int, sections: dict[str, Any]) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1)
    config = make_config(4, {"pipeline": {"units": ["embed", "blocks.*", "head"]}, **sections} if sections else {})
    with initialize(Masked().double(), config, loss_fn=masked_loss) as engine:
        steps = [
            engine.train_step([torch.randn(3, 8, 8, generator=data, dtype=torch.float64) for _ in range(4)])
            for _ in range(2)
        ]
        return [(step.loss, step.grad_norm) for step in steps]


@pytest.mark.parametrize(
    "pipeline", [{}, {"schedule": "interleaved", "virtual_stages": 2}, {"schedule": "zb-h1"}], ids=str
)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_stages_draw_one_mask(ranks: WorkerPool, pipeline: dict[str, Any], mode: str) -> None:
    expected = train_masked(0, 1, {})
    sections = {"mesh": {"pp": 2}, "pipeline": pipeline, "recompute": {"mode": mode}}
    for found in ranks(2).run(train_masked, sections):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("code", "draw"),
    [
        ("cp-tokens-apart", lambda x: torch.zeros_like(x).uniform_(-1, 1) / x.shape[1] ** 0.5),
        ("cp-tokens-apart", lambda x: x.mean(1, keepdim=True)),
        ("draw-over-tokens", lambda x: torch.randperm(x.shape[1])[:, None]),
        ("draw-over-tokens", lambda x: torch.poisson(x.detach().abs())),
    ],
)
def test_what_reads_the_number_of_tokens_in_training_is_refused(code: str, draw: Draw) -> None:
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4)
    model = LlamaForCausalLM(config)
    prove_huggingface(model)
    model.model.embed_tokens.register_forward_hook(
        lambda module, _, out: out * (1 + draw(out)) if module.training else out
    )
    with refused(code, "mesh.cp"):
        prove_huggingface(model)


class Seeding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x + F.dropout(self.up(x), 0.3) * torch.rand_like(x)


def train_seeding(rank: int, world_size: int, sections: dict[str, Any]) -> tuple[str, str]:
    model = nn.Sequential(*(Seeding() for _ in range(4))).double()
    with initialize(model, make_config(2, sections), loss_fn=lambda output, batch: output.square().mean()) as engine:
        return refusal_of(lambda: engine.train_step([torch.ones(2, 8, dtype=torch.float64)] * 2))


def test_a_seed_that_other_stages_would_draw_from_is_refused(ranks: WorkerPool) -> None:
    assert train_seeding(0, 1, {"recompute": {"mode": "selective"}}) == ("", "")
    found = ranks(2).run(train_seeding, {"mesh": {"pp": 2}})
    assert found[0][0] == "seed-over-stages"
    assert "fork_rng" in found[1][1]
