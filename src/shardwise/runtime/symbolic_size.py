"""Run code with sizes that are symbols, and keep each decision that the code takes by them.

>>> sizes = SymbolicSizes(samples=2, tokens=8)
>>> with sizes.in_place():
...     x = torch.zeros(sizes.numbers["samples"], sizes.numbers["tokens"], 3)
...     y = x * 2 if x.shape[1] > 5 else x
>>> [sizes.differing_at(samples=samples, tokens=tokens) for samples, tokens in ((2, 8), (3, 6), (3, 4))]
['', '', 'tokens > 5']
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.runtime.torch_private import fake_tensors, quiet_fakes

__all__ = ["SymbolicSizes"]


class SymbolicSizes:
    """Sizes that code computes with as with numbers; a use that needs a number itself is a decision for it.

    Args:
        values: by name, by which decisions are taken. A size of 0 or 1 stays a number: torch takes no symbol for it.
    """

    def __init__(self, **values: int) -> None:
        # An import of a second, which a run without such a proof need not wait for.
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        self._shapes: Any = ShapeEnv()
        self._mode: Any = fake_tensors(self._shapes)
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        mode: Any = self._mode
        self.numbers: dict[str, Any] = {
            name: value if value < 2 else mode.from_tensor(torch.empty(value), symbolic_context=context).shape[0]
            for name, value in values.items()
        }
        self._symbols = {name: number.node.expr for name, number in self.numbers.items() if type(number) is not int}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the tensors inside fake; real ones may be read there."""
        with quiet_fakes(), self._mode:
            yield

    def differing_at(self, **values: int) -> str:
        """Return the first decision that would be another at other values, in their names; empty where none would."""
        for name, number in self.numbers.items():
            if name not in self._symbols and values[name] != number:
                return f"{name} == {number}"
            if name in self._symbols and values[name] < 2:
                return f"{name} > 1"
        at = {symbol: values[name] for name, symbol in self._symbols.items()}
        for guard in self._shapes.guards:
            if not bool(guard.expr.subs(at)):
                names = {symbol: type(symbol)(name) for name, symbol in self._symbols.items()}
                return str(guard.expr.xreplace(names))
        return ""
