"""The engine on one CUDA device: streams, pools and the memory tracker, with the machinery of every stage on one rank.

One rank shards nothing, its layout says stage 0, and its communicators call nothing. Here the stage is put back, and
they call NCCL: gathers, reductions and releases run on their streams. The CPU's plain training is compared with it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.echo import LoneFactory, one_rank_shards
from harness.models import CASES, ModelCase, make_batches
from harness.reference import Trace, check_parity
from harness.training import make_config, own_gradients, reference_trace
from shardwise import Engine, build_layout
from shardwise.engine.build import EngineInputs
from shardwise.launch.process_group import ensure_process_group
from shardwise.layout.zero_stages import STAGES
from shardwise.runtime.memory_tracker import Category, MemoryTracker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    ensure_process_group("cuda", timeout_s=60.0)
    with one_rank_shards():
        yield
    dist.destroy_process_group()


def make_engine(case: ModelCase, stage: int, num_micro_batches: int, **sections: dict[str, Any]) -> Engine:
    overrides = {"run": {"device": "cuda"}, "zero": {"stage": stage}, **sections}
    config = make_config(num_micro_batches, overrides).resolve(world_size=1)
    model = case.build(torch.float64)
    layout = replace(build_layout(model, config), stage=STAGES[stage])
    return Engine(EngineInputs(model, config, layout, MemoryTracker(DEVICE), LoneFactory(), loss_fn=case.loss))


def train(
    case_name: str, stage: int, num_micro_batches: int = 2, num_steps: int = 4, **sections: dict[str, Any]
) -> Trace:
    case = CASES[case_name]
    engine = make_engine(case, stage, num_micro_batches, **sections)
    batches = make_batches(case, num_steps=num_steps, world_size=1, num_micro_batches=num_micro_batches)
    losses, norms, gradients = [], [], {}
    for step in batches:
        for batch in step[0]:
            engine.backward(engine(batch))
        gradients = {name: value.clone() for name, value in own_gradients(engine).items()}
        result = engine.step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
    scale = engine.parts.losses.normaliser / result.count
    with engine.gathered() as model:
        parameters = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    engine.close()
    return Trace(losses, norms, {name: (value * scale).cpu() for name, value in gradients.items()}, parameters)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_equals_plain_training(stage: int, recompute: str) -> None:
    actual = train("transformer", stage, recompute={"mode": recompute}, optimizer={"clip_norm": 0.05})
    check_parity(actual, reference_trace("transformer", 1, 2, 4, 0.05))


@pytest.mark.parametrize(
    ("stage", "ops"),
    [
        (0, {"all_reduce"}),
        (1, {"reduce_scatter", "all_gather"}),
        (2, {"reduce_scatter", "all_gather"}),
        (3, {"reduce_scatter", "all_gather"}),
    ],
)
def test_each_stage_calls_nccl(stage: int, ops: set[str]) -> None:
    engine = make_engine(CASES["transformer"], stage, 1)
    for step in make_batches(CASES["transformer"], num_steps=2, world_size=1, num_micro_batches=1):
        engine.train_step(step[0])
    counts = engine.parts.comm.comm_log.counts
    assert {op for _, op in counts} >= ops
    assert all(count.num_calls >= 2 for count in counts.values())
    engine.close()


@pytest.mark.parametrize("case_name", sorted(CASES))
def test_odd_models_equal_plain_training(case_name: str) -> None:
    check_parity(train(case_name, 3), reference_trace(case_name, 1, 2, 4, None))


@pytest.mark.parametrize("param", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overlap_changes_no_bit(stage: int, param: str) -> None:
    runs = [
        train("transformer", stage, zero={"stage": stage, "overlap": overlap}, precision={"param": param})
        for overlap in (True, False)
    ]
    assert runs[0].losses == runs[1].losses
    assert all(torch.equal(value, runs[1].parameters[name]) for name, value in runs[0].parameters.items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tracker_agrees_with_the_allocator(stage: int) -> None:
    gc.collect()  # what earlier tests left would be freed meanwhile
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    case = CASES["transformer"]
    engine = make_engine(case, stage, 1)
    batches = make_batches(case, num_steps=2, world_size=1, num_micro_batches=1)
    for step in batches:
        engine.train_step(step[0])
    torch.cuda.synchronize()
    snapshot = engine.memory.snapshot()
    registered = sum(
        snapshot.live_bytes[each] for each in Category if each not in (Category.ACTIVATIONS, Category.OTHER)
    )
    at_rest = sum(engine.layout.bytes_at_rest().values())
    # The allocator rounds each block up to 512 bytes; optimizer states are one block a piece.
    num_blocks = 3 * len(engine.parts.sharded.pieces) + 5 * len(engine.layout.groups) + 8
    assert registered == pytest.approx(at_rest, abs=8 * num_blocks)
    assert 0 <= torch.cuda.memory_allocated() - before - at_rest < 512 * num_blocks
    engine.close()
    del engine, snapshot
    torch.cuda.synchronize()


def test_released_storage_is_returned_to_the_allocator() -> None:
    engine = make_engine(CASES["transformer"], 3, 1)
    released = torch.cuda.memory_allocated()
    full_bytes = sum(group.padded_numel for group in engine.layout.groups) * 8
    with engine.gathered():
        assert torch.cuda.memory_allocated() - released >= full_bytes
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == released
    engine.close()


def test_fp16_overflow_is_skipped() -> None:
    engine = make_engine(CASES["residual-mlp"], 2, 1, precision={"param": "fp16", "initial_loss_scale": 2.0**24})
    batches = make_batches(CASES["residual-mlp"], num_steps=12, world_size=1, num_micro_batches=1)
    results = [engine.train_step(step[0]) for step in batches]
    assert results[0].skipped
    assert not all(result.skipped for result in results)
    assert results[-1].loss_scale < 2.0**24
    engine.close()
