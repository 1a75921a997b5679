"""Carries out the copies that the slicing arithmetic says, on buffers of NumPy or torch."""

from collections.abc import Sequence
from typing import Any

from shardwise.layout.slicing import Chunk, SliceCopy


def apply_copies(source: Any, destination: Any, copies: Sequence[SliceCopy]) -> None:
    """Copy each rectangle of `copies` from the `source` to the `destination` buffer, both 1-D and of one library."""
    for copy in copies:
        values = _view(source, copy.source)[copy.rect.slices_in(copy.source.rect)]
        _view(destination, copy.destination)[copy.rect.slices_in(copy.destination.rect)] = values


def _view(buffer: Any, piece: Chunk) -> Any:
    return buffer[piece.local_offset : piece.local_stop].reshape(piece.rect.shape)
