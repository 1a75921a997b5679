"""The one place that names an accelerator: a row of facts for each kind of device, and calls over torch's generic API.

What a kind lacks is a fact of its row or a call that does nothing, so callers never ask which kind they have: on the
CPU all work runs on the calling thread, there are no streams, and events mark nothing.

One rule says how buffers pass between streams: storage is allocated and freed in compute-stream order only. The stream
that hands a buffer to another one records an event after its last use (`Event.record`), and the receiver waits for that
event before its first use.

>>> cpu = torch.device("cpu")
>>> kind_of(cpu).backend, device_name(cpu), number_dtype(cpu)
('gloo', 'CPU', torch.float64)
>>> Event.record(cpu).is_reached()
True
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, cast

import torch
from torch import Tensor

from shardwise.config.errors import ConfigError
from shardwise.config.sections import AskedDevice, DeviceName

End = Literal["send", "receive"]
StreamName = Literal["gather", "reduce", "tensor", "context", "offload", "reload"]
# Every context of this process sees the memory as pinned: cudaHostRegisterPortable.
_PORTABLE: Final = 1
_GROUPED_ON_CPU: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DeviceKind:
    """Holds the facts of one kind of device.

    Attributes:
        backend: c10d's, for tensors on it; gloo works on the host, the others in the order of streams.
        queues: whether work may be enqueued on side streams ("streams"), on the device's one queue ("one"), or runs on
            the calling thread ("none").
        pinning: host memory that copies need not wait for: pages of our own that the driver pins ("pages"), memory
            that torch allocates ("torch"), or none.
        has_fp64: None where it depends on the device.
        is_single: a machine has one at most: torch's functions for it take no device, no ranks meet on it, and
            `run.device=auto` passes over it.
        has_kernels: the Triton kernels of this library are tuned for it and tested on it.
        grouped_dtypes: torch multiplies groups of rows by a matrix each in one kernel of these.
    """

    name: DeviceName
    backend: str
    queues: Literal["none", "one", "streams"] = "streams"
    pinning: Literal["none", "torch", "pages"] = "torch"
    has_fp64: bool | None = True
    is_single: bool = False
    has_kernels: bool = False
    grouped_dtypes: tuple[torch.dtype, ...] = ()

    @property
    def is_cpu(self) -> bool:
        """Say whether work runs on the calling thread."""
        return self.queues == "none"

    @property
    def is_in_stream_order(self) -> bool:
        """Say whether collectives run in the order of streams; otherwise the host starts them and waits for them."""
        return self.backend != "gloo"

    @property
    def counts_memory(self) -> bool:
        """Say whether torch's allocator counts the bytes of the device and their peak."""
        return self.queues == "streams"

    @property
    def pins(self) -> bool:
        """Say whether it copies from and to pinned memory of the host while it computes."""
        return self.pinning != "none"


# In the order in which `run.device=auto` looks for them. ROCm's builds of torch call their devices cuda.
KINDS: Final[Mapping[str, DeviceKind]] = MappingProxyType(
    {
        row.name: row
        for row in (
            DeviceKind("cuda", "nccl", pinning="pages", has_kernels=True, grouped_dtypes=(torch.bfloat16,)),
            DeviceKind("xpu", "xccl", has_fp64=None),
            DeviceKind("npu", "hccl", has_fp64=False),
            DeviceKind("mps", "gloo", queues="one", pinning="none", has_fp64=False, is_single=True),
            DeviceKind("cpu", "gloo", queues="none", pinning="none", grouped_dtypes=_GROUPED_ON_CPU),
        )
    }
)


def kind_of(device: torch.device | str) -> DeviceKind:
    """Return the row of a device, or of a type of devices; of one that is not here, such as meta, the CPU's."""
    return KINDS.get(device if isinstance(device, str) else device.type, KINDS["cpu"])


# Which devices there are.


def wanted_kind(asked: AskedDevice) -> DeviceKind:
    """Return the kind that a `run.device` means, whether this machine has it or not."""
    if asked != "auto":
        return KINDS[asked]
    return next(row for row in KINDS.values() if not row.is_single and is_there(row))


def choose_kind(asked: AskedDevice) -> DeviceKind:
    """Return the kind that a `run.device` means on this machine.

    Raises:
        ConfigError: it is not there.
    """
    row = wanted_kind(asked)
    if not is_there(row):
        raise ConfigError(
            "no-gpu",
            f"run.device={asked} but torch sees no such GPU; use run.device=cpu, or check the driver and torch's build",
        )
    return row


def is_there(row: DeviceKind) -> bool:
    """Say whether torch can use a device of a kind here."""
    module = getattr(torch, row.name, None)  # torch has no module of a device whose package is not installed
    return module is not None and module.is_available()


def num_devices(row: DeviceKind) -> int:
    """Return how many devices of a kind torch sees; 0 for the CPU, of which any number of ranks have a share."""
    return 0 if row.is_cpu else getattr(torch, row.name).device_count()


def current_device(row: DeviceKind) -> torch.device:
    """Return the device of a kind on which this thread works."""
    return torch.device("cpu") if row.is_cpu else torch.device(row.name, _index())


