"""Memory that runs out inside the engine: handlers see torch's class, people what holds it and what would help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Engine, initialize
from shardwise.runtime.memory_tracker import is_out_of_memory

CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"


def fail_with(error: BaseException) -> None:
    raise error


class FailingBackward(torch.autograd.Function):
    """The identity, whose backward runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise torch.OutOfMemoryError(CUDA_TEXT)


class Net(nn.Module):
    """A linear layer; `then` sees its output, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 4)
        self.then: Callable[[Tensor], Tensor] = lambda output: output

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x))


def make_engine() -> Engine:
    config = {"run": {"device": "cpu"}, "batch": {"micro_size": 4, "accumulation": 1}}
    return initialize(Net(), config, loss_fn=lambda output, batch: output.square().mean())


def train(engine: Engine) -> None:
    engine.train_step([torch.ones(4, 256)])


def fail_in_forward(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.model.then = lambda output: fail_with(torch.OutOfMemoryError(CUDA_TEXT))


def fail_in_backward(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.model.then = FailingBackward.apply


def fail_in_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.optimizer, "step", lambda: fail_with(torch.OutOfMemoryError(CUDA_TEXT)))


@pytest.mark.parametrize("arrange", [fail_in_forward, fail_in_backward, fail_in_step])
def test_it_is_torchs_error_with_the_table_and_the_settings(arrange, monkeypatch) -> None:
    engine = make_engine()
    arrange(engine, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(engine)
    headline, *lines = str(raised.value).splitlines()
    assert headline.startswith(f"out of memory on rank 0 in step 1: {CUDA_TEXT}; try ")
    assert lines.count("what it holds:") == 1
    assert any(line.split()[0] == "parameters" and "GiB" in line for line in lines)
    assert any(line.startswith("  batch.micro_size=2 batch.accumulation=2: ") for line in lines)
    assert type(raised.value.__cause__) is torch.OutOfMemoryError
    assert str(raised.value.__cause__) == CUDA_TEXT


def test_the_engine_goes_on_after_a_forward_that_did_not_fit() -> None:
    engine = make_engine()
    fit, engine.model.then = engine.model.then, lambda output: fail_with(torch.OutOfMemoryError(CUDA_TEXT))
    with pytest.raises(torch.OutOfMemoryError):
        train(engine)
    engine.model.then = fit
    engine.zero_grad()
    assert engine.train_step([torch.ones(2, 256)]).step == 1


def test_evaluation_and_gathered_parameters_are_explained_too() -> None:
    engine = make_engine()
    with pytest.raises(torch.OutOfMemoryError, match="what it holds"), engine.gathered():
        fail_with(torch.OutOfMemoryError(CUDA_TEXT))
    engine.model.then = lambda output: fail_with(torch.OutOfMemoryError(CUDA_TEXT))
    with pytest.raises(torch.OutOfMemoryError, match="what it holds"):
        engine.eval_step([torch.ones(4, 256)])


def test_the_hosts_memory_counts_too() -> None:
    engine = make_engine()
    engine.model.then = lambda output: torch.empty(2**56)
    with pytest.raises(torch.OutOfMemoryError, match=r"step 1: DefaultCPUAllocator: .*; try "):
        train(engine)
    engine.model.then = lambda output: fail_with(MemoryError())
    with pytest.raises(MemoryError, match="step 1: MemoryError; try "):
        train(engine)


def test_what_was_explained_within_is_not_explained_again(monkeypatch) -> None:
    engine = make_engine()
    engine.model.then = lambda output: output * torch.inf  # the search for the first bad module runs forward in `step`
    forward = engine.parts.sharding.finish

    def finish() -> None:
        forward()
        engine.model.then = lambda output: fail_with(torch.OutOfMemoryError(CUDA_TEXT))

    monkeypatch.setattr(engine.parts.sharding, "finish", finish)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(engine)
    assert str(raised.value).count("out of memory on rank 0") == 1


def test_other_failures_stay_what_they_are() -> None:
    engine = make_engine()
    engine.model.then = lambda output: output @ torch.ones(3)
    with pytest.raises(RuntimeError, match="size") as raised:
        train(engine)
    assert not isinstance(raised.value, torch.OutOfMemoryError)
    assert not is_out_of_memory(raised.value)
