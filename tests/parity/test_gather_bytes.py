"""Bytes of encoded gathers and of secondary shards: at rest and on the wire, by counts that are not the library's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from harness.live_bytes import LiveBytes, settled_bytes, storage_bytes
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.simulated import Measured, measure_steps, simulated
from harness.training import make_config
from harness.wire_bytes import WireBytes, ring_equivalent_bytes
from shardwise import Layout, initialize, simulate
from shardwise.construction.scan import build_layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.wire_codec import WireCodec
from shardwise.models import Decoder, lm_loss
from shardwise.models.presets import preset

LOSS_SUM_BYTES: Final = 16
SHAPE: Final = replace(
    preset("tiny"),
    num_layers=3,
    hidden_size=96,
    num_heads=2,
    num_kv_heads=2,
    head_dim=48,
    ffn_size=100,  # 256 does not divide some matrices
    vocab_size=64,
    max_seq_len=8,
)
PRECISIONS: Final[dict[str, tuple[dict[str, Any], int, int]]] = {
    # name: (config section, P, bytes of a master: the copy is there for the exact values)
    "int8": ({"param": "bf16", "gather": "int8"}, 2, 4),
    "fp8-fp32": ({"param": "fp32", "gather": "fp8"}, 4, 4),
    "plain": ({"param": "bf16"}, 2, 4),
}


def build(frozen: str = "") -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and frozen in name))
    return model


def batches_of(count: int) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.arange(count * 9).view(count, 1, 9) % 64
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def loss_of(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return lm_loss(logits, batch[1])


@dataclass(frozen=True)
class Found:
    """What one rank saw in its second step."""

    layout: Layout
    num_trainable: int
    at_rest_bytes: int
    tracked_bytes: int
    wire_bytes: Fraction
    counted: dict[tuple[str, str], int]


def measure(rank: int, world_size: int, sections: dict[str, Any], num_micro_batches: int, frozen: str = "") -> Found:
    model, batches = build(frozen), batches_of(num_micro_batches)
    WireCodec("fp8").decode(torch.zeros(260, dtype=torch.uint8), torch.empty(256))  # which keeps a table of its codes
    with LiveBytes() as live:
        live.mark(tensor for batch in batches for tensor in batch)
        batch_bytes = live.live_bytes()
        engine = initialize(model, make_config(num_micro_batches, sections), loss_fn=loss_of)
        engine.train_step(batches)
        engine.comm.comm_log.counts.clear()
        with WireBytes() as wire:
            for batch in batches:
                engine.backward(engine(batch))
            at_rest_bytes = settled_bytes(live) - batch_bytes
            tracked_bytes = sum(engine.memory.snapshot().live_bytes.values())
            scalars = [
                value for state in engine.optimizer.state.values() for value in state.values() if not value.dim()
            ]
            at_rest_bytes -= storage_bytes(scalars) + LOSS_SUM_BYTES
            tracked_bytes -= storage_bytes(scalars)
            engine.step()
    counted = {key: count.wire_bytes for key, count in engine.comm.comm_log.counts.items()}
    found = ring_equivalent_bytes(wire.calls)
    engine.close()
    num_trainable = sum(parameter.requires_grad for parameter in model.parameters())
    return Found(engine.layout, num_trainable, at_rest_bytes, tracked_bytes, found, counted)


def sent_bytes(group: GroupSpec, codec: str, width: int) -> int:
    """Bytes of one rank's shard as it is sent: a byte an element, and 4 for each 256."""
    is_encoded = codec != "plain" and not group.name.endswith(":whole")
    return group.shard_numel + group.shard_numel // 256 * 4 if is_encoded else group.shard_numel * width


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", list(PRECISIONS))
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("num_ranks", "stage", "near"), [(2, 0, 0), (2, 1, 0), (2, 2, 0), (2, 3, 0), (4, 3, 0), (4, 3, 2), (4, 3, 1)]
)
def test_bytes_on_the_wire_are_those_of_the_formula(
    ranks: WorkerPool, name: str, accumulation: int, num_ranks: int, stage: int, near: int
) -> None:
    section, P, _ = PRECISIONS[name]
    n, m = num_ranks, accumulation
    sections = {"zero": {"stage": stage, "secondary_shard": near}, "precision": {**section, "reduce": "fp32"}}
    for found in ranks(n).run(measure, sections, m):
        groups = found.layout.groups
        small = [group for group in groups if group.name.endswith(":whole")]
        assert bool(small) == (name != "plain")
        over_all, over_near, reduced = Fraction(0), Fraction(0), Fraction(0)
        for group in groups:
            is_gathered = stage == 3 and group not in small
            uses = m * (1 if group.unit in ("root", "blocks.2") else 2) if is_gathered else int(stage > 0)
            far = 1 if near and is_gathered else uses
            over_all += far * (n - 1) * sent_bytes(group, name, P)
            over_near += Fraction((uses - far) * (near - 1) * n, near or 1) * sent_bytes(group, name, P)
            reduced += Fraction(n - 1, n) * 4 * group.padded_numel * (2 if stage == 0 else m if stage > 1 else 1)
        scalars = Fraction(n - 1, n) * 2 * 8 * (5 + found.num_trainable)
        assert found.wire_bytes == over_all + over_near + reduced + scalars
        wire = found.layout.bytes_on_wire(m)
        assert sum(wire.values()) == over_all + over_near + reduced
        assert found.counted.get(("secondary", "all_gather"), 0) == over_near == wire.get("secondary_all_gather", 0)
        assert found.counted.get(("dp_shard", "all_gather"), 0) == over_all == wire["all_gather"]