def use_device(device: torch.device) -> None:
    """Make a device the current one of this thread: each thread has its own, and torch's first call would take GPU 0,
    whose memory then holds a context of this process too.
    """
    if not kind_of(device).is_cpu:
        torch.accelerator.set_device_index(device)


def backends_of(row: DeviceKind) -> str:
    """Return what `init_process_group` takes: gloo for tensors of the host, the kind's back end for its own.

    >>> backends_of(KINDS["cuda"]), backends_of(KINDS["cpu"])
    ('cpu:gloo,cuda:nccl', 'gloo')
    """
    return f"cpu:gloo,{row.name}:{row.backend}" if row.is_in_stream_order else row.backend


def device_of_backends(backends: str) -> torch.device:
    """Return this thread's device of the kind whose back end is among those of a process group, else the CPU.

    >>> device_of_backends("cpu:gloo,cuda:gloo")
    device(type='cpu')
    """
    of_groups = (row for row in KINDS.values() if row.is_in_stream_order)
    row = next(
        (row for row in of_groups if f"{row.name}:{row.backend}" in backends),
        KINDS["cpu"],
    )
    return current_device(row)


def _index() -> int:
    return torch.accelerator.current_device_index()


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _named(device: torch.device) -> tuple[torch.device, ...]:
    """Return the arguments that name a device to a function of its module."""
    return () if kind_of(device).is_single else (device,)


# What a device is, and what it can.


def device_name(device: torch.device) -> str:
    """Return the product's name, such as NVIDIA H100; CPU for the CPU."""
    row = kind_of(device)
    return row.name.upper() if row.queues != "streams" else str(_module(device).get_device_name(device))


def number_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype of a device, in which sums that all ranks read are kept: fp64 where it can."""
    has_fp64 = kind_of(device).has_fp64
    if has_fp64 is None:
        has_fp64 = bool(_module(device).get_device_properties(device).has_fp64)
    return torch.float64 if has_fp64 else torch.float32


def numbers_on(device: torch.device, values: Sequence[float]) -> Tensor:
    """Return numbers of the host on a device, in its `number_dtype`: a single one without a copy, which would wait."""
    if len(values) == 1:
        return torch.full((1,), values[0], dtype=number_dtype(device), device=device)
    return torch.tensor(values, dtype=number_dtype(device), device=device)


def total_bytes(device: torch.device) -> int:
    """Return the bytes of a device's own memory, without making it this process's."""
    if kind_of(device).is_single:
        return int(_module(device).recommended_max_memory())
    return int(_module(device).get_device_properties(device).total_memory)


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes more this process can have of a device, with what torch keeps; None on the CPU."""
    row = kind_of(device)
    if row.is_cpu:
        return None
    if row.is_single:
        return total_bytes(device) - int(_module(device).current_allocated_memory())
    of_device, _ = _module(device).mem_get_info(device)
    idle_bytes = _module(device).memory_reserved(device) - _module(device).memory_allocated(device)
    return int(of_device + idle_bytes)


@dataclass(frozen=True)
class AllocatorStats:
    """Holds the counters of a device's allocator, in bytes; the peak is since its last reset."""

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int


def allocator_stats(device: torch.device) -> AllocatorStats:
    """Read the counters of torch's allocator, all zero before the device is initialised."""
    stats = _module(device).memory_stats_as_nested_dict(device)
    if not stats:
        return AllocatorStats(0, 0, 0)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return AllocatorStats(allocated["current"], allocated["peak"], reserved["current"])


def reset_peak(device: torch.device) -> None:
    """Start a new peak of torch's allocator at what is allocated now."""
    _module(device).reset_peak_memory_stats(device)


def empty_cache(device: torch.device) -> None:
    """Give back to the device what torch keeps of its memory, once all its work is done."""
    synchronize(device)
    if not kind_of(device).is_cpu:
        _module(device).empty_cache()


def synchronize(device: torch.device) -> None:
    """Block the calling thread until the device has done all its work."""
    if not kind_of(device).is_cpu:
        torch.accelerator.synchronize(device)


# Random numbers.


def rng_state(device: torch.device) -> Tensor | None:
    """Return the state of torch's generator of a device; None on the CPU, which has the process's own."""
    return None if kind_of(device).is_cpu else _module(device).get_rng_state(*_named(device))


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Set torch's generator of a device back to what `rng_state` returned."""
    _module(device).set_rng_state(state, *_named(device))


