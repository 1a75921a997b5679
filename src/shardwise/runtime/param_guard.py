from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import detach_variable

from shardwise.config.errors import CodedError
from shardwise.runtime.module_hooks import uncompiled
from shardwise.runtime.torch_private import (
    PARAMETER_CODE,
    STATE_DICT_CODE,
    of_class,
    plain_torch_functions,
    pytree,
    set_parameter_class,
)

OnRead = Callable[[FrameType], None]
OnWrite = Callable[[Any, Tensor | None], None]


class ReleasedParameterError(CodedError, RuntimeError):
    """A parameter was used while its data is sharded away."""


class _WatchedParameter:
    """Is a present parameter that other states follow: its gradient is not in `grad`, and a master trains it.

    Reading `grad` calls `on_read` first and setting it `on_write`, and `on_data` reports `data`: through it a parameter
    is written unseen, as versions do not count there.
    """

    on_read: OnRead = staticmethod(lambda reader: None)
    on_write: OnWrite = staticmethod(lambda parameter, value: None)
    on_data: Callable[[Any, Tensor | None], Tensor] = staticmethod(lambda parameter, value: parameter)
    on_save: Callable[[Any], Tensor | None] = staticmethod(lambda parameter: None)

    @property
    def data(self) -> Tensor:
        alias = _reported(self, None)
        with plain_torch_functions():
            return cast(Tensor, _DATA.__get__(alias))

    @data.setter
    def data(self, value: Tensor) -> None:
        _reported(self, value)

    def detach(self) -> Tensor:
        """Return an alias, as `data` is one: it may outlive what the parameter shows."""
        caller = sys._getframe(1).f_code
        if caller is STATE_DICT_CODE and (placeholder := type(self).on_save(self)) is not None:
            return placeholder
        is_saved = caller.co_filename == _CHECKPOINT_FILE and caller.co_name == "pack_hook"
        # A recomputation saves it for the backward under way, and writes nothing.
        is_unreported = is_saved and not isinstance(self, _GuardedParameter)
        alias = self if is_unreported else _reported(self, None)
        with plain_torch_functions():
            detached = cast(Tensor, _DETACH(alias))
            # `nn.Parameter(parameter)` asks for a tensor of the same class, and marks it.
            return of_class(type(cast(nn.Parameter, self)), detached) if caller is PARAMETER_CODE else detached

    @property
    def grad(self) -> Tensor | None:
        type(self).on_read(sys._getframe(1))
        return cast(Tensor | None, _GRAD.__get__(self))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        type(self).on_write(self, value)
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        type(self).on_write(self, None)
        _GRAD.__delete__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter with the same values: torch's own copy would be of this class."""
        this = cast(nn.Parameter, self)
        with plain_torch_functions():
            copied = nn.Parameter(_DETACH(this).clone(), this.requires_grad)
        memo[id(self)] = copied
        return copied


_GRAD: Final[Any] = torch.Tensor.grad
_DATA: Final[Any] = torch.Tensor.data
_DETACH: Final[Any] = torch.Tensor.detach
_CHECKPOINT_FILE: Final = detach_variable.__code__.co_filename

OnUse = Callable[[nn.Parameter], Tensor | None]
OnSave = Callable[[nn.Parameter], Tensor | None]
OnData = Callable[[nn.Parameter, Tensor | None], Tensor]
"""Is given a parameter whose `data` is read, or the value that it is set to; returns what to read it of."""


def has_gradient(parameter: nn.Parameter) -> bool:
    """Say whether a parameter has a `grad`, without the call that reading it makes."""
    with plain_torch_functions():
        return _GRAD.__get__(parameter) is not None


def watched_type(on_read: OnRead, on_data: OnData, on_write: OnWrite) -> type[nn.Parameter]:
    """Make the class of a present parameter whose gradient is elsewhere and whose `data` is watched.

    It has no `__torch_function__`, so that operations cost what they cost on a plain one.

    Args:
        on_read: as for `released_type`, and so is `on_write`.
        on_data: is given the parameter, and the value that `data` is set to; returns what to read it of.
    """
    names = {
        "on_read": staticmethod(on_read),
        "on_data": staticmethod(on_data),
        "on_write": staticmethod(on_write),
    }
    return type("Parameter", (_WatchedParameter, nn.Parameter), names)


