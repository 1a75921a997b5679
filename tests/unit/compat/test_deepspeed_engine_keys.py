"""What DeepSpeed's engine counts, skips, loads and reads of the JSON."""

from __future__ import annotations

import logging
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise.compat.deepspeed as deepspeed
from harness.refusals import refused
from shardwise.compat.deepspeed.runtime.utils import move_to_device

SAMPLES = [(torch.ones(2), torch.ones(1)) for _ in range(5)]


def start(**keys: Any) -> tuple[Any, Any]:
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **keys}
    engine, _, loader, _ = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config, training_data=SAMPLES)
    return engine, loader


@pytest.mark.parametrize("is_cast", [True, False])
def test_inputs_are_cast_where_the_json_says_it(is_cast: bool) -> None:
    engine, _ = start(fp16={"enabled": True, "auto_cast": is_cast})
    try:
        if is_cast:
            assert engine(torch.ones(2, 2)).dtype == torch.float16
            return
        with pytest.raises(RuntimeError, match="dtype"):
            engine(torch.ones(2, 2))
    finally:
        engine.destroy()


@pytest.mark.parametrize(("drops", "num_batches"), [(False, 3), (True, 2)])
def test_the_last_batch_is_dropped_where_the_json_says_it(drops: bool, num_batches: int) -> None:
    engine, loader = start(dataloader_drop_last=drops)
    assert len(list(loader)) == num_batches
    engine.destroy()


def test_a_batch_that_does_not_agree_with_the_ranks_is_refused_before_the_start() -> None:
    with refused("batch-equation", "train_batch_size=2", "train_micro_batch_size_per_gpu 2"):
        start(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)


WARM_UP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}}


def take_step(engine: Any, factor: float = 1.0) -> None:
    engine.backward(engine(torch.ones(2, 2, dtype=next(engine.module.parameters()).dtype)).float().sum() * factor)
    engine.step()


def test_a_step_between_boundaries_only_counts() -> None:
    engine, _ = start(train_batch_size=4, gradient_accumulation_steps=2)
    before = engine.module.weight.detach().clone()
    counts = []
    for _ in range(4):
        take_step(engine)
        counts.append((engine.micro_steps, engine.global_steps, engine.global_samples, engine.was_step_applied()))
        if len(counts) == 1:
            assert torch.equal(engine.module.weight, before)
    assert counts == [(1, 0, 0, False), (2, 1, 4, True), (3, 1, 4, False), (4, 2, 8, True)]
    assert engine.train_batch_size() == 4
    engine.destroy()


def test_an_overflow_halves_the_scale_and_leaves_the_schedule() -> None:
    engine, _ = start(fp16={"enabled": True, "initial_scale_power": 16}, scheduler=WARM_UP)
    before = engine.module.weight.detach().clone()
    take_step(engine, 100.0)  # 100 x 65,536 is more than fp16 holds
    assert engine.optimizer.overflow
    assert not engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (1, 1, 2)
    assert (engine.optimizer.cur_scale, engine.lr_scheduler.last_batch_iteration) == (2.0**15, -1)
    assert torch.equal(engine.module.weight, before)
    take_step(engine, 1e-3)
    assert not engine.optimizer.overflow
    assert engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps, engine.lr_scheduler.last_batch_iteration) == (2, 1, 0)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_ends_the_run_at_the_smallest_scale_and_stage_0_leaves_out_each_step(stage: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 1, "min_loss_scale": 1}
    engine, _ = start(fp16=fp16, zero_optimization={"stage": stage})
    scales = []
    for _ in range(3 if stage == 0 else 2):  # ZeRO leaves the scale at the first overflow
        take_step(engine, 1e6)
        scales.append(engine.loss_scale())
    assert scales == ([1.0] * 3 if stage == 0 else [2.0, 1.0])
    if stage > 0:
        with refused("loss-scale-at-minimum", "step 3", "fp16.min_loss_scale=1"):
            take_step(engine, 1e6)
    assert (engine.global_steps, engine.skipped_steps) == (3, 3)
    engine.destroy()


def test_the_script_owns_the_boundary_where_the_json_says_it() -> None:
    engine, _ = start(managed_gradient_accumulation=False, gradient_clipping=0)
    before = engine.module.weight.detach().clone()
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 2)).sum())
        assert not engine.is_gradient_accumulation_boundary()
    engine.step()
    assert (engine.global_steps, engine.global_samples, engine.was_step_applied()) == (1, 6, True)
    torch.testing.assert_close(engine.module.weight, before - 0.1 * 3 * 2)
    engine.destroy()


