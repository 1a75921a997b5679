"""Which memories a config may name for which states, and what is said of the others: value, rule and cure."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from shardwise.config.resolve import Config, ConfigError
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
        with pytest.raises(ConfigError, match=r"needs zero\.stage=3"):
            resolve(stage, **tiers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"params": "host"},
            "tiers.params=host needs zero.stage=3, which gathers parameters for their use, not 2; set zero.stage=3",
        ),
        (
            {"stage": 0, "grads": "host"},
            "tiers.grads=host needs zero.stage=1 or more, in which each rank has a slice to move, not 0; "
            "set zero.stage=2",
        ),
        (
            {"stage": 0, "params": "nvme", "nvme_path": "swap"},
            "tiers.params=nvme needs zero.stage=1 or more, in which each rank has a slice to move, not 0; "
            "set zero.stage=3",
        ),
        (
            {"optimizer": "nvme"},
            "tiers.optimizer=nvme needs a folder for the files that states rest in; "
            "set tiers.nvme_path to one on a local disk",
        ),
        (
            {"optimizer": "nvme", "nvme_path": ""},
            "tiers.optimizer=nvme needs a folder for the files that states rest in; "
            "set tiers.nvme_path to one on a local disk",
        ),
        (
            {"optimizer": "host", "nvme_path": "/swap"},
            "tiers.nvme_path=/swap is the folder of states on NVMe, and none rest there; "
            "set tiers.optimizer=nvme or leave the path out",
        ),
        (
            {"optimizer": "host", "grads_on_device": 0.25},
            "tiers.grads_on_device=0.25 is a share of what rests elsewhere, and all grads rest on the device; "
            "set tiers.grads=host or leave the share out",
        ),
        (
            {"params_on_device": 1.0},
            "tiers.params_on_device=1.0 is a share of what rests elsewhere, and all params rest on the device; "
            "set tiers.params=host or leave the share out",
        ),
        (
            {"activations": "host"},
            "tiers.activations=host moves the inputs of recomputed blocks, and recompute.mode=none recomputes "
            "none; set recompute.mode=full",
        ),
    ],
)
def test_what_cannot_be_or_does_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(**options)
    assert str(caught.value) == message


def test_what_goes_together_is_accepted() -> None:
    assert resolve(2, optimizer="host", optimizer_on_device=1.0).tiers.optimizer_on_device == 1.0
    assert resolve(0, recompute="full", activations="host").tiers.activations == "host"
    assert resolve(1, recompute="selective", activations="host").tiers.activations == "host"
    sections = {"zero": {"stage": 3, "replicate_frozen": True}, "tiers": {"params": "host"}}
    assert Config.from_dict(sections).resolve(world_size=1).zero.replicate_frozen


def test_the_cures_cure() -> None:
    """Taken one after the other they lead to a config that runs."""
    config = Config.from_dict({"zero": {"stage": 0}, "tiers": {"params": "nvme", "activations": "host"}})
    for cure in ("zero.stage=3", "tiers.nvme_path=swap", "recompute.mode=full"):
        with pytest.raises(ConfigError, match=cure.partition("=")[0]):
            config.resolve(world_size=1)
        config = config.override([cure])
    assert config.resolve(world_size=1).tiers.params == "nvme"
