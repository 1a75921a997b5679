"""Keep what the host has read of tensors, so that it waits for a device once a batch, not in each layer.

>>> import torch
>>> reads = HostReads()
>>> mask = torch.tensor([1, 1, 0])
>>> reads.of(mask, Tensor.tolist) is reads.of(mask, Tensor.tolist)
True
>>> reads.of(mask.zero_(), Tensor.tolist)
[0, 0, 0]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.runtime.torch_private import unseen_by_op_modes, version, view_base

Result = TypeVar("Result")


class HostReads:
    """Keeps what functions have read of tensors, as long as a tensor lives and is not written.

    Layers get views of one tensor, which are one here. What autograd does not count as a write, through `data` or
    NumPy, is not seen.
    """

    def __init__(self) -> None:
        self._results: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def of(self, tensor: Tensor, read: Callable[[Tensor], Result]) -> Result:
        """Return what a function reads of a tensor; the result must not refer to that."""
        base = view_base(tensor)
        source = tensor if base is None else base
        if source.is_inference():  # its writes are not counted
            return read(tensor)
        num_writes, results = self._results.get(source, (0, {}))
        if num_writes != version(source):
            results = {}
        place: Any = (read, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        if place not in results:
            # A recomputation may come to a layer whose forward found the result, after another batch.
            with unseen_by_op_modes(is_real=True):
                results[place] = read(tensor)
            self._results[source] = version(source), results
        result: Result = results[place]
        return result
