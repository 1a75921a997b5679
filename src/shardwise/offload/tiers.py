"""Give each state of an engine its storage, and own the memory, the files and the worker thread for all of them."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Final

import torch

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Tier, TiersConfig
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.offload.counters import TransferCounters
from shardwise.offload.cpu_optimizer import StepThreads
from shardwise.offload.nvme import SwapFolder
from shardwise.offload.nvme_storage import BufferCache, NvmeStorage, SwapFileLike, padded_bytes
from shardwise.offload.staging_buffers import StagingBuffers
from shardwise.offload.step_pipeline import CHUNK_NUMEL, StepPipeline, even_chunk_numel
from shardwise.offload.storage import DeviceStorage, HostStorage, SimulatedFile, StateStorage, TransferContext
from shardwise.offload.worker import HostWorker, WorkerOutcome
from shardwise.runtime.device import Streams
from shardwise.runtime.memory_tracker import Category, MemoryTracker
from shardwise.runtime.pinned_memory import host_zeros
from shardwise.runtime.precision import torch_dtype
from shardwise.runtime.torch_private import unseen_by_op_modes

# Chunks of the optimizer's states that stay in memory between two steps; slices of parameters or gradients too.
NUM_KEPT: Final = 2


class Tiers:
    """Stores states in their tiers, from the engine's start to its end.

    Args:
        layout: gives the sizes of files and buffers.
        streams: the streams of the engine's device.
        rank: of this process in the world.
        is_simulated: whether to use no real files and no thread.

    Attributes:
        traffic: bytes that have moved between tiers.
    """

    def __init__(
        self,
        config: TiersConfig,
        layout: Layout,
        streams: Streams,
        tracker: MemoryTracker,
        rank: int,
        is_simulated: bool,
    ) -> None:
        self.memory = MemoryTracker("cpu")
        self.traffic = TransferCounters()
        self.worker = HostWorker(streams.device, config.cores, is_inline=is_simulated)
        self.step_pipeline = StepPipeline(self.worker)
        self.step_threads = _step_threads(config, layout, is_simulated)
        self.streams = streams
        self._layout = layout
        self._reserved: dict[str, SwapFileLike] = {}
        self._tracker = tracker
        self._rank = rank
        self.is_simulated = is_simulated
        self._pinned_for = streams.device if config.pin_memory else None
        self._path = config.nvme_path
        self.buffers = StagingBuffers(self._pinned_for, self.memory, _window_sizes(layout))
        self._transfers = TransferContext(streams, self.buffers, self.worker, self.traffic)
        self._folder: SwapFolder | None = None
        self._nvme_storages: weakref.WeakSet[NvmeStorage] = weakref.WeakSet()
        # Two caches: parameters and gradients pass in every backward, and would push out the chunks of the optimizer's
        # states that the last step has left, with which the next one begins.
        self._kept = BufferCache(NUM_KEPT * _chunk_bytes(layout))
        self._passing = BufferCache(NUM_KEPT * _largest_bytes(layout))

    @property
    def device(self) -> torch.device:
        """Return the engine's device."""
        return self.streams.device

    def reserve(self) -> None:
        """Make the files for all that the layout puts on NVMe, so that too little space is found before training.

        Raises:
            SwapError: a file cannot be made.
        """
        for state in self._layout.states:
            for group in self._layout.groups:
                if state.tier_in(group) == "nvme" and state.is_kept_by(group):
                    name = f"{group.name}.{state.name}"
                    num_bytes = padded_bytes(group.shard_numel, torch_dtype(state.dtype_in(group)))
                    self._reserved[name] = self._make_file(name, num_bytes)

    def place(self, tier: Tier, name: str, numel: int, dtype: torch.dtype, category: Category) -> StateStorage:
        """Allocate storage for a state, zeros at first.

        Args:
            name: of the group and the state; it becomes part of the file's name.

        Raises:
            SwapError: a file cannot be made.
        """
        if tier == "device":
            tensor = torch.zeros(numel, dtype=dtype, device=self.device)
            self._tracker.track(tensor, category)
            return DeviceStorage(tensor, self._transfers)
        if tier == "host":
            # What only the host steps with never goes to the device.
            pinned_for = None if category is Category.OPTIMIZER else self._pinned_for

            def make() -> torch.Tensor:
                with unseen_by_op_modes():
                    tensor = host_zeros(numel, dtype, pinned_for)
                self.memory.track(tensor, category)
                return tensor

            return HostStorage(make, self._transfers)
        kept = self._kept if category is Category.OPTIMIZER else self._passing
        storage = NvmeStorage(self._file(name, padded_bytes(numel, dtype)), numel, dtype, self._transfers, kept)
        self._nvme_storages.add(storage)
        return storage

    def on_device(self, tensor: torch.Tensor) -> DeviceStorage:
        """Wrap a tensor of the device that the caller has allocated and tracked."""
        return DeviceStorage(tensor, self._transfers)

    def wait_idle(self) -> None:
        """Return once nothing is under way on the host.

        Raises:
            HostWorkError: work on the host has failed.
        """
        self.worker.wait_idle()

    def recover(self) -> WorkerOutcome:
        """Wait for all work, and return what has failed and forget it: all states must be written again.

        Parts of states that could not be read or written have undefined content afterwards.
        """
        outcome = self.worker.recover()
        self.step_pipeline.drop()
        for storage in self._nvme_storages:
            found = storage.recover()
            outcome = found if outcome.failure is None else outcome
        return outcome

    def open_folder(self, path: Path | None = None) -> SwapFolder:
        """Open a folder of its own for released states, in `path` or beside that of the states on NVMe.

        Raises:
            ConfigError: neither `path` nor `tiers.nvme_path` is set.
            SwapError: nothing can be written there.
        """
        root = path or self._path
        if root is None:
            raise ConfigError("no-swap-folder", "to='nvme' needs a folder; give path=..., or set tiers.nvme_path")
        return SwapFolder.open(Path(root), self._rank)

    def forget_prefetched(self) -> None:
        """Drop the parameters that were read ahead of their use."""
        for storage in self._nvme_storages:
            storage.forget()

    def trim(self) -> None:
        """Free the buffers that are not in use; they are allocated again when needed."""
        self._kept.clear()
        self._passing.clear()
        self.buffers.trim()

    def close(self) -> None:
        """End the threads, and free files and buffers."""
        # The worker first: what it has been given uses the threads, buffers and files that go after it.
        self.worker.close()
        if self.step_threads is not None:
            self.step_threads.close()
        self.trim()
        if self._folder is not None:
            self._folder.close()

    def _file(self, name: str, num_bytes: int) -> SwapFileLike:
        """Return the file that was reserved for a state, or make a new one if there is none."""
        reserved = self._reserved.pop(name, None)
        return reserved or self._make_file(name, num_bytes)

    def _make_file(self, name: str, num_bytes: int) -> SwapFileLike:
        if self.is_simulated or self._path is None:
            return SimulatedFile(num_bytes)
        if self._folder is None:
            self._folder = SwapFolder.open(Path(self._path), self._rank)
        return self._folder.allocate(name, num_bytes)


