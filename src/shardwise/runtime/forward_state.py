"""Lets a recomputed forward begin from the state that its first pass began from, and leave the state as it is.

A forward may write: statistics, counters, the vectors of spectral norm, codebooks, memories, plain attributes. Its
second pass must read what the first has read, and nothing may be written twice. So what the first pass writes is kept
as it was before. In the second pass the modules have copies of that; then they get back what they had. The same holds
for what others change between the two: attributes that the caller sets, and containers that it hands over.

What a forward does not write costs a look at version counters. Values are copied before the first pass of a module, to
see what it writes, and after that where something writes: until then, those of small tensors, once.

>>> layer = nn.BatchNorm1d(2)
>>> state, x = ForwardState(layer), torch.ones(4, 2)
>>> with state.first() as passed:
...     out = layer(x)
>>> with passed.second():
...     again = layer(x)
>>> int(layer.num_batches_tracked)
1
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from operator import is_, itemgetter
from types import FunctionType, MethodType
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwise.runtime.forward_values import (
    ArgumentsBefore,
    TensorBefore,
    ValueBefore,
    Walk,
    copied,
    is_small_container,
    tensor_version,
    value_before,
)
from shardwise.runtime.user_hooks import HookDicts, hook_contents, hook_dicts_of

Value = TypeVar("Value")

_SMALL_BYTES: Final = 1 << 20  # of a module's tensors that are copied once though no pass has written anything
_MOST_UNKNOWN: Final = 8  # passes in which a module is looked at that has not run
MISSING: Final = object()
_IS_REMEMBERED: Final = "_shardwise_is_remembered"
_NOT_STATE: Final = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_NOT_STATE_PREFIXES: Final = ("_forward_", "_backward_", "_state_dict_", "_load_state_dict_", "_shardwise_", "forward")


@dataclass(eq=False)
class _Place:
    """One dict of attributes of the module whose id is `owner`.

    Attributes:
        is_rare: the code of the module's class writes nothing here, and no pass has; hooks may.
        is_known: a pass in which the module ran has shown what it writes.
        written: names of the attributes whose contents a pass has changed.
        rebound: names whose tensors a pass has replaced by others, and not written into.
        is_silent: a tensor here was written with no new version, as through `.data`.
    """

    attributes: dict[str, Any]
    owner: int
    is_rare: bool = False
    is_known: bool = False
    written: set[str] = field(default_factory=set)
    rebound: set[str] = field(default_factory=set)
    is_silent: bool = False

    def watch_containers(self) -> None:
        """Look into its small containers at every pass."""
        for name, value in self.attributes.items():
            if is_small_container(value) and is_state(name):
                self.written.add(name)


class _QuietPlace:
    """Attributes of a module that its forward does not write; others may put something else in their place.

    Those of a module of torch, and the parameters of any module, which `functional_call` replaces in a call.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.attributes = attributes
        self.names = tuple(name for name in attributes if is_state(name))
        self._get = itemgetter(*self.names, *self.names[:1])  # of two names at least it makes a tuple

    def values(self) -> tuple[Any, ...]:
        """Return the values of all names; none where one is deleted."""
        try:
            found: tuple[Any, ...] = self._get(self.attributes)
        except KeyError:
            return ()
        return found

    def changes(self, values: tuple[Any, ...]) -> dict[str, ValueBefore]:
        """Return what others have changed since the attributes had these values."""
        now = self.values()
        if not now or all(map(is_, now, values)):
            return {}
        named = zip(self.names, values, strict=False)
        return {name: ValueBefore(value) for name, value in named if self.attributes[name] is not value}


