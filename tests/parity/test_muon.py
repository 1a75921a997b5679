"""Muon in every layout equals one plain process with torch's Muon and AdamW, and orthogonalizes each matrix once."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from harness import split_sequences, tensor
from harness.models import CASES, every_rank, make_batches
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity, train_reference
from harness.refusals import refused
from harness.tensor import CLIP_NORM
from harness.training import LR, make_config, merge_ranks, train_engine
from shardwise import Config, Layout, initialize
from shardwise.construction.scan import build_layout
from shardwise.layout.facts import FusedDim
from shardwise.layout.matrices import assign_owners, held_ranges, matrices_of, newton_schulz_flops, rounds_of
from shardwise.layout.param_groups import GroupSpec, ParamSpec
from shardwise.optim.muon import advance_momenta, apply_updates, orthogonalize, update_scale
from shardwise.runtime.memory_tracker import Category
from shardwise.tensor.plan_layout import plan_layout
from shardwise.zero import matrix_step

NUM_STEPS: Final = 2
MUON: Final = {"name": "muon", "lr": LR, "clip_norm": CLIP_NORM}


class MuonBesideAdamW(torch.optim.Optimizer):
    """torch's two optimizers as one; Newton-Schulz runs in the parameters' own dtype, not in bf16.

    Fused weights, [in, out] of GPT-2, are stepped by thirds.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [each for each in model.named_parameters() if each[1].requires_grad]
        self.parts: list[tuple[nn.Parameter, nn.Parameter, int]] = []
        others: list[nn.Parameter] = []
        for name, parameter in named:
            if not name.startswith(("blocks.", "transformer.h.")) or parameter.dim() != 2:
                others.append(parameter)
                continue
            num_parts = 3 if name.endswith("c_attn.weight") else 1
            for index, part in enumerate(parameter.data.chunk(num_parts, dim=1)):
                self.parts.append((parameter, nn.Parameter(part), index))
        matrices = [part for _, part, _ in self.parts]
        decays = {0.1: [each for each in others if each.dim() >= 2], 0.0: [each for each in others if each.dim() < 2]}
        self.muon = torch.optim.Muon(matrices, lr=LR, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        groups = [{"params": params, "weight_decay": decay} for decay, params in decays.items()]
        self.adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
        super().__init__([{"params": [parameter for _, parameter in named]}], {})

    def step(self, closure: Any = None) -> None:
        for whole, part, index in self.parts:
            num_parts = whole.shape[1] // part.shape[1]
            part.grad = None if whole.grad is None else whole.grad.chunk(num_parts, dim=1)[index].clone()
        with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
            self.muon.step()
        self.adamw.step()


@functools.cache
def reference(case_name: str, world_size: int, accumulation: int) -> Trace:
    case = CASES[case_name]
    batches = make_batches(case, num_steps=NUM_STEPS, world_size=world_size, num_micro_batches=accumulation)
    return train_reference(case.build(torch.float64), every_rank(batches), case.loss, MuonBesideAdamW, CLIP_NORM)


def check(ranks: WorkerPool, case: str, num_ranks: int, accumulation: int, sections: dict[str, Any]) -> None:
    sections = {"optimizer": MUON, **sections}
    traces = ranks(num_ranks).run(train_engine, case, accumulation, NUM_STEPS, sections)
    holders = 1 if sections["zero"]["stage"] == 0 else sections.get("mesh", {}).get("dp_shard")
    check_parity(merge_ranks(traces, num_holders=holders), reference(case, num_ranks, accumulation))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_stage_equals_one_process(ranks: WorkerPool, num_ranks: int, stage: int, accumulation: int) -> None:
    check(ranks, "transformer", num_ranks, accumulation, {"zero": {"stage": stage}})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_and_small_matrices_that_stay_whole_equal_one_process(ranks: WorkerPool, stage: int) -> None:
    sections = {"zero": {"stage": stage, "keep_whole_below": 200 * (stage == 3)}, "mesh": {"dp_shard": 2}}
    check(ranks, "transformer", 4, 1, sections)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("case", ["odd-shapes", "unused-parameters", "frozen-parameters", "reused-blocks"])
def test_odd_models_equal_one_process(ranks: WorkerPool, case: str, stage: int) -> None:
    check(ranks, case, 3, 2, {"zero": {"stage": stage}})


@pytest.mark.parametrize("optimizer", ["host", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_off_the_device_equal_one_process(ranks: WorkerPool, tmp_path: Path, stage: int, optimizer: str) -> None:
    tiers: dict[str, Any] = {"optimizer": optimizer, "grads": "host" if stage > 1 else "device"}
    tiers |= {"params": "host"} if stage == 3 else {}
    tiers |= {"nvme_path": str(tmp_path)} if optimizer == "nvme" else {"optimizer_on_device": 0.3}
    check(ranks, "transformer", 2, 2, {"zero": {"stage": stage}, "tiers": tiers})


SPLITS: Final = [
    ("decoder", {"tp": 2}, 0),
    ("decoder", {"tp": 2}, 3),
    ("decoder", {"tp": 4}, 1),
    ("decoder", {"tp": 2, "dp_shard": 2}, 0),
    ("decoder", {"tp": 2, "dp_shard": 2}, 2),
    ("decoder", {"tp": 2, "dp_shard": 2}, 3),
    ("decoder", {"tp": 2, "dp_replicate": 2, "dp_shard": 1}, 0),
    ("gpt2", {"dp_shard": 2}, 3),
    ("gpt2", {"tp": 2}, 1),
    ("gpt2", {"tp": 2, "dp_shard": 2}, 3),
    ("deep", {"pp": 2}, 1),
    ("deep-tied", {"pp": 2, "dp_shard": 2}, 0),
    ("deep-tied", {"pp": 2, "dp_shard": 2}, 3),
    ("deep", {"pp": 2, "dp_shard": 2, "tp": 2}, 3),
    ("dense", {"cp": 2}, 1),
    ("dense", {"cp": 2, "dp_shard": 2}, 3),
    ("dense", {"cp": 2, "tp": 2}, 3),
]


@functools.cache
def split_reference(model: str, num_data_ranks: int) -> Trace:
    make_case = split_sequences.make_case if model == "dense" else tensor.make_case
    return tensor.train_plainly(make_case(model), num_data_ranks, 2, NUM_STEPS, optimizer_of=MuonBesideAdamW)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("model", "mesh", "stage"), SPLITS)
def test_split_models_equal_one_process(ranks: WorkerPool, model: str, mesh: dict[str, int], stage: int) -> None:
    if model == "gpt2":
        pytest.importorskip("transformers")
    num_ranks = math.prod(mesh.values())
    sections = {"mesh": mesh, "zero": {"stage": stage}, "optimizer": MUON}
    train = split_sequences.train_split if model == "dense" else tensor.train_split
    traces = ranks(num_ranks).run(train, model, sections, 2, NUM_STEPS)
    num_data_ranks = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    check_parity(merge_ranks(traces), split_reference(model, num_data_ranks))


def count_calls(rank: int, world_size: int, sections: dict[str, Any]) -> tuple[int, dict[str, int], Layout]:
    """Calls of Newton-Schulz on one rank in two steps, and the bytes that it sent for them, by name."""
    case, calls = CASES["transformer"], []
    batches = make_batches(case, num_steps=2, world_size=world_size, num_micro_batches=1)

    def counted(matrix: Tensor) -> Tensor:
        calls.append(matrix.shape)
        return orthogonalize(matrix)

    config = make_config(1, {"optimizer": MUON, **sections})
    with (
        mock.patch.object(matrix_step, "orthogonalize", counted),
        initialize(case.build(torch.float64), config, loss_fn=case.loss) as engine,
    ):
        for step in batches:
            engine.train_step(step[rank])
        wire = {op: count.wire_bytes for (_, op), count in engine.comm.comm_log.counts.items()}
        return len(calls), wire, engine.layout


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_matrix_is_orthogonalized_once_a_step(ranks: WorkerPool, num_ranks: int, stage: int) -> None:
    found = ranks(num_ranks).run(count_calls, {"zero": {"stage": stage}})
    owned = assign_owners(found[0][2].groups)
    assert len(owned) == 3 * 4
    assert [num_calls for num_calls, _, _ in found] == [
        2 * sum(each.owner == rank for each in owned) for rank in range(num_ranks)
    ]
    # All that the owner does not have goes there, where it is sharded, and as much comes back.
    elements = sum(each.place.numel for each in owned) * (num_ranks - 1)
    sent = sum(wire.get("exchange", 0) for _, wire, _ in found)
    if stage == 0:
        assert sent == 2 * 8 * elements
    else:
        held = sum(
            stop - start
            for each in owned
            for shard, (start, stop) in held_ranges(found[0][2].groups[each.group], each.place, False).items()
            if shard != each.owner
        )
        assert sent == 2 * 8 * 2 * held
    layout = found[0][2]
    estimate = 2 * 8 * num_ranks * sum(map(layout.exchanged_numel, layout.groups))
    assert 0.5 * estimate <= sent <= estimate  # which counts padding, and no parts that owners happen to have


def group_of(shapes: Sequence[tuple[int, ...]], num_shards: int, unit: str = "0") -> GroupSpec:
    places, offset = [], 0
    for number, shape in enumerate(shapes):
        places.append(ParamSpec(f"{unit}.{number}", (), shape, offset))
        offset += math.prod(shape)
    return GroupSpec(f"{unit}:matrix", unit, tuple(places), True, num_shards, num_shards, is_matrix=True)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
@pytest.mark.parametrize("tp", [1, 2])
def test_owners_have_equal_work(num_shards: int, tp: int) -> None:
    shapes = [(64, 64)] * 4 + [(256, 64), (256, 64), (64, 256), (8, 64, 32)]
    groups = [replace(group_of(shapes, num_shards, str(index)), num_parts=tp) for index in range(12)]
    owned = assign_owners(groups)
    assert owned == assign_owners(groups)
    assert [(each.group, each.place) for each in owned] == [
        (index, place) for index, group in enumerate(groups) for place in group.params
    ]
    work = dict.fromkeys(range(num_shards * tp), 0)
    for each in owned:
        work[each.owner] += newton_schulz_flops(each.place.shape)
    largest = newton_schulz_flops((256, 64))
    assert max(work.values()) - min(work.values()) <= largest
    assert max(work.values()) <= 1.1 * sum(work.values()) / len(work)


def test_rounds_keep_the_order_and_bound_what_an_owner_holds() -> None:
    owned = assign_owners([group_of([(16, 16)] * 5 + [(64, 64)] + [(16, 16)] * 6, 2)])
    rounds = rounds_of(owned, most_numel=512)
    assert [each for matrices in rounds for each in matrices] == list(owned)
    for matrices in rounds:
        for owner in (0, 1):
            numels = [each.place.numel for each in matrices if each.owner == owner]
            assert sum(numels) <= 512 or len(numels) == 1
    assert 3 <= len(rounds) < len(owned)


def test_a_step_in_several_rounds_is_the_same(ranks: WorkerPool) -> None:
    found = ranks(3).run(train_in_rounds, 150)
    check_parity(merge_ranks(found), reference("transformer", 3, 1))


def train_in_rounds(rank: int, world_size: int, most_numel: int) -> Trace:
    with mock.patch.object(matrix_step, "ROUND_NUMEL", most_numel):
        sections = {"zero": {"stage": 3}, "optimizer": MUON}
        return train_engine(rank, world_size, "transformer", 1, NUM_STEPS, sections)


def test_operations_of_newton_schulz_are_those_of_its_products() -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(3, 24, 16))
    assert counter.get_total_flops() == newton_schulz_flops((3, 24, 16))


def test_fused_weights_and_stacks_are_stepped_matrix_by_matrix() -> None:
    torch.manual_seed(0)
    stack = torch.randn(3, 8, 5, dtype=torch.float64)
    for matrix, found in zip(stack, orthogonalize(stack), strict=True):
        torch.testing.assert_close(found, orthogonalize(matrix))
    place = ParamSpec("qkv", (), (12, 4), 0, fused=FusedDim(0, (6, 3, 3)))
    assert [rect.shape for rect in matrices_of(place)] == [(6, 4), (3, 4), (3, 4)]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.up = nn.Parameter(torch.randn(3, 4, 6))
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.table = nn.Embedding(5, 4)
        self.bias_table = nn.Parameter(torch.randn(7, 4))
        self.mix = nn.Conv1d(4, 4, 3)


def test_linear_layers_inside_blocks_are_the_matrices() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(9, 4)
    model.blocks = nn.ModuleList([Experts()])
    model.head = nn.Linear(4, 9)
    config = Config.from_dict({"optimizer": {"name": "muon"}, "precision": {"param": "bf16"}}).resolve(2)
    layout = build_layout(model, config)
    matrices = [place.name for group in layout.groups if group.is_matrix for place in group.params]
    assert matrices == ["blocks.0.up", "blocks.0.router.weight"]
    states = {state.name: [group.name for group in layout.groups if state.is_kept_by(group)] for state in layout.states}
    assert states["momentum_buffer"] == ["blocks.0:matrix"]
    assert states["exp_avg"] == states["exp_avg_sq"] == ["root", "blocks.0"]
    with refused("muon-no-matrix", "optimizer.name=muon", "zero.blocks"):
        build_layout(nn.Linear(4, 4), config)


def test_known_fused_weights_are_several_matrices() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16)])
    config = Config.from_dict({"optimizer": {"name": "muon"}}).resolve(1)
    layout = plan_layout(model, config)
    fused = {place.name: matrices_of(place) for group in layout.groups if group.is_matrix for place in group.params}
    assert {name.removeprefix("blocks.0."): [rect.shape for rect in rects] for name, rects in fused.items()} == {
        "self_attn.in_proj_weight": [(8, 8)] * 3,
        "self_attn.out_proj.weight": [(8, 8)],
        "linear1.weight": [(16, 8)],
        "linear2.weight": [(8, 16)],
    }


