"""Losses and biases of the routers of a mixture of experts, in every layout, equal one plain process, in float64."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from harness.balance import balanced, fixed_length, train_with_biases, train_with_biases_plainly
from harness.combinations import cover
from harness.models import ModelCase
from harness.moe_models import moe_case
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.tensor import CLIP_NORM, mixture, train_on_mesh, train_plainly
from harness.training import merge_ranks

pytest.importorskip("transformers")

NUM_STEPS = 3
AUX, Z = 0.5, 0.05
FACTORS = {
    "scope": ["global", "micro-batch", "sequence"],
    "ep": [1, 2, 4],
    "stage": [0, 1, 2, 3],
    "tp": [1, 2],
    "cp": [1, 2],
    "pp": [1, 2],
    "sequence_parallel": [False, True],
    "accumulation": [1, 2],
    "recompute": ["none", "full", "selective"],
}


def fits(options: dict[str, Any]) -> bool:
    num_ranks = 4 // options["pp"]
    is_legal = options["tp"] * options["cp"] <= num_ranks and num_ranks % options["ep"] == 0
    return is_legal and (options["tp"] > 1 or not options["sequence_parallel"])


def train(rank: int, world_size: int, num_micro_batches: int, overrides: Any) -> Trace:
    return train_on_mesh(rank, fixed_length(mixture()), overrides, None, num_micro_batches, NUM_STEPS)


@functools.cache
def reference(scope: str, num_data_ranks: int, num_micro_batches: int) -> Trace:
    """Of scope "global", the micro-batches that all data ranks compute at a time are one."""
    num_joined = num_data_ranks if scope == "global" else 1
    case = balanced(fixed_length(mixture(), num_joined), AUX, Z, scope == "sequence")
    return train_plainly(case, num_data_ranks // num_joined, num_micro_batches, NUM_STEPS, CLIP_NORM)


@pytest.mark.quick(6)
@pytest.mark.parametrize("options", cover(FACTORS, fits))
def test_losses_of_routers_equal_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    mesh = {axis: options[axis] for axis in ("ep", "tp", "cp", "pp")}
    overrides = {
        "mesh": mesh,
        "zero": {"stage": options["stage"]},
        "tensor": {"sequence_parallel": options["sequence_parallel"]},
        "recompute": {"mode": options["recompute"]},
        "pipeline": {"schedule": "1f1b"},
        "experts": {"aux_loss": AUX, "z_loss": Z, "aux_scope": options["scope"]},
    }
    num_data_ranks = 4 // math.prod(mesh[axis] for axis in ("tp", "cp", "pp"))
    traces = ranks(4).run(train, options["accumulation"], overrides)
    check_parity(merge_ranks(traces), reference(options["scope"], num_data_ranks, options["accumulation"]))


RATE = 0.02
BIAS_FACTORS = {name: values for name, values in FACTORS.items() if name not in ("scope", "recompute")}


def train_biases(rank: int, world_size: int, family: str, num_micro_batches: int, overrides: Any) -> Trace:
    case = fixed_length(moe_case(family))
    return train_with_biases(rank, world_size, case, num_micro_batches, NUM_STEPS, overrides)


@functools.cache
def moved_plainly(family: str, num_data_ranks: int, num_micro_batches: int) -> Trace:
    case = fixed_length(moe_case(family))
    return train_with_biases_plainly(case, num_data_ranks, num_micro_batches, NUM_STEPS, RATE)


@pytest.mark.quick(6)
@pytest.mark.parametrize("options", cover(BIAS_FACTORS, fits))
def test_biases_of_routers_equal_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    """torchtitan#4154, torchtitan#4148: summed once over every axis, and moved by no evaluation."""
    mesh = {axis: options[axis] for axis in ("ep", "tp", "cp", "pp")}
    overrides = {
        "mesh": mesh,
        "zero": {"stage": options["stage"]},
        "tensor": {"sequence_parallel": options["sequence_parallel"]},
        "pipeline": {"schedule": "1f1b"},
        "experts": {"bias_rate": RATE},
    }
    num_data_ranks = 4 // math.prod(mesh[axis] for axis in ("tp", "cp", "pp"))
    traces = ranks(4).run(train_biases, "solar_open", options["accumulation"], overrides)
    check_parity(merge_ranks(traces), moved_plainly("solar_open", num_data_ranks, options["accumulation"]))


DEEP = {"num_hidden_layers": 4}


def train_deep(rank: int, world_size: int, overrides: Any) -> Trace:
    return train_on_mesh(rank, fixed_length(mixture(**DEEP)), overrides, None, 4, NUM_STEPS)


@pytest.mark.quick(2)
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


@pytest.mark.quick(3)
@pytest.mark.parametrize(("family", "mesh", "stage", "num_data_ranks"), FROZEN)
def test_biases_that_are_frozen_parameters_equal_one_process(
    ranks: WorkerPool, family: str, mesh: dict[str, int], stage: int, num_data_ranks: int
) -> None:
    overrides = {"mesh": mesh, "zero": {"stage": stage}, "experts": {"bias_rate": RATE}}
    traces = ranks(2).run(train_biases, family, 1, overrides)
    check_parity(merge_ranks(traces), moved_plainly(family, num_data_ranks, 1))
