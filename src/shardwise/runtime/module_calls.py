"""Watch calls of modules, change what they are given and return, or put another forward in place of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from shardwise.runtime.module_hooks import uncompiled
from shardwise.runtime.torch_private import in_backward, in_transform


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Make a module run `forward` in place of its own.

    Returns:
        the function that puts back the one it had.
    """
    own = module.__dict__.get("forward")
    module.forward = forward

    def put_back() -> None:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.forward = own

    return put_back


@contextmanager
def watch_calls(
    model: nn.Module,
    before: Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], None],
    after: Callable[[Any], Any],
) -> Iterator[None]:
    """Report every call of every module inside the context.

    Args:
        before: is given the name, the module, its positional and its keyword arguments.
        after: is given the output, None where the forward raises, and may return another output.
    """

    def watch(name: str, module: nn.Module) -> list[RemovableHandle]:
        return [
            module.register_forward_pre_hook(
                lambda called, args, kwargs: before(name, called, args, kwargs), with_kwargs=True
            ),
            module.register_forward_hook(lambda called, args, output: after(output), always_call=True),
        ]

    handles = [handle for name, module in model.named_modules() for handle in watch(name, module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def change_inputs(module: Any, change: Callable[[Any, Any, Any], tuple[Any, Any]]) -> None:
    """Give a module's forward, for as long as it lives, what `change` makes of it and its arguments."""
    module.register_forward_pre_hook(change, with_kwargs=True)


def change_outputs(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """Make a module return, for as long as it lives, what `change` makes of its output."""
    module.register_forward_hook(lambda called, args, output: change(output))


def call_before_forward(module: nn.Module, call: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> RemovableHandle:
    """Call a function with the arguments of each forward of a module, but of a recomputation, and of no copy of it."""

    @uncompiled
    def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if called is module and not in_backward() and not in_transform():
            call(args, kwargs)

    return module.register_forward_pre_hook(before, with_kwargs=True)


@contextmanager
def watch_registrations(
    on_parameter: Callable[[nn.Module, str, nn.Parameter], None], on_module: Callable[[nn.Module], None]
) -> Iterator[None]:
    """Show what modules of any thread register inside the context.

    Args:
        on_parameter: is given the module, the name there, and the parameter, which is not there yet.
        on_module: is given a module that becomes a child of another one, so its constructor has ended.
    """

    def show(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            on_module(child)

    handles = [
        register_module_parameter_registration_hook(on_parameter),
        register_module_module_registration_hook(show),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def call_after_forward(module: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Call a function after each forward of a module, before the hooks that are there already."""
    return module.register_forward_hook(lambda called, args, output: call(), prepend=True)
