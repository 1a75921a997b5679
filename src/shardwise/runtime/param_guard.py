from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from shardwise.config.errors import CodedError
from shardwise.runtime.torch_private import plain_torch_functions, pytree


class ReleasedParameterError(CodedError, RuntimeError):
    """A parameter was used while its data is sharded away."""


class _WatchedParameter:
    """Is a parameter whose gradient is not in `grad`: reading `grad` calls `on_read` first."""

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
        """Return a plain parameter with the same values: torch's own copy would be of this class."""
        this = cast(nn.Parameter, self)
        with plain_torch_functions():
            copied = nn.Parameter(this.detach().clone(), this.requires_grad)
        memo[id(self)] = copied
        return copied


_GRAD: Final[Any] = torch.Tensor.grad


def read_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the `grad` of a parameter, without the call that reading it makes."""
    return cast(Tensor | None, _GRAD.__get__(parameter))


def has_gradient(parameter: nn.Parameter) -> bool:
    """Say whether a parameter has a `grad`, without the call that reading it makes."""
    with plain_torch_functions():
        return read_gradient(parameter) is not None


def watched_type(on_read: Callable[[], None]) -> type[nn.Parameter]:
    """Make the class of a present parameter whose gradient is elsewhere; reading `grad` calls `on_read` first."""
    return type("Parameter", (_WatchedParameter, nn.Parameter), {"on_read": staticmethod(on_read)})


def released_type(
    on_use: Callable[[nn.Parameter], None],
    present: type[nn.Parameter] = nn.Parameter,
    on_read: Callable[[], None] = lambda: None,
) -> type[nn.Parameter]:
    """Make the class of a parameter while its storage is released: its shape and dtype can be read, its data cannot.

    On the CPU an element-wise operation on a freed storage is a segmentation fault, and elsewhere it is garbage, so
    every other use first calls `on_use`, which makes the data present or raises. `set_parameter_class` changes the
    class, as torch's own lazy parameters do; a parameter whose data is present is a plain `nn.Parameter`, at no cost.
    `torch.tensor` and `torch.vmap` do not call the class before they read, so those two are not guarded.

    Args:
        on_use: is given the parameter.
        present: the class of parameters whose data is present.
        on_read: is called when `grad` is read, whose gradient is stored elsewhere.
    """
    reason = "a block uses a parameter of another block, which is released"
    guard = torch.compiler.disable(on_use, reason=reason)
    names = {"on_use": staticmethod(guard), "on_read": staticmethod(on_read)}
    return type("ReleasedParameter", (_GuardedParameter, present), names)


def released_types(
    on_use: Callable[[nn.Parameter], None], on_read: Callable[[], None]
) -> Callable[[type[nn.Parameter]], type[nn.Parameter]]:
    """Return a function: class of a present parameter -> its `released_type`, which is made once.

    Args:
        on_use: as for `released_type`.
        on_read: as for `released_type`.
    """
    return functools.cache(lambda present: released_type(on_use, present, on_read))


class _GuardedParameter(_WatchedParameter):
    """Is the base of the released classes of all engines, so that an operation on parameters of several calls each
    `on_use`.
    """

    on_use: Callable[[Any], None]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        type(self).on_use(self)
        return _WatchedParameter.__deepcopy__(self, memo)  # not by super(): the class may be another by now

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__repr__:
            return _describe(args[0])
        if func not in READABLE:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, _GuardedParameter):
                    type(leaf).on_use(cast(nn.Parameter, leaf))
        with plain_torch_functions():
            return func(*args, **kwargs)


def set_parameter_class(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
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


# What can be read of a parameter without touching its data.
READABLE: Final = frozenset(
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
