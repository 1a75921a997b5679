"""Bytes at rest, on the wire and at the peak equal the stage table, by counts that are not the library's."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from harness.combinations import cover
from harness.live_bytes import LiveBytes, settled_bytes, storage_bytes
from harness.models import CASES, Transformer, make_batches
from harness.pool import WorkerPool
from harness.training import make_config
from harness.wire_bytes import WireBytes, ring_equivalent_bytes
from shardwise import Engine, Layout, initialize

CASE = "odd-shapes"
LOSS_SUM_BYTES = 16
PRECISIONS = {
    # name: (config section, P, G, K of Adam)
    "bf16": ({"param": "bf16"}, 2, 4, 12),
    "bf16-thin": ({"param": "bf16", "accumulate": "param"}, 2, 2, 12),
    "fp32": ({"param": "fp32"}, 4, 4, 8),
}


@dataclass(frozen=True)
class Measured:
    """What one rank saw in its second step."""

    layout: Layout
    num_trainable: int
    at_rest_bytes: int
    tracked_bytes: int
    scalar_bytes: int
    wire_bytes: Fraction
    counted_wire_bytes: int


def measure(
    rank: int, world_size: int, overrides: dict[str, Any], num_micro_batches: int, case_name: str = CASE
) -> Measured:
    case = CASES[case_name]
    batches = make_batches(case, num_steps=2, world_size=world_size, num_micro_batches=num_micro_batches)
    model = case.build(torch.float32)
    with LiveBytes() as live:
        live.mark(tensor for step in batches for batch in step[rank] for tensor in batch.values())
        batch_bytes = live.live_bytes()
        engine = initialize(model, make_config(num_micro_batches, overrides), loss_fn=case.loss)
        engine.train_step(batches[0][rank])
        engine.comm.comm_log.counts.clear()
        with WireBytes() as wire:
            for batch in batches[1][rank]:
                engine.backward(engine(batch))
            at_rest_bytes = settled_bytes(live) - batch_bytes
            tracked_bytes = sum(engine.memory.snapshot().live_bytes.values())
            scalar_bytes = storage_bytes(_scalars(engine))
            engine.step()
    counts = engine.comm.comm_log.counts
    counted_wire_bytes = sum(count.wire_bytes for count in counts.values())
    wire_bytes = ring_equivalent_bytes(wire.calls)
    engine.close()
    num_trainable = sum(parameter.requires_grad for parameter in model.parameters())
    return Measured(
        engine.layout, num_trainable, at_rest_bytes, tracked_bytes, scalar_bytes, wire_bytes, counted_wire_bytes
    )


def _scalars(engine: Engine) -> list[torch.Tensor]:
    """The sum and count of each loss, and the step counts of Adam."""
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    return [value for value in states if value.dim() == 0] + engine.parts.losses._rows


@pytest.mark.parametrize(
    "options",
    cover(
        {"stage": [0, 1, 2, 3], "num_ranks": [1, 2, 3, 4, 5, 6, 7, 8], "precision": list(PRECISIONS)},
        # Stage 3 in bf16 shows that any number divides; a few numbers, that all stages' bytes are the table's.
        quick=lambda options: (
            options["num_ranks"] in (1, 3, 4) or (options["stage"], options["precision"]) == (3, "bf16")
        ),
    ),
)
def test_bytes_at_rest(ranks: WorkerPool, options: dict[str, Any]) -> None:
    n = options["num_ranks"]
    section, P, G, K = PRECISIONS[options["precision"]]
    overrides = {"zero": {"stage": options["stage"]}, "precision": section}
    stage = options["stage"]
    for rank, measured in enumerate(ranks(n).run(measure, overrides, 1)):
        N = sum(group.padded_numel for group in measured.layout.groups)
        assert N - measured.layout.padding_numel == 3 * 217 + 533
        table = [N * (P + G + K), N * (P + G) + N * K // n, N * P + N * (G + K) // n, N * (P + G + K) // n]
        # Adam's two moments are not padded.
        padding_bytes = 8 * padding_numel(measured.layout, rank if stage > 0 else None)
        assert measured.at_rest_bytes - measured.scalar_bytes == table[stage] - padding_bytes
        assert sum(measured.layout.bytes_at_rest(rank).values()) == table[stage] - padding_bytes
        assert measured.tracked_bytes == measured.at_rest_bytes - LOSS_SUM_BYTES


def padding_numel(layout: Layout, rank: int | None) -> int:
    """Elements of a rank's slices, or of the whole buffers, that no parameter has."""
    found = 0
    for group in layout.groups:
        start, stop = (0, group.padded_numel) if rank is None else group.shard_range(rank)
        covered = {index for place in group.params for index in range(place.offset, place.offset + place.numel)}
        found += len(set(range(start, stop)) - covered)
    return found


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "options",
    cover(
        {
            "stage": [0, 1, 2, 3],
            "num_ranks": [2, 3, 4],
            "precision": list(PRECISIONS),
            "reduce": ["param", "fp32"],
            "accumulation": [1, 4],
        }
    ),
)
def test_bytes_on_the_wire(ranks: WorkerPool, options: dict[str, Any]) -> None:
    n, m = options["num_ranks"], options["accumulation"]
    section, P, _, _ = PRECISIONS[options["precision"]]
    R = P if options["reduce"] == "param" else 4
    overrides = {
        "zero": {"stage": options["stage"]},
        "precision": {**section, "reduce": options["reduce"]},
    }
    for measured in ranks(n).run(measure, overrides, m):
        root, *_, last = (group.padded_numel for group in measured.layout.groups)
        N = sum(group.padded_numel for group in measured.layout.groups)
        # The root's and the last block's parameters stay unsharded from the forward to the backward.
        gathers = 2 * m * N - m * (root + last)
        table = [2 * N * R, N * R + N * P, m * N * R + N * P, gathers * P + m * N * R]
        expected = Fraction(n - 1, n) * table[options["stage"]]
        # One vector of the step: loss, count, squared norm, and a flag a parameter.
        step_scalars = Fraction(n - 1, n) * 2 * 8 * (5 + measured.num_trainable)
        assert measured.wire_bytes == expected + step_scalars
        assert sum(measured.layout.bytes_on_wire(m).values()) == expected
        assert measured.counted_wire_bytes == int(expected) + int(step_scalars)


