"""Run the step on the host as a pipeline: chunk i + 1 is read while chunk i is stepped and i - 1 is written.

A chunk opens windows into the states of one range of one group. States in host memory are there at once; states in
files or on the device are read, and written back, in the background.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from shardwise.offload.nvme_storage import NvmeStorage
from shardwise.offload.storage import StagedView, StateStorage
from shardwise.offload.worker import HostWorker, Task
from shardwise.runtime.device import Event

# A chunk of Adam's states on NVMe is then 48 MiB: large enough for a disk, and for the cost of a call to vanish.
CHUNK_NUMEL: Final = 4 * 2**20
# Without memory, opening a chunk costs the same whatever its size; of a trillion parameters there would be thousands.
SIMULATED_CHUNK_NUMEL: Final = 64 * CHUNK_NUMEL
# A chunk of whole blocks of a file and of whole blocks of codes, whatever the dtype.
_CUT_NUMEL: Final = 4096
# Chunks that are open at a time: the one that is stepped, and those that are read at the same time.
DEPTH: Final = 3


def even_chunk_numel(numel: int, most: int) -> int:
    """Return the length of a state's chunks, at most `most`: few chunks of nearly equal length share buffers.

    A much shorter chunk would need pinned memory of its own, and the other buffers would be freed, in each step.

    >>> even_chunk_numel(10_000_000, 4 * 2**20), 10_000_000 - 2 * 3_334_144
    (3334144, 3331712)
    """
    num_chunks = max(1, -(-numel // most))
    return min(most, -(-numel // (num_chunks * _CUT_NUMEL)) * _CUT_NUMEL)


@dataclass(frozen=True)
class ChunkInput:
    """Says what a chunk does with its part of one state."""

    storage: StateStorage
    is_read: bool = True
    is_written: bool = True


@dataclass(frozen=True)
class StepChunk:
    """Describes the step of the range [start, stop) of a group's states.

    Attributes:
        start: the first element of the range, in the rank's slice.
        work: steps the states, which it gets by name, 1-D and as long as the range.
        after: the point in the device's work at which states on the device are valid.
        needs: a task that must come before, such as writing the gradient to its file.
    """

    parts: Mapping[str, ChunkInput]
    start: int
    stop: int
    work: Callable[[Mapping[str, Tensor]], None]
    after: Event
    needs: Task | None = None

    @property
    def is_at_hand(self) -> bool:
        """Say whether it is still in memory from the last step."""
        storages = [part.storage for part in self.parts.values() if part.is_read and part.is_written]
        return any(isinstance(storage, NvmeStorage) and storage.keeps(self.start, self.stop) for storage in storages)


class StepPipeline:
    """Steps chunks on the worker thread, in the order in which they are submitted."""

    def __init__(self, worker: HostWorker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._waiting: deque[StepChunk] = deque()
        self._open: deque[tuple[StepChunk, dict[str, StagedView]]] = deque()

    def submit(self, chunk: StepChunk) -> Task:
        """Submit a chunk; return the task that steps it."""
        with self._lock:
            self._waiting.append(chunk)
        return self._worker.submit(self._step_next)

    def drop(self) -> None:
        """Drop the chunks that were left when the worker failed, and close those that are open; the worker is idle."""
        self._waiting.clear()
        while self._open:
            _close(self._open.popleft()[1])

    # [Note: Read, step and write at the same time]
    # Windows of the next chunks are opened before this one is stepped: the threads of the disk read them meanwhile, and
    # write those before it, as `close` only starts a write. So disk and cores are busy at the same time, and DEPTH
    # bounds the memory. The engine's thread submits while this one opens, so they share a lock; what is open is the
    # worker thread's.
    def _step_next(self) -> None:
        self._open_ahead()
        chunk, windows = self._open.popleft()
        try:
            chunk.work({name: window.wait() for name, window in windows.items()})
        except BaseException:
            _close(windows)
            raise
        with ExitStack() as stack:  # which closes the others too where one cannot be written
            for name, window in windows.items():
                stack.callback(window.close, chunk.parts[name].is_written)

    def _open_ahead(self) -> None:
        while len(self._open) < DEPTH:
            with self._lock:
                if not self._waiting:
                    return
                needs = self._waiting[0].needs
                if self._open and needs is not None and not needs.is_done:
                    return
                chunk = self._waiting.popleft()
            windows: dict[str, StagedView] = {}
            self._open.append((chunk, windows))
            for name, part in chunk.parts.items():
                windows[name] = part.storage.open(chunk.start, chunk.stop, part.is_read, chunk.after)


def _close(windows: Mapping[str, StagedView]) -> None:
    for window in windows.values():
        window.close()
