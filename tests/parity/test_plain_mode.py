"""The engine's plain mode: the model's own output, any scalar as the loss, boundaries and overflows of the user's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.training import make_config
from shardwise import Engine, initialize

STEPS, MICRO, LR = 3, 2, 0.05


class Tower(nn.Module):
    """Return a dict, as models of transformers do; `norm` belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return {"hidden": self.norm(x) * scale}


def tower() -> Tower:
    torch.manual_seed(3)
    return Tower().double()


def inputs_of(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 100 + micro * 10 + rank)
    return torch.randn(2, 6, dtype=torch.float64, generator=generator)


def loss_of(output: dict[str, Tensor]) -> Tensor:
    return output["hidden"].pow(3).sum() / MICRO


def config(stage: int, **sections: Any) -> dict[str, Any]:
    return make_config(MICRO, {"zero": {"stage": stage}, **sections})


def expected(world_size: int, clip: float | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Train by hand: the mean over ranks of the sum over micro-batches."""
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        total = sum(
            loss_of(model(inputs_of(step, micro, rank))) for rank in range(world_size) for micro in range(MICRO)
        )
        assert isinstance(total, Tensor)
        (total / world_size).backward()
        losses.append(total.item() / world_size)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def by_engine(engine: Engine, loss: Tensor, is_last: bool) -> None:
    engine.backward(loss, is_boundary=is_last)


def by_tensor(engine: Engine, loss: Tensor, is_last: bool) -> None:
    loss.backward()


def train(rank: int, world_size: int, stage: int, backward: Callable[..., None]) -> tuple[list[float], Any]:
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    engine = initialize(model, config(stage, optimizer={"clip_norm": 0.5}), optimizer=optimizer)
    losses = []
    for step in range(STEPS):
        for micro in range(MICRO):
            output = engine(x=inputs_of(step, micro, rank))
            assert set(output) == {"hidden"}
            with torch.no_grad():
                engine.forward(inputs_of(step, micro, rank), scale=2.0)  # an evaluation in between
            backward(engine, loss_of(output), micro == MICRO - 1)
        losses.append(engine.step().loss)
    assert engine.optimizer is optimizer
    engine.close()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("backward", [by_engine, by_tensor])
def test_any_scalar_equals_one_process(ranks: WorkerPool, stage: int, backward: Callable[..., None]) -> None:
    losses, parameters = expected(2, clip=0.5)
    for found, trained in ranks(2).run(train, stage, backward):
        if backward is by_engine:
            assert found == pytest.approx(losses, rel=1e-12)
        else:
            assert all(loss != loss for loss in found)  # what the loss was is not known
        for name, parameter in parameters.items():
            torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-9, atol=1e-12)


def skip_overflow(rank: int, world_size: int) -> None:
    model = tower()
    engine = initialize(model, config(3, run={"on_nonfinite": "skip"}))
    before = engine.read("norm.weight")
    engine.backward(engine(x=inputs_of(0, 0, rank))["hidden"].sum() * (float("inf") if rank == 1 else 1.0))
    result = engine.step(partial=True)
    assert result.skipped
    assert before is not None
    torch.testing.assert_close(engine.read("norm.weight"), before, rtol=0, atol=0)
    engine.backward(engine(x=inputs_of(0, 0, rank))["hidden"].sum())
    assert not engine.step(partial=True).skipped


def test_skips_a_step_that_is_not_finite_on_any_rank(ranks: WorkerPool) -> None:
    ranks(2).run(skip_overflow)


def only_evaluate(rank: int, world_size: int, stage: int) -> None:
    model = tower()
    wanted = copy.deepcopy(model)(inputs_of(0, 0, 0))["hidden"].detach()
    engine = initialize(model, config(stage, optimizer={"name": "none"}))
    output = engine(x=inputs_of(0, 0, 0))["hidden"]
    torch.testing.assert_close(output, wanted, rtol=0, atol=0)
    assert not output.requires_grad
    assert "exp_avg" not in engine.states_of("norm.weight")
    with refused("evaluates-only"):
        engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_without_an_optimizer_holds_parameters_alone(ranks: WorkerPool, stage: int) -> None:
    ranks(2).run(only_evaluate, stage)


def distill(rank: int, world_size: int) -> float:
    """Train one engine against another one that only evaluates, and two engines by one loss.backward()."""
    student, teacher, head = tower(), tower(), tower()
    first = initialize(student, config(3))
    second = initialize(teacher, config(3, optimizer={"name": "none"}))
    third = initialize(head, config(3))
    x = inputs_of(0, 0, 0)
    (third(x=first(x=x)["hidden"])["hidden"] - second(x=x)["hidden"]).square().mean().backward()
    return first.step(partial=True).grad_norm + third.step(partial=True).grad_norm


def test_one_backward_through_several_engines(ranks: WorkerPool) -> None:
    student, teacher, head = tower(), tower(), tower()
    x = inputs_of(0, 0, 0)
    (head(student(x)["hidden"])["hidden"] - teacher(x)["hidden"]).square().mean().backward()
    norms = [torch.stack([p.grad.norm() for p in model.parameters()]).norm() for model in (student, head)]  # type: ignore[union-attr]
    for found in ranks(2).run(distill):
        assert found == pytest.approx(float(norms[0] + norms[1]), rel=1e-9)


def mixes(rank: int, world_size: int) -> None:
    case = CASES["transformer"]
    batch: Sequence[Any] = make_batches(case, num_steps=1, world_size=1, num_micro_batches=1)[0][0]
    engine = initialize(case.build(torch.float64, seed=0), make_config(1, {"zero": {"stage": 2}}), loss_fn=case.loss)
    loss = engine(batch[0])
    with refused("loss-not-from-engine"):
        engine.backward(loss / 2)
    engine.backward(loss)
    with refused("losses-mixed"):
        engine.backward(engine.forward(**batch[0]).sum())


def test_refuses_losses_of_both_modes_in_one_step(ranks: WorkerPool) -> None:
    ranks(1).run(mixes)
