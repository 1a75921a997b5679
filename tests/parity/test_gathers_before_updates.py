"""A gather of updated parameters has ended before the optimizer writes them again, whichever ranks use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.pool import WorkerPool
from harness.training import make_config
from shardwise import initialize
from shardwise.comm.backends import GlooComm
from shardwise.comm.collectives import AsyncWork


class OneSided(nn.Module):
    """The second block is used on rank 1 only."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self._num_used = 1 + rank

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self._num_used]:
            x = torch.tanh(block(x))
        return x


class NotedSGD(torch.optim.SGD):
    """Notes its steps."""

    events: list[str]

    def step(self, closure: Any = None) -> None:
        self.events.append("step")
        super().step(closure)


def train(rank: int, world_size: int, stage: int) -> list[str]:
    events: list[str] = []
    plain = GlooComm.all_gather

    def all_gather(comm: GlooComm, full: Tensor, name: str, *args: Any) -> AsyncWork:
        work = plain(comm, full, name, *args)
        events.append(f"{name} begins")

        def wait() -> None:
            work.wait()
            events.append(f"{name} ends")

        return AsyncWork(wait)

    config = make_config(1, {"zero": {"stage": stage}, "precision": {"param": "fp32"}, "run": {"device": "cpu"}})

    def optimizer(groups: Any) -> NotedSGD:
        made = NotedSGD(groups, lr=0.1)
        made.events = events
        return made

    GlooComm.all_gather = all_gather  # type: ignore[method-assign]
    try:
        loss_fn = lambda output, batch: (output.square().sum(), output.numel())  # noqa: E731
        with initialize(OneSided(rank), config, loss_fn=loss_fn, optimizer=optimizer) as engine:
            for _ in range(3):
                engine.train_step([torch.ones(2, 8)])
                events.append("trained")
    finally:
        GlooComm.all_gather = plain  # type: ignore[method-assign]
    return events


@pytest.mark.parametrize("stage", [1, 2])
def test_no_gather_reads_what_the_optimizer_writes(ranks: WorkerPool, stage: int) -> None:
    for events in ranks(2).run(train, stage):
        steps = [index for index, event in enumerate(events) if event == "step"]
        assert len(steps) == 3
        for step in steps:
            before = events[:step]
            open_ = [name for name in before if name.endswith("begins")]
            ended = [name for name in before if name.endswith("ends")]
            assert len(open_) == len(ended), events
        assert any("blocks.1" in event for event in events)
