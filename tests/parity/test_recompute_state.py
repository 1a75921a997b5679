"""What a forward writes is written once, and recomputed forwards read what the first pass has read."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.refusals import refused
from harness.training import make_config
from shardwise import initialize
from shardwise.compat.deepspeed import checkpointing
from shardwise.runtime.forward_state import ForwardState
from shardwise.runtime.recompute import recompute_forward

H, STEPS = 6, 3
GLOBAL = torch.Generator()


class Kind(nn.Module):
    """A block; `write` is what it writes or draws, and returns what multiplies its output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(H, H)
        self.begin()

    def begin(self) -> None:
        """Set up the state."""

    def write(self, x: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x) * self.write(x))


class Counter(Kind):
    def begin(self) -> None:
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def write(self, x: Tensor) -> Any:
        self.calls += 1
        return self.calls / 3


class PlainCounter(Kind):
    def begin(self) -> None:
        self.calls = 0

    def write(self, x: Tensor) -> Any:
        self.calls += 1
        return self.calls / 3 if self.calls % 2 else torch.sigmoid(x)


class Norm(Kind):
    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(H)

    def write(self, x: Tensor) -> Any:
        return self.norm(x) * self.norm.running_mean


class Spectral(Kind):
    def begin(self) -> None:
        self.extra = nn.utils.parametrizations.spectral_norm(nn.Linear(H, H))
        self.old = nn.utils.spectral_norm(nn.Linear(H, H))

    def write(self, x: Tensor) -> Any:
        return self.extra(x) + self.old(x)


class Silent(Kind):
    def begin(self) -> None:
        self.register_buffer("average", torch.zeros(H))

    def write(self, x: Tensor) -> Any:
        self.average.data.mul_(0.5).add_(x.detach().mean(0))
        return 1 + self.average.clone()


class Containers(Kind):
    """A list, a dict, an array and an object of its own, shared with a second name."""

    def begin(self) -> None:
        self.log: list[Any] = []
        self.loads = {"sum": torch.zeros(H), "num": 0}
        self.array = np.zeros(2)
        self.same = self.loads["sum"]

    def write(self, x: Tensor) -> Any:
        self.log.append(len(self.log))
        self.loads["num"] += 1
        self.loads["sum"] += x.detach().mean(0)
        self.array += 1
        return len(self.log) / self.loads["num"] + self.loads["sum"] + self.same + self.array[0]


class Memory(Kind):
    def begin(self) -> None:
        self.memory: Tensor | None = None

    def write(self, x: Tensor) -> Any:
        before = torch.ones_like(x) if self.memory is None else self.memory
        self.memory = (x * 2).detach()
        return before


class Activation(Kind):
    """Leaves an activation that has a graph, as models leave an auxiliary loss."""

    def begin(self) -> None:
        self.auxiliary: Tensor | None = None

    def write(self, x: Tensor) -> Any:
        self.auxiliary = self.fc(x).square().mean()
        return 1


class Generators(Kind):
    def begin(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def write(self, x: Tensor) -> Any:
        own = torch.rand(H, generator=self.generator)
        return own + torch.empty(H).uniform_(generator=GLOBAL) + random.random() + np.random.rand()


class Late(Kind):
    """Writes into a tensor that the first passes leave alone."""

    def begin(self) -> None:
        self.calls = 0
        self.register_buffer("queue", torch.ones(H))

    def write(self, x: Tensor) -> Any:
        self.calls += 1
        if self.calls > 2:
            self.queue.copy_(self.queue.roll(1) + x.detach().mean(0))
        return self.queue.clone()


class Branch(Kind):
    """Calls after some passes what writes silently, and what writes into containers."""

    def begin(self) -> None:
        self.calls, self.parts = 0, nn.ModuleList([Silent(), Containers()])

    def write(self, x: Tensor) -> Any:
        self.calls += 1
        return 1 + sum(part(x) for part in self.parts if self.calls > 2)


class Functions(Kind):
    """Draws by function, in code that is no module's forward where the whole call is checkpointed."""

    def write(self, x: Tensor) -> Any:
        return F.dropout(torch.randn_like(x), 0.3) + torch.rand([])


KINDS: list[type[Kind]] = [
    Counter,
    PlainCounter,
    Norm,
    Spectral,
    Silent,
    Containers,
    Memory,
    Generators,
    Late,
    Branch,
    Functions,
]


class Net(nn.Module):
    def __init__(self, kind: type[Kind], call: Callable[..., Any] | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(2)])
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(lambda y, block=block: block.forward(y), x)
        return x


