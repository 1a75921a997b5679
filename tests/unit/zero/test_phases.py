"""The sharding state goes through its phases in the order that its table allows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.training import make_config
from shardwise import initialize
from shardwise.zero import flat_buffer, grad_buckets
from shardwise.zero.flat_buffer import FlatBuffer, ParamState
from shardwise.zero.grad_buckets import GradBucket, GradState
from shardwise.zero.unit import LEGAL, Phase


def test_phases_follow_each_other_as_the_table_says() -> None:
    seen: list[Phase] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    with initialize(model, make_config(1, {}), loss_fn=lambda output, batch: output.sum()) as engine:
        sharding = engine.parts.sharding
        model[1].register_forward_hook(lambda *given: seen.append(sharding.phase))
        model[1].weight.register_hook(lambda gradient: seen.append(sharding.phase))
        engine.train_step([torch.ones(1, 2, dtype=torch.float64)])
        assert seen == [Phase.FORWARD, Phase.BACKWARD]
        assert sharding.phase is Phase.IDLE


def test_a_step_of_the_engine_within_its_backward_is_refused() -> None:
    model = nn.Linear(2, 1).double()
    engine = initialize(model, make_config(1, {}), loss_fn=lambda output, batch: output.sum())
    sharding = engine.parts.sharding
    model.weight.register_hook(lambda gradient: sharding.refresh({}, at_once=False))
    with pytest.raises(RuntimeError, match=r"cannot go from .*BACKWARD to STEPPING"):
        engine.train_step([torch.ones(1, 2, dtype=torch.float64)])


def test_every_phase_can_be_left_for_idle() -> None:
    assert all(Phase.IDLE in after for after in LEGAL.values())
    assert LEGAL.keys() == set(Phase)


def test_buffers_go_through_the_states_of_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are gathered, freed and stepped on the host; two backwards reduce before a step."""
    params: set[tuple[ParamState, ParamState]] = set()
    grads: set[tuple[GradState, GradState]] = set()
    enter_params, enter_grads = FlatBuffer.enter, GradBucket._enter

    def note_params(buffer: FlatBuffer, state: ParamState) -> None:
        params.add((buffer.state, state))
        enter_params(buffer, state)

    def note_grads(bucket: GradBucket, state: GradState) -> None:
        grads.add((bucket.state, state))
        enter_grads(bucket, state)

    monkeypatch.setattr(FlatBuffer, "enter", note_params)
    monkeypatch.setattr(GradBucket, "_enter", note_grads)
    config = make_config(2, {"zero": {"stage": 3}, "tiers": {"params": "host", "optimizer": "host"}})
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    with initialize(model, config, loss_fn=lambda output, batch: output.sum()) as engine:
        for _ in range(2):
            engine.train_step([torch.ones(1, 2, dtype=torch.float64)] * 2)
    sharded, stepping, unsharding = ParamState.SHARDED, ParamState.STEPPING, ParamState.UNSHARDING
    unsharded, reducing, summed = ParamState.UNSHARDED, GradState.REDUCING, GradState.SUMMED
    gathers = {(sharded, unsharding), (unsharding, unsharded), (unsharded, sharded)}
    assert gathers | {(sharded, stepping), (stepping, sharded)} <= params
    assert {(GradState.EMPTY, reducing), (reducing, summed), (summed, reducing), (summed, GradState.EMPTY)} <= grads


def test_no_state_of_a_buffer_is_a_dead_end_and_illegal_ones_are_refused() -> None:
    assert flat_buffer.LEGAL.keys() == set(ParamState) == set().union(*flat_buffer.LEGAL.values())
    assert grad_buckets.LEGAL.keys() == set(GradState) == set().union(*grad_buckets.LEGAL.values())
    assert all(GradState.EMPTY in after for after in grad_buckets.LEGAL.values())
    model = nn.Linear(2, 1).double()
    with initialize(model, make_config(1, {}), loss_fn=lambda output, batch: output.sum()) as engine:
        (group,) = engine.parts.sharding.groups
        with pytest.raises(RuntimeError, match=r"parameters of .* cannot go from UNSHARDED to STEPPING"):
            group.enter(ParamState.STEPPING)
        assert group.grads is not None
        with pytest.raises(RuntimeError, match=r"gradients of .* cannot go from EMPTY to SUMMED"):
            group.grads._enter(GradState.SUMMED)