def released_type(
    on_use: OnUse,
    present: type[Tensor] = nn.Parameter,
    on_read: OnRead = lambda reader: None,
    on_data: OnData | None = None,
    on_save: OnSave = lambda parameter: None,
    on_write: OnWrite = lambda parameter, value: None,
) -> type[nn.Parameter]:
    """Make the class of a parameter while its storage is released: its shape and dtype can be read, its data cannot.

    On the CPU an element-wise operation on a freed storage is a segmentation fault, and elsewhere it is garbage, so
    every other use first calls `on_use`, which makes the data present or raises. `set_parameter_class` changes the
    class, as torch's own lazy parameters do; a parameter whose data is present need not have it, at no cost.
    `torch.tensor` and `torch.vmap` do not call the class before they read, so those two are not guarded.

    Args:
        on_use: is given the parameter; returns the tensor that the operation gets in its place, None for itself.
        present: the class of parameters whose data is present.
        on_read: is called when `grad` is read, whose gradient is stored elsewhere; is given the frame that reads it.
        on_data: as for `watched_type`; None where `data` is used as any other attribute.
        on_save: is given the parameter where `Module.state_dict` reads it; returns what stands for it, None for itself.
        on_write: is called before `grad` is set; is given the parameter and the value.
    """
    reason = "a block uses a parameter of another block, which is released"
    guard = torch.compiler.disable(on_use, reason=reason)

    def use_data(parameter: nn.Parameter, value: Tensor | None) -> Tensor:
        used = _used(parameter)
        with plain_torch_functions():
            if value is not None:
                _DATA.__set__(parameter, value)
            return used

    names = {
        "on_use": staticmethod(guard),
        "on_read": staticmethod(on_read),
        "on_data": staticmethod(use_data if on_data is None else on_data),
        "on_save": staticmethod(on_save),
        "on_write": staticmethod(on_write),
    }
    return type("ReleasedParameter", (_GuardedParameter, present), names)


@dataclass(frozen=True)
class ParameterClasses:
    """Says which class a parameter has, by its own class.

    Attributes:
        watched: while its data is present, and others follow what is written; of a plain parameter only.
        released: while its data is not, or every use is reported.
    """

    watched: type[nn.Parameter]
    released: Callable[[type[nn.Parameter]], type[nn.Parameter]]

    def present(self, kind: type[nn.Parameter]) -> type[nn.Parameter]:
        """Return the class of a present parameter of a class."""
        return self.watched if kind is nn.Parameter else kind


class ParameterEvents(Protocol):
    """Receives what happens to parameters that are released, or watched."""

    def on_released_use(self, parameter: nn.Parameter) -> Tensor:
        """Make a parameter's data present; return the tensor to use in its place."""

    def on_data(self, parameter: nn.Parameter, value: Tensor | None) -> Tensor:
        """Note that `data` is read, or set to `value`; return the tensor whose `data` it is."""

    def on_save(self, parameter: nn.Parameter) -> Tensor | None:
        """Return what a state dict has in the place of a parameter; None for its own values."""


def parameter_classes(
    receiver: Callable[[], ParameterEvents | None], on_read: OnRead, on_write: OnWrite
) -> ParameterClasses:
    """Make the classes of the parameters of an engine.

    Args:
        receiver: a weak reference to what gets the events, which returns None once it is gone.
        on_read: as for `released_type`, and so is `on_write`.
    """

    def events(parameter: nn.Parameter) -> ParameterEvents:
        found = receiver()
        if found is None:
            raise ReleasedParameterError(
                "parameter-without-engine",
                f"a parameter of shape {tuple(parameter.shape)} is released and its engine is gone; "
                "call engine.close() before the engine is dropped, so that parameters become whole",
            )
        return found

    def on_use(parameter: nn.Parameter) -> Tensor:
        return events(parameter).on_released_use(parameter)

    def on_data(parameter: nn.Parameter, value: Tensor | None) -> Tensor:
        return events(parameter).on_data(parameter, value)

    def on_save(parameter: nn.Parameter) -> Tensor | None:
        return events(parameter).on_save(parameter)

    released = functools.cache(lambda present: released_type(on_use, present, on_read, on_data, on_save, on_write))
    return ParameterClasses(watched_type(on_read, on_data, on_write), released)


class _GuardedParameter(_WatchedParameter):
    """Is the base of the released classes of all engines, so that an operation on parameters of several calls each
    `on_use`.
    """

    on_use: Callable[[Any], Tensor | None]

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
            leaves, structure = pytree.tree_flatten((args, kwargs))
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, _GuardedParameter):
                    leaves[index] = _used(cast(nn.Parameter, leaf))
            args, kwargs = pytree.tree_unflatten(leaves, structure)
        with plain_torch_functions():
            return func(*args, **kwargs)


Use = Callable[[Any, Sequence[Any], Mapping[str, Any], Callable[..., Any]], Any]
"""Answers a call of a torch function: it is given the function, its arguments, and what calls a function as it is."""


