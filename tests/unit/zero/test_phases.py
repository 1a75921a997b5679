"""The sharding state goes through its phases in the order that its table allows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.training import make_config
from shardwise import initialize
from shardwise.zero.unit import LEGAL, Phase


def test_phases_follow_each_other_as_the_table_says() -> None:
    seen: list[Phase] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    with initialize(model, make_config(1, {}), loss_fn=lambda output, batch: output.sum()) as engine:
        sharding = engine.step_context.sharding
        model[1].register_forward_hook(lambda *given: seen.append(sharding.phase))
        model[1].weight.register_hook(lambda gradient: seen.append(sharding.phase))
        engine.train_step([torch.ones(1, 2, dtype=torch.float64)])
        assert seen == [Phase.FORWARD, Phase.BACKWARD]
        assert sharding.phase is Phase.IDLE


def test_a_step_of_the_engine_within_its_backward_is_refused() -> None:
    model = nn.Linear(2, 1).double()
    engine = initialize(model, make_config(1, {}), loss_fn=lambda output, batch: output.sum())
    sharding = engine.step_context.sharding
    model.weight.register_hook(lambda gradient: sharding.refresh({}, at_once=False))
    with pytest.raises(RuntimeError, match=r"cannot go from .*BACKWARD to STEPPING"):
        engine.train_step([torch.ones(1, 2, dtype=torch.float64)])


def test_every_phase_can_be_left_for_idle() -> None:
    assert all(Phase.IDLE in after for after in LEGAL.values())
    assert LEGAL.keys() == set(Phase)
