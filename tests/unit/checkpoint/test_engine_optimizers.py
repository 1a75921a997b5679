"""Optimizers and schedules of the config's and of the user's, saved and loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from harness.refusals import refused
from harness.states import Net, assert_same_bits, engine_of, options, take_steps, whole_states
from shardwise.checkpoint.training_state import optimizer_options, restore_options
from shardwise.optim.elementwise import Lion
from shardwise.runtime.memory_tracker import Category

Arguments = Callable[[nn.Module], dict[str, Any]]


class Counting(torch.optim.Optimizer):
    """Signs of the gradients, with states of many kinds: numbers, a flag, counts of elements, a dtype of its own."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "at": (1, 2), "name": "counting"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"calls": 0, "decay": 1.0, "is_odd": False, "unused": None}
                    state["signs"] = torch.zeros_like(parameter, dtype=torch.int64)
                    state["narrow"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["total"] = torch.zeros((), dtype=torch.int64)
                state["calls"] += 1
                state["decay"] *= 0.9
                state["is_odd"] = not state["is_odd"]
                state["signs"] += parameter.grad.sign().long()
                state["narrow"] += parameter.grad
                state["total"] += 2**40
                parameter -= group["lr"] * state["decay"] * state["signs"].sign() * (1 + state["is_odd"])


def given(kind: type[torch.optim.Optimizer], **chosen: Any) -> Arguments:
    """An optimizer over two groups with options of their own."""

    def make(model: nn.Module) -> dict[str, Any]:
        groups = [{"params": [*model.up.parameters()]}, {"params": [*model.down.parameters()], "lr": 0.02}]
        return {"optimizer": kind(groups, **{"lr": 0.01, **chosen})}

    return make


def lambda_of(step: int) -> float:
    return 1 / (1 + step)


class Halving:
    """A function with a state, which torch keeps."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, step: int) -> float:
        self.num_calls += 1
        return 0.5**self.num_calls


class Counted:
    """A schedule of the user's, without `state_dict`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1


class Plateau(lr_scheduler.ReduceLROnPlateau):
    """Asks for no metric."""

    def step(self, metrics: Any = 1.0, epoch: Any = None) -> None:
        super().step(metrics, epoch)


OPTIMIZERS: dict[str, Arguments] = {
    "adamw-foreach": given(torch.optim.AdamW, foreach=True, betas=(0.8, 0.9)),
    "adam-fused-amsgrad": given(torch.optim.Adam, fused=True, amsgrad=True),
    "adam-tensor-lr": given(torch.optim.Adam, lr=torch.tensor(0.03)),
    "adam-maximize": given(torch.optim.Adam, maximize=True),
    "sgd": given(torch.optim.SGD),
    "sgd-nesterov": given(torch.optim.SGD, momentum=0.9, nesterov=True),
    "nadam": given(torch.optim.NAdam),
    "radam": given(torch.optim.RAdam),
    "asgd": given(torch.optim.ASGD, t0=1),
    "rprop": given(torch.optim.Rprop),
    "adagrad": given(torch.optim.Adagrad, initial_accumulator_value=0.1, lr_decay=0.1),
    "rmsprop": given(torch.optim.RMSprop, momentum=0.5, centered=True),
    "adadelta": given(torch.optim.Adadelta),
    "adamax": given(torch.optim.Adamax),
    "counting": given(Counting),
    "lion": given(Lion),
    "factory": lambda model: {"optimizer": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5)},
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=7),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=10),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.5)],
        milestones=[3],
    ),
    "multi-step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 4, 4, 5], gamma=0.5),
    "plateau": lambda optimizer: Plateau(optimizer, patience=1, min_lr=[1e-4, 1e-3]),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda_of, Halving()]),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, [lambda_of, Halving()]),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "warm-restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2),
}


def scheduled(name: str, **chosen: Any) -> Arguments:
    def make(model: nn.Module) -> dict[str, Any]:
        made = given(torch.optim.SGD, momentum=0.9, **chosen)(model)
        return made | {"scheduler": SCHEDULERS[name](made["optimizer"])}

    return make


def kinds(engine: Any) -> list[Any]:
    """The types and dtypes of all that the optimizer keeps and has as options."""
    states = [
        [
            (name, type(value), getattr(value, "dtype", None))
            for name, value in sorted(state.items())
            if value is not None
        ]
        for state in engine.optimizer.state.values()
    ]
    groups = [[(key, type(value)) for key, value in group.items()] for group in engine.optimizer.param_groups]
    return [states, groups]


