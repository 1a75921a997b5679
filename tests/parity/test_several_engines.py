"""Several engines in one process, with a loss in common, equal one plain process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.models import ResidualMLP
from harness.pool import WorkerPool
from harness.reference import max_error
from harness.refusals import refused
from harness.training import LR, make_config
from shardwise import backward, initialize

NUM_STEPS = 3
WIDTH = 10


def build(seed: int) -> ResidualMLP:
    torch.manual_seed(seed)
    return ResidualMLP().double()


def inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)


def common_loss(encoder: nn.Module, decoder: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
    """The decoder reads the encoder's output, and both learn through a frozen teacher."""
    y = decoder(encoder(x))
    return (teacher(y) - teacher(x)).square().mean() + y.square().mean()


def own_loss(output: Tensor, batch: Tensor) -> Tensor:
    return (output - batch).square().mean()


def train(rank: int, world_size: int, stages: tuple[int, int, int]) -> list[dict[str, Tensor]]:
    """Two backwards a step: one of the encoder's own loss, one in common; the decoder steps with both."""
    models = [build(seed) for seed in range(3)]
    models[2].requires_grad_(False)
    overrides = [{"zero": {"stage": stage}, "run": {"device": "cpu", "timeout_s": 60.0}} for stage in stages]
    engines = [
        initialize(model, make_config(1, override), loss_fn=own_loss)
        for model, override in zip(models, overrides, strict=True)
    ]
    encoder, decoder, _ = engines
    for step in range(NUM_STEPS):
        x = inputs(step, rank)
        encoder.backward(encoder(x))
        backward(common_loss(*models, x), [encoder, decoder])
        results = [encoder.step(), decoder.step()]
        assert [result.count for result in results] == [2 * world_size, world_size]
    found = []
    for engine in engines:
        with engine.gathered() as model:
            found.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return found


def train_plainly(world_size: int) -> list[dict[str, Tensor]]:
    models = [build(seed) for seed in range(3)]
    models[2].requires_grad_(False)
    optimizers = []
    for model in models[:2]:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
        optimizers.append(torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), weight_decay=0.0))
    for step in range(NUM_STEPS):
        batches = [inputs(step, rank) for rank in range(world_size)]
        own = sum((own_loss(models[0](x), x) for x in batches), torch.tensor(0.0))
        common = sum((common_loss(*models, x) for x in batches), torch.tensor(0.0))
        # The encoder's mean is over both losses, the decoder's over the common one.
        (own / (2 * world_size) + common / (2 * world_size)).backward()
        for parameter in models[1].parameters():
            parameter.grad *= 2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [dict(model.named_parameters()) for model in models]


@pytest.mark.parametrize("stages", [(3, 3, 3), (2, 3, 3), (0, 1, 2)])
def test_engines_with_a_loss_in_common(ranks: WorkerPool, stages: tuple[int, int, int]) -> None:
    expected = train_plainly(2)
    for found in ranks(2).run(train, stages):
        for actual, plain in zip(found, expected, strict=True):
            assert max_error(actual, {name: parameter.detach() for name, parameter in plain.items()}) <= 1e-9


def test_frozen_engine_evaluates_but_takes_no_step() -> None:
    model = nn.Linear(4, 1).requires_grad_(False)
    engine = initialize(model, make_config(1, {}), loss_fn=lambda output, _: output.square().mean())
    x = torch.ones(2, 4, dtype=torch.float64)
    assert engine.eval_step([x]).loss == pytest.approx(engine(x).item())
    with refused("all-frozen"):
        engine.backward(engine(x))
    with refused("all-frozen"):
        engine.step()


def test_engines_that_scale_differently_are_refused() -> None:
    engines = [initialize(nn.Linear(4, 1), make_config(1, {}), loss_fn=lambda output, _: output) for _ in range(2)]
    x = torch.ones(1, 4, dtype=torch.float64)
    for engine, count in zip(engines, (1.0, 64.0), strict=True):
        backward(engine.model(x).sum(), [engine], count=count)
    with refused("gradient-scales-differ"):
        backward(engines[0].model(x).sum() + engines[1].model(x).sum(), engines)
    assert [engine.step().count for engine in engines] == [1.0, 64.0]
    backward(engines[0].model(x).sum() + engines[1].model(x).sum(), engines)
    with refused("backward-arguments"):
        backward(engines[0].model(x).sum(), [engines[0], engines[0]])


def test_models_called_directly_may_be_frozen_between_steps() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    engine = initialize(model, make_config(1, {}))
    x = torch.ones(1, 4, dtype=torch.float64)
    backward(model(x).square().sum(), [engine])
    engine.step()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    backward(model(x).square().sum(), [engine])
    engine.step()
    assert torch.equal(model[0].weight, before)


def test_common_loss_must_be_a_scalar() -> None:
    with refused("backward-arguments", "(2,)", "and 0"):
        backward(torch.ones(2), [])
