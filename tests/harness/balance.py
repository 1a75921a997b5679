"""Losses and biases of routers in one plain process, by their formulas: the other side of tests of the balance.

The plain side has nothing of the library. Hooks see what routers and experts are called with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.models import ModelCase
from harness.moe import HIDDEN, NUM_EXPERTS, make_experts
from harness.reference import Trace, own_loss
from harness.tensor import CLIP_NORM, SEED, batches_of, train_plainly
from harness.training import Overrides, make_config, make_optimizer
from shardwise import initialize
from shardwise.runtime.float64 import float64_throughout

LENGTH = 12  # of all sequences, so that batches can be joined


@dataclass
class WatchedRouters:
    """What the routers and experts of a model were called with in its last forward, by layer."""

    model: nn.Module
    logits: dict[str, Tensor] = field(default_factory=dict)
    index: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, module in self.model.named_modules():
            parent, _, own = name.rpartition(".")
            if own in ("gate", "router"):
                module.register_forward_hook(partial(self._see_logits, parent))
            elif own == "experts":
                module.register_forward_pre_hook(partial(self._see_index, parent))

    def _see_logits(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.logits[name] = output[0] if isinstance(output, tuple) else output

    def _see_index(self, name: str, module: nn.Module, args: Any) -> None:
        self.index[name] = args[1]

    def layers(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, index in self.index.items():
            yield name, self.logits[name], index

    def counts(self) -> dict[str, Tensor]:
        """How many tokens each expert got, by layer."""
        return {name: F.one_hot(index, logits.shape[-1]).sum((0, 1)).double() for name, logits, index in self.layers()}


def router_loss(routers: WatchedRouters, num_groups: int, aux: float, z: float) -> Tensor:
    """The weighted losses of routers, of groups of tokens that come one after the other; a mean over groups, layers."""
    terms = []
    for _, logits, index in routers.layers():
        num_experts = logits.shape[-1]
        for part, chosen in zip(logits.chunk(num_groups), index.chunk(num_groups), strict=True):
            shares = F.one_hot(chosen, num_experts).sum(1).double().mean(0)
            probabilities = (part.exp() / part.exp().sum(-1, keepdim=True)).mean(0)
            terms.append(
                aux * num_experts * (shares * probabilities).sum() + z * (part.exp().sum(-1).log() ** 2).mean()
            )
    return torch.stack(terms).mean()


def fixed_length(case: ModelCase, num_joined: int = 1) -> ModelCase:
    """The case with batches of one length, each of which is as many of its batches as `num_joined`, one by one."""

    def batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
        values = {"labels": -100, "attention_mask": 0, "input_ids": 0}
        parts = [case.batch(seed * num_joined + number, num_samples, dtype) for number in range(num_joined)]
        return {
            key: torch.cat([F.pad(part[key], (0, LENGTH - part[key].shape[1]), value=value) for part in parts])
            for key, value in values.items()
        }

    return replace(case, batch=batch)


def balanced(case: ModelCase, aux: float, z: float, by_sequence: bool = False) -> ModelCase:
    """The case with the losses of routers added to its own, weighted by its targets."""
    watched: list[WatchedRouters] = []

    def make() -> nn.Module:
        model = case.make()
        watched.append(WatchedRouters(model))
        return model

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        routers = watched[-1]
        total, count = own_loss(routers.model, output, batch) if case.loss is None else case.loss(output, batch)
        num_groups = len(batch["input_ids"]) if by_sequence else 1
        return total + count * router_loss(routers, num_groups, aux, z), count

    return replace(case, make=make, loss=loss)


BIASES = ("e_score_correction_bias", "expert_bias")


def biases_of(model: nn.Module) -> dict[str, Tensor]:
    """The biases of a model's routers, buffers or parameters, by name."""
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return {name: tensor for name, tensor in tensors.items() if name.endswith(BIASES)}


def moving_biases(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """An optimizer after whose steps biases move by what the forwards since the last step have chosen."""
    routers = WatchedRouters(model)
    counts: dict[str, Tensor] = {}

    def count(*given: Any) -> None:
        for name, chosen in routers.counts().items():
            counts[name] = counts.get(name, 0) + chosen

    def move(*given: Any) -> None:
        for name, count in counts.items():
            (bias,) = (bias for own, bias in biases_of(model).items() if own.startswith(f"{name}."))
            bias.data += rate * (count.mean() - count).sign().view_as(bias)
        counts.clear()

    model.register_forward_hook(count)
    optimizer = make_optimizer(model)
    optimizer.register_step_post_hook(move)
    return optimizer


def train_with_biases(
    rank: int, world_size: int, case: ModelCase, num_micro_batches: int, num_steps: int, overrides: Overrides
) -> Trace:
    """Train on one rank of a mesh, with an evaluation after each step; the trace has routers' biases as parameters."""
    settings = {"optimizer": {"clip_norm": CLIP_NORM}, "run": {"seed": SEED}, **overrides}
    model = case.build(torch.float64, seed=rank)
    results = []
    with float64_throughout(), initialize(model, make_config(num_micro_batches, settings)) as engine:
        for step in range(num_steps):
            results.append(engine.train_step(batches_of(engine, case, step, num_micro_batches)))
            engine.eval_step(batches_of(engine, case, num_steps + step, 1))
        parameters = {name: engine.read(name) for name, _ in model.named_parameters()}
        parameters |= {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith(BIASES)}
    return Trace([each.loss for each in results], [each.grad_norm for each in results], {}, parameters)


def train_with_biases_plainly(
    case: ModelCase, num_data_ranks: int, num_micro_batches: int, num_steps: int, rate: float
) -> Trace:
    """What `train_with_biases` does, by one plain process and without evaluations."""
    models: list[nn.Module] = []
    optimizer_of = partial(moving_biases, rate=rate)
    trace = train_plainly(case, num_data_ranks, num_micro_batches, num_steps, CLIP_NORM, models.append, optimizer_of)
    return replace(trace, parameters={**trace.parameters, **biases_of(models[-1])})


class ChainBlock(nn.Module):
    """A layer of experts of an `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts = make_experts("mixtral")
        for parameter in self.experts.parameters():
            parameter.data *= 0.2

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, HIDDEN)
        weights, index = self.gate(tokens).softmax(-1).topk(2)
        computed: Tensor = self.experts(tokens, index, weights)
        return x + computed.view_as(x)


def chain_case() -> ModelCase:
    """A chain of three layers of experts, whose loss says how much counts."""

    def batch(seed: int, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_samples, 4 + seed % 2, HIDDEN, generator=generator, dtype=torch.float64)
        return x.to(dtype), x.sum(-1).to(dtype)

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        return (output.sum(-1) - batch[1]).square().sum(), batch[1].numel()

    return ModelCase("chain", lambda: nn.Sequential(*(ChainBlock() for _ in range(3))), batch, loss)
