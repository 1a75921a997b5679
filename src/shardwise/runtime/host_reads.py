"""Keep what the host has read of tensors, so that it waits for a device once a batch, not in each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.runtime.torch_private import unseen_by_op_modes, version, view_base

Result = TypeVar("Result")


class HostReads:
    """Keeps what functions have read of tensors, as long as a tensor lives and is not written.

    Views of one tensor count as that. Writes that autograd does not count, through `data` or NumPy, are not seen.
    """

    def __init__(self) -> None:
        self._results: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def of(self, tensor: Tensor, read: Callable[[Tensor], Result]) -> Result:
        """Return what a function reads of a tensor; the result must not refer to that."""
        base = view_base(tensor)
        source = tensor if base is None else base
        if source.is_inference():  # its writes are not counted
            return read(tensor)
        num_writes, results = self._results.get(source, (None, {}))
        if num_writes != version(source):
            self._results[source] = version(source), (results := {})
        view = (read, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        if view not in results:
            # A recomputation may come to a layer whose forward has not read it.
            with unseen_by_op_modes(is_real=True):
                results[view] = read(tensor)
        result: Result = results[view]
        return result
