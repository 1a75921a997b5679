"""Training odd models with the engine on one rank: variants of the layout, and short ways to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from harness.odd_models import CASES, LossFn, OddCase, Stack, make_batches, regression_loss
from harness.odd_models.base import NUM_MICRO_BATCHES
from harness.reference import Trace, train_reference
from harness.training import make_config, own_gradients
from shardwise import Engine, initialize

NUM_STEPS = 2
TIMEOUT_S = 60.0
SGD: Final = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}

VARIANTS: Final[Mapping[str, Any]] = {
    "0": {"zero": {"stage": 0}},
    "1": {"zero": {"stage": 1}},
    "2": {"zero": {"stage": 2}},
    "3": {"zero": {"stage": 3}},
    "recompute": {"zero": {"stage": 3}, "recompute": {"mode": "full"}},
    "interleaved": {"zero": {"stage": 3}},
}


def train_odd(rank: int, world_size: int, name: str, variants: list[str]) -> list[Trace]:
    """Train one case on this rank's share of the batches, once in each variant."""
    return [_train(rank, world_size, CASES[name], variant) for variant in variants]


def engine_of(
    model: nn.Module,
    overrides: Mapping[str, Any],
    loss_fn: LossFn | None = None,
    accumulation: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
) -> Engine:
    """An engine in float64 on the CPU; the loss is a regression's unless another is given."""
    config = make_config(accumulation, {"run": {"device": "cpu", "timeout_s": TIMEOUT_S}, **overrides})
    return initialize(model, config, loss_fn=loss_fn or regression_loss(model), optimizer=optimizer)


def sgd_engine(stage: int, seed: int = 0, kind: type[nn.Module] = Stack, **sections: Any) -> Engine:
    """An engine of a case's model that takes plain SGD steps."""
    return engine_of(OddCase(kind).build(seed), {"zero": {"stage": stage}, "optimizer": SGD, **sections})


def batch_of(step: int, rank: int, num_samples: int = 2) -> dict[str, Any]:
    """One batch; another for another step or rank."""
    return make_batches(step + 1, rank + 1, num_samples)[step][rank][0]


def all_ranks(world_size: int, num_steps: int = NUM_STEPS) -> list[list[dict[str, Any]]]:
    """`batch_of` every rank, by step."""
    return [[batch_of(step, rank) for rank in range(world_size)] for step in range(num_steps)]


def plain_losses(seed: int, steps: list[list[dict[str, Any]]], kind: type[nn.Module] = Stack) -> list[float]:
    """The losses of plain SGD on the batches of all ranks together."""
    model = OddCase(kind).build(seed)
    return train_reference(model, steps, regression_loss(model), plain_sgd).losses


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """What `SGD` configures, in plain torch."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def whole_parameters(engine: Engine) -> dict[str, Tensor]:
    """Clones of all parameters, gathered."""
    with engine.gathered():
        return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


def _train(rank: int, world_size: int, case: OddCase, variant: str) -> Trace:
    # Other ranks start from other weights: rank 0's are everybody's.
    model = case.build(seed=rank)
    engine = engine_of(model, VARIANTS[variant], case.make_loss(model), NUM_MICRO_BATCHES)
    losses, norms, gradients = [], [], {}
    for step in make_batches(NUM_STEPS, world_size):
        _accumulate(engine, step[rank], is_interleaved=variant == "interleaved")
        gradients = own_gradients(engine)
        result = engine.step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
    scale = engine.parts.losses.normaliser / result.count
    parameters = whole_parameters(engine)
    engine.close()
    return Trace(losses, norms, {name: gradient * scale for name, gradient in gradients.items()}, parameters)


def _accumulate(engine: Engine, batches: list[Any], is_interleaved: bool) -> None:
    """Forward and backward by turns; or all forwards first, with evaluations in between."""
    if not is_interleaved:
        for batch in batches:
            engine.backward(engine(batch))
        return
    losses = [engine(batch) for batch in batches]
    for loss, batch in zip(losses, batches, strict=True):
        engine.eval_step([batch])
        engine.backward(loss)
