from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Make casts of float64 to float32 do nothing inside the context, also where a softmax is asked for float32.

    It serves proofs of equality: Hugging Face's models compute norms and softmax in float32 whatever their dtype, which
    turns a difference of the last bit, such as from the order of a sum, into one of 1e-7. A mode for functions of torch
    is not active while a backward recomputes; so torch's own functions are replaced, for all threads of the process.
    """
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (Tensor, "to", _widened(Tensor.to)),
        (Tensor, "type", _widened(Tensor.type)),
        (Tensor, "float", Tensor.double),  # of integers too: positions meet frequencies in float64
        (F, "softmax", _widened(F.softmax)),
        (torch, "zeros_like", _widened(torch.zeros_like)),  # sums over experts, which some models keep in float32
    )
    own = [vars(owner).get(name) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(replaced, own, strict=True):
            if function is None:  # inherited
                delattr(owner, name)
            else:
                setattr(owner, name, function)


def _widened(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def widen(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype is torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in kwargs.items()}
        return function(tensor, *args, **kwargs)

    return widen
