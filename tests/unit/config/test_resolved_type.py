"""Whether a config is resolved is in its type: `refused_by_types.py` has what mypy refuses."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch

from harness.refusals import refused
from shardwise import Config, build_layout, plan_layout
from shardwise.config.resolve import ResolvedConfig
from shardwise.train.run import config_of
from shardwise.train.setup import CONFIG_NAME


def test_what_a_resolved_config_has_written_is_resolved() -> None:
    config = Config.from_dict({"zero": {"stage": 3}}).resolve(4)
    for again in (ResolvedConfig.from_json(config.to_json()), ResolvedConfig.of(Config.from_json(config.to_json()))):
        assert (type(again), again) == (ResolvedConfig, config)
    with refused("config-not-resolved", "resolve(world_size)"):
        ResolvedConfig.from_json(Config().to_json())
    model = torch.nn.Linear(2, 2)
    for lay_out in (plan_layout, build_layout):
        assert lay_out(model, Config.from_json(config.to_json())) == lay_out(model, config)
        with refused("config-not-resolved", "resolve(world_size)"):
            lay_out(model, Config())


def test_a_rank_refuses_a_config_that_its_launcher_has_not_resolved(tmp_path: Path) -> None:
    for config in (Config().resolve(2), Config()):
        (tmp_path / CONFIG_NAME).write_text(config.to_json())
        with nullcontext() if isinstance(config, ResolvedConfig) else refused("config-not-resolved"):
            assert config_of(tmp_path) == config


def test_resolved_or_not_configs_of_equal_values_are_equal() -> None:
    config = Config().resolve(2)
    plain = Config.from_json(config.to_json())
    assert config == plain
    assert hash(config) == hash(plain)
    assert config != Config()
    assert type(config.override(["zero.stage=1"])) is Config  # other values are to be checked again
