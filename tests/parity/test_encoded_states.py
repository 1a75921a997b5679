"""Optimizer states in fewer bits: the same bits in every layout, bytes as by the formula, and ways to and from fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from harness.exact import (
    GLOBAL_BATCH,
    NUM_STEPS,
    ExactModel,
    assert_equal_bits,
    batch_of,
    stored_bytes,
    train,
    weighted_sum,
)
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.training import make_config
from shardwise import initialize
from shardwise.models import Decoder, lm_loss
from shardwise.models.presets import preset

LAYOUTS: Final = [
    (1, {"batch": {"accumulation": 4}}),
    *((num_ranks, {"zero": {"stage": stage}}) for num_ranks in (2, 4) for stage in range(4)),
    (4, {"zero": {"stage": 2}, "mesh": {"dp_replicate": 2}}),
    (2, {"zero": {"stage": 3, "keep_whole_below": 1000}, "batch": {"accumulation": 2}}),
    (2, {"zero": {"stage": 1}, "mesh": {"pp": 2}, "batch": {"accumulation": 2}}),
    (4, {"zero": {"stage": 3}, "mesh": {"pp": 2}, "batch": {"accumulation": 2}}),
]


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


def train_decoder(
    rank: int, world_size: int, mesh: dict[str, int]
) -> tuple[list[float], dict[str, int], dict[str, int]]:
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
    shard = engine.parts.comms.shards.rank
    at_rest = {tier: engine.layout.bytes_at_rest(shard, tier)["optimizer"] for tier in ("device", "host", "nvme")}
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
    before = [each.tensor.clone() for each in engine.parts.sharded.storages()]
    engine.offload()
    engine.reload()
    after = [each.tensor for each in engine.parts.sharded.storages()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    engine.train_step([batch_of(1, range(GLOBAL_BATCH))])
    assert engine.read("blocks.0.up.weight", "step") == 2
    engine.close()
