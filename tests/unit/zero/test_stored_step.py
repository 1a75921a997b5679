"""In which order chunks are stepped, and what of them stays in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.offload import tiers
from shardwise.offload.step_pipeline import StepChunk, StepPipeline
from shardwise.zero import stored_step as streamed


def square(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def test_a_pass_over_files_begins_with_what_is_in_memory_and_goes_on_in_the_order_of_the_next_forward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (tiers, streamed):
        monkeypatch.setattr(module, "CHUNK_NUMEL", 2048)
    begun: list[int] = []
    submit = StepPipeline.submit

    def note(pipeline: StepPipeline, chunk: StepChunk) -> object:
        begun.append(chunk.start // 2048)
        return submit(pipeline, chunk)

    monkeypatch.setattr(StepPipeline, "submit", note)
    config = {
        "run": {"device": "cpu"},
        "tiers": {"optimizer": "nvme", "nvme_path": str(tmp_path)},
    }
    with shardwise.initialize(nn.Linear(96, 128, bias=False), config, loss_fn=square) as engine:
        kept_bytes = []
        for _ in range(3):
            engine.train_step([torch.ones(2, 96)])
            engine.tiers.wait_idle()
            kept_bytes.append(engine.tiers.traffic.kept_bytes)
            engine.tiers.traffic.reset()
    assert begun == [0, 1, 2, 3, 4, 5, *[4, 5, 0, 1, 2, 3], *[2, 3, 0, 1, 4, 5]]
    assert kept_bytes == [0, *[2 * 3 * 4 * 2048] * 2]  # master and moments of two chunks


def test_host_groups_are_stepped_in_the_order_of_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    submit = StepPipeline.submit

    def note(pipeline: StepPipeline, chunk: StepChunk) -> object:
        begun.append(chunk.stop)
        return submit(pipeline, chunk)

    monkeypatch.setattr(StepPipeline, "submit", note)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False), nn.Linear(16, 16, bias=False)])
    config = {"run": {"device": "cpu"}, "zero": {"blocks": ["Linear"]}, "tiers": {"optimizer": "host"}}
    with shardwise.initialize(model, config, loss_fn=square) as engine:
        for _ in range(2):
            engine.train_step([torch.ones(2, 8)])
    assert begun == [64, 128, 256] * 2


@pytest.mark.parametrize("states", ["int8", "bf16"])
def test_neighbours_are_one_piece_to_a_kernel_and_step_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, states: str
) -> None:
    """Also where the first ends within a block; others may stand between them that are not encoded."""
    triton_step = pytest.importorskip("shardwise.zero.triton_step")
    step_piece = triton_step.step_piece
    monkeypatch.setattr(streamed, "has_kernels", lambda device: True)
    precision = {"param": "fp32", "states": states}
    config = {"run": {"device": "cpu"}, "zero": {"blocks": []}, "precision": precision}

    def train() -> tuple[int, list[Tensor]]:
        num_launches = 0

        def count(*arguments: Any) -> None:
            nonlocal num_launches
            num_launches += 1
            step_piece(*arguments)

        monkeypatch.setattr(triton_step, "step_piece", count)
        torch.manual_seed(0)
        layers = [nn.Linear(65, 65, bias=False), nn.Linear(65, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 80)]
        with shardwise.initialize(nn.Sequential(*layers), config, loss_fn=square) as engine:
            for step in range(3):
                engine.train_step([torch.randn(2, 65, generator=torch.Generator().manual_seed(step))])
            return num_launches, [value.detach().clone() for value in engine.module.parameters()]

    num_merged, merged = train()
    monkeypatch.setattr(streamed.StoredStep, "runs", lambda self, plans: plans)
    num_single, single = train()
    assert (num_merged, num_single) == (3 * 2, 3 * 4)  # a bias ends a run
    assert all(map(torch.equal, merged, single))
