"""Shows hooks before the optimizer's step the gradients of what the library steps: off the device, or encoded.

Hooks after the step that do not read the optimizer may read the model, so they wait until its parameters are new.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.config.errors import EngineError
from shardwise.config.resolve import ConfigError
from shardwise.runtime.state_shards import FlatState
from shardwise.runtime.torch_private import step_hooks
from shardwise.runtime.user_hooks import reads_first_argument
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.stored_state import ParamPiece


class StepHooks:
    """Lets hooks of other code change gradients that torch's optimizer does not see.

    Args:
        optimizer: torch's, on which the hooks are registered.
        is_stepping: says whether the engine calls its step; no other code may.
    """

    def __init__(self, optimizer: Optimizer, is_stepping: Callable[[], bool]) -> None:
        self._optimizer = optimizer
        this = weakref.ref(self)

        def before(*_: Any) -> None:
            if not is_stepping():
                raise EngineError(
                    "optimizer-step-direct",
                    "optimizer.step() has no gradients, which the engine keeps; call engine.step() instead",
                )
            if (own := this()) is not None:
                own.take()

        self._handle = optimizer.register_step_pre_hook(before)
        self._shown: list[tuple[ParamPiece, FlatState, float]] = []
        self._changed: set[ParamGroup] = set()
        self._used: dict[str, bool] = {}

    @property
    def are_there(self) -> bool:
        """Say whether other code has registered hooks."""
        return self._has_own or bool(step_hooks(self._optimizer)[2])

    @property
    def _has_own(self) -> bool:
        return len(step_hooks(self._optimizer)[0]) > 1

    def refuse(self) -> None:
        """Raise where hooks would not see the gradients of matrices.

        Raises:
            ConfigError: there are hooks.
        """
        if self._has_own:
            raise ConfigError(
                "step-hook-of-matrices",
                "a hook before the optimizer's step sees no gradients of matrices that Muon steps; remove the hook, "
                "and change gradients by engine.write(name, value, 'grad') before engine.step()",
            )

    def show(
        self, pieces: Sequence[ParamPiece], flats: Mapping[ParamGroup, FlatState], factor: float, used: dict[str, bool]
    ) -> None:
        """Show the mean gradients of pieces, until `take`.

        Args:
            pieces: of which those of `flats` are shown.
            flats: the gradients of groups, summed.
            factor: turns them into the mean.
            used: whether each parameter, by name, has a gradient; becomes false where hooks take it away.
        """
        step_hooks(self._optimizer)[0].move_to_end(self._handle.id)  # it calls `take`
        self._used = used
        self._shown = [(each, flats[each.group], factor) for each in pieces if used[each.name] and each.group in flats]
        for piece, flat, _ in self._shown:
            piece.view.grad = _mean(piece, flat, factor)

    def take(self) -> None:
        """Store the gradients that hooks have changed, of all of a group."""
        shown, self._shown = self._shown, []
        left = [(piece, flat, factor, piece.view.grad) for piece, flat, factor in shown]
        for piece, flat, factor, gradient in left:
            piece.view.grad = None
            if gradient is None:
                self._used[piece.name] = False
            elif not torch.equal(gradient, _mean(piece, flat, factor)):
                self._changed.add(piece.group)
        for piece, flat, _, gradient in left:
            if piece.group in self._changed and gradient is not None:
                flat.write(piece.start, gradient.detach().reshape(-1))

    @contextmanager
    def late_ones_held(self) -> Iterator[None]:
        """Keep the hooks after the step that do not read the optimizer from running: `call_late` does."""
        hooks = step_hooks(self._optimizer)[1]
        held = {key: hook for key, hook in hooks.items() if not reads_first_argument(hook)}
        for key in held:
            del hooks[key]
        try:
            yield
        finally:
            hooks.update(held)
            for key in sorted(hooks) if held else ():
                hooks.move_to_end(key)

    def call_late(self) -> None:
        """Call the hooks that a step holds."""
        for hook in list(step_hooks(self._optimizer)[1].values()):
            if not reads_first_argument(hook):
                hook(self._optimizer, (), {})

    def factor(self, group: ParamGroup, factor: float) -> float:
        """Return what is still to be multiplied with a group's gradients."""
        return 1.0 if group in self._changed else factor

    def end_step(self) -> None:
        """Forget what hooks have changed."""
        self._changed.clear()

    def close(self) -> None:
        """Remove the hook of the library."""
        self._handle.remove()


def _mean(piece: ParamPiece, flat: FlatState, factor: float) -> Tensor:
    view = piece.view
    return (flat.read(piece.start, piece.stop).to(view.device, view.dtype) * factor).view(view.shape)
