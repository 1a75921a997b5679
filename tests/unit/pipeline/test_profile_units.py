"""Measured costs of units: every unit has one, slow ones a larger one, and the model is as it was."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from harness.refusals import refused
from harness.scanned import stage_units_of
from shardwise import Config, measure_units
from shardwise.layout.stage_partition import find_partition

SLOW_S = 0.02


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLOW_S)
        return self.layer(x)


def make_model() -> nn.Sequential:
    return nn.Sequential(Sleeper(), *(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 2))


def test_a_slow_unit_gets_a_stage_of_its_own() -> None:
    model = make_model()
    seconds = measure_units(model, torch.ones(3, 4))
    assert list(seconds) == ["0", "1", "2", "3", "4", "5"]
    assert seconds["0"] > SLOW_S
    assert seconds["1"] == seconds["2"]  # like units are timed once
    pipeline = {"unit_seconds": seconds, "balance": "time"}
    config = Config.from_dict({"mesh": {"pp": 2}, "pipeline": pipeline}).resolve(2)
    assert find_partition(stage_units_of(model), config).first_units == ("0", "1")


def test_the_loss_counts_for_the_last_unit_and_gradients_stay() -> None:
    model = make_model()
    model[1].weight.grad = gradient = torch.ones(4, 4)

    def slow_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(SLOW_S)
        return (output - batch[1]).square().sum()

    seconds = measure_units(model, (torch.ones(3, 4), torch.ones(3, 2)), loss_fn=slow_loss, num_runs=1)
    assert seconds["5"] > SLOW_S
    assert model[1].weight.grad is gradient
    assert all(parameter.grad is None for parameter in model[0].parameters())


def test_a_unit_that_does_not_run_is_named() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x)

    with refused("unit-not-run", "blocks.1"):
        measure_units(Skips(), torch.ones(2, 4))
