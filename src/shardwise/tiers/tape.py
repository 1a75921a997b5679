"""Bytes that are put aside for a while, in host memory or in a file, and read back in the order of their writing.

>>> tape = HostTape(3, pin_memory=False)
>>> tape.write(torch.tensor([1, 2, 3], dtype=torch.uint8))
>>> tape.read(found := torch.empty(3, dtype=torch.uint8))
>>> found.tolist()
[1, 2, 3]
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, Protocol

import torch
from torch import Tensor

from shardwise.tiers.buffers import HostBuffers
from shardwise.tiers.files import SwapFolder

# torch rounds pinned memory up to a power of two, so large states are cut.
CHUNK_BYTES: Final = 64 * 2**20
# Of a file: whole blocks of it, several of them on their way.
FILE_CHUNK_BYTES: Final = 8 * 2**20
_MOST_MOVING: Final = 4


class Tape(Protocol):
    """Bytes that come back in the order in which they went; tensors are 1-D uint8, on the device or the host."""

    def write(self, source: Tensor) -> None:
        """Append the bytes of `source`; on the device's current stream."""

    def flush(self) -> None:
        """Return once all that was written is kept; what it came from may go.

        Raises:
            SwapError: it cannot be written.
        """

    def read(self, target: Tensor) -> None:
        """Fill `target`, as long as what was written next; on the device's current stream.

        Raises:
            SwapError: it cannot be read.
        """

    def close(self) -> None:
        """Give up what is there."""


class HostTape:
    """Bytes in host memory; what has been read is freed.

    Args:
        num_bytes: that will be written.
        pin_memory: page-locked, so that copies from and to CUDA need not be waited for.
    """

    def __init__(self, num_bytes: int, pin_memory: bool) -> None:
        self._num_bytes_left = num_bytes
        self._pin_memory = pin_memory
        self._chunks: deque[Tensor] = deque()
        self._num_written = 0  # of the last chunk
        self._num_read = 0  # of the first

    def write(self, source: Tensor) -> None:
        """Append a copy."""
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
        """Copies are in the order of the stream, and so is what frees their source."""

    def read(self, target: Tensor) -> None:
        """Copy back."""
        while target.numel() > 0:
            unread = self._chunks[0][self._num_read :]
            part, target = target[: unread.numel()], target[unread.numel() :]
            part.copy_(unread[: part.numel()], non_blocking=self._pin_memory)
            self._num_read += part.numel()
            if self._num_read == self._chunks[0].numel():
                self._chunks.popleft()
                self._num_read = 0

    def close(self) -> None:
        """Free what was not read."""
        self._chunks.clear()


class FileTape:
    """Bytes in one file of a folder, through a few buffers of the host.

    The file has all of its room from the start, so a disk that is too full is known before anything is written.

    Args:
        folder: for this tape alone; closed with it.
        num_bytes: that will be written.
        buffers: of the host.

    Raises:
        SwapError: the folder has no room for so much.
    """

    def __init__(self, folder: SwapFolder, num_bytes: int, buffers: HostBuffers) -> None:
        self._folder = folder
        self._num_bytes = num_bytes
        self._buffers = buffers
        self._moving: deque[tuple[Tensor, Future[None]]] = deque()
        self._filling: Tensor | None = None
        self._position = 0  # of the next chunk
        self._num_done = 0  # of the chunk that is filled, or read
        try:
            self._file = folder.allocate("aside", num_bytes)
        except BaseException:
            folder.close()
            raise

    def write(self, source: Tensor) -> None:
        """Append a copy, which is written in the background."""
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
        """Wait until all is in the file; it is read from its start from now on."""
        self._end_writes(0)
        self._position = self._num_done = 0

    def read(self, target: Tensor) -> None:
        """Copy what is there, and read ahead."""
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
            with suppress(Exception):  # nobody wants it any more
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
