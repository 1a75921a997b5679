"""What rests in host memory beside a GPU: pinned where it goes there, and no larger than it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from harness.fake_device import FakeDevice
from shardwise.config.resolve import TiersConfig
from shardwise.layout.layout import Layout
from shardwise.offload.tiers import Tiers
from shardwise.runtime.device import Streams
from shardwise.runtime.memory_tracker import Category, MemoryTracker

NUM = 5000


@pytest.mark.parametrize("pin_memory", [True, False])
def test_what_crosses_is_pinned(monkeypatch: pytest.MonkeyPatch, pin_memory: bool) -> None:
    pinned: list[int] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, num_bytes, flags: pinned.append(address) or 0,
        cudaHostUnregister=lambda address: pinned.remove(address),
    )
    FakeDevice("cuda").install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime, raising=False)
    streams = cast(Streams, SimpleNamespace(device=torch.device("cuda", 0)))
    layout = cast(Layout, SimpleNamespace(groups=(), states=()))
    tiers = Tiers(TiersConfig(pin_memory=pin_memory), layout, streams, MemoryTracker("cpu"), 0, is_simulated=False)
    kept: list[Any] = []
    for category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER):
        kept.append(tiers.place("host", "state", NUM, torch.float32, category).tensor)
    crossing = [tensor.data_ptr() for tensor in kept[:2]]
    assert pinned == (crossing if pin_memory else [])
    live_bytes = tiers.memory.snapshot().live_bytes
    assert [live_bytes[each] for each in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)] == [4 * NUM] * 3
    tiers.close()
    kept.clear()
    assert not pinned
