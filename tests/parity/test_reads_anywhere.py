"""In stage 3 any module may be called and any parameter read, written through `data` too, with the numbers of one
process; memory lives as long as a view of it or a graph."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.pool import WorkerPool
from harness.refusals import refusal_of
from harness.training import make_config
from shardwise import Engine, initialize

STEPS, LR = 2, 0.01
SGD = {"name": "sgd", "lr": LR, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}
LAYOUTS: dict[str, dict[str, Any]] = {
    "device": {"zero": {"stage": 3}},
    "host": {"zero": {"stage": 3}, "tiers": {"params": "host", "optimizer": "host"}},
    "lockstep": {"zero": {"stage": 3, "lockstep": "auto"}},
    "recompute": {"zero": {"stage": 3}, "recompute": {"mode": "full"}},
    "stage 2": {"zero": {"stage": 2}},
}
Call = Callable[..., Tensor]


class Body(nn.Module):
    """Has an embedding and a norm that belong to the root, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))
        self.norm = nn.LayerNorm(6)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.norm(hidden)


class Tower(nn.Module):
    """Takes tokens, or embeddings in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(6, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = tokens if tokens.is_floating_point() else self.body.embed(tokens)
        return self.head(self.body(hidden) + self.frozen(hidden))


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower().double()


TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def distance(model: Tower) -> Tensor:
    return sum(((each - 0.01) ** 2).sum() for each in model.parameters() if each.requires_grad) * 1.0


def orthogonality(model: Tower) -> Tensor:
    weights = [each for each in model.parameters() if each.dim() == 2 and each.requires_grad]
    return torch.stack([(each.T @ each - torch.eye(each.shape[1], dtype=each.dtype)).norm() for each in weights]).sum()


LOSSES: dict[str, Callable[[Call, Tower], Tensor]] = {
    "the whole": lambda call, model: call(TOKENS).pow(2).sum(),
    "body, then head": lambda call, model: model.head(model.body(model.body.embed(TOKENS))).pow(2).sum(),
    "embedding, then the whole": lambda call, model: call(model.body.embed(TOKENS)).pow(2).sum(),
    "one block": lambda call, model: model.body.blocks[1](torch.ones(2, 6).double()).pow(2).sum(),
    "part of a block": lambda call, model: model.body.blocks[2][0](torch.ones(2, 6).double()).pow(2).sum(),
    "distance": lambda call, model: call(TOKENS).pow(2).sum() + distance(model),
    "penalty first": lambda call, model: orthogonality(model) + call(TOKENS).pow(2).sum(),
    "penalty alone": lambda call, model: orthogonality(model) + distance(model),
    "blocks by turns": lambda call, model: (
        sum(
            (first * second).sum()
            for first, second in zip(model.body.blocks[0].parameters(), model.body.blocks[2].parameters(), strict=True)
        )
        + call(TOKENS).pow(2).sum()
    ),
    "functional": lambda call, model: torch.func.functional_call(
        model.head, dict(model.head.named_parameters()), (call(TOKENS) @ model.head.weight,)
    ).sum(),
}


def evaluation_between(call: Call, model: Tower) -> Tensor:
    loss = call(TOKENS).pow(2).sum() + distance(model)
    with torch.no_grad():
        call(TOKENS)
        model.body(model.body.embed(TOKENS))
    return loss


LOSSES["evaluation between"] = evaluation_between


def in_gathered(engine: Engine | Tower, model: Tower) -> Tensor:
    """Build a graph where parameters are whole; its backward comes later."""
    with engine.gathered() if isinstance(engine, Engine) else nullcontext():
        return distance(model) + model(TOKENS).pow(2).sum()


def sgd_step(model: nn.Module) -> None:
    with torch.no_grad():
        for each in model.parameters():
            if each.grad is not None:
                each -= LR * each.grad
                each.grad = None


def train_anyhow(rank: int, world_size: int, sections: dict[str, Any]) -> dict[str, float]:
    """Take a step with each loss, on an engine and on a plain copy; return how far they are apart after each."""
    errors = {}
    with initialize(tower(), make_config(1, {**sections, "optimizer": SGD})) as engine:
        plain = copy.deepcopy(engine.model)
        engine.forward(TOKENS)  # any scalar may be given to `backward` from now on
        for name, loss in {**LOSSES, "in gathered": in_gathered}.items():
            engine.backward(loss(engine if loss is in_gathered else engine.forward, engine.model))
            engine.step()
            loss(plain, plain).backward()
            sgd_step(plain)
            pairs = plain.named_parameters()
            errors[name] = max((engine.read(each) - value).abs().max().item() for each, value in pairs)
    return errors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_read_trains_as_on_one_process(ranks: WorkerPool, layout: str) -> None:
    for errors in ranks(2).run(train_anyhow, LAYOUTS[layout]):
        assert max(errors.values()) < 1e-10, errors


def keep_views(rank: int, world_size: int, stage: int) -> tuple[dict[str, bool], tuple[str, str]]:
    """Take aliases of parameters in many ways, let the engine go on, and compare them with copies of before."""
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, alias: Tensor) -> None:
        kept[name] = alias, alias.detach().clone()

    def is_as_before(alias: Tensor, copied: Tensor) -> bool:  # where parameters are whole, an alias sees the step
        return torch.allclose(alias, copied, atol=0.0 if stage == 3 else 1.0)

    with initialize(tower(), make_config(1, {"zero": {"stage": stage}, "optimizer": SGD})) as engine:
        model, body = engine.model, engine.model.body
        keep("detached", body.blocks[0][0].weight.detach().cpu())
        keep("data", body.blocks[1][0].weight.data)
        keep("numpy", torch.from_numpy(body.norm.weight.detach().numpy()))
        keep("graph", body.blocks[2][0].weight.T * 1)
        with engine.gathered():
            keep("gathered", model.head.weight.data)
            assert model.frozen.weight.detach().numpy().sum() == model.frozen.weight.sum().item()
            keep("row", body.embed.weight[2])
            keep("state", model.state_dict()["body.blocks.0.2.weight"])
        model.head.register_forward_hook(lambda module, args, output: keep("hook", module.weight.data))
        body.blocks[0].register_forward_hook(lambda module, args, output: keep("block", module[0].weight.detach()))
        with torch.no_grad():
            engine.forward(TOKENS)
            keep("in evaluation", body.blocks[1][0].bias.view(2, 3))
            engine.forward(TOKENS)
        loss = engine.forward(TOKENS).sum()
        keep("before the backward", body.blocks[1][2].weight.view(-1))
        engine.backward(loss)
        engine.step()
        same = {name: is_as_before(alias, copied) for name, (alias, copied) in kept.items()}
        refusal = refusal_of(lambda: torch.save(model.state_dict(), io.BytesIO()))
        with engine.gathered():
            assert "released" not in repr(model.head.weight)
            torch.save(model.state_dict(), io.BytesIO())
            again = nn.Parameter(model.head.weight)
        assert type(again + 1) is Tensor
        assert type(again) is nn.Parameter
    same |= {f"{name}, closed": is_as_before(alias, copied) for name, (alias, copied) in kept.items()}
    return same, refusal


@pytest.mark.parametrize("stage", [2, 3])
def test_memory_lives_as_long_as_its_views(ranks: WorkerPool, stage: int) -> None:
    for same, (code, _) in ranks(2).run(keep_views, stage):
        assert all(same.values()), same
        assert code == ("parameter-released" if stage == 3 else "")


class Teacher(nn.Module):
    """Writes its teacher's parameters in forward, and its scale in the first one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.student = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(6))
        self.is_ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.scale.data.copy_(1 / (x.std(0) + 1))
            self.is_ready = True
        with torch.no_grad():
            for own, other in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                if self.how == "data":
                    other.data.mul_(0.9).add_(own.data, alpha=0.1)
                elif self.how == "assign":
                    other.data = 0.9 * other.data + 0.1 * own.data
                else:
                    other.lerp_(own, 0.1)
            target = self.teacher(x)
        return (self.scale * self.student(x) - target).pow(2).sum()


