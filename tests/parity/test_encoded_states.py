"""Optimizer states in fewer bits: the same bits in every layout, bytes as by the formula, and ways to and from fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from harness.pool import WorkerPool
from harness.refusals import refused
from harness.training import make_config
from shardwise import Engine, initialize
from shardwise.models import Decoder, lm_loss
from shardwise.models.presets import preset

WIDTH: Final = 128
NUM_BLOCKS: Final = 4
NUM_STEPS: Final = 4
# Products of small integers, which no order of additions rounds.
GLOBAL_BATCH: Final = 8


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


def weighted_sum(output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.arange(output.shape[-1], dtype=output.dtype) % 5 - 2
    return (output * weights).sum(), torch.tensor(float(output.shape[0]))


def batch_of(step: int, samples: range) -> Tensor:
    """Rows of integers from -3 to 3, with a column that is large in one step, and one that is always 0."""
    rows = torch.arange(WIDTH).repeat(len(samples), 1) * (step + 1) + torch.tensor(list(samples)).unsqueeze(1) * 7
    found = (rows % 7 - 3).float()
    found[:, 1] *= 1000 if step == 2 else 1
    found[:, 0] = 0
    return found


def stored_bytes(engine: Engine) -> int:
    """Bytes of the optimizer's own states, in memory."""
    return sum(each.tensor.nbytes for each in engine.step_context.sharded.storages())


def train(
    rank: int, world_size: int, name: str, states: str, sections: dict[str, Any], places: tuple[str, str] = ("", "")
) -> tuple[dict[str, Tensor], int, int]:
    """Take steps; return parameters and states, and the bytes of the optimizer as counted and by the layout.

    `places` are the folders from which it begins and to which it saves.
    """
    torch.manual_seed(0)
    given = {"precision": {"param": "fp32", "states": states}, **sections}
    given["optimizer"] = {"name": name, "lr": 1e-2, "momentum": 0.9, "clip_norm": None}
    accumulation = sections.get("batch", {}).get("accumulation", 1)
    num_data = world_size // sections.get("mesh", {}).get("pp", 1)
    micro_size = GLOBAL_BATCH // num_data // accumulation
    given["batch"] = {"micro_size": micro_size, "accumulation": accumulation}
    engine = initialize(ExactModel(), make_config(accumulation, given), loss_fn=weighted_sum)
    if places[0]:
        engine.load(places[0])
    data_rank, first = engine.layout.mesh.data_index(rank), engine.num_steps
    for step in range(first, first + NUM_STEPS):
        starts = [(number * num_data + data_rank) * micro_size for number in range(accumulation)]
        engine.train_step([batch_of(step, range(start, start + micro_size)) for start in starts])
    expected = engine.layout.bytes_at_rest(engine.step_context.comms.shards.rank)["optimizer"]
    counted = stored_bytes(engine)
    found = {f"{key} {state}": engine.read(key, state) for key in NAMES for state in ("param", *engine.states_of(key))}
    if places[1]:
        engine.save(places[1])
    engine.close()
    return {key: value.clone() for key, value in found.items() if value is not None}, counted, expected


NAMES: Final = [f"blocks.{index}.{name}" for index in range(NUM_BLOCKS) for name in ("up.weight", "up.bias", "norm")]
LAYOUTS: Final = [
    (1, {"batch": {"accumulation": 4}}),
    *((num_ranks, {"zero": {"stage": stage}}) for num_ranks in (2, 4) for stage in range(4)),
    (4, {"zero": {"stage": 2}, "mesh": {"dp_replicate": 2}}),
    (2, {"zero": {"stage": 3, "keep_whole_below": 1000}, "batch": {"accumulation": 2}}),
    (2, {"zero": {"stage": 1}, "mesh": {"pp": 2}, "batch": {"accumulation": 2}}),
    (4, {"zero": {"stage": 3}, "mesh": {"pp": 2}, "batch": {"accumulation": 2}}),
]


def assert_equal_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize("states", ["int8", "bf16"])
@pytest.mark.parametrize(("num_ranks", "sections"), LAYOUTS, ids=range(len(LAYOUTS)))
def test_states_and_updates_are_the_same_bits_in_every_layout(
    ranks: WorkerPool, num_ranks: int, sections: dict[str, Any], states: str
) -> None:
    (expected, *_), *_ = ranks(1).run(train, "adamw", states, {"zero": {"stage": 0}})
    for actual, counted, at_rest in ranks(num_ranks).run(train, "adamw", states, sections):
        assert_equal_bits(actual, expected)
        assert counted == at_rest


