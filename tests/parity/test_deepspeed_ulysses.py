"""Sequences over ranks as Accelerate and the Trainer ask DeepSpeed for them: the losses of one process, in float64."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import shardwise.compat.deepspeed as deepspeed
from harness.huggingface import make_case
from harness.pool import RankError, WorkerPool
from shardwise.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import (
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
)
from shardwise.compat.deepspeed.utils import groups
from shardwise.runtime.float64 import float64_throughout

STEPS, LR, SHARERS = 3, 0.05, 2


def batches(rank: int) -> list[dict[str, Tensor]]:
    """The loader of a rank: sequences of several lengths, some of whose tokens are of a prompt."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for step in range(STEPS):
        tokens = torch.randint(1, 30, (2, 8 + 4 * (step % 2)), generator=generator)
        labels = tokens.clone()
        labels[0, : 2 + 3 * rank] = -100
        positions = torch.arange(tokens.shape[1]).expand(2, -1)
        found.append({"input_ids": tokens, "position_ids": positions, "labels": labels})
    return found


def build() -> Any:
    return make_case("llama").build(torch.float64, seed=0)


def expected(num_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    with float64_throughout():
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        losses = []
        for given in zip(*(batches(rank) for rank in range(num_ranks)), strict=True):
            loss = torch.stack([model(**each).loss for each in given]).mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, {name: value.detach() for name, value in model.named_parameters()}


def train(rank: int, world_size: int, stage: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train by the Trainer's own loss; each step takes the batches of all ranks that share sequences."""
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    config = {
        "train_batch_size": 2 * world_size,
        "gradient_accumulation_steps": SHARERS,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage},
    }
    asked = SimpleNamespace(sp_backend="deepspeed", sp_size=SHARERS)
    names = {"deepspeed": deepspeed, "deepspeed.utils": deepspeed.utils, "deepspeed.utils.groups": groups}
    with float64_throughout(), patch.dict(sys.modules, names):
        model = build()
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model, "sdpa", SHARERS, micro_batch_size=2, disable_in_eval=True
        )
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
        engine.train()
        shared = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_world_size()
        assert (mpu.get_sequence_parallel_rank(), shared[1]) == (rank % SHARERS, SHARERS)
        assert groups._get_sequence_parallel_group() is shared[0]
        loader = UlyssesSPDataLoaderAdapter(batches(rank), rank % SHARERS, *shared, engine.device)
        assert len(loader) == STEPS * SHARERS
        losses, total = [], 0.0
        for inputs in loader:
            loss = deepspeed_sp_compute_loss(None, engine, inputs, False, asked)
            total += loss.item() / SHARERS
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                losses.append(total)
                total = 0.0
            engine.step()
        engine.eval()
        with torch.no_grad():
            own = [engine(**each).loss.item() for each in batches(rank)]
        return losses, own, {name: engine.inner.read(name) for name, _ in model.named_parameters()}


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (2, 2), (2, 3)])
def test_shared_sequences_equal_one_process(ranks: WorkerPool, world_size: int, stage: int) -> None:
    losses, parameters = expected(world_size)
    results = ranks(world_size).run(train, stage)
    means = [sum(each) / world_size for each in zip(*(found for found, _, _ in results), strict=True)]
    assert means == pytest.approx(losses, rel=1e-9)
    for name, value in parameters.items():
        torch.testing.assert_close(results[0][2][name], value, rtol=1e-7, atol=1e-10)
    with float64_throughout(), torch.no_grad():
        model = build()
        model.load_state_dict({**model.state_dict(), **results[0][2]})
        for rank, (_, own, _) in enumerate(results):
            assert own == pytest.approx([model(**each).loss.item() for each in batches(rank)], rel=1e-9)


def test_one_rank_a_sequence_registers_nothing() -> None:
    assert UlyssesSPAttentionHF.register_with_transformers("any", "sdpa", 1, micro_batch_size=2) is None
    assert groups._get_sequence_parallel_world_size() == 1


def register(rank: int, world_size: int) -> None:
    UlyssesSPAttentionHF.register_with_transformers("any", "sdpa", 3, micro_batch_size=2)


def test_refusals(ranks: WorkerPool) -> None:
    with pytest.raises(KeyError, match="register_with_transformers"):
        groups._get_sequence_parallel_group()
    with pytest.raises(NotImplementedError, match="sequence_parallel_size"):
        deepspeed.sequence.layer.DistributedAttention(torch.nn.Identity(), None)
    with pytest.raises(RankError) as caught:
        ranks(2).run(register)
    assert caught.value.code == "sequence-parallel-size"
