"""What units leave beside their outputs is right under a pipeline, or refused by name: never another value."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.pool import WorkerPool
from harness.refusals import refusal_of
from harness.training import make_config
from shardwise import initialize
from shardwise.runtime.float64 import float64_throughout

WIDTH, NUM_STEPS, NUM_BATCHES = 6, 2, 4


class Block(nn.Module):
    """Leaves something on itself, which a case replaces."""

    scale = 0.5

    def __init__(self, shared: SimpleNamespace) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.shared, self.options = shared, {"factor": 2}
        self.table: Tensor | None = None
        self.tables: dict[str, float] = {}

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = x + self.scale * torch.tanh(self.linear(x))
        self.leave(x, *args)
        return x

    def leave(self, x: Tensor, *args: Any) -> None:
        pass


class Root(nn.Module):
    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.shared = SimpleNamespace(total=0.0, items=[])
        self.blocks = nn.ModuleList(self.block(self.shared) for _ in range(4))
        self.log: list[Any] = []

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        return x + sum(map(self.read, self.blocks))

    def read(self, block: Any) -> Any:
        return 0.0

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return (output - batch).square().mean()


class Number(Root):
    class block(Block):  # noqa: N801
        number = 0.0

        def leave(self, x: Tensor, *args: Any) -> None:
            self.number = x.detach().mean().item()

    def read(self, block: Any) -> Any:
        return block.number


class NumberInLoss(Number):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return super().loss(output, batch) + sum(block.number for block in self.blocks)


class OnlyIfThere(Root):
    class block(Block):  # noqa: N801
        def leave(self, x: Tensor, *args: Any) -> None:
            self.linear.peak = x.detach().max().item()

    def read(self, block: Any) -> Any:
        return block.linear.peak if hasattr(block.linear, "peak") else 0.0


class Missing(OnlyIfThere):
    def read(self, block: Any) -> Any:
        return block.linear.peak


class Buffer(Root):
    class block(Block):  # noqa: N801
        def leave(self, x: Tensor, *args: Any) -> None:
            self.mean.mul_(0.9).add_(x.detach().mean(0))

    def read(self, block: Any) -> Any:
        return block.mean.clone()


class AllBuffers(Buffer):
    def read(self, block: Any) -> Any:
        return sum(each.clone() for each in block.buffers())


class OnValues(Root):
    """A block without values cannot show what it leaves."""

    class block(Block):  # noqa: N801
        def leave(self, x: Tensor, *args: Any) -> None:
            if x.sum().item() < 1e9:
                self.table = x.square().mean()

    def read(self, block: Any) -> Any:
        return 0.0 if block.table is None else block.table


class Adds(Root):
    class block(Block):  # noqa: N801
        def leave(self, x: Tensor, *args: Any) -> None:
            self.shared.items.append(x.square().mean())

    def forward(self, x: Tensor) -> Tensor:
        self.shared.items.clear()
        return self.run(x) + sum(self.shared.items)


class Counts(Root):
    """Each block counts in what all of them have, and nothing begins it again."""

    class block(Block):  # noqa: N801
        def forward(self, x: Tensor, *args: Any) -> Tensor:
            self.shared.total += 1.0
            return super().forward(x) * (1 + self.shared.total / 10)


class CountsInClass(Root):
    class block(Block):  # noqa: N801
        calls = 0

        def forward(self, x: Tensor, *args: Any) -> Tensor:
            type(self).calls += 1
            return super().forward(x) * (1 + self.calls / 100)


class CountsInModule(Root):
    class block(Block):  # noqa: N801
        def forward(self, x: Tensor, *args: Any) -> Tensor:
            global num_calls  # noqa: PLW0603
            num_calls += 1
            return super().forward(x) * (1 + num_calls / 100)


num_calls = 0


class ToModel(Root):
    class block(Block):  # noqa: N801
        def leave(self, x: Tensor, *args: Any) -> None:
            self.model[0].total = self.model[0].total + x.square().mean()

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.model = [self]

    def forward(self, x: Tensor) -> Tensor:
        self.total = 0.0
        return self.run(x) + self.total


class ToArgument(Root):
    class block(Block):  # noqa: N801
        def leave(self, x: Tensor, *args: Any) -> None:
            args[0].append(x.square().mean())

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for block in self.blocks:
            x = block(x, losses)
        return x + sum(losses)


class Earlier(Buffer):
    """Reads before the units what the forward before has left."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x + self.blocks[-1].mean.clone())


class InEvaluation(Buffer):
    def read(self, block: Any) -> Any:
        return 0.0 if self.training else block.mean.clone()


class LateNumber(Number):
    """Leaves its number in a later step than the first."""

    class block(Number.block):  # noqa: N801
        calls = 0

        def leave(self, x: Tensor, *args: Any) -> None:
            self.calls += 1
            if self.calls > NUM_BATCHES:
                super().leave(x, *args)


class Harmless(Root):
    """Reads what is no unit's to write, what reaches no result, and what units of its stage have left."""

    class block(Block):  # noqa: N801
        def forward(self, x: Tensor, *args: Any) -> Tensor:
            self.kept = x.detach()
            if self.table is None:
                self.table = torch.ones(WIDTH, dtype=x.dtype)
            if "one" not in self.tables:
                self.tables["one"] = self.table.sum().item()
            return super().forward(x) * self.table * self.tables["one"] / WIDTH

        def leave(self, x: Tensor, *args: Any) -> None:
            self.number = x.detach().mean().item()
            self.shared.total += 1.0

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.tables = self.blocks[0].tables

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0]
        x = x * self.blocks[3].scale * first.options["factor"] + first.linear.weight.shape[0] + first.linear.in_features
        x = self.run(x)
        self.log.append(self.blocks[0].kept)
        print(f"a mean of {getattr(first, 'number', None)} after {self.shared.total} calls", end="", file=Nowhere())
        return x + self.blocks[-1].number + self.blocks[-1].kept