def train(kind: type[Kind], sections: dict[str, Any], call: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Return losses, parameters and state after some steps of two micro-batches."""
    torch.manual_seed(0)
    GLOBAL.manual_seed(5)
    net, data = Net(kind, call).double(), torch.Generator().manual_seed(1)
    found: dict[str, Any] = {"losses": []}
    with initialize(net, make_config(1, {"batch": {"accumulation": 2}, **sections}), loss_fn=loss) as engine:
        for _ in range(STEPS):
            batches = [torch.randn(4, H, dtype=torch.float64, generator=data).requires_grad_() for _ in range(2)]
            found["losses"].append(engine.train_step(batches).loss)
        found.update({name: engine.read(name) for name, _ in net.named_parameters()})
    for name, module in net.blocks.named_modules():
        plain = {
            key: value for key, value in vars(module).items() if key in ("calls", "log", "loads", "array", "memory")
        }
        found.update({f"{name}.{key}": value for key, value in {**module._buffers, **plain}.items()})
        if "generator" in vars(module):
            found[f"{name}.generator"] = vars(module)["generator"].get_state()
    return found


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


WAYS: dict[str, tuple[dict[str, Any], Callable[..., Any] | None]] = {
    "full": ({"recompute": {"mode": "full"}}, None),
    "selective": ({"recompute": {"mode": "selective"}}, None),
    "offloaded": ({"recompute": {"mode": "full"}, "tiers": {"activations": "host"}}, None),
    "own": ({}, lambda run, x: checkpoint(run, x, use_reentrant=False)),
    "reentrant": ({}, lambda run, x: checkpoint(run, x, use_reentrant=True)),
    "deepspeed": ({}, checkpointing.checkpoint),
    "nested": (
        {"recompute": {"mode": "full"}},
        lambda run, x: checkpoint(lambda y: checkpoint(run, y, use_reentrant=False), x, use_reentrant=False),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_writes_once_and_reads_what_the_first_pass_read(kind: type[Kind]) -> None:
    expected = train(kind, {})
    for sections, call in WAYS.values():
        torch.testing.assert_close(train(kind, sections, call), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_an_activation_that_is_left_keeps_its_graph(mode: str) -> None:
    block, x = Activation(), torch.randn(4, H)
    (block(x).sum() + block.auxiliary).backward()
    expected = [each.grad.clone() for each in block.parameters()]
    block.zero_grad()
    recompute_forward(block, mode)
    for _ in range(2):
        block.zero_grad()
        out = block(x)
        left = block.auxiliary
        (out.sum() + left).backward()
        assert block.auxiliary is left
        torch.testing.assert_close([each.grad for each in block.parameters()], expected)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_parameters_that_replace_the_own_for_a_call_are_those_of_its_recomputation(mode: str) -> None:
    net, x = Net(PlainCounter, None).double(), torch.randn(4, H, dtype=torch.float64)

    def gradients() -> list[Tensor]:
        net.zero_grad()
        for block in net.blocks:
            block.calls = 0
        value = x
        for block in net.blocks:  # others' parameters, and tensors that are computed
            others = dict(net.blocks[0].named_parameters())
            value = functional_call(block, {name: each * 1.5 for name, each in others.items()}, (value,))
            value = functional_call(block, others, (value,))
        value.square().sum().backward()
        return [each.grad.clone() for each in net.blocks[0].parameters()]

    expected = gradients()
    for block in net.blocks:
        recompute_forward(block, mode)
    torch.testing.assert_close(gradients(), expected)


def test_what_nothing_writes_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first pass; a large tensor that is written later is an error, as its values are not known."""
    copies: list[int] = []
    own = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, *args, **kwargs: copies.append(1) or own(self))
    module = nn.Module()
    module.register_buffer("table", torch.ones(1 << 19))
    module.register_buffer("small", torch.ones(4))
    state = ForwardState(module)
    for _ in range(3):
        with state.first() as passed:
            pass
        with passed.second():
            assert module.table.shape == (1 << 19,)
    assert len(copies) == 2
    with state.first() as passed:
        module.small += 1
    with passed.second():
        assert module.small[0] == 1
    assert module.small[0] == 2
    state = ForwardState(module)
    with state.first():
        pass
    with state.first() as passed:
        module.table += 1
    with refused("state-written-late"), passed.second():
        pass


def test_what_others_write_silently_between_passes_is_read() -> None:
    """In a module that has not run too, whose tensors are compared with their copies."""
    module = nn.Module()
    module.part = nn.Module()
    module.part.register_buffer("scale", torch.zeros(2))
    state = ForwardState(module)
    for number in range(3):
        module.part.scale.data.fill_(number)
        with state.first() as passed:
            pass
        with passed.second():
            assert module.part.scale[0] == number
