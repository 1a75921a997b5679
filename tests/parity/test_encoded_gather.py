"""Parameters in fewer bits on the wire: the same bits in every layout, exact masters, bytes as by the formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

import pytest
import torch
from torch import Tensor, nn

from harness.pool import WorkerPool
from harness.training import make_config
from shardwise import initialize
from shardwise.config.sections import Gather
from shardwise.engine.engine import Engine
from shardwise.layout.precision import BLOCK_NUMEL
from shardwise.layout.wire_codec import WireCodec
from shardwise.models import Decoder, lm_loss
from shardwise.models.presets import preset

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
    seen = {name: engine.parts.model.get_submodule(name).seen for name in held}
    with engine.gathered() as model:
        names = [name for name in NAMES if name.startswith(tuple(f"{unit}." for unit in held))]
        shown = {name: model.get_parameter(name).detach().clone() for name in names}
    found["shown"] = shown
    found["seen"] = {name: torch.stack(each[::accumulation]) for name, each in seen.items() if each}
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


@pytest.mark.parametrize("codec", get_args(Gather)[1:])
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


FROZEN_LAYOUTS: Final[list[tuple[int, dict[str, Any]]]] = [
    *((2, {"zero": {"stage": stage}}) for stage in range(4)),
    (2, {"zero": {"stage": 3, "replicate_frozen": True}}),
    (4, {"zero": {"stage": 3, "secondary_shard": 2}, "batch": {"accumulation": 2}}),
    (2, {"zero": {"stage": 1}, "mesh": {"pp": 2}, "batch": {"accumulation": 2}}),
]


@pytest.mark.parametrize("param", ["fp32", "bf16"])
@pytest.mark.parametrize(("num_ranks", "sections"), FROZEN_LAYOUTS, ids=range(len(FROZEN_LAYOUTS)))
def test_frozen_parameters_are_decoded_too_and_stay_exact(
    ranks: WorkerPool, num_ranks: int, sections: dict[str, Any], param: str, tmp_path: Path
) -> None:
    precision = {"precision": {"gather": "int8", "param": param}}
    dtype = torch.float32 if param == "fp32" else torch.bfloat16
    (expected,) = ranks(1).run(train, {"zero": {"stage": 0}, **precision}, "odd")
    given = torch.linspace(-1, 1, 67 * 67).view(67, 67).to(dtype)
    for actual in ranks(num_ranks).run(train, {**sections, **precision}, "odd", ("", str(tmp_path))):
        assert_equal_bits(actual, expected)
        assert torch.equal(actual["blocks.1.odd master"], given)
        assert torch.equal(actual["blocks.1.odd param"], decoded("int8", given, dtype))
        assert not torch.equal(actual["blocks.1.odd param"], given)
    # What was saved is exact: in yet another layout the model goes on with the same bits.
    (again,) = ranks(1).run(train, {"zero": {"stage": 0}, **precision}, "odd", (str(tmp_path), ""))
    assert torch.equal(again["blocks.1.odd master"], given)
    (whole,) = ranks(1).run(train, {"zero": {"stage": 0}, **precision}, "odd", ("", ""), 2 * NUM_STEPS)
    for name in NAMES:
        assert torch.equal(again[f"{name} master"], whole[f"{name} master"])


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_holds_masters_and_goes_on_in_another_layout(
    ranks: WorkerPool, stage: int, tmp_path: Path
) -> None:
    precision = {"precision": {"gather": "int8", "param": "bf16"}}
    (whole,) = ranks(1).run(train, precision, "", ("", ""), 2 * NUM_STEPS)
    ranks(2).run(train, {"zero": {"stage": stage}, **precision}, "", ("", str(tmp_path)))
    for num_ranks, other in ((2, 3 - stage), (1, 0)):
        for found in ranks(num_ranks).run(train, {"zero": {"stage": other}, **precision}, "", (str(tmp_path), "")):
            for name in NAMES:
                for state in ("master", "param"):
                    assert torch.equal(found[f"{name} {state}"], whole[f"{name} {state}"])
    (exact,) = ranks(1).run(train, {"precision": {"param": "bf16"}}, "", (str(tmp_path), ""), 0)
    (first,) = ranks(1).run(train, precision, "", (str(tmp_path), ""), 0)
    assert torch.equal(exact["blocks.0.odd master"], first["blocks.0.odd master"])


def write(rank: int, world_size: int, sections: dict[str, Any], frozen: str) -> dict[str, Any]:
    """Write in both ways, freeze and thaw, release the memory; return what reads show and steps make of it."""
    engine, micro_size, accumulation = make_engine(sections, world_size, frozen)
    sizes, found = (world_size, micro_size, accumulation), {}

    def note(when: str) -> None:
        names = ("blocks.0.up.weight", "blocks.1.odd", "blocks.2.up.weight")
        found.update(
            {f"{when} {name} {state}": engine.read(name, state) for name in names for state in ("param", "master")}
        )
        with engine.gathered() as model:
            found.update({f"{when} {name} shown": model.get_parameter(name).detach().clone() for name in names})

    step_of(engine, rank, sizes, 0)
    note("stepped")
    engine.write("blocks.1.odd", torch.linspace(-2, 5, 67 * 67).view(67, 67))
    note("written")
    with engine.gathered(write=True) as model, torch.no_grad():
        model.get_parameter("blocks.0.up.weight")[1, 2] += 3.0 if rank == 0 else 5.0
    note("gathered")
    step_of(engine, rank, sizes, 1)
    engine.offload()
    engine.reload()
    note("reloaded")
    for name, parameter in engine.parts.model.named_parameters():
        parameter.requires_grad_("up" in name)
    for options in engine.optimizer.param_groups:
        options["lr"] = 0.0
    step_of(engine, rank, sizes, 2)
    note("frozen")
    engine.close()
    found["closed"] = dict(engine.parts.model.named_parameters())["blocks.0.up.weight"].detach().clone()
    return found


@pytest.mark.parametrize("frozen", ["", "up"])
@pytest.mark.parametrize(
    ("num_ranks", "sections"),
    [
        *((2, {"zero": {"stage": stage}}) for stage in range(4)),
        (4, {"zero": {"stage": 3, "secondary_shard": 2}}),
        (4, {"zero": {"stage": 3, "secondary_shard": 2}, "precision": {"gather": "param"}}),
    ],
)
def test_writes_reach_masters_and_what_forwards_use(
    ranks: WorkerPool, num_ranks: int, sections: dict[str, Any], frozen: str
) -> None:
    precision = {"gather": "int8", **sections.get("precision", {}), "param": "bf16"}
    (expected,) = ranks(1).run(write, {"precision": precision}, frozen)
    before, after = (expected[f"{when} blocks.0.up.weight master"] for when in ("written", "gathered"))
    assert (before != after).nonzero().tolist() == [[1, 2]]
    written = torch.linspace(-2, 5, 67 * 67).view(67, 67)
    assert torch.equal(expected["written blocks.1.odd master"], written)
    if precision["gather"] == "int8":
        assert torch.equal(expected["written blocks.1.odd shown"], decoded("int8", written, torch.bfloat16))
    for name in ("blocks.0.up.weight", "blocks.2.up.weight"):  # trained or frozen before, and trained now
        assert torch.equal(expected[f"frozen {name} master"], expected[f"reloaded {name} master"])
    for actual in ranks(num_ranks).run(write, {**sections, "precision": precision}, frozen):
        for key, value in expected.items():
            assert torch.equal(actual[key], value), key
            if key.endswith("shown"):
                assert torch.equal(value, expected[key.replace("shown", "param")]), key


def gather_all(rank: int, world_size: int) -> tuple[int, int]:
    """Return the bytes of buffers that it takes to gather all parameters, and those of a block's codes."""
    model = SeeingModel()
    model.blocks.extend(SeeingBlock() for _ in range(5))
    sections = {"precision": {"param": "bf16", "gather": "int8"}, "zero": {"stage": 3}}
    engine = initialize(model, make_config(1, sections), loss_fn=weighted_sum)
    with engine.gathered():
        reserved_bytes = engine.parts.resources.pool.reserved_bytes
    code_bytes = max(engine.layout.gather_bytes(each) * world_size for each in engine.layout.groups)
    engine.close()
    return reserved_bytes, code_bytes


