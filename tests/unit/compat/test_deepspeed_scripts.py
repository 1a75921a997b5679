"""What scripts call on DeepSpeed's engine and read of its parameters, on one process."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import shardwise.compat.deepspeed as deepspeed
from harness.refusals import refused
from shardwise.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from shardwise.compat.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

X = torch.ones(2, 4)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def start(stage: int, optimizer: Any = None, model: nn.Module | None = None, **keys: Any) -> Any:
    model = network() if model is None else model
    zero = {"stage": stage, "stage3_param_persistence_threshold": 4}
    own = {} if optimizer is not None else {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **own, **keys}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)


def loss_of(engine: Any, factor: float = 1.0) -> Any:
    return engine(X.to(next(engine.module.parameters()).dtype)).sum() * factor


@STAGES
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_the_norm_of_a_step_that_is_left_out_is_infinite(stage: int, kind: str) -> None:
    engine, *_ = start(stage, **{kind: {"enabled": True}})
    for factor in (math.inf, math.nan):
        engine.backward(loss_of(engine, factor))
        engine.step()
        assert (engine.get_global_grad_norm(), engine.was_step_applied()) == (math.inf, False)
    engine.destroy()


@STAGES
def test_a_step_is_taken_whatever_its_gradients_are_where_the_json_says_not_to_look(stage: int) -> None:
    engine, *_ = start(stage, bf16={"enabled": True, "check_grad_overflow": False})
    for factor in (math.nan, 1.0):
        engine.backward(loss_of(engine, factor))
        engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.was_step_applied()) == (2, 0, True)
    assert engine.inner.read("0.weight").isnan().all()
    engine.destroy()


@pytest.mark.parametrize("fp16", [{}, {"loss_scale": 1}, {"loss_scale": 8}])
def test_a_scaled_loss_has_its_own_backward(fp16: dict[str, Any]) -> None:
    norms = []
    for calls in (("engine", "engine"), ("own", "own"), ("engine", "own"), ("own", "engine")):
        engine, *_ = start(1, fp16={"enabled": True, "initial_scale_power": 6, **fp16}, gradient_accumulation_steps=2)
        for call in calls:
            loss = loss_of(engine)
            _ = engine.backward(loss) if call == "engine" else engine.scale(loss).backward()
            engine.step()
        assert engine.global_steps == 1
        norms.append(engine.get_global_grad_norm())
        if fp16.get("loss_scale") != 1:
            with refused("backward-unscaled"):
                loss_of(engine).backward()
        engine.destroy()
    assert norms == norms[:1] * 4


@STAGES
def test_gradients_are_reduced_once_where_a_script_asks_for_it(stage: int) -> None:
    engine, *_ = start(stage)
    with engine.coalesce_grad_reduction():
        engine.backward(loss_of(engine))
        engine.backward(loss_of(engine))
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


def test_without_zero_the_optimizer_is_the_given_one() -> None:
    model = network()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    StepLR(given, 1)  # patches the optimizer's step
    engine, optimizer, *_ = start(0, given, model)
    assert optimizer is given
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = LambdaLR(optimizer, lambda number: 0.5**number)
        engine.backward(loss_of(engine))
        optimizer.zero_grad()
        engine.backward(loss_of(engine))
        engine.step()
        schedule.step()
    value = engine.inner.read("0.weight")
    optimizer.step()  # the engine has stepped
    assert torch.equal(engine.inner.read("0.weight"), value)
    engine.destroy()
    assert "zero_grad" not in vars(given)
    assert type(start(1)[1]).__name__ == "DeepSpeedOptimizer"


@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam])
def test_an_optimizer_is_an_instance_of_the_class_that_has_made_it(kind: Any) -> None:
    made = kind(network().parameters())
    assert isinstance(made, kind)
    assert isinstance(made, torch.optim.Optimizer)
    assert not isinstance(torch.optim.AdamW(network().parameters()), kind)


@STAGES
def test_transforms_of_torch_run_through_the_engine(stage: int) -> None:
    plain, x = network(), torch.randn(3, 4)
    engine, *_ = start(stage)
    values = {name: parameter.detach() for name, parameter in plain.named_parameters()}

    def loss_at(model: nn.Module) -> Any:
        return lambda params, row: torch.func.functional_call(model, params, (row[None],)).sum()

    def results(model: Any, inner: nn.Module) -> list[Any]:
        by_sample = torch.func.vmap(torch.func.grad(loss_at(inner)), in_dims=(None, 0))(values, x)
        return [
            torch.func.grad(lambda y: model(y).sum())(x),
            torch.func.vmap(lambda row: model(row[None])[0])(x),
            torch.func.jvp(lambda y: model(y), (x,), (x,))[1],
            *by_sample.values(),
        ]

    torch.testing.assert_close(results(engine, engine.module), results(plain, plain))
    engine.backward(loss_of(engine))
    engine.step()
    plain(X).sum().backward()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        moved = values["0.weight"] - 0.1 * plain[0].weight.grad / max(1.0, engine.get_global_grad_norm())
        torch.testing.assert_close(engine.module[0].weight.detach(), moved, rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("name", ["Init", "MiCS_Init"])
def test_parameters_of_stage_3_have_the_attributes_that_scripts_read(name: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3, "mics_shard_size": 1}}
    with getattr(deepspeed.zero, name)(config_dict_or_path=config):
        early = network()
    engine, *_ = start(3)
    for model in (early, engine.module):
        weight = model[0].weight
        assert (weight.ds_shape, weight.ds_numel, weight.ds_tensor.numel()) == (torch.Size([4, 4]), 16, 16)
        assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        assert not weight.ds_persist
        assert len({parameter.ds_id for parameter in model.parameters()}) == 4
        with deepspeed.zero.GatheredParameters(model.parameters()), deepspeed.zero.GatheredParameters(weight):
            assert weight.ds_status is ZeroParamStatus.AVAILABLE
        assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert not hasattr(start(2)[0].module[0].weight, "ds_id")
    engine.destroy()


@STAGES
def test_a_load_of_a_save_within_an_accumulation_begins_the_step_again(stage: int, tmp_path: Path) -> None:
    engine, *_ = start(stage, gradient_accumulation_steps=2)
    for _ in range(3):
        engine.backward(loss_of(engine))
        engine.step()
    engine.save_checkpoint(tmp_path, tag=7)
    engine.backward(loss_of(engine))
    engine.step()
    assert engine.global_steps == 2
    value = engine.inner.read("0.weight")
    engine.load_checkpoint(tmp_path, tag=7)
    for number in range(2):
        engine.backward(loss_of(engine))
        assert engine.is_gradient_accumulation_boundary() == bool(number)
        engine.step()
    assert engine.global_steps == 2
    torch.testing.assert_close(engine.inner.read("0.weight"), value)
    with refused("save-dir-missing"):
        engine.save_checkpoint(None)
    engine.destroy()


@STAGES
def test_one_loss_trains_two_engines_under_accumulation(stage: int) -> None:
    def networks() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.Linear(4, 4), nn.Linear(4, 1)

    plain, models = networks(), networks()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in plain]
    keys = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
    first, second = (start(stage, model=model, **keys)[0] for model in models)
    for number in range(4):
        x = X * (number + 1)
        second.backward(second(first(x)).square().mean())
        first.step()
        second.step()
        (plain[1](plain[0](x)).square().mean() / 2).backward()
        if number % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for engine, model in zip((first, second), plain, strict=True):
        torch.testing.assert_close(engine.inner.read("weight"), model.weight.detach())
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_would_be_lost_are_refused(stage: int) -> None:
    """In stage 0 DeepSpeed clips what torch's functions find; in its other stages they find nothing."""
    engine, *_ = start(stage)
    engine.backward(loss_of(engine))
    parameters = list(engine.module.parameters())
    if stage == 0:
        with refused("gradients-clipped-outside", "gradient_clipping"):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    else:
        assert torch.nn.utils.clip_grad_norm_(parameters, 1.0) == 0
    with refused("gradient-assigned", "weight", "safe_set_full_grad"):
        parameters[0].grad = torch.ones(parameters[0].shape)
    parameters[0].grad = None
    engine.step()
    engine.destroy()
