"""The recipes of docs/extending.md: one is followed, and a list that was forgotten fails here."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import shardwise
from harness.refusals import refused
from shardwise.layout import layout
from shardwise.layout.layout import OPTIMIZER_STATES
from shardwise.offload import cpu_optimizer
from shardwise.offload.cpu_optimizer import CpuOptimizer, PieceTensors, has_rule
from shardwise.runtime import optimizers
from shardwise.runtime.optimizers import optimizer_names
from shardwise.schedule.registry import RECIPES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()

# Each list, and what it leaves out: Adam's two classes have one rule, and Muon is not element-wise.
OPTIMIZER_LISTS = {
    ("tests/parity/test_tiers.py", "OPTIMIZERS"): {"muon"},
    ("tests/parity/test_tier_checkpoints.py", "OPTIMIZERS"): {"adam", "muon"},
}
# What another schedule stands for there.
SCHEDULE_LISTS = {
    ("tests/unit/schedule/test_pipeline_simulator.py", "SHAPES"): {"zb-v"},
    ("tests/unit/planner/test_planner_compact_layout.py", "SCHEDULES"): {"naive", "zb-h2"},
    ("tests/parity/test_pipeline_bytes.py", "SCHEDULES"): set(),
    ("tests/parity/test_pipeline_3d.py", "SCHEDULES"): {"naive", "zb-h2"},
    ("tests/harness/engine_memory.py", "SCHEDULES"): set(),
}


def words_of(file: str, name: str) -> set[str]:
    """The texts in what a module assigns to a name."""
    for node in ast.parse((ROOT / file).read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    raise AssertionError(f"{file} has no {name}")


def recipe(title: str) -> str:
    return " ".join(PAGE[PAGE.index(f"\n## {title}\n") :].split("\n## ")[1].split())


@pytest.mark.parametrize("place", OPTIMIZER_LISTS, ids=lambda place: place[0])
def test_every_optimizer_with_a_rule_off_the_device_is_in_the_lists_of_the_tests(place):
    ruled = {name for name, kind in optimizer_names().items() if has_rule(kind)}
    missing = ruled - words_of(*place) - OPTIMIZER_LISTS[place]
    assert not missing, f"{place[1]} of {place[0]} lacks {missing}: with its options there, the new rule is tested"
    assert f"`{place[1]}` in `{place[0]}`" in recipe("An optimizer")


def test_every_optimizer_of_a_config_has_its_states_in_the_layouts_table():
    assert set(optimizer_names()) == set(OPTIMIZER_STATES)


def test_an_optimizer_of_ours_has_a_rule_off_the_device():
    ours = [kind for kind in optimizer_names().values() if kind.__module__.startswith("shardwise.")]
    assert [kind for kind in ours if not has_rule(kind)] == []


@pytest.mark.parametrize("place", SCHEDULE_LISTS, ids=lambda place: place[0])
def test_every_schedule_is_in_the_lists_of_the_tests(place):
    missing = set(RECIPES) - words_of(*place) - SCHEDULE_LISTS[place]
    assert not missing, f"{place[1]} of {place[0]} lacks {missing}; add it, or say here which one stands for it"
    assert f"`{place[0]}`" in recipe("A pipeline schedule")


class Signed(Optimizer):
    """Steps by the sign of a momentum: an optimizer as one adds it."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("velocity", torch.zeros_like(param))
                    signed(group, PieceTensors([param], [param.grad], [state], 0.0, False))


def signed(options: Any, parts: PieceTensors) -> None:
    for param, grad, velocity in zip(parts.params, parts.grads, parts.all("velocity"), strict=True):
        velocity.mul_(options["momentum"]).add_(grad)
        param.sub_(velocity.sign(), alpha=options["lr"])


def trained(tier: str, folder: Path) -> list[torch.Tensor]:
    """Weights and velocity after three steps with a save and a load between."""
    torch.manual_seed(0)
    tiers = {"optimizer": tier} | ({"nvme_path": str(folder / "swap")} if tier == "nvme" else {})
    config = {
        "optimizer": {"name": "signed", "lr": 0.1, "momentum": 0.5, "clip_norm": None},
        "zero": {"stage": 3},
        "precision": {"param": "fp32"},
        "run": {"device": "cpu"},
        "tiers": tiers,
    }
    model = nn.Linear(3, 2)
    with shardwise.initialize(model, config, loss_fn=lambda output, batch: output.square().sum()) as engine:
        engine.train_step([torch.ones(1, 3)])
        engine.save(folder / tier)
        engine.train_step([torch.ones(1, 3)])
        engine.load(folder / tier)
        engine.train_step([torch.full((1, 3), -2.0)])
        return [engine.read("weight"), engine.read("weight", "velocity")]


def test_the_recipe_for_an_optimizer_works_as_it_is_written(monkeypatch, tmp_path):
    known = optimizer_names()
    monkeypatch.setattr(optimizers, "optimizer_names", lambda: {**known, "signed": Signed})  # 1
    monkeypatch.setattr(layout, "OPTIMIZER_STATES", {**OPTIMIZER_STATES, "signed": ("velocity",)})  # 3
    rule = CpuOptimizer(Signed, lambda options: {"velocity": 0.0}, False, signed)
    monkeypatch.setattr(cpu_optimizer, "_RULES", {**cpu_optimizer._RULES, Signed: rule})  # 4
    expected = trained("device", tmp_path)
    assert expected[1].count_nonzero()
    for tier in ("host", "nvme"):
        for found, wanted in zip(trained(tier, tmp_path), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    copied = CpuOptimizer(Signed, cpu_optimizer._adam_states, True, cpu_optimizer._step_adam)
    monkeypatch.setattr(cpu_optimizer, "_RULES", {**cpu_optimizer._RULES, Signed: copied})
    with refused("rule-of-other-optimizer", "the rule of Signed asks for"):
        trained("nvme", tmp_path / "copied")