def test_codes_of_a_few_blocks_are_there_at_once(ranks: WorkerPool) -> None:
    for reserved_bytes, code_bytes in ranks(2).run(gather_all):
        assert reserved_bytes <= 4 * code_bytes


WIDE: Final = replace(
    preset("tiny"),
    num_layers=2,
    hidden_size=512,
    num_heads=4,
    num_kv_heads=4,
    head_dim=128,
    ffn_size=512,
    vocab_size=512,
    max_seq_len=16,
)


def decoder_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.arange(count * 2 * 17).view(count, 2, 17) * 7 % 512  # [count, B, S + 1]
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def decoder_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return lm_loss(logits, batch[1])


def train_decoder(rank: int, world_size: int, sections: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    engine = initialize(Decoder(WIDE).double(), make_config(2, sections), loss_fn=decoder_loss)
    index, num_data = engine.layout.mesh.data_index(rank), engine.layout.mesh.num_data_ranks
    batches = decoder_batches(4)[index::num_data]
    losses = [engine.train_step(batches).loss for _ in range(2)]
    engine.close()
    return losses


@pytest.mark.quick(1)
@pytest.mark.parametrize("codec", get_args(Gather)[1:])
def test_a_decoder_trains_the_same_over_tensor_and_pipeline_axes(ranks: WorkerPool, codec: str) -> None:
    precision = {"precision": {"param": "fp64", "gather": codec}}
    (expected,) = ranks(1).run(train_decoder, {**precision, "batch": {"accumulation": 4}})
    (exact,) = ranks(1).run(train_decoder, {"batch": {"accumulation": 4}})
    assert expected != pytest.approx(exact, rel=1e-6)
    assert expected == pytest.approx(exact, rel=0.05)
    for num_ranks, sections in (
        (2, {"mesh": {"tp": 2}, "batch": {"accumulation": 4}}),
        (2, {"mesh": {"pp": 2}, "batch": {"accumulation": 4}, "zero": {"stage": 1}}),
        (4, {"mesh": {"tp": 2}, "batch": {"accumulation": 2}, "zero": {"stage": 3}}),
    ):
        for actual in ranks(num_ranks).run(train_decoder, {**precision, **sections}):
            assert actual == pytest.approx(expected, rel=1e-9)
