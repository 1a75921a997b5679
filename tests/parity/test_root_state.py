"""State that code around the units writes is written once, whatever stages run that code, or refused by name."""

from __future__ import annotations

import functools
import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.pool import WorkerPool
from harness.refusals import refusal_of
from harness.training import make_config
from shardwise import initialize
from shardwise.runtime.float64 import float64_throughout

WIDTH, NUM_STEPS = 6, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Root(nn.Module):
    """Has code before and after its units, which a case replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.log: list[Any] = []
        self.loads = {"num": 0}
        self.number = 0.0
        self.memory: Tensor | None = None

    def before(self, x: Tensor) -> Tensor:
        return x

    def after(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.after(x)


class WritesBefore(Root):
    def before(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.number += 0.5
        self.log.append(len(self.log))
        self.loads["num"] += 1
        self.mean.lerp_(x.mean(), 0.3)
        self.memory = x if self.memory is None else 0.5 * (self.memory + x)
        return x * (1 + self.calls.clone() / 3 + self.number) + len(self.log) + self.loads["num"] + self.memory


def counter() -> Any:
    calls, counts = torch.zeros(()), {"num": 0}

    def count(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        counts["num"] += 1
        return output * (1 + calls.clone() / 10 + counts["num"] / 20)

    return count


class Hooked(Root):
    """Has hooks whose variables are no attributes of a module."""

    def __init__(self) -> None:
        super().__init__()
        seen, total = self.log, 0.0

        def scale(module: nn.Module, args: Any) -> Any:
            nonlocal total
            total += 0.1
            seen.append(total)
            return (args[0] * (1 + total + 0.1 * len(seen)),)

        self.register_forward_pre_hook(scale)
        for block in (self.blocks[1], self.blocks[4]):
            block.linear.register_forward_hook(counter())
        self.register_forward_hook(lambda module, args, output: output * 1.5)


class WritesAfter(Root):
    """Counts after its units, and keeps what only code after them reads."""

    def before(self, x: Tensor) -> Tensor:
        return x * (1 + self.calls.clone() / 3 + self.number)

    def after(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.number += 0.5
        self.mean.mul_(0.9).add_(x.detach().mean())
        self.memory = x.detach()
        return x - self.mean.clone() * self.memory


class Logs(Root):
    """Reads before its units what it has written after them, to log it, to clear it, or to add to it."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.began = self.waited = self.norm = 0.0

    def before(self, x: Tensor) -> Tensor:
        self.losses.clear()
        self.losses.append(x.square().mean())
        self.waited = time.time() - self.began
        if self.norm > 1e9:
            print(f"a norm of {self.norm:.1f} after {self.waited} s")
        self.loads["norm"] = self.norm
        self.log.append(len(x))
        return x

    def after(self, x: Tensor) -> Tensor:
        self.losses.append(x.square().mean())
        self.norm = float(x.detach().norm())
        self.loads["num"] += 1
        self.log.append(self.norm)
        self.began = time.time()
        return x + sum(self.losses)


