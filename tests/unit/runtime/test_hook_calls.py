"""What hooks of users saw can be shown to them again, and a recomputation calls those that look once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from shardwise.runtime.user_hooks import (
    HookedCall,
    HooksOnce,
    has_any_user_hooks,
    has_user_hooks,
    record_calls,
    show_call,
    without_user_hooks,
)


def test_recorded_calls_are_shown_as_hooks_saw_them() -> None:
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), list[Any]()
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, kwargs, output: seen.append((args, output)), with_kwargs=True)
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    calls: list[HookedCall] = []
    with record_calls({"0": model[0]}, calls):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    (call,) = calls
    assert (call.name, call.is_changed, call.args[0].tolist()) == ("0", True, [[1.0, 1.0]])
    seen.clear()
    show_call(model[0], call)
    ((args, output),) = seen
    assert args[0].tolist() == [[2.0, 2.0]]
    assert output is call.output


def test_hooks_of_users_are_known_and_taken_from_copies() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    prune.identity(model[0], "weight")
    assert not has_any_user_hooks(model[0])
    model[0].register_full_backward_hook(lambda module, given, taken: None)
    assert (has_user_hooks(model[0]), has_any_user_hooks(model[0])) == (False, True)
    model[0].register_forward_hook(lambda module, args, output: None)
    assert has_user_hooks(model[0])
    assert not has_any_user_hooks(without_user_hooks(model)[0])
    model(torch.ones(1, 2))


def test_a_recomputation_calls_hooks_that_change_something_only() -> None:
    block, calls = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), list[str]()
    once = HooksOnce([block])

    def look(module: nn.Module, args: Any, output: Any) -> None:
        calls.append("look")

    def change(module: nn.Module, args: Any, output: Any) -> Any:
        calls.append("change")
        return output * 2

    def write(module: nn.Module, args: Any, output: Any) -> None:
        calls.append("write")
        module.last = output

    for hook in (look, change, write):
        block[0].register_forward_hook(hook)
    once.follow()
    checkpoint(block, torch.ones(1, 2, requires_grad=True), use_reentrant=False).sum().backward()
    assert calls == ["look", "change", "write", "change", "write"]
    once.close()
    assert list(block[0]._forward_hooks.values()) == [look, change, write]