class ForwardState:
    """Watches what the forwards of a module write.

    Args:
        left_out: ids of modules inside it that are not.
    """

    def __init__(self, module: nn.Module, left_out: Collection[int] = ()) -> None:
        self.module = module
        self._left_out = left_out
        self._places: list[_Place] = []
        self._copies: dict[int, TensorBefore] = {}  # the newest of each tensor, by its id
        self._num_copied = 0
        self._writes = False
        self._num_passes = 0  # in which a module was not known
        self._copies_arguments = True
        self._quiet: list[_QuietPlace] = []
        self._streams: tuple[Stream, ...] = ()
        inside = (each for each in module.modules() if each is not module and id(each) not in left_out)
        self._hooks = hook_dicts_of(inside)  # those of the module itself see what is around its passes

    @contextmanager
    def first(self) -> Iterator[PassRecord]:
        """Watch the first pass of a forward inside the context; the record given repeats it."""
        is_new = not self._num_passes
        if is_new:
            self._places = [place for place in _places(self.module) if place.owner not in self._left_out]
            held = (module._parameters for module in self.module.modules() if id(module) not in self._left_out)
            self._quiet = [_QuietPlace(parameters) for parameters in held if parameters]
        streams = STREAMS if is_new else self._streams
        copies, self._copies = self._copies, {}
        self._num_copied = sum(each.value.nbytes for each in copies.values())
        record = PassRecord([self._before(place, copies) for place in self._places], streams)
        record.copies_arguments = self._copies_arguments
        record.quiet = [(place, place.values()) for place in self._quiet]
        record.hooks = self._hooks if any(self._hooks) else ()
        record.put_hooks = hook_contents(record.hooks)
        is_known = all(place.is_known for place in self._places)
        token = _UNDER_WAY.set((*_UNDER_WAY.get(), record))
        try:
            with ExitStack() as stack:
                ran = [] if is_known else stack.enter_context(modules_that_run())
                yield record
        finally:
            _UNDER_WAY.reset(token)
        self._writes |= record.close()
        self._copies_arguments = record.writes_arguments or (self._copies_arguments and not is_new)
        if record.streams:
            self._streams = tuple(stream for stream in STREAMS if stream in self._streams or stream in record.streams)
        if not is_known:
            self._learn(record, {id(self.module), *map(id, ran)})

    def _learn(self, record: PassRecord, ran: set[int]) -> None:
        """Take it that the modules that ran write from now on what they have written."""
        self._num_passes += 1
        unknown = [place for place in self._places if not place.is_known]
        for place in unknown:
            place.is_known = place.owner in ran or self._num_passes >= _MOST_UNKNOWN
            place.is_rare = place.is_rare and id(place) not in record.places
            if place.is_known and place.is_rare:
                self._quiet.append(_QuietPlace(place.attributes))
            elif place.is_known:
                place.watch_containers()
        self._places = [place for place in self._places if not (place.is_known and place.is_rare)]
        if not self._writes and all(place.is_known for place in unknown):
            self._forget_large()

    def _before(self, place: _Place, copies: dict[int, TensorBefore]) -> _PlaceBefore:
        values = place.attributes.copy()
        known: dict[str, ValueBefore] = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                if name not in place.rebound:
                    known[name] = self._tensor_before(value, copies, compares=place.is_silent or not place.is_known)
            elif (not place.is_known or name in place.written) and is_state(name):
                known[name] = value_before(value, Walk())
        return _PlaceBefore(place, values, known)

    def _tensor_before(self, tensor: Tensor, copies: dict[int, TensorBefore], compares: bool) -> TensorBefore:
        """Return a tensor's values, of which the copy of an earlier pass serves until something writes them."""
        made = self._copies.get(id(tensor)) or copies.get(id(tensor))
        if compares or made is None or made.value is not tensor or made.version != tensor_version(tensor):
            is_copied = compares or self._writes or self._num_copied + tensor.nbytes <= _SMALL_BYTES
            self._num_copied += tensor.nbytes if is_copied and id(tensor) not in copies else 0
            made = TensorBefore(tensor, copied(tensor) if is_copied else None, compares)
        elif made.compares:
            made = TensorBefore(tensor, made.kept, compares=False)
        if made.kept is not None:
            self._copies[id(tensor)] = made
        return made

    def _forget_large(self) -> None:
        """Forget the copies of large tensors, as no pass has written anything at all."""
        num_bytes = 0
        for key, each in [*self._copies.items()]:
            if num_bytes + each.value.nbytes > _SMALL_BYTES:
                each.kept = None
                del self._copies[key]
            else:
                num_bytes += each.value.nbytes


