"""Gradients that are sent in 8 or 4 bits: sums by a slow reference, equal bits in every stage, bytes by formula."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.pool import WorkerPool
from harness.refusals import refused
from harness.training import make_config
from harness.wire_bytes import WireBytes, ring_equivalent_bytes
from shardwise import Engine, Layout, initialize, simulate
from shardwise.comm.backends import process_group_comm
from shardwise.comm.collectives import CommResources
from shardwise.comm.encoded import EncodedSum
from shardwise.config.sections import Reduce
from shardwise.layout.grad_sums import GradSum
from shardwise.layout.wire_codec import CODES, WireCodec
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.memory_tracker import Category

CODECS: Final = [name for name in get_args(Reduce) if name in CODES]
BLOCK: Final = 256


def rounded(values: Tensor, name: str) -> Tensor:
    """What arrives of values."""
    codec = WireCodec(name)
    return codec.decode(codec.encode(values.float()), torch.empty(len(values)))


def summed(buffers: list[Tensor], name: str, node_size: int, numel: int, residuals: list[Tensor]) -> list[Tensor]:
    """Each rank's slice of the sum, by steps within and across nodes; what is rounded off goes into `residuals`."""

    def sent(index: int, values: Tensor) -> Tensor:
        values = values + residuals[index] if residuals else values
        arrived = rounded(values, name)
        if residuals:
            residuals[index] = values - arrived
        return arrived

    arrived = [sent(index, each.float()) for index, each in enumerate(buffers)]
    nodes = [sum(arrived[first + 1 : first + node_size], arrived[first]) for first in range(0, len(buffers), node_size)]
    if len(nodes) > 1:
        nodes = [rounded(each, name) for each in nodes]
    total = sum(nodes[1:], nodes[0])
    return list(total.split(numel))


def values_of(rank: int, round_index: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * round_index + rank)
    values = torch.randn(numel, generator=generator) * torch.logspace(-6, 3, numel)
    values[:BLOCK] = 0
    return values.to(dtype)


def sum_encoded(
    rank: int, world_size: int, name: str, node_size: int, dtype: torch.dtype, feedback: bool
) -> tuple[list[Tensor], int, int, Fraction, int]:
    """Sum twice, the second time onto the first; return both, the bytes by record and by watching, and live bytes."""
    pool = BufferPool(torch.device("cpu"))
    resources = CommResources.alone(torch.device("cpu"), 20.0, pool)
    comm = process_group_comm(dist.group.WORLD, "dp_shard", resources)
    numel = 3 * BLOCK
    second = world_size // node_size * numel if node_size < world_size else 0
    kept = (torch.zeros(world_size * numel), torch.zeros(second)) if feedback else (None, None)
    summing = EncodedSum(comm, WireCodec(name), pool, node_size, kept)
    out, found = torch.zeros(numel), []
    with WireBytes() as wire:
        for index in range(2):
            source = values_of(rank, index, world_size * numel, dtype)
            summing.reduce_scatter(source, out, accumulate=index > 0, name="test").wait()
            found.append(out.clone())
    counted = resources.comm_log.counts["dp_shard", "reduce_scatter"]
    return found, counted.wire_bytes, counted.num_calls, ring_equivalent_bytes(wire.calls), pool.live_bytes


@pytest.mark.parametrize(
    ("num_ranks", "node_size", "name", "dtype"),
    [
        (2, 2, "int8", torch.float32),
        (3, 3, "int4", torch.bfloat16),
        (4, 4, "int8", torch.bfloat16),
        (4, 2, "int8", torch.float32),
        *((4, 2, name, torch.float32) for name in CODECS if name != "int8"),
    ],
)
def test_sums_are_those_of_a_slow_reference(
    ranks: WorkerPool, num_ranks: int, node_size: int, name: str, dtype: torch.dtype
) -> None:
    numel = 3 * BLOCK
    first, second = (
        summed(
            [values_of(rank, index, num_ranks * numel, dtype) for rank in range(num_ranks)], name, node_size, numel, []
        )
        for index in range(2)
    )
    by_formula = GradSum(num_ranks, num_ranks * numel, "fp32", WireCodec(name), node_size=node_size)
    found = ranks(num_ranks).run(sum_encoded, name, node_size, dtype, False)
    for rank, (outs, record_bytes, num_calls, wire_bytes, live_bytes) in enumerate(found):
        assert torch.equal(outs[0], first[rank])
        assert torch.equal(outs[1], second[rank] + first[rank])
        assert (
            record_bytes == wire_bytes == 2 * sum(call.sent_bytes(1) for call in by_formula.collectives(1, "backward"))
        )
        assert num_calls == 2 * len(by_formula.hops)
        assert live_bytes == 0