@pytest.mark.parametrize("name", ["int8", "plain"])
def test_frozen_parameters_are_gathered_from_all_ranks_in_the_first_step_alone(ranks: WorkerPool, name: str) -> None:
    section, width, _ = PRECISIONS[name]
    sections = {"zero": {"stage": 3, "secondary_shard": 2}, "precision": section}
    for found in ranks(4).run(measure, sections, 2, "ffn"):
        gathered = [group for group in found.layout.groups if not group.name.endswith(":whole")]
        assert {group.trainable for group in gathered} == {True, False}
        whole = [group for group in found.layout.groups if group.trainable and group not in gathered]
        after_step = sum(3 * sent_bytes(group, name, width) for group in whole)
        far = sum(3 * sent_bytes(group, name, width) for group in gathered if group.trainable)
        assert found.counted["dp_shard", "all_gather"] == far + after_step
        uses = {group: 2 * (1 if group.unit in ("root", "blocks.2") else 2) for group in gathered}
        near = sum(2 * (uses[group] - group.trainable) * sent_bytes(group, name, width) for group in gathered)
        assert found.counted["secondary", "all_gather"] == near
        wire = found.layout.bytes_on_wire(2)
        assert (wire["all_gather"], wire["secondary_all_gather"]) == (far + after_step, near)