def is_state(name: str) -> bool:
    """Say whether an attribute of a module of this name is state that a forward may write."""
    return name not in _NOT_STATE and not name.startswith(_NOT_STATE_PREFIXES)


def _places(root: nn.Module) -> Iterator[_Place]:
    """Yield the attributes of a module, its submodules, and modules that these hold in lists and do not register."""
    seen = {id(module): module for module in root.modules()}
    for module in [*seen.values()]:
        for value in vars(module).values():
            for part in value if isinstance(value, list | tuple) else ():
                if isinstance(part, nn.Module):
                    seen.setdefault(id(part), part)
    for module in seen.values():
        yield _Place(vars(module), id(module), is_rare=type(module).__module__.startswith("torch."))
        if buffers := registered_buffers(module):
            yield _Place(buffers, id(module))


def registered_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return what holds a module's own buffers, by name."""
    return module._buffers


@contextmanager
def modules_that_run() -> Iterator[list[nn.Module]]:
    """Note the modules that are called inside the context."""
    ran: list[nn.Module] = []
    handle = register_module_forward_pre_hook(lambda module, args: ran.append(module))
    try:
        yield ran
    finally:
        handle.remove()


@dataclass(frozen=True)
class Stream:
    """Holds the calls of a stream of random numbers, of Python or of NumPy, that code draws from without naming it.

    Attributes:
        contents: returns what can be compared of a state.
    """

    get: Callable[[], Any]
    put: Callable[[Any], None]
    seed: Callable[[int], None]
    contents: Callable[[Any], Any]


STREAMS: Final = (
    Stream(random.getstate, random.setstate, random.seed, lambda state: state),
    Stream(
        np.random.get_state,
        np.random.set_state,
        lambda seed: np.random.seed(seed % 2**32),
        lambda state: (state[1].tobytes(), state[2:]),
    ),
)


@dataclass(eq=False)
class _PlaceBefore:
    """Holds the attributes of a place before a first pass.

    Attributes:
        known: the values whose contents are looked at too.
    """

    place: _Place
    values: dict[str, Any]
    known: dict[str, ValueBefore]

    def changes(self) -> dict[str, ValueBefore]:
        """Return what has changed since, as it was before; `MISSING` for what was not there."""
        now, found = self.place.attributes, {}
        for name, before in self.known.items():
            value = now.get(name, MISSING)
            if not before.differs(value):
                continue
            found[name] = before
            if isinstance(before, TensorBefore):
                self.place.is_silent |= before.is_silent()
                if value is not before.value and not before.is_written():
                    self.place.rebound.add(name)
            else:
                self.place.written.add(name)
        if len(now) == len(self.values) and all(map(is_, now.values(), self.values.values())):
            return found
        for name in {**self.values, **now}:
            value = self.values.get(name, MISSING)
            if name not in found and is_state(name) and now.get(name, MISSING) is not value:
                found[name] = ValueBefore(value)
        return found

    def close(self) -> dict[str, ValueBefore]:
        """End the first pass; return what it has changed. What it has not changed others still may."""
        changes = {name: _unlinked(before) for name, before in self.changes().items()}
        for name in changes:  # old values may hold the graph of an earlier step
            self.values.pop(name, None)
            self.known.pop(name, None)
        return changes


def _linked(before: ValueBefore) -> ValueBefore:
    """Return it with the tensor itself, unless that was written."""
    return ValueBefore(before.value) if isinstance(before, TensorBefore) and not before.is_written() else before


def _unlinked(before: ValueBefore) -> ValueBefore:
    """Return it without the graph of a tensor, which has ended: a second pass reads its values, if anything."""
    value = before.value
    if not isinstance(value, Tensor) or (isinstance(before, TensorBefore) and before.is_written()):
        return before
    return ValueBefore(value if value.grad_fn is None else value.detach().requires_grad_())


