"""Mixtures of experts under expert parallelism, with every other axis, equal one plain process, in float64.

The model is Hugging Face's Mixtral, unmodified.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.combinations import cover
from harness.expert_layouts import EXPERT_FACTORS, fits_ranks, num_data_ranks, sections_of
from harness.models import ModelCase
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.tensor import CLIP_NORM, mixture, train_on_mesh, train_plainly
from harness.training import merge_ranks

pytest.importorskip("transformers")

NUM_STEPS = 2


def fits(options: dict[str, Any]) -> bool:
    return fits_ranks(options) and options["ep"] * options["tp"] > 1


def train(rank: int, world_size: int, options: dict[str, Any], num_micro_batches: int, overrides: Any) -> Trace:
    return train_on_mesh(rank, mixture(**options), overrides, None, num_micro_batches, NUM_STEPS)


@functools.cache
def reference(options: tuple[tuple[str, Any], ...], num_data_ranks: int, num_micro_batches: int) -> Trace:
    return train_plainly(mixture(**dict(options)), num_data_ranks, num_micro_batches, NUM_STEPS, CLIP_NORM)


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", cover(EXPERT_FACTORS, fits, has_pairs=False))
def test_divided_experts_equal_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    overrides = sections_of(options)
    traces = ranks(4).run(train, {}, options["accumulation"], overrides)
    check_parity(merge_ranks(traces), reference((), num_data_ranks(options), options["accumulation"]))


ROUTINGS: dict[str, tuple[int, tuple[int, ...]]] = {  # experts of a token, and those that no token goes to
    "all experts": (4, ()),
    "an expert without": (2, (2,)),
    "one expert": (1, (0, 1, 3)),
    "ranks without": (2, (0, 1)),
}
ROUTED_FACTORS = {
    "routing": sorted(ROUTINGS),
    "ep": [1, 2, 4],
    "stage": [0, 2, 3],
    "num_ranks": [2, 4],
    "tp": [1, 2],
    "cp": [1, 2],
    "pp": [1, 2],
}


def routed(routing: str) -> ModelCase:
    """The mixture with routers that never choose some experts, whatever their weights."""
    case = mixture()
    num_chosen, without = ROUTINGS[routing]

    def make() -> nn.Module:
        model = case.make()
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.__class__ = biased_router()
                module.top_k, module.without = num_chosen, list(without)  # type: ignore[assignment]
        return model

    return replace(case, make=make)


@functools.cache
def biased_router() -> type[nn.Module]:
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    class BiasedRouter(MixtralTopKRouter):
        def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits, *_ = super().forward(hidden_states)
            allowed = logits.index_fill(1, torch.tensor(self.without, dtype=torch.long), -math.inf)
            weights, index = allowed.softmax(-1).topk(self.top_k, -1)
            return logits, weights / weights.sum(-1, keepdim=True), index

    return BiasedRouter


def train_routed(rank: int, world_size: int, routing: str, overrides: Any) -> Trace:
    return train_on_mesh(rank, routed(routing), overrides, None, 1, 2)


@functools.cache
def routed_reference(routing: str, num_data_ranks: int) -> Trace:
    return train_plainly(routed(routing), num_data_ranks, 1, 2, CLIP_NORM)


def has_ranks(options: dict[str, Any]) -> bool:
    num_ranks = options["num_ranks"] // options["pp"]
    is_legal = options["tp"] * options["cp"] <= num_ranks and num_ranks % options["ep"] == 0
    return is_legal and options["ep"] * options["tp"] > 1 and (options["ep"] > 1 or options["routing"][0] != "r")


@pytest.mark.quick(4)
@pytest.mark.parametrize("options", cover(ROUTED_FACTORS, has_ranks, has_pairs=False))
def test_any_routing_equals_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    """All tokens go to one expert or to all; an expert, or all experts of a rank, get none."""
    mesh = {axis: options[axis] for axis in ("ep", "tp", "cp", "pp")}
    traces = ranks(options["num_ranks"]).run(
        train_routed, options["routing"], {"mesh": mesh, "zero": {"stage": options["stage"]}}
    )
    num_data_ranks = options["num_ranks"] // math.prod(mesh[axis] for axis in ("tp", "cp", "pp"))
    check_parity(merge_ranks(traces), routed_reference(options["routing"], num_data_ranks))


@pytest.mark.parametrize("mesh", [{"ep": 2}, {"tp": 2}, {"pp": 2, "ep": 2}], ids=str)
def test_the_models_own_auxiliary_loss_equals_one_process(ranks: WorkerPool, mesh: dict[str, int]) -> None:
    num_ranks = 4 if "pp" in mesh else 2
    num_data_ranks = num_ranks // mesh.get("pp", 1) // mesh.get("tp", 1)
    options = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    traces = ranks(num_ranks).run(train, options, 2, {"mesh": mesh, "zero": {"stage": 2}})
    check_parity(merge_ranks(traces), reference((*options.items(),), num_data_ranks, 2))


def test_replicas_of_divided_experts_equal_one_process(ranks: WorkerPool) -> None:
    traces = ranks(4).run(train, {}, 1, {"mesh": {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, "zero": {"stage": 3}})
    check_parity(merge_ranks(traces), reference((), 4, 1))


def adapted() -> ModelCase:
    """The mixture with PEFT's adapters on its stacks of experts, which are as large as random weights."""
    from peft import LoraConfig, get_peft_model

    case = mixture()
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapters = LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=targets, task_type="CAUSAL_LM"
    )

    def make() -> nn.Module:
        model = get_peft_model(case.make(), adapters)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return model

    return replace(case, make=make)


def train_adapted(rank: int, world_size: int, num_micro_batches: int, overrides: Any) -> Trace:
    return train_on_mesh(rank, adapted(), overrides, None, num_micro_batches, NUM_STEPS)


@pytest.mark.parametrize("mesh", [{"ep": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_adapters_of_divided_experts_equal_one_process(ranks: WorkerPool, mesh: dict[str, int]) -> None:
    pytest.importorskip("peft")
    traces = ranks(2).run(train_adapted, 1, {"mesh": mesh, "zero": {"stage": 3}})
    expected = train_plainly(adapted(), 2 // mesh.get("tp", 1), 1, NUM_STEPS, CLIP_NORM)
    check_parity(merge_ranks(traces), expected)