def measure_at_rest(rank: int, world_size: int, sections: dict[str, Any]) -> tuple[int, int]:
    """Bytes of the optimizer on the device, as tracked and by the layout."""
    case = CASES["transformer"]
    config = make_config(1, {"optimizer": MUON, "precision": {"param": "bf16"}, **sections})
    with initialize(case.build(torch.float32), config, loss_fn=case.loss) as engine:
        for step in make_batches(case, num_steps=2, world_size=world_size, num_micro_batches=1):
            engine.train_step(step[rank])
        states = [value for state in engine.optimizer.state.values() if type(state) is dict for value in state.values()]
        counters = sum(value.nbytes for value in states if value.dim() == 0)
        tracked = engine.memory.snapshot().live_bytes[Category.OPTIMIZER] - counters
        shard = engine.parts.comms.shards.rank
        return tracked, engine.layout.bytes_at_rest(shard, "device")["optimizer"]


@pytest.mark.parametrize(
    "sections",
    [*({"zero": {"stage": stage}} for stage in range(4)), {"zero": {"stage": 2}, "precision": {"states": "bf16"}}],
)
def test_bytes_at_rest_are_those_of_one_state_of_matrices_and_two_of_others(
    ranks: WorkerPool, sections: dict[str, Any]
) -> None:
    sections = {**sections, "precision": {"param": "bf16", **sections.get("precision", {})}}
    for tracked, at_rest in ranks(2).run(measure_at_rest, sections):
        assert tracked == at_rest


