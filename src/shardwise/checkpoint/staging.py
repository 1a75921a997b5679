"""The copy in host memory from which a save writes while training goes on.

Only what this rank writes is copied. Training is held up for that copy alone, so the memory is made once, pinned where
the states rest on a GPU, and used again by later saves.

>>> from shardwise.layout.pieces import LocalTensor
>>> pieces = LocalTensor.whole((2, 3)).pieces
>>> held = Holding("up", (), "param", (2, 3), MemoryFlat(torch.arange(6.0)), pieces, written=pieces)
>>> staging = Staging(torch.device("cpu"))
>>> (copy,) = staging.copy([held])
>>> _ = held.flat.tensor.zero_()
>>> copy.flat.tensor.tolist(), staging.num_bytes
([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 24)
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import CheckpointError
from shardwise.flats import MemoryFlat
from shardwise.holdings import Holding
from shardwise.layout.pieces import Piece

# cudaHostRegisterPortable: pinned for every device of the process.
_PORTABLE = 1

log = logging.getLogger("shardwise")


class Staging:
    """Host memory for the pieces that one rank writes; it grows, and never shrinks until it is released.

    Args:
        device: of the engine; the memory is pinned if it is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory."""
        return self._buffer.numel()

    @torch.no_grad()
    def copy(self, holdings: Sequence[Holding]) -> tuple[Holding, ...]:
        """Copy what this rank writes, and return when it is there.

        It runs on the current stream: whoever changes the states next does so behind it, and the caller waits for it
        anyway, so that a stream of its own would gain nothing.

        Returns:
            The holdings, in the same order, over this memory; each has the pieces that this rank writes, and no others.

        Raises:
            CheckpointError: there is no memory for them.
        """
        num_bytes = sum(holding.num_written_bytes for holding in holdings)
        if num_bytes > self.num_bytes:
            self.release()  # the old memory goes first
            self._buffer = self._make(num_bytes)
        copies = [_copy(holding, place) for holding, place in zip(holdings, self._places(holdings), strict=True)]
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return tuple(copies)

    def release(self) -> None:
        """Give the memory back; the next copy makes it anew. No copy may be in use."""
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _places(self, holdings: Sequence[Holding]) -> Iterator[Tensor]:
        """A part of the memory for each; the widest elements lie in front, so that all are aligned without gaps."""
        offset_bytes, starts = 0, {}
        for index in sorted(range(len(holdings)), key=lambda index: -holdings[index].flat.dtype.itemsize):
            starts[index] = offset_bytes
            offset_bytes += holdings[index].num_written_bytes
        for index, holding in enumerate(holdings):
            part = self._buffer[starts[index] : starts[index] + holding.num_written_bytes]
            yield part.view(holding.flat.dtype)

    def _make(self, num_bytes: int) -> Tensor:
        """New memory. torch's own pinned memory comes in powers of two: up to twice of what is needed here."""
        try:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise CheckpointError(
                f"there is no host memory for a copy of the {num_bytes} bytes that this rank writes; "
                "wait for the save, which then needs none"
            ) from error
        if self._device.type == "cuda":
            runtime = torch.cuda.cudart()
            if int(runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, _PORTABLE)) != 0:
                log.warning("cannot pin %d bytes of host memory: saves hold up training for longer", num_bytes)
            else:
                weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False
        return buffer


def _copy(holding: Holding, place: Tensor) -> Holding:
    """Copy the written pieces, one behind the other, to `place`: 1-D, of their elements and dtype."""
    pieces, offset = [], 0
    for piece in holding.written:
        pieces.append(Piece(piece.rect, offset))
        offset += piece.rect.numel
    offset = 0
    for start, stop in _runs(holding.written):
        place[offset : offset + stop - start].copy_(holding.flat.read(start, stop), non_blocking=True)
        offset += stop - start
    return replace(holding, flat=MemoryFlat(place), pieces=tuple(pieces), written=tuple(pieces))


def _runs(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """The ranges of the buffer in which pieces follow one another: a flat range is several rectangles, and one copy."""
    start = stop = 0
    for piece in pieces:
        if piece.local_offset != stop:
            if stop > start:
                yield start, stop
            start = piece.local_offset
        stop = piece.local_stop
    if stop > start:
        yield start, stop
