"""The order of a script's calls: zero_grad, backwards of two kinds and inside hooks, failures, saves.

A script is a row of characters. Each is one call on the engine, and does on plain torch what it says: f forward of the
next batch, b engine.backward of its loss, r the same with retain_graph, t loss.backward(), x a backward that raises,
c a backward whose hook runs forwards and backwards, z engine.zero_grad(), o that of the optimizer, m that of the model,
s engine.step(), w a save.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise.compat.deepspeed as deepspeed
from harness.pool import WorkerPool

LR = 0.1


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ZeroDivisionError("of the user")


def tower() -> Tower:
    torch.manual_seed(3)
    return Tower().double()


def batch(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(number * 10 + rank)
    return torch.randn(4, 6, dtype=torch.float64, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    return (output @ output.T).logsumexp(1).mean()


def cached_loss(model: Any, x: Tensor) -> Tensor:
    """Return a loss whose backward runs the model on halves of the batch, as libraries of embeddings do."""
    with torch.no_grad():
        features = [model(part) for part in x.split(2)]
    leaves = [each.detach().requires_grad_() for each in features]
    loss = loss_of(torch.cat(leaves))
    gradients = torch.autograd.grad(loss, leaves)

    def hook(scale: Tensor) -> None:
        with torch.enable_grad():
            for part, gradient in zip(x.split(2), gradients, strict=True):
                ((model(part) * gradient).sum() * scale).backward()

    loss = loss.detach().requires_grad_()
    loss.register_hook(hook)
    return loss


def run(script: str, rank: int, accumulation: int, config: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """Run a script on an engine; return the parameters."""
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine, lent, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation, **config},
    )
    number, output = 0, torch.empty(0)
    for sign in script:
        match sign:
            case "f":
                output = engine(batch(number, rank))
                number += 1
            case "b":
                engine.backward(loss_of(output))
            case "r":
                engine.backward(output.square().mean(), retain_graph=True)
            case "t":
                loss_of(output).backward()
            case "c":
                engine.backward(cached_loss(engine, batch(number, rank)))
                number += 1
            case "x":
                with pytest.raises(ZeroDivisionError):
                    engine.backward(Fails.apply(model.blocks[0](batch(0, rank))).sum() + loss_of(output))
            case "z" | "o" | "m":
                {"z": engine, "o": lent, "m": model}[sign].zero_grad()
            case "s":
                engine.step()
            case "w":
                engine.save_checkpoint(folder / f"{script}{accumulation}{config['zero_optimization']}")
    found = {name: engine.inner.read(name) for name, _ in model.named_parameters()}
    engine.destroy()
    return found


def expected(script: str, world_size: int, accumulation: int, stage: int) -> dict[str, Tensor]:
    """Run it on plain torch; gradients that `step` has counted stay in stages 2 and 3, as in DeepSpeed."""
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    number, num_steps, is_counted = 0, 0, False
    for sign in script:
        number += sign in "fc"
        outputs = [model(batch(number - 1, rank)) for rank in range(world_size)] if sign in "bctr" else []
        for output in outputs:
            loss = output.square().mean() if sign == "r" else loss_of(output)
            (loss / world_size / accumulation).backward()
        if sign in "zom" and not (is_counted and stage >= 2):
            optimizer.zero_grad()
        if sign in "bctrx":
            is_counted = False
        if sign == "s":
            num_steps, is_counted = num_steps + 1, True
            if num_steps % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


SCRIPTS = {
    1: (
        "fzbs",
        "fbzfbs",
        "frzbs",
        "fbofbs",
        "fbmfbs",
        "fbfts",
        "ftfbs",
        "fxzfbs",
        "cs",
        "ccsfbs",
        "fbzsfbs",
        "fbzcs",
        "sfbs",
        "fbsfsfbs",
    ),
    2: (
        "fbsfbs",
        "fbsfzbs",
        "fbszfbs",
        "fbsofbs",
        "fbsfbzfbs",
        "fbsfts",
        "ftsfbs",
        "cscs",
        "fbscs",
        "fbswfbs",
        "fxzfbsfbs",
        "fssfbsfbs",
    ),
}


def differences(rank: int, world_size: int, stage: int, more: dict[str, Any], folder: Path) -> dict[str, float]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 8, **more.pop("zero", {})}
    config = {"gradient_clipping": 0.0, "zero_force_ds_cpu_optimizer": False, "zero_optimization": zero, **more}
    found = {}
    for accumulation, scripts in SCRIPTS.items():
        for script in scripts:
            got = run(script, rank, accumulation, config, folder)
            want = expected(script, world_size, accumulation, stage)
            found[f"{script}/{accumulation}"] = max((got[name] - want[name]).abs().max().item() for name in want)
    return found


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (0, {}),
        (1, {}),
        (2, {}),
        (3, {}),
        (2, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
        (3, {"shardwise": {"recompute": {"mode": "full"}}}),
    ],
)
def test_calls_in_any_order_mean_what_they_mean_in_plain_torch(
    ranks: WorkerPool, stage: int, more: dict[str, Any], tmp_path: Path
) -> None:
    for found in ranks(2).run(differences, stage, more, tmp_path):
        assert not {name: each for name, each in found.items() if not each <= 1e-9}
