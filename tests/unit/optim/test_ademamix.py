"""AdEMAMix steps as the paper's algorithm 1 says, with the warm-up of its equations 3 and 4, and in every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harness.refusals import refused
from shardwise.config.resolve import OptimizerConfig
from shardwise.optim.elementwise import AdEMAMix
from shardwise.optim.rules import build_optimizer

NUM_STEPS = 6


def reference(weight: float, gradients: list[float], options: dict[str, Any]) -> float:
    """One element by the paper: alpha rises linearly, and so does the half-life of the slow mean."""
    beta1, beta2 = options["betas"]
    fast = slow = squares = 0.0
    for step, gradient in enumerate(gradients, 1):
        alpha, beta3 = options["alpha"], options["beta_slow"]
        if (warmup := options["warmup_steps"]) is not None and step < warmup:
            share = step / warmup
            half_lives = [math.log(0.5) / math.log(beta) for beta in (beta1, beta3)]
            half_life = (1 - share) * half_lives[0] + share * half_lives[1]
            alpha, beta3 = share * alpha, min(0.5 ** (1 / half_life), beta3)
        fast = beta1 * fast + (1 - beta1) * gradient
        slow = beta3 * slow + (1 - beta3) * gradient
        squares = beta2 * squares + (1 - beta2) * gradient**2
        root = math.sqrt(squares / (1 - beta2**step)) + options["eps"]
        update = (fast / (1 - beta1**step) + alpha * slow) / root + options["weight_decay"] * weight
        weight -= options["lr"] * update
    return weight


@given(
    seed=st.integers(0, 2**31),
    betas=st.tuples(st.floats(0.1, 0.99), st.floats(0.1, 0.999)),
    beta_slow=st.floats(0.99, 0.9999),
    alpha=st.floats(0, 8),
    lr=st.floats(0, 0.1),
    weight_decay=st.floats(0, 1),
    warmup_steps=st.none() | st.integers(1, 10),
)
def test_steps_are_the_papers(seed: int, **options: Any) -> None:
    options["eps"] = 1e-8
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(5, generator=generator, dtype=torch.float64)
    gradients = torch.randn(NUM_STEPS, 5, generator=generator, dtype=torch.float64)  # [steps, elements]
    weight = nn.Parameter(weights.clone())
    optimizer = AdEMAMix([weight], **options)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(weight.grad, gradient)
    expected = [reference(*each, options) for each in zip(weights.tolist(), gradients.T.tolist(), strict=True)]
    torch.testing.assert_close(weight.data, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert set(optimizer.state[weight]) == {*AdEMAMix.STATES, "step"}


def test_parameters_that_came_later_count_their_own_steps() -> None:
    early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AdEMAMix([early, late], lr=0.1)
    early.grad = torch.ones(2)
    optimizer.step()
    early.grad, late.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    assert [optimizer.state[each]["step"].item() for each in (early, late)] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"betas": (0.9, 1.0)}, "betas-range"),
        ({"beta_slow": 1.5}, "betas-range"),
        ({"alpha": -1.0}, "optimizer-option-negative"),
        ({"lr": torch.ones(2)}, "lr-one-element"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], code: str) -> None:
    with refused(code):
        AdEMAMix([nn.Parameter(torch.ones(1))], **options)


def test_the_config_names_it() -> None:
    config = OptimizerConfig(name="ademamix", lr=0.5, betas=(0.1, 0.2))
    optimizer = build_optimizer(config, [{"params": [nn.Parameter(torch.ones(1))]}])
    assert isinstance(optimizer, AdEMAMix)
    assert (optimizer.defaults["lr"], optimizer.defaults["betas"]) == (0.5, (0.1, 0.2))