def go_on(
    rank: int, world_size: int, sections: dict[str, Any], num_steps: int, places: tuple[str, str]
) -> dict[str, Tensor]:
    """Load, take steps, save; return all states."""
    case = CASES["transformer"]
    mesh = sections.get("mesh", {})
    num_data = world_size // mesh.get("tp", 1) // mesh.get("pp", 1)
    accumulation = 4 // num_data
    config = make_config(accumulation, {"optimizer": MUON, **sections})
    with initialize(case.build(torch.float64, seed=1), config, loss_fn=case.loss) as engine:
        if places[0]:
            engine.load(places[0])
        first, index = engine.num_steps, engine.layout.mesh.data_index(rank)
        batches = make_batches(case, num_steps=first + num_steps, world_size=num_data, num_micro_batches=accumulation)
        for step in batches[first:]:
            engine.train_step(step[index])
        if places[1]:
            engine.save(places[1])
        return {
            f"{name} {state}": value.clone()
            for name in ("embedding.weight", "blocks.1.qkv.weight", "blocks.2.down.weight", "blocks.0.up.bias")
            for state in engine.states_of(name)
            if state != "grad" and (value := engine.read(name, state)) is not None
        }


RESUMED: Final = [
    (1, {"zero": {"stage": 0}}),
    (2, {"zero": {"stage": 3}}),
    (4, {"zero": {"stage": 1}, "mesh": {"dp_shard": 2}}),
    (2, {"zero": {"stage": 2}, "tiers": {"optimizer": "host", "grads": "host"}}),
    (2, {"zero": {"stage": 1}, "mesh": {"pp": 2}}),
]