def check_goes_on(
    root: Path, arguments: Arguments | None, num_steps: int = 3, model: Callable[[], nn.Module] = Net, **sections: Any
) -> None:
    """An engine that loads goes on bitwise, and has options and states of the same kinds."""
    with engine_of(model, arguments=arguments, **sections) as engine:
        take_steps(engine, num_steps)
        engine.save(root)
        saved, chosen = whole_states(engine), options(engine)
        losses = take_steps(engine, 4)
        last, last_chosen, last_kinds = whole_states(engine), options(engine), kinds(engine)
    for num_before in (0, 1):
        with engine_of(model, seed=1, arguments=arguments, **sections) as engine:
            take_steps(engine, num_before)
            engine.load(root)
            assert_same_bits(whole_states(engine), saved)
            assert options(engine) == chosen
            assert take_steps(engine, 4) == losses
            assert_same_bits(whole_states(engine), last)
            assert options(engine) == last_chosen
            if num_before:
                assert kinds(engine) == last_kinds


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_given_optimizer_goes_on_bitwise(tmp_path: Path, name: str) -> None:
    check_goes_on(tmp_path, OPTIMIZERS[name])


def scaled_net() -> nn.Module:
    model = Net()
    model.scale.requires_grad_(True)  # of one number
    return model


@pytest.mark.quick(8)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", [None, torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD, Counting])
def test_a_parameter_of_one_number_goes_on_bitwise(tmp_path: Path, kind: Any, stage: int) -> None:
    def make(model: nn.Module) -> dict[str, Any]:
        return {"optimizer": kind(model.parameters(), lr=0.01)} if kind is not None else {}

    check_goes_on(tmp_path, make, model=scaled_net, zero={"stage": stage})


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_given_schedule_goes_on_bitwise(tmp_path: Path, name: str) -> None:
    check_goes_on(tmp_path, scheduled(name))


def test_a_schedule_over_rates_that_are_tensors_goes_on_bitwise(tmp_path: Path) -> None:
    check_goes_on(tmp_path, scheduled("cosine", lr=torch.tensor(0.01)))


def test_states_of_all_kinds_keep_their_kind_and_their_bits(tmp_path: Path) -> None:
    with engine_of(arguments=OPTIMIZERS["counting"], precision={"param": "bf16"}) as engine:
        take_steps(engine, 3)
        engine.save(tmp_path)
        expected = [{**state} for state in engine.optimizer.state.values()]
    with engine_of(arguments=OPTIMIZERS["counting"], precision={"param": "fp64"}) as engine:
        engine.load(tmp_path)
        for found, state in zip(engine.optimizer.state.values(), expected, strict=True):
            assert found["calls"] == 3
            assert isinstance(found["calls"], int)
            assert found["decay"] == state["decay"]
            assert found["is_odd"] == state["is_odd"]
            assert "unused" not in found
            for name in ("signs", "narrow", "total"):
                assert found[name].dtype == state[name].dtype
                assert torch.equal(found[name], state[name])
        assert engine.optimizer.param_groups[0]["at"] == (1, 2)


