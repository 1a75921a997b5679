"""Optimizers by name are element-wise, since they see pieces; schedules have the shape their name says."""

import inspect
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.refusals import refused
from shardwise import initialize
from shardwise.config.resolve import Config, OptimizerConfig, SchedulerConfig
from shardwise.optim.elementwise import ElementWise
from shardwise.optim.muon import MuonWithAdamW
from shardwise.optim.rules import build_optimizer, rules_by_name, state_names
from shardwise.optim.schedules import learning_rate_factor, own_scheduler, schedule_of

ALL_OF_TORCH = {
    name: kind
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, Optimizer) and kind is not Optimizer
}
NUMEL, NUM_STEPS = 11, 4


def train(name: str, bounds: list[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Optimizer]:
    """The same weights under the same gradients, held as the pieces between `bounds`."""
    torch.manual_seed(0)
    weights, gradients = torch.randn(NUMEL).to(dtype), torch.randn(NUM_STEPS, NUMEL).to(dtype)
    ranges = [slice(start, stop) for start, stop in zip([0, *bounds], [*bounds, NUMEL], strict=True)]
    pieces = [nn.Parameter(weights[each].clone()) for each in ranges]
    optimizer = build_optimizer(OptimizerConfig(name=name, lr=0.1), [{"params": pieces}])
    for gradient in gradients:
        for piece, each in zip(pieces, ranges, strict=True):
            piece.grad = gradient[each].clone()
        optimizer.step()
    return torch.cat([piece.detach() for piece in pieces]), optimizer


@pytest.mark.parametrize("name", rules_by_name())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_on_pieces_is_the_step_on_the_whole(name: str, dtype: torch.dtype) -> None:
    whole, _ = train(name, [], dtype)
    # Vectorised kernels round the last bit of an element by where it is.
    close = {"rtol": 1e-5 if dtype == torch.float32 else 1e-13, "atol": 0.0}
    for bounds in ([4], [1, 8]):
        torch.testing.assert_close(train(name, bounds, dtype)[0], whole, **close)


def test_a_class_of_its_own_keeps_what_its_row_names() -> None:
    """Where it steps on the device, its states are those that it makes itself: zeros."""
    own = [rule for rule in rules_by_name().values() if issubclass(rule.kind, ElementWise)]
    assert own
    for rule in own:
        assert {state.name for state in rule.states} == set(rule.kind.STATES)
        assert {state.first for state in rule.states} == {0.0}
        assert rule.has_counter is rule.kind.COUNTS


def test_every_optimizer_of_torch_is_taken_or_refused_by_name() -> None:
    left_out = {"Adafactor", "LBFGS", "Muon", "SparseAdam"} & set(ALL_OF_TORCH)
    kinds = {rule.kind for rule in rules_by_name().values()}
    assert kinds & set(ALL_OF_TORCH.values()) == {ALL_OF_TORCH[name] for name in set(ALL_OF_TORCH) - left_out}
    assert rules_by_name()["muon"].kind is MuonWithAdamW  # torch's Muon would see pieces
    for name in left_out - {"Muon"}:
        with refused("optimizer-element-wise", f"optimizer.name='{name}'", "adadelta"):
            build_optimizer(OptimizerConfig(name=name), [])


def test_unknown_names_are_refused() -> None:
    with refused("unknown-optimizer", "optimizer.name='adamm'", "adamw"):
        build_optimizer(OptimizerConfig(name="adamm"), [])
    with refused("unknown-optimizer") as caught:
        build_optimizer(OptimizerConfig(name="x" * 5000), [])
    assert len(str(caught.value)) < 500


def test_settings_reach_those_that_know_them() -> None:
    config = OptimizerConfig(lr=0.5, betas=(0.1, 0.2), eps=0.3, momentum=0.4, weight_decay=0.6)
    known: dict[str, dict[str, Any]] = {
        "AdamW": {"lr": 0.5, "betas": (0.1, 0.2), "eps": 0.3, "weight_decay": 0.6},
        "sgd": {"lr": 0.5, "momentum": 0.4, "weight_decay": 0.6},
        "adagrad": {"lr": 0.5, "eps": 0.3, "weight_decay": 0.6},
        "rprop": {"lr": 0.5},
    }
    for name, expected in known.items():
        params = [{"params": [nn.Parameter(torch.ones(1))]}]
        optimizer = build_optimizer(config.model_copy(update={"name": name}), params)
        assert {key: optimizer.defaults[key] for key in expected} == expected
    params = [{"params": [nn.Parameter(torch.ones(1))], "weight_decay": 0.0}]
    assert build_optimizer(config, params).param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "adagrad"])
