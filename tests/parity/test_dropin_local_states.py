"""This rank's slices by `safe_get_local_*` and `safe_set_local_*`, and tiled computation, equal one plain process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import shardwise.compat.deepspeed as deepspeed
from harness.pool import WorkerPool
from shardwise.compat.deepspeed import utils

OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


class Tiled(nn.Module):
    """A block and a head whose loss is computed by tiles; without tiles where `num_tiles` is 0."""

    def __init__(self, num_tiles: int) -> None:
        super().__init__()
        self.num_tiles = num_tiles
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), y.flatten(), reduction="sum")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        from shardwise.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import (
            TiledFusedLogitsLoss,
            TiledMLP,
            sequence_tiled_compute,
        )

        for layer in self.layers:
            if self.num_tiles:
                x = x + TiledMLP.apply(lambda module, tile: module(tile), layer, x, self.num_tiles, [])
            else:
                x = x + layer(x)
        if not self.num_tiles:
            return self.loss(x, y) / 2 + self.loss(x, y).sqrt()
        first = TiledFusedLogitsLoss.apply(Tiled.loss, self, x, y, None, self.num_tiles, [self.head.weight], "sum")
        tiles = {"x": x, "y": y}
        again = sequence_tiled_compute(self.loss, 5, self.num_tiles, tiles, {}, "x", [], 0, "sum")
        return first / 2 + again.sqrt()


def built(num_tiles: int) -> Tiled:
    torch.manual_seed(5)
    return Tiled(num_tiles).double()


def sample(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 5, 6, dtype=torch.float64, generator=generator), torch.arange(10).view(2, 5) % 5


def run(rank: int, world_size: int, stage: int, zero: dict[str, Any]) -> dict[str, Any]:
    """Take a step over tiles; in stage 3 read the slices, and write others."""
    section = {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero if stage == 3 else {})}
    config = {"train_batch_size": world_size, "gradient_clipping": 0, "zero_optimization": section}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.1, "weight_decay": 0.0, "adam_w_mode": False}}
    model = built(3)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(engine(*sample(rank)))
    found: dict[str, Any] = {"grads": {}, "local": {}}
    for name, parameter in model.named_parameters():
        found["grads"][name] = utils.safe_get_full_grad(parameter)
        if stage == 3:
            found["local"][name] = utils.safe_get_local_grad(parameter)
            utils.safe_set_local_grad(parameter, 2 * found["local"][name])
            torch.testing.assert_close(utils.safe_get_local_grad(parameter), 2 * found["local"][name])
    engine.step()
    if stage == 3:
        for name, parameter in model.named_parameters():
            mine = utils.safe_get_local_fp32_param(parameter)
            moment = utils.safe_get_local_optimizer_state(parameter, "exp_avg")
            torch.testing.assert_close(moment, 0.1 * 2 * found["local"][name])
            utils.safe_set_local_fp32_param(parameter, mine + rank + 1)
            utils.safe_set_local_optimizer_state(parameter, torch.full_like(mine, 7.0 + rank), "exp_avg")
            whole = utils.safe_get_full_fp32_param(parameter)
            with deepspeed.zero.GatheredParameters(parameter):
                torch.testing.assert_close(parameter.detach(), whole)
            found[name] = mine, whole, utils.safe_get_full_optimizer_state(parameter, "exp_avg")
    engine.destroy()
    return found


CASES = ((1, {}), (2, {}), (3, {}), (3, OFFLOAD))


def run_all(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [run(rank, world_size, stage, zero) for stage, zero in CASES]


def test_slices_are_the_ranks_own_and_tiles_are_the_whole(ranks: WorkerPool) -> None:
    model = built(0)
    (sum(model(*sample(rank)) for rank in range(2)) / 2).backward()
    by_rank = ranks(2).run(run_all)
    for index, (stage, _) in enumerate(CASES):
        check(model, stage, [cases[index] for cases in by_rank])


def check(model: nn.Module, stage: int, found: list[dict[str, Any]]) -> None:
    """Compare what two ranks found with the gradients of one process, and what they wrote with what they read."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for rank in range(2):
            torch.testing.assert_close(found[rank]["grads"][name], parameter.grad, rtol=1e-9, atol=1e-9)
        if stage < 3:
            continue
        joined = torch.cat([each["local"][name] for each in found])
        torch.testing.assert_close(joined.view_as(parameter), parameter.grad, rtol=1e-9, atol=1e-9)
        first, second = (each[name] for each in found)
        whole = torch.cat([first[0] + 1, second[0] + 2]).view_as(parameter)
        moments = torch.cat([torch.full_like(first[0], 7.0), torch.full_like(second[0], 8.0)]).view_as(parameter)
        for own in (first, second):
            torch.testing.assert_close(own[1], whole)
            torch.testing.assert_close(own[2], moments)
