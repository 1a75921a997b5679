"""When hooks fire, what recomputation saves and whose outputs are watched."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.gradients import handing
from shardwise.runtime.gradient_hooks import hook_gradient
from shardwise.runtime.module_hooks import hook_unit, watch_calls
from shardwise.runtime.recompute import recompute_forward
from shardwise.runtime.torch_private import OpMode


class Log(list[str]):
    """The events of any number of units, in order, and the outputs that the last forward reported."""

    outputs: list[Tensor]

    def unit(self, module: nn.Module, name: str = "") -> None:
        hook_unit(module, LoggedEvents(self), name)

    def take(self) -> list[str]:
        taken = list(self)
        self.clear()
        return taken


@dataclass
class LoggedEvents:
    log: Log

    def pre_forward(self, unit: str, is_recomputed: bool) -> None:
        self.log.append(f"{unit}pre_forward")

    def post_forward(self, unit: str, outputs: Sequence[Tensor], backward_follows: bool | None) -> None:
        self.log.append(f"{unit}post_forward {backward_follows}")
        self.log.outputs = list(outputs)

    def expect_input_gradients(self, unit: str, are_tracked: bool) -> None:
        self.log.append(f"{unit}expect_input_gradients {are_tracked}")

    def pre_backward(self, unit: str) -> None:
        self.log.append(f"{unit}pre_backward")

    def on_input_gradients(self, unit: str) -> None:
        self.log.append(f"{unit}on_input_gradients")


class Traced(torch.autograd.Function):
    """Doubles, and logs when it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: Log) -> Tensor:
        ctx.log = log
        log.append("compute forward")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.log.append("compute backward")
        return grad * 2, None


