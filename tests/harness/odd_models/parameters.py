"""Odd parameters: tied, used outside their module, frozen, of odd shapes, with buffers beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from harness.odd_models.base import NUM_WORDS, WIDTH, Block, LossFn, OddCase, Stack, regression_loss, words

# Tied weights


class TiedBlocks(Stack):
    """Two blocks share a weight, and a block and the head a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[1].down.bias = self.head.bias


class TiedAcrossContainers(nn.Module):
    """Embedding and head are blocks of different containers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Embedding(NUM_WORDS, WIDTH), Block()])
        self.decoder = nn.Sequential(Block(), nn.Linear(WIDTH, NUM_WORDS, bias=False))
        self.decoder[1].weight = self.encoder[0].weight

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        embedded = self.encoder[1](self.encoder[0](words(x)).mean(1))  # [B, D]
        return self.decoder(embedded)[:, :WIDTH]  # [B, D]


class RegisteredTwice(Stack):
    """A block stands in its container and under a name of its own; another in two containers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.blocks[0]
        self.others = nn.ModuleList([self.blocks[1], Block()])

    def through(self, x: Tensor, step: int) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, *self.others):
            x = block(x)
        return x


class ThreeWayTie(Stack):
    """Embedding, head and a block's layer are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight
        self.blocks[1].extra = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].extra.weight = self.embedding.weight

    def through(self, x: Tensor, step: int) -> Tensor:
        x = x + self.embedding(words(x) % WIDTH).mean(1)
        return self.blocks[1].extra(super().through(x, step))


# Parameters used outside their module


class FunctionalHead(Stack):
    """The root uses blocks' weights directly, before, between and after the blocks run."""

    def through(self, x: Tensor, step: int) -> Tensor:
        first, second, third = self.blocks
        x = F.linear(x, third.up.weight[:WIDTH])
        x = second(first(x))
        x = x + F.linear(x, first.up.weight.T[:, :WIDTH], first.down.bias)
        return F.linear(torch.tanh(F.linear(third(x), second.up.weight)), second.up.weight.T)


@dataclass
class Holder:
    """Where a user keeps a parameter."""

    weight: nn.Parameter


