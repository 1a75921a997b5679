"""A swap file that is not there, for tensors without memory."""

from __future__ import annotations

from concurrent.futures import Future

from torch import Tensor


class SimulatedFile:
    """Of any size; reads and writes are over at once and move nothing.

    Args:
        num_bytes: that it would have.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def read(self, offset_bytes: int, target: Tensor) -> Future[None]:
        """Leave `target` as it is."""
        return _over()

    def write(self, offset_bytes: int, source: Tensor) -> Future[None]:
        """Leave the file as it is not."""
        return _over()

    def free(self) -> None:
        """There is nothing to remove."""


def _over() -> Future[None]:
    over: Future[None] = Future()
    over.set_result(None)
    return over
