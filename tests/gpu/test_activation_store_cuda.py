"""Inputs of recomputed blocks go to pinned host memory and back beside the computation, and leave the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.offload.activations import ActivationStore
from shardwise.offload.counters import TransferCounters
from shardwise.runtime.device import Streams
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.runtime.recompute import run_forward, run_stored

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NUM_BLOCKS = 8
X_BYTES = 64 * 2**20 if torch.version.cuda or torch.version.hip else 2**19  # the virtual device computes on the CPU


class PinnedMemory:
    """Host memory that copies need not wait for."""

    def acquire(self, num_bytes: int, capacity_bytes: int = 0) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def release(self, tensor: Tensor) -> None:
        pass


def run(store: ActivationStore | None, device: torch.device) -> tuple[list[Tensor], int]:
    """Gradients, and the bytes that the forward has left on the device."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Dropout(0.1)).to(device) for _ in range(NUM_BLOCKS)]
    x = torch.randn(X_BYTES // 4096, 1024, device=device).requires_grad_() * 1
    before = torch.cuda.memory_allocated(device)
    for block in blocks:
        x = run_stored(run_forward, block.forward, "full", (x,), {}, store)
    kept_bytes = torch.cuda.memory_allocated(device) - before
    x.square().mean().backward()
    return [parameter.grad for block in blocks for parameter in block.parameters()], kept_bytes


def test_offload_on_side_streams_is_bitwise_no_offload() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    expected, plain_bytes = run(None, device)
    traffic = TransferCounters()
    store = ActivationStore(Streams(device), PinnedMemory(), traffic, MemoryTracker(device))
    for _ in range(5):
        found, kept_bytes = run(store, device)
        assert all(map(torch.equal, found, expected))
    assert plain_bytes == NUM_BLOCKS * X_BYTES
    assert kept_bytes <= 2 * X_BYTES
    assert traffic.moved_bytes["device", "host"] == traffic.moved_bytes["host", "device"]
