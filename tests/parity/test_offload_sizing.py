"""Memory for what is on its way: within the Layout's bounds, on the host and on the device, however deep the model."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from harness.models import Transformer
from harness.pool import WorkerPool
from harness.tier_bytes import HostPages
from harness.training import make_config
from harness.waiting import wait_until
from shardwise import Layout, initialize
from shardwise.engine import build
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.offload.step_pipeline import CHUNK_NUMEL, DEPTH
from shardwise.offload.storage import MOST_ARRIVING, MOST_FETCHED, MOST_STAGED, NUM_PREFETCHED
from shardwise.offload.tiers import NUM_KEPT
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import Event
from shardwise.runtime.memory_tracker import Category, MemoryTracker
from shardwise.runtime.pinned_memory import ALIGNMENT_BYTES

PLACES = {
    "all nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
    "all host": {"params": "host", "grads": "host", "optimizer": "host"},
    "optimizer nvme": {"optimizer": "nvme"},
    "grads host, optimizer nvme": {"grads": "host", "optimizer": "nvme"},
    "params nvme, optimizer device": {"params": "nvme"},
}


def most_buffer_bytes(layout: Layout) -> int:
    """Return the most bytes of host memory that one rank's buffers take, beside the states that are stored there.

    The bound does not grow with the number of groups. For the largest slice of S elements and chunks of C <= S
    elements, it is the sum of these:

    - for the step: 3 chunks that are open, of all states that are not stored on the host, C*(P+G+K); 2 that are kept;
      and of parameters that are stored on the device, 2 chunks that move there, C*P each;
    - for gradients that leave: 3 slices that are staged, one before and one after these; one to which they are added;
      2 that are kept: 8 S*G;
    - for parameters that come from NVMe: the next, 2 after it, 3 that the device has not taken yet and one that it
      takes, 2 that are kept: 9 S*P;
    - for parameters that leave the device where the optimizer is stored there: 8 S*P, as for gradients.

    Inputs of recomputed blocks (`tiers.activations`) come on top, and a block that a model skips now and then may
    keep what was read for it.
    """
    slices: dict[str, int] = defaultdict(int)
    for group in layout.groups:
        for name, num_bytes in _slices(layout, group).items():
            slices[name] = max(slices[name], num_bytes)
    num_staged = MOST_STAGED + 2 + 1 + NUM_KEPT
    num_fetched = 1 + NUM_PREFETCHED + MOST_FETCHED + 1 + NUM_KEPT
    return (
        (DEPTH * slices["chunk"] + NUM_KEPT * slices["optimizer chunk"] + MOST_ARRIVING * slices["arriving chunk"])
        + num_staged * (slices["gradients"] + slices["parameters that leave"])
        + num_fetched * slices["parameters"]
    )


def _slices(layout: Layout, group: GroupSpec) -> dict[str, int]:
    """Return the bytes that move at a time for one group, by kind."""
    tiers, numel = group.tiers, group.shard_numel
    found: dict[str, int] = {}
    if tiers.params == "nvme":
        found["parameters"] = _buffer_bytes(numel * DTYPE_BYTES[layout.precision_of(group).param])
    if not group.trainable:
        return found
    if tiers.grads != "device":
        found["gradients"] = _buffer_bytes(numel * DTYPE_BYTES[layout.precision_of(group).accumulate])
    if tiers.optimizer == "device":
        if tiers.params != "device":
            found["parameters that leave"] = _buffer_bytes(numel * DTYPE_BYTES[layout.precision_of(group).param])
        return found
    chunk_numel = min(CHUNK_NUMEL, numel)
    for state in layout.states:
        if state.is_kept_by(group):
            num_bytes = _buffer_bytes(chunk_numel * DTYPE_BYTES[state.dtype_in(group)])
            if state.tier_in(group) != "host":
                found["chunk"] = found.get("chunk", 0) + num_bytes
            if state.role == "param" and tiers.params == "device":
                found["arriving chunk"] = num_bytes
            if state.role == "optimizer" and tiers.optimizer == "nvme":
                found["optimizer chunk"] = found.get("optimizer chunk", 0) + num_bytes
    return found


def _buffer_bytes(num_bytes: int) -> int:
    """Return the size of the buffer for so many bytes: whole blocks of the file, up to 1/8 wasted, in whole pages."""
    num_blocks = -(-num_bytes // ALIGNMENT_BYTES)
    return -(-num_blocks * 9 // 8) * ALIGNMENT_BYTES


@contextmanager
def settled_pools() -> Iterator[None]:
    """Let pools allocate only once what they have freed is free: gloo's threads let go of it when they have a core."""

    def make(device: torch.device, tracker: MemoryTracker) -> BufferPool:
        def allocate(num_bytes: int) -> Tensor:
            assert wait_until(lambda: tracker.snapshot().live_bytes[Category.BUCKETS] <= pool.reserved_bytes)
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

        pool = BufferPool(device, tracker, allocate=allocate)
        return pool

    with patch.object(build, "BufferPool", make):
        yield


