"""Run code with a size that is a symbol, and keep each decision that the code takes by it.

>>> size = SymbolicSize(8)
>>> with size.in_place():
...     x = torch.zeros(2, size.number, 3)
...     y = x * 2 if x.shape[1] > 5 else x
>>> size.holds_at(8), size.holds_at(6), size.holds_at(4), size.differing_at(4)
(True, True, False, 'size > 5')
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.runtime.torch_private import fake_tensors, quiet_fakes

__all__ = ["SymbolicSize"]


class SymbolicSize:
    """A size that code computes with as with a number; a use that needs the number itself is a decision for it.

    Args:
        value: by which decisions are taken; 2 or more.
    """

    def __init__(self, value: int) -> None:
        # An import of a second, which a run without such a proof need not wait for.
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        self._shapes: Any = ShapeEnv()
        self._mode: Any = fake_tensors(self._shapes)
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        mode: Any = self._mode
        self.number: Any = mode.from_tensor(torch.empty(value), symbolic_context=context).shape[0]
        self._symbol = self.number.node.expr

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the tensors inside fake; real ones may be read there."""
        with quiet_fakes(), self._mode:
            yield

    def holds_at(self, value: int) -> bool:
        """Return whether each decision would be the same at another value."""
        return not self.differing_at(value)

    def differing_at(self, value: int) -> str:
        """Return the first decision that would be another at a value, in terms of `size`; empty where none would."""
        for guard in self._shapes.guards:
            if not bool(guard.expr.subs(self._symbol, value)):
                return str(guard.expr).replace(str(self._symbol), "size")
        return ""
