"""The doctor and the out-of-memory report on CUDA devices."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from shardwise import initialize
from shardwise.doctor.collective_bench import OPS, SIZES_BYTES, measure_collectives
from shardwise.doctor.measure import measure_device_copies, measure_matmul
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


def test_products_and_copies_are_measured() -> None:
    half = measure_matmul(DEVICE, torch.float16, budget_s=0.2)
    assert (half.device, half.num_threads) == ("cuda:0", 1)
    assert half.size > 256
    copies = measure_device_copies(DEVICE, budget_s=0.05)
    assert [(copy.source, copy.target, copy.pinned) for copy in copies] == [
        ("cuda:0", "cuda:0", False),
        ("cpu", "cuda:0", True),
        ("cuda:0", "cpu", True),
        ("cpu", "cuda:0", False),
        ("cuda:0", "cpu", False),
    ]
    assert all(copy.bytes_per_s > 0 for copy in copies)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_is_measured() -> None:
    collectives, failure = measure_collectives("cuda", 2, os.environ)
    assert failure is None
    assert [(each.backend, each.num_bytes, each.op) for each in collectives] == [
        ("nccl", size, op) for size in SIZES_BYTES for op in OPS
    ]


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
