"""Hooks of users on parameters come before the engine takes a gradient, whenever they were registered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.gradients import handing
from harness.refusals import refused
from shardwise.runtime.module_hooks import hook_gradient


class Halves:
    """Shows the two elements of a parameter as four, as if another rank had the others."""

    name = "weight"

    def gather(self, gradient: Tensor) -> Tensor:
        return gradient.repeat(2)

    def split(self, gradient: Tensor) -> Tensor:
        return gradient[:2]

    def gather_values(self, parameter: Tensor) -> Tensor:
        return parameter.detach().repeat(2)


def backward(parameter: nn.Parameter) -> None:
    (parameter * torch.tensor([1.0, 2.0])).sum().backward()


def test_hooks_registered_before_and_after_come_first_and_can_be_removed() -> None:
    parameter, got = nn.Parameter(torch.ones(2)), list[list[float]]()
    early = [parameter.register_hook(lambda g: g * 2), parameter.register_post_accumulate_grad_hook(add_one)]
    handle = hook_gradient(parameter, handing(lambda gradient: got.append(gradient.tolist())))
    late = [parameter.register_hook(lambda g: g * 10), parameter.register_post_accumulate_grad_hook(add_one)]
    backward(parameter)
    for each in (early[0], late[1]):
        each.remove()
    backward(parameter)
    handle.remove()
    backward(parameter)
    assert got == [[22.0, 42.0], [11.0, 21.0]]
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [11.0, 21.0]
    early[1].remove()
    late[0].remove()
    parameter.grad = None
    backward(parameter)
    assert parameter.grad.tolist() == [1.0, 2.0]


def add_one(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad + 1


def test_hooks_see_the_whole_of_a_part() -> None:
    parameter, got, seen = nn.Parameter(torch.ones(2)), list[list[float]](), list[tuple[int, ...]]()
    handle = hook_gradient(parameter, handing(lambda gradient: got.append(gradient.tolist())), Halves())
    backward(parameter)
    parameter.register_hook(lambda g: g * torch.tensor([3.0, 1.0, 0.0, 0.0]))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append((len(p), len(p.grad))))
    backward(parameter)
    handle.remove()
    assert got == [[1.0, 2.0], [3.0, 2.0]]
    assert seen == [(4, 4)]
    assert len(parameter) == 2


def test_a_hook_in_place_counts() -> None:
    parameter, got = nn.Parameter(torch.ones(2)), list[list[float]]()
    handle = hook_gradient(parameter, handing(lambda gradient: got.append(gradient.tolist())), Halves())
    parameter.register_hook(zero_first)
    backward(parameter)
    handle.remove()
    assert got == [[0.0, 2.0]]


def zero_first(gradient: Tensor) -> None:
    gradient[:1] = 0


def test_a_hook_that_writes_a_part_or_changes_a_shape_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    handle = hook_gradient(parameter, handing(lambda gradient: None), Halves())
    written = parameter.register_post_accumulate_grad_hook(lambda p: zero_first(p.data))
    with refused("hook-writes-parameter"):
        backward(parameter)
    written.remove()
    parameter.register_hook(lambda g: g[:1])
    with pytest.raises(TypeError, match="shape"):
        backward(parameter)
    handle.remove()
    assert parameter.tolist() == [1.0, 1.0]
