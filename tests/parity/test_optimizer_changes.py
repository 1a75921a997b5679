"""What a script does to the optimizer between steps acts: states reset, groups added, weights swapped to evaluate."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from harness.pool import WorkerPool
from harness.refusals import refused
from harness.training import make_config
from shardwise import Engine, initialize

STAGES: Final = [{"zero": {"stage": stage}} for stage in range(4)]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch_of(step: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss_of(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def one_process(make: Callable[[nn.Module], Any], change: Callable[..., None], num_steps: int = 4) -> dict[str, Tensor]:
    model = build()
    optimizer = make(model)
    for step in range(num_steps):
        optimizer.zero_grad()
        total, count = loss_of(model(batch_of(step)), batch_of(step))
        (total / count).backward()
        nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.5)
        optimizer.step()
        change(model, optimizer, step)
    return {name: param.detach() for name, param in model.named_parameters()}


def sharded(
    make: Callable[[nn.Module], Any], change: Callable[..., None], sections: Mapping[str, Any], num_steps: int = 4
) -> tuple[dict[str, Tensor], Engine]:
    model = build()
    optimizer = make(model)
    config = make_config(1, {"optimizer": {"clip_norm": 0.5}, **sections})
    engine = initialize(model, config, loss_fn=loss_of, optimizer=optimizer)
    for step in range(num_steps):
        engine.train_step([batch_of(step)])  # all ranks take the same
        change(model, engine.optimizer, step)
    return {name: engine.read(name) for name, _ in model.named_parameters()}, engine


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    """It finds its own rate."""
    transformers = pytest.importorskip("transformers")
    return transformers.Adafactor(model.parameters(), lr=None, relative_step=True, scale_parameter=True)


def with_means(model: nn.Module) -> torch.optim.Optimizer:
    """A hook after each step keeps an average of the model's parameters."""
    optimizer = adamw(model)
    means = [param.detach().clone() for param in model.parameters()]

    @torch.no_grad()
    def average(*_: Any) -> None:
        for mean, param in zip(means, model.parameters(), strict=True):
            mean.lerp_(param, 0.5)

    optimizer.register_step_post_hook(average)
    optimizer.means = means
    return optimizer


@torch.no_grad()
def take_means(model: nn.Module, optimizer: Any, step: int) -> None:
    for param, mean in zip(model.parameters(), optimizer.means, strict=True) if step == 3 else ():
        param.copy_(mean)


