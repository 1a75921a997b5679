"""Report the forwards and backwards of a unit, and the gradients of its parameters, by hooks on modules and tensors.

Hooks sit outside a unit's forward, so that the forward itself stays one plain function that can be recomputed or
compiled. `shardwise.zero.sharding_state` says what they do; this module says only when they fire.

The gradients come after the hooks that users have registered on them. Torch keeps a tensor's hooks in a dict and calls
its values. A parameter of an engine has a dict with one value, which calls the hooks of users, those registered before
and since. Where a rank has a part of the gradient only, they see the whole one: it is gathered before the first of them
and split after the last. So a parameter with such hooks costs collectives, which all ranks with a part of it run, and
one without costs none.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, Final, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.config.errors import ConfigError, EngineError
from shardwise.runtime.torch_private import (
    frame_hook_of_compiler,
    give_hooks,
    hooks_of,
    in_backward,
    in_transform,
    never_compiled,
    outside_transforms,
    plain_torch_functions,
    pytree,
    set_data,
    version,
)

Unit = TypeVar("Unit")
Reported = TypeVar("Reported", contravariant=True)
Hook = Callable[[Tensor], Any]
Run = Callable[[Sequence[Hook], Tensor], Any]
# They call nothing that the class of a parameter has; bound here, as each gradient of a step passes them.
_GRAD: Final[Any] = Tensor.grad
_READ_GRAD: Final[Any] = _GRAD.__get__
_WRITE_GRAD: Final[Any] = _GRAD.__set__


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
