"""Lion steps as the paper's algorithm says, and behaves as torch's own optimizers do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harness.refusals import refused
from shardwise.config.resolve import OptimizerConfig
from shardwise.optim.elementwise import _BLOCK_NUMEL, Lion, StepTensors
from shardwise.optim.rules import build_optimizer

NUM_STEPS = 6


def reference(weights: list[float], gradients: list[list[float]], options: dict[str, Any]) -> list[float]:
    """Algorithm 2 of arXiv 2302.06675, element by element."""
    beta1, beta2 = options["betas"]
    weights, momenta = list(weights), [0.0] * len(weights)
    for step in gradients:
        for index, raw in enumerate(step):
            gradient = -raw if options["maximize"] else raw
            mixed = beta1 * momenta[index] + (1 - beta1) * gradient
            sign = (mixed > 0) - (mixed < 0)
            weights[index] -= options["lr"] * (sign + options["weight_decay"] * weights[index])
            momenta[index] = beta2 * momenta[index] + (1 - beta2) * gradient
    return weights


def taken(weight: nn.Parameter, gradients: Tensor, **options: Any) -> Lion:
    optimizer = Lion([weight], **options)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(weight.grad, gradient)
    return optimizer


@given(
    seed=st.integers(0, 2**31),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    lr=st.floats(0, 1),
    weight_decay=st.floats(0, 1),
    maximize=st.booleans(),
)
def test_steps_are_the_papers(seed: int, **options: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(5, generator=generator, dtype=torch.float64)
    gradients = torch.randn(NUM_STEPS, 5, generator=generator, dtype=torch.float64)  # [steps, elements]
    weight = nn.Parameter(weights.clone())
    optimizer = taken(weight, gradients, **options)
    expected = torch.tensor(reference(weights.tolist(), gradients.tolist(), options), dtype=torch.float64)
    torch.testing.assert_close(weight.data, expected, rtol=1e-12, atol=1e-12)
    assert list(optimizer.state[weight]) == ["exp_avg"]


def test_long_parameters_step_as_their_elements_do() -> None:
    torch.manual_seed(0)
    numel = 2 * _BLOCK_NUMEL + 77
    weights, gradients = torch.randn(numel), torch.randn(2, numel)  # [steps, elements]
    whole = nn.Parameter(weights.clone())
    taken(whole, gradients, lr=0.1, weight_decay=0.3)
    for part in (slice(0, 100), slice(_BLOCK_NUMEL - 3, _BLOCK_NUMEL + 3), slice(numel - 100, numel)):
        alone = nn.Parameter(weights[part].clone())
        taken(alone, gradients[:, part], lr=0.1, weight_decay=0.3)
        assert torch.equal(alone, whole[part])


def test_parameters_may_be_strided() -> None:
    torch.manual_seed(0)
    weights, gradients = torch.randn(1024, 1024), torch.randn(2, 1024, 1024)  # [rows, columns]
    plain, strided = nn.Parameter(weights.clone()), nn.Parameter(weights.t().clone().t())
    for weight in (plain, strided):
        taken(weight, gradients, lr=0.1, weight_decay=0.1)
    assert torch.equal(plain, strided)


def test_parameters_without_a_gradient_are_left_alone() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Lion([used, unused], lr=0.5, weight_decay=0.5)
    used.grad = torch.ones(3)
    optimizer.step()
    assert used.tolist() == [0.25] * 3
    assert unused.tolist() == [1.0] * 3
    assert unused not in optimizer.state


def test_groups_have_options_of_their_own() -> None:
    slow, fast = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = Lion([{"params": [slow]}, {"params": [fast], "lr": torch.tensor(0.5)}], lr=0.25)
    slow.grad, fast.grad = torch.ones(1), torch.ones(1)
    optimizer.step()
    assert (slow.item(), fast.item()) == (-0.25, -0.5)


def test_a_loaded_state_goes_on_as_the_saved_would() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(NUM_STEPS, 9)  # [steps, elements]
    weight = nn.Parameter(torch.randn(9))
    first = taken(weight, gradients, lr=0.1)
    other = nn.Parameter(weight.detach().clone())
    second = Lion([other], lr=0.7)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for each, optimizer in ((weight, first), (other, second)):
        each.grad = -gradients.sum(0) / 4
        optimizer.step()
    assert torch.equal(weight, other)
    assert torch.equal(first.state[weight]["exp_avg"], second.state[other]["exp_avg"])


def test_a_closure_computes_the_loss_with_gradients() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = Lion([weight], lr=0.5)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (3 * weight).sum()
        value.backward()
        return value

    assert optimizer.step(loss) == 3.0
    assert weight.item() == 0.5


def test_the_kernel_takes_several_parameters_of_a_low_precision() -> None:
    params = [torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)]
    grads = [torch.full_like(param, -2.0) for param in params]
    momenta = [torch.zeros_like(param) for param in params]
    options = {"lr": 0.5, "betas": (0.9, 0.5), "weight_decay": 0.0, "maximize": False}
    Lion.kernel(options, StepTensors(params, grads, [{"exp_avg": each} for each in momenta], 0, True))
    assert [param.tolist() for param in params] == [[1.5] * 3, [1.5] * 2]
    assert [momentum.tolist() for momentum in momenta] == [[-1.0] * 3, [-1.0] * 2]


def test_the_config_names_it() -> None:
    config = OptimizerConfig(name="Lion", lr=0.1, betas=(0.5, 0.6), weight_decay=0.2)
    optimizer = build_optimizer(config, [{"params": [nn.Parameter(torch.ones(1))]}])
    assert type(optimizer) is Lion
    assert optimizer.defaults == {"lr": 0.1, "betas": (0.5, 0.6), "weight_decay": 0.2, "maximize": False}


def test_the_defaults_are_the_configs() -> None:
    assert Lion([torch.ones(1)]).defaults["betas"] == OptimizerConfig().betas


@pytest.mark.parametrize(
    ("options", "code", "value"),
    [
        ({"lr": -1.0}, "optimizer-option-negative", "lr=-1.0"),
        ({"lr": torch.ones(2)}, "lr-one-element", "2 elements"),
        ({"weight_decay": -0.5}, "optimizer-option-negative", "weight_decay=-0.5"),
        ({"betas": (0.9, 1.0)}, "betas-range", "(0.9, 1.0)"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], code: str, value: str) -> None:
    with refused(code, value):
        Lion([torch.ones(1)], **options)


def test_sparse_gradients_are_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.eye(3)[0].to_sparse()
    with refused("sparse-gradient", "Lion"):
        Lion([weight]).step()
