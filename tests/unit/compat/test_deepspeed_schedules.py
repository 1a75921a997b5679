"""DeepSpeed's schedules and optimizers: its values, its arguments, its defaults."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from harness.paths import DATA
from harness.refusals import refused
from shardwise.compat.deepspeed.optimizers import build_optimizer, build_scheduler
from shardwise.compat.deepspeed.runtime import lr_schedules
from shardwise.compat.deepspeed.runtime.lr_schedules import OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

# What DeepSpeed 0.19.8 computed: the first values, 20 steps, a jump to step 3, and a step after a state of step 9.
RECORDED: list[dict[str, Any]] = json.loads((DATA / "deepspeed_lr_schedules.json").read_text())
NUM_STEPS = 20


def adam_with(rates: list[float]) -> torch.optim.Adam:
    return torch.optim.Adam([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["name"])
def test_a_schedule_has_deepspeeds_values_step_by_step(case: dict[str, Any]) -> None:
    optimizer = adam_with(case["lrs"])
    schedule = build_scheduler({"type": case["name"], "params": case["options"]}, optimizer)
    rates, momenta = [], []

    def record() -> None:
        rates.append([group["lr"] for group in optimizer.param_groups])
        momenta.append([group["betas"][0] for group in optimizer.param_groups])
        assert schedule.get_last_lr() == rates[-1]

    record()
    for _ in range(NUM_STEPS):
        schedule.step()
        record()
    schedule.step(3)
    record()
    schedule.load_state_dict({"last_batch_iteration": 9})
    schedule.step()
    record()
    assert rates == [pytest.approx(each, rel=1e-15, abs=0) for each in case["steps"]]
    if case["momenta"] is not None:
        assert momenta == [pytest.approx(each, rel=1e-15, abs=0) for each in case["momenta"]]
    assert schedule.state_dict() == case["state"]


def test_all_schedules_are_recorded() -> None:
    assert {case["name"] for case in RECORDED} == set(lr_schedules.VALID_LR_SCHEDULES)


def test_arguments_are_deepspeeds_by_place_and_by_name() -> None:
    optimizer = adam_with([0.1])
    assert WarmupLR(optimizer, 0.0, 0.5, 10).options["warmup_num_steps"] == 10
    assert WarmupDecayLR(optimizer, 100, 0.0, 0.5, 10, "linear").options["warmup_type"] == "linear"
    assert WarmupCosineLR(optimizer, 100, warmup_num_steps=5, last_batch_iteration=7).last_batch_iteration == 7
    with pytest.raises(TypeError, match="total_num_steps"):
        WarmupDecayLR(optimizer)
    for wrong in ({"warmup_num_steps": -1}, {"warmup_max_lr": [1.0, 2.0]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            WarmupLR(optimizer, **wrong)
    with pytest.raises(TypeError, match="Optimizer"):
        WarmupLR(object())


def test_a_schedule_takes_a_wrapper_and_rates_in_tensors() -> None:
    class Wrapper:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5))

    (group,) = Wrapper.optimizer.param_groups
    rate = group["lr"]
    schedule = WarmupLR(Wrapper(), warmup_num_steps=2, warmup_type="linear")
    for _ in range(3):
        schedule.step()
    assert group["lr"] is rate
    assert rate.item() == 0.5
    with pytest.warns(UserWarning, match="betas"):
        OneCycle(Wrapper(), 0.1, 0.2)


@pytest.mark.parametrize(
    ("section", "kind", "options"),
    [
        ({"type": "Adam"}, "AdamW", {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}),
        ({"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}, "Adam", {"weight_decay": 0.1}),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, "AdamW", {"weight_decay": 0}),
        ({"type": "AdamW", "params": {"torch_adam": True}}, "AdamW", {"weight_decay": 0.01}),
        ({"type": "FusedAdam", "params": {"betas": [0.8, 0.9], "set_grad_none": True}}, "AdamW", {"betas": (0.8, 0.9)}),
        ({"type": "CPUAdam", "params": {"fp32_optimizer_states": True, "lr": "auto"}}, "AdamW", {"lr": 1e-3}),
        ({"type": "Lion"}, "Lion", {"lr": 1e-3, "betas": (0.9, 0.999)}),
        ({"type": "Adagrad"}, "Adagrad", {"lr": 1e-2}),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}, "SGD", {"nesterov": True}),
        ({"type": "RMSprop", "params": {"lr": 0.1, "alpha": 0.5}}, "RMSprop", {"alpha": 0.5}),
    ],
)
def test_an_optimizer_has_deepspeeds_defaults(section: dict[str, Any], kind: str, options: dict[str, Any]) -> None:
    optimizer = build_optimizer(section, [{"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": 0.5}])
    assert type(optimizer).__name__ == kind
    assert {name: optimizer.defaults[name] for name in options} == options
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("section", "code", "named"),
    [
        ({"type": "Adamm"}, "unknown-optimizer", "adamm"),
        ({"type": "Muon"}, "deepspeed-optimizer-muon", "shardwise.optimizer.name=muon"),
        ({"type": "Adam", "params": {"max_grad_norm": 1}}, "deepspeed-optimizer-param", "gradient_clipping"),
        ({"type": "Adam", "params": {"bias_correction": False}}, "deepspeed-optimizer-param", "bias_correction"),
        ({"type": "Adam", "params": {"weight_deca": 1}}, "deepspeed-optimizer-param", "did you mean weight_decay?"),
    ],
)
def test_an_optimizer_that_is_not_here_is_refused(section: dict[str, Any], code: str, named: str) -> None:
    with refused(code, named):
        build_optimizer(section, [torch.nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"type": "WarmupDecay"}, "did you mean WarmupDecayLR?"),
        ({"type": "WarmupDecayLR"}, "total_num_steps"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 5}}, "warmup_steps"),
    ],
)
def test_a_schedule_that_is_not_here_is_refused(section: dict[str, Any], named: str) -> None:
    with refused("deepspeed-scheduler", named):
        build_scheduler(section, adam_with([0.1]))