def clear(model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 1:
        optimizer.state.clear()


def make_again(model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 1:
        optimizer.state = defaultdict(dict)


def drop_each(model: nn.Module, optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups if step == 2 else ():
        for param in group["params"]:
            optimizer.state[param] = {}


def prune(model: nn.Module, optimizer: Any, step: int) -> None:
    for state in optimizer.state.values() if step == 1 else ():
        state["exp_avg"].mul_(0.25)
        state["exp_avg_sq"].zero_()
        state["step"].fill_(1.0)


def replace(model: nn.Module, optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups if step == 1 else ():
        for param in group["params"]:
            optimizer.state[param]["exp_avg"] = torch.zeros_like(param)


def clamp(model: nn.Module, optimizer: Any, step: int) -> None:
    with torch.no_grad():
        model[2].bias.clamp_(-0.02, 0.02)
        model[0].weight.mul_(0.9)


def set_rate(model: nn.Module, optimizer: Any, step: int) -> None:
    """The script computes the rate of each step, as one without a schedule does."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def follow_plateau(model: nn.Module, optimizer: Any, step: int) -> None:
    """The script steps a schedule that needs a metric itself."""
    optimizer.plateau.step(1.0 + step)


CHANGES: Final = [clamp, clear, make_again, drop_each, prune, replace, set_rate]


def add_head(model: nn.Module, optimizer: Any, step: int) -> None:
    """The head was in no group; its bias was frozen."""
    if step == 1:
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})


def only_first(model: nn.Module) -> torch.optim.Optimizer:
    model[2].bias.requires_grad_(False)
    return torch.optim.AdamW(model[0].parameters(), lr=0.05)


class Averaged(torch.optim.SGD):
    """Evaluates with an average of its weights, which `eval` swaps in and `train` out, as schedule-free ones do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.is_training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.is_training
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("mean", torch.zeros_like(param)).lerp_(param, 0.5)

    @torch.no_grad()
    def swap(self, to_train: bool) -> None:
        if self.is_training is not to_train:
            self.is_training = to_train
            for group in self.param_groups:
                for param in group["params"]:
                    kept = param.clone()
                    param.copy_(self.state[param]["mean"])
                    self.state[param]["mean"].copy_(kept)

    def eval(self) -> None:
        self.swap(False)

    def train(self) -> None:
        self.swap(True)


def averaged(model: nn.Module) -> torch.optim.Optimizer:
    return Averaged(model.parameters(), lr=0.05)


def swap(model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 1:
        optimizer.eval()
        optimizer.train()
    if step == 3:
        optimizer.eval()


def run_all(rank: int, world_size: int, folder: str, is_full: bool) -> list[str]:
    """What is not as in one process; unless all is asked for, each change in stage 3 and in one tier beside it."""
    away = [
        {"zero": {"stage": 2}, "tiers": {"optimizer": "host", "grads": "host"}},
        {"zero": {"stage": 3}, "tiers": {"optimizer": "nvme", "nvme_path": folder}},
    ]
    stages = STAGES if is_full else STAGES[::3]
    tiers = [away if is_full else away[index % 2 :][:1] for index in range(len(CHANGES) + 2)]
    cases = [
        (adamw, change, sections)
        for change, tier in zip(CHANGES, tiers, strict=False)
        for sections in (STAGES[3], *tier)
    ]
    cases += [(only_first, add_head, sections) for sections in (*stages, *tiers[-2])]
    cases += [(adafactor, clamp, sections) for sections in stages]
    cases += [(averaged, swap, sections) for sections in stages]
    cases += [(with_means, take_means, sections) for sections in (*stages, *tiers[-1])]
    wrong = []
    for make, change, sections in cases:
        where = f"{change.__name__} {sections}"
        try:
            found, engine = sharded(make, change, sections)
        except Exception as error:
            wrong.append(f"{where}: {error!r}")
            continue
        with engine:
            for name, value in one_process(make, change).items():
                if not torch.allclose(found[name], value, rtol=1e-9, atol=1e-11):
                    wrong.append(f"{where}: {name} is off by {(found[name] - value).abs().max()}")
            if make is averaged:
                whole = build()
                whole.load_state_dict(found)
                seen, expected = engine.model(batch_of(9)), whole(batch_of(9))
                wrong += [] if torch.allclose(seen, expected, rtol=1e-9) else [f"{where}: evaluation"]
    return wrong


def test_changes_between_steps_act(ranks: WorkerPool, tmp_path: Any, pytestconfig: pytest.Config) -> None:
    for wrong in ranks(2).run(run_all, str(tmp_path), pytestconfig.getoption("--full")):
        assert not wrong, "\n".join(wrong)


def test_encoded_states_are_reset_too() -> None:
    seen = []
    for change in (clear, prune):
        model = nn.Linear(128, 64)
        engine = initialize(
            copy.deepcopy(model),
            make_config(1, {"precision": {"param": "fp32", "states": "int8"}}),
            loss_fn=loss_of,
            optimizer=None,
        )
        with engine:
            for step in range(3):
                engine.train_step([torch.randn(4, 128, generator=torch.Generator().manual_seed(step))])
                change(model, engine.optimizer, step + 1 - 1)
                if step == 1:
                    seen.append(engine.read("weight", "exp_avg_sq"))
    assert seen[0] is None
    assert not seen[1].any()


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    model = build()
    other = torch.optim.lr_scheduler.StepLR(adamw(model), 1)
    with refused("scheduler-of-another", "StepLR"):
        initialize(model, make_config(1, {}), loss_fn=loss_of, optimizer=adamw(model), scheduler=other)
    with initialize(model, make_config(1, {}), loss_fn=loss_of) as engine:
        with refused("scheduler-of-another", "StepLR"):
            engine.scheduler = other
        engine.scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)


@pytest.mark.parametrize("group", [{"params": [torch.zeros(2)]}, {"params": "0.weight"}])
def test_groups_of_other_tensors_are_refused(group: dict[str, Any]) -> None:
    model = build()
    with initialize(model, make_config(1, {}), loss_fn=loss_of) as engine:
        known = model[0].weight if group["params"] == "0.weight" else None
        with refused("optimizer-parameter-twice" if known is not None else "optimizer-foreign-tensor"):
            engine.optimizer.add_param_group({"params": [known]} if known is not None else group)


def with_plateau(model: nn.Module) -> Any:
    optimizer: Any = adamw(model)
    optimizer.plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return optimizer


@pytest.mark.parametrize("sections", [{"zero": {"stage": 0}}, {"tiers": {"optimizer": "host"}}])
def test_a_schedule_that_needs_a_metric_is_stepped_by_the_script(sections: Mapping[str, Any]) -> None:
    expected = one_process(with_plateau, follow_plateau)
    model = build()
    optimizer = with_plateau(model)
    config = make_config(1, {"optimizer": {"clip_norm": 0.5}, **sections})
    with initialize(model, config, loss_fn=loss_of, optimizer=optimizer, scheduler=optimizer.plateau) as engine:
        for step in range(4):
            engine.train_step([batch_of(step)])
            follow_plateau(model, optimizer, step)
        assert optimizer.param_groups[0]["lr"] < 0.05
        for name, value in expected.items():
            torch.testing.assert_close(engine.read(name), value)


def changed_in_hooks(model: nn.Module) -> torch.optim.Optimizer:
    """Hooks see the mean gradients: one clips by value in place, one gives others."""
    optimizer = adamw(model)

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for param in (each for group in optimizer.param_groups for each in group["params"]):
            param.grad.clamp_(-0.01, 0.02)

    def replace(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for param in (each for group in optimizer.param_groups for each in group["params"]):
            param.grad = param.grad * 0.5 + 0.001

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_pre_hook(replace)
    return optimizer


def clipped_in_a_hook(model: nn.Module) -> torch.optim.Optimizer:
    """A hook needs all gradients at once."""
    optimizer = adamw(model)

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.1)

    optimizer.register_step_pre_hook(clip)
    return optimizer


STORED: Final = [
    {"zero": {"stage": 0}},
    {"tiers": {"optimizer": "host"}},
    {"tiers": {"optimizer": "host", "grads": "host"}},
    {"zero": {"stage": 3}, "tiers": {"optimizer": "nvme", "grads": "nvme"}},
]


HOOKED: Final = [*((changed_in_hooks, each) for each in STORED), *((clipped_in_a_hook, each) for each in STORED[:2])]


@pytest.mark.parametrize(("make", "sections"), HOOKED)
def test_a_hook_before_the_step_changes_gradients_in_every_tier(
    make: Callable[[nn.Module], Any], sections: Mapping[str, Any], tmp_path: Path
) -> None:
    if "nvme" in sections.get("tiers", {}).values():
        sections = {**sections, "tiers": {**sections["tiers"], "nvme_path": str(tmp_path)}}
    expected = one_process(make, lambda *_: None)
    found, engine = sharded(make, lambda *_: None, sections)
    engine.close()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_a_hook_before_the_step_changes_gradients_of_encoded_states() -> None:
    """It is registered after `initialize`, and takes all gradients away."""
    model = build()
    config = make_config(1, {"precision": {"states": "int8"}, "optimizer": {"name": "adamw", "lr": 0.1}})
    with initialize(model, config, loss_fn=loss_of) as engine:
        before = engine.read("0.weight")
        engine.train_step([batch_of(0)])
        assert not torch.equal(engine.read("0.weight"), before)
        before = engine.read("0.weight")

        def drop(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = None

        engine.optimizer.register_step_pre_hook(drop)
        engine.train_step([batch_of(1)])
        assert torch.equal(engine.read("0.weight"), before)


def copy_states(rank: int, world_size: int, sections: dict[str, Any]) -> list[dict[str, Tensor]]:
    """A script takes the states in every way that gives a copy, and a file; return them."""
    _, engine = sharded(adamw, lambda *_: None, sections, num_steps=2)
    before = engine.optimizer.state_dict()
    own: Any = next(iter(before["state"].values()))
    file = io.BytesIO()
    torch.save(before, file)
    file.seek(0)
    taken = [copy.deepcopy(before)["state"][0], copy.copy(own), own.copy(), dict(own), {**own}, own | {}, {} | own]
    taken += [torch.load(file)["state"][0], {name: own.setdefault(name) for name in own}]
    assert dict(own).keys() == {"step", "exp_avg", "exp_avg_sq"}
    last = own.popitem()
    return [dict(each) for each in taken] + [{**own, last[0]: last[1]}]


@pytest.mark.parametrize("sections", [{}, {"tiers": {"optimizer": "host"}}, {"precision": {"states": "int8"}}])
def test_copies_of_states_have_their_values(ranks: WorkerPool, sections: dict[str, Any]) -> None:
    for taken in ranks(2).run(copy_states, sections):
        for each in taken:
            assert each["step"] == 2
            torch.testing.assert_close(each, taken[0], rtol=0, atol=0)
            assert each["exp_avg"].abs().sum() > 0


def keep_views(rank: int, world_size: int, sections: dict[str, Any]) -> list[float]:
    """Rank 0 keeps views of parameters over steps, and reads them as soon as a step returns; return the errors."""
    model, kept, errors = build(), list[Tensor](), list[float]()
    engine = initialize(model, make_config(1, sections), loss_fn=loss_of, optimizer=adamw(model))
    for step in range(3):
        if rank == 0 and not kept:
            kept += [model[2].weight.detach(), model[0].bias.data[1:]]
        engine.train_step([batch_of(step)])
        found = [view.clone() for view in kept]
        dist.all_reduce(torch.ones(1))  # the ranks wait for each other, as where they sum the loss
        weights = [engine.read("2.weight"), engine.read("0.bias")[1:]]
        errors += [float((own - whole).abs().max()) for own, whole in zip(found, weights, strict=False)]
    return errors


HOST: Final = {"optimizer": "host"}


@pytest.mark.parametrize(
    "sections",
    [*STAGES[:3], *({**each, "tiers": HOST} for each in STAGES[1:3]), {"zero": {"stage": 3, "keep_whole_below": 99}}],
)
def test_views_of_parameters_have_the_update_when_the_step_returns(ranks: WorkerPool, sections: dict[str, Any]) -> None:
    first, other = ranks(2).run(keep_views, sections)
    assert (first, other) == ([0.0] * 6, [])
