"""Optimizers that a user gives equal one process in every layout, whatever the update of an element depends on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from harness import tensor
from harness.models import ModelCase
from harness.pool import WorkerPool
from harness.training import make_config
from shardwise import ConfigError, Engine, initialize
from shardwise.runtime.float64 import float64_throughout

NUM_STEPS: Final = 2
NUM_MICRO_BATCHES: Final = 2


class Lamb(torch.optim.Optimizer):
    """Adam with a trust ratio for each tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                state["step"] += 1
                state["exp_avg"].lerp_(param.grad, 0.1)
                state["exp_avg_sq"].mul_(0.9).addcmul_(param.grad, param.grad, value=0.1)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8) + 0.01 * param
                ratio = float(param.norm() / update.norm().clamp_min(1e-8)) or 1.0
                param.add_(update, alpha=-group["lr"] * ratio)


class Centralised(torch.optim.SGD):
    """Subtracts the mean of each row from the gradients of matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            if param.dim() > 1:
                param.grad.sub_(param.grad.mean(dim=tuple(range(1, param.dim())), keepdim=True))
        super().step()


class GlobalStep(torch.optim.Optimizer):
    """Divides all updates by one norm, and estimates a rate from all parameters together, as Prodigy does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        for param in params:
            self.state[param].setdefault("first", param.clone())
        norm = torch.stack([param.grad.norm() for param in params]).norm() + 1e-8
        moved = torch.stack([(param - self.state[param]["first"]).norm() for param in params]).norm()
        rate = float((1.0 + moved) * self.param_groups[0]["d"])
        for group in self.param_groups:
            group["d"] = rate
        for param in params:
            param.add_(param.grad / norm, alpha=-group["lr"] * min(rate, 2.0))


class MatricesByMuon(torch.optim.Optimizer):
    """Wraps torch's Muon for matrices and its SGD for all else, each with parameter groups of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        params = [param for group in self.param_groups for param in group["params"]]
        self.muon = torch.optim.Muon([each for each in params if each.dim() == 2], lr=lr)
        self.sgd = torch.optim.SGD([each for each in params if each.dim() != 2], lr=lr)

    def step(self, closure: Any = None) -> None:
        self.muon.step()
        self.sgd.step()


MAKERS: Final[Mapping[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "lamb": Lamb,
    "centralised": lambda params: Centralised(params, lr=0.05, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "global": GlobalStep,
    "muon": lambda params: MatricesByMuon(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
}


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Over two groups under other rates."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return MAKERS[kind]([{"params": trained[::2], "lr": 0.02}, {"params": trained[1::2], "lr": 0.01}])


class Odd(nn.Module):
    """A convolution, tensors of odd shapes, a scalar, a frozen one, and one that gets its gradient late."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.late = nn.Linear(7, 5, bias=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.head = nn.Linear(27, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale
        out = self.head(x.flatten(1) * self.frozen.sum())
        return out + self.late(x.flatten(1)[:, :7]).sum(1, keepdim=True) if bool(x[0, 0, 0, 0] > 0) else out


def odd_case() -> ModelCase:
    return ModelCase("odd", Odd, _odd_batch, lambda output, batch: ((output - batch[1]).square().sum(), len(output)))


def _odd_batch(seed: int, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    shapes = ((num_samples, 3, 3, 3), (num_samples, 1))
    x, y = (torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype) for shape in shapes)
    x[:, 0, 0, 0] = 1.0 if seed >= 4 else -1.0  # not in the first step
    return x, y


def case_of(name: str) -> ModelCase:
    return odd_case() if name == "odd" else tensor.make_case(name)


def start(rank: int, name: str, kind: str, sections: Mapping[str, Any], by_function: bool) -> tuple[nn.Module, Engine]:
    case = case_of(name)
    model = case.build(torch.float64, seed=rank)
    settings = {"optimizer": {"clip_norm": tensor.CLIP_NORM}, "run": {"seed": tensor.SEED}, **sections}
    given = (lambda groups: MAKERS[kind](groups)) if by_function else optimizer_of(model, kind)
    config = make_config(NUM_MICRO_BATCHES, settings)
    return model, initialize(model, config, loss_fn=case.loss, optimizer=given)


def train_several(rank: int, world_size: int, name: str, kinds: list[str], sections: dict[str, Any]) -> list[Any]:
    """Parameters after some steps, or an error, for each optimizer."""
    found: list[Any] = []
    with float64_throughout():
        for kind in kinds:
            try:
                model, engine = start(rank, name, kind, sections, by_function=False)
                with engine:
                    for step in range(NUM_STEPS):
                        engine.train_step(tensor.batches_of(engine, case_of(name), step, NUM_MICRO_BATCHES))
                    found.append({each: engine.read(each) for each, _ in model.named_parameters()})
            except ConfigError as error:
                found.append(error.code)
    return found


