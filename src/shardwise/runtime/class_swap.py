"""What modules and parameters wear: classes of the library in place of their own, for as long as an engine has them.

A worn class is a subclass of the object's own, so whoever asks what it is gets the same answer, and copies follow.
And, for proofs alone, casts of torch's that keep float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from shardwise.config.resolve import ConfigError


def subclass_module(
    module: nn.Module, kind: type[nn.Module], base: type[nn.Module] | None = None
) -> Callable[[], None]:
    """Let a module be of `kind` too: `kind.forward` runs in place of its own, which is `super().forward` there.

    Modules of one class that become of one kind share a class, so that what is compiled for one serves the others.
    The signature of the forward stays. With a `base`, of which `kind` is a subclass, a module whose class comes after
    it keeps its own forward: what runs in place of `base.forward`, for whoever calls `super().forward`, is `kind`'s.

    Returns:
        what gives the module its own class back; to be called in reverse order where it became several.

    Raises:
        ConfigError: the module's forward has been replaced on the object, so that its class has no say.
    """
    own = type(module)
    if "forward" in module.__dict__:
        raise ConfigError(
            f"the forward of this {own.__name__} was replaced on the object, and a class cannot wrap it; take it back, "
            "or wrap it after initialize"
        )
    return swap_class(module, _joined(kind, own, base))


def _joined(kind: type[nn.Module], own: type[nn.Module], base: type[nn.Module] | None) -> type[nn.Module]:
    is_beneath = base is not None and own is not base
    bases = (own, kind) if is_beneath else (kind, own)
    made = [each for each in own.__subclasses__() if each.__bases__ == bases]
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
"""What a module whose calls are answered returns: given the module, its own call and the arguments."""


def intercept_forward(module: nn.Module, answer: Answer) -> Callable[[], None]:
    """Let `answer` decide what calls of a module return, and whether its hooks and its forward run at all.

    Modules of one class share the class that they wear.

    Returns:
        what gives the module its own class back.
    """
    own = type(module)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    made = [each for each in own.__subclasses__() if each.__bases__ == (_InterceptedForward, own)]
    undo_class = swap_class(module, made[0] if made else type(own.__name__, (_InterceptedForward, own), names))
    undo_answer = set_attribute(module, "_shardwise_answer", answer)

    def put_back() -> None:
        undo_answer()
        undo_class()

    return put_back


class _InterceptedForward:
    """What is joined with a module's class by `intercept_forward`."""

    _shardwise_answer: Answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = cast(Call, super().__call__)  # type: ignore[misc]
        return self._shardwise_answer(cast(nn.Module, self), own, args, kwargs)


def set_attribute(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of a module.

    Returns:
        what puts back the value it had, or takes it away.
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
    """Let a module wear another class, a subclass of its own; unlike a replaced forward it is the same in a copy.

    Returns:
        what puts the old class back.
    """
    own = type(module)
    module.__class__ = kind

    def put_back() -> None:
        module.__class__ = own

    return put_back
