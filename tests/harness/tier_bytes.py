"""The bytes of the host tier and of swap files, and what crosses between tiers, by counters that are not the library's.

On the CPU the device's memory and the host's are one, so what is the host's must be named: its states, and the
pages of pooled buffers. All else is the device's. Ops are watched on the engine's thread and on its worker thread,
reads and writes where they are handed to the system.

    with HostPages() as pages:
        engine = initialize(...)
        with Crossings(engine, pages) as seen:
            ...
    assert seen.bytes == {("device", "host"): 1024, ("host", "nvme"): 4096}
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise.offload.staging_buffers
from harness.live_bytes import tensors_in
from shardwise import Engine
from shardwise.layout import codec


class HostPages:
    """Every page that pooled host buffers get of the system, while entered; those alive and the most that were."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pages: dict[int, tuple[int, int]] = {}
        self._patch = pytest.MonkeyPatch()
        self.live_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        allocate = shardwise.offload.staging_buffers.host_pages

        def host_pages(num_bytes: int, pinned_for: torch.device | None = None) -> Tensor:
            pages = allocate(num_bytes, pinned_for)
            storage = pages.untyped_storage()
            with self._lock:
                self._pages[id(storage)] = (storage.data_ptr(), storage.nbytes())
                self.live_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._forget, id(storage))
            return pages

        self._patch.setattr(shardwise.offload.staging_buffers, "host_pages", host_pages)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._patch.undo()

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def hold(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is one of them."""
        return id(storage) in self._pages

    def _forget(self, key: int) -> None:
        with self._lock:
            self.live_bytes -= self._pages.pop(key)[1]


class Crossings:
    """What crosses between tiers while entered, in bytes by (from, to).

    The tables of codes are neither the device's nor the host's: on a GPU each has its own.

    Attributes:
        bytes: so far.
        mixed: ops other than a copy that read or wrote memory of the device and of the host, which no GPU can.
    """

    def __init__(self, engine: Engine, pages: HostPages) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.mixed: Counter[str] = Counter()
        self._engine = engine
        self._pages = pages
        self._tables = {id(each.untyped_storage()) for each in code_tables()}
        self._stored = {id(each.untyped_storage()): each for each in host_tensors(engine)}
        self._lock = threading.Lock()
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by the host, from what it has
        self._patch = pytest.MonkeyPatch()
        self._stack = ExitStack()
        self._worker_mode = _Watch(self, is_of_host=True)

    def __enter__(self) -> Self:
        read, write = os.preadv, os.pwritev

        def preadv(*args: Any) -> int:
            return self._count("nvme", "host", read(*args))

        def pwritev(*args: Any) -> int:
            return self._count("host", "nvme", write(*args))

        self._patch.setattr(os, "preadv", preadv)
        self._patch.setattr(os, "pwritev", pwritev)
        worker = self._engine.tiers.worker
        worker.submit(self._worker_mode.__enter__).wait()
        self._stack.callback(lambda: worker.submit(lambda: self._worker_mode.__exit__(None, None, None)).wait())
        self._stack.enter_context(_Watch(self, is_of_host=False))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
        self._patch.undo()

    def see(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], is_of_host: bool) -> None:
        """An op has run; what it makes of nothing is the host's where `is_of_host` is set."""
        sized = [each for each in inputs if each.dim() and each.numel() and not self._is_table(each)]
        where = [self._is_hosts(each) for each in sized] or [is_of_host]
        if name == "aten::copy_" and len(set(where)) > 1:
            way = ("host", "device") if where[1] else ("device", "host")
            self._count(*way, sized[0].numel() * sized[0].element_size())
        elif len(set(where)) > 1:
            self.mixed[name] += 1
        elif where[0]:
            for each in outputs:
                if each.dim() and not self._is_hosts(each):
                    self._made[id(each.untyped_storage())] = weakref.ref(each.untyped_storage())

    def _is_table(self, tensor: Tensor) -> bool:
        return id(tensor.untyped_storage()) in self._tables

    def _is_hosts(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        made = self._made.get(id(storage))
        is_made = made is not None and made() is storage
        return is_made or id(storage) in self._stored or self._pages.hold(storage)

    def _count(self, source: str, target: str, num_bytes: int) -> int:
        with self._lock:
            self.bytes[source, target] += num_bytes
        return num_bytes


class _Watch(TorchDispatchMode):
    def __init__(self, seen: Crossings, is_of_host: bool) -> None:
        super().__init__()
        self._seen = seen
        self._is_of_host = is_of_host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = [*tensors_in(list(args)), *tensors_in(list((kwargs or {}).values()))]
        outputs = func(*args, **(kwargs or {}))
        self._seen.see(func.name(), inputs, list(tensors_in(outputs)), self._is_of_host)
        return outputs


def code_tables() -> list[Tensor]:
    """The tables by which states are encoded and decoded, which a process makes once."""
    cpu = torch.device("cpu")
    made = [make(is_signed, cpu) for make in (codec.code_table, codec.code_values) for is_signed in (True, False)]
    return made + [codec.pair_values(is_signed) for is_signed in (True, False)]


def settle(engine: Engine) -> None:
    """Return once nothing is under way between tiers, the files' writes included."""
    engine.parts.sharding.drain()
    engine.tiers.wait_idle()
    for storage in storages_of(engine):
        if storage.tier == "nvme":
            storage.flush()


def host_tensors(engine: Engine) -> list[Tensor]:
    """All states that rest in host memory."""
    storages = [storage for storage in storages_of(engine) if storage.tier == "host"]
    return list({id(storage): storage.tensor for storage in storages}.values())


def swap_bytes(engine: Engine) -> int:
    """Of all swap files of this rank on its disk."""
    folder = engine.tiers._folder
    if folder is None:
        return 0
    return sum(file.stat().st_size for file in folder.path.iterdir() if file.name != "lock")


def storages_of(engine: Engine) -> Iterator[Any]:
    """Where the states of every group are stored, the optimizer's only where that is off the device."""
    for group in engine.parts.sharding.groups:
        yield group.shard
        yield group.master
        if group.grads is not None and group.grads.is_away:
            yield group.grads.storage
    yield from (each for each in engine.parts.sharded.storages() if each.tier != "device")


def offloaded_bytes(input_bytes: float, num_layers: int, every: int = 1) -> float:
    """Return the bytes that a micro-batch's forward moves to host memory with `tiers.activations`.

    The backward moves the same bytes back. They are the inputs of all recomputed layers but the last: the backward
    needs those of the last layer first, so they stay. Inputs that all layers share stay too. At the peak, the device
    holds the inputs of two or three layers.

    Args:
        input_bytes: bytes of a layer's input: `activation_bytes_per_layer` with recompute "full".
    """
    return (-(-num_layers // every) - 1) * input_bytes
