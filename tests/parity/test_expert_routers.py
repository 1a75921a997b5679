"""Losses and biases of the routers of a mixture of experts, in every layout, equal one plain process, in float64."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.balance import (
    WatchedRouters,
    balanced,
    biases_of,
    chain_case,
    fixed_length,
    router_loss,
    train_with_biases,
    train_with_biases_plainly,
)
from harness.combinations import cover
from harness.expert_layouts import EXPERT_FACTORS, fits_ranks, num_data_ranks, sections_of
from harness.models import ModelCase
from harness.moe import HIDDEN
from harness.moe_models import moe_case
from harness.pool import WorkerPool
from harness.reference import PARITY, Trace, check_parity, max_error
from harness.tensor import CLIP_NORM, batches_of, mixture, step_batches, train_on_mesh, train_plainly
from harness.training import make_config, merge_ranks
from shardwise import initialize
from shardwise.layout.tensor_plan import LayerSplit, SequenceStack, TensorPlan
from shardwise.layout.tp_sharding import FusedPart
from shardwise.runtime.float64 import float64_throughout

pytest.importorskip("transformers")

NUM_STEPS = 2
AUX, Z = 0.5, 0.05
FACTORS = {"scope": ["global", "micro-batch", "sequence"], **EXPERT_FACTORS}


def train(rank: int, world_size: int, num_micro_batches: int, overrides: Any) -> Trace:
    return train_on_mesh(rank, fixed_length(mixture()), overrides, None, num_micro_batches, NUM_STEPS)


@functools.cache
def reference(scope: str, num_data_ranks: int, num_micro_batches: int) -> Trace:
    """Of scope "global", the micro-batches that all data ranks compute at a time are one."""
    num_joined = num_data_ranks if scope == "global" else 1
    case = balanced(fixed_length(mixture(), num_joined), AUX, Z, scope == "sequence")
    return train_plainly(case, num_data_ranks // num_joined, num_micro_batches, NUM_STEPS, CLIP_NORM)


def but_stage_3(params: list[Any]) -> list[Any]:
    """Without `--full`, those of other stages: `test_experts.py` and `test_expert_replay.py` have stage 3."""
    return [
        pytest.param(*each.values, id=each.id, marks=pytest.mark.full) if "stage=3" in each.id else each
        for each in params
    ]


@pytest.mark.quick(6)
@pytest.mark.parametrize("options", but_stage_3(cover(FACTORS, fits_ranks, has_pairs=False)))
def test_losses_of_routers_equal_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    overrides = sections_of(options, experts={"aux_loss": AUX, "z_loss": Z, "aux_scope": options["scope"]})
    traces = ranks(4).run(train, options["accumulation"], overrides)
    check_parity(merge_ranks(traces), reference(options["scope"], num_data_ranks(options), options["accumulation"]))


RATE = 0.02
BIAS_FACTORS = {name: values for name, values in EXPERT_FACTORS.items() if name != "recompute"}


def train_biases(rank: int, world_size: int, family: str, num_micro_batches: int, overrides: Any) -> Trace:
    case = fixed_length(moe_case(family))
    return train_with_biases(rank, world_size, case, num_micro_batches, NUM_STEPS, overrides)


@functools.cache
def moved_plainly(family: str, num_data_ranks: int, num_micro_batches: int) -> Trace:
    case = fixed_length(moe_case(family))
    return train_with_biases_plainly(case, num_data_ranks, num_micro_batches, NUM_STEPS, RATE)


@pytest.mark.quick(6)
@pytest.mark.parametrize("options", but_stage_3(cover(BIAS_FACTORS, fits_ranks, has_pairs=False)))
def test_biases_of_routers_equal_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    """torchtitan#4154, torchtitan#4148: summed once over every axis, and moved by no evaluation."""
    overrides = sections_of(options, experts={"bias_rate": RATE})
    traces = ranks(4).run(train_biases, "solar_open", options["accumulation"], overrides)
    check_parity(merge_ranks(traces), moved_plainly("solar_open", num_data_ranks(options), options["accumulation"]))


DEEP = {"num_hidden_layers": 4}


def train_deep(rank: int, world_size: int, overrides: Any) -> Trace:
    return train_on_mesh(rank, fixed_length(mixture(**DEEP)), overrides, None, 4, NUM_STEPS)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "sections",
    [
        {"mesh": {"pp": 4}},
        {"mesh": {"pp": 2, "ep": 2}, "pipeline": {"schedule": "interleaved", "virtual_stages": 2}},
        {"mesh": {"pp": 2, "tp": 2}, "pipeline": {"schedule": "zb-v"}},
    ],
    ids=str,
)
def test_sums_of_routers_pass_through_stages_that_add_their_own(ranks: WorkerPool, sections: dict[str, Any]) -> None:
    traces = ranks(4).run(train_deep, {**sections, "experts": {"aux_loss": AUX, "z_loss": Z}})
    num_data_ranks = 4 // math.prod(sections["mesh"][axis] for axis in ("pp", "tp") if axis in sections["mesh"])
    case = balanced(fixed_length(mixture(**DEEP)), AUX, Z)
    check_parity(merge_ranks(traces), train_plainly(case, num_data_ranks, 4, NUM_STEPS, CLIP_NORM))


