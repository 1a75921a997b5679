"""Keys of DeepSpeed's JSON that its engine reads, not Shardwise's config."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise.compat.deepspeed as deepspeed
from harness.refusals import refused

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
