"""A recomputed forward reads the containers and attributes that its first pass has read, though others change them."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.refusals import refused
from harness.training import make_config
from shardwise import initialize
from shardwise.runtime.recompute import recompute_forward

H = 6


@dataclass
class Graph:
    """An object that carries a state."""

    x: Any
    n: int = 0


class Pair(NamedTuple):
    """A state and a dict."""

    x: Any
    counts: dict[str, int]


class Block(nn.Module):
    """Reads all that a caller may change, and writes by `use` into what it is given."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.fc, self.drop, self.use = nn.Linear(H, H), nn.Dropout(0.0), use
        self.level, self.options, self.gate = 1.0, {"level": 1.0}, torch.ones(())
        self.around = SimpleNamespace()
        self.around.itself = self.around
        self.register_buffer("warmth", torch.ones(()))

    def inner(self, x: Tensor) -> Tensor:
        scale = self.level * self.options["level"] * self.gate * self.warmth.clone() * (1 + self.drop.p)
        return x + torch.tanh(self.fc(x * scale)) if self.training else x + self.fc(x)

    def forward(self, x: Any, held: Any = None) -> Any:
        return self.use(self, x, held)


def in_dict(block: Block, state: Any, held: Any) -> Any:
    state["x"] = block.inner(state["x"] * len(state))
    state[f"{len(state)}"] = 1
    return state


def in_object(block: Block, state: Any, held: Any) -> Any:
    state.n += 1
    state.x = block.inner(state.x * state.n)
    return state


def in_pair(block: Block, state: Any, held: Any) -> Any:
    state.counts["n"] += 1
    return Pair(block.inner(state.x * state.counts["n"]), state.counts)


def popped(block: Block, state: Any, held: Any) -> Any:
    state.append(block.inner(state.pop()))
    return state


def grown(block: Block, state: Any, held: Any) -> Any:
    held["all"].append(state)
    held["same"].append(state)
    return block.inner(sum(held["all"]) / len(held["same"]))


def written(block: Block, state: Any, held: Any) -> Any:
    held[0]["t"].add_(1)
    return block.inner(state * held[0]["t"].clone())


def drawn(block: Block, state: Any, held: Any) -> Any:
    return block.inner(state * held.random())


def twice(list_: list[Any]) -> dict[str, Any]:
    return {"all": list_, "same": list_}


ARGUMENTS: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "dict": (in_dict, lambda x: {"x": x}, lambda x: None),
    "ordered": (in_dict, lambda x: OrderedDict(x=x), lambda x: None),
    "dataclass": (in_object, Graph, lambda x: None),
    "namespace": (in_object, lambda x: SimpleNamespace(x=x, n=0), lambda x: None),
    "namedtuple": (in_pair, lambda x: Pair(x, {"n": 0}), lambda x: None),
    "list": (popped, lambda x: [x], lambda x: None),
    "deque": (popped, lambda x: deque([x]), lambda x: None),
    "growing": (grown, lambda x: x, lambda x: twice([])),
    "tensor": (written, lambda x: x, lambda x: [{"t": torch.ones(H, dtype=x.dtype)}]),
    "generator": (drawn, lambda x: x, lambda x: Random(3)),
}


def set_attributes(block: Block, index: int, x: Tensor) -> None:
    """Set, write and put what a caller may, in the block and in a module of torch in it."""
    block.level, block.options["level"], block.drop.p = 1 + index / 3, 1 - index / 5, index / 9
    block.gate = x.mean().sigmoid()
    block.warmth.fill_(1 + index / 7)
    block.train(index != 2)


class Net(nn.Module):
    """Runs its blocks twice."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        super().__init__()
        use, self.begin, self.held = ARGUMENTS.get(name, (lambda block, x, held: block.inner(x), lambda x: x, Graph))
        self.stem = nn.Linear(H, H)
        self.blocks, self.call = nn.ModuleList(Block(use) for _ in range(2)), call
        self.sets = name == "attributes"

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        state, held = self.begin(x), self.held(x)
        for index, block in enumerate([*self.blocks, *self.blocks]):
            if self.sets:
                set_attributes(block, index, state)
            state = self.call(block, state, held=held)
        if isinstance(state, dict | list | deque):
            return state["x"] if isinstance(state, dict) else state[-1]
        return state if isinstance(state, Tensor) else state.x


def plainly(block: Block, *args: Any, **kwargs: Any) -> Any:
    return block(*args, **kwargs)


def checkpointed(block: Block, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(block, *args, use_reentrant=False, **kwargs)


WAYS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "full": ({"recompute": {"mode": "full"}}, plainly),
    "selective": ({"recompute": {"mode": "selective"}}, plainly),
    "offloaded": ({"recompute": {"mode": "full"}, "tiers": {"activations": "host"}}, plainly),
    "own": ({}, checkpointed),
}


def train(name: str, sections: dict[str, Any], call: Callable[..., Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    net, data = Net(name, call).double(), torch.Generator().manual_seed(1)
    found: dict[str, Any] = {"losses": []}
    alone, plain = copy.deepcopy(net), None
    config = make_config(1, {"batch": {"accumulation": 2}, **sections})
    with initialize(net, config, loss_fn=lambda output, batch: output.square().mean()) as engine:
        for _ in range(2):
            batches = [torch.randn(4, H, dtype=torch.float64, generator=data) for _ in range(2)]
            plain = plain or sum(alone(each).square().mean().item() for each in batches) / 2
            found["losses"].append(engine.train_step(batches).loss)
        found.update({each: engine.read(each) for each, _ in net.named_parameters()})
    assert found["losses"][0] == pytest.approx(plain, rel=1e-12)  # what blocks write reaches the caller
    return found


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", [*ARGUMENTS, "attributes"])
def test_a_recomputation_reads_what_the_first_pass_has_read(name: str) -> None:
    expected = train(name, {}, plainly)
    for way, (sections, call) in WAYS.items():
        if (name, way) == ("tensor", "offloaded"):
            continue  # refused: what a store keeps must not be written
        torch.testing.assert_close(train(name, sections, call), expected, rtol=1e-12, atol=1e-12, msg=way)


def test_the_caller_finds_what_the_first_pass_writes_and_nothing_twice() -> None:
    block, state = Block(in_dict), {"x": torch.ones(2, H, requires_grad=True)}
    recompute_forward(block, "full")
    out = block(state)
    assert out is state
    found = dict(state)
    state["x"].sum().backward()
    assert [*state] == ["x", "1"]
    assert all(state[name] is found[name] for name in found)


def test_a_tensor_in_a_container_that_is_written_later_is_an_error() -> None:
    block, held = Block(lambda block, x, held: block.inner(x * held["t"].clone())), {"t": torch.ones(H)}
    recompute_forward(block, "full")
    out = block(torch.ones(2, H, requires_grad=True), held=held)
    held["t"].add_(1)
    with refused("state-written-late"):
        out.sum().backward()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_forward_may_take_derivatives_through_recomputed_blocks(mode: str) -> None:
    net = nn.Sequential(*(Block(lambda block, x, held: block.inner(x)) for _ in range(2)))

    def gradients() -> list[Tensor]:
        x = torch.linspace(-1, 1, 2 * H).view(2, H).requires_grad_()
        (force,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return [*torch.autograd.grad(force.square().sum(), [*net.parameters()], allow_unused=True)]

    expected = gradients()
    for block in net:
        recompute_forward(block, mode)
    torch.testing.assert_close(gradients(), expected)