def test_kernels_are_fused_where_torch_has_them(name: str) -> None:
    assert train(name, [])[1].defaults["fused"] is True


@pytest.mark.parametrize("name", rules_by_name())
def test_the_layouts_table_of_states_is_what_torch_keeps(name: str) -> None:
    """Compared here, where the optimizers are, since the layout builds none."""
    _, optimizer = train(name, [])
    (state,) = optimizer.state.values()
    kept = {key for key, value in state.items() if isinstance(value, Tensor) and value.numel() == NUMEL}
    assert set(state_names(OptimizerConfig(name=name))) == kept


# Schedules

NAMES = st.sampled_from(["constant", "linear", "cosine"])


@given(NAMES, st.integers(0, 20), st.integers(1, 40), st.floats(0, 1))
def test_schedules_rise_to_the_peak_then_fall_to_the_final_ratio(
    name: str, num_warmup: int, num_decay: int, final_ratio: float
) -> None:
    config = SchedulerConfig.model_validate({"name": name, "warmup_steps": num_warmup, "final_ratio": final_ratio})
    factor = learning_rate_factor(config, total_steps=num_warmup + num_decay)
    rise = [factor(step) for step in range(num_warmup)]
    fall = [factor(num_warmup + step) for step in range(num_decay + 1)]
    assert rise == [(step + 1) / num_warmup for step in range(num_warmup)]
    assert fall[0] == pytest.approx(1)
    assert all(late <= early for early, late in itertools.pairwise(fall))
    last = 1.0 if name == "constant" else final_ratio
    assert fall[-1] == pytest.approx(last, abs=1e-12)
    assert factor(num_warmup + num_decay + 100) == fall[-1]


def test_shapes_half_way_down() -> None:
    def at(name: Any, step: int) -> float:
        return learning_rate_factor(SchedulerConfig(name=name, final_ratio=0.2), total_steps=8)(step)

    assert [at(name, 4) for name in ("constant", "linear", "cosine")] == pytest.approx([1.0, 0.6, 0.6])
    assert [at(name, 2) for name in ("constant", "linear")] == pytest.approx([1.0, 0.8])
    assert at("cosine", 2) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)


def rates(config: dict[str, Any]) -> list[float]:
    return [schedule_of(Config.from_dict(config))(step) for step in (2, 4, 10_000)]


def test_total_steps_of_the_config_go_before_the_runs() -> None:
    linear = {"name": "linear", "final_ratio": 0.0}
    assert rates({"scheduler": {**linear, "total_steps": 4}, "run": {"steps": 100}}) == [0.5, 0.0, 0.0]
    assert rates({"scheduler": linear, "run": {"steps": 8}}) == [0.75, 0.5, 0.0]


def test_a_script_that_names_no_schedule_keeps_its_rate() -> None:
    assert rates({}) == rates({"run": {"steps": 8}}) == [1.0, 1.0, 1.0]
    assert rates({"scheduler": {"warmup_steps": 4}}) == [0.75, 1.0, 1.0]
    assert rates({"scheduler": {"total_steps": 4}})[1:] == pytest.approx([0.1, 0.1]), "cosine, where a length is named"


@pytest.mark.parametrize("is_given", [False, True])
def test_a_decay_without_a_length_is_refused(is_given: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if is_given else None
    config: dict[str, Any] = {"scheduler": {"name": "cosine"}, "optimizer": {"lr": 0.1}, "run": {"device": "cpu"}}
    with refused("scheduler-length", "scheduler.total_steps"):
        initialize(model, config, optimizer=optimizer)
    with initialize(
        model, {**config, "scheduler": {"name": "cosine", "total_steps": 1}}, optimizer=optimizer
    ) as engine:
        assert [engine.train_step([torch.ones(1, 2)]).lr for _ in range(2)] == pytest.approx([0.1, 0.01])


def test_the_schedule_drives_every_parameter_group() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (1.0, 10.0)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    section = SchedulerConfig(name="linear", warmup_steps=2, total_steps=4, final_ratio=0.5)
    scheduler = own_scheduler(Config(scheduler=section), optimizer)
    rates = []
    for _ in range(6):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert rates == [[0.5, 5.0], [1.0, 10.0], [1.0, 10.0], [0.75, 7.5], [0.5, 5.0], [0.5, 5.0]]
