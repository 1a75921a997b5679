"""Stacks of experts that bitsandbytes has packed in 4 bits are divided as bytes, and compute what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.pool import WorkerPool
from harness.refusals import refused
from shardwise import initialize

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

GLOBAL_SIZE, NUM_STEPS, NUM_EXPERTS = 4, 3, 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 3": (2, {"zero": {"stage": 3}}),
    "ep 2": (2, {"mesh": {"ep": 2}}),
    "ep 2, stage 3, recomputed": (4, {"mesh": {"ep": 2}, "zero": {"stage": 3}, "recompute": {"mode": "full"}}),
    "ep 4": (4, {"mesh": {"ep": 4}, "zero": {"stage": 0}}),
}


def make_model(is_nested: bool = False) -> nn.Module:
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2,
    }  # fmt: skip
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, experts_implementation="eager"))
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            nn.init.normal_(getattr(layer.mlp.experts, name), std=0.3)
            replace_parameter_4bit(layer.mlp.experts, name, compress_statistics=is_nested)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)


def packed_bytes(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters() if name.endswith(".original")}


def train(rank: int, world_size: int, sections: dict[str, Any]) -> dict[str, Any]:
    model = make_model()
    config = {"batch": {"micro_size": 1, "accumulation": GLOBAL_SIZE // world_size}, "run": {"device": "cpu"}}
    losses, before = [], packed_bytes(model)
    with initialize(model, config | {"optimizer": {"lr": 0.05}} | sections) as engine:
        for step in range(NUM_STEPS):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(1, 64, (GLOBAL_SIZE, 12), generator=generator).split(1)
            batches = [{"input_ids": each, "labels": each} for each in tokens]
            losses.append(engine.train_step(batches[rank::world_size]).loss)
        groups = [group for group in engine.layout.groups if group.is_opaque]
        at_rest = sum(engine.layout.group_bytes_at_rest(group, rank)["param"] for group in groups)
        read = {name: engine.read(name) for name in before}
    return {
        "losses": losses,
        "at_rest": at_rest,
        "kept": all(read[name].view(-1).equal(value.view(-1)) for name, value in before.items()),
        "again": all(value.equal(before[name]) for name, value in packed_bytes(model).items()),
    }


@pytest.mark.quick(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_experts_compute_over_several_ranks_as_on_one(ranks: WorkerPool, layout: str) -> None:
    num_ranks, sections = LAYOUTS[layout]
    (expected,) = ranks(1).run(train, {})
    num_parts = num_ranks if "stage 3" in layout else sections["mesh"]["ep"]
    assert expected["at_rest"] == 2 * NUM_EXPERTS * 3 * 64 * 64 // 2
    for found in ranks(num_ranks).run(train, sections):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["at_rest"] == expected["at_rest"] // num_parts
        assert found["kept"]
        assert found["again"]


def ask_for_nested(rank: int, world_size: int) -> None:
    with refused("opaque-over-ep", "mesh.ep=2", "blocks of 256", "mesh.ep=1"):
        initialize(
            make_model(is_nested=True), {"mesh": {"ep": 2}, "batch": {"micro_size": 1}, "run": {"device": "cpu"}}
        )


def test_scales_that_experts_share_are_not_divided(ranks: WorkerPool) -> None:
    ranks(2).run(ask_for_nested)