class PassRecord:
    """Holds what a first pass has changed, as it was before.

    Args:
        before: the places as they are before it.
        streams: the streams of random numbers that it may draw from.
    """

    def __init__(self, before: list[_PlaceBefore], streams: Sequence[Stream]) -> None:
        self._before = before
        self._changes: list[dict[str, ValueBefore]] = []  # of each place
        self._arguments = ArgumentsBefore((), {}, copies=False)
        self.quiet: list[tuple[_QuietPlace, tuple[Any, ...]]] = []
        self.hooks: HookDicts = ()
        self.put_hooks: Callable[[], None] = lambda: None
        self.copies_arguments = False
        self.writes_arguments = False
        self.places: set[int] = set()  # ids of those that it has written into
        self.streams = {stream: stream.get() for stream in streams}
        self._generators: dict[torch.Generator, Tensor] = {}
        self._kept: dict[str, list[Any]] = {}
        self._is_closed = False

    def note(self, generator: torch.Generator) -> None:
        """Keep the state of a generator that is about to be drawn from."""
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()

    def hold(self, args: Sequence[Any], kwargs: Mapping[str, Any], left_out: tuple[type, ...] = ()) -> None:
        """Keep the containers of the arguments of the first pass.

        Args:
            left_out: types of containers that are not kept, as each pass has its own.
        """
        self._arguments = ArgumentsBefore(args, kwargs, self.copies_arguments, left_out)

    def put_back(self) -> None:
        """Give the generators the states that they had."""
        for generator, state in self._generators.items():
            generator.set_state(state)

    def keep(self, name: str, value: Any) -> None:
        """Keep a value that the first pass has made; the second is to find it again."""
        self._kept.setdefault(name, []).append(value)

    def close(self) -> bool:
        """End the first pass; return whether it has written anything."""
        self._changes = [each.close() for each in self._before]
        changed = zip(self._before, self._changes, strict=True)
        self.places = {id(each.place) for each, changes in changed if changes}
        self.writes_arguments = self._arguments.close()
        self.streams = {
            stream: state
            for stream, state in self.streams.items()
            if stream.contents(stream.get()) != stream.contents(state)
        }
        self._is_closed = True
        return bool(self.places)

    def written(self) -> Iterator[tuple[dict[str, Any], str, ValueBefore]]:
        """Yield what the pass has written, once it has ended: the attributes, the name, and what was there before."""
        for place, changes in zip(self._before, self._changes, strict=True):
            for name, before in changes.items():
                yield place.place.attributes, name, _linked(before)

    def repeating(
        self,
        function: Callable[..., Any],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Callable[..., Any]:
        """Return the function of the first pass, of which every call after that is a second pass, inside `around`.

        What `around_second_passes` is given at the first pass is around it too.
        """
        opening = _PASS.get().opening

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_closed:
                return function(*args, **kwargs)
            args, kwargs = self._arguments.again(args, kwargs)
            with self.second(), around(), opening():
                return function(*args, **kwargs)

        setattr(call, _IS_REMEMBERED, True)
        return call

    @contextmanager
    def second(self) -> Iterator[None]:
        """Give modules and generators inside the context what they had before the first pass."""
        made: dict[int, Any] = {}  # a value that several modules have stays one value
        with ExitStack() as undo:
            for place, own in zip(self._before, self._changes, strict=True):
                later = {name: _linked(before) for name, before in place.changes().items() if name not in own}
                _exchange(place.place.attributes, {**later, **own}, made, undo)
            for quiet, values in self.quiet:
                _exchange(quiet.attributes, quiet.changes(values), made, undo)
            if self.hooks:
                undo.callback(hook_contents(self.hooks))
                self.put_hooks()
            for stream, state in self.streams.items():
                undo.callback(stream.put, stream.get())
                stream.put(state)
            for generator, state in self._generators.items():
                undo.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            token = _PASS.set(_Pass({name: iter(values) for name, values in self._kept.items()}))
            undo.callback(_PASS.reset, token)
            yield


def _exchange(
    attributes: dict[str, Any], changes: dict[str, ValueBefore], made: dict[int, Any], undo: ExitStack
) -> None:
    """Put back what was there before, until `undo`."""
    if changes:
        undo.callback(put_attributes, attributes, {name: attributes.get(name, MISSING) for name in changes})
        put_attributes(attributes, {name: before.remake(made) for name, before in changes.items()})


def put_attributes(attributes: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set attributes, or delete those whose value is `MISSING`."""
    for name, value in values.items():
        if value is MISSING:
            attributes.pop(name, None)
        else:
            attributes[name] = value


_UNDER_WAY: Final[ContextVar[tuple[PassRecord, ...]]] = ContextVar("shardwise_first_passes", default=())


@dataclass(frozen=True)
class _Pass:
    """Holds what a second pass repeats, and what opens the context of those of the forward that runs."""

    repeated: dict[str, Iterator[Any]] = field(default_factory=dict)
    opening: Callable[[], AbstractContextManager[Any]] = nullcontext


_PASS: Final[ContextVar[_Pass]] = ContextVar("shardwise_second_pass", default=_Pass())  # noqa: B039


@contextmanager
def around_second_passes(opening: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Open the same around second passes of what is recomputed of the forward inside, which other threads may run."""
    token = _PASS.set(_Pass(_PASS.get().repeated, opening))
    try:
        yield
    finally:
        _PASS.reset(token)


def same_again(name: str, make: Callable[[], Value]) -> Value:
    """Return a new value of this name; in a second pass the one that the first pass has made at this place."""
    found = next(_PASS.get().repeated.get(name, iter(())), None)
    value = make() if found is None else found
    for record in _UNDER_WAY.get():
        record.keep(name, value)
    return value


def is_repeatable() -> bool:
    """Say whether a pass is under way that may be repeated, or that repeats another."""
    return bool(_UNDER_WAY.get() or _PASS.get().repeated)


def note_generator(generator: torch.Generator) -> None:
    """Say that a forward is about to draw from a generator of its own, which a recomputation must draw from again."""
    for record in _UNDER_WAY.get():
        record.note(generator)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Give the generators that forwards inside the context draw from by name the states that they had."""
    record = PassRecord([], ())
    token = _UNDER_WAY.set((*_UNDER_WAY.get(), record))
    try:
        yield
    finally:
        _UNDER_WAY.reset(token)
        record.put_back()


class CheckpointStates:
    """Does for the calls of torch's own checkpoint in a forward what `ForwardState` does for recomputed blocks.

    Args:
        around: called at a first pass; returns what opens the context for its second passes.
    """

    def __init__(self, model: nn.Module, around: Callable[[], Callable[[], AbstractContextManager[None]]]) -> None:
        self._model, self._around = model, around
        self._states: dict[int, ForwardState] = {}  # by id of the first of the modules, which each state keeps

    @contextmanager
    def first(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[Callable[..., Any]]:
        """Watch the first pass of a checkpointed function inside the context; the function given repeats it.

        It is what `replaced_checkpoints` takes.
        """
        if is_remembered(function):
            yield function
            return
        parts = (function, *args, *kwargs.values())
        modules = [module for part in parts for module in _modules_of(part, depth=4)] or [self._model]
        inner = {id(child) for module in modules for child in module.modules() if child is not module}
        with ExitStack() as stack:
            for module in {id(module): module for module in modules if id(module) not in inner}.values():
                state = self._states.setdefault(id(module), ForwardState(module))
                record = stack.enter_context(state.first())
                record.hold(args, kwargs)
                function = record.repeating(function, self._around())
            yield function


def is_remembered(function: Callable[..., Any]) -> bool:
    """Say whether a function is one that `PassRecord.repeating` has returned."""
    return hasattr(function, _IS_REMEMBERED)


def _modules_of(function: Any, depth: int) -> Iterator[nn.Module]:
    """Yield the modules that a function is known to call: its own, or those that it refers to."""
    if isinstance(function, nn.Module):
        yield function
    elif depth and isinstance(function, partial):
        for part in (function.func, *function.args, *function.keywords.values()):
            yield from _modules_of(part, depth - 1)
    elif depth and isinstance(function, MethodType):
        for part in (function.__self__, function.__func__):
            yield from _modules_of(part, depth - 1)
    elif depth and isinstance(function, FunctionType):
        for part in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield from _modules_of(part, depth - 1)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty
                yield from _modules_of(cell.cell_contents, depth - 1)