@contextmanager
def forked_rng(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Restore torch's generators, of the CPU and of `device`, at the end; start them from a seed where one is given."""
    with torch.random.fork_rng(devices=[]):
        state = rng_state(device)
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if state is not None:
                with torch.accelerator.device_index(device.index):
                    _module(device).manual_seed(seed)
        try:
            yield
        finally:
            if state is not None:
                set_rng_state(device, state)


# Streams and events.


class Mark(Protocol):
    """Names the part of `torch.Event` that the library uses."""

    def wait(self) -> object:
        """Make the current stream wait for the point."""

    def synchronize(self) -> object:
        """Block the calling thread until the device has reached the point."""

    def query(self) -> bool:
        """Say whether the device has reached the point; never wait."""


@dataclass(frozen=True)
class _EndOfQueue:
    """Marks a point on a device with one queue, which no other work can overtake."""

    device: torch.device

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        synchronize(self.device)

    def query(self) -> bool:
        return False


@dataclass(frozen=True)
class Event:
    """Marks a point in a stream's work; does nothing on the CPU."""

    mark: Mark | None

    @classmethod
    def record(cls, device: torch.device) -> Event:
        """Mark the current stream's position."""
        queues = kind_of(device).queues
        if queues == "streams":
            return cls(torch.accelerator.current_stream(device).record_event())
        return cls(None if queues == "none" else _EndOfQueue(device))

    def wait(self) -> None:
        """Make the current stream wait for the point; the host goes on."""
        if self.mark is not None:
            self.mark.wait()

    def wait_on_host(self) -> None:
        """Block the calling thread until the device has reached the point."""
        if self.mark is not None:
            self.mark.synchronize()  # spins, since torch.Event ignores `blocking`: its thread has nothing else to do

    def is_reached(self) -> bool:
        """Say whether the device has reached the point; never wait."""
        return self.mark is None or self.mark.query()


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream on which this thread enqueues work; None on a device without streams."""
    return torch.accelerator.current_stream(device) if kind_of(device).queues == "streams" else None


@contextmanager
def on_stream(device: torch.device, stream: Any) -> Iterator[None]:
    """Enqueue what follows on a stream of a device; on a device without streams this does nothing."""
    if kind_of(device).queues != "streams":
        yield
        return
    # torch lets no two threads enter one stream's own context at a time, and the worker thread may.
    before = torch.accelerator.current_stream(device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@dataclass(frozen=True)
class P2PStreamKey:
    """Names the stream of messages to or from one other rank: after those of another they might wait in a circle."""

    end: End
    peer: int


class Streams:
    """Holds an engine's side streams: for unshards, reductions, transfers of split layers and between the ranks of a
    sequence, copies to the host and back.

    On the CPU there are none.

    Args:
        overlap: False keeps all work on the compute stream, for comparison and debugging.
    """

    def __init__(self, device: torch.device, overlap: bool = True) -> None:
        self.device = device
        self._side_streams: dict[StreamName | P2PStreamKey, torch.Stream] = {}
        self._has_streams = kind_of(device).queues == "streams"
        if self._has_streams and overlap:
            # Only reductions are not on the critical path of the computation, and no other work may queue after them.
            self._side_streams = {
                "gather": torch.Stream(device, priority=-1),
                "reduce": torch.Stream(device),
                "tensor": torch.Stream(device, priority=-1),
                "context": torch.Stream(device, priority=-1),
                # A bus carries as much in both directions at once as in one.
                "offload": torch.Stream(device),
                "reload": torch.Stream(device),
            }

    @contextmanager
    def side_stream(self, name: StreamName | P2PStreamKey | None, after: Event | None = None) -> Iterator[None]:
        """Enqueue what follows on the named stream, or on the current one for None.

        It runs after all that the current stream holds so far; or after the event `after`, where that is given.
        """
        # Without overlap too: a receive that the computation waits for may wait for what that computes.
        if isinstance(name, P2PStreamKey) and self._has_streams and name not in self._side_streams:
            self._side_streams[name] = torch.Stream(self.device, priority=-1)
        stream = None if name is None else self._side_streams.get(name)
        if stream is None:
            if after is not None:
                after.wait()
            yield
            return
        if after is None:
            stream.wait_stream(torch.accelerator.current_stream(self.device))
        elif after.mark is not None:
            stream.wait_event(cast(torch.Event, after.mark))
        with on_stream(self.device, stream):
            yield


# Pinned memory.


def copied_to(device: torch.device, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype on a device, which copies it later: a driver copies from pinned memory alone without
    making the host wait until the device has done all before.
    """
    is_memory = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    if kind_of(device).pins and tensor.is_cpu and is_memory and not tensor.is_pinned():
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)  # `pin_memory` takes no expanded ones
    return tensor.to(device, dtype, non_blocking=True)


def pin_pages(device: torch.device, address: int, num_bytes: int) -> partial[None]:
    """Let a driver pin pages of this process; return what lets go of them, before they are freed, on any thread.

    Raises:
        MemoryError: the driver pins no more.
    """
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE))
    if error:
        # CUDA keeps the error until it is asked, and the next check after a kernel would raise it: in the middle of
        # what goes back to the states of before. This kernel is that next one.
        with suppress(RuntimeError):
            torch.zeros(1, device=device)
        raise MemoryError(
            f"CUDA pins no {num_bytes} bytes of the host (error {error}); let fewer ranks share it, or keep more on "
            "nvme"
        )
    return partial(_unpin_pages, runtime.cudaHostUnregister, device.index, address)


def _unpin_pages(unregister: Any, index: int | None, address: int) -> None:
    # The last tensor may die on any thread; in one that has no device yet, CUDA would take GPU 0.
    with torch.accelerator.device_index(index):
        unregister(address)
