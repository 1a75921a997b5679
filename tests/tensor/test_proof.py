"""Wrong plans are refuted by numbers before they are used, wherever they come from; right ones are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from harness.huggingface import FAMILIES, build_model
from harness.pool import WorkerPool
from harness.training import make_config
from harness.unknown_models import CASES
from shardwise import ConfigError, initialize, propose_plan
from shardwise.layout.tensor_plan import Region
from shardwise.tensor.proof import check_small_copy, refute

CROSSED: Final = next(case for case in CASES if case.name == "crossed")
# The norm works on whole tensors, outside of all regions: the sum of its gradients counts it once a rank.
WRONG_TABLE: Final[dict[str, Any]] = {
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "model.layers.*.input_layernorm": "partial",
}
RIGHT_TABLE: Final = {key: value for key, value in WRONG_TABLE.items() if value != "partial"}


def test_a_region_around_queries_that_enter_elsewhere_is_refuted() -> None:
    model, (tokens, _) = CROSSED.build(torch.float32), CROSSED.batch(0, 2, torch.float32)
    plan = propose_plan(model, tokens, tp=2)
    assert not any("cross" in region.module for region in plan.regions)
    assert refute(model, plan, tokens, 2) == ""
    wrong = replace(plan, regions=(*plan.regions, Region("blocks.0.cross", ("memory",))))
    assert "the gradient of" in refute(model, wrong, tokens, 2)


class Blurred(torch.autograd.Function):
    """Element by element in the forward, so a trace of that says nothing; its backward mixes all features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mean(-1, keepdim=True).expand_as(grad)


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Blurred.apply(self.up(x)))


def test_a_proposal_whose_backward_is_wrong_is_refused() -> None:
    with pytest.raises(ConfigError, match="is refuted: the gradient of up"):
        propose_plan(Hiding(), torch.randn(2, 8), tp=2)


def test_values_that_a_model_does_not_know_prove_nothing() -> None:
    model = CROSSED.build(torch.float32)
    tokens = torch.full((2, 8), 10**6)
    assert propose_plan(model, tokens, tp=2) == propose_plan(model, torch.zeros_like(tokens), tp=2)


@pytest.mark.parametrize("family", ["llama", "qwen2", "bert", "t5"])
def test_plans_of_families_are_right_on_tiny_copies(family: str) -> None:
    if family in FAMILIES:
        check_small_copy(build_model(family), None, 4)


def test_a_table_that_a_tiny_copy_refutes_is_refused_by_every_rank(ranks: WorkerPool) -> None:
    assert ranks(2).run(start, RIGHT_TABLE) == ["", ""]
    for message in ranks(2).run(start, WRONG_TABLE):
        assert "the gradient of model.layers.0.input_layernorm.weight is off by" in message
        assert "propose_plan(model, batch, tp=2)" in message


def start(rank: int, world_size: int, table: dict[str, Any]) -> str:
    model = build_model("llama")
    try:
        initialize(model, make_config(1, {"mesh": {"tp": world_size}}), plan=table).close()
    except ConfigError as error:
        return str(error)
    return ""
