"""Optimizers of the library step lists of tensors at once, to the bit as they would each tensor alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwise.optim.elementwise import AdEMAMix, ElementWise, Lion, in_lists
from shardwise.optim.muon import advance_momenta, apply_updates

SHAPES = ((7,), (5, 3), (1,), (600, 700), (40, 30))  # one of them is cut into blocks
LR, DECAY = 1e-2, 0.1


def lion_alone(param: Tensor, grad: Tensor, mean: Tensor) -> None:
    direction = mean.lerp(grad, 1 - 0.9).sign_()
    param.mul_(1 - LR * DECAY)
    param.add_(direction, alpha=-LR)
    mean.lerp_(grad, 1 - 0.95)


def ademamix_alone(param: Tensor, grad: Tensor, mean: Tensor, slow: Tensor, squares: Tensor) -> None:
    mean.lerp_(grad, 1 - 0.9)
    slow.lerp_(grad, 1 - 0.9999)
    squares.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
    update = (mean * (1 / (1 - 0.9))).add_(slow, alpha=5.0)
    update.div_(squares.sqrt().mul_((1 - 0.999) ** -0.5).add_(1e-8))
    param.mul_(1 - LR * DECAY)
    param.add_(update, alpha=-LR)


@pytest.mark.parametrize(("kind", "step_alone"), [(Lion, lion_alone), (AdEMAMix, ademamix_alone)])
def test_a_first_step_has_the_bits_of_tensors_alone(kind: type[ElementWise], step_alone: Callable[..., None]) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    expected = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = kind(params, lr=LR, weight_decay=DECAY)  # type: ignore[call-arg]
    optimizer.step()
    for param, alone in zip(params, expected, strict=True):
        assert param.grad is not None
        step_alone(alone, param.grad, *(torch.zeros_like(alone) for _ in kind.STATES))
        assert torch.equal(param, alone)


def test_momenta_and_updates_of_matrices_have_the_bits_of_matrices_alone() -> None:
    torch.manual_seed(0)
    gradients, momenta, params = ([torch.randn(shape) for shape in SHAPES] for _ in range(3))
    shares = [0.95, 0.9, 0.95, 0.5, 0.95]
    scales = [0.2, 0.4, 0.2, 0.8, 0.2]
    options = [{"lr": LR * (1 + index % 2), "weight_decay": DECAY} for index in range(len(SHAPES))]
    expected = []
    for gradient, momentum, param, share, scale, chosen in zip(
        gradients, momenta, params, shares, scales, options, strict=True
    ):
        momentum, param = momentum.lerp(gradient, 1 - share), param.clone()
        ahead = gradient.lerp(momentum, share)
        param.mul_(1 - chosen["lr"] * DECAY).add_(ahead, alpha=-chosen["lr"] * scale)
        expected.append((momentum, param))
    aheads = advance_momenta(momenta, gradients, shares)
    apply_updates(zip(params, aheads, scales, options, strict=True))
    for momentum, param, (momentum_alone, param_alone) in zip(momenta, params, expected, strict=True):
        assert torch.equal(momentum, momentum_alone)
        assert torch.equal(param, param_alone)


def test_a_list_has_a_limit_and_no_row_is_lost() -> None:
    rows = [(torch.empty(numel), index) for index, numel in enumerate((3, 2**18, 1, 2, 2**18 - 3, 1, 2**20, 4))]
    lists = [[index for _, index in row_list] for row_list in in_lists(rows)]
    assert lists == [[0], [1], [2, 3, 4], [5], [6], [7]]
    assert list(in_lists([])) == []