@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_bytes_of_hybrid_sharding(ranks: WorkerPool, stage: int, accumulation: int) -> None:
    """Two replicas of two shards: states as on two ranks, gradients over the replicas once a step."""
    m, r, n = accumulation, 2, 2
    section, P, G, K = PRECISIONS["bf16"]
    overrides = {"zero": {"stage": stage}, "precision": section, "mesh": {"dp_shard": n}}
    for rank, measured in enumerate(ranks(r * n).run(measure, overrides, m)):
        root, *_, last = (group.padded_numel for group in measured.layout.groups)
        N = sum(group.padded_numel for group in measured.layout.groups)
        at_rest = [N * (P + G + K), N * (P + G) + N * K // n, N * P + N * (G + K) // n, N * (P + G + K) // n]
        padding_bytes = 8 * padding_numel(measured.layout, rank % n if stage > 0 else None)
        assert measured.at_rest_bytes - measured.scalar_bytes == at_rest[stage] - padding_bytes
        assert sum(measured.layout.bytes_at_rest(rank % n).values()) == at_rest[stage] - padding_bytes
        gathers = 2 * m * N - m * (root + last)
        over_shards = Fraction(n - 1, n) * [0, N * P + N * P, m * N * P + N * P, gathers * P + m * N * P][stage]
        over_replicas = Fraction(r - 1, r) * 2 * P * (N // n)
        expected = Fraction(r * n - 1, r * n) * 2 * P * N if stage == 0 else over_shards + over_replicas
        step_scalars = Fraction(r * n - 1, r * n) * 2 * 8 * (5 + measured.num_trainable)
        assert measured.wire_bytes == expected + step_scalars
        assert sum(measured.layout.bytes_on_wire(m).values()) == expected


@pytest.mark.parametrize("is_replicated", [False, True])
def test_frozen_parameters_may_stay_whole(ranks: WorkerPool, is_replicated: bool) -> None:
    """Mostly frozen, as with LoRA: no gradients, no optimizer states, and no gathers where they stay whole."""
    overrides = {"zero": {"stage": 3, "replicate_frozen": is_replicated}, "precision": PRECISIONS["bf16"][0]}
    for measured in ranks(2).run(measure, overrides, 1, "frozen-parameters"):
        groups = measured.layout.groups
        frozen = sum(group.padded_numel for group in groups if not group.trainable)
        trained = sum(group.padded_numel for group in groups if group.trainable)
        at_rest = measured.layout.bytes_at_rest()
        assert at_rest["param"] == 2 * (frozen if is_replicated else frozen // 2) + 2 * trained // 2
        assert at_rest["grad"] == 4 * trained // 2
        assert measured.tracked_bytes == measured.at_rest_bytes - LOSS_SUM_BYTES
        wire = measured.layout.bytes_on_wire(1)
        assert measured.wire_bytes == sum(wire.values()) + Fraction(1, 2) * 2 * 8 * (5 + measured.num_trainable)
        assert wire["reduce_scatter"] == 2 * trained // 2
        gathered = [group for group in groups if group.trainable or not is_replicated]
        once = [group for group in gathered if group.unit in ("root", "blocks.2")]
        assert wire["all_gather"] == sum(group.padded_numel for group in gathered) * 2 - sum(
            group.padded_numel for group in once
        )


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_small_parameters_follow_stage_2(ranks: WorkerPool, num_ranks: int, accumulation: int) -> None:
    """L elements are sharded and W stay whole: gathered after the step alone, all else as stage 3's."""
    n, m, below = num_ranks, accumulation, 20
    section, P, G, K = PRECISIONS["bf16"]
    overrides = {"zero": {"stage": 3, "keep_whole_below": below}, "precision": section}
    small = {name for name, each in CASES[CASE].build(torch.float32).named_parameters() if each.numel() < below}
    for rank, measured in enumerate(ranks(n).run(measure, overrides, m)):
        whole = [group for group in measured.layout.groups if group.name.endswith(":whole")]
        large = [group for group in measured.layout.groups if group not in whole]
        assert {place.name for group in whole for place in group.params} == small
        L, W = (sum(group.padded_numel for group in groups) for groups in (large, whole))
        at_rest = P * (L // n + W) + (G + K) * (L + W) // n - 8 * padding_numel(measured.layout, rank)
        assert measured.at_rest_bytes - measured.scalar_bytes == at_rest
        assert sum(measured.layout.bytes_at_rest(rank).values()) == at_rest
        assert measured.tracked_bytes == measured.at_rest_bytes - LOSS_SUM_BYTES
        root, *_, last = (group.padded_numel for group in large)
        expected = Fraction(n - 1, n) * P * (2 * m * L - m * (root + last) + W + m * (L + W))
        assert measured.wire_bytes == expected + Fraction(n - 1, n) * 2 * 8 * (5 + measured.num_trainable)
        assert sum(measured.layout.bytes_on_wire(m).values()) == expected


def peak(rank: int, world_size: int, stage: int) -> dict[str, int]:
    model = _large()
    tokens = torch.randint(37, (2, 11), generator=torch.Generator().manual_seed(rank))
    with LiveBytes() as live:
        engine = initialize(
            model, make_config(1, {"zero": {"stage": stage}, "precision": {"param": "fp32"}}), loss_fn=_loss
        )
        engine.train_step([tokens])
        at_rest_bytes = live.live_bytes()
        live.reset_peak()
        engine.train_step([tokens])
        peak_bytes = live.peak_bytes()
    root, *blocks = (group.padded_numel * 4 for group in engine.layout.groups)
    sharded = engine.layout.stage.unshard_for_use
    # Parameters, gradient bucket and receive buffer of each.
    transient = (3 if sharded else 2) * (root + 2 * max(blocks))
    master = sum(group.padded_numel for group in engine.layout.groups) * 4 // world_size
    return {"at_rest": at_rest_bytes, "peak": peak_bytes, "allowed": transient + master}


def _large() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(tied=True, hidden_size=64, num_blocks=8)


def _loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def activation_bytes() -> int:
    """What a plain forward and backward holds beside parameters, each gradient dropped as it comes."""
    model = _large()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with LiveBytes() as live:
        tokens = torch.randint(37, (2, 11))
        _loss(model(tokens), tokens).backward()
    return live.peak_bytes()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_peak_is_bounded(ranks: WorkerPool, stage: int, num_ranks: int) -> None:
    activations = activation_bytes()
    for measured in ranks(num_ranks).run(peak, stage):
        assert measured["peak"] <= measured["at_rest"] + measured["allowed"] + activations