@pytest.mark.parametrize("name", ["adam", "sgd", "lion", "adagrad"])
def test_other_optimizers_step_encoded_states(ranks: WorkerPool, name: str) -> None:
    (expected, *_), *_ = ranks(1).run(train, name, "int8", {})
    (exact, *_), *_ = ranks(1).run(train, name, "master", {})
    (actual, *_), *_ = ranks(2).run(train, name, "int8", {"zero": {"stage": 3}})
    assert_equal_bits(actual, expected)
    for key, value in exact.items():
        assert (actual[key] - value).norm() <= 0.03 * value.norm()
    assert any(not torch.equal(actual[key], value) for key, value in exact.items())


def test_a_checkpoint_goes_on_in_another_layout_and_in_another_precision(ranks: WorkerPool, tmp_path: Path) -> None:
    halfway, wide = str(tmp_path / "half"), str(tmp_path / "wide")
    (whole, *_), *_ = ranks(1).run(train, "adamw", "int8", {}, ("", halfway))
    (whole, *_), *_ = ranks(1).run(train, "adamw", "int8", {}, (halfway, ""))
    for num_ranks, sections in ((2, {"zero": {"stage": 3}}), (2, {"zero": {"stage": 1}, "mesh": {"pp": 2}})):
        sections = {**sections, "batch": {"accumulation": 2}} if "mesh" in sections else sections
        (actual, *_), *_ = ranks(num_ranks).run(train, "adamw", "int8", sections, (halfway, ""))
        assert_equal_bits(actual, whole)
    (exact, *_), *_ = ranks(1).run(train, "adamw", "master", {}, (halfway, wide))
    (again, *_), *_ = ranks(2).run(train, "adamw", "int8", {"zero": {"stage": 2}}, (wide, ""))
    for key, value in whole.items():
        if "param" in key:
            assert (exact[key] - value).norm() <= 0.2 * value.norm()
    assert again["blocks.0.up.weight step"] == 3 * NUM_STEPS


def train_decoder(rank: int, world_size: int, mesh: dict[str, int]) -> tuple[list[float], int, int]:
    shape = replace(preset("tiny"), num_layers=1, hidden_size=512, num_heads=4, num_kv_heads=4, head_dim=128)
    shape = replace(shape, ffn_size=512, vocab_size=512, max_seq_len=16)
    torch.manual_seed(0)
    settings = {"precision": {"param": "fp32", "states": "int8"}, "mesh": mesh, "zero": {"stage": 1}}
    engine = initialize(
        Decoder(shape), make_config(1, settings), loss_fn=lambda logits, batch: lm_loss(logits, batch[1])
    )
    tokens = torch.arange(2 * 17).view(2, 17) * 7 % 512  # [B, S + 1]
    batch = (tokens[:, :-1], tokens[:, 1:])
    losses = [engine.train_step([batch]).loss for _ in range(4)]
    counted = stored_bytes(engine)
    at_rest = engine.layout.bytes_at_rest(engine.step_context.comms.shards.rank)["optimizer"]
    engine.close()
    return losses, counted, at_rest


def test_a_tensor_axis_that_keeps_blocks_whole_trains_the_same(ranks: WorkerPool) -> None:
    ((expected, *_),) = ranks(1).run(train_decoder, {})
    for actual, counted, at_rest in ranks(2).run(train_decoder, {"tp": 2}):
        assert actual == pytest.approx(expected, rel=1e-3)
        assert counted == at_rest


def test_what_cannot_be_encoded_is_refused() -> None:
    with refused("host-step-optimizer", "RMSprop"):
        train(0, 1, "rmsprop", "int8", {})


def test_states_that_leave_the_device_come_back_as_they_were() -> None:
    torch.manual_seed(0)
    settings = {"precision": {"param": "fp32", "states": "int8"}, "zero": {"stage": 2}}
    engine = initialize(ExactModel(), make_config(1, settings), loss_fn=weighted_sum)
    engine.train_step([batch_of(0, range(GLOBAL_BATCH))])
    before = [each.tensor.clone() for each in engine.step_context.sharded.storages()]
    engine.offload()
    engine.reload()
    after = [each.tensor for each in engine.step_context.sharded.storages()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    engine.train_step([batch_of(1, range(GLOBAL_BATCH))])
    assert engine.read("blocks.0.up.weight", "step") == 2
    engine.close()
