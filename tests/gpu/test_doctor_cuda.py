"""The doctor and the out-of-memory report on CUDA devices."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from shardwise import initialize
from shardwise.doctor.calibrate import OPS, SIZES_BYTES, glance
from shardwise.doctor.system_info import gather_facts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda", 0)


def test_every_gpu_is_a_fact(tmp_path) -> None:
    facts = gather_facts({}, tmp_path)
    assert len(facts.gpus) == torch.cuda.device_count()
    for gpu in facts.gpus:
        assert 0 < gpu.free_bytes <= gpu.total_bytes
    assert facts.software.nvidia_driver is not None
    assert facts.software.has_nccl


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_products_copies_and_collectives_are_measured(num_ranks: int) -> None:
    if num_ranks > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    ranks, failure = glance("cuda", num_ranks, os.environ)
    assert failure is None
    assert len(ranks) == num_ranks
    for each in ranks:
        assert {shape.dtype for shape in each.matmuls} == {"bf16", "fp16", "fp32"}
        assert {way for way, _ in each.copies_bytes_per_s} == {"host->host", "host->device", "device->host"}
        assert len(each.collectives) == (len(OPS) * len(SIZES_BYTES) if num_ranks > 1 else 0)


def test_a_gpu_that_is_full_says_what_holds_it() -> None:
    config = {"run": {"device": "cuda"}, "batch": {"micro_size": 4, "accumulation": 1}}
    model = torch.nn.Linear(256, 256)
    with initialize(model, config, loss_fn=lambda output, batch: output.new_empty(2**50).sum()) as engine:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            engine(torch.ones(4, 256))
        assert str(raised.value).startswith("out of memory on rank 0 in step 1: ")
        assert "parameters" in str(raised.value)
        assert "settings that need less:" in str(raised.value)
    dist.destroy_process_group()
