"""A fused step multiplies gradients by a factor itself, on the device as on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.optim.rules import LateFactor, fused_grad_scale, scaled_in_step


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_the_step_is_that_of_scaled_gradients(kind: type[torch.optim.Optimizer]) -> None:
    weights = [nn.Parameter(torch.arange(1.0, 6.0)) for _ in range(2)]
    scaled, plain = (kind([weight], lr=0.1, fused=True) for weight in weights)  # type: ignore[call-arg]
    for factor in (0.25, 3e-5):
        weights[0].grad = torch.arange(5.0) / factor
        weights[1].grad = weights[0].grad * factor
        with scaled_in_step(scaled, factor, [weights[0].grad]) as is_scaled:
            scaled.step()
        assert is_scaled
        plain.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("factor", [0.0, float("inf"), float("nan"), 1e-35])
def test_factors_without_an_fp32_inverse_are_left_to_the_caller(factor: float) -> None:
    assert fused_grad_scale(torch.optim.AdamW, factor, {torch.float32}) is None


def test_other_optimizers_and_dtypes_are_left_to_the_caller() -> None:
    single, double = torch.ones(2), torch.ones(2, dtype=torch.float64)
    for optimizer, gradient in (
        (torch.optim.AdamW([nn.Parameter(single)], fused=False), single),
        (torch.optim.AdamW([nn.Parameter(double)], fused=True), double),
        (torch.optim.Adagrad([nn.Parameter(single)], fused=True), single),
    ):
        with scaled_in_step(optimizer, 0.5, [gradient]) as is_scaled:
            assert not is_scaled


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("is_refused", [False, True])
def test_a_factor_of_the_device_steps_as_one_of_the_host_or_changes_nothing(
    kind: type[torch.optim.Optimizer], is_refused: bool
) -> None:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    weights = [nn.Parameter(torch.arange(1.0, 6.0)) for _ in range(2)]
    late, early = (kind([weight], lr=0.1, fused=True, **options) for weight in weights)
    for factor in (0.25, 0.3):
        for weight, optimizer in zip(weights, (late, early), strict=True):
            weight.grad = torch.arange(5.0)
            late_factor = LateFactor(torch.tensor(1 / factor), torch.tensor(float(is_refused and factor == 0.3)))
            with scaled_in_step(optimizer, late_factor if optimizer is late else factor, [weight.grad]):
                if optimizer is late or not (is_refused and factor == 0.3):
                    optimizer.step()
    assert torch.equal(*weights)
    for name, state in late.state[weights[0]].items():
        assert torch.equal(state, early.state[weights[1]][name])