def train_teachers(rank: int, world_size: int, how: str) -> dict[str, float]:
    bf16 = {"precision": {"param": "bf16"}}
    layouts: list[dict[str, Any]] = [{"zero": {"stage": stage}} for stage in range(4)]
    cases = [*layouts, {**layouts[2], **bf16}, {**layouts[3], **bf16}, LAYOUTS["host"]]
    return {str(sections): train_teacher(how, sections) for sections in cases}


def train_teacher(how: str, sections: dict[str, Any]) -> float:
    dtype = torch.float32 if "precision" in sections else torch.float64
    torch.manual_seed(0)
    model = Teacher(how).to(dtype)
    plain, x = copy.deepcopy(model), torch.linspace(-1, 1, 24, dtype=dtype).view(4, 6)
    config = make_config(1, {**sections, "optimizer": SGD})
    with initialize(model, config, loss_fn=lambda output, batch: (output, 1)) as engine:
        for _ in range(STEPS):
            engine.train_step([x])
            plain(x).backward()
            sgd_step(plain)
        pairs = [(engine.read(name, "master").double(), each.double()) for name, each in plain.named_parameters()]
        return max(((found - each).abs().max() / each.abs().max()).item() for found, each in pairs)


@pytest.mark.parametrize("how", ["data", "assign", "lerp"])
def test_what_forward_writes_reaches_the_stored_values(ranks: WorkerPool, how: str) -> None:
    for errors in ranks(2).run(train_teachers, how):
        for layout, error in errors.items():
            assert error < (0.05 if "bf16" in layout else 1e-12), layout