OWN = {"output_router_logits": True, "router_aux_loss_coef": 1.0}


def train_own_loss(rank: int, world_size: int, family: str, overrides: Any) -> Trace:
    return train_on_mesh(rank, own_loss_case(family), overrides, None, 2, NUM_STEPS)


def own_loss_case(family: str) -> ModelCase:
    case = moe_case(family)

    def make() -> nn.Module:
        model = case.make()
        for name, value in OWN.items():
            setattr(model.config, name, value)
        model.router_aux_loss_coef = OWN["router_aux_loss_coef"]
        return model

    return replace(case, make=make)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("family", ["ernie4_5_moe", "mixtral", "qwen3_moe"])
def test_the_models_own_auxiliary_loss_sees_whole_sequences(
    ranks: WorkerPool, family: str, mesh: dict[str, int]
) -> None:
    """Its function is given the logits of all tokens, in the order of the mask, where ranks have parts of sequences."""
    overrides = {"mesh": mesh, "zero": {"stage": 2}, "tensor": {"sequence_parallel": True}}
    traces = ranks(2).run(train_own_loss, family, overrides)
    check_parity(merge_ranks(traces), train_plainly(own_loss_case(family), 1, 2, NUM_STEPS, CLIP_NORM))


FROZEN = [
    ("afmoe", {"tp": 2, "ep": 2}, 3, 1),
    ("ernie4_5_moe", {"ep": 2}, 3, 2),
    ("ernie4_5_moe", {"pp": 2}, 2, 1),
    ("laguna", {"tp": 2}, 0, 1),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("family", "mesh", "stage", "num_data_ranks"), FROZEN)
def test_biases_that_are_frozen_parameters_equal_one_process(
    ranks: WorkerPool, family: str, mesh: dict[str, int], stage: int, num_data_ranks: int
) -> None:
    overrides = {"mesh": mesh, "zero": {"stage": stage}, "experts": {"bias_rate": RATE}}
    traces = ranks(2).run(train_biases, family, 1, overrides)
    check_parity(merge_ranks(traces), moved_plainly(family, num_data_ranks, 1))


def save_and_go_on(rank: int, world_size: int, root: Path, overrides: dict[str, Any]) -> dict[str, Tensor]:
    """Biases and parameters after four steps, the first two of which are saved."""
    return _steps(root, 0, overrides)


def load_and_go_on(rank: int, world_size: int, root: Path, overrides: dict[str, Any]) -> dict[str, Tensor]:
    return _steps(root, 2, overrides)


def _steps(root: Path, first: int, overrides: dict[str, Any]) -> dict[str, Tensor]:
    case = fixed_length(moe_case("solar_open"))
    model = case.build(torch.float64, seed=first)
    sections = {**overrides, "experts": {"bias_rate": RATE, "aux_loss": AUX}}
    with float64_throughout(), initialize(model, make_config(1, sections)) as engine:
        if first:
            engine.load(root)
        for step in range(first, 4):
            engine.train_step(batches_of(engine, case, step, 1))
            if step == 1:
                engine.save(root)
        read = {name: engine.read(name) for name, _ in model.named_parameters()}
    return {**read, **{name: bias.clone() for name, bias in biases_of(model).items()}}


