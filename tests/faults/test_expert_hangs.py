"""Ranks with different experts: none waits for rows that do not come, and one that dies is named by the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.killed_ranks import refusal_after_a_kill
from harness.moe import RoutedModel, routed_rows, square
from harness.pool import WorkerPool
from harness.training import make_config
from harness.waiting import PATIENCE_S
from shardwise import Engine, initialize

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("warm_python")

SILENT_S = 3.0  # longer than a machine may stall


def make_engine(mesh: dict[str, int], **sections: Any) -> Engine:
    torch.manual_seed(3)
    return initialize(RoutedModel().double(), make_config(1, {"mesh": mesh, **sections}), loss_fn=square)


def train_without(rank: int, world_size: int, ranks_without: list[int], sections: dict[str, Any]) -> list[Any]:
    with make_engine({"ep": 2}, **sections) as engine:
        found = []
        for step in range(2):
            rows = routed_rows(rank, step)
            keep = torch.full((len(rows),), rank not in ranks_without)
            result = engine.train_step([{"x": rows, "keep": keep}])
            found.append((result.loss, result.grad_norm))
        values = {name: engine.read(name) for name in sorted(engine.layout.trained_names)}
    return [found, values]


def train_plainly(ranks_with: list[int]) -> list[Any]:
    """What one process computes of the rows of some ranks."""
    torch.manual_seed(3)
    model = RoutedModel().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    found = []
    for step in range(2):
        out = model(torch.cat([routed_rows(rank, step) for rank in ranks_with]))
        loss = out.square().sum() / len(out)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        found.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return [found, dict(model.named_parameters())]


@pytest.mark.parametrize(
    ("num_ranks", "ranks_without", "sections"),
    [
        (2, [1], {"zero": {"stage": 2}}),
        (2, [0], {"zero": {"stage": 3}, "recompute": {"mode": "full"}}),
        (4, [2, 3], {"zero": {"stage": 3}}),  # all of one group
    ],
    ids=str,
)
def test_ranks_that_route_nothing_take_part(
    ranks: WorkerPool, num_ranks: int, ranks_without: list[int], sections: dict[str, Any]
) -> None:
    sections = {"optimizer": {"weight_decay": 0.0, "lr": 1e-2}, **sections}
    steps, parameters = train_plainly([rank for rank in range(num_ranks) if rank not in ranks_without])
    for found, values in ranks(num_ranks).run(train_without, ranks_without, sections):
        assert [tuple(map(pytest.approx, each)) for each in found] == steps
        for name, value in values.items():
            assert torch.allclose(value, parameters[name], rtol=1e-9, atol=1e-12), name


def die_in_exchange(rank: int) -> Callable[[], Any]:
    engine = make_engine({"ep": 2}, run={"device": "cpu", "timeout_s": PATIENCE_S, "watchdog_s": SILENT_S})
    engine.train_step([routed_rows(rank)])
    exchange, num_calls = dist.all_to_all_single, 0

    def exchange_or_die(out: Tensor, rows: Tensor, *sizes: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if rank == 1 and num_calls == 2:  # the counts of the first layer were the first
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(out, rows, *sizes, **options)

    mock.patch.object(dist, "all_to_all_single", exchange_or_die).start()  # the process ends with the step
    return lambda: engine.train_step([routed_rows(rank)])


def test_a_rank_killed_in_the_exchange_of_rows_is_named_by_the_other() -> None:
    code, message = refusal_after_a_kill(die_in_exchange, 0.2)
    assert code == "collective-failed"
    assert message.startswith("rank 0 failed in exchange #")
    assert " of layers.0.experts over ep (2 ranks)" in message
    assert "rank 1 does not answer" in message