class LogsByHelpers(Root):
    """Logs in the same way by properties, by methods that return or keep it, and in loops."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.metrics = 0.0, {"norm": 0.0}

    @property
    def size(self) -> float:
        return self.norm

    def stats(self) -> dict[str, float]:
        return {"norm": self.norm}

    def note(self, name: str, value: float) -> None:
        self.metrics[name] = value

    def before(self, x: Tensor) -> Tensor:
        print(self.size, self.stats(), end="", file=NOWHERE)
        for name in self.loads:
            print(name, self.loads[name], end="", file=NOWHERE)
        for name in self.metrics:
            self.metrics[name] = 0.0
        self.note("norm", self.norm)
        return x

    def after(self, x: Tensor) -> Tensor:
        self.norm = float(x.detach().norm())
        self.note("after", self.norm)
        self.loads["num"] += 1
        return x * (1 + self.metrics["norm"] / 100)


NOWHERE = io.StringIO()


class ReturnsIt(LogsByHelpers):
    def before(self, x: Tensor) -> Tensor:
        return x * (1 + self.size / 100)


class NotesIt(LogsByHelpers):
    """What a method keeps reaches the results of an earlier stage."""

    def before(self, x: Tensor) -> Tensor:
        self.note("norm", self.norm)
        return x * (1 + self.metrics["norm"] / 100)


class Averages(Root):
    """Keeps a mean of its output, which its next forward reads first; in training or in evaluation only."""

    in_training = True

    def before(self, x: Tensor) -> Tensor:
        return x + self.mean.clone() if self.training == self.in_training else x

    def after(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean())
        return x


class AveragesLater(Averages):
    in_training = False


class Number(Root):
    def before(self, x: Tensor) -> Tensor:
        return x + self.number

    def after(self, x: Tensor) -> Tensor:
        self.number = x.detach().mean().item()
        return x


class Decides(Logs):
    """Takes a way that what it logs decides on."""

    def before(self, x: Tensor) -> Tensor:
        x = super().before(x)
        return 2 * x if self.loads["norm"] > 3 else x


class Remembers(Root):
    def before(self, x: Tensor) -> Tensor:
        return x if self.memory is None else x + self.memory

    def after(self, x: Tensor) -> Tensor:
        self.memory = x.detach()
        return x


class Late(Root):
    """Writes what its next forward reads in a later step than the first."""

    def before(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.number)

    def after(self, x: Tensor) -> Tensor:
        if int(self.calls) == self.late_call:
            self.write(x.detach().mean())
        return x

    late_call = 6

    def write(self, mean: Tensor) -> None:
        self.number = float(mean)


class LateBuffer(Late):
    def before(self, x: Tensor) -> Tensor:
        return super().before(x) + self.mean.clone() + sum(self.log)

    def write(self, mean: Tensor) -> None:
        self.mean.copy_(mean)


class LateItem(LateBuffer):
    def write(self, mean: Tensor) -> None:
        self.log.append(float(mean))


class Centres(Root):
    """Its loss writes what its forward reads."""

    def before(self, x: Tensor) -> Tensor:
        return x - self.mean.clone()


RIGHT = (WritesBefore, Hooked, WritesAfter, Logs, LogsByHelpers)
REFUSED = (ReturnsIt, NotesIt, Averages, AveragesLater, Number, Decides, Remembers, Late, LateBuffer, LateItem, Centres)
LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"mesh": {"pp": 2}},
    "zb-v": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-v", "virtual_stages": 2}},
    "interleaved": {
        "mesh": {"pp": 2},
        "pipeline": {"schedule": "interleaved", "virtual_stages": 2},
        "recompute": {"mode": "full"},
    },
}


def train(kind: type[Root], sections: dict[str, Any], num: int = 4, folder: Path | None = None) -> Any:
    """Train; return losses, norms, losses of evaluations, and the state at the end."""
    torch.manual_seed(0)
    model = kind().double()

    def loss_fn(output: Tensor, batch: Tensor) -> Tensor:
        if kind is Centres:
            with torch.no_grad():
                model.mean.mul_(0.5).add_(output.mean())
        return (output - batch).square().mean()

    data, trace = torch.Generator().manual_seed(1), []
    with float64_throughout(), initialize(model, make_config(num, sections), loss_fn=loss_fn) as engine:
        log = model.log
        for _ in range(NUM_STEPS):
            batches = [torch.randn(3, WIDTH, generator=data) for _ in range(num)]
            result = engine.train_step(batches)
            trace += [result.loss, result.grad_norm]
        if kind not in RIGHT:
            trace += [engine.eval_step(batches[:1]).loss]
        if folder is not None:
            engine.save(folder)
        state = [int(model.calls), model.number, len(model.log), model.log is log, model.loads["num"]]
        return trace, state


def train_right(rank: int, world_size: int, layout: str, folder: Path) -> Any:
    return [train(kind, LAYOUTS[layout], folder=folder / kind.__name__) for kind in RIGHT]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_state_of_code_around_the_units_is_written_once(ranks: WorkerPool, tmp_path: Path, layout: str) -> None:
    found, has_last = ranks(2).run(train_right, layout, tmp_path), 0 if layout == "zb-v" else 1
    for kind, *both in zip(RIGHT, *found, strict=True):
        expected, state = train(kind, {}, folder=tmp_path / "one" / kind.__name__)
        for trace, own in both:
            torch.testing.assert_close(trace, expected, rtol=1e-9, atol=0)
            # Without the last stage, code after the units ends at a value.
            assert own == state or (issubclass(kind, Logs | LogsByHelpers) and own is not both[has_last][1])
        buffers = []
        for folder in (tmp_path / "one", tmp_path):
            model = kind().double()
            with initialize(model, make_config(4, {}), loss_fn=lambda output, batch: output.mean()) as engine:
                engine.load(folder / kind.__name__)
            buffers.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        torch.testing.assert_close(buffers[1], buffers[0], rtol=1e-9, atol=0)


def train_refused(rank: int, world_size: int, kinds: tuple[type[Root], ...]) -> list[tuple[str, str]]:
    found = []
    for kind in kinds:
        num = 1 if kind is Remembers else 4
        found.append(refusal_of(functools.partial(train, kind, LAYOUTS["1f1b"], num)))
    return found


# Of these the other stage waits for its time-out.
LATE = (Late, LateBuffer, LateItem)


@pytest.mark.parametrize(
    "kinds", [tuple(each for each in REFUSED if each not in LATE), pytest.param(LATE, marks=pytest.mark.full)]
)
def test_a_stage_does_not_read_what_later_ones_write(ranks: WorkerPool, kinds: tuple[type[Root], ...]) -> None:
    for kind, *both in zip(kinds, *ranks(2).run(train_refused, kinds), strict=True):
        # One stage alone finds it in an evaluation or in a later step, and the other one quotes that.
        assert "state-over-stages" in {code for code, _ in both}, (kind, both)
        assert all("zero.stage=3" in text for _, text in both), (kind, both)
