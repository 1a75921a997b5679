"""The format of landed checkpoints stays readable: one that the first commit able to save has written loads in full.

`tests/data/first_checkpoint` is of commit 218b07c (21 November 2026): two ranks of ZeRO 3 took ten steps with this
file's model, batches and config, and saved. `expected.json` has what that commit read of its own states, as CRC-32 of
their bytes, and the losses and norms of its next three steps. It is never written again.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.states import engine_of, whole_states
from shardwise.checkpoint.offline import verify

CHECKPOINT = Path(__file__).parents[2] / "data" / "first_checkpoint"
EXPECTED = json.loads((CHECKPOINT / "expected.json").read_text())
SCHEDULE = {"name": "cosine", "warmup_steps": 2, "total_steps": 100}


class Small(nn.Module):
    """Tied, frozen and trained parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 6)
        self.mix = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 16, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(()) + 0.5, requires_grad=False)
        self.register_buffer("offset", torch.randn(6))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.offset
        return self.head(self.norm(torch.tanh(self.mix(hidden)))) * self.scale  # [b, n, 16]


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def described(value: Tensor) -> list[object]:
    content = value.contiguous().view(-1).numpy().tobytes()
    return [str(value.dtype).removeprefix("torch."), list(value.shape), zlib.crc32(content)]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_first_checkpoint_loads_bit_for_bit_and_training_goes_on(stage: int) -> None:
    sections = {"zero": {"stage": stage}, "batch": {"micro_size": 2, "accumulation": 2}, "scheduler": SCHEDULE}
    with engine_of(Small, seed=1, **sections) as engine:
        report = engine.load(CHECKPOINT)
        assert (report.step, report.extra) == (10, {"epoch": 3})
        found = {" ".join(key): described(value) for key, value in whole_states(engine).items()}
        assert found == EXPECTED["states"]
        results = [engine.train_step([batch_of(step, rank) for rank in range(2)]) for step in range(10, 13)]
    assert [each.loss for each in results] == pytest.approx(EXPECTED["losses"], rel=1e-5)
    assert [each.grad_norm for each in results] == pytest.approx(EXPECTED["grad_norms"], rel=1e-4)


def test_the_first_checkpoint_is_whole() -> None:
    found = verify(CHECKPOINT / "step-00000010")
    assert found.damages == ()