class Call(nn.Module):
    """Any function as a module, with a parameter `weight` [3] that the function is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


def activation() -> Tensor:
    """A tensor that is no leaf, as between two layers."""
    return torch.ones(3, requires_grad=True) * 1


# Events of a unit


TRACKED = ["pre_forward", "expect_input_gradients True", "post_forward True"]
UNTRACKED = ["pre_forward", "expect_input_gradients False", "post_forward True"]


def test_events_enclose_the_computation() -> None:
    log = Log()
    module = Call(lambda weight, x: Traced.apply(x * weight, log))
    log.unit(module)
    y = module(activation())
    assert log.take() == ["pre_forward", "expect_input_gradients True", "compute forward", "post_forward True"]
    y.sum().backward()
    assert log.take() == ["pre_backward", "compute backward", "on_input_gradients"]


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_recomputation_adds_no_events_to_a_chain(mode: str) -> None:
    log = Log()
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    for name, module in model.named_children():
        log.unit(module, f"{name} ")
        if mode != "none":
            recompute_forward(module, mode)
    for _ in range(2):
        y = model(torch.ones(2, 3))
        # The data have no gradient: only the second module has inputs to wait for.
        assert log.take() == [f"0 {event}" for event in UNTRACKED] + [f"1 {event}" for event in TRACKED]
        y.sum().backward()
        assert log.take() == ["1 pre_backward", "0 pre_backward", "1 on_input_gradients"]


def test_recomputation_around_a_unit_reports_its_forward_only() -> None:
    log = Log()
    module = Call(lambda weight, x: Traced.apply(x * weight, log))
    log.unit(module)
    y = checkpoint(lambda x: module(x).exp(), activation(), use_reentrant=False)
    log.clear()
    y.sum().backward()
    forward, backward = ["pre_forward", "compute forward"], ["pre_backward", "compute backward"]
    assert log.take() == [*forward, *backward, "on_input_gradients"]


def test_without_grad_no_backward_follows() -> None:
    log = Log()
    module = Call(lambda weight, x: x * weight)
    log.unit(module)
    with torch.no_grad():
        y = module(activation())
    assert log.take() == ["pre_forward", "post_forward False"]
    assert log.outputs == [y]


def test_each_output_of_a_pytree_reports_its_gradient() -> None:
    log = Log()
    module = Call(lambda weight, x: {"a": [x * weight, (x + 1, x.detach())], "b": 3, "c": None, "d": "text"})
    log.unit(module)
    output = module(x=activation())
    assert log.take() == TRACKED
    assert [id(tensor) for tensor in log.outputs] == [id(tensor) for tensor in (*output["a"][:1], *output["a"][1])]
    (output["a"][0] + output["a"][1][0]).sum().backward()
    assert log.take() == ["pre_backward", "pre_backward", "on_input_gradients"]


@pytest.mark.parametrize("hand_out", [lambda x: x.detach(), lambda x: None, lambda x: [3, True, 0.5, "text"]])
def test_outputs_without_a_gradient_have_no_backward(hand_out: Callable[[Tensor], Any]) -> None:
    log = Log()
    module = Call(lambda weight, x: hand_out(x * weight))
    log.unit(module)
    module(torch.ones(3))
    assert log[-1] == "post_forward False"


def test_a_backward_that_cannot_be_seen_is_said_to_be_unknown() -> None:
    @dataclass
    class Opaque:
        hidden: Tensor

    log = Log()
    module = Call(lambda weight, x: Opaque(x * weight))
    log.unit(module)
    module(torch.ones(3)).hidden.sum().backward()
    assert log.take() == ["pre_forward", "expect_input_gradients False", "post_forward None"]


def leave_in_attribute(module: nn.Module, x: Tensor) -> None:
    module.left = {"results": [x.exp()]}  # type: ignore[assignment]


def change_input(module: nn.Module, x: Tensor) -> None:
    x.exp_()


@pytest.mark.parametrize("leave", [leave_in_attribute, change_input])
def test_unused_results_report_their_gradient_before_they_need_it(leave: Callable[..., None]) -> None:
    """What a forward records after its outputs runs before them in the backward."""

    class Leaving(nn.Module):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            y = Traced.apply(x, log)
            leave(self, other)
            return y

    log = Log()
    module = Leaving()
    log.unit(module)
    x, other = activation(), activation()
    y = module(x, other)
    assert log.take() == ["pre_forward", "expect_input_gradients True", "compute forward", "post_forward True"]
    left = module.left["results"][0] if leave is leave_in_attribute else other
    (y.sum() + left.sum()).backward()
    assert log.take() == ["pre_backward", "pre_backward", "compute backward", "on_input_gradients"]


def test_unused_results_alone_have_a_backward() -> None:
    class Leaving(nn.Module):
        def forward(self, x: Tensor) -> None:
            leave_in_attribute(self, x)

    log = Log()
    module = Leaving()
    log.unit(module)
    module(activation())
    assert log.take() == TRACKED


def test_what_others_have_left_on_a_unit_is_not_made_by_it() -> None:
    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Traced.apply(x + self.given, log)

    log = Log()
    module = Reading()
    log.unit(module)
    module.given = activation()
    y = module(activation())
    log.clear()
    (y.sum() + module.given.sum()).backward()
    assert log.take() == ["pre_backward", "compute backward", "on_input_gradients"]


def test_a_copy_of_a_unit_reports_nothing() -> None:
    log = Log()
    module = nn.Linear(3, 3)
    log.unit(module)
    copy.deepcopy(module)(activation()).sum().backward()
    assert log.take() == []


@pytest.mark.parametrize("hand_out", [lambda weight, x: weight, lambda weight, x: x, lambda weight, x: [x, weight]])
def test_parameters_and_inputs_among_the_outputs_are_not_made_here(hand_out: Callable[..., Any]) -> None:
    """Hooks on a parameter would pile up; one on an input would come after the unit's backward."""
    log = Log()
    module = Call(lambda weight, x: (x * weight, hand_out(weight, x)))
    log.unit(module)
    passes = Call(hand_out)
    log.unit(passes)
    for _ in range(3):
        product, handed_out = module(activation())
        (product + sum(handed_out)).sum().backward()
        assert log.take() == [*TRACKED, "pre_backward", "on_input_gradients"]
        passes(activation())
        assert log.take() == [*TRACKED[:2], "post_forward False"]


