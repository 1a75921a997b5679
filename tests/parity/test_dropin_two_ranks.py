"""What the drop-in does where two ranks differ, as DeepSpeed's own suite asks it of two."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.compat.deepspeed as deepspeed
from harness.pool import WorkerPool
from harness.refusals import refused
from shardwise.compat.deepspeed import utils
from shardwise.compat.deepspeed.config import TAG_RULES, translate
from shardwise.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from shardwise.compat.deepspeed.utils import logger
from shardwise.config.errors import ConfigError

CONFIG = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


def save_by_rank(rank: int, world_size: int, folder: str) -> dict[str, tuple[list[str], list[str]]]:
    """Save under a tag of each rank's own, by each rule; return what is said and which folders there are."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for rule in (None, *TAG_RULES):
        words: list[str] = []
        listener = logging.Handler()
        listener.emit = lambda record, words=words: words.append(record.getMessage())  # type: ignore[method-assign]
        root = Path(folder, str(rule))
        config: dict[str, Any] = {**CONFIG, **({"checkpoint": {"tag_validation": rule.title()}} if rule else {})}
        engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
        logger.addHandler(listener)
        try:
            engine.save_checkpoint(root, tag=f"of-{rank}")
        except AssertionError as error:
            words.append(f"raised: {error}")
        logger.removeHandler(listener)
        engine.save_checkpoint(root, tag="same")
        engine.destroy()
        kept = sorted(path.name for path in root.iterdir() if path.is_dir())
        found[str(rule)] = [word for word in words if "tag=" in word], kept
    return found


def reach_whole(rank: int, world_size: int) -> dict[str, Any]:
    """Ask a sharded model for whole weights, change its gradients, and follow its loss scale over an overflow."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "min_loss_scale": 64}
    section = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {**CONFIG, "zero_optimization": section, "fp16": fp16}
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
    with deepspeed.zero.unwrap_model_for_generation(engine) as whole:
        shapes = [tuple(parameter.shape) for parameter in whole.parameters()]
    scaler = optimizer.loss_scaler
    scales: list[tuple[float, int]] = []
    grads: list[bool] = []
    for factor in (1.0, 1.0, 1.0, float("inf"), float("inf"), 1.0):
        engine.backward(engine.forward(torch.full((1, 4), rank + 1.0).half()).sum())
        before = [utils.safe_get_full_grad(parameter) for parameter in model.parameters()]
        utils.safe_update_full_grad_vectorized(model.parameters(), lambda grad, _, factor=factor: factor * grad)
        after = [utils.safe_get_full_grad(parameter) for parameter in model.parameters()]
        grads.append(all(torch.equal(factor * old, new) for old, new in zip(before, after, strict=True)))
        engine.step()
        scales.append((scaler.cur_scale, scaler.cur_iter))
    is_dynamic = isinstance(scaler, imported("runtime.fp16.loss_scaler", "DynamicLossScaler"))
    found = {"shapes": shapes, "scales": scales, "grads": grads, "is_dynamic": is_dynamic}
    found["settings"] = optimizer.needs_scaler(), optimizer.dynamic_loss_scale, scaler.scale_window, scaler.min_scale
    engine.destroy()
    return found


def imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"shardwise.compat.deepspeed.{module}"), name)


def test_what_scripts_ask_of_a_sharded_model(ranks: WorkerPool) -> None:
    for found in ranks(2).run(reach_whole):
        assert found == {
            "shapes": [(2, 4), (2,)],
            "scales": [(256.0, 1), (256.0, 2), (512.0, 3), (512.0, 4), (256.0, 5), (256.0, 6)],
            "grads": [True] * 6,
            "is_dynamic": True,
            "settings": (True, True, 2, 64),
        }


def test_no_sync_within_no_sync_ends_with_the_outer_one() -> None:
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config={**CONFIG, "train_batch_size": 1})
    state = engine.inner.parts.state
    with engine.no_sync():
        with engine.no_sync():
            assert not state.syncs
        assert not state.syncs
    assert state.syncs
    engine.destroy()


def test_tags_that_differ_are_taken_with_a_word_or_refused(ranks: WorkerPool, tmp_path: Path) -> None:
    first, second = ranks(2).run(save_by_rank, str(tmp_path))
    said = "tag='of-0' on rank 0 and 'of-1' on rank 1"
    for rule in ("None", "WARN"):
        assert first[rule][1] == ["of-0", "same"]
        assert [text.startswith(said) for text in first[rule][0]] == [True]
        assert second[rule][0] == []
    for found in (first, second):
        assert found["FAIL"][1] == ["same"]
        assert found["FAIL"][0][0].startswith(f"raised: {said}")
        assert found["IGNORE"] == ([], ["of-0", "same"])


def test_a_boundary_is_refused_where_each_step_updates() -> None:
    config = {**CONFIG, "train_batch_size": 1, "managed_gradient_accumulation": False}
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    with pytest.raises(AssertionError, match=r"set_gradient_accumulation_boundary\(False\)"):
        engine.set_gradient_accumulation_boundary(False)
    with pytest.raises(AssertionError, match=r"shape \(2, 3\)"):
        engine.scale(torch.ones(2, 3))
    assert not engine.inner.parts.losses.plain.is_next_scaled
    engine.destroy()


def test_an_unknown_rule_of_tags_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.tag_validation='foo'"):
        translate({**CONFIG, "checkpoint": {"tag_validation": "foo"}})


OWN_RANKS = """
import sys
import torch, torch.distributed as dist
from shardwise.compat import deepspeed

