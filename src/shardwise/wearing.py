"""What modules and parameters wear: classes of the library in place of their own, for as long as an engine has them.

A worn class is a subclass of the object's own, so whoever asks what it is gets the same answer, and copies follow.
And, for proofs alone, casts of torch's that keep float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise._torch_private import plain_torch_functions, pytree
from shardwise.config import ConfigError


def become(module: nn.Module, kind: type[nn.Module], base: type[nn.Module] | None = None) -> Callable[[], None]:
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


def answer_calls(module: nn.Module, answer: Answer) -> Callable[[], None]:
    """Let `answer` decide what calls of a module return, and whether its hooks and its forward run at all.

    Modules of one class share the class that they wear.

    Returns:
        what gives the module its own class back.
    """
    own = type(module)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    made = [each for each in own.__subclasses__() if each.__bases__ == (_Answered, own)]
    undo_class = swap_class(module, made[0] if made else type(own.__name__, (_Answered, own), names))
    undo_answer = set_attribute(module, "_shardwise_answer", answer)

    def put_back() -> None:
        undo_answer()
        undo_class()

    return put_back


class _Answered:
    """What is joined with a module's class by `answer_calls`."""

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


class ReleasedParameterError(RuntimeError):
    """A parameter was used while its data is sharded away."""


class _Watched:
    """A parameter whose gradient is not in `grad`: whoever reads it there is told first."""

    on_read: Callable[[], None] = staticmethod(lambda: None)

    @property
    def grad(self) -> Tensor | None:
        type(self).on_read()
        return cast(Tensor | None, _GRAD.__get__(self))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with the same values: torch's own copy would be of this class."""
        this = cast(nn.Parameter, self)
        with plain_torch_functions():
            copied = nn.Parameter(this.detach().clone(), this.requires_grad)
        memo[id(self)] = copied
        return copied


_GRAD: Final[Any] = torch.Tensor.grad


def watched_type(on_read: Callable[[], None]) -> type[nn.Parameter]:
    """A class that a present parameter wears while its gradient is elsewhere; reading `grad` calls `on_read` first."""
    return type("Parameter", (_Watched, nn.Parameter), {"on_read": staticmethod(on_read)})


def released_type(
    on_use: Callable[[nn.Parameter], None],
    present: type[nn.Parameter] = nn.Parameter,
    on_read: Callable[[], None] = lambda: None,
) -> type[nn.Parameter]:
    """A class that a parameter wears while its storage is released: its shape and dtype can be read, its data cannot.

    On the CPU an element-wise operation on a freed storage is a segmentation fault, and elsewhere it is garbage, so
    every other use first calls `on_use`, which makes the data present or raises. The class is changed with `wear`, as
    torch's own lazy parameters do; a parameter whose data is present is a plain `nn.Parameter` and pays nothing.
    `torch.tensor` and `torch.vmap` ask no class before they read, so those two are not guarded.

    Args:
        on_use: is given the parameter.
        present: the class of parameters whose data is present.
        on_read: of `grad`, which is not there.
    """
    reason = "a block uses a parameter of another block, which is released"
    guard = torch.compiler.disable(on_use, reason=reason)
    names = {"on_use": staticmethod(guard), "on_read": staticmethod(on_read)}
    return type("ReleasedParameter", (_Released, present), names)


class _Released(_Watched):
    """What the classes of all engines share, so that an operation on parameters of several asks each."""

    on_use: Callable[[Any], None]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        type(self).on_use(self)
        return _Watched.__deepcopy__(self, memo)  # not by super(): the class may be another by now

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__repr__:
            return _describe(args[0])
        if func not in _READABLE:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, _Released):
                    type(leaf).on_use(cast(nn.Parameter, leaf))
        with plain_torch_functions():
            return func(*args, **kwargs)


def wear(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Change a parameter's class; torch sees the same tensor."""
    parameter.__class__ = kind


_READABLE_PROPERTIES: Final = (
    *("shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "ndim", "layout", "is_meta"),
    *("is_cuda", "is_cpu", "is_sparse", "is_quantized", "grad_fn", "itemsize", "nbytes"),
)
_READABLE_METHODS: Final = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "__hash__", "__len__"),
    *("register_hook", "register_post_accumulate_grad_hook"),
)
# What may be asked of a parameter without touching its data.
_READABLE: Final = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _READABLE_PROPERTIES),
        *(getattr(torch.Tensor, name) for name in _READABLE_METHODS),
        *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        torch.ops.prim.device.default,  # how a mode of torch's dispatch reads the device of a fake tensor
    }
)


def _describe(parameter: nn.Parameter) -> str:
    return f"Parameter(shape={tuple(parameter.shape)}, dtype={parameter.dtype}, released: its data is sharded)"


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Inside, casts of float64 to float32 do nothing, also where a softmax is asked for one.

    For proofs of equality: Hugging Face's models compute norms and softmax in float32 whatever their dtype, which turns
    a difference of the last bit, as the order of a sum makes it, into one of 1e-7. A mode for functions of torch is not
    in force while a backward recomputes; so torch's own functions are replaced, for all threads of the process.
    """
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (Tensor, "to", _widened(Tensor.to)),
        (Tensor, "type", _widened(Tensor.type)),
        (Tensor, "float", Tensor.double),  # of integers too: positions meet frequencies in float64
        (F, "softmax", _widened(F.softmax)),
    )
    own = [vars(owner).get(name) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(replaced, own, strict=True):
            if function is None:  # inherited
                delattr(owner, name)
            else:
                setattr(owner, name, function)


def _widened(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def widen(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype is torch.float64:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in kwargs.items()}
        return function(tensor, *args, **kwargs)

    return widen
