"""Frozen integers are sharded as bytes, never cast, and the model unpacks them, as in one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from harness.live_bytes import LiveBytes, settled_bytes
from harness.pool import WorkerPool
from harness.reference import PARITY, max_error
from harness.refusals import refused
from harness.training import LR, make_config
from shardwise import Engine, initialize, plan_layout

WIDTH: Final = 24
NUM_BLOCKS: Final = 3
NUM_STEPS: Final = 3
GLOBAL_BATCH: Final = 4
CODES: Final = WIDTH * WIDTH // 2  # bytes of a packed weight


class PackedState:
    """Unpacks a weight, as bitsandbytes' `quant_state` does; the scale is no parameter."""

    def __init__(self, absmax: Tensor) -> None:
        self.absmax = absmax

    def to(self, device: torch.device) -> None:
        self.absmax = self.absmax.to(device)


class PackedParameter(nn.Parameter):
    """Has a `quant_state`, which the layer asks of it; without one it is a plain parameter."""

    quant_state: PackedState


def packed(codes: Tensor, absmax: Tensor, storage: torch.dtype) -> PackedParameter:
    parameter = torch.Tensor._make_subclass(PackedParameter, codes.view(storage).view(-1, 1), False)
    parameter.quant_state = PackedState(absmax)
    return parameter


class PackedBlock(nn.Module):
    """Adds to its input what a packed weight of 4 bits an element, and a trained one of low rank, make of it."""

    def __init__(self, storage: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (CODES,), dtype=torch.uint8)
        self.weight = packed(codes, torch.rand(WIDTH, 1) / 8, storage)
        self.shift = nn.Parameter(torch.randint(-300, 300, (WIDTH,), dtype=torch.int16), requires_grad=False)
        self.gate = nn.Parameter(torch.rand(WIDTH) > 0.3, requires_grad=False)
        self.down = nn.Linear(WIDTH, 3, bias=False, dtype=dtype)
        self.up = nn.Linear(3, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, PackedParameter)
        codes = self.weight.detach().view(-1).view(torch.uint8)
        halves = torch.stack((codes >> 4, codes & 15), -1).view(WIDTH, WIDTH)
        weight = (halves.to(x.dtype) - 7.5) / 8 * self.weight.quant_state.absmax.to(x.dtype)
        base = nn.functional.linear(x, weight, self.shift.to(x.dtype) / 300) * self.gate
        return x + torch.tanh(base + self.up(self.down(x)))