rank, folder = int(sys.argv[1]), sys.argv[2]
try:
    deepspeed.init_distributed(dist_init_required=False)
except ValueError as error:
    print(error)
deepspeed.init_distributed("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
deepspeed.init_distributed(dist_init_required=False)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(dist.get_rank(), dist.get_world_size(), total.item())
"""


@pytest.mark.usefixtures("warm_python")
def test_a_script_that_says_its_ranks_has_them(tmp_path: Path) -> None:
    """As one that starts its processes itself: without a word they would train one by one."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", OWN_RANKS]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank, process in enumerate(started):
        refused, found = process.communicate(timeout=120)[0].splitlines()
        assert refused.startswith("dist_init_required=False says")
        assert found == f"{rank} 2 3.0"


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize(
    ("name", "params", "is_adamw"),
    [("Adam", {}, True), ("Adam", {"adam_w_mode": False}, False), ("AdamW", {"adam_w_mode": False}, True)],
)
def test_the_jsons_adam_is_of_deepspeeds_class(name: str, params: dict[str, Any], is_adamw: bool, offload: str) -> None:
    for is_torch in (False, True):
        zero = {"stage": 2, "offload_optimizer": {"device": offload}}
        section = {"type": name, "params": {"lr": 0.1, "torch_adam": is_torch, **params}}
        config = {"train_batch_size": 1, "optimizer": section, "zero_optimization": zero}
        engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
        found = engine.optimizer.optimizer
        assert isinstance(found, FusedAdam) == (not is_torch and offload == "none")
        assert isinstance(found, DeepSpeedCPUAdam) == (not is_torch and offload == "cpu")
        assert isinstance(found, torch.optim.AdamW) == is_adamw
        assert getattr(found, "adam_w_mode", None) == (None if is_torch else is_adamw)
        engine.destroy()


def step_alone(rank: int, world_size: int, stage: int) -> tuple[int, int]:
    config = {**CONFIG, "zero_optimization": {"stage": stage}, "shardwise": {"run": {"timeout_s": 1.0}}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    engine.step()  # of all ranks
    if rank == 0:
        with refused("rank-missing", "rank 1", "step 2", "without a backward"):
            engine.step()
    engine.destroy()
    return engine.global_steps, engine.micro_steps


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_does_not_step_alone_where_it_has_no_gradient(ranks: WorkerPool, stage: int) -> None:
    """It would go on, and add its next gradients to those of the others' present step."""
    assert ranks(2).run(step_alone, stage) == [(1, 1), (1, 1)]
