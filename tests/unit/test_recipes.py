"""Recipes of docs/extending.md are followed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from harness.refusals import refused
from shardwise.optim import rules
from shardwise.optim.elementwise import ElementWise, StepTensors
from shardwise.optim.rules import RULES, OptimizerRule, StateRule


class Signed(ElementWise):
    """Steps by the sign of a momentum: an optimizer as one adds it."""

    STATES = ("velocity",)
    COUNTS = False

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @staticmethod
    def kernel(options: Any, tensors: StepTensors) -> None:
        for param, grad, velocity in tensors.blocks("velocity"):
            velocity.mul_(options["momentum"]).add_(grad)
            param.sub_(velocity.sign(), alpha=options["lr"])


def add_row(monkeypatch: pytest.MonkeyPatch, rule: OptimizerRule) -> None:
    monkeypatch.setattr(rules, "_BY_NAME", {**{each.name: each for each in RULES}, rule.name: rule})


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
    """A class and a row."""
    row = OptimizerRule("signed", Signed, (StateRule("velocity"),), has_counter=False, kernel=Signed.kernel)
    add_row(monkeypatch, row)
    expected = trained("device", tmp_path)
    assert expected[1].count_nonzero()
    for tier in ("host", "nvme"):
        for found, wanted in zip(trained(tier, tmp_path), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    adam = rules.named_rule("adam")
    add_row(monkeypatch, replace(adam, name="signed", made_by=Signed))
    with refused("rule-of-other-optimizer", "the rule of Signed asks for"):
        trained("nvme", tmp_path / "copied")
