"""Receives the gradients of parameters in place of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwise.runtime.module_hooks import GradientEvents


def handing(take: Callable[[Tensor], Any]) -> Callable[[], GradientEvents | None]:
    """Return the receiver, for `hook_gradient`, that hands each gradient to `take`."""

    class Receiver:
        def on_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
            take(gradient)

    return Receiver