class Matrix(torch.optim.Optimizer):
    """Keeps a list of tensors."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["factors"] = [torch.ones(3)]


def test_states_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    with engine_of(arguments=given(Matrix)) as engine:
        take_steps(engine, 1)
        with refused("optimizer-state-shape", "factors of up.weight is list"):
            engine.save(tmp_path)
    assert not list(tmp_path.iterdir())


def with_groups(num_groups: int, make: Callable[[torch.optim.Optimizer], Any]) -> Arguments:
    def arguments(model: nn.Module) -> dict[str, Any]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [{"params": trained[at::num_groups], "lr": 0.01 * (at + 1)} for at in range(num_groups)]
        optimizer = torch.optim.AdamW(groups)
        return {"optimizer": optimizer, "scheduler": make(optimizer)}

    return arguments


def test_other_groups_and_other_schedules_are_refused_before_anything_changes(tmp_path: Path) -> None:
    with engine_of(arguments=with_groups(2, SCHEDULERS["cosine"])) as engine:
        take_steps(engine, 2)
        engine.save(tmp_path)
        saved = whole_states(engine)
    cases = {
        "options of 2 parameter groups, but the optimizer has 3": with_groups(3, SCHEDULERS["cosine"]),
        "a CosineAnnealingLR, but the scheduler is MultiStepLR": with_groups(2, SCHEDULERS["multi-step"]),
        "a CosineAnnealingLR, but the scheduler is Counted": with_groups(2, Counted),
    }
    for what, arguments in cases.items():
        with engine_of(seed=1, arguments=arguments) as engine:
            take_steps(engine, 1)
            before = whole_states(engine), options(engine)
            with refused("model-misfit", what, "strict=False", "weights_only=True"):
                engine.load(tmp_path)
            assert_same_bits(whole_states(engine), before[0])
            assert options(engine) == before[1]
            report = engine.load(tmp_path, strict=False)
            assert what in report.skipped
            assert_same_bits(whole_states(engine), saved)
            take_steps(engine, 1)


def test_a_schedule_without_a_state_starts_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(arguments=with_groups(2, Counted)) as engine:
        take_steps(engine, 2)
        engine.save(tmp_path)
    assert "Counted has no state_dict(), so a resumed run starts it again" in caplog.messages
    with engine_of(arguments=with_groups(2, Counted)) as engine:
        assert engine.load(tmp_path).skipped == ()
        assert engine.scheduler.num_steps == 0
        assert engine.num_steps == 2


def test_what_json_does_not_keep_is_named(tmp_path: Path) -> None:
    def arguments(model: nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.SGD([{"params": [*model.up.parameters()], "note": {1, 2}}], lr=0.1)
        return {"optimizer": optimizer}

    with engine_of(arguments=arguments) as engine, refused("value-not-plain", "option note of the optimizer", "set"):
        engine.save(tmp_path)


# What the config names.

SECTIONS: dict[str, dict[str, Any]] = {
    "optimizer": {"name": "adamw", "lr": 0.05, "weight_decay": 0.1},
    "scheduler": {"name": "linear", "total_steps": 10, "warmup_steps": 2},
}


def test_a_changed_config_takes_effect_and_an_unchanged_one_goes_on_bitwise(tmp_path: Path) -> None:
    with engine_of(**SECTIONS) as engine:
        take_steps(engine, 3)
        engine.save(tmp_path)
        losses, last = take_steps(engine, 3), (whole_states(engine), options(engine))
    with engine_of(seed=1, **SECTIONS) as engine:
        engine.load(tmp_path)
        assert take_steps(engine, 3) == losses
        assert_same_bits(whole_states(engine), last[0])
        assert options(engine) == last[1]
    changed = {
        "optimizer": {**SECTIONS["optimizer"], "lr": 0.1, "weight_decay": 0.3},
        "scheduler": {"name": "linear", "total_steps": 5, "warmup_steps": 0, "final_ratio": 0.2},
    }
    with engine_of(seed=1, **changed) as engine:
        engine.load(tmp_path)
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.3, 0.0]
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (0.2 + 0.8 * (1 - 3 / 5)))
        assert engine.scheduler.get_last_lr()[0] == engine.optimizer.param_groups[0]["lr"]
        take_steps(engine, 2)
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.2)


def test_a_schedule_of_the_config_goes_on_from_any_other(tmp_path: Path) -> None:
    for name, make in (("one", SCHEDULERS["cosine"]), ("none", Counted)):
        with engine_of(arguments=with_groups(2, make)) as engine:
            take_steps(engine, 3)
            engine.save(tmp_path / name)
        with engine_of(**SECTIONS) as engine:
            engine.load(tmp_path / name)
            assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * (0.1 + 0.9 * (1 - 1 / 8)))


def test_options_keep_the_types_that_are_there() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [parameter], "at": Counter({3: 2}), "lr": torch.tensor(0.1)}])
    saved = optimizer_options(optimizer)
    group = optimizer.param_groups[0]
    rate: Tensor = group["lr"]
    rate.fill_(0.5)
    group["at"] = Counter({1: 1, 2: 2})
    restore_options(optimizer, saved)
    assert group["at"] == Counter({3: 2})
    assert isinstance(group["at"], Counter)
    assert group["lr"] is rate
    assert rate == torch.tensor(0.1)


def test_the_tracker_knows_the_states_of_a_load(tmp_path: Path) -> None:
    with engine_of(Net) as engine:
        take_steps(engine, 1)
        engine.save(tmp_path)
        expected = engine.memory.snapshot().live_bytes[Category.OPTIMIZER]
    with engine_of(Net) as engine:
        engine.load(tmp_path)
        assert engine.memory.snapshot().live_bytes[Category.OPTIMIZER] == expected


def test_load_takes_the_folder_of_a_run(tmp_path: Path) -> None:
    with engine_of() as engine:
        take_steps(engine, 1)
        engine.save(tmp_path / "run" / "checkpoints")
    with engine_of() as again:
        assert again.load(tmp_path / "run").step == 1
        with refused("no-checkpoint", str(tmp_path)):
            again.load(tmp_path)
