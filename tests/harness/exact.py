"""Train models whose gradients are sums of products of small integers, which no order of additions rounds: so every
layout gives the same gradients, and where states or updates differ it is the step that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn

from harness.training import make_config
from shardwise import Engine, initialize
from shardwise.offload import tiers
from shardwise.zero import stored_step

WIDTH: Final = 128
NUM_BLOCKS: Final = 4
NUM_STEPS: Final = 4
GLOBAL_BATCH: Final = 8
# Each weight of a block is then stepped in four chunks.
CHUNK_NUMEL: Final = 4096


class ExactBlock(nn.Module):
    """Passes its input on, bit for bit; its weights get gradients that are sums of products of small integers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.norm = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        added = self.up(x.detach()) + self.norm * x.detach()
        return x + (added - added.detach())


class ExactModel(nn.Module):
    """As many blocks one after the other; the last weight has a size that blocks of 256 do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(ExactBlock(WIDTH) for _ in range(NUM_BLOCKS))])
        self.odd = nn.Parameter(torch.linspace(-1, 1, 65 * 65).view(65, 65))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        scale = (self.odd - self.odd.detach()).sum()
        return x + scale


class SplitBlock(nn.Module):
    """An `ExactBlock` with a layer that is split by its outputs and one that is split by its inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.norm = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        added = self.up(x.detach()) + self.down(x.detach()) + self.norm * x.detach()
        return x + (added - added.detach())


class SplitModel(nn.Module):
    """Two blocks, of which tp = 2 cuts no block of codes; also with a weight as `ExactModel` has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SplitBlock(4 * WIDTH), SplitBlock(4 * WIDTH)])
        self.odd = nn.Parameter(torch.linspace(-1, 1, 65 * 65).view(65, 65))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + (self.odd - self.odd.detach()).sum()


SPLIT_PLAN: Final = {"blocks.*.up": "column-gather", "blocks.*.down": "row-split"}


def weighted_sum(output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.arange(output.shape[-1], dtype=output.dtype) % 5 - 2
    return (output * weights).sum(), torch.tensor(float(output.shape[0]))


def batch_of(step: int, samples: range, width: int = WIDTH) -> Tensor:
    """Rows of integers from -3 to 3, with a column that is large in one step, and one that is always 0."""
    rows = torch.arange(width).repeat(len(samples), 1) * (step + 1) + torch.tensor(list(samples)).unsqueeze(1) * 7
    found = (rows % 7 - 3).float()
    found[:, 1] *= 1000 if step == 2 else 1
    found[:, 0] = 0
    return found


def stored_bytes(engine: Engine) -> dict[str, int]:
    """Bytes of the optimizer's states and of masters beside the parameters, by tier."""
    found = dict.fromkeys(("device", "host", "nvme"), 0)
    storages = engine.parts.sharded.storages()
    storages += [each.master for each in engine.parts.sharding.groups if each.master is not each.shard]
    for each in storages:
        found[each.tier] += each.numel * each.dtype.itemsize
    return found


def train(
    rank: int,
    world_size: int,
    name: str,
    states: str,
    sections: dict[str, Any],
    places: tuple[str, str] = ("", ""),
    is_split: bool = False,
    num_steps: int = NUM_STEPS,
) -> tuple[dict[str, Tensor], dict[str, int], dict[str, int]]:
    """Take steps; return parameters and states, and the optimizer's bytes by tier as counted and by the layout.

    `places` are the folders from which it begins and to which it saves; `is_split` chooses the model.
    """
    torch.manual_seed(0)
    given = {**sections, "precision": {"param": "fp32", "states": states, **sections.get("precision", {})}}
    given["optimizer"] = {"name": name, "lr": 1e-2, "momentum": 0.9, "clip_norm": None}
    accumulation = sections.get("batch", {}).get("accumulation", 1)
    mesh = sections.get("mesh", {})
    num_data = world_size // mesh.get("pp", 1) // mesh.get("tp", 1)
    micro_size = GLOBAL_BATCH // num_data // accumulation
    given["batch"] = {"micro_size": micro_size, "accumulation": accumulation}
    plan = SPLIT_PLAN if mesh.get("tp", 1) > 1 else None
    with (
        mock.patch.object(stored_step, "CHUNK_NUMEL", CHUNK_NUMEL),
        mock.patch.object(tiers, "CHUNK_NUMEL", CHUNK_NUMEL),
        initialize(
            SplitModel() if is_split else ExactModel(),
            make_config(accumulation, given),
            loss_fn=weighted_sum,
            plan=plan,
        ) as engine,
    ):
        if places[0]:
            engine.load(places[0])
        width = 4 * WIDTH if is_split else WIDTH
        take_steps(engine, rank, num_data, accumulation, num_steps, width)
        shard = engine.parts.comms.shards.rank
        expected = {tier: engine.layout.bytes_at_rest(shard, tier)["optimizer"] for tier in ("device", "host", "nvme")}
        found = states_in(engine)
        if places[1]:
            engine.save(places[1])
        return found, stored_bytes(engine), expected


def take_steps(
    engine: Engine, rank: int, num_data: int, accumulation: int, num_steps: int = NUM_STEPS, width: int = WIDTH
) -> None:
    """Take steps on this rank's share of the batches."""
    data_rank, first = engine.layout.mesh.data_index(rank), engine.num_steps
    micro_size = GLOBAL_BATCH // num_data // accumulation
    for step in range(first, first + num_steps):
        starts = [(number * num_data + data_rank) * micro_size for number in range(accumulation)]
        engine.train_step([batch_of(step, range(start, start + micro_size), width) for start in starts])


def states_in(engine: Engine) -> dict[str, Tensor]:
    """All parameters, masters and states."""
    found = {
        f"{name} {state}": engine.read(name, state)
        for name in engine.layout.trained_names
        for state in ("param", "master", *engine.states_of(name))
    }
    return {key: value.clone() for key, value in found.items() if value is not None}


def swap_files(folder: Path, name: str) -> list[Path]:
    """The swap files of engines at work whose name ends so."""
    return sorted(folder.glob(f"*/*{name}"))


def assert_equal_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