def test_what_a_load_takes_and_returns(tmp_path: Path) -> None:
    engine, _ = start(scheduler=WARM_UP)
    assert engine.load_checkpoint(tmp_path) == engine.load_checkpoint(tmp_path / "none") == (None, None)
    with refused("no-such-path", "none"):
        engine.load_checkpoint(tmp_path, tag="none")
    for _ in range(3):
        take_step(engine)
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    saved = engine.module.weight.detach().clone()
    for _ in range(2):
        take_step(engine)
    path, state = engine.load_checkpoint(tmp_path, load_module_only=True)
    assert (Path(path).name, state) == ("global_step3", {"epoch": 3})
    assert torch.equal(engine.module.weight, saved)
    assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (5, 4)
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert (engine.global_steps, engine.global_samples, engine.lr_scheduler.last_batch_iteration) == (3, 6, 4)
    engine.load_checkpoint(tmp_path)
    assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (3, 2)
    take_step(engine)
    engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert engine.lr_scheduler.last_batch_iteration == 3
    engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (3, 2)
    engine.load_module_state_dict({"module": {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}})
    assert engine.module_state_dict(prefix="model.")["model.weight"].tolist() == [[1.0, 1.0]]
    engine.destroy()


def test_an_engine_without_a_schedule_leaves_that_of_a_checkpoint(tmp_path: Path) -> None:
    engine, _ = start(scheduler=WARM_UP)
    take_step(engine)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine, _ = start()
    engine.load_checkpoint(tmp_path)
    assert (engine.global_steps, engine.lr_scheduler) == (1, None)
    engine.save_checkpoint(tmp_path, tag="none")
    engine.load_checkpoint(tmp_path, tag="none")
    engine.destroy()


def test_the_state_of_a_client_comes_back_as_it_was_given_or_is_refused(tmp_path: Path) -> None:
    engine, _ = start()
    state = {"best": torch.tensor(0.1), "rng": random.getstate(), "seen": {0: 5}, "args": Namespace(betas=(0.9, 0.99))}
    engine.save_checkpoint(tmp_path, client_state=state)
    assert engine.load_checkpoint(tmp_path)[1] == state
    with refused("client-state-not-json", "['client_state']['hooks'][0]"):
        engine.save_checkpoint(tmp_path, client_state={"hooks": [print]})
    engine.destroy()


def test_helpers_that_scripts_import(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "DeepSpeed"):
        for ranks in (None, [1], [0], [-1]):
            deepspeed.utils.log_dist(f"ranks {ranks}", ranks=ranks)
    is_alone = not torch.distributed.is_initialized()
    assert len(caplog.messages) == (4 if is_alone else 2)
    assert move_to_device({"x": torch.ones(2)}, "cpu")["x"].tolist() == [1.0, 1.0]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    assert deepspeed.utils.set_z3_leaf_modules(model, [torch.nn.ReLU]) == [model[1]]
    with refused("adam-bias-correction", "bias_correction"):
        deepspeed.ops.adam.FusedAdam(model.parameters(), bias_correction=False)
    adam = deepspeed.ops.adam.FusedAdam(model.parameters(), 0.1, True, (0.8, 0.9), adam_w_mode=False)
    assert (type(adam), adam.defaults["betas"]) == (torch.optim.Adam, (0.8, 0.9))


def test_the_json_sets_the_level_of_the_logger_and_marks_leaf_modules(caplog: pytest.LogCaptureFixture) -> None:
    before = deepspeed.utils.logger.level
    section = {"classes": "torch.nn.modules.linear.Linear", "names": ["1", "9"], "name_suffixes": ["2"]}
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.ReLU())
    config = {"train_batch_size": 1, "zero_optimization": {"leaf_module": section}}
    try:
        engine, *_ = deepspeed.initialize(model=model, config=config | {"log_level": "warning"})
        assert deepspeed.utils.get_z3_leaf_modules(model) == [model[0], model[1], model[2]]
        assert "has no modules ['9']" in caplog.text
        deepspeed.initialize(model=model, config=config | {"log_level": "ERROR"})[0].destroy()
        assert deepspeed.utils.logger.getEffectiveLevel() == logging.ERROR
        with refused("log-level-unknown", "loud"):
            deepspeed.initialize(model=model, config=config | {"log_level": "loud"})
    finally:
        deepspeed.utils.logger.setLevel(before)
        engine.destroy()


def test_a_call_without_a_model_or_config_fails_as_an_assertion_of_deepspeeds() -> None:
    model = torch.nn.Linear(2, 1)
    for given in ({"config": {"train_batch_size": 1}}, {"model": model}, {"args": Namespace(deepspeed_config=None)}):
        with pytest.raises(AssertionError, match="needs a model and a config"):
            deepspeed.initialize(**given)


def test_the_config_may_come_by_the_arguments_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 3}')
    for given in (Namespace(deepspeed_config=path), Namespace(deepspeed_config=None, deepscale_config=str(path))):
        engine, *_ = deepspeed.initialize(given, torch.nn.Linear(2, 1))
        assert engine.train_batch_size() == 3
        engine.destroy()


def test_muon_is_of_our_own_section() -> None:
    config = {"train_batch_size": 2, "shardwise": {"optimizer": {"name": "muon"}}}
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
    take_step(engine)
    states = [set(state) for state in optimizer.state.values()]
    assert {frozenset(each) for each in states} == {
        frozenset({"momentum_buffer"}),
        frozenset({"exp_avg", "exp_avg_sq", "step"}),
    }
    engine.destroy()
    with refused("deepspeed-scheduler-of-ours", "WarmupLR", "shardwise.scheduler.name"):
        deepspeed.initialize(model=model, config={**config, "scheduler": WARM_UP})
