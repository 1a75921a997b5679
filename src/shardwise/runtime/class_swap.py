"""Modules and parameters get classes of the library in place of their own as long as an engine has them.

Such a class is a subclass of the object's own, so `isinstance` gives the same answer, and copies keep it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, cast

from torch import nn

from shardwise.config.errors import ConfigError


def subclass_module(
    module: nn.Module, kind: type[nn.Module], base: type[nn.Module] | None = None
) -> Callable[[], None]:
    """Make a module also of `kind`: `kind.forward` runs in place of its own, which is `super().forward` there.

    Modules of one class that become of one kind share a class, so that what is compiled for one serves the others.
    The signature of the forward stays.

    Args:
        base: a base class of `kind`. A module whose class is a subclass of it keeps its own forward, and where that
            calls `super().forward`, `kind.forward` runs in place of `base.forward`. None for no such class.

    Returns:
        the function that restores the module's class; call these in reverse order after several swaps.

    Raises:
        ConfigError: the module's forward has been replaced on the object, so that its class has no effect.
    """
    own = type(module)
    if "forward" in module.__dict__:
        raise ConfigError(
            "forward-replaced",
            f"the forward of this {own.__name__} was replaced on the object, and a class cannot wrap it; take it back, "
            "or wrap it after initialize",
        )
    return swap_class(module, _joined(kind, own, base))


def _joined(kind: type[nn.Module], own: type[nn.Module], base: type[nn.Module] | None) -> type[nn.Module]:
    is_beneath = base is not None and own is not base
    bases = (own, kind) if is_beneath else (kind, own)
    made = [subclass for subclass in own.__subclasses__() if subclass.__bases__ == bases]
    if made:
        return made[0]

    @functools.wraps(own.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, bases, names if is_beneath else {"forward": forward, **names})


Call = Callable[..., Any]
"""A module's own call: hooks, then the forward."""

Answer = Callable[[nn.Module, Call, tuple[Any, ...], dict[str, Any]], Any]
"""Returns what a call of a module returns: it is given the module, its own call and the arguments."""


def intercept_forward(module: nn.Module, answer: Answer) -> Callable[[], None]:
    """Let `answer` decide what calls of a module return, and whether its hooks and its forward run at all.

    Modules of one class share their new class.

    Returns:
        the function that restores the module's class.
    """
    own = type(module)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    made = [subclass for subclass in own.__subclasses__() if subclass.__bases__ == (_InterceptedForward, own)]
    undo_class = swap_class(module, made[0] if made else type(own.__name__, (_InterceptedForward, own), names))
    undo_answer = set_attribute(module, "_shardwise_answer", answer)

    def put_back() -> None:
        undo_answer()
        undo_class()

    return put_back


def answer_calls(module: nn.Module, answer: Answer) -> Callable[[], None]:
    """Do what `intercept_forward` does, also for a module whose calls are answered already: inside of that answer."""
    outer: Answer | None = module.__dict__.get("_shardwise_answer")
    if outer is None:
        return intercept_forward(module, answer)

    def both(called: nn.Module, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def inner(*args: Any, **kwargs: Any) -> Any:
            return answer(called, own, args, kwargs)

        return outer(called, inner, args, kwargs)

    return set_attribute(module, "_shardwise_answer", both)


class _InterceptedForward:
    """Is joined with a module's class by `intercept_forward`."""

    _shardwise_answer: Answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = cast(Call, super().__call__)  # type: ignore[misc]
        return self._shardwise_answer(cast(nn.Module, self), own, args, kwargs)


Watch = Callable[[nn.Module, str, bool], None]
"""Is called at an access to an attribute with the module, the name, and whether it is set."""


def watch_attributes(module: nn.Module, watch: Watch) -> Callable[[], None]:
    """Call `watch` before each access to an attribute of a module; it costs a call of Python each time.

    Returns:
        the function that restores the module's class; call these in reverse order after several.
    """
    own, outer = type(module), module.__dict__.get(_WATCH)
    if outer is not None:

        def both(watched: nn.Module, name: str, is_write: bool) -> None:
            outer(watched, name, is_write)
            watch(watched, name, is_write)

        module.__dict__[_WATCH] = both
        return lambda: module.__dict__.update({_WATCH: outer})
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    made = [subclass for subclass in own.__subclasses__() if subclass.__bases__ == (_WatchedAttributes, own)]
    module.__dict__[_WATCH] = watch
    undo_class = swap_class(module, made[0] if made else type(own.__name__, (_WatchedAttributes, own), names))

    def put_back() -> None:
        undo_class()
        module.__dict__.pop(_WATCH, None)

    return put_back


def accessing_frame() -> FrameType:
    """Return the frame of the code whose access to an attribute is being watched; call it in a `Watch`."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in _ACCESSES:
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        raise RuntimeError("an attribute is read by no code")
    return frame.f_back


_WATCH: Final = "_shardwise_watch"


class _WatchedAttributes:
    """Is joined with a module's class by `watch_attributes`."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            watch = object.__getattribute__(self, "__dict__").get(_WATCH)
            if watch is not None:
                watch(self, name, False)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        watch = object.__getattribute__(self, "__dict__").get(_WATCH)
        if watch is not None:
            watch(self, name, True)
        super().__setattr__(name, value)


_ACCESSES: Final = (_WatchedAttributes.__getattribute__.__code__, _WatchedAttributes.__setattr__.__code__)


def set_attribute(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of a module.

    Returns:
        the function that puts back the old value, or deletes the attribute.
    """
    had, before = hasattr(module, name), getattr(module, name, None)
    setattr(module, name, value)

    def put_back() -> None:
        if had:
            setattr(module, name, before)
        else:
            delattr(module, name)

    return put_back


def swap_class(module: nn.Module, kind: type[nn.Module]) -> Callable[[], None]:
    """Give a module another class, a subclass of its own; a copy keeps it, unlike a replaced forward.

    Returns:
        the function that restores the old class.
    """
    own = type(module)
    module.__class__ = kind

    def put_back() -> None:
        module.__class__ = own

    return put_back
