"""Plans that mixtures of experts bring: experts are in none, and attention is split where its parts are known."""

from __future__ import annotations

import pytest
import torch

from harness.moe_models import build_moe
from shardwise.layout.tensor_plan import TensorPlan
from shardwise.tensor.hf_plans import find_plan

pytest.importorskip("transformers")


def plan_of(family: str) -> TensorPlan:
    with torch.device("meta"):
        model = build_moe(family)
    return find_plan(model, 2, None, sequence_parallel=False)


def styles_in(plan: TensorPlan, part: str) -> dict[str, str]:
    return {layer.module.rpartition(".")[2]: layer.style for layer in plan.layers if part in layer.module}


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe"])
def test_experts_are_in_no_plan(family: str) -> None:
    assert not any(".experts" in layer.module for layer in plan_of(family).layers)


def test_latent_attention_is_split_by_heads_and_its_latent_states_are_whole() -> None:
    plan = plan_of("deepseek_v2")
    attention = "model.layers.0.self_attn"
    assert styles_in(plan, attention) == {"q_b_proj": "column", "kv_b_proj": "column", "o_proj": "row"}
    assert {part.num_units for layer in plan.layers if attention in layer.module for part in layer.parts} == {4}
    assert {f"{attention}.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_layernorm")} < {
        *plan.partial
    }


def test_attention_with_sinks_stays_whole() -> None:
    plan = plan_of("granitemoe_swa")
    assert not styles_in(plan, "self_attn")
    assert any("model.layers.*.self_attn whole" in note for note in plan.notes)
