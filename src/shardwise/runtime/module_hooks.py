"""This is the only file that registers hooks on modules, or wraps a forward.

Hooks sit outside a unit's forward, so that the forward itself stays one plain function that can be recomputed or
compiled. `shardwise.zero.sharding_state` says what they do; this module says only when they fire.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from types import MethodType
from typing import Any, Final, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from shardwise.config.resolve import ConfigError
from shardwise.runtime.forward_state import ForwardState
from shardwise.runtime.selective_saving import IN_PART, selective_contexts
from shardwise.runtime.torch_private import in_backward, in_transform, outside_transforms, pytree, uncompiled

Unit = TypeVar("Unit")
Reported = TypeVar("Reported", contravariant=True)


class UnitEvents(Protocol[Reported]):
    """Receives what happens to units, in order."""

    def pre_forward(self, unit: Reported) -> None:
        """Run before the forward of a unit's module, in a recomputation too."""

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
        with outside_transforms():
            events.pre_forward(unit)
        if not torch.is_grad_enabled() or in_backward() or in_transform():
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
            follows = None if torch.is_grad_enabled() else False
            with outside_transforms():
                events.post_forward(unit, [], follows)
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


class InputStore(Protocol):
    """Stores the inputs of recomputed blocks elsewhere; `shardwise.offload.activations.ActivationStore` is one."""

    def saving(self, inputs: Sequence[object]) -> AbstractContextManager[None]:
        """Keep what autograd saves of a block's inputs inside the context in this store."""


def recompute_forward(module: nn.Module, mode: str, store: InputStore | None = None) -> Callable[[], None]:
    """Checkpoint a module's forward.

    Args:
        mode: as `recompute` of `run_forward`.
        store: keeps the inputs; None leaves them where they are.

    Returns:
        the function that puts the module's own forward back.
    """
    forward, state = module.forward, ForwardState(module)
    if not inspect.ismethod(forward) or forward.__self__ is not module:
        return replace_forward(module, _checkpointed(forward, lambda args: state, mode, store))

    def state_of(args: Sequence[Any]) -> ForwardState:
        return state if args[0] is module else ForwardState(args[0])

    # A method follows a copy of the module: the copy computes with its own parameters.
    return replace_forward(module, MethodType(_checkpointed(forward.__func__, state_of, mode, store), module))


def _checkpointed(
    forward: Callable[..., Any],
    state_of: Callable[[Sequence[Any]], ForwardState],
    mode: str,
    store: InputStore | None,
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        own_store = None if store is None or _has_repeated((args, kwargs), set()) else store
        with state_of(args).first() as passed:
            passed.hold(args, kwargs, left_out=() if own_store is None else _SPREAD)
            return run_stored(run_forward, passed.repeating(forward), mode, args, kwargs, own_store)

    return recomputed


def _has_repeated(value: Any, seen: set[int]) -> bool:
    """Say whether a list or dict is in the arguments twice: a store would make two of it."""
    if type(value) not in _SPREAD:
        return False
    if id(value) in seen and type(value) is not tuple:
        return True
    seen.add(id(value))
    parts = value.values() if isinstance(value, dict) else value
    return any(_has_repeated(part, seen) for part in parts)


_SPREAD: Final = (tuple, list, dict)  # types of containers whose tensors a store keeps


def run_stored(
    run: Callable[..., Any],
    forward: Callable[..., Any],
    recompute: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    store: InputStore | None,
) -> Any:
    """Run `run_forward`, or its compiled form, with `store` for the inputs that the block keeps.

    Args:
        run: `run_forward`, or its compiled form.
        forward: the block's own.
        store: keeps the inputs; None leaves them where they are.
    """
    if store is None or recompute == "none" or not torch.is_grad_enabled():
        return run(forward, recompute, args, kwargs)
    inputs, structure = pytree.tree_flatten((args, kwargs), is_leaf=lambda node: type(node) not in _SPREAD)
    if run is not run_forward:  # compiled code saves all tensors in the same way
        with store.saving(inputs):
            return run(forward, recompute, args, kwargs)
    # A checkpoint saves tensors that are arguments, but holds those in keywords, tuples and dicts as they are.
    # The caller must find what a block writes into a list or dict that it is given; a recomputation's is of no use.
    given = [(args, kwargs)]

    def spread(*leaves: Any) -> Any:
        own_args, own_kwargs = given.pop() if given else pytree.tree_unflatten(leaves, structure)
        return forward(*own_args, **own_kwargs)

    with store.saving(inputs):
        return run(spread, recompute, tuple(inputs), {})


def run_forward(forward: Callable[..., Any], recompute: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a forward and keep for its backward what `recompute` says.

    Torch compiles this function too, so `torch.compile` must know all that it calls.

    Args:
        forward: the block's own.
        recompute: "none" keeps all, "full" its inputs, "selective" products and attention too.
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if recompute == "selective":
        return checkpoint(forward, *args, use_reentrant=False, context_fn=selective_contexts, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def run_in_parts(forward: Callable[[int, Tensor], Any], x: Tensor, num_tokens: int) -> Iterator[Any]:
    """Run a forward on parts of a tensor, each recomputed in its own backward; only `x` is kept for all of them.

    This holds inside a recomputation of any mode too: that one keeps nothing of the parts, and computes none of them
    where nothing after them is needed.

    Args:
        forward: is given the number of a part, and the part.
        x: [B, S, ...].
        num_tokens: of a part, along dim 1; the last part may have fewer.

    Returns:
        the results of the forward, one by one.
    """
    if not torch.is_grad_enabled():
        yield from (forward(index, part) for index, part in enumerate(x.split(num_tokens, dim=1)))
        return
    kept = _KeptInput(x, num_tokens)
    for index, part in enumerate(x.split(num_tokens, dim=1)):
        # A checkpoint restores the generators of the devices of its arguments. A checkpoint around it must not see
        # what it saves of them: that one would run all parts in its recomputation to find the last one's.
        with saved_tensors_hooks(_as_it_is, _as_it_is):
            output = checkpoint(_run_part, x.new_empty(0), forward, kept, index, [part], use_reentrant=False)
        yield output


class _KeptInput:
    """Holds the input of all parts, saved once, by the hooks with which autograd saves."""

    def __init__(self, x: Tensor, num_tokens: int) -> None:
        anchor = torch.empty(0, device=x.device, requires_grad=True)
        self._node: Any = _Keep.apply(x, anchor).grad_fn
        self._num_tokens = num_tokens
        self._needs_gradient = x.requires_grad
        self._parts: tuple[Tensor, ...] | None = None

    def part(self, index: int) -> Tensor:
        """Return a part; call this in a backward."""
        if self._parts is None:  # a checkpoint around it returns what it has saved only once
            (x,) = self._node.saved_tensors
            self._parts = x.detach().requires_grad_(self._needs_gradient).split(self._num_tokens, dim=1)
        return self._parts[index]


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("nothing is computed of what keeps an input")


def _run_part(
    place: Tensor, forward: Callable[[int, Tensor], Any], kept: _KeptInput, index: int, given: list[Tensor]
) -> Any:
    token = IN_PART.set(True)
    try:
        return forward(index, given.pop() if given else kept.part(index))
    finally:
        IN_PART.reset(token)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


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
