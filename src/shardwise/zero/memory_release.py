"""Release an engine's memory for a while: its states leave the device and come back later.

The storages stay, empty, and so do the tensors that view them: parameters, the optimizer's pieces, its states. So
no other part has to know that they were away, and training goes on bit for bit. The states have these names:

    params     the parameters that are stored on this rank
    master     the optimizer's copies of them, where there are any
    grads      accumulated gradients; without any, their buffers are given up, and made again when needed
    optimizer  the optimizer's states

States on the device go to host memory. Or they go into a file, together with states on the host: then both memories
are free. States in files stay there, and the buffers through which they move are freed.

This is not a tier: nothing streams, and nothing can be computed with what is away.

>>> import shardwise
>>> from torch import nn
>>> model = nn.Linear(2, 1, bias=False)
>>> engine = shardwise.initialize(model, {"run": {"device": "cpu"}}, loss_fn=lambda output, batch: output.sum())
>>> result = engine.train_step([torch.ones(1, 2)])
>>> engine.offload()
{'optimizer': 20, 'master': 0, 'grads': 32, 'params': 32}
>>> engine.train_step([torch.ones(1, 2)])
Traceback (most recent call last):
    ...
shardwise.config.errors.EngineError: optimizer, master, grads, params are offloaded; call engine.reload() first
>>> engine.reload()
>>> engine.train_step([torch.ones(1, 2)]).step
2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from shardwise.config.errors import ConfigError, EngineError
from shardwise.offload.nvme import SwapFolder
from shardwise.offload.staging_buffers import StagingBuffers
from shardwise.offload.storage import DeviceStorage, HostStorage, StateStorage
from shardwise.offload.tiers import Tiers
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import empty_cache, kind_of, synchronize
from shardwise.runtime.memory_tracker import Category, MemoryTracker, trim_host_memory
from shardwise.runtime.param_guard import ReleasedParameterError, released_type
from shardwise.runtime.torch_private import set_parameter_class
from shardwise.zero.flat_buffer import ParamState
from shardwise.zero.optimizer import ShardedOptimizer
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.sharding_state import ShardingState

STATES: Final = ("optimizer", "master", "grads", "params")

Target = Literal["host", "nvme"]


@dataclass(frozen=True)
class ReleaseTarget:
    """Says where released states are stored.

    Attributes:
        path: the folder for the file; None for `tiers.nvme_path`.
        pin_memory: whether to pin host memory of a GPU: copies are several times as fast, and torch keeps it for later.
    """

    place: Target = "host"
    path: Path | None = None
    pin_memory: bool = True


class _ReleasedMemory(Protocol):
    """Represents memory that is freed and comes back, with or without its content."""

    @property
    def num_bytes(self) -> int:
        """Return its size, free or not."""

    def bytes(self) -> Tensor:
        """Return all of it, 1-D uint8."""

    def free(self) -> None:
        """Free the memory for other uses."""

    def allocate(self) -> None:
        """Allocate the memory again, without its content."""


class _ReleasedStorage:
    """Frees a storage of the device; its views stay."""

    def __init__(self, tensor: Tensor, tracker: MemoryTracker) -> None:
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes()
        self._view = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (self.num_bytes,), (1,))
        self._tracker = tracker

    def bytes(self) -> Tensor:
        return self._view

    def free(self) -> None:
        self._tracker.resize(self._view, 0)

    def allocate(self) -> None:
        self._tracker.resize(self._view, self.num_bytes)


class _OnHost:
    """Frees a state that is stored in host memory."""

    def __init__(self, storage: HostStorage) -> None:
        self.num_bytes = storage.numel * storage.dtype.itemsize
        self._storage = storage

    def bytes(self) -> Tensor:
        return self._storage.tensor.view(torch.uint8)

    def free(self) -> None:
        self._storage.free()

    def allocate(self) -> None:
        self._storage.allocate()


class MemoryRelease:
    """Moves states of one engine away and back, from `offload` to the end of `restore`.

    Args:
        tracker: the device's memory tracker; learns of every move.
        pool: the device's buffer pool; its idle buffers are freed too.
        tiers: has the host's memory tracker and buffers.
    """

    def __init__(
        self,
        sharding: ShardingState,
        sharded: ShardedOptimizer,
        tracker: MemoryTracker,
        pool: BufferPool,
        tiers: Tiers,
        target: ReleaseTarget,
    ) -> None:
        self._sharding = sharding
        self._sharded = sharded
        self._tracker = tracker
        self._pool = pool
        self._tiers = tiers
        self._target = target
        self._spill_buffer: SpillBuffer = HostSpillBuffer(0, pin_memory=False)
        self._freed: deque[_ReleasedMemory] = deque()
        self._given_up: list[_ReleasedMemory] = []  # without content
        self._states_before: dict[ParamGroup, ParamState] = {}
        self._kinds_before: list[tuple[Tensor, type[Tensor]]] = []
        self._names: tuple[str, ...] = ()

    def offload(self, include: Sequence[str]) -> dict[str, int]:
        """Move the named states away and free their memory; after an error all are as they were.

        Returns:
            the bytes that each state has freed: on the device, and with the target `nvme` on the host too.

        Raises:
            ConfigError: a name in `include` is none of STATES, there is no such target, or no folder for it.
            EngineError: it is called inside `engine.gathered()`.
            SwapError: the folder has no space for the states, or cannot be written.
            MemoryError: the host has no memory for them.
        """
        check_choices(include, self._target)
        self._drain()
        self._names = tuple(name for name in STATES if name in include)
        found: dict[int, tuple[str, _ReleasedMemory]] = {}
        for name in self._names:
            for tensor in self._on_device(name):
                found.setdefault(id(tensor.untyped_storage()), (name, _ReleasedStorage(tensor, self._tracker)))
            for storage in self._on_host(name):
                found.setdefault(id(storage), (name, _OnHost(storage)))
        freed_bytes = dict.fromkeys(self._names, 0)
        try:
            self._move_out([memory for _, memory in found.values()])
        except BaseException:  # such as too little host memory
            self.restore()
            raise
        for name, memory in found.values():
            freed_bytes[name] += memory.num_bytes
        if "grads" in self._names:
            freed_bytes["grads"] += self._drop_idle_gradients()
        self._guard()
        self._trim()
        return freed_bytes

    def restore(self) -> None:
        """Bring back what is away; if the device lacks memory it may be called again later.

        Raises:
            SwapError: the file cannot be read.
        """
        while self._given_up:
            self._given_up[-1].allocate()
            self._given_up.pop()
        while self._freed:
            # It leaves the queue once it is filled: after a lack of memory `restore` goes on from here.
            memory = self._freed[0]
            memory.allocate()
            self._spill_buffer.read(memory.bytes())
            self._freed.popleft()
        for group, state in self._states_before.items():
            group.enter(state)
        for parameter, kind in self._kinds_before:
            set_parameter_class(parameter, kind)
        self._kinds_before.clear()
        self._spill_buffer.close()
        self._tiers.trim()
        synchronize(self._tracker.device)

    def refuse(self, params_suffice: bool = False) -> None:
        """Raise, unless only what an evaluation does not need is away and `params_suffice`.

        Raises:
            EngineError: names what is away.
        """
        if self._names and not (params_suffice and "params" not in self._names):
            raise EngineError("states-offloaded", f"{', '.join(self._names)} are offloaded; call engine.reload() first")

    # [Note: Nothing is under way when states leave]
    # Storages are freed here outside of the order in which a step uses them, so nothing may be under way. Steps on the
    # host end first, since gathers wait for them; then gathers and reductions; then what the worker thread still writes
    # for them; and last all work of the device. What was read ahead is dropped, so that its buffers are freed too.
    def _drain(self) -> None:
        """Finish what is under way, and release the gathered parameters."""
        self._sharding.drain()
        self._sharding.reshard_all(keeps_views=True)
        for group in self._sharding.groups:
            group.finish_reduce()
            if not group.is_released_between_uses:
                group.wait()
            elif not group.is_sharded:
                raise EngineError(
                    "offload-inside-gathered", "states cannot be offloaded inside engine.gathered(); call it outside"
                )
        self._tiers.wait_idle()
        synchronize(self._tracker.device)
        self._tiers.forget_prefetched()

    def _move_out(self, memories: Sequence[_ReleasedMemory]) -> None:
        num_bytes = sum(memory.num_bytes for memory in memories)
        if self._target.place == "host":
            self._spill_buffer = HostSpillBuffer(
                num_bytes, self._target.pin_memory and kind_of(self._tracker.device).pins
            )
            for memory in memories:  # each is freed before the next takes host memory
                self._spill_buffer.write(memory.bytes())
                self._freed.append(memory)
                memory.free()
            return
        if num_bytes:
            self._spill_buffer = FileSpillBuffer(
                self._tiers.open_folder(self._target.path), num_bytes, self._tiers.buffers
            )
            for memory in memories:
                self._spill_buffer.write(memory.bytes())
            self._spill_buffer.flush()  # a write that fails later would lose what is freed by then
        for memory in memories:
            self._freed.append(memory)
            memory.free()

    def _on_device(self, name: str) -> Iterator[Tensor]:
        """Yield the tensors on the device that belong to a state."""
        yield from (storage.tensor for storage in self._storages(name) if isinstance(storage, DeviceStorage))
        for group in self._sharding.groups:
            if name == "params":
                yield group.full
                if group.transport.secondary is not None:
                    yield group.transport.secondary.values
            elif name == "grads" and group.grads is not None:
                yield from group.grads.sums.residuals
                yield from group.grads.buffers() if group.grads.has_gradients else ()
        for value in self._sharded.kept_tensors() if name == "optimizer" else ():
            if value.device.type == self._tracker.device.type:
                self._tracker.track(value, Category.OPTIMIZER)
                yield value

    def _on_host(self, name: str) -> Iterator[HostStorage]:
        """Yield the host storages that go into the file."""
        if self._target.place == "nvme":
            yield from (storage for storage in self._storages(name) if isinstance(storage, HostStorage))

    def _storages(self, name: str) -> Iterator[StateStorage]:
        for group in self._sharding.groups:
            grads = group.grads
            if name == "params":
                yield group.shard
            elif name == "master" and group.master is not group.shard:
                yield group.master
            elif name == "grads" and grads is not None and grads.is_away and grads.has_gradients:
                yield grads.storage
        if name == "optimizer":
            yield from self._sharded.storages()

    def _drop_idle_gradients(self) -> int:
        """Free memory that holds no gradients; return its bytes."""
        idle = [each.grads for each in self._sharding.groups if each.grads is not None and not each.grads.has_gradients]
        storages = [grads.storage for grads in idle if grads.is_away and self._target.place == "nvme"]
        on_host = [_OnHost(storage) for storage in storages if isinstance(storage, HostStorage)]
        for memory in on_host:
            memory.free()
            self._given_up.append(memory)
        return sum(grads.drop() for grads in idle) + sum(memory.num_bytes for memory in on_host)

    def _guard(self) -> None:
        """Refuse the use of tensors that a script may have: to read memory that is freed ends the process."""
        titles: dict[int, str] = {}
        refuse = _refuse_use(titles)
        for group in self._sharding.groups if "params" in self._names else ():
            self._states_before[group] = group.state
            group.enter(ParamState.OFFLOADED)
            for parameter, place in zip(group.parameters, group.spec.params, strict=True):
                self._guard_one(parameter, f"parameter {place.name}", titles, released_type(refuse))
        for name, view in self._sharded.views().items():
            if _is_freed(view):
                self._guard_one(view, f"what is stepped of parameter {name}", titles, released_type(refuse))
        for value in self._sharded.kept_tensors():
            if _is_freed(value):
                self._guard_one(value, "a state of the optimizer", titles, released_type(refuse, type(value)))

    def _guard_one(self, tensor: Tensor, title: str, titles: dict[int, str], kind: type[Tensor]) -> None:
        titles[id(tensor)] = title
        self._kinds_before.append((tensor, type(tensor)))
        set_parameter_class(tensor, kind)

    def _trim(self) -> None:
        """Return what was freed to the system."""
        self._pool.trim()
        self._tiers.trim()
        empty_cache(self._tracker.device)
        trim_host_memory()


def check_choices(include: Sequence[str], target: ReleaseTarget) -> None:
    """Raise if states or a target are named that do not exist.

    Raises:
        ConfigError: names those that exist.
    """
    unknown = [name for name in include if name not in STATES]
    if unknown:
        raise ConfigError(
            "unknown-release-state", f"include has no state {unknown[0]!r}; there are {', '.join(STATES)}"
        )
    if target.path is not None and target.place == "host":
        raise ConfigError(
            "release-path-for-host", f"path={str(target.path)!r} is for files, and to='host' makes none; set to='nvme'"
        )


def _is_freed(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _refuse_use(titles: Mapping[int, str]) -> Callable[[Tensor], Tensor]:
    def refuse(tensor: Tensor) -> Tensor:
        raise ReleasedParameterError(
            "states-offloaded", f"{titles[id(tensor)]} is offloaded; call engine.reload() first"
        )

    return refuse


# torch rounds pinned memory up to a power of two, so large states are cut.
CHUNK_BYTES: Final = 64 * 2**20
# A chunk of a file is whole blocks of it, and several chunks move at a time.
FILE_CHUNK_BYTES: Final = 8 * 2**20
_MOST_MOVING: Final = 4


class SpillBuffer(Protocol):
    """Keeps bytes and returns them in the same order; tensors are 1-D uint8, on the device or the host."""

    def write(self, source: Tensor) -> None:
        """Append the bytes of `source`; on the device's current stream."""

    def flush(self) -> None:
        """Return once all that was written is kept; its source may be freed then.

        Raises:
            SwapError: it cannot be written.
        """

    def read(self, target: Tensor) -> None:
        """Fill `target` with the bytes that were written next; on the device's current stream.

        Raises:
            SwapError: it cannot be read.
        """

    def close(self) -> None:
        """Free what is kept."""


