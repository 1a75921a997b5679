"""bf16 under the same policy as FSDP2's: same losses to bf16's resolution, from fp32 masters."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.training import make_config, make_optimizer
from shardwise import initialize

pytestmark = pytest.mark.begin

CASE = "untied-transformer"
NUM_STEPS = 4
TOLERANCE = 1e-3


def fp32_loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return CASES[CASE].loss(output.float(), batch)


def train_ours(rank: int, world_size: int, stage: int, reduce: str) -> list[float]:
    case = CASES[CASE]
    overrides = {"zero": {"stage": stage}, "precision": {"param": "bf16", "reduce": reduce}}
    engine = initialize(case.build(torch.float32), make_config(1, overrides), loss_fn=fp32_loss)
    batches = make_batches(case, num_steps=NUM_STEPS, world_size=world_size, num_micro_batches=1)
    return [engine.train_step(step[rank]).loss for step in batches]


def train_fsdp2(rank: int, world_size: int, reduce: str) -> list[float]:
    case = CASES[CASE]
    model = case.build(torch.float32)
    mesh = init_device_mesh("cpu", (world_size,))
    dtype = torch.bfloat16 if reduce == "param" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = make_optimizer(model)
    losses = []
    for step in make_batches(case, num_steps=NUM_STEPS, world_size=world_size, num_micro_batches=1):
        batch = step[rank][0]
        total, count = fp32_loss(model(**batch), batch)
        sums = torch.stack([total.detach().double(), count.double()])
        torch.distributed.all_reduce(sums)
        # FSDP2 averages over ranks: the mean over all tokens needs the counts of all.
        (total * world_size / sums[1].item()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((sums[0] / sums[1]).item())
    return losses


@pytest.mark.parametrize("reduce", ["fp32", "param"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bf16_equals_fsdp2(ranks: WorkerPool, num_ranks: int, reduce: str) -> None:
    theirs = ranks(num_ranks).run(train_fsdp2, reduce)[0]
    for stage in range(4):
        ours = ranks(num_ranks).run(train_ours, stage, reduce)[0]
        # Gradients are scaled at another place, so single roundings of a parameter, half an ulp or 2^-9 of it, differ.
        assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_another_training_is_recognised(ranks: WorkerPool) -> None:
    ours = ranks(2).run(train_ours, 3, "fp32")[0]
    theirs = ranks(3).run(train_fsdp2, "fp32")[0]
    assert ours != pytest.approx(theirs, rel=TOLERANCE)
