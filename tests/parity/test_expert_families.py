"""Mixtures of experts of Hugging Face's families, unmodified, over ep and tp equal one plain process, in float64."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from harness.models import ModelCase
from harness.moe_models import MOE_FAMILIES, OTHER_FAMILIES, build_moe, moe_case
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.refusals import refusal_of, refused
from harness.tensor import CLIP_NORM, train_on_mesh, train_plainly
from harness.training import Overrides, merge_ranks
from shardwise import Config, plan_layout, propose_plan

pytest.importorskip("transformers")

NUM_STEPS = 2
MESHES: dict[str, tuple[dict[str, int], int]] = {
    "ep": ({"ep": 2}, 3),
    "tp x ep": ({"tp": 2, "ep": 2}, 2),
    "tp": ({"tp": 2}, 2),
}
SPLIT_SEQUENCE = {"mesh": {"tp": 2, "ep": 2}, "zero": {"stage": 3}, "tensor": {"sequence_parallel": True}}
WITHOUT_PLAN = {"inkling_text": "tp-plan-unnamed", "qwen4_exp_text": "tp-nested-regions", "zaya": "tp-no-plan"}
# Whose plans split attention, so that the sequence may be split beside it.
WITH_STACKS = (
    "aria_text",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v32",
    "dots1",
    "dots3_note_text",
    "ernie4_5_moe",  # it calls shared experts with samples and sequence in one dim, as two others do
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hy_v3",
    "kolibri1",
    "laguna",
    "mellum",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "solar_open",
)


def train(rank: int, world_size: int, family: str, overrides: Overrides, proposed: bool = False) -> Trace:
    case = moe_case(family)
    case = replace(case, make=partial(with_proposed_plan, case)) if proposed else case
    return train_on_mesh(rank, case, overrides, None, 1, NUM_STEPS)


def with_proposed_plan(case: ModelCase) -> nn.Module:
    model: Any = case.make()
    model.tensor_plan = propose_plan(model, case.batch(0, 2, torch.float32), tp=2)
    return model


@functools.cache
def reference(family: str, num_data_ranks: int) -> Trace:
    return train_plainly(moe_case(family), num_data_ranks, 1, NUM_STEPS, CLIP_NORM)


@pytest.mark.quick(4)
@pytest.mark.parametrize("axes", sorted(MESHES))
@pytest.mark.parametrize("family", sorted(MOE_FAMILIES))
def test_families_equal_one_process(ranks: WorkerPool, family: str, axes: str) -> None:
    mesh, stage = MESHES[axes]
    overrides: Overrides = {"mesh": mesh, "zero": {"stage": stage}}
    proposed = "tp" in mesh and family in WITHOUT_PLAN
    if proposed:
        with refused(WITHOUT_PLAN[family], "propose_plan"):
            plan_layout(build_moe(family), Config.from_dict(overrides).resolve(world_size=2))
    traces = ranks(2).run(train, family, overrides, proposed)
    check_parity(merge_ranks(traces), reference(family, 2 // mesh.get("tp", 1)))


@pytest.mark.parametrize("family", WITH_STACKS)
def test_families_with_a_split_sequence_equal_one_process(ranks: WorkerPool, family: str) -> None:
    check_parity(merge_ranks(ranks(2).run(train, family, SPLIT_SEQUENCE)), reference(family, 1))


def train_gemma4(rank: int, world_size: int, size_per_layer: int) -> Trace | tuple[str, str]:
    case = moe_case("gemma4_text", hidden_size_per_layer_input=size_per_layer)
    traces: list[Trace] = []
    refusal = refusal_of(lambda: traces.append(train_on_mesh(rank, case, SPLIT_SEQUENCE, None, 1, NUM_STEPS)))
    return traces[0] if traces else refusal


def test_gemma4_may_split_sequences_unless_its_blocks_are_given_numbers_of_each_token(ranks: WorkerPool) -> None:
    """Its blocks then multiply by what the model has made of all tokens before the first block."""
    case = moe_case("gemma4_text", hidden_size_per_layer_input=0)
    traces = ranks(2).run(train_gemma4, 0)
    check_parity(merge_ranks(traces), train_plainly(case, 1, 1, NUM_STEPS, CLIP_NORM))
    for code, message in ranks(2).run(train_gemma4, 4):
        assert code == "tp-tokens-apart"
        assert "Gemma4ForCausalLM" in message


@pytest.mark.parametrize("family", sorted(OTHER_FAMILIES))
def test_other_families_are_refused_and_train_as_the_refusal_says(ranks: WorkerPool, family: str) -> None:
    with refused("ep-without-experts", "mesh.ep=2", type(build_moe(family)).__name__, "mesh.ep=1", "zero.stage=3"):
        plan_layout(build_moe(family), Config.from_dict({"mesh": {"ep": 2}}).resolve(world_size=2))
    traces = ranks(2).run(train, family, {"mesh": {"ep": 1}, "zero": {"stage": 3}})
    check_parity(merge_ranks(traces), reference(family, 2))