class HostSpillBuffer:
    """Keeps bytes in host memory, and frees them as they are read.

    Args:
        num_bytes: the bytes that will be written.
        pin_memory: use page-locked memory, so that copies from and to a GPU need not be waited for.
    """

    def __init__(self, num_bytes: int, pin_memory: bool) -> None:
        self._num_bytes_left = num_bytes
        self._pin_memory = pin_memory
        self._chunks: deque[Tensor] = deque()
        self._num_written = 0  # of the last chunk
        self._num_read = 0  # of the first

    def write(self, source: Tensor) -> None:
        while source.numel() > 0:
            if not self._chunks or self._num_written == self._chunks[-1].numel():
                num_bytes = min(CHUNK_BYTES, self._num_bytes_left)
                self._chunks.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory))
                self._num_bytes_left -= num_bytes
                self._num_written = 0
            free = self._chunks[-1][self._num_written :]
            part, source = source[: free.numel()], source[free.numel() :]
            free[: part.numel()].copy_(part, non_blocking=self._pin_memory)
            self._num_written += part.numel()

    def flush(self) -> None:
        """Do nothing: copies are in the order of the stream, and so is the freeing of their source."""

    def read(self, target: Tensor) -> None:
        while target.numel() > 0:
            unread = self._chunks[0][self._num_read :]
            part, target = target[: unread.numel()], target[unread.numel() :]
            part.copy_(unread[: part.numel()], non_blocking=self._pin_memory)
            self._num_read += part.numel()
            if self._num_read == self._chunks[0].numel():
                self._chunks.popleft()
                self._num_read = 0

    def close(self) -> None:
        self._chunks.clear()


