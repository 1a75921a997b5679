"""Which tiers a config may name for which states, and what is said of the others: value, rule and fix."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from harness.refusals import refused
from shardwise.config.resolve import Config
from shardwise.config.sections import Tier

TIERS: tuple[Tier, ...] = ("device", "host", "nvme")


def resolve(stage: int = 2, recompute: str = "none", **tiers: Any) -> Config:
    sections = {"zero": {"stage": stage}, "recompute": {"mode": recompute}, "tiers": tiers}
    return Config.from_dict(sections).resolve(world_size=2)


@pytest.mark.parametrize(("params", "grads", "optimizer"), list(product(TIERS, TIERS, TIERS)))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_combination_is_legal_but_parameters_away_below_stage_3(
    stage: int, params: Tier, grads: Tier, optimizer: Tier
) -> None:
    tiers = {"params": params, "grads": grads, "optimizer": optimizer}
    if "nvme" in tiers.values():
        tiers["nvme_path"] = "swap"
    if stage == 3 or params == "device":
        assert resolve(stage, **tiers).tiers.model_dump(include={*tiers}) == tiers
    else:
        with refused("tier-needs-stage-3", f"tiers.params={params}", "zero.stage=3"):
            resolve(stage, **tiers)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"params": "host"}, ("tier-needs-stage-3", "tiers.params=host", "not 2", "set zero.stage=3")),
        ({"stage": 0, "grads": "host"}, ("tier-needs-shards", "tiers.grads=host", "set zero.stage=2")),
        (
            {"stage": 0, "params": "nvme", "nvme_path": "swap"},
            ("tier-needs-shards", "tiers.params=nvme", "set zero.stage=3"),
        ),
        ({"optimizer": "nvme"}, ("no-swap-folder", "tiers.optimizer=nvme", "set tiers.nvme_path")),
        ({"optimizer": "nvme", "nvme_path": ""}, ("no-swap-folder", "tiers.optimizer=nvme", "set tiers.nvme_path")),
        (
            {"optimizer": "host", "nvme_path": "/swap"},
            ("path-without-nvme", "tiers.nvme_path=/swap", "set tiers.optimizer=nvme"),
        ),
        (
            {"optimizer": "host", "grads_on_device": 0.25},
            ("share-without-tier", "tiers.grads_on_device=0.25", "set tiers.grads=host"),
        ),
        ({"params_on_device": 1.0}, ("share-without-tier", "tiers.params_on_device=1.0", "set tiers.params=host")),
        (
            {"activations": "host"},
            ("activations-need-recompute", "tiers.activations=host", "set recompute.mode=full"),
        ),
    ],
)
def test_what_cannot_be_or_does_nothing_is_refused(options: dict[str, Any], refusal: tuple[str, ...]) -> None:
    with refused(*refusal):
        resolve(**options)


def test_what_goes_together_is_accepted() -> None:
    assert resolve(2, optimizer="host", optimizer_on_device=1.0).tiers.optimizer_on_device == 1.0
    assert resolve(0, recompute="full", activations="host").tiers.activations == "host"
    assert resolve(1, recompute="selective", activations="host").tiers.activations == "host"
    sections = {"zero": {"stage": 3, "replicate_frozen": True}, "tiers": {"params": "host"}}
    assert Config.from_dict(sections).resolve(world_size=1).zero.replicate_frozen


def test_the_fixes_fix() -> None:
    """Taken one after the other they lead to a config that runs."""
    config = Config.from_dict({"zero": {"stage": 0}, "tiers": {"params": "nvme", "activations": "host"}})
    for code, fix in (
        ("tier-needs-shards", "zero.stage=3"),
        ("no-swap-folder", "tiers.nvme_path=swap"),
        ("activations-need-recompute", "recompute.mode=full"),
    ):
        with refused(code, fix.partition("=")[0]):
            config.resolve(world_size=1)
        config = config.override([fix])
    assert config.resolve(world_size=1).tiers.params == "nvme"
