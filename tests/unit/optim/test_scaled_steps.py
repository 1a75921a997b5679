"""A fused step multiplies gradients by a factor itself, on the device as on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.optim.rules import fused_grad_scale, scale_in_step


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_the_step_is_that_of_scaled_gradients(kind: type[torch.optim.Optimizer]) -> None:
    weights = [nn.Parameter(torch.arange(1.0, 6.0)) for _ in range(2)]
    scaled, plain = (kind([weight], lr=0.1, fused=True) for weight in weights)  # type: ignore[call-arg]
    for factor in (0.25, 3e-5):
        weights[0].grad = torch.arange(5.0) / factor
        weights[1].grad = weights[0].grad * factor
        assert scale_in_step(scaled, factor)
        scaled.step()
        del scaled.grad_scale  # type: ignore[attr-defined]
        plain.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("factor", [0.0, float("inf"), float("nan"), 1e-35])
def test_factors_without_an_fp32_inverse_are_left_to_the_caller(factor: float) -> None:
    assert fused_grad_scale(torch.optim.AdamW, factor, {torch.float32}) is None


def test_other_optimizers_and_dtypes_are_left_to_the_caller() -> None:
    assert not scale_in_step(torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=False), 0.5)
    assert not scale_in_step(torch.optim.AdamW([nn.Parameter(torch.ones(2, dtype=torch.float64))], fused=True), 0.5)
    assert not scale_in_step(torch.optim.Adagrad([nn.Parameter(torch.ones(2))], fused=True), 0.5)