@pytest.mark.quick(2)
@pytest.mark.parametrize("frozen", ["", "ffn"])
@pytest.mark.parametrize("name", list(PRECISIONS))
@pytest.mark.parametrize(
    ("num_ranks", "stage", "near"), [(1, 2, 0), (2, 0, 0), (2, 1, 0), (2, 2, 0), (2, 3, 0), (4, 3, 2)]
)
def test_bytes_at_rest_are_those_of_the_formula(
    ranks: WorkerPool, name: str, num_ranks: int, stage: int, near: int, frozen: str
) -> None:
    section, P, M = PRECISIONS[name]
    sections = {"zero": {"stage": stage, "secondary_shard": near}, "precision": section}
    for rank, found in enumerate(ranks(num_ranks).run(measure, sections, 1, frozen)):
        n, expected = num_ranks if stage else 1, 0
        for group in found.layout.groups:
            N, is_small = group.padded_numel, group.name.endswith(":whole")
            is_sharded = stage == 3 and n > 1 and not is_small
            param = P * (N // n if is_sharded else N)
            if near and is_sharded:
                param += num_ranks // near * sent_bytes(group, name, P)
            if not group.trainable:
                is_copied = name != "plain" and not is_sharded and not is_small
                expected += param + (P * N // n if is_copied else 0)
                continue
            grad = 4 * (N // n if stage > 1 else N)
            start, stop = (0, N) if n == 1 else group.shard_range(rank)
            moments = sum(slot.stop - slot.start for slot in group.slots(start, stop))
            expected += param + grad + M * N // n + 8 * moments
        assert sum(found.layout.bytes_at_rest(rank).values()) == expected
        assert found.tracked_bytes == expected
        assert found.at_rest_bytes == expected


def measure_rank(rank: int, world_size: int, sections: dict[str, Any]) -> Measured:
    engine = initialize(build(), make_config(2, sections), loss_fn=loss_of)
    return measure_steps(engine, [batches_of(2)] * 4)


@pytest.mark.parametrize(("num_ranks", "stage", "near"), [(2, 0, 0), (2, 2, 0), (2, 3, 0), (4, 3, 2)])
def test_a_simulated_rank_is_a_real_one(ranks: WorkerPool, num_ranks: int, stage: int, near: int) -> None:
    sections = {
        "zero": {"stage": stage, "secondary_shard": near},
        "precision": {"param": "bf16", "gather": "int8"},
    }
    for rank, real in enumerate(ranks(num_ranks).run(measure_rank, sections)):
        simulation = simulate(
            build(),
            make_config(2, sections),
            lambda: batches_of(1)[0],
            loss_fn=loss_of,
            rank=rank,
            world_size=num_ranks,
        )
        assert simulated(simulation) == real


def train(rank: int, world_size: int, near: int, precision: dict[str, Any]) -> tuple[list[float], Tensor, int]:
    """Train, evaluate in between, and write; return losses, a parameter, and the bytes that the sharers have sent."""
    sections = {"zero": {"stage": 3, "secondary_shard": near}, "precision": precision}
    engine = initialize(build("norm"), make_config(2, sections), loss_fn=loss_of)
    losses = []
    for step in range(3):
        losses.append(engine.train_step(batches_of(8)[rank::4]).loss)
        losses.append(engine.eval_step(batches_of(4)[rank : rank + 1]).loss)
        if step == 1:
            engine.write("blocks.1.ffn.up.weight", torch.full((100, 96), 0.01))
            losses.append(engine.eval_step(batches_of(4)[rank : rank + 1]).loss)
    with engine.gathered() as model:
        found = model.get_parameter("blocks.1.ffn.up.weight").detach().clone()
    counts = engine.comm.comm_log.counts
    near_bytes = counts["secondary", "all_gather"].wire_bytes if near > 1 else 0
    engine.close()
    return losses, found, near_bytes


@pytest.mark.quick(1)
@pytest.mark.parametrize("gather", ["param", "int8"])
@pytest.mark.parametrize("near", [1, 2])
def test_secondary_shards_change_no_bit(ranks: WorkerPool, near: int, gather: str) -> None:
    precision = {"param": "bf16", "gather": gather}
    for plain, shared in zip(*(ranks(4).run(train, each, precision) for each in (0, near)), strict=True):
        assert shared[0] == plain[0]
        assert torch.equal(shared[1], plain[1])
        assert (shared[2] > 0) == (near == 2)


@pytest.mark.parametrize(
    ("code", "words", "sections"),
    [
        ("secondary-shard-stage", ("zero.secondary_shard=2", "zero.stage=2"), {"zero": {"secondary_shard": 2}}),
        (
            "secondary-shard-tier",
            ("zero.secondary_shard=2", "tiers.params=host"),
            {"zero": {"stage": 3, "secondary_shard": 2}, "tiers": {"params": "host"}},
        ),
        (
            "secondary-shard-divides",
            ("zero.secondary_shard=4", "6 ranks", "1, 2, 3"),
            {"zero": {"stage": 3, "secondary_shard": 4}},
        ),
    ],
)
def test_secondary_shards_that_cannot_be_are_refused(
    code: str, words: tuple[str, ...], sections: dict[str, Any]
) -> None:
    with refused(code, *words):
        build_layout(build(), make_config(1, sections).resolve(6))


def test_as_many_ranks_as_share_the_parameters_need_no_secondary_shard() -> None:
    layout = build_layout(build(), make_config(1, {"zero": {"stage": 3, "secondary_shard": 8}}).resolve(8))
    assert layout.stage.secondary_shard == 0
    assert "secondary_all_gather" not in layout.bytes_on_wire(1)
