"""Parameters in fewer bits on the wire: the same bits in every layout, exact masters, bytes as by the formulas."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from harness.pool import WorkerPool
from harness.training import make_config
from shardwise import initialize
from shardwise.engine.engine import Engine
from shardwise.layout.codec import BLOCK_NUMEL
from shardwise.layout.wire_codec import WireCodec

WIDTH: Final = 64
NUM_BLOCKS: Final = 3
NUM_STEPS: Final = 3
GLOBAL_BATCH: Final = 8


class SeeingBlock(nn.Module):
    """Passes its input on, bit for bit, and notes the weights that its forward uses.

    The gradients are sums of products of small integers, which no order of additions rounds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.odd = nn.Parameter(torch.linspace(-1, 1, 67 * 67).view(67, 67))  # 256 does not divide it
        self.small = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            seen = (self.up.weight, self.odd, self.small)
            self.seen.append(torch.cat([each.detach().flatten().double() for each in seen]))
        added = self.up(x.detach()) + self.small * x.detach()
        scale = self.odd.sum()
        return x + (added - added.detach()) + (scale - scale.detach())


class SeeingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(SeeingBlock() for _ in range(NUM_BLOCKS))])
        self.head = nn.Parameter(torch.linspace(-3, 3, 128 * WIDTH).view(128, WIDTH))
        with torch.no_grad():
            self.blocks[0].up.weight[4:8] = 0.0  # a block of zeros alone
            self.blocks[0].up.weight[0, 0] = 1e4  # an outlier
            self.blocks[1].up.weight[:, 3] *= 1e-6

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + (self.head - self.head.detach()).sum()


def weighted_sum(output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.arange(output.shape[-1], dtype=output.dtype) % 5 - 2
    return (output * weights).sum(), torch.tensor(float(output.shape[0]))


def batch_of(step: int, samples: range) -> Tensor:
    """Rows of integers from -3 to 3."""
    rows = torch.arange(WIDTH).repeat(len(samples), 1) * (step + 1) + torch.tensor(list(samples)).unsqueeze(1) * 7
    return (rows % 7 - 3).float()


NAMES: Final = [f"blocks.{index}.{name}" for index in range(NUM_BLOCKS) for name in ("up.weight", "odd", "small")]
OPTIMIZER: Final = {"name": "adamw", "lr": 1e-2, "clip_norm": None}


def make_engine(sections: dict[str, Any], world_size: int, frozen: str = "") -> tuple[Engine, int, int]:
    torch.manual_seed(0)
    accumulation = sections.get("batch", {}).get("accumulation", 1)
    mesh = sections.get("mesh", {})
    micro_size = GLOBAL_BATCH // (world_size // mesh.get("pp", 1)) // accumulation
    given = {"optimizer": OPTIMIZER, **sections, "batch": {"micro_size": micro_size, "accumulation": accumulation}}
    given["precision"] = {"param": "fp32", **sections.get("precision", {})}
    model = SeeingModel()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and frozen in name))
    return initialize(model, make_config(accumulation, given), loss_fn=weighted_sum), micro_size, accumulation


def step_of(engine: Engine, rank: int, sizes: tuple[int, int, int], step: int) -> float:
    num_data, micro_size, accumulation = sizes
    index = engine.layout.mesh.data_index(rank)
    starts = [(number * num_data + index) * micro_size for number in range(accumulation)]
    return engine.train_step([batch_of(step, range(start, start + micro_size)) for start in starts]).loss