class _PartParameter:
    """Is a parameter of which this rank has a part, while a forward runs: code that knows of none needs the whole.

    The forward of its own module does not pass here, in `used_by_owner`.
    """

    on_part: Use
    own_kind: Any  # its class, once no forward runs

    @property
    def data(self) -> Tensor:
        return cast(Tensor, _DATA.__get__(self))  # modes of torch functions see it first

    @data.setter
    def data(self, value: Tensor) -> None:
        _DATA.__set__(self, value)

    def detach(self) -> Tensor:
        """Return an alias of what is read."""
        return cast(Tensor, _DETACH(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copying: Any = type(self).own_kind
        if not issubclass(copying, _WatchedParameter):  # torch's own copy would be of this class
            copying = _WatchedParameter
        return cast(nn.Parameter, copying.__deepcopy__(self, memo))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_alias = func in _ALIASES and issubclass(cls.own_kind, _WatchedParameter)
        return cls.on_part(func, args, kwargs or {}, _watched_alias if is_alias else _as_it_is)


_ALIASES: Final = (_DATA.__get__, _DATA.__set__, _DETACH)


def _watched_alias(func: Any, read: Any, *value: Tensor) -> Any:
    """Call what the class of a watched parameter has in the place of a torch function."""
    if not isinstance(read, _PartParameter):
        return func(read, *value)
    watched = read.own_kind
    if func == _DETACH:
        return watched.detach(read)
    return watched.data.__set__(read, *value) if value else watched.data.__get__(read)


def _as_it_is(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a torch function; released parameters among the arguments become present."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, _GuardedParameter | list | tuple):
            return _GuardedParameter.__torch_function__(func, (), args, kwargs)
    with plain_torch_functions():
        return func(*args, **kwargs)


def part_type(on_part: Use, kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Make the class of a parameter of a class, of which this rank has a part, while other modules may read it.

    Args:
        on_part: is called at each use of it but by its own module.
    """
    names = {"on_part": staticmethod(uncompiled(on_part)), "own_kind": kind}
    return type(kind.__name__, (_PartParameter, kind), names)


def without_parts(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class that `part_type` has been given; another class itself."""
    return cast(type[nn.Parameter], kind.own_kind) if issubclass(kind, _PartParameter) else kind


def used_by_owner(*parameters: Tensor | None) -> AbstractContextManager[None]:
    """Let the forward of a module use its own parameters as they are, where they are present."""
    if torch.compiler.is_compiling() or any(isinstance(parameter, _GuardedParameter) for parameter in parameters):
        return nullcontext()
    return plain_torch_functions()


class Placeholder(Tensor):
    """Stands for a released parameter in a state dict: it has shape and dtype, on meta, and no values to use or save.

    Often one rank alone asks for a state dict, for its names, so none may gather there.
    """

    refusal: str

    @classmethod
    def of(cls, parameter: Tensor, refusal: str) -> Placeholder:
        """Make that of a parameter; `refusal` is what the error says where its values are used."""
        placeholder = of_class(cls, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
        placeholder.__dict__["refusal"] = refusal
        return placeholder

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype}, released: its data is sharded)"

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ReleasedParameterError("parameter-released", self.refusal)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in READABLE:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, cls):
                    leaf._refuse()
        with plain_torch_functions():
            return func(*args, **(kwargs or {}))


def _used(parameter: nn.Parameter) -> Tensor:
    """Report a use; return what to use."""
    if _is_made_of_one(parameter):
        return parameter
    given = type(cast(_GuardedParameter, parameter)).on_use(parameter)
    return parameter if given is None else given


def _reported(parameter: Any, value: Tensor | None) -> Tensor:
    """Report that `data` is read, or set it to `value`; return the tensor whose `data` it is."""
    if not _is_made_of_one(parameter):
        return cast(Tensor, type(parameter).on_data(parameter, value))
    if value is not None:
        _DATA.__set__(parameter, value)
    return cast(Tensor, parameter)


def _is_made_of_one(parameter: Any) -> bool:
    """Say whether `nn.Parameter` has made a parameter of one with data that is watched; then it is a plain one."""
    is_made = "_is_param" in parameter.__dict__
    if is_made:
        set_parameter_class(parameter, nn.Parameter)
    return is_made


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
        torch.autograd.grad,  # a parameter is the end of a graph: only its gradient is computed
        torch.ops.prim.device.default,  # how a mode of torch's dispatch reads the device of a fake tensor
    }
)


def _describe(parameter: nn.Parameter) -> str:
    with plain_torch_functions():
        if parameter.untyped_storage().nbytes() > 0:  # inside `gathered`
            return repr(nn.Parameter(_DETACH(parameter), parameter.requires_grad))
    return f"Parameter(shape={tuple(parameter.shape)}, dtype={parameter.dtype}, released: its data is sharded)"
