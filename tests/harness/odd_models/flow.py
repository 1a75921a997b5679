"""Odd control flow: blocks in changing order, routing, gradients inside the forward, checkpoints, own functions."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from harness.odd_models.base import WIDTH, Block, LossFn, OddCase, Stack, regression_loss

# Blocks in changing order


class ShuffledBlocks(Stack):
    """Another order in each step, the same on all ranks; some twice, some not at all."""

    def through(self, x: Tensor, step: int) -> Tensor:
        for index in ((0, 1, 2), (2, 0, 1), (1, 1, 0), (2, 2, 2), ())[step % 5]:
            x = self.blocks[index](x)
        return x


class ForwardCalledDirectly(Stack):
    """`block.forward(x)`, which fires no hooks, and methods other than forward."""

    def through(self, x: Tensor, step: int) -> Tensor:
        first, second, third = self.blocks
        x = first.forward(x)
        x = second.down(second.encode(x)) + x
        if step == 1:
            x = first(x)
        return third(x)


class NoGradInTheMiddle(Stack):
    """A block runs under no_grad between others, then also with gradients."""

    def through(self, x: Tensor, step: int) -> Tensor:
        x = self.blocks[0](x)
        with torch.no_grad():
            target = self.blocks[1](self.blocks[0](x))
        if step == 1:
            x = self.blocks[1](x)
        x = self.blocks[2](x)
        with torch.set_grad_enabled(False):
            offset = self.blocks[2](x)
        with torch.set_grad_enabled(True):
            return x * target + offset


class NoGradOnly(Stack):
    """The last block, in every forward, runs under no_grad alone."""

    def through(self, x: Tensor, step: int) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        with torch.no_grad():
            target = self.blocks[2](x)
        return x * target


class OtherThread(Stack):
    """A block runs in another thread."""

    def through(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            found: list[Tensor] = []
            thread = threading.Thread(target=lambda block=block, x=x, found=found: found.append(block(x)))
            thread.start()
            thread.join()
            x = found[0]
        return x


# Different on different ranks


class Routed(Stack):
    """Top-1 routing by the data: on some ranks some experts of a block get no token."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 4)
            self.experts = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            weights = self.router(x).softmax(-1)  # [B, E]
            chosen = weights.argmax(-1)  # [B]
            y = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero().flatten()
                if len(rows):
                    y = y.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
            return x + y

    def make_block(self) -> nn.Module:
        return self.Experts()


class RoutedByRank(Stack):
    """Which layer of a block runs depends on the rank; rank 1 has nothing for the last block's layers."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.ModuleList(Block() for _ in range(1)) for _ in range(2))

        def forward(self, x: Tensor, index: int) -> Tensor:
            return self.experts[index][0](x) if index < 2 else x * 1.5

    def make_block(self) -> nn.Module:
        return self.Either()

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x, rank % 2 + (2 * (rank % 2) if index == 2 else 0))
        return self.head(x)


class NestedLists(nn.Module):
    """Lists of lists of blocks, and a Sequential inside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Sequential(Block(), nn.Tanh()), "b": nn.ModuleList([Block()])})

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        first, second = (tower[1](tower[0](x)) for tower in self.towers)
        return self.heads["a"](first) + self.heads["b"][0](second)


# Several backwards


class ForcesInForward(Stack):
    """The forward differentiates itself by its input, as force fields do."""

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.through(self.stem(x), step).square().sum()
            (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.head(forces)


class GradientPenalty(Stack):
    """The loss penalises the gradient by an intermediate result."""

    def forward(self, x: Tensor, step: int, rank: int) -> tuple[Tensor, Tensor]:
        hidden = self.stem(x)
        return self.head(self.through(hidden, step)), hidden


def gradient_penalty_loss(model: nn.Module) -> LossFn:
    """Squared distance and squared gradient."""

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        prediction, hidden = output
        if not prediction.requires_grad:
            return regression_loss(model)(prediction, batch)
        (gradient,) = torch.autograd.grad(prediction.square().sum(), hidden, create_graph=True)
        total, count = regression_loss(model)(prediction, batch)
        return total + gradient.square().sum(), count

    return loss


class InnerGradient(Stack):
    """A gradient without a graph in the middle of the forward, as saliency and guidance do."""

    def through(self, x: Tensor, step: int) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.blocks[0](leaf).sum(), leaf)
        return super().through(x + gradient, step)


