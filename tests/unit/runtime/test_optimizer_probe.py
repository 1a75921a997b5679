"""The trial tells what a step of an element depends on, and leaves all as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.config.resolve import OptimizerConfig
from shardwise.optim.rules import build_optimizer, rules_by_name
from shardwise.runtime.optimizer_probe import StepScope, step_scope


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in ((), (9, 8), (9,), (4, 3, 3, 3))]


class Clipped(torch.optim.SGD):
    """Clips the gradients of `of`: each tensor's, or all."""

    def __init__(self, params: Any, of: str) -> None:
        super().__init__(params, lr=0.0)
        self.of = of
        self.moves = torch.rand(1)

    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        for several in [params] if self.of == "all" else [[param] for param in params]:
            torch.nn.utils.clip_grad_norm_(several, 1.0)
        torch.rand(1)
        random.random()
        super().step()


@pytest.mark.parametrize("name", sorted({*rules_by_name()} - {"muon"}))
def test_optimizers_with_names_are_element_wise(name: str) -> None:
    optimizer = build_optimizer(OptimizerConfig(name=name), [{"params": weights()}])
    assert step_scope(optimizer, torch.float32) is StepScope.ELEMENT


@pytest.mark.parametrize(
    "options", [{"lr": 0.1}, {"lr": torch.tensor(0.1), "fused": True}, {"lr": 0.1, "amsgrad": True}]
)
def test_a_rate_or_a_parameter_may_be_one_number(options: dict[str, Any]) -> None:
    assert step_scope(torch.optim.Adam(weights(), **options), torch.float32) is StepScope.ELEMENT


@pytest.mark.parametrize(("of", "scope"), [("each", StepScope.TENSOR), ("all", StepScope.JOINT)])
def test_norms_are_found_at_a_rate_of_zero_and_nothing_changes(of: str, scope: StepScope) -> None:
    params = weights()
    optimizer = Clipped(params, of)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = torch.get_rng_state(), random.getstate(), dict(optimizer.param_groups[0])
    assert step_scope(optimizer, torch.float32) is scope
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), dict(optimizer.param_groups[0]))
    assert not optimizer.state
    assert all(param.eq(1).all() and param.grad is None for param in params)
    assert schedule.last_epoch == 0
