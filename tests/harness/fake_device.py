"""A kind of device that this machine has not: notes what torch is asked for it, and gives tensors of the CPU.

Used where a test is about the calls themselves: which of them are made, and with what, on a device that lacks some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

TOTAL_BYTES, FREE_BYTES = 64 << 30, 60 << 30
# What torch's modules of devices have, of what the library asks for.
BOTH = ("device_count", "is_available", "empty_cache", "get_rng_state", "set_rng_state", "manual_seed")
OF_MPS = (*BOTH, "current_allocated_memory", "recommended_max_memory")
OF_OTHERS = (
    *BOTH,
    *("get_device_name", "get_device_properties", "mem_get_info", "memory_reserved", "memory_allocated"),
    *("memory_stats_as_nested_dict", "reset_peak_memory_stats"),
)


@dataclass
class FakeDevice:
    """The kind's module and torch's generic calls; `calls` are (name, arguments) in their order."""

    name: str
    num_devices: int = 1
    has_fp64: bool = True
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    @property
    def device(self) -> Any:
        """Its first device; for a type that this torch does not know, what has the same attributes."""
        return SimpleNamespace(type="npu", index=0) if self.name == "npu" else torch.device(self.name, 0)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def answer(self, name: str) -> Any:
        properties = SimpleNamespace(total_memory=TOTAL_BYTES, has_fp64=self.has_fp64)
        stats = {"allocated_bytes": {"all": {"current": 5, "peak": 9}}, "reserved_bytes": {"all": {"current": 20}}}
        answers: dict[str, Any] = {
            "device_count": self.num_devices,
            "is_available": self.num_devices > 0,
            "get_device_name": f"a fake {self.name}",
            "get_device_properties": properties,
            "mem_get_info": (FREE_BYTES, TOTAL_BYTES),
            "memory_reserved": 7,
            "memory_allocated": 4,
            "memory_stats_as_nested_dict": stats,
            "current_allocated_memory": 4,
            "recommended_max_memory": TOTAL_BYTES,
            "get_rng_state": torch.zeros(3, dtype=torch.uint8),
            "current_device_index": 0,
            "current_stream": FakeStream(self, "current"),
        }
        return answers.get(name)

    def function(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args))
            return self.answer(name)

        return call

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put it where torch's own are, and let no other kind be there."""
        for other in ("cuda", "xpu", "mps"):
            patch.setattr(getattr(torch, other), "device_count", lambda: 0)
            patch.setattr(getattr(torch, other), "is_available", lambda: False)
        functions = {name: self.function(name) for name in (OF_MPS if self.name == "mps" else OF_OTHERS)}
        module = SimpleNamespace(**functions)
        patch.setattr(torch, self.name, module, raising=False)
        plain = torch.get_device_module

        def get_device_module(device: Any = None) -> Any:
            return module if getattr(device, "type", device) == self.name else plain(device)

        patch.setattr(torch, "get_device_module", get_device_module)
        for name in ("set_device_index", "current_device_index", "current_stream", "set_stream", "synchronize"):
            patch.setattr(torch.accelerator, name, self.function(name))
        patch.setattr(torch.accelerator, "device_index", lambda index: FakeContext(self, index))
        patch.setattr(torch, "Stream", lambda device, priority=0: FakeStream(self, "side", priority))
        patch.setattr(torch, "empty", without_pinning(self, torch.empty))
        patch.setattr(torch, "zeros", without_pinning(self, torch.zeros))


@dataclass(frozen=True)
class FakeStream:
    of: FakeDevice
    name: str
    priority: int = 0

    @property
    def device(self) -> Any:
        return self.of.device

    def record_event(self) -> FakeMark:
        self.of.calls.append(("record_event", (self.name,)))
        return FakeMark(self.of)

    def wait_event(self, mark: object) -> None:
        self.of.calls.append(("wait_event", (self.name,)))

    def wait_stream(self, other: FakeStream) -> None:
        self.of.calls.append(("wait_stream", (self.name, other.name)))


@dataclass(frozen=True)
class FakeMark:
    of: FakeDevice

    def wait(self) -> None:
        self.of.calls.append(("wait", ()))

    def synchronize(self) -> None:
        self.of.calls.append(("event synchronize", ()))

    def query(self) -> bool:
        return True


@dataclass(frozen=True)
class FakeContext:
    """Used as `torch.accelerator.device_index`."""

    of: FakeDevice
    index: int | None

    def __enter__(self) -> None:
        self.of.calls.append(("enter device", (self.index,)))

    def __exit__(self, *_: object) -> None:
        self.of.calls.append(("leave device", (self.index,)))


def without_pinning(of: FakeDevice, make: Any) -> Any:
    """`torch.empty` or `torch.zeros`, whose pinned memory is plain, and whose tensors are on the CPU."""

    def call(*size: int | Sequence[int], pin_memory: bool = False, device: Any = None, **kwargs: Any) -> Tensor:
        if pin_memory:
            of.calls.append(("pin_memory", size))
        return make(*size, device="cpu" if getattr(device, "type", device) == of.name else device, **kwargs)

    return call