def train(
    rank: int,
    world_size: int,
    sections: dict[str, Any],
    frozen: str = "",
    places: tuple[str, str] = ("", ""),
    num_steps: int = NUM_STEPS,
) -> dict[str, Any]:
    """Take steps; return losses, parameters, masters, and by block the weights that forwards have used."""
    engine, micro_size, accumulation = make_engine(sections, world_size, frozen)
    if places[0]:
        engine.load(places[0])
    sizes = (world_size // sections.get("mesh", {}).get("pp", 1), micro_size, accumulation)
    first = engine.num_steps
    losses = [step_of(engine, rank, sizes, step) for step in range(first, first + num_steps)]
    found: dict[str, Any] = {"losses": losses}
    for name in NAMES:
        found |= {f"{name} {state}": engine.read(name, state).clone() for state in ("param", "master")}
    held = engine.layout.held_units
    seen = {name: engine.step_context.model.get_submodule(name).seen for name in held}
    with engine.gathered() as model:
        names = [name for name in NAMES if name.startswith(tuple(f"{unit}." for unit in held))]
        shown = {name: model.get_parameter(name).detach().clone() for name in names}
    found["shown"] = shown
    found["seen"] = {name: torch.stack(each[::accumulation]) for name, each in seen.items()}
    if places[1]:
        engine.save(places[1])
    engine.close()
    return found


def decoded(codec: str, master: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What the model computes with, by blocks of the whole parameter."""
    exact = master.flatten().to(dtype)
    padded = torch.nn.functional.pad(exact, (0, -exact.numel() % BLOCK_NUMEL))
    wire = WireCodec(codec)  # type: ignore[arg-type]
    return wire.decode(wire.encode(padded), torch.empty_like(padded))[: exact.numel()].view(master.shape)


def assert_equal_bits(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["losses"] == expected["losses"]
    for name in NAMES:
        for state in ("param", "master"):
            assert torch.equal(actual[f"{name} {state}"], expected[f"{name} {state}"]), (name, state)
    for kind in ("seen", "shown"):
        for name, value in actual[kind].items():
            assert torch.equal(value, expected[kind][name]), (kind, name)


LAYOUTS: Final[list[tuple[int, dict[str, Any]]]] = [
    (1, {"batch": {"accumulation": 4}, "zero": {"stage": 3}}),
    *((num_ranks, {"zero": {"stage": stage}}) for num_ranks in (2, 4) for stage in range(4)),
    (2, {"zero": {"stage": 3, "overlap": False}, "batch": {"accumulation": 2}}),
    (4, {"zero": {"stage": 2}, "mesh": {"dp_replicate": 2}}),
    (4, {"zero": {"stage": 3}, "mesh": {"dp_replicate": 2}, "batch": {"accumulation": 2}}),
    (2, {"zero": {"stage": 3, "lockstep": True}}),
    (2, {"zero": {"stage": 2}, "tiers": {"optimizer": "host"}}),
    (1, {"zero": {"stage": 3}, "tiers": {"params": "host", "optimizer": "host"}}),
    (2, {"zero": {"stage": 3}, "tiers": {"params": "host"}}),
    (2, {"zero": {"stage": 1}, "mesh": {"pp": 2}, "batch": {"accumulation": 2}}),
    (4, {"zero": {"stage": 3}, "mesh": {"pp": 2}, "batch": {"accumulation": 2}}),
    (4, {"zero": {"stage": 3, "secondary_shard": 2}, "batch": {"accumulation": 2}}),
    (4, {"zero": {"stage": 3, "secondary_shard": 1}}),
]


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize(("num_ranks", "sections"), LAYOUTS, ids=range(len(LAYOUTS)))
def test_forwards_use_the_same_bits_in_every_layout(
    ranks: WorkerPool, num_ranks: int, sections: dict[str, Any], codec: str
) -> None:
    precision = {"precision": {"gather": codec, "param": "fp32"}}
    (expected,) = ranks(1).run(train, {"zero": {"stage": 0}, **precision})
    for name in NAMES:
        exact = expected[f"{name} master"]
        shown = exact if name.endswith("small") else decoded(codec, exact)
        assert torch.equal(expected[f"{name} param"], shown)
        assert torch.equal(expected["shown"][name], shown)
        assert name.endswith("small") or not torch.equal(shown, exact)
    for actual in ranks(num_ranks).run(train, {**sections, **precision}):
        assert_equal_bits(actual, expected)