class FileSpillBuffer:
    """Keeps bytes in one file of a folder, and moves them through a few buffers of the host.

    The file has all of its space from the start, so a disk that is too full is known before anything is written.

    Args:
        folder: used by this buffer alone, and closed with it.
        num_bytes: the bytes that will be written.

    Raises:
        SwapError: the folder has no space for so much.
    """

    def __init__(self, folder: SwapFolder, num_bytes: int, buffers: StagingBuffers) -> None:
        self._folder = folder
        self._num_bytes = num_bytes
        self._buffers = buffers
        self._moving: deque[tuple[Tensor, Future[None]]] = deque()
        self._filling: Tensor | None = None
        self._position = 0  # of the next chunk
        self._num_done = 0  # of the chunk that is filled, or read
        try:
            self._file = folder.allocate("released", num_bytes)
        except BaseException:
            folder.close()
            raise

    def write(self, source: Tensor) -> None:
        while source.numel() > 0:
            if self._filling is None:
                self._filling, self._num_done = self._buffers.acquire(self._next_bytes()), 0
            free = self._filling[self._num_done :]
            part, source = source[: free.numel()], source[free.numel() :]
            free[: part.numel()].copy_(part)
            self._num_done += part.numel()
            if self._num_done == self._filling.numel():
                self._moving.append((self._filling, self._file.write(self._position, self._filling)))
                self._position += self._filling.numel()
                self._filling = None
                self._end_writes(_MOST_MOVING)

    def flush(self) -> None:
        """Wait until all is in the file; reads begin at its start."""
        self._end_writes(0)
        self._position = self._num_done = 0

    def read(self, target: Tensor) -> None:
        while target.numel() > 0:
            while len(self._moving) < _MOST_MOVING and self._position < self._num_bytes:
                buffer = self._buffers.acquire(self._next_bytes())
                self._moving.append((buffer, self._file.read(self._position, buffer)))
                self._position += buffer.numel()
            buffer, reading = self._moving[0]
            reading.result()
            unread = buffer[self._num_done :]
            part, target = target[: unread.numel()], target[unread.numel() :]
            part.copy_(unread[: part.numel()])
            self._num_done += part.numel()
            if self._num_done == buffer.numel():
                self._moving.popleft()
                self._buffers.release(buffer)
                self._num_done = 0

    def close(self) -> None:
        """Remove file and folder."""
        if self._filling is not None:
            self._buffers.release(self._filling)
            self._filling = None
        while self._moving:
            buffer, moving = self._moving.popleft()
            with suppress(Exception):  # the bytes are not needed any more
                moving.result()
            self._buffers.release(buffer)
        self._folder.close()

    def _next_bytes(self) -> int:
        return min(FILE_CHUNK_BYTES, self._num_bytes - self._position)

    def _end_writes(self, num_left: int) -> None:
        while len(self._moving) > num_left:
            buffer, writing = self._moving[0]
            writing.result()
            self._moving.popleft()
            self._buffers.release(buffer)
