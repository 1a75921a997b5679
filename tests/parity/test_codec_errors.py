"""What codecs round off is measured in the steps that are asked for, and measuring changes nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.pool import WorkerPool
from shardwise import initialize
from shardwise.layout.wire_codec import WireCodec

CODECS = {"states": "int8", "gather": "int8", "reduce": "int8"}
AWAY = {"params": "host", "grads": "host", "optimizer": "host"}


def loss_fn(output: Tensor, batch: Tensor) -> Tensor:
    return (output - batch).square().mean()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def train(
    rank: int, world_size: int, stage: int, precision: dict[str, Any], tiers: dict[str, Any]
) -> list[tuple[float, dict[str, float]]]:
    config = {
        "run": {"device": "cpu"}, "zero": {"stage": stage}, "precision": precision, "tiers": tiers,
    }  # fmt: skip
    with initialize(build(), config, loss_fn=loss_fn) as engine:
        batches = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(rank))
        results = [engine.train_step([batch]) for batch in batches]
        return [(result.loss, dict(result.codec_errors)) for result in results]


@pytest.mark.parametrize(
    ("stage", "tiers", "feedback"),
    [
        (0, {}, False),
        (1, {}, True),
        (3, {}, False),
        (3, AWAY, True),
    ],
)
def test_every_second_step_says_what_each_codec_rounds_off(
    ranks: WorkerPool, stage: int, tiers: dict[str, Any], feedback: bool
) -> None:
    precision = {**CODECS, "reduce_feedback": feedback}
    found = ranks(2).run(train, stage, {**precision, "errors_every": 2}, tiers)
    plain = ranks(2).run(train, stage, precision, tiers)
    assert found[0] == found[1]
    assert [loss for loss, _ in found[0]] == [loss for loss, _ in plain[0]]
    assert not any(errors for _, errors in plain[0])
    assert [sorted(errors) for _, errors in found[0]] == [[], ["exp_avg", "exp_avg_sq", "gather", "reduce"]] * 2
    for _, errors in found[0]:
        assert all(1e-3 < error < 2e-2 for name, error in errors.items() if name in ("gather", "reduce"))
        assert all(1e-4 < error < 5e-2 for error in errors.values())


def test_the_error_is_that_of_all_parameters_that_are_encoded(ranks: WorkerPool) -> None:
    ((_, errors), *_), *_ = ranks(1).run(train, 0, {"gather": "int8", "errors_every": 1}, {})
    # After the first step every element has moved by about the rate: the error is that of weights of this size.
    codec, squares = WireCodec("int8"), torch.zeros(2, dtype=torch.float64)
    for weight in (each.detach().double() for each in build().parameters() if each.numel() >= 4096):
        decoded = codec.decode(codec.encode(weight.flatten()), torch.empty(weight.numel(), dtype=torch.float64))
        squares += torch.stack([(decoded - weight.flatten()).square().sum(), weight.square().sum()])
    assert errors == {"gather": pytest.approx(math.sqrt(squares[0] / squares[1]), rel=0.05)}
