"""Groups that are stepped on the host, beside those that are stepped on the device."""

from __future__ import annotations

from typing import Any

import torch

from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.training import make_config
from shardwise import initialize

CASE = CASES["odd-shapes"]


def train(rank: int, world_size: int, tiers: dict[str, Any]) -> list[float]:
    batches = make_batches(CASE, num_steps=4, world_size=world_size, num_micro_batches=1)
    config = make_config(1, {"zero": {"stage": 3}, "tiers": tiers})
    with initialize(CASE.build(torch.float64), config, loss_fn=CASE.loss) as engine:
        return [engine.train_step(step[rank]).loss for step in batches]


def test_a_share_that_is_stepped_on_the_device_waits_for_the_step(ranks: WorkerPool) -> None:
    pool = ranks(2)
    assert pool.run(train, {"optimizer": "host", "optimizer_on_device": 0.5}) == pool.run(train, {})
