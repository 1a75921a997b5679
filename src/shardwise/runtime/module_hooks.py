"""This is the only file that registers hooks on modules, or wraps a forward.

Hooks sit outside a unit's forward, so that the forward itself stays one plain function that can be recomputed or
compiled. `shardwise.zero.sharding_state` says what they do; this module says only when they fire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from typing import Any, Final, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from shardwise.config.errors import ConfigError
from shardwise.runtime.torch_private import (
    frame_hook_of_compiler,
    in_backward,
    in_transform,
    never_compiled,
    outside_transforms,
    pytree,
)

Unit = TypeVar("Unit")
Reported = TypeVar("Reported", contravariant=True)


class UnitEvents(Protocol[Reported]):
    """Receives what happens to units, in order."""

    def pre_forward(self, unit: Reported, is_recomputed: bool) -> None:
        """Run before the forward of a unit's module; `is_recomputed` inside a backward."""

    def post_forward(self, unit: Reported, outputs: Sequence[Tensor], backward_follows: bool | None) -> None:
        """Run after the module's forward.

        Args:
            backward_follows: True if a backward will be reported, False if none can follow, None if one may follow
                without a report.
        """

    def expect_input_gradients(self, unit: Reported, are_tracked: bool) -> None:
        """Say whether `on_input_gradients` will follow once the backward has reached every input."""

    def pre_backward(self, unit: Reported) -> None:
        """Run when an output, or another result of the forward, has its gradient: once each, before the backward."""

    def on_input_gradients(self, unit: Reported) -> None:
        """Run when every input that requires a gradient has it."""


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Do what `torch.compiler.disable` does, at no cost where nothing is compiled around the call, as for most hooks
    outside blocks.

    Public torch sets and resets the interpreter's frame hook at every call, a microsecond or two.
    """
    disabled, frame_hook = torch.compiler.disable(function), frame_hook_of_compiler()
    if frame_hook is None:
        return disabled

    def call(*args: Any) -> Any:
        return function(*args) if frame_hook() is None else disabled(*args)

    return never_compiled(call)


def hook_unit(
    module: nn.Module, events: UnitEvents[Unit], unit: Unit, inner: Iterable[nn.Module] = ()
) -> list[RemovableHandle]:
    """Report a module's forwards and backwards to `events`, as those of `unit`.

    Args:
        inner: modules inside this one that are units too.
    """
    places = [vars(each) for _, each in module.named_modules(memo={*inner}) if not _is_torchs(each)]
    attributes: list[list[object]] = []  # before the forward
    known: dict[int, tuple[Tensor, object]] = {}  # by id, the inputs and what has made them

    @uncompiled
    def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal attributes, known
        if called is not module:
            return None  # a copy of the module: it has the hooks, but parameters of its own
        is_recomputed, is_transformed = in_backward(), in_transform()
        with outside_transforms() if is_transformed else nullcontext():
            events.pre_forward(unit, is_recomputed)
        if not torch.is_grad_enabled() or is_recomputed or is_transformed:
            return None
        changed, inputs = _report_input_gradients(args, kwargs, events, unit)
        known = {id(each): (each, each.grad_fn) for each in inputs}
        attributes = [[*place.values()] for place in places]
        return changed

    @uncompiled
    def after(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        nonlocal attributes, known
        if called is not module or in_backward():
            return  # recomputation: the backward that asked for it goes on in this unit
        if in_transform():  # of torch.func, which runs backwards of its own, if any
            with outside_transforms():
                events.post_forward(unit, [], None if torch.is_grad_enabled() else False)
            return
        leaves = _leaves(output)
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not torch.is_grad_enabled():
            events.post_forward(unit, outputs, backward_follows=False)
            return
        # Autograd runs what was recorded last first: results that are stored elsewhere may come before the outputs.
        stored = [
            value
            for place, were in zip(places, attributes, strict=False)
            for value, was in zip_longest(place.values(), were)
            if value is not was
        ]
        results = {id(each): each for each in _results([*outputs, *args, *kwargs.values(), *stored])}
        made_here = [each for key, each in results.items() if known.get(key, _NEW)[1] is not each.grad_fn]
        attributes, known = [], {}
        is_opaque = not all(isinstance(leaf, _TRANSPARENT) for leaf in leaves)
        for tensor in made_here:
            tensor.register_hook(lambda grad: events.pre_backward(unit))
        events.post_forward(unit, outputs, backward_follows=None if is_opaque and not made_here else bool(made_here))

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def claim(module: nn.Module) -> Callable[[], None]:
    """Mark a model's parameters as an engine's, whose hooks would take the gradients away from a second one.

    Returns:
        the function that removes the marks.

    Raises:
        ConfigError: one of them has an engine already.
    """
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if _CLAIMED in parameter.__dict__:
            raise ConfigError(
                "model-has-engine",
                f"parameter {name} of this {type(module).__name__} has an engine already; "
                "call engine.close() on that one first",
            )
    for parameter in parameters.values():
        parameter.__dict__[_CLAIMED] = True

    def release() -> None:
        for parameter in parameters.values():
            parameter.__dict__.pop(_CLAIMED, None)

    return release


_CLAIMED: Final = "_shardwise_is_claimed"


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
    after: Callable[[Any], None],
) -> Iterator[None]:
    """Report every call of every module inside the context.

    Args:
        before: is given the name, the module, its positional and its keyword arguments.
        after: is given the output; None where the forward raises.
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


