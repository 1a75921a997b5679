"""Read and write the optimizer's states of parameters that owners step whole; see `shardwise.zero.whole_step`.

The owner alone has them: as long as the parameter, of other shapes, such as factors, or numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.merged import exchange_texts, merge_parts
from shardwise.zero.whole_step import WholeParameters


@dataclass(frozen=True)
class StateKind:
    """Describes an optimizer's state.

    Attributes:
        dtype: torch's name of it.
        value: of a state that is one number; None for a tensor.
        shape: of a tensor that has not the parameter's shape; None for one that has.
    """

    dtype: str
    value: float | None
    shape: tuple[int, ...] | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype."""
        return getattr(torch, self.dtype)


def kinds_of(whole: WholeParameters, optimizer: Optimizer, name: str) -> dict[str, StateKind]:
    """Return the states of a parameter, which ranks learn from its owner. All ranks that share tensors call it."""
    view = whole.views.get(name)
    own = {} if view is None else {key: asdict(kind) for key, kind in _own_kinds(optimizer, view)}
    texts = exchange_texts(whole.comm, json.dumps(own), f"optimizer states of {name}")
    known = {key: each for text in texts for key, each in json.loads(text).items()}
    return {
        key: StateKind(each["dtype"], each["value"], None if each["shape"] is None else tuple(each["shape"]))
        for key, each in known.items()
    }


def read_whole(
    whole: WholeParameters, optimizer: Optimizer, name: str, state: str, kind: StateKind, numel: int
) -> Tensor:
    """Return a tensor state from its owner, 1-D. All ranks that share tensors call it."""
    view = whole.views.get(name)
    own = None if view is None else optimizer.state[view][state].detach().to(whole.comm.device)
    length = numel if kind.shape is None else torch.Size(kind.shape).numel()
    return merge_parts(whole.comm, own, 0, length, kind.torch_dtype, f"{state} of {name}")


def _own_kinds(optimizer: Optimizer, view: nn.Parameter) -> Iterator[tuple[str, StateKind]]:
    for key, value in optimizer.state.get(view, {}).items():
        if isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim()):
            yield key, StateKind(_dtype_name(torch.as_tensor(value)), float(value))
        elif isinstance(value, Tensor):
            shape = None if value.shape == view.shape else tuple(value.shape)
            yield key, StateKind(_dtype_name(value), None, shape)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
