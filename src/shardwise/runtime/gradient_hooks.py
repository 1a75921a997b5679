"""Takes the gradients of parameters, after the hooks that users have registered on them.

Torch keeps a tensor's hooks in a dict and calls its values. A parameter of an engine has a dict with one value, which
calls the hooks of users, those registered before and since. Where a rank has a part of the gradient only, they see the
whole one: it is gathered before the first of them and split after the last. So a parameter with such hooks costs
collectives, which all ranks with a part of it run, and one without costs none.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn

from shardwise.config.errors import EngineError
from shardwise.runtime.module_hooks import uncompiled
from shardwise.runtime.torch_private import (
    give_hooks,
    hooks_of,
    plain_torch_functions,
    set_data,
    version,
)

Hook = Callable[[Tensor], Any]
# They call nothing that the class of a parameter has; bound here, as each gradient of a step passes them.
_GRAD: Final[Any] = Tensor.grad
_READ_GRAD: Final[Any] = _GRAD.__get__
_WRITE_GRAD: Final[Any] = _GRAD.__set__
Run = Callable[[Sequence[Hook], Tensor], Any]


class GradientEvents(Protocol):
    """Receives the gradients of parameters."""

    def on_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take a gradient, which the parameter does not keep."""


class WholeParameter(Protocol):
    """Converts between this rank's part of a parameter and the whole; all ranks that have a part call it together."""

    @property
    def name(self) -> str:
        """Return the parameter's name."""

    def gather(self, gradient: Tensor) -> Tensor:
        """Return the whole gradient, of which this rank has a part."""

    def split(self, gradient: Tensor) -> Tensor:
        """Return this rank's part of a whole gradient."""

    def gather_values(self, parameter: Tensor) -> Tensor:
        """Return the values of the whole parameter."""


def hook_gradient(
    parameter: nn.Parameter, receiver: Callable[[], GradientEvents | None], whole: WholeParameter | None = None
) -> GradientHandle:
    """Hand each accumulated gradient to a receiver, while it lives, and take it off the parameter.

    Args:
        receiver: a weak reference, which returns None once the receiver is gone.
        whole: shows hooks of users all of a gradient of which this rank has a part; None where it has all of it.
    """

    def take(parameter: Tensor) -> None:
        gradient, events = _READ_GRAD(parameter), receiver()
        _WRITE_GRAD(parameter, None)
        if gradient is not None and events is not None:
            events.on_gradient(parameter, gradient)

    return GradientHandle(parameter, take, whole)


class GradientHandle:
    """Has given a parameter dicts of hooks in place of its own, until `remove`.

    Args:
        take: is given the parameter when it has accumulated one, after the hooks of users.
    """

    def __init__(self, parameter: nn.Parameter, take: Hook, whole: WholeParameter | None) -> None:
        # C++ holds a parameter's hooks: strong references from there back to it could never be collected.
        self._parameter = weakref.ref(parameter)
        with plain_torch_functions():
            before, after = hooks_of(parameter)
        self._own: tuple[Hooks, Hooks] = before, after

        self._whole = whole
        self._joined = joined = set[str]()

        def on_arrival(hooks: Sequence[Hook], gradient: Tensor) -> Tensor | None:
            return call_before(hooks, gradient, whole) if hooks or "before" in joined else None

        def on_accumulated(hooks: Sequence[Hook], parameter: Tensor) -> None:
            if hooks or "after" in joined:
                call_after(hooks, parameter, whole)
            take(parameter)

        given = (
            before if whole is None else UserHooks(before, on_arrival),
            UserHooks(after, on_accumulated, take if whole is None else None),
        )
        self._given: tuple[Hooks, Hooks] = given
        with plain_torch_functions():
            give_hooks(parameter, *given)

    def hooked(self) -> list[str]:
        """Return names of what users have hooks on, if all ranks with a part must gather it for them."""
        kinds = zip(("before", "after"), self._given, strict=True)
        return [] if self._whole is None else [f"{kind} {self._whole.name}" for kind, hooks in kinds if hooks]

    def join(self, names: Collection[str]) -> None:
        """Gather from now on what `hooked` names on another rank."""
        if self._whole is not None:
            self._joined |= {kind for kind in ("before", "after") if f"{kind} {self._whole.name}" in names}

    def remove(self) -> None:
        """Give the parameter its own dicts back; where hooks were registered since then, theirs stays and runs them."""
        parameter = self._parameter()
        if parameter is None:
            return
        with plain_torch_functions():
            give_hooks(parameter, *map(_left, self._own, self._given, hooks_of(parameter), (call_before, call_after)))