class PackedModel(nn.Module):
    """As many blocks one after the other, and a number that is no vector."""

    def __init__(self, storage: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(PackedBlock(storage, dtype) for _ in range(NUM_BLOCKS)))
        self.times = nn.Parameter(torch.tensor(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * self.times


def mean_square(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def make_model(storage: torch.dtype = torch.uint8, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return PackedModel(storage, dtype)


def batch_of(step: int) -> Tensor:
    return torch.randn(GLOBAL_BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def train_plainly(storage: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = make_model(storage), []
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = mean_square(model(batch_of(step)), batch_of(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, values_of(model)


def engine_of(storage: torch.dtype, sections: dict[str, Any], seed: int = 0) -> Engine:
    accumulation = sections.get("batch", {}).get("accumulation", 1)
    sections = {"optimizer": {"lr": LR, "weight_decay": 0.0, "clip_norm": None}, **sections}
    return initialize(make_model(storage, seed), make_config(accumulation, sections), loss_fn=mean_square)


def train(
    rank: int, world_size: int, storage: torch.dtype, sections: dict[str, Any], place: str = ""
) -> tuple[list[float], dict[str, Tensor], bool]:
    """Train from rank 0's values; return losses, parameters, and whether packed ones keep their class, released too."""
    num_data = world_size // sections.get("mesh", {}).get("pp", 1)
    accumulation = sections.get("batch", {}).get("accumulation", 1)
    engine = engine_of(storage, {**sections, "batch": {"micro_size": 1, "accumulation": accumulation}}, seed=rank)
    data_rank, rows = engine.layout.mesh.data_index(rank), GLOBAL_BATCH // num_data // accumulation
    losses = []
    for step in range(NUM_STEPS):
        shares = batch_of(step).split(rows)
        batches = [shares[number * num_data + data_rank] for number in range(accumulation)]
        losses.append(engine.train_step(batches).loss)
    if place:
        engine.save(place)
        engine.load(place)
    found = {name: engine.read(name) for name, _ in engine.model.named_parameters()}
    model = engine.model
    is_of_class = all(isinstance(block.weight, PackedParameter) and block.weight.quant_state for block in model.blocks)
    engine.close()
    is_of_class = is_of_class and all(type(block.weight) is PackedParameter for block in model.blocks)
    return losses, {name: value.clone() for name, value in found.items()}, is_of_class


def bytes_of(model: nn.Module) -> dict[str, Tensor]:
    """The bytes of all that is frozen, each 1-D."""
    frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
    return {name: each.detach().clone().view(-1).view(torch.uint8) for name, each in frozen.items()}


def check(found: list[tuple[list[float], dict[str, Tensor], bool]], storage: torch.dtype) -> None:
    losses, expected = train_plainly(storage)
    packed_bytes = bytes_of(make_model(storage))
    trained = {name: value for name, value in expected.items() if name not in packed_bytes}
    for their_losses, parameters, is_of_class in found:
        assert is_of_class
        assert their_losses == pytest.approx(losses, rel=PARITY)
        assert [name for name, each in packed_bytes.items() if not torch.equal(parameters[name].view(-1), each)] == []
        assert max_error({name: parameters[name] for name in trained}, trained) < PARITY


LAYOUTS: Final[list[dict[str, Any]]] = [
    *({"zero": {"stage": stage}} for stage in range(4)),
    {"zero": {"stage": 3}, "batch": {"accumulation": 2}},
    {"zero": {"stage": 3, "keep_whole_below": 100}},
    {"zero": {"stage": 3, "replicate_frozen": True}},
    {"zero": {"stage": 3}, "tiers": {"params": "host"}},
    {"zero": {"stage": 1}, "mesh": {"pp": 2}, "batch": {"accumulation": 2}},
]


@pytest.mark.quick(6)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sections", LAYOUTS, ids=range(len(LAYOUTS)))
def test_bytes_stay_and_the_rest_trains_as_in_one_process(
    ranks: WorkerPool, sections: dict[str, Any], storage: torch.dtype
) -> None:
    check(ranks(2).run(train, storage, sections), storage)


def measure(rank: int, world_size: int, stage: int) -> tuple[int, int, int, int, bool]:
    """Return the bytes of frozen parameters: by the layout, by the tracker, and live ones; and of all groups whole."""
    model = make_model(dtype=torch.float32)
    model.blocks.requires_grad_(False)
    with LiveBytes() as live:
        live.mark(block.weight.quant_state.absmax for block in model.blocks)
        scale_bytes = live.live_bytes()
        sections = {"zero": {"stage": stage}, "precision": {"param": "fp32"}, "optimizer": {"name": "none"}}
        engine = initialize(model, make_config(1, sections), loss_fn=mean_square)
        live_bytes = settled_bytes(live) - scale_bytes
    tracked_bytes = sum(engine.memory.snapshot().live_bytes.values()) - scale_bytes
    groups = [group for group in engine.layout.groups if group.name.endswith(":bytes")]
    whole_bytes = sum(group.padded_numel for group in groups)
    at_rest_bytes = sum(engine.layout.group_bytes_at_rest(group, rank)["param"] for group in groups)
    other_bytes = engine.layout.bytes_at_rest(rank)["param"] - at_rest_bytes
    engine.close()
    return at_rest_bytes, tracked_bytes - other_bytes, live_bytes - other_bytes, whole_bytes, padding_is_small(groups)


def padding_is_small(groups: Any) -> bool:
    return all(group.padded_numel - group.numel < 128 * (len(group.params) + 2) for group in groups)


@pytest.mark.quick(4)
@pytest.mark.parametrize("stage", range(4))
def test_each_rank_stores_its_share_of_the_bytes(ranks: WorkerPool, stage: int) -> None:
    for at_rest, tracked, live, whole, padding_is_small in ranks(2).run(measure, stage):
        assert at_rest == tracked == live == (whole // 2 if stage == 3 else whole)
        assert whole > NUM_BLOCKS * (CODES + 3 * WIDTH) + 8
        assert padding_is_small


@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_has_the_bytes(ranks: WorkerPool, stage: int, tmp_path: Path) -> None:
    check(ranks(2).run(train, torch.bfloat16, {"zero": {"stage": stage}}, str(tmp_path)), torch.bfloat16)


def write_bytes(rank: int, world_size: int) -> bool:
    engine = engine_of(torch.bfloat16, {"zero": {"stage": 3}})
    name = "blocks.1.weight"
    wanted = 255 - engine.read(name)
    engine.write(name, wanted)
    with engine.gathered() as model:
        weight = model.get_parameter(name)
        is_seen = weight.dtype == torch.bfloat16 and torch.equal(
            weight.detach().view(-1).view(torch.uint8), wanted.view(-1)
        )
        is_read = torch.equal(engine.read(name), wanted)
    engine.close()
    return bool(is_seen and is_read)


def test_bytes_are_written_by_name(ranks: WorkerPool) -> None:
    assert ranks(2).run(write_bytes) == [True, True]


def test_the_dtype_of_training_is_that_of_the_other_parameters() -> None:
    for storage in (torch.uint8, torch.bfloat16):
        model = make_model(storage, dtype=torch.float32)
        with initialize(model, {"run": {"device": "cpu"}}, loss_fn=mean_square) as engine:
            assert engine.config.precision.param == "fp32"
            assert engine.layout.wide_names == []


def test_what_cannot_stay_as_it_is_is_refused() -> None:
    with refused("opaque-over-tp", "mesh.tp=2", "times"):
        plan_layout(make_model(), make_config(1, {"mesh": {"tp": 2}}).resolve(2))
    model = make_model(torch.bfloat16)
    model.blocks[1].weight.requires_grad_(True)
    with refused("packed-parameter-trains", "blocks.1.weight"):
        initialize(model, make_config(1, {}), loss_fn=mean_square)
    model = make_model()
    model.blocks[2].weight.quant_state = None
    with refused("parameter-not-packed", "blocks.2.weight", "PackedParameter"):
        initialize(model, make_config(1, {}), loss_fn=mean_square)
    model.blocks[2].weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    model.blocks[2].weight.SCB = torch.ones(2)
    with refused("packed-in-8-bits", "blocks.2.weight", "load_in_4bit"):
        initialize(model, make_config(1, {}), loss_fn=mean_square)


def test_a_packed_model_is_not_exported_as_floating_weights(tmp_path: Path) -> None:
    with engine_of(torch.uint8, {}) as engine, refused("export-packed", "times"):
        engine.export_weights(tmp_path / "model")