class WrittenInto(Root):
    """Adds to some numbers after each block what the first one has returned, in place, as DeepStack does."""

    def run(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x).clone()
            x[:, :2] = x[:, :2] + first[:, :2]
        return x


class WrittenBefore(Root):
    """Writes what a unit returns into what only a unit of the same stage reads."""

    def run(self, x: Tensor) -> Tensor:
        given = torch.zeros_like(x)
        given[:, :3] = self.blocks[0](x)[:, :3]
        for block in self.blocks[1:]:
            given = block(given)
        return given


class Checkpoints(Root):
    """Checkpoints each block, blocks on both sides of a cut, and what surrounds them; blocks draw."""

    is_reentrant = False

    class block(Block):  # noqa: N801
        def leave(self, x: Tensor, *args: Any) -> None:
            x.mul_(torch.nn.functional.dropout(torch.ones_like(x), 0.3, self.training))

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: Tensor, factor: float) -> Tensor:
        x = self.blocks[1](x * factor)
        return torch.sin(self.blocks[2](x.cos()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.blocks[0], x, use_reentrant=self.is_reentrant)
        x = checkpoint(self.middle, x, 0.5, use_reentrant=self.is_reentrant)
        return checkpoint(self.blocks[3], x, use_reentrant=self.is_reentrant)


class ReentrantCheckpoints(Checkpoints):
    is_reentrant = True


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, run: nn.Module, x: Tensor) -> Tensor:
        context.run = run
        context.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        with torch.enable_grad():
            x = context.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(context.run(x), gradient)
        return None, x.grad


class OwnCheckpoint(Checkpoints):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = Recompute.apply(block, x)
        return x


class Nowhere:
    def write(self, text: str) -> None:
        pass


REFUSED = {
    Number: "cut-value-not-sent",
    NumberInLoss: "cut-value-not-sent",
    OnlyIfThere: "cut-value-not-sent",
    Missing: "cut-value-not-sent",
    Buffer: "cut-value-not-sent",
    AllBuffers: "cut-value-not-sent",
    OnValues: "cut-value-not-sent",
    Adds: "state-over-stages",
    Counts: "state-over-stages",
    CountsInClass: "state-over-stages",
    CountsInModule: "state-over-stages",
    ToModel: "state-over-stages",
    ToArgument: "cut-value-not-sent",
    WrittenInto: "cut-value-not-sent",
    Earlier: "cut-value-not-sent",
    InEvaluation: "cut-value-not-sent",
    LateNumber: "cut-value-not-sent",
    OwnCheckpoint: "cut-inside-function",
}
NAMED = {Number: "number of blocks.0", OnlyIfThere: "linear.peak of blocks.", Missing: "linear.peak of blocks."}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"mesh": {"pp": 2}},
    "zb-v": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-v", "virtual_stages": 2}},
}


def train(kind: type[Root], sections: dict[str, Any]) -> list[float]:
    """Train; return losses, norms, and losses of evaluations."""
    torch.manual_seed(0)
    model = kind().double()
    data, trace = torch.Generator().manual_seed(1), []
    with float64_throughout(), initialize(model, make_config(NUM_BATCHES, sections), loss_fn=model.loss) as engine:
        for _ in range(NUM_STEPS):
            batches = [torch.randn(3, WIDTH, generator=data, dtype=torch.float64) for _ in range(NUM_BATCHES)]
            result = engine.train_step(batches)
            trace += [result.loss, result.grad_norm, engine.eval_step(batches[:2]).loss]
    return trace


def train_refused(rank: int, world_size: int, layout: str, kinds: list[type[Root]]) -> list[tuple[str, str]]:
    return [refusal_of(functools.partial(train, kind, LAYOUTS[layout])) for kind in kinds]


# Each code, and each place that a value is left in: what a schedule has to do with is where the stages run.
QUICK_IN = {"1f1b": list(REFUSED), "zb-v": [Number, Buffer, Adds, ToArgument, LateNumber, OwnCheckpoint]}


@pytest.mark.quick(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_skipped_unit_leaves_is_not_read(ranks: WorkerPool, layout: str, pytestconfig: pytest.Config) -> None:
    kinds = list(REFUSED) if pytestconfig.getoption("--full") else QUICK_IN[layout]
    for kind, *both in zip(kinds, *ranks(2).run(train_refused, layout, kinds), strict=True):
        # The other rank finds the same, or quotes it.
        assert REFUSED[kind] in {found for found, _ in both}, (kind, both)
        assert all(NAMED.get(kind, "") in text for _, text in both), (kind, both)


def train_right(rank: int, world_size: int, layout: str, kinds: list[type[Root]]) -> list[list[float]]:
    return [train(kind, LAYOUTS[layout]) for kind in kinds]


@functools.cache
def train_alone(kind: type[Root]) -> list[float]:
    return train(kind, {})


RIGHT: list[type[Root]] = [Harmless, WrittenBefore, Checkpoints, ReentrantCheckpoints]


@pytest.mark.quick(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_reaches_no_result_is_as_in_one_process(ranks: WorkerPool, layout: str) -> None:
    for found in ranks(2).run(train_right, layout, RIGHT):
        for trace, kind in zip(found, RIGHT, strict=True):
            torch.testing.assert_close(trace, train_alone(kind), rtol=1e-9, atol=0)