# Custom autograd functions


class _SavingLinear(torch.autograd.Function):
    """A linear layer whose backward uses the saved weight; no gradient for the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x, None


class _KeepingLinear(torch.autograd.Function):
    """Keeps weight and a view of it on the context, outside `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.x, ctx.weight, ctx.view = x, weight, weight.T
        y = x @ weight.T
        chosen = y.argmax(-1)
        ctx.mark_non_differentiable(chosen)
        return y, chosen

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        return grad @ (ctx.weight + ctx.view.T) / 2, grad.T @ ctx.x


class _Doubled(torch.autograd.Function):
    """Doubles its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


class CustomFunctions(Stack):
    """Functions with own backwards, in blocks and outside."""

    class Custom(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(_SavingLinear.apply(x, self.up.weight, self.up.bias))
            y, chosen = _KeepingLinear.apply(hidden, self.down.weight)
            return _Doubled.apply(x + y) + chosen[:, None] * self.down.bias

    def make_block(self) -> nn.Module:
        return self.Custom()

    def through(self, x: Tensor, step: int) -> Tensor:
        x = super().through(x, step)
        return _KeepingLinear.apply(
            torch.tanh(_SavingLinear.apply(x, self.blocks[0].up.weight, self.head.bias[0])), self.blocks[1].down.weight
        )[0]


# Checkpointing by the user


class ReentrantAround(Stack):
    """Reentrant checkpointing around each block."""

    def through(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class ReentrantInside(Stack):
    """Reentrant checkpointing inside each block."""

    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(checkpoint(self.encode, x, use_reentrant=True))

    def make_block(self) -> nn.Module:
        return self.Inside()


class ReentrantAroundSeveral(Stack):
    """Reentrant checkpointing around two blocks, then around the third."""

    def through(self, x: Tensor, step: int) -> Tensor:
        first, second, third = self.blocks
        x = checkpoint(lambda x: second(first(x)), x, use_reentrant=True)
        return checkpoint(third, x, use_reentrant=True)


class ReentrantNested(Stack):
    """Reentrant checkpointing of a block inside a reentrant checkpoint of all."""

    def through(self, x: Tensor, step: int) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

        return checkpoint(inner, x, use_reentrant=True)


class ReentrantSequential(Stack):
    """`checkpoint_sequential` in segments, reentrant."""

    def through(self, x: Tensor, step: int) -> Tensor:
        return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=True)


class CheckpointedAround(Stack):
    """Non-reentrant checkpointing from outside, as Hugging Face's layers do it, around one and around several."""

    def through(self, x: Tensor, step: int) -> Tensor:
        first, second, third = self.blocks
        x = checkpoint(first.__call__, x, use_reentrant=False)
        return checkpoint(lambda x: third(second(x)), x, use_reentrant=False)


class CheckpointedInside(Stack):
    """Non-reentrant checkpointing inside a block, nested in one around it."""

    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(checkpoint(self.encode, x, use_reentrant=False))

    def make_block(self) -> nn.Module:
        return self.Inside()

    def through(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class CheckpointedWithoutEarlyStop(CheckpointedInside):
    """The same with recomputation to the end."""

    def through(self, x: Tensor, step: int) -> Tensor:
        with set_checkpoint_early_stop(False):
            return super().through(x, step)


FLOW_CASES = (
    OddCase(ShuffledBlocks, num_ranks=3),
    OddCase(ForwardCalledDirectly),
    OddCase(NoGradInTheMiddle),
    OddCase(NoGradOnly),
    OddCase(OtherThread),
    OddCase(Routed, num_ranks=3),
    OddCase(RoutedByRank, num_ranks=3),
    OddCase(NestedLists),
    OddCase(ForcesInForward),
    OddCase(GradientPenalty, gradient_penalty_loss),
    OddCase(InnerGradient),
    OddCase(CustomFunctions),
    OddCase(ReentrantAround),
    OddCase(ReentrantInside),
    OddCase(ReentrantAroundSeveral),
    OddCase(ReentrantNested),
    OddCase(ReentrantSequential),
    OddCase(CheckpointedAround),
    OddCase(CheckpointedInside),
    OddCase(CheckpointedWithoutEarlyStop),
)