class KeptElsewhere(Stack):
    """Parameters of blocks in a list, a closure, a dataclass and a dict, used by the root."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [block.up.bias for block in self.blocks]
        self.held = Holder(self.blocks[1].down.weight)
        weight = self.blocks[2].up.weight
        self.closure = lambda x: F.linear(x, weight)

    def through(self, x: Tensor, step: int) -> Tensor:
        x = self.closure(x) + self.listed[0] * self.listed[1]
        x = F.linear(x, self.held.weight)
        return super().through(x, step) + self.listed[2][:WIDTH]


class WeightsAsArguments(Stack):
    """Each block gets its neighbour's weight as an argument, positional or by name."""

    class Taking(Block):
        def forward(self, x: Tensor, weight: Tensor, *, bias: Tensor) -> Tensor:
            return super().forward(x) + F.linear(torch.tanh(F.linear(x, weight, bias)), weight.t())

    def make_block(self) -> nn.Module:
        return self.Taking()

    def through(self, x: Tensor, step: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            other = self.blocks[(index + 1) % 3]
            x = block(x, other.up.weight, bias=other.up.bias)
        return x


class UsedByLoss(Stack):
    """The loss adds a penalty on all parameters, as L2 regularisation by hand does."""


def penalised_loss(model: nn.Module) -> LossFn:
    """Squared distance and squared parameters."""

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        total, count = regression_loss(model)(output, batch)
        penalty = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
        return total + 0.1 * count * penalty, count

    return loss


class ViewTakenEarly(Stack):
    """A transposed view is taken before the blocks run and used after."""

    def through(self, x: Tensor, step: int) -> Tensor:
        views = [block.up.weight.T for block in self.blocks]  # each [D, 2D]
        x = super().through(x, step)
        for view in views:
            x = torch.tanh(x @ view * view.sum()) @ view.T
        return x


class ViewKeptByBlock(Stack):
    """A block leaves a view of its weight in an attribute, which the root uses after it."""

    class Leaving(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.left = self.up.weight.T  # [D, 2D]
            return super().forward(x)

    def make_block(self) -> nn.Module:
        return self.Leaving()

    def through(self, x: Tensor, step: int) -> Tensor:
        x = super().through(x, step)
        return torch.tanh(x @ self.blocks[0].left) @ (self.blocks[1].left * 2).T


class DetachedViews(Stack):
    """The root uses detached weights of blocks: no gradient flows through those uses."""

    def through(self, x: Tensor, step: int) -> Tensor:
        x = x * self.blocks[0].down.bias.detach() + x
        x = super().through(x, step)
        return x + F.linear(torch.tanh(F.linear(x, self.blocks[1].up.weight.data)), self.blocks[0].down.weight.detach())


class DetachedByBlock(Stack):
    """A block returns a detached view of its parameter beside its output."""

    class Returning(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.up.bias.detach()

    def make_block(self) -> nn.Module:
        return self.Returning()

    def through(self, x: Tensor, step: int) -> Tensor:
        biases = []
        for block in self.blocks:
            x, bias = block(x)
            biases.append(bias)
        return x * torch.stack(biases).mean()


class ConcatenatedWeights(Stack):
    """Parameters of two blocks are concatenated, multiplied and stacked in the root."""

    def through(self, x: Tensor, step: int) -> Tensor:
        first, second, third = self.blocks
        joined = torch.cat([first.up.weight, second.up.weight])  # [4D, D]
        mixed = torch.stack([first.up.bias, third.up.bias]).prod(0)  # [2D]
        x = F.linear(torch.tanh(F.linear(x, joined)), joined.T)
        return super().through(x, step) + mixed[:WIDTH] * (first.down.bias * second.down.bias)


class Parametrized(Stack):
    """Weight norm, spectral norm and an own parametrization, inside and outside blocks."""

    class Symmetric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, weight: Tensor) -> Tensor:
            return self.scale * (weight + weight.T)

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            parametrizations.weight_norm(block.up)
        # In train mode its power iteration would depend on how many batches a process has seen.
        parametrizations.spectral_norm(self.blocks[1].down).parametrizations.weight.eval()
        parametrize.register_parametrization(self.head, "weight", self.Symmetric())
        parametrize.register_parametrization(self.stem, "weight", self.Symmetric())

    def through(self, x: Tensor, step: int) -> Tensor:
        with parametrize.cached():
            return F.linear(super().through(super().through(x, step), step), self.stem.weight)


class OldWeightNorm(Stack):
    """The deprecated weight norm: hooks that set a plain tensor as the layer's weight."""

    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.utils.weight_norm(self.up)

    def make_block(self) -> nn.Module:
        return self.Normed()


class FunctionalCall(Stack):
    """Blocks run by `torch.func.functional_call` with parameters computed from theirs."""

    def through(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            scaled = {name: 0.5 * parameter for name, parameter in block.named_parameters()}
            x = torch.func.functional_call(block, scaled, (x,))
        return torch.func.functional_call(self.blocks[0], dict(self.blocks[2].named_parameters()), (x,))


# Mostly frozen models


class AdaptedBlock(Block):
    """A frozen block with a small trainable adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapter_a = nn.Linear(WIDTH, 2, bias=False)
        self.adapter_b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter_b(self.adapter_a(x))


class Adapters(Stack):
    """Everything is frozen but an adapter in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.head.requires_grad_(False)

    def make_block(self) -> nn.Module:
        return AdaptedBlock()


class LastAdapter(Adapters):
    """Only the last block's adapter is trainable."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:2].requires_grad_(False)


class HeadOnly(Stack):
    """Only the head is trainable."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)


class EmbeddingOnly(Stack):
    """Only the first embedding is trainable: every block is frozen but the gradient passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)

    def through(self, x: Tensor, step: int) -> Tensor:
        return super().through(x + self.embedding(words(x)).mean(1), step)


class FrozenMiddle(Stack):
    """The middle block is frozen, and the first and last are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


# Odd shapes


class OddShapes(Stack):
    """0-d, 1-element, prime-sized and empty parameters; a group with empty ones alone."""

    class Sizes(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.9))
            self.single = nn.Parameter(torch.ones(1, 1))
            self.prime = nn.Parameter(torch.linspace(0, 1, 13))
            self.empty = nn.Parameter(torch.empty(0, 4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale * self.single + self.prime.mean() + self.empty.sum()

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, self.empty])

    def make_block(self) -> nn.Module:
        return self.Sizes()

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.Empty())


# Buffers


class Buffers(Stack):
    """Batch norm, integer, non-persistent, shared and replaced buffers, and one that is a view of another."""

    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("cache", torch.zeros(1, WIDTH), persistent=False)
            self.register_buffer("base", torch.arange(12.0).view(2, 6) / 12)
            self.register_buffer("view", self.base[1])
            self.register_buffer("nothing", None)

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.cache = x.detach().mean(0, keepdim=True)
            return super().forward(self.norm(x)) + self.cache + self.view * self.base[0]

    def make_block(self) -> nn.Module:
        return self.Normed()


class OddBuffers(Stack):
    """Transposed, expanded, complex and empty buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("transposed", torch.arange(12.0).view(6, 2).T / 12)
        self.register_buffer("expanded", torch.ones(1).expand(WIDTH))
        self.register_buffer("rotations", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.bool))
        self.register_buffer("empty", torch.empty(0))

    def through(self, x: Tensor, step: int) -> Tensor:
        rotated = torch.view_as_complex(x.view(-1, 3, 2)) * self.rotations.to(torch.complex128)
        x = torch.view_as_real(rotated).flatten(1) + self.transposed.sum(0) * self.expanded
        return super().through(x.masked_fill(~self.mask, 0), step)


PARAMETER_CASES = (
    OddCase(TiedBlocks, num_ranks=3),
    OddCase(TiedAcrossContainers),
    OddCase(RegisteredTwice),
    OddCase(ThreeWayTie),
    OddCase(FunctionalHead, num_ranks=3),
    OddCase(KeptElsewhere),
    OddCase(WeightsAsArguments),
    OddCase(UsedByLoss, penalised_loss),
    OddCase(ViewTakenEarly),
    OddCase(ViewKeptByBlock),
    OddCase(DetachedViews),
    OddCase(DetachedByBlock),
    OddCase(ConcatenatedWeights, num_ranks=3),
    OddCase(Parametrized),
    OddCase(OldWeightNorm),
    OddCase(FunctionalCall),
    OddCase(Adapters),
    OddCase(LastAdapter, num_ranks=3),
    OddCase(HeadOnly),
    OddCase(EmbeddingOnly),
    OddCase(FrozenMiddle),
    OddCase(OddShapes, num_ranks=3),
    OddCase(Buffers),
    OddCase(OddBuffers),
)
