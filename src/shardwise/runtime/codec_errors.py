"""Measure what codecs round off: over all that was encoded in a step, the size of the error relative to the values.

>>> errors = CodecErrors(every=2)
>>> errors.prepare(num_steps=1)                          # the next step is the second
>>> errors.add("gather", torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
>>> relative_errors(errors.take(torch.device("cpu")).tolist())
{'gather': 0.1}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from shardwise.optim.rules import STORED_STATES
from shardwise.runtime.device import number_dtype

NAMES: Final = ("gather", "reduce", *(state.name for state in STORED_STATES))
"""What may be encoded: parameters and gradients that are sent, and the optimizer's states."""


class CodecErrors:
    """Collects squares of values and of their errors, in the steps that are measured; several threads may add.

    Args:
        every: steps between those that are measured; 0 for none.
    """

    def __init__(self, every: int = 0) -> None:
        self.is_on = every == 1
        self.every = every
        self._found: list[tuple[int, Tensor, Tensor]] = []

    def prepare(self, num_steps: int) -> None:
        """Begin the step after `num_steps`."""
        self.is_on = self.every > 0 and (num_steps + 1) % self.every == 0
        self._found.clear()

    def add(self, name: str, exact: Tensor, decoded: Tensor) -> None:
        """Add what is rounded off.

        Args:
            decoded: what is decoded of them, of the same shape.
        """
        wide = exact.to(number_dtype(exact.device))
        self._found.append((NAMES.index(name), (decoded.to(wide.dtype) - wide).square().sum(), wide.square().sum()))

    def take(self, device: torch.device) -> Tensor:
        """Return the sums of the squares, [2 * names] in fp64: of the errors, then of the values; forget them."""
        sums = torch.zeros(2 * len(NAMES), dtype=number_dtype(device), device=device)
        for index, *squares in self._found:
            for shift, square in zip((0, len(NAMES)), squares, strict=True):
                sums[index + shift] += square.to(device)
        self._found.clear()
        return sums


def relative_errors(sums: Sequence[float]) -> dict[str, float]:
    """Return the relative error of each name that has values, from sums over the ranks of what `take` returns."""
    errors, values = sums[: len(NAMES)], sums[len(NAMES) :]
    return {
        name: math.sqrt(error / value) for name, error, value in zip(NAMES, errors, values, strict=True) if value > 0
    }
