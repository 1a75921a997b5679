"""`deepspeed.checkpointing`: gradients as without it, inputs on the host, random states by name."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise.compat.deepspeed as deepspeed
from shardwise.compat.deepspeed import checkpointing
from shardwise.compat.deepspeed.runtime.activation_checkpointing import checkpointing as other_path
from shardwise.config.errors import ConfigError


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    checkpointing.configure(None)
    yield
    checkpointing.configure(None)
    checkpointing.get_cuda_rng_tracker().reset()


def gradients(model: nn.Module, is_checkpointed: bool) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *, scale: Tensor) -> Tensor:
        return torch.dropout(model(x) * scale, 0.5, train=True)

    y = checkpointing.checkpoint(run, x, scale=scale) if is_checkpointed else run(x, scale=scale)
    y.square().sum().backward()
    return [each.grad for each in (x, scale, *model.parameters()) if each.grad is not None]


@pytest.mark.parametrize("config", [None, {"activation_checkpointing": {"cpu_checkpointing": True}}])
def test_gradients_are_those_without(config: dict[str, Any] | None) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    expected = gradients(model, False)
    model.zero_grad()
    checkpointing.configure(None, deepspeed_config=config)
    found = gradients(model, True)
    assert len(found) == 4
    assert all(map(torch.equal, found, expected))


def test_inputs_on_the_host_are_saved_by_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Tensor] = []

    def saving(pin_memory: bool) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(tensor) or tensor, lambda kept: kept
        )

    monkeypatch.setattr(checkpointing, "save_on_cpu", saving)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    gradients(model, True)
    assert saved == []
    checkpointing.configure(None, checkpoint_in_cpu=True)
    gradients(model, True)
    assert [each.shape for each in saved[:2]] == [(4, 6), (6,)]  # the inputs alone


def test_an_engine_trains_as_without() -> None:
    class Model(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
            self.on = on

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = deepspeed.checkpointing.checkpoint(block, x) if self.on else block(x)
            return x

    def losses(on: bool, in_cpu: bool) -> list[float]:
        checkpointing.configure(None, checkpoint_in_cpu=in_cpu)
        config = {"train_batch_size": 3, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
        engine, *_ = deepspeed.initialize(model=Model(on), config=config)
        found = []
        for _ in range(3):
            loss = engine(torch.ones(3, 4, requires_grad=True)).square().sum()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.destroy()
        return found

    assert losses(True, False) == losses(True, True) == losses(False, False)


def test_both_paths_have_one_state() -> None:
    checkpointing.configure(None, partition_activations=True)
    assert other_path.is_configured()
    assert other_path.get_cuda_rng_tracker() is checkpointing.get_cuda_rng_tracker()
    checkpointing.reset()


def test_random_states_by_name() -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    checkpointing.configure(SimpleNamespace(get_model_parallel_rank=lambda: 3))
    checkpointing.model_parallel_cuda_manual_seed(7)
    before = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(2)
    states = tracker.get_states()
    with tracker.fork():
        second = torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(7 + 2718 + 3))
    assert torch.equal(torch.cat([first, second]), expected)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(2), second)
    with pytest.raises(ConfigError, match="there already"):
        tracker.add("model-parallel-rng", 1)
    tracker.reset()
    with pytest.raises(ConfigError, match="no random state"), tracker.fork():
        pass
