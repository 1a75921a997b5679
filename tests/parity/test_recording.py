"""The timeline of a pipeline's last step: the planned actions of all ranks, on one clock, in a file that reads back."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from harness.pool import WorkerPool
from shardwise.report.chrome_trace import read_chrome_trace
from shardwise.schedule import ActionKind
from shardwise.train.recording import gather_timeline

# Of rank 1's clock; and what each layer's forward takes, by all clocks. No machine stalls for as long.
CLOCK_OFFSET_S, LAYER_S = 1e6, 1000.0


def record(rank: int, world_size: int, mesh: dict[str, int], folder: Path) -> tuple[list[list[str]], Any]:
    """The planned rows and the gathered actions; rank 1's clock is far ahead."""
    config = {
        "mesh": mesh,
        "batch": {"accumulation": 4},
        "pipeline": {"schedule": "zb-h1"} if mesh["pp"] > 1 else {},
        "run": {"device": "cpu", "timeout_s": 30.0},
    }
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    assert dist.group.WORLD is not None
    store, own_clock = dist.group.WORLD.get_group_store(), time.perf_counter

    def clock() -> float:
        return own_clock() + CLOCK_OFFSET_S * rank + LAYER_S * store.add("num_layers_run", 0)

    for layer in model:
        layer.register_forward_hook(lambda *_: store.add("num_layers_run", 1) and None)
    with (
        mock.patch.object(time, "perf_counter", side_effect=clock),
        shardwise.initialize(model, config, loss_fn=lambda output, batch: output.square().mean()) as engine,
    ):
        for _ in range(2):
            engine.train_step([torch.ones(2, 4)] * 4)
        dist.barrier()  # of the pipelines: now the clocks stand
        actions = gather_timeline(engine)
        shardwise.save_timeline(engine, folder / f"{rank}.json")
        schedule = getattr(engine.runner, "schedule", None)
        rows = [[str(action) for action in row] for row in schedule.ranks] if schedule is not None else []
    return rows, actions


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 2, "dp_shard": 2}], ids=str)
def test_every_rank_of_a_pipeline_is_in_it(ranks: WorkerPool, mesh: dict[str, int], tmp_path: Path) -> None:
    num_ranks = 2 * mesh.get("dp_shard", 1)
    results = ranks(num_ranks).run(record, mesh, tmp_path)
    for rows, actions in results:
        assert [[str(each.action) for each in actions if each.rank == rank] for rank in range(2)] == rows
        assert min(each.start_s for each in actions) == 0.0
        assert max(each.end_s for each in actions) < CLOCK_OFFSET_S / 2
        starts_s = {str(each.action): each.start_s for each in actions if each.action.kind is ActionKind.FORWARD}
        assert starts_s["0F0"] < starts_s["1F0"]
    (written,) = tmp_path.iterdir()
    assert written.name == "0.json"
    for one, other in zip(results[0][1], read_chrome_trace(json.loads(written.read_text())), strict=True):
        assert (one.action, one.rank, one.stream) == (other.action, other.rank, other.stream)
        assert one.duration_s == pytest.approx(other.duration_s, abs=1e-6)


def test_without_a_pipeline_it_is_the_own_ranks(ranks: WorkerPool, tmp_path: Path) -> None:
    results = ranks(2).run(record, {"pp": 1}, tmp_path)
    assert all({each.rank for each in actions} == {0} and len(actions) > 8 for _, actions in results)
    assert [each.name for each in tmp_path.iterdir()] == ["0.json"]