class DeferredTensor(Protocol):
    """A tensor may stand for a value that is not computed yet, as the logits of a split head do.

    Attributes:
        is_deferred: the value is still not computed.
        deferred_from: the tensors that computing it reads; those that autograd has recorded hold its graph.
    """

    is_deferred: bool
    deferred_from: tuple[Tensor, ...]

    def compute(self, for_good: bool = False) -> Tensor:
        """Compute its value; with `for_good` the tensors that it is computed from are needed no longer."""


def deferred(tensors: Iterable[Tensor]) -> list[DeferredTensor]:
    """Return the tensors that stand for a value that is not computed yet."""
    return [cast(DeferredTensor, tensor) for tensor in tensors if getattr(tensor, "is_deferred", False)]


def read_with(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that are read where these are read."""
    return [
        source
        for tensor in tensors
        for source in ((tensor,) if type(tensor) is Tensor else getattr(tensor, "deferred_from", (tensor,)))
    ]


def _results(tree: Any) -> list[Tensor]:
    """Return the tensors that autograd has a record of, except leaves of the graph."""
    tensors = [leaf for leaf in _leaves(tree) if isinstance(leaf, Tensor)]
    return [each for each in read_with(tensors) if each.grad_fn is not None]


def _is_torchs(module: nn.Module) -> bool:
    """Say whether a module is one of torch's, which leave nothing on themselves."""
    return type(module).__module__.startswith("torch.nn.")


_NEW: Final = (None, None)
_TRANSPARENT: Final = (Tensor, int, float, str, type(None))


def _leaves(tree: Any) -> list[Any]:
    """Return the leaves as `pytree.tree_leaves` does, which takes a microsecond a node to test every type it knows."""
    kind = type(tree)
    if kind is Tensor:
        return [tree]
    if kind is dict:
        return [leaf for child in tree.values() for leaf in _leaves(child)]
    if kind is tuple or kind is list:
        return [leaf for child in tree for leaf in _leaves(child)]
    return pytree.tree_leaves(tree)


def _report_input_gradients(
    args: tuple[Any, ...], kwargs: dict[str, Any], events: UnitEvents[Unit], unit: Unit
) -> tuple[Any, list[Tensor]]:
    """Watch a unit's inputs; return changed arguments where it needs views of some, else None, and what it watches.

    A tensor has its gradient once all its users have added theirs. Where several units share an input, as decoder
    blocks share the encoder's output, all but the first therefore get views; a view has its gradient as soon as its
    unit has run its backward. In a list or dict there are no views: the caller must find what the unit writes into it.
    A unit that is given a shared input there is not watched.
    """
    inputs = _results([*args, *kwargs.values()])  # a leaf of the graph outlives it, and so would its hooks
    arguments = None
    if any(_FEEDS_UNIT in tensor.__dict__ for tensor in inputs) or len(set(map(id, inputs))) < len(inputs):
        arguments, inputs = _with_views(args, kwargs)
        if arguments is None:
            events.expect_input_gradients(unit, are_tracked=False)
            return None, inputs
    for tensor in inputs:
        tensor.__dict__[_FEEDS_UNIT] = True
    events.expect_input_gradients(unit, are_tracked=bool(inputs))
    remaining = len(inputs)

    def fire(gradient: Tensor) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            events.on_input_gradients(unit)

    for tensor in inputs:
        tensor.register_hook(fire)
    return arguments, inputs


def _with_views(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """Return arguments in which every tensor that feeds a unit already is a view, and the tensors to watch.

    The arguments are None where such a tensor is in a list or dict.
    """
    leaves, structure = pytree.tree_flatten(
        (args, kwargs), is_leaf=lambda node: node is not kwargs and not isinstance(node, tuple)
    )
    inputs: list[Tensor] = []
    held = _results([leaf for leaf in leaves if not isinstance(leaf, Tensor)])
    if any(_FEEDS_UNIT in tensor.__dict__ for tensor in held) or len(set(map(id, held))) < len(held):
        return None, _results([*args, *kwargs.values()])
    for tensor in held:
        tensor.__dict__[_FEEDS_UNIT] = True
        inputs.append(tensor)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
            if _FEEDS_UNIT in leaf.__dict__:
                leaves[index] = leaf.view_as(leaf)
            leaf.__dict__[_FEEDS_UNIT] = True
            inputs.append(leaves[index])
    return pytree.tree_unflatten(leaves, structure), inputs


_FEEDS_UNIT: Final = "_shardwise_feeds_unit"


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model: a dict holds keyword arguments, a tuple or list positional ones, anything else is the only one."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)