def _left(own: Hooks, given: Hooks, found: Hooks, run: Run) -> Hooks:
    """Return the dict that a parameter keeps, which had `own`, was given `given` and has `found` by now."""
    return given.left(own, run) if found is given and isinstance(given, UserHooks) else found


class UserHooks(OrderedDict[int, Hook]):
    """Is what torch takes for the hooks of a tensor, and holds one. It is given those that users register.

    Args:
        earlier: the tensor's dict so far, whose handles stay good.
        run: is given all hooks of users, and what torch gives a hook.
        alone: stands for `run` while there are no hooks of users; it costs a call less. None for `run`.
    """

    def __init__(self, earlier: Hooks, run: Run, alone: Hook | None = None) -> None:
        super().__init__()
        self._earlier: Mapping[int, Hook] = {} if earlier is None else earlier
        self._later: dict[int, Hook] = {}
        self._run(run, alone)

    def _run(self, run: Run, alone: Hook | None = None) -> None:
        earlier, later = self._earlier, self._later
        alone = partial(run, ()) if alone is None else alone

        @uncompiled
        def call(given: Tensor) -> Any:
            return run((*earlier.values(), *later.values()), given) if earlier or later else alone(given)

        super().__setitem__(_ENTRY, call)

    def left(self, own: Hooks, run: Run) -> Hooks:
        """Return what stays of it: nothing but the dict that it replaced where it was given no hook."""
        if not self._later:
            return own
        self._run(run)
        return self

    def values(self) -> Any:
        return {**self._earlier, **self._later}.values()

    def clear(self) -> None:
        self._later.clear()

    def __setitem__(self, key: int, hook: Hook) -> None:
        self._later[key] = hook

    def __delitem__(self, key: int) -> None:
        del self._later[key]

    def __contains__(self, key: object) -> bool:
        return key in self._later

    def __len__(self) -> int:
        return len(self._earlier) + len(self._later)


Hooks = dict[int, Hook] | None

_ENTRY: Final = -1


def call_before(hooks: Sequence[Hook], gradient: Tensor, whole: WholeParameter | None = None) -> Tensor | None:
    """Call the hooks of a tensor on a gradient, as torch does; return what they leave, None for the same."""
    is_part = whole is not None and not gradient.is_sparse
    shown = whole.gather(gradient.detach()) if whole is not None and is_part else gradient
    first, was = shown, version(shown)
    for hook in hooks:
        result = hook(shown)
        if result is None:
            continue
        if not isinstance(result, Tensor) or result.shape != shown.shape:
            size = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise TypeError(f"a hook on a gradient of shape {tuple(shown.shape)} returned {size}; return its like")
        shown = result
    if shown is first and version(shown) == was:
        return None
    return whole.split(shown.detach()).to(gradient.dtype) if whole is not None and is_part else shown


def call_after(hooks: Sequence[Hook], parameter: Tensor, whole: WholeParameter | None = None) -> None:
    """Call the hooks of a parameter that has accumulated a gradient; what they leave in `grad` counts.

    Args:
        whole: shows them all of both: the parameter has the whole values while they run.

    Raises:
        EngineError: a hook writes values of which this rank has a part.
    """
    gradient = parameter.grad
    if whole is None or gradient is None or gradient.is_sparse:
        _call_all(hooks, parameter)
        return
    own, values, shown = parameter.data, whole.gather_values(parameter), whole.gather(gradient)
    before, was = values.clone(), version(shown)
    _show(parameter, values, shown)
    try:
        _call_all(hooks, parameter)
        values, left = parameter.data, parameter.grad
    finally:
        _show(parameter, own, None)
    if values.shape != before.shape or not torch.equal(values, before):  # the same on all ranks, whose rows it is
        raise EngineError(
            "hook-writes-parameter",
            f"a hook that was registered after the gradient of {whole.name} wrote the parameter, of which each rank "
            "has a part; write it after engine.step(), by engine.write or inside `with engine.gathered():`",
        )
    if left is not None:
        parameter.grad = gradient if left is shown and version(left) == was else whole.split(left)


def _call_all(hooks: Sequence[Hook], parameter: Tensor) -> None:
    for hook in hooks:
        if hook(parameter) is not None:
            raise RuntimeError("a post-accumulate-grad hook must return None")


def _show(parameter: Tensor, values: Tensor, gradient: Tensor | None) -> None:
    parameter.grad = None
    set_data(cast(nn.Parameter, parameter), values)
    parameter.grad = gradient