@pytest.mark.parametrize("second", range(len(RESUMED)))
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_checkpoint_goes_on_in_another_layout(ranks: WorkerPool, tmp_path: Path, first: int, second: int) -> None:
    (expected, *_) = ranks(1).run(go_on, {"zero": {"stage": 0}}, 4, ("", ""))
    assert expected.keys() >= {"blocks.1.qkv.weight momentum_buffer", "embedding.weight exp_avg_sq"}
    assert "blocks.1.qkv.weight exp_avg" not in expected
    for number, place in ((first, ("", str(tmp_path))), (second, (str(tmp_path), ""))):
        num_ranks, sections = RESUMED[number]
        found = ranks(num_ranks).run(go_on, sections, 2, place)
    for states in found:
        assert states.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(states[key], value, rtol=1e-9, atol=1e-12, msg=key)


def write_momentum(rank: int, world_size: int, sections: dict[str, Any]) -> tuple[Tensor, Tensor]:
    case, name = CASES["transformer"], "blocks.1.up.weight"
    config = make_config(1, {"optimizer": {**MUON, "weight_decay": 0.0}, **sections})
    with initialize(case.build(torch.float64), config, loss_fn=case.loss) as engine:
        batches = make_batches(case, num_steps=2, world_size=world_size, num_micro_batches=1)
        engine.train_step(batches[0][rank])
        momentum = torch.arange(24 * 12, dtype=torch.float64).view(24, 12).sin() * 1e6
        engine.write(name, momentum, "momentum_buffer")
        before = engine.read(name)
        assert torch.equal(engine.read(name, "momentum_buffer"), momentum)
        engine.train_step(batches[1][rank])
        return (before - engine.read(name)) / LR, momentum


