"""Placeholders stand for values that this rank does not have, and mark what is computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.torch_private import (
    FakeTensor,
    FakeTensorMode,
    plain_torch_functions,
    pytree,
    unseen_by_op_modes,
    written_tensors,
)


class PlaceholderTensors:
    """Makes placeholders: tensors of a shape, dtype and device without values. They mix with real tensors: a result
    computed from one is one too.

    Args:
        is_simulated: all tensors are fake already, in the context of `fake_tensors`: then `is_one` is always False.
        dtypes: the placeholder's dtype where it differs from the tensor's, by the `id` of the tensor; None for none.
    """

    def __init__(
        self, device: torch.device, is_simulated: bool = False, dtypes: Mapping[int, torch.dtype] | None = None
    ) -> None:
        self._device = device
        self._dtypes = dtypes or {}
        self._mode = None if is_simulated else _Writes(allow_non_fake_inputs=True)

    def begin(self) -> None:
        """Begin a forward: no placeholder has been written into another tensor."""
        if self._mode is not None:
            self._mode.spoilt_ops.clear()

    def like(self, tensor: Tensor) -> Tensor:
        """Make a placeholder like `tensor`; parameters stay parameters."""
        with plain_torch_functions(), self.only():
            dtype = self._dtypes.get(id(tensor), tensor.dtype)
            placeholder = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self._device)
            return nn.Parameter(placeholder, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else placeholder

    def only(self) -> AbstractContextManager[Any]:
        """Make every tensor that is made inside the context a placeholder."""
        return nullcontext() if self._mode is None else self._mode

    def is_one(self, value: object) -> bool:
        """Say whether a value is such a placeholder, or computed from what one was written into."""
        if self._mode is None or isinstance(value, FakeTensor):
            return isinstance(value, FakeTensor) and value.fake_mode is self._mode
        return bool(self._mode.spoilt_ops) and isinstance(value, Tensor) and bool(value.isnan().any())


class _Writes(FakeTensorMode):
    """Fills with NaN what has values and is written from a placeholder, as `x[mask] = placeholder` does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spoilt_ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(args)):
            for tensor in written_tensors(func, args, kwargs or {}):
                if not isinstance(tensor, FakeTensor) and tensor.is_floating_point():
                    self.spoilt_ops.append(str(func))
                    with unseen_by_op_modes(is_real=True):
                        tensor.data.fill_(torch.nan)
        return super().__torch_dispatch__(func, types, args, kwargs or {})