def test_inputs_are_waited_for_until_the_last_has_its_gradient() -> None:
    log = Log()
    module = Call(lambda weight, x, early, late: Traced.apply(Traced.apply(x, log) + early, log) * weight + late)
    log.unit(module)
    y = module(activation(), activation(), late=activation())
    log.clear()
    y.sum().backward()
    assert log.take() == ["pre_backward", "compute backward", "compute backward", "on_input_gradients"]


def test_an_input_that_backward_does_not_reach_is_waited_for_in_vain() -> None:
    log = Log()
    module = Call(lambda weight, x, unused: x * weight)
    log.unit(module)
    module(activation(), activation()).sum().backward()
    assert log.take() == [*TRACKED, "pre_backward"]


LEAF = torch.ones(3, requires_grad=True)


@pytest.mark.parametrize("inputs", [[LEAF], [torch.ones(3)], [], [LEAF, torch.ones(3)]])
def test_leaves_and_plain_data_are_not_waited_for(inputs: list[Tensor]) -> None:
    log = Log()
    module = Call(lambda weight, *inputs: weight * 2 + sum(inputs))
    log.unit(module)
    module(*inputs).sum().backward()
    assert log.take() == [*UNTRACKED, "pre_backward"]
    module(activation(), *inputs).sum().backward()
    assert log.take() == [*TRACKED, "pre_backward", "on_input_gradients"]


def test_a_unit_called_twice_reports_both_calls() -> None:
    log = Log()
    module = Call(lambda weight, x: x * weight)
    log.unit(module)
    module(module(activation())).sum().backward()
    assert log.take() == [*TRACKED, *TRACKED, *["pre_backward"] * 2, *["on_input_gradients"] * 2]


def test_removed_hooks_are_silent() -> None:
    log = Log()
    module = Call(lambda weight, x: x * weight)
    for handle in hook_unit(module, LoggedEvents(log), ""):
        handle.remove()
    module(activation()).sum().backward()
    assert log == []


def test_units_that_share_an_input_end_their_backwards_one_by_one() -> None:
    """As decoder blocks share the encoder's output: else all of them stay unsharded to the end."""
    log = Log()
    first, second = (Call(lambda weight, x, shared: x * weight + shared) for _ in range(2))
    log.unit(first, "first ")
    log.unit(second, "second ")
    shared = activation()
    second(first(activation(), shared), shared).sum().backward()
    assert log.index("second on_input_gradients") < log.index("first on_input_gradients")


# Gradients


def test_each_accumulated_gradient_is_handed_over_and_taken_away() -> None:
    tied, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    got: list[list[float]] = []
    handles = [
        hook_gradient(parameter, handing(lambda gradient: got.append(gradient.tolist())))
        for parameter in (tied, unused)
    ]
    for factor in (1.0, 10.0):
        (tied * 2 * factor + tied * 3 * factor).sum().backward()
        assert tied.grad is None
    assert got == [[5.0, 5.0], [50.0, 50.0]]
    for handle in handles:
        handle.remove()
    tied.sum().backward()
    assert tied.grad is not None
    assert len(got) == 2


# Recomputation


