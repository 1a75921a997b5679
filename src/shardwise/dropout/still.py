"""Takes the chance out of a forward in training mode, so that two forwards of the same numbers can be compared.

A dropout keeps everything, and torch's other draws give two numbers in turn along the last dim: a draw of any part of a
tensor, of an even size there, is that part of the draw of the whole. One number alone would not show after a norm.

>>> with StillFunctions():
...     print(torch.nn.functional.dropout(torch.ones(2), 0.5), torch.rand(2))
tensor([1., 1.]) tensor([0.3000, 0.4000])
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.dropout.numbers import TensorPlace
from shardwise.dropout.torch_draws import DRAWS, SPECIAL, is_opaque, keyed_draw, keyed_rrelu, with_own_body
from shardwise.runtime.device import forked_rng

_NUMBERS: Final[Mapping[str, tuple[float, float]]] = {
    "bits": (1, 2),
    "uniform": (0.3, 0.4),
    "normal": (0.7, -0.4),
    "exponential": (0.7, 0.9),
}
_DROPOUTS: Final = frozenset({F.dropout, torch.dropout, torch.dropout_})
_RATE: Final = 4  # place of the rate among the arguments of torch's attention
_TURN: Final = threading.Lock()


class StillFunctions(TorchFunctionMode):
    """Replaces torch's draws inside the context, on this thread, but not in recomputations by a backward."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func in _DROPOUTS or (func in SPECIAL and SPECIAL[func] is not keyed_rrelu):
            return args[0] if args else keywords["input"]
        if func in SPECIAL:
            return keyed_rrelu(_STILL, func, args, keywords)
        if func in DRAWS:
            return keyed_draw(_STILL, func, args, {key: value for key, value in keywords.items() if key != "generator"})
        if func is F.scaled_dot_product_attention:
            others = {key: value for key, value in keywords.items() if key != "dropout_p"}
            return func(*args[:_RATE], *([0.0] if len(args) > _RATE else []), *args[_RATE + 1 :], **others)
        if is_opaque(func, args, keywords):
            with _turn():
                return func(*args, **keywords)
        own_body = with_own_body(func)
        if own_body is None:
            return func(*args, **keywords)
        with self:
            return own_body(*args, **keywords)


@dataclass(frozen=True)
class _StillSite:
    """Is where draws come from; see `Drawing`."""

    def numbers(self, kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        first, second = _NUMBERS[kind]
        drawn = torch.full(tuple(shape), first, dtype=dtype, device=device)
        if drawn.dim():
            drawn[..., 1::2] = second
        return drawn

    def place(self, shape: Sequence[int]) -> TensorPlace:
        return TensorPlace(tuple(((0, size),) for size in shape), None, tuple(shape))

    def reseeded(self) -> AbstractContextManager[None]:
        return _turn()


@contextmanager
def _turn() -> Iterator[None]:
    """Let one thread at a time draw from torch's generator, each from the same state."""
    with _TURN, forked_rng(torch.device("cpu"), 0):
        yield


_STILL: Final = _StillSite()
