"""Operations on the tokens of logits [..., V], done to the hidden states [..., E] that the logits come from.

What a loss does before it takes the cross entropy: reshape, slice, shift and index tokens, and leave V alone.

>>> hidden = torch.zeros(2, 6, 8)
>>> follow("__getitem__", hidden, 100, ((..., slice(None, -1), slice(None)),), {}).shape
torch.Size([2, 5, 8])
>>> follow("view", hidden, 100, (-1, 100), {}).shape
torch.Size([12, 8])
>>> follow("__getitem__", hidden, 100, ((..., 3),), {}) is None
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def follow(name: str, hidden: Tensor, num_vocab: int, args: Args, kwargs: Kwargs) -> Tensor | tuple[Tensor, ...] | None:
    """The hidden states of what an operation makes of the logits, or None where it does not leave V alone.

    Args:
        name: of a function of torch, or method of a tensor.
        hidden: [..., E].
        num_vocab: V.
        args: of the call, without the logits.
        kwargs: likewise.
    """
    if name in _DIM_POSITION:
        return _along_dim(name, hidden, args, dict(kwargs))
    operation = _OPERATIONS.get(name)
    return None if operation is None else operation(hidden, num_vocab, args, kwargs)


def permutation(name: str, num_dims: int, args: Args, kwargs: Kwargs) -> list[int] | None:
    """The order of dims that `transpose`, `permute` or `mT` makes, or None where it is none of them."""
    order = list(range(num_dims))
    if name == "mT" and num_dims >= 2:
        return [*order[:-2], order[-1], order[-2]]
    if name == "permute":
        dims = kwargs.get("dims", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
        return [dim % num_dims for dim in dims]
    if name in ("transpose", "swapaxes") and len(args) == 2 and all(isinstance(each, int) for each in args):
        first, second = args
        order[first], order[second] = order[second], order[first]
        return order
    return None


def wide_dtype(name: str, dtype: torch.dtype, device: torch.device, args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """What `float`, `double` or `to` asks for: `dtype` as it is, fp32 or fp64; None where it asks for anything else."""
    wanted = {"float": torch.float32, "double": torch.float64}.get(name, dtype if name == "to" else None)
    for each in (*args, *kwargs.values()):
        if isinstance(each, Tensor):
            wanted, each = each.dtype, each.device
        if isinstance(each, torch.dtype):
            wanted = each
        elif isinstance(each, str | torch.device):
            if torch.device(each) not in (device, torch.device(device.type)):
                return None
        elif not isinstance(each, bool | torch.memory_format | None):
            return None
    return wanted if wanted in (dtype, torch.float32, torch.float64) else None


def _reshape(hidden: Tensor, num_vocab: int, args: Args, kwargs: Kwargs) -> Tensor | None:
    given = kwargs.get("shape", kwargs.get("size", args[0] if len(args) == 1 else args))
    shape = [given] if isinstance(given, int) else given
    if not isinstance(shape, Sequence) or not shape or not all(isinstance(size, int) for size in shape):
        return None
    *tokens, last = shape
    if last != num_vocab and not (last == -1 and math.prod(tokens) == math.prod(hidden.shape[:-1])):
        return None
    return hidden.reshape(*tokens, hidden.shape[-1])


def _flatten(hidden: Tensor, num_vocab: int, args: Args, kwargs: Kwargs) -> Tensor | None:
    dims = dict(zip(("start_dim", "end_dim"), args, strict=False)) | dict(kwargs)
    end = dims.get("end_dim", -1) % hidden.dim()
    return hidden.flatten(dims.get("start_dim", 0), end) if end < hidden.dim() - 1 else None


def _index(hidden: Tensor, num_vocab: int, args: Args, kwargs: Kwargs) -> Tensor | None:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    is_dots = [each is Ellipsis for each in index]
    counts = [_num_indexed(each) for each in index]
    if sum(is_dots) > 1 or None in counts:
        return None
    num_indexed = sum(count or 0 for count in counts)
    has_last = num_indexed == hidden.dim() or (any(is_dots) and not is_dots[-1])
    if not has_last:
        return hidden[index]
    last = index[-1]
    if not isinstance(last, slice) or last.indices(num_vocab) != (0, num_vocab, 1):
        return None
    return hidden[(*index[:-1], slice(None))]


def _num_indexed(index: Any) -> int | None:
    """Dims that one part of an index goes through; None for what is left to torch."""
    if index is None or index is Ellipsis:
        return 0
    if isinstance(index, bool):
        return None
    if isinstance(index, int | slice):
        return 1
    if isinstance(index, Tensor):
        return index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
    return None


def _along_dim(name: str, hidden: Tensor, args: Args, kwargs: dict[str, Any]) -> Any:
    position, default = _DIM_POSITION[name]
    dim = kwargs.pop("dim", args[position] if len(args) > position else default)
    if not isinstance(dim, int):
        return None
    num_dims = hidden.dim() + (name == "unsqueeze")
    if dim % num_dims >= num_dims - 1:
        return None
    given = (*args[:position], *args[position + 1 :]) if len(args) > position else args
    return getattr(hidden, name)(*given[:position], dim % num_dims, *given[position:], **kwargs)


def _same(hidden: Tensor, num_vocab: int, args: Args, kwargs: Kwargs) -> Tensor:
    return hidden


# Where `dim` stands behind the tensor, and what it is when left out.
_DIM_POSITION: Final[Mapping[str, tuple[int, int | None]]] = {
    "narrow": (0, None),
    "select": (0, None),
    "index_select": (0, None),
    "squeeze": (0, None),
    "unsqueeze": (0, None),
    "unbind": (0, 0),
    "split": (1, 0),
    "chunk": (1, 0),
}
_OPERATIONS: Final[Mapping[str, Callable[[Tensor, int, Args, Kwargs], Tensor | None]]] = {
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "__getitem__": _index,
    "contiguous": _same,
    "clone": _same,
}
