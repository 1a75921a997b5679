"""Trains, saves and loads by Lightning Fabric's DeepSpeed strategy: `lightning_run.py FOLDER`, under torchrun.

Rank 0 writes `stage-N.pt`: the losses, those after a load, and the weights that Lightning's own consolidation gives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NUM_STEPS, NUM_MORE, BATCH = 3, 2, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, values: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(values)))


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(first: int, count: int) -> Iterator[Tensor]:
    """Yield the whole batches of some steps."""
    for step in range(first, first + count):
        yield torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))


def train(fabric: Any, model: Any, optimizer: Any, first: int, count: int) -> list[float]:
    losses = []
    for whole in batches(first, count):
        loss = model(whole.chunk(fabric.world_size)[fabric.global_rank]).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
    return losses


def run_stage(folder: Path, stage: int) -> None:
    from lightning_fabric import Fabric
    from lightning_fabric.accelerators import CPUAccelerator
    from lightning_fabric.strategies import DeepSpeedStrategy
    from lightning_fabric.strategies import deepspeed as of_lightning

    # It asks for GPUs by their numbers, and what follows needs none.
    of_lightning.CUDAAccelerator = CPUAccelerator
    of_lightning._validate_device_index_selection = lambda devices: None
    strategy = DeepSpeedStrategy(stage=stage, logging_batch_size_per_gpu=BATCH // 2)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(*make())
    found: dict[str, Any] = {"losses": train(fabric, model, optimizer, 0, NUM_STEPS)}
    checkpoint = folder / f"stage-{stage}"
    fabric.save(checkpoint, {"model": model, "optimizer": optimizer, "epoch": 7})
    found["on"] = train(fabric, model, optimizer, NUM_STEPS, NUM_MORE)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    fabric.load(checkpoint, state)
    found["loaded"], found["epoch"] = train(fabric, model, optimizer, NUM_STEPS, NUM_MORE), state["epoch"]
    if fabric.global_rank == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        found["weights"] = get_fp32_state_dict_from_zero_checkpoint(checkpoint)
        torch.save(found, folder / f"stage-{stage}.pt")
    fabric.barrier()


if __name__ == "__main__":
    for number in (1, 2, 3):
        run_stage(Path(sys.argv[1]), number)