class CountOps(OpMode):
    """How often each op has run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **kwargs or {})


def run_counted(module: nn.Module, *inputs: Tensor) -> tuple[Counter[str], Counter[str], list[Tensor]]:
    """The ops of the forward, those of the backward, and output and gradients."""
    torch.manual_seed(1)
    with CountOps() as forward:
        y = module(*inputs)
    with CountOps() as backward:
        y.sum().backward()
    gradients = [tensor.grad for tensor in (*inputs, *module.parameters()) if tensor.grad is not None]
    module.zero_grad()
    for tensor in inputs:
        tensor.grad = None
    return forward.counts, backward.counts, [y, *gradients]


@pytest.mark.parametrize(
    ("product", "op", "shape"),
    [
        (nn.Linear(4, 4), "aten::addmm", (2, 4)),
        (nn.Linear(4, 4, bias=False), "aten::mm", (2, 4)),
        (Call(lambda weight, x: x @ x.transpose(1, 2)), "aten::bmm", (2, 4, 4)),
        (Call(lambda weight, x: torch.baddbmm(x, x, x)), "aten::baddbmm", (2, 4, 4)),
        (nn.Conv1d(4, 4, 1), "aten::convolution", (2, 4, 4)),
        (
            Call(lambda weight, x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            (1, 1, 4, 8),
        ),
    ],
    ids=lambda value: value.removeprefix("aten::") if isinstance(value, str) else "",
)
def test_selective_recomputation_saves_products_and_recomputes_the_rest(
    product: nn.Module, op: str, shape: tuple[int, ...]
) -> None:
    def counts(mode: str) -> tuple[int, int]:
        module = nn.Sequential(product, nn.Dropout(0.5), nn.Tanh(), nn.Sigmoid())
        if mode != "none":
            recompute_forward(module, mode)
        forward, backward, values = run_counted(module, torch.ones(shape, requires_grad=True))
        results.append(values)
        assert forward[op] == forward["aten::tanh"] == 1
        return backward[op], backward["aten::tanh"]

    results: list[list[Tensor]] = []
    num_products, num_tanhs = counts("none")
    assert num_tanhs == 0
    assert counts("full") == (num_products + 1, 1)
    assert counts("selective") == (num_products, 1)
    for values in results[1:]:
        assert all(map(torch.equal, values, results[0]))


def test_a_copy_recomputes_with_its_own_parameters() -> None:
    module = nn.Linear(3, 3)
    recompute_forward(module, "full")
    copied = copy.deepcopy(module)
    nn.init.zeros_(module.weight)
    output = copied(activation())
    assert not torch.equal(output, module(activation()))
    output.sum().backward()
    assert module.weight.grad is None
    assert copied.weight.grad is not None


def test_forward_that_a_user_has_replaced_comes_back() -> None:
    module = nn.Linear(3, 3)
    module.forward = replaced = lambda x: x + 1
    put_back = recompute_forward(module, "full")
    assert torch.equal(module(torch.ones(3)), torch.full((3,), 2.0))
    put_back()
    assert module.forward is replaced


def test_a_module_gets_its_own_forward_back() -> None:
    module = Call(lambda weight, x: (x * weight).tanh().sin())
    put_back = recompute_forward(module, "full")
    forward, backward, _ = run_counted(module, torch.ones(3))
    assert (forward["aten::tanh"], backward["aten::tanh"]) == (1, 1)
    put_back()
    forward, backward, _ = run_counted(module, torch.ones(3))
    assert (forward["aten::tanh"], backward["aten::tanh"]) == (1, 0)


def test_without_grad_nothing_is_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("shardwise.runtime.recompute.checkpoint")
    module = Call(lambda weight, x, scale: x * weight * scale)
    for mode in ("full", "selective"):
        recompute_forward(module, mode)
    with torch.no_grad():
        assert module(torch.ones(3), scale=2).tolist() == [2.0, 2.0, 2.0]


# Calls


def test_calls_are_watched_from_their_arguments_to_their_outputs_and_only_inside() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.ones(3)
    seen: list[Any] = []
    with watch_calls(model, lambda name, module, args, kwargs: seen.append((name, module, args)), seen.append):
        model(x)
    model(x)
    assert [each if isinstance(each, tuple) else id(each) for each in seen] == [
        ("", model, (x,)),
        ("0", model[0], (x,)),
        id(x),
        id(x),
    ]