@pytest.mark.parametrize("name", CODECS)
def test_feedback_adds_what_was_rounded_off(ranks: WorkerPool, name: str) -> None:
    numel, num_ranks = 3 * BLOCK, 2
    residuals = [torch.zeros(num_ranks * numel) for _ in range(num_ranks)]
    first, second = (
        summed(
            [values_of(rank, index, num_ranks * numel, torch.float32) for rank in range(num_ranks)],
            name,
            num_ranks,
            numel,
            residuals,
        )
        for index in range(2)
    )
    for rank, (outs, *_) in enumerate(ranks(num_ranks).run(sum_encoded, name, num_ranks, torch.float32, True)):
        assert torch.equal(outs[0], first[rank])
        assert torch.equal(outs[1], second[rank] + first[rank])


def send_one_value(rank: int, world_size: int, node_size: int) -> Tensor:
    """Sum the same values often; return the mean, which feedback brings near to what is sent."""
    pool = BufferPool(torch.device("cpu"))
    comm = process_group_comm(dist.group.WORLD, "dp_shard", CommResources.alone(torch.device("cpu"), 20.0, pool))
    kept = (torch.zeros(world_size * BLOCK), torch.zeros(world_size // node_size * BLOCK))
    summing = EncodedSum(comm, WireCodec("int4"), pool, node_size, kept)
    source, out, num_rounds = values_of(rank, 0, world_size * BLOCK, torch.float32), torch.zeros(BLOCK), 64
    for _ in range(num_rounds):
        summing.reduce_scatter(source, out, accumulate=True, name="test").wait()
    return out / num_rounds


@pytest.mark.parametrize("node_size", [1, 2])
def test_the_mean_of_sums_with_feedback_is_the_sum(ranks: WorkerPool, node_size: int) -> None:
    exact = sum((values_of(rank, 0, 4 * BLOCK, torch.float32) for rank in range(4)), torch.zeros(4 * BLOCK))
    found = torch.cat(ranks(4).run(send_one_value, node_size)).view(-1, BLOCK)
    largest = exact.view(-1, BLOCK).abs().amax(1, keepdim=True) + 1e-30
    # One encoding is off by up to 1/14 of a block's largest value on each rank; the mean of 64 by 1/64 of that.
    assert ((found - exact.view(-1, BLOCK)).abs() / largest).max() < 0.02


WIDTH: Final = 128
NUM_STEPS: Final = 3


class ExactModel(nn.Module):
    """Gets gradients that are sums of products of small integers, whatever comes before and after in it."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ExactBlock(WIDTH) for _ in range(num_blocks)])
        self.odd = nn.Parameter(torch.linspace(-1, 1, 65 * 65).view(65, 65))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + (self.odd - self.odd.detach()).sum()


class ExactBlock(nn.Module):
    """Passes its input on, bit for bit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        added = self.up(x.detach())
        return x + (added - added.detach())


def loss_of(output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.arange(output.shape[-1], dtype=output.dtype) % 5 - 2
    return (output * weights).sum(), torch.tensor(float(output.shape[0]))


def batch_of(step: int, sample: int) -> Tensor:
    rows = torch.arange(WIDTH).unsqueeze(0) * (step + 1) + sample * 7
    found = (rows % 7 - 3).float()
    found[:, 1] *= 50 if step == 1 else 1
    found[:, 0] = 0
    return found


@dataclass(frozen=True)
class Trained:
    """What one rank has after a few steps, and the bytes of the last one."""

    layout: Layout
    values: dict[str, Tensor]
    wire_bytes: Fraction
    record_bytes: int
    tracked_bytes: int


NAMES: Final = [*(f"blocks.{index}.up.{name}" for index in range(2) for name in ("weight", "bias")), "odd"]


def engine_of(sections: dict[str, Any], accumulation: int = 1) -> Engine:
    torch.manual_seed(0)
    given: dict[str, dict[str, Any]] = {"batch": {"micro_size": 1}, "precision": {"param": "fp32"}}
    given = {name: {**given.get(name, {}), **sections.get(name, {})} for name in {*given, *sections}}
    return initialize(ExactModel(), make_config(accumulation, given), loss_fn=loss_of)


def train(rank: int, world_size: int, sections: dict[str, Any], accumulation: int = 1) -> Trained:
    engine = engine_of(sections, accumulation)
    mesh = engine.layout.mesh
    data_rank, num_data = mesh.data_index(rank), world_size // mesh.pp
    for step in range(NUM_STEPS):
        batches = [batch_of(step, number * num_data + data_rank) for number in range(accumulation)]
        engine.comm.comm_log.counts.clear()
        with WireBytes() as wire:
            engine.train_step(batches)
    record_bytes = sum(each.wire_bytes for each in engine.comm.comm_log.counts.values())
    tracked_bytes = sum(engine.memory.snapshot().live_bytes.values())
    values = {name: value.clone() for name in NAMES if (value := engine.read(name)) is not None}
    engine.close()
    return Trained(engine.layout, values, ring_equivalent_bytes(wire.calls), record_bytes, tracked_bytes)


def assert_equal_bits(actual: Trained, expected: Trained) -> None:
    assert actual.values.keys() == expected.values.keys()
    assert [name for name, each in expected.values.items() if not torch.equal(actual.values[name], each)] == []


INT8: Final = {"reduce": "int8"}
FEEDBACK: Final = {"reduce": "int4", "reduce_feedback": True}


@pytest.mark.parametrize("precision", [INT8, FEEDBACK])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_stage_trains_to_the_same_bits(ranks: WorkerPool, num_ranks: int, precision: dict[str, Any]) -> None:
    """And each sends and keeps what the formulas say."""
    exact, *_ = ranks(num_ranks).run(train, {"zero": {"stage": 1}})
    found = {
        stage: ranks(num_ranks).run(train, {"precision": precision, "zero": {"stage": stage}}) for stage in range(4)
    }
    expected = found[1][0]
    assert [name for name, each in exact.values.items() if not torch.equal(each, expected.values[name])]
    for stage, trained in found.items():
        for rank, actual in enumerate(trained):
            assert_equal_bits(actual, expected)
            assert_bytes(actual, rank, num_ranks, stage, precision)


def assert_bytes(actual: Trained, rank: int, n: int, stage: int, precision: dict[str, Any]) -> None:
    """Compare with the stage table in fp32, in which large gradients take their codes and scales."""
    small, large = (
        sum(each.padded_numel for each in actual.layout.groups if each.name.endswith(":whole") is is_small)
        for is_small in (True, False)
    )
    codes = Fraction(CODES[precision["reduce"]].bits, 8) + Fraction(4, BLOCK)
    root, *_, last = (each.padded_numel for each in actual.layout.groups if not each.name.endswith(":whole"))
    gathers = 4 * (large + small)
    if stage == 3:
        gathers = 4 * (2 * large - root - last + small)
    ring = Fraction(n - 1, n)
    reduces = codes * large + (8 if stage == 0 else 4) * small
    expected = ring * (reduces + (4 * large if stage == 0 else gathers))
    scalars = ring * 2 * 8 * (5 + len(NAMES))
    assert actual.wire_bytes == expected + scalars
    assert sum(actual.layout.bytes_on_wire(1).values()) == expected
    assert actual.record_bytes == int(expected) + int(scalars)
    residual_bytes = 4 * large if precision.get("reduce_feedback") else 0
    kept = actual.layout.bytes_at_rest(rank)
    plain = replace(actual.layout, precision=replace(actual.layout.precision, reduce_feedback=False))
    assert kept["grad"] == plain.bytes_at_rest(rank)["grad"] + residual_bytes


def test_bf16_gradients_have_the_same_bits_in_the_stages_that_shard(ranks: WorkerPool) -> None:
    """Stage 0 rounds the sum to bf16, as without codes."""
    precision = {"param": "bf16", **INT8}
    expected, *_ = ranks(2).run(train, {"precision": precision, "zero": {"stage": 1}})
    for stage in (2, 3):
        for actual in ranks(2).run(train, {"precision": precision, "zero": {"stage": stage}}):
            assert_equal_bits(actual, expected)


@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("precision", [INT8, FEEDBACK])
def test_a_pipeline_trains_to_the_same_bits(ranks: WorkerPool, stage: int, precision: dict[str, Any]) -> None:
    """It reduces once a step, as stage 1 does."""
    expected, *_ = ranks(2).run(train, {"precision": precision, "zero": {"stage": 1}}, 2)
    for actual in ranks(4).run(train, {"precision": precision, "zero": {"stage": stage}, "mesh": {"pp": 2}}, 2):
        assert_equal_bits(actual, expected)


@pytest.mark.parametrize("precision", [INT8, FEEDBACK])
@pytest.mark.parametrize(("mesh", "node"), [({}, 2), ({"dp_shard": 2}, 0)])
def test_two_steps_and_replicas_send_what_the_formulas_say(
    ranks: WorkerPool, mesh: dict[str, int], node: int, precision: dict[str, Any]
) -> None:
    """Nodes of two ranks, or two replicas of two shards: each rank sends half of its rows, then the sums of the others.

    The bits are those of every stage with the same replicas.
    """
    expected: Trained | None = None
    for stage in (1, 2, 3) if mesh else range(4):
        sections = {"precision": precision, "mesh": mesh, "zero": {"stage": stage, "secondary_shard": node}}
        for rank, actual in enumerate(ranks(4).run(train, sections)):
            expected = expected or actual
            assert_equal_bits(actual, expected)
            of_wire = actual.layout.bytes_on_wire(1)
            assert actual.wire_bytes == sum(of_wire.values()) + Fraction(3, 4) * 2 * 8 * (5 + len(NAMES))
            large = sum(each.padded_numel for each in actual.layout.groups if not each.name.endswith(":whole"))
            small = sum(each.padded_numel for each in actual.layout.groups) - large
            codes = Fraction(CODES[precision["reduce"]].bits, 8) + Fraction(4, BLOCK)
            gathered = 4 * large if stage == 0 else 0
            if mesh:  # half of the shard over replicas, and the sum to them
                over = (large * codes / 2, large * codes / 4 + 4 * large / 4 + 4 * small / 2)
                assert of_wire["reduce_scatter"] + of_wire["all_reduce"] == sum(over) + 4 * small / 2
                kept = large + large // 2
            else:
                steps = large * codes / 2 + large * codes / 4
                whole = Fraction(3, 4) * (gathered + (8 if stage == 0 else 4) * small)
                assert of_wire["reduce_scatter"] + of_wire["all_reduce"] == steps + whole
                kept = large + large // 2
            plain = replace(actual.layout, precision=replace(actual.layout.precision, reduce_feedback=False))
            residual_bytes = 4 * kept if "reduce_feedback" in precision else 0
            shard = rank % 2 if mesh else rank
            assert actual.layout.bytes_at_rest(shard)["grad"] == plain.bytes_at_rest(shard)["grad"] + residual_bytes


def tracked_gradients(rank: int, world_size: int, precision: dict[str, Any], stage: int) -> tuple[int, int]:
    """Bytes of gradients after a backward: as tracked and by the layout."""
    engine = engine_of({"precision": precision, "zero": {"stage": stage}})
    engine.train_step([batch_of(0, rank)])
    engine.backward(engine(batch_of(1, rank)))
    tracked = engine.memory.snapshot().live_bytes[Category.GRADIENTS]
    expected = engine.layout.bytes_at_rest(rank)["grad"]
    engine.close()
    return tracked, expected


@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_feedback_keeps_is_counted(ranks: WorkerPool, stage: int) -> None:
    for tracked, expected in ranks(2).run(tracked_gradients, FEEDBACK, stage):
        assert tracked == expected


def train_fp16(rank: int, world_size: int, feedback: bool) -> tuple[list[bool], bool]:
    """Let one rank's gradients overflow in the second step; say which steps are skipped, and whether all is finite."""
    precision = {"param": "fp16", "reduce": "int8", "reduce_feedback": feedback, "initial_loss_scale": 1024.0}
    engine = engine_of({"precision": precision, "run": {"on_nonfinite": "skip"}, "zero": {"stage": 2}})
    skipped = []
    for step in range(4):
        batch = batch_of(0, rank)
        if step == 1 and rank == 1:
            batch[0, 5] = 200.0  # the loss is finite; its gradient, times the scale, is not in fp16
        skipped.append(engine.train_step([batch]).skipped)
    is_finite = all(bool(value.isfinite().all()) for name in NAMES if (value := engine.read(name)) is not None)
    engine.close()
    return skipped, is_finite


@pytest.mark.parametrize("feedback", [False, True])
def test_an_overflow_is_seen_and_does_not_stay(ranks: WorkerPool, feedback: bool) -> None:
    assert ranks(2).run(train_fp16, feedback) == [([False, True, False, False], True)] * 2


def train_and_move(rank: int, world_size: int, moves: bool) -> dict[str, Tensor]:
    engine = engine_of({"precision": FEEDBACK, "zero": {"stage": 2}})
    for step in range(3):
        engine.train_step([batch_of(step, rank)])
        if moves and step == 1:
            engine.offload()
            assert engine.memory.snapshot().live_bytes[Category.GRADIENTS] == 0
            engine.reload()
    found = {name: value.clone() for name in NAMES if (value := engine.read(name)) is not None}
    engine.close()
    return found


def test_what_feedback_keeps_leaves_the_device_and_comes_back(ranks: WorkerPool) -> None:
    expected, actual = (ranks(2).run(train_and_move, moves)[0] for moves in (False, True))
    assert [name for name, each in expected.items() if not torch.equal(actual[name], each)] == []


def save_and_go_on(rank: int, world_size: int, stage: int, folder: str, saves: bool) -> dict[str, Tensor]:
    engine = engine_of({"precision": FEEDBACK, "zero": {"stage": stage}})
    if not saves:
        engine.load(folder)
    for step in range(2):
        engine.train_step([batch_of(step, rank)])
    if saves:
        engine.save(folder)
    found = {name: value.clone() for name in NAMES if (value := engine.read(name)) is not None}
    engine.close()
    return found


def test_a_checkpoint_goes_on_in_another_stage_with_the_same_bits(ranks: WorkerPool, tmp_path: Path) -> None:
    """What feedback keeps is not in it: both runs begin with zeros."""
    folder = str(tmp_path / "saved")
    ranks(2).run(save_and_go_on, 1, folder, True)
    expected, actual = (ranks(2).run(save_and_go_on, stage, folder, False)[0] for stage in (1, 3))
    assert [name for name, each in expected.items() if not torch.equal(actual[name], each)] == []


def load_and_go_on(rank: int, world_size: int, folder: str, has_stepped: bool) -> dict[str, Tensor]:
    engine = engine_of({"precision": FEEDBACK, "zero": {"stage": 2}})
    if has_stepped:
        for step in range(2):
            engine.train_step([batch_of(step, rank)])
    engine.load(folder)
    engine.train_step([batch_of(2, rank)])
    found = {name: value.clone() for name in NAMES if (value := engine.read(name)) is not None}
    engine.close()
    return found


def test_a_load_forgets_what_was_rounded_off_before(ranks: WorkerPool, tmp_path: Path) -> None:
    """So an engine that goes back to a checkpoint goes on as a new one does."""
    folder = str(tmp_path / "saved")
    ranks(2).run(save_and_go_on, 2, folder, True)
    expected, actual = (ranks(2).run(load_and_go_on, folder, has_stepped)[0] for has_stepped in (False, True))
    assert [name for name, each in expected.items() if not torch.equal(actual[name], each)] == []


def calls_of_step(rank: int, world_size: int, sections: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    engine = engine_of(sections)
    engine.train_step([batch_of(0, rank)])
    found = [(each.op, each.name, each.numel, each.wire_bytes) for each in engine.comm.comm_log.recent]
    engine.close()
    return found


def test_simulated_ranks_send_the_same(ranks: WorkerPool) -> None:
    sections = {"precision": FEEDBACK, "zero": {"stage": 2, "secondary_shard": 2}}
    given = {"batch": {"micro_size": 1}, "precision": {"param": "fp32", **FEEDBACK}, "zero": sections["zero"]}
    reals = ranks(4).run(calls_of_step, sections)
    for rank in (0, 3):  # which differ in their place within a node and in their node
        there = simulate(
            ExactModel, make_config(1, given), lambda: batch_of(0, 0), rank=rank, world_size=4, loss_fn=loss_of
        )
        calls = [(each.op, each.name, each.numel, each.wire_bytes) for each in there.calls]
        assert calls == reals[rank][-len(calls) :]
        assert there.states_bytes == there.layout.bytes_at_rest(rank)


@pytest.mark.full
def test_thousands_of_ranks_are_simulated() -> None:
    given = {"batch": {"micro_size": 1}, "precision": {"param": "bf16", **FEEDBACK}}
    given["zero"] = {"stage": 3, "secondary_shard": 8}
    there = simulate(
        ExactModel, make_config(1, given), lambda: batch_of(0, 0), rank=17, world_size=4096, loss_fn=loss_of
    )
    wire, by_layout = there.wire_bytes, there.layout.bytes_on_wire(1)
    assert sum(size for (axis, op), size in wire.items() if op == "reduce_scatter") == by_layout["reduce_scatter"]
    assert there.states_bytes == there.layout.bytes_at_rest(17)


def test_feedback_without_codes_is_refused() -> None:
    with refused("feedback-without-codes", "precision.reduce=param"):
        make_config(1, {"precision": {"reduce_feedback": True}}).resolve(2)