@pytest.mark.parametrize("sections", [{"zero": {"stage": 3}}, {"tiers": {"optimizer": "host", "grads": "host"}}])
def test_what_is_written_into_the_momentum_counts(ranks: WorkerPool, sections: dict[str, Any]) -> None:
    for update, momentum in ranks(2).run(write_momentum, sections):  # the gradient is nothing beside it
        torch.testing.assert_close(update, orthogonalize(momentum) * update_scale((24, 12)), rtol=1e-3, atol=1e-3)


def train_frozen(rank: int, world_size: int, sections: dict[str, Any]) -> dict[str, Tensor]:
    """Two steps with a frozen block between steps with all of them."""
    case = CASES["transformer"]
    model = case.build(torch.float64)
    with initialize(model, make_config(1, {"optimizer": MUON, **sections}), loss_fn=case.loss) as engine:
        for number, step in enumerate(make_batches(case, num_steps=5, world_size=2, num_micro_batches=1)):
            model.blocks[1].requires_grad_(not 1 <= number <= 2)
            engine.train_step(step[rank % 2])
        return {name: engine.read(name) for name, _ in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_frozen_block_keeps_its_momentum(ranks: WorkerPool, stage: int) -> None:
    expected = ranks(2).run(train_frozen, {"zero": {"stage": 0}})[0]
    for found in ranks(2).run(train_frozen, {"zero": {"stage": stage}}):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("shape", [(24, 12), (12, 24), (64, 64)])
@pytest.mark.parametrize("in_bf16", [True, False])
def test_newton_schulz_has_the_bits_of_torchs(shape: tuple[int, int], in_bf16: bool) -> None:
    torch.manual_seed(0)
    weight, gradient = torch.randn(shape), torch.randn(shape)
    whole, ours = nn.Parameter(weight.clone()), weight.clone()
    whole.grad = gradient.clone()
    theirs = torch.optim.Muon([whole], lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    with nullcontext() if in_bf16 else mock.patch.object(Tensor, "bfloat16", Tensor.clone):
        theirs.step()
    (ahead,) = advance_momenta([torch.zeros(shape)], [gradient], [0.95])
    update = orthogonalize(ahead.bfloat16() if in_bf16 else ahead)
    apply_updates([(ours, update, update_scale(shape), theirs.defaults)])
    assert torch.equal(ours, whole)


class Blocks(nn.Module):
    """Two blocks of matrices that are large enough to be encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(80, 96), nn.Tanh(), nn.Linear(96, 80)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def train_encoded(rank: int, world_size: int, sections: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = make_config(1, {"optimizer": {**MUON, "lr": 1e-2}, **sections, "batch": {"micro_size": 4 // world_size}})
    loss_fn = lambda output, batch: (output.square().sum(), output.numel())  # noqa: E731
    dtype = torch.float32 if config.precision.param == "fp32" else torch.float64
    with initialize(Blocks().to(dtype), config, loss_fn=loss_fn) as engine:
        for step in range(NUM_STEPS):
            batch = torch.linspace(-2, 2, 4 * 80, dtype=torch.float64).mul(step + 1).sin().view(4, 80)
            engine.train_step([batch.to(dtype).chunk(world_size)[rank]])
        names = [f"blocks.{index}.{layer}.weight" for index in (0, 1) for layer in (0, 2)]
        return {f"{name} {state}": engine.read(name, state) for name in names for state in ("param", "momentum_buffer")}


@pytest.mark.quick(2)
@pytest.mark.parametrize("optimizer", ["device", "host", "nvme"])
@pytest.mark.parametrize("states", ["int8", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_encoded_momentum_does_not_depend_on_the_layout(
    ranks: WorkerPool, tmp_path: Path, stage: int, states: str, optimizer: str
) -> None:
    precision = {"precision": {"param": "fp64", "states": states}}
    expected = ranks(1).run(train_encoded, precision)[0]
    plain = ranks(1).run(train_encoded, {})[0]
    tiers = {"optimizer": optimizer, **({"nvme_path": str(tmp_path)} if optimizer == "nvme" else {})}
    for found in ranks(2).run(train_encoded, {**precision, "zero": {"stage": stage}, "tiers": tiers}):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12, msg=key)
            if "momentum" in key:
                error = (value - plain[key]).norm() / plain[key].norm()
                assert 1e-4 < error < 0.05


@pytest.mark.parametrize("optimizer", ["device", "host"])
def test_encoded_momentum_of_fp32_matrices_is_stored(optimizer: str) -> None:
    precision = {"precision": {"param": "fp32", "states": "int8"}, "tiers": {"optimizer": optimizer}}
    wide = train_encoded(0, 1, {})
    for key, value in train_encoded(0, 1, precision).items():
        if "momentum" in key:
            assert (value - wide[key]).norm() <= 0.05 * wide[key].norm()
