"""`torch.cuda` and `torch.accelerator`, as far as the library and torch ask them, over the scheduler."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from device.virtual.operators import DEVICE, Generator
from device.virtual.streams import COMPUTE, Mark, Scheduler

TOTAL_BYTES = 80 << 30
PROPERTIES = SimpleNamespace(
    name="virtual H100", total_memory=TOTAL_BYTES, major=9, minor=0, multi_processor_count=132, warp_size=32,
    L2_cache_size=50 << 20, max_threads_per_multi_processor=2048, shared_memory_per_block_optin=232448, uuid="0",
    pci_bus_id=0, pci_device_id=0, pci_domain_id=0, is_integrated=0,
)  # fmt: skip


class Device:
    """The scheduler and the C++ side, for what `torch.cuda` hands out; set once, by `install`."""

    native: Any
    scheduler: Scheduler


class Stream:
    """Used as `torch.Stream` and `torch.cuda.Stream`."""

    device, device_index, device_type = DEVICE, 0, 1

    def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any) -> None:
        self.stream_id = Device.scheduler.new_stream() if stream_id is None else stream_id
        self.cuda_stream, self.priority = self.stream_id, priority
        self._before: list[int] = []

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        Device.scheduler.synchronize_stream(self.stream_id)

    def query(self) -> bool:
        return Device.scheduler.query(Device.scheduler.record(self.stream_id))

    def is_capturing(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __enter__(self) -> Stream:
        self._before.append(Device.native.set_stream(self.stream_id))
        return self

    def __exit__(self, *_: object) -> None:
        Device.native.set_stream(self._before.pop())


class Event:
    """Used as `torch.Event` and `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.mark: Mark | None = None
        self.time_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.mark = Device.scheduler.record(_number(stream))
        self.time_s = time.monotonic()

    def wait(self, stream: Stream | None = None) -> None:
        if self.mark is not None:
            Device.scheduler.wait(self.mark, _number(stream))

    def query(self) -> bool:
        return self.mark is None or Device.scheduler.query(self.mark)

    def synchronize(self) -> None:
        if self.mark is not None:
            Device.scheduler.synchronize_event(self.mark)

    def elapsed_time(self, other: Event) -> float:
        return (other.time_s - self.time_s) * 1e3


class StreamContext:
    """Used as `torch.cuda.stream`."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._before: int | None = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = Device.native.set_stream(self._stream.stream_id)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            Device.native.set_stream(self._before)


def _number(stream: Stream | None) -> int:
    return Device.native.current_stream() if stream is None else stream.stream_id


class Cudart:
    """Used as `torch.cuda.cudart()`."""

    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
        Device.native.pin(address, num_bytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        Device.scheduler.note_foreign("unregister")
        Device.native.unpin(address)
        return 0


def nested_stats(device: Any = None) -> dict[str, Any]:
    live, peak, _ = Device.native.stats()
    of_kind = {"all": {"current": live, "peak": peak, "allocated": live, "freed": 0}}
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes")
    return dict.fromkeys(kinds, of_kind) | {"num_alloc_retries": 0, "num_ooms": 0}


def flat_stats(device: Any = None) -> dict[str, int]:
    live, peak, _ = Device.native.stats()
    return {"allocated_bytes.all.current": live, "allocated_bytes.all.peak": peak}


def replace_torch_cuda(native: Any, scheduler: Scheduler, generator: Generator) -> None:
    """Put these names where torch's own are."""
    Device.native, Device.scheduler = native, scheduler
    modes = ("default", "warn", "error")

    def set_sync_debug_mode(mode: str | int) -> None:
        scheduler.debug_mode = mode if isinstance(mode, str) else modes[mode]

    def nothing() -> Any:
        """A function of its own for each name, since torch._dynamo keeps a table by function."""
        return lambda *_, **__: None

    names: dict[str, Any] = {
        "Stream": Stream, "Event": Event, "stream": StreamContext, "StreamContext": StreamContext,
        "current_stream": lambda device=None: Stream(stream_id=native.current_stream()),
        "default_stream": lambda device=None: Stream(stream_id=COMPUTE),
        "set_stream": lambda stream: native.set_stream(stream.stream_id) and None,
        "synchronize": lambda device=None: scheduler.synchronize_device(),
        "is_available": lambda: True, "is_initialized": lambda: True, "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1, "_device_count_nvml": lambda: 1, "current_device": lambda: 0,
        "set_device": lambda device: native.choose_device(), "_lazy_init": nothing(),
        "_exchange_device": lambda device: 0, "_maybe_exchange_device": lambda device: 0,
        "get_device_properties": lambda device=None: PROPERTIES, "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "is_bf16_supported": lambda including_emulation=True: True, "can_device_access_peer": lambda one, other: False,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (TOTAL_BYTES - native.stats()[0], TOTAL_BYTES),
        "memory_allocated": lambda device=None: native.stats()[0],
        "memory_reserved": lambda device=None: native.stats()[0],
        "max_memory_allocated": lambda device=None: native.stats()[1],
        "max_memory_reserved": lambda device=None: native.stats()[1],
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(),
        "memory_stats": flat_stats, "memory_stats_as_nested_dict": nested_stats,
        "empty_cache": nothing(), "ipc_collect": nothing(),
        "manual_seed": generator.manual_seed, "manual_seed_all": lambda seed: generator.manual_seed(seed),
        "get_rng_state": generator.get_state, "set_rng_state": generator.set_state,
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "cudart": lambda: Cudart, "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: modes.index(scheduler.debug_mode),
    }  # fmt: skip
    for name, value in names.items():
        setattr(torch.cuda, name, value)
    torch.Stream, torch.Event = Stream, Event
    for name in ("current_stream", "set_stream", "synchronize"):
        setattr(torch.accelerator, name, partial(names[name]))  # another function, for torch._dynamo's table
    torch.cuda._initialized = True
    torch._C._cuda_getCurrentRawStream = lambda index: native.current_stream()
    torch._C._cuda_getDeviceCount = lambda: 1
