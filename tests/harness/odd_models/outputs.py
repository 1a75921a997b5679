"""Odd inputs, outputs and hooks of blocks and models."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.odd_models.base import WIDTH, Block, LossFn, OddCase, Stack, regression_loss

# What blocks and models return


Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Output:
    """What a block returns; torch's pytrees do not look inside."""

    x: Tensor


class OddOutputs(Stack):
    """Blocks return a dataclass, a namedtuple and a generator over results."""

    class Odd(Block):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            if self.kind == "dataclass":
                return Output(y)
            return Pair(y, None) if self.kind == "namedtuple" else (each for each in (y, y * 2))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Odd(kind) for kind in ("dataclass", "namedtuple", "generator"))

    def through(self, x: Tensor, step: int) -> Tensor:
        x = self.blocks[1](self.blocks[0](x).x).first
        return sum(self.blocks[2](x))


class ReturnsNothing(Stack):
    """Blocks return None and leave their results in an attribute."""

    class Leaving(Block):
        def forward(self, x: Tensor) -> None:  # type: ignore[override]
            self.result = super().forward(x)

    def make_block(self) -> nn.Module:
        return self.Leaving()

    def through(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            block(x)
            x = block.result
        return x


class SideLoss(Stack):
    """Blocks leave a balance loss, computed after their output, in an attribute, as mixtures of experts do."""

    class Balanced(Block):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.side_loss = F.linear(torch.tanh(self.router(y)), self.down.weight[:, :3]).square().mean()
            return y

    def make_block(self) -> nn.Module:
        return self.Balanced()

    def forward(self, x: Tensor, step: int, rank: int) -> tuple[Tensor, Tensor]:
        return super().forward(x, step, rank), sum(block.side_loss for block in self.blocks)


def side_loss(model: nn.Module) -> LossFn:
    """Squared distance and side losses."""

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        total, count = regression_loss(model)(output[0], batch)
        return total + count * output[1], count

    return loss


class LazyGenerator(Stack):
    """A block's forward is a generator: it computes when it is asked, after its forward has returned."""

    class Lazy(Block):
        def forward(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
            yield super().forward(x)

    def make_block(self) -> nn.Module:
        return self.Lazy()

    def through(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            (x,) = block(x)
        return x


class ViewsOfInputs(Stack):
    """Blocks return their input or a view of it."""

    class Passing(Block):
        def __init__(self, kind: int) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, x: Tensor) -> Tensor:
            if self.kind == 2:
                return super().forward(x)
            return x if self.kind == 0 else x.view(-1, 2, WIDTH)[:, :, :].flatten(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Passing(kind) for kind in (0, 1, 2, 0, 2, 1))


class ChangedInPlace(Stack):
    """Blocks change their input in place and return it, or nothing."""

    class Changing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(self.down(torch.tanh(self.up(x * 1.5))))

    class Silent(Block):
        def forward(self, x: Tensor) -> None:  # type: ignore[override]
            x.add_(self.down(torch.tanh(self.up(x * 1.5))))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Changing(), self.Silent(), self.Changing(), Block()])

    def through(self, x: Tensor, step: int) -> Tensor:
        x = x * 1.0
        for block in self.blocks:
            y = block(x)
            x = x if y is None else y
        return x


class ModelReturnsInput(nn.Module):
    """The model's output is a block's, in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, step: int, rank: int) -> Output:
        return Output(self.blocks[1](self.blocks[0](x)))


def unpacking_loss(model: nn.Module) -> LossFn:
    """For outputs in a dataclass."""
    return lambda output, batch: regression_loss(model)(output.x, batch)


class OwnHooks(Stack):
    """The user's hooks on blocks and parameters: they change inputs, outputs and gradients."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = self.blocks
        first.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        first.register_forward_hook(lambda module, args, output: output * module.down.bias.sum())
        second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        second.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
        third.up.weight.register_hook(lambda grad: grad * 2)
        self.stem.weight.register_hook(lambda grad: grad * 0.1)


class OwnAccumulateHooks(Stack):
    """The user's hooks on accumulated gradients, registered before the engine's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: self.seen.append(parameter.grad.sum()))


class GradModeFlips(Stack):
    """Blocks that switch gradients off and on inside."""

    class Flipping(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.encode(x).mean()
                with torch.enable_grad():
                    y = super().forward(x)
                return_value = y.detach() * scale
            return y + return_value

    def make_block(self) -> nn.Module:
        return self.Flipping()


class Autocast(Stack):
    """Autocast inside the model, in bf16 for one layer whose result is cast back."""

    def through(self, x: Tensor, step: int) -> Tensor:
        x = super().through(x, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            gate = F.linear(x.float(), self.blocks[0].up.weight[:WIDTH].float())
        return x * gate.double().detach() + x


OUTPUT_CASES = (
    OddCase(OddOutputs),
    OddCase(ReturnsNothing),
    OddCase(SideLoss, side_loss),
    OddCase(LazyGenerator),
    OddCase(ViewsOfInputs),
    OddCase(ChangedInPlace),
    OddCase(ModelReturnsInput, unpacking_loss),
    OddCase(OwnHooks),
    OddCase(OwnAccumulateHooks),
    OddCase(GradModeFlips),
    OddCase(Autocast),
)