def _step_threads(config: TiersConfig, layout: Layout, is_simulated: bool) -> StepThreads | None:
    """Return threads for the step on the host; None if no step runs there, or only one core is free for it."""
    num_cores = len(config.cores) if config.cores else torch.get_num_threads()
    is_streamed = any(group.tiers.optimizer != "device" for group in layout.groups)
    return StepThreads(num_cores, config.cores) if is_streamed and num_cores > 1 and not is_simulated else None


def _chunks(layout: Layout) -> list[tuple[GroupSpec, int]]:
    """Return the groups that are stepped on the host, each with the elements of its largest chunk."""
    streamed = [group for group in layout.groups if group.trainable and group.tiers.optimizer != "device"]
    return [(each, min(even_chunk_numel(each.shard_numel, CHUNK_NUMEL), each.shard_numel)) for each in streamed]


def _chunk_bytes(layout: Layout) -> int:
    """Return the bytes of an optimizer's states in the largest chunk."""
    states = [state for state in layout.states if state.role == "optimizer"]
    return max(
        (numel * sum(DTYPE_BYTES[state.dtype_in(group)] for state in states) for group, numel in _chunks(layout)),
        default=0,
    )


def _window_sizes(layout: Layout) -> list[int]:
    """Return the bytes that a state takes in the largest chunk, for each dtype."""
    chunks = _chunks(layout)
    most = max((numel for _, numel in chunks), default=0)
    dtypes = {torch_dtype(state.dtype_in(group)) for state in layout.states for group, _ in chunks}
    return [padded_bytes(most, dtype) for dtype in dtypes]


def _largest_bytes(layout: Layout) -> int:
    """Return the bytes of the largest slice of parameters or gradients that is stored on NVMe."""
    return max(
        (group.shard_numel * 4 for group in layout.groups if "nvme" in (group.tiers.params, group.tiers.grads)),
        default=0,
    )
