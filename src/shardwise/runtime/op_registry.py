"""Registers ops with torch for as long as an engine lives, so that recomputation, `torch.compile` and fake tensors see
each as one.

Every engine registers its own, whose kernels know its ranks, and removes them at its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from shardwise.config.errors import EngineError

Op = Callable[..., Any]
LIBRARY: Final = torch.library.Library("shardwise", "FRAGMENT")
"""Has the ops that know no engine, which stay registered."""


class OpRegistry:
    """Registers ops under names that no other live library has.

    Args:
        runs_on_fakes: the kernel runs on fake tensors too.
    """

    def __init__(self, runs_on_fakes: bool) -> None:
        self._library: Any = torch.library.Library("shardwise", "FRAGMENT")
        self._kernels: list[Op] = []
        self.is_open = True
        self._runs_on_fakes = runs_on_fakes

    def close(self) -> None:
        """Remove the ops."""
        self.is_open, self._library = False, None
        self._kernels.clear()

    def __call__(self, schema: str, kernel: Op, shape_only: Op) -> Op:
        """Register an op.

        Args:
            schema: such as `all_reduce(Tensor x, str name) -> Tensor`.
            shape_only: makes the result for fake tensors, of the same shapes, dtypes and strides.

        Returns:
            the function that calls the op, and raises once it is removed.
        """
        plain, _, signature = schema.partition("(")
        name = f"{plain}_{id(self._library):x}"
        self._library.define(f"{name}({signature}")
        self._library.impl(name, self._lend(kernel), "CompositeExplicitAutograd")
        # A simulated rank's tensors are fake, and its collectives are counted by running them.
        fake = kernel if self._runs_on_fakes else shape_only
        torch.library.register_fake(f"shardwise::{name}", self._lend(fake), lib=self._library)
        op = getattr(torch.ops.shardwise, name).default

        def call(*args: Any) -> Any:
            # torch does not ask whether an op is still registered: it reads freed memory.
            if not self.is_open:
                raise EngineError(
                    "engine-closed", f"{plain} of an engine that is closed; run backwards before engine.close()"
                )
            return op(*args)

        return call

    def _lend(self, kernel: Op) -> Op:
        """Return a function that calls the kernel without keeping it alive.

        torch keeps for ever what it was given for an op, and a kernel refers to its engine's process groups, each of
        which has threads that never end.
        """
        self._kernels.append(kernel)
        lent = weakref.ref(kernel)

        def call_lent(*args: Any) -> Any:
            kernel = lent()
            assert kernel is not None, "the registry outlives the ops of its library"
            return kernel(*args)

        return call_lent