def measure(
    rank: int, world_size: int, num_blocks: int, precision: str, tiers: dict[str, Any]
) -> tuple[Layout, int, dict[Category, int]]:
    """The most that the host's buffers took, and the device's tracked bytes at their peak."""
    torch.manual_seed(0)
    with HostPages() as pages, settled_pools():
        model = Transformer(tied=True, hidden_size=64, num_blocks=num_blocks)
        config = make_config(2, {"zero": {"stage": 3}, "precision": {"param": precision}, "tiers": tiers})
        tokens = torch.zeros(1, 4, dtype=torch.long)
        with initialize(model, config, loss_fn=lambda output, batch: output.square().mean()) as trained:
            stored_bytes = pages.live_bytes - trained.tiers.buffers.reserved_bytes
            for index in range(3):
                if index == 2:
                    trained.memory.reset_peak()
                trained.train_step([tokens, tokens])
            return trained.layout, pages.peak_bytes - stored_bytes, dict(trained.memory.snapshot().peak_live_bytes)


@pytest.mark.parametrize(
    ("num_ranks", "where"),
    [(2, where) for where in PLACES]
    + [pytest.param(1, where, marks=() if where == "all nvme" else pytest.mark.full) for where in PLACES],
)
def test_buffers_are_within_the_formula_however_many_groups(
    ranks: WorkerPool, tmp_path: Path, num_ranks: int, where: str
) -> None:
    tiers = {**PLACES[where], "nvme_path": str(tmp_path) if "nvme" in PLACES[where].values() else None}
    pool = ranks(num_ranks)
    few, many = (pool.run(measure, num_blocks, "bf16", tiers) for num_blocks in (4, 16))
    for (small, small_bytes, _), (large, large_bytes, _) in zip(few, many, strict=True):
        assert most_buffer_bytes(small) == most_buffer_bytes(large)
        assert max(small_bytes, large_bytes) <= most_buffer_bytes(large)


def test_a_device_that_is_late_keeps_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies are done only where they are waited for."""
    monkeypatch.setattr(Event, "is_reached", lambda event: False)
    tiers = {**PLACES["params nvme, optimizer device"], "nvme_path": str(tmp_path)}
    layout, num_bytes, _ = measure(0, 1, 32, "bf16", tiers)
    assert num_bytes <= most_buffer_bytes(layout)


@pytest.mark.parametrize(
    ("precision", "where"),
    [
        ("fp32", "all nvme"),
        ("bf16", "all host"),
        pytest.param("fp32", "all host", marks=pytest.mark.full),
        pytest.param("bf16", "all nvme", marks=pytest.mark.full),
    ],
)
def test_the_device_holds_a_few_groups_at_its_peak(
    ranks: WorkerPool, tmp_path: Path, precision: str, where: str
) -> None:
    """The root, the block at work and the next one; gradients of three groups, in the wire's dtype and summed."""
    tiers = {**PLACES[where], "nvme_path": str(tmp_path) if "nvme" in PLACES[where].values() else None}
    found = []
    for num_blocks in (4, 16):
        for layout, _, peak in ranks(2).run(measure, num_blocks, precision, tiers):
            root, *blocks = (group.padded_numel for group in layout.groups)
            whole = root + 2 * max(blocks)
            param_bytes, grad_bytes = DTYPE_BYTES[layout.precision.param], DTYPE_BYTES[layout.precision.accumulate]
            assert peak[Category.GATHERED] <= whole * param_bytes
            assert peak[Category.BUCKETS] <= whole * (2 * param_bytes + grad_bytes) * 9 // 8
            assert peak[Category.PARAMETERS] == peak[Category.GRADIENTS] == 0
            found.append(sum(peak.values()))
    assert len(set(found)) == 1


@pytest.mark.parametrize("where", ["all nvme", "all host"])
def test_a_host_that_is_late_keeps_nothing_of_the_device(tmp_path: Path, where: str) -> None:
    """What it adds gradients to may take as long as it likes: those on the device are gone once they are copied."""
    tiers = {**PLACES[where], "nvme_path": str(tmp_path) if "nvme" in PLACES[where].values() else None}
    tokens, goes_on = torch.zeros(1, 4, dtype=torch.long), threading.Event()
    config = make_config(2, {"zero": {"stage": 3}, "tiers": tiers})
    model = Transformer(tied=True, hidden_size=64, num_blocks=1)
    with initialize(model, config, loss_fn=lambda output, batch: output.square().mean()) as trained:
        trained.backward(trained(tokens))
        trained.tiers.worker.submit(goes_on.wait)
        try:
            trained.backward(trained(tokens))
            assert trained.memory.snapshot().live_bytes[Category.BUCKETS] == 0
        finally:
            goes_on.set()