RESUMED = {
    "the same": ({"mesh": {"pp": 2, "ep": 2}}, 0.0),
    "tp and ep": ({"mesh": {"tp": 2, "ep": 4}, "zero": {"stage": 3}}, 1e-9),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("target", sorted(RESUMED))
def test_biases_resume_where_they_were(ranks: WorkerPool, tmp_path: Path, target: str) -> None:
    """Bit for bit in the same layout; each rank then has the biases of all layers, also of those of other stages."""
    expected = ranks(4).run(save_and_go_on, tmp_path, RESUMED["the same"][0])[0]
    overrides, tolerance = RESUMED[target]
    for found in ranks(4).run(load_and_go_on, tmp_path, overrides):
        assert all((found[name] - expected[name]).abs().max() <= tolerance for name in expected)


def plain_gradients(rank: int, world_size: int, overrides: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    case = fixed_length(mixture())
    model = case.build(torch.float64)
    with float64_throughout(), initialize(model, make_config(1, overrides)) as engine:
        (batch,) = batches_of(engine, case, 0, 1)
        engine.backward(engine.forward(**batch).loss)
        gradients = {name: engine.read(name, "grad") for name, _ in model.named_parameters()}
        return engine.step().loss, gradients


@pytest.mark.parametrize("mesh", [{"cp": 2, "ep": 2}, {"tp": 2}, {"ep": 4}], ids=str)
@pytest.mark.parametrize("scope", ["global", "micro-batch"])
def test_losses_of_routers_join_those_of_plain_mode(ranks: WorkerPool, scope: str, mesh: dict[str, int]) -> None:
    """The gradient is the mean over data ranks, of the loss of each and of all their routers together."""
    overrides = {"mesh": mesh, "experts": {"aux_loss": AUX, "z_loss": Z, "aux_scope": scope}}
    num_data_ranks = 4 // mesh.get("cp", 1) // mesh.get("tp", 1)
    case = fixed_length(mixture())
    model = case.build(torch.float64)
    routers = WatchedRouters(model)
    with float64_throughout():
        batches = step_batches(case, 0, num_data_ranks, 1)
        loss = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            loss = loss + model(**batch).loss / num_data_ranks
            if scope == "micro-batch":
                loss = loss + router_loss(routers, 1, AUX, Z) / num_data_ranks
        if scope == "global":
            model(**{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})
            loss = loss + router_loss(routers, 1, AUX, Z)
        loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for found_loss, found in ranks(4).run(plain_gradients, overrides):
        assert found_loss == pytest.approx(loss.item(), rel=1e-9)
        assert max_error(found, expected) <= PARITY


def train_chain(rank: int, world_size: int, overrides: Any) -> Trace:
    case = chain_case()
    return train_on_mesh(rank, case, overrides, case.loss, 2, NUM_STEPS)


@pytest.mark.parametrize("mesh", [{"pp": 2, "ep": 2}, {"ep": 4}], ids=str)
def test_losses_of_routers_weigh_as_a_loss_function_counts(ranks: WorkerPool, mesh: dict[str, int]) -> None:
    """Also in a pipeline of an `nn.Sequential`, whose first stages know no count."""
    traces = ranks(4).run(train_chain, {"mesh": mesh, "experts": {"aux_loss": AUX, "z_loss": Z}})
    num_data_ranks = 4 // mesh.get("pp", 1)
    expected = train_plainly(balanced(chain_case(), AUX, Z), num_data_ranks, 2, NUM_STEPS, CLIP_NORM)
    check_parity(merge_ranks(traces), expected)


def mixed_case() -> ModelCase:
    """A chain of three layers of experts, and two linear layers that a plan may split; all lengths are even."""
    chain = chain_case()
    return replace(
        chain,
        make=lambda: nn.Sequential(*chain.make(), nn.Linear(HIDDEN, 6), nn.Linear(6, HIDDEN)),
        batch=lambda seed, *sizes: chain.batch(2 * seed, *sizes),
    )


# The sequence is split for the first two of the three layers alone.
PLAN = TensorPlan(
    layers=(LayerSplit("3", "column", (FusedPart(6),)), LayerSplit("4", "row", (FusedPart(6),))),
    stacks=(SequenceStack("0", "x", "1", ("0", "1")),),
)


def train_mixed(rank: int, world_size: int, overrides: Any) -> tuple[Trace, tuple[float, ...]]:
    case = mixed_case()
    trace = train_on_mesh(rank, case, overrides, case.loss, 2, NUM_STEPS, plan=PLAN)
    with initialize(case.build(torch.float64), make_config(2, overrides), loss_fn=case.loss, plan=PLAN) as engine:
        return trace, engine.train_step(batches_of(engine, case, 0, 2)).expert_skew


def test_layers_with_whole_sequences_beside_split_ones_count_once(ranks: WorkerPool) -> None:
    overrides = {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}, "experts": {"aux_loss": AUX, "z_loss": Z}}
    found = ranks(2).run(train_mixed, overrides)
    case = mixed_case()
    expected = train_plainly(balanced(case, AUX, Z), 1, 2, NUM_STEPS, CLIP_NORM)
    check_parity(merge_ranks([trace for trace, _ in found]), expected)
    model = case.build(torch.float64)
    routers, counts = WatchedRouters(model), dict[str, Tensor]()
    for batch in step_batches(case, 0, 1, 2):
        model(batch[0])
        counts = {name: counts.get(name, 0) + count for name, count in routers.counts().items()}
    for _, skew in found:
        assert skew == pytest.approx([(count.max() / count.mean()).item() for count in counts.values()])