@functools.cache
def expected(name: str, kind: str, num_data_ranks: int) -> dict[str, Tensor]:
    make = functools.partial(optimizer_of, kind=kind)
    trace = tensor.train_plainly(case_of(name), num_data_ranks, NUM_MICRO_BATCHES, NUM_STEPS, optimizer_of=make)
    return trace.parameters


def check(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> None:
    for name, value in wanted.items():
        error = (found[name] - value).abs().max()
        assert error <= 1e-9 * value.abs().max().clamp_min(1e-3), f"{where}: {name} is off by {error}"


LAYOUTS: Final[list[tuple[str, int, dict[str, Any]]]] = [
    *(("odd", 2, {"zero": {"stage": stage}}) for stage in range(4)),
    ("odd", 2, {"zero": {"stage": 2}, "tiers": {"optimizer": "host", "grads": "host"}}),
    ("decoder", 2, {"zero": {"stage": 3}, "mesh": {"tp": 2}}),
    ("shallow-tied", 2, {"zero": {"stage": 1}, "mesh": {"pp": 2}}),
    ("decoder", 4, {"zero": {"stage": 3}, "mesh": {"tp": 2, "dp_shard": 2}, "tiers": {"optimizer": "host"}}),
    ("odd", 4, {"zero": {"stage": 2}, "mesh": {"dp_shard": 2, "dp_replicate": 2}}),
]


@pytest.mark.parametrize(("name", "num_ranks", "sections"), LAYOUTS)
def test_every_layout_equals_one_process(
    ranks: WorkerPool, name: str, num_ranks: int, sections: dict[str, Any]
) -> None:
    mesh, kinds = sections.get("mesh", {}), list(MAKERS)
    num_data_ranks = num_ranks // (mesh.get("tp", 1) * mesh.get("pp", 1))
    for found in ranks(num_ranks).run(train_several, name, kinds, sections):
        for kind, parameters in zip(kinds, found, strict=True):
            if kind == "global" and "pp" in mesh:
                assert parameters == "optimizer-joint-step"
            else:
                check(parameters, expected(name, kind, num_data_ranks), kind)


def go_on(
    rank: int, world_size: int, kind: str, first: dict[str, Any], then: dict[str, Any], folder: str
) -> dict[str, Tensor]:
    """Half the steps in one layout, the others in another, which reads the states that the first had."""
    half, read = NUM_STEPS // 2, []
    case = tensor.make_case("decoder")
    batches = [tensor.step_batches(case, step, 1, NUM_MICRO_BATCHES) for step in range(NUM_STEPS)]
    with float64_throughout():
        for sections, steps in ((first, batches[:half]), (then, batches[half:])):
            model, engine = start(rank, "decoder", kind, sections, by_function=True)
            with engine:
                names = [name for name, _ in model.named_parameters()]
                if read:
                    engine.load(folder)
                    read.append({name: states_of(engine, name) for name in names})
                for step in steps:  # all data ranks take the same
                    engine.train_step(step)
                if not read:
                    engine.save(folder)
                    read.append({name: states_of(engine, name) for name in names})
                parameters = {name: engine.read(name) for name in names}
    torch.testing.assert_close(read[0], read[1], rtol=0, atol=0)
    assert all(read[0].values())
    return parameters


def states_of(engine: Engine, name: str) -> dict[str, Tensor]:
    states = sorted({*engine.states_of(name)} - {"param", "master", "grad"})
    return {state: value for state in states if (value := engine.read(name, state)) is not None}


GO_ON: Final = [
    ("lamb", {"zero": {"stage": 3}}, {"zero": {"stage": 0}}),
    ("adafactor", {"zero": {"stage": 0}}, {"zero": {"stage": 3}, "mesh": {"tp": 2}}),
    ("global", {"zero": {"stage": 2}, "mesh": {"tp": 2}}, {"zero": {"stage": 1}, "tiers": {"optimizer": "host"}}),
]


def go_on_each(rank: int, world_size: int, folder: str) -> list[dict[str, Tensor]]:
    return [go_on(rank, world_size, *each, f"{folder}/{each[0]}") for each in GO_ON]


def test_states_of_whole_tensors_go_to_other_layouts(ranks: WorkerPool, tmp_path: Path) -> None:
    for found in ranks(2).run(go_on_each, str(tmp_path)):
        for (kind, *_), parameters in zip(GO_ON, found, strict=True):
            check(parameters, expected_in_one_group(kind), kind)


@functools.cache
def expected_in_one_group(kind: str) -> dict[str, Tensor]:
    make, case = MAKERS[kind], tensor.make_case("decoder")
    trace = tensor.train_plainly(
        case, 1, NUM_MICRO_BATCHES, NUM_STEPS, optimizer_of=lambda model: make(list(model.parameters()))
    )
    return trace.parameters
