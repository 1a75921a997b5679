"""Lets a recomputed forward begin from the state that its first pass began from, and leave the state as it is.

A forward may write: statistics, counters, the vectors of spectral norm, codebooks, memories, plain attributes. Its
second pass must read what the first has read, and nothing may be written twice. So what the first pass writes is kept
as it was before. In the second pass the modules have copies of that; then they get back what they had.

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

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwise.config.errors import EngineError
from shardwise.runtime.torch_private import is_fake, replaced_checkpoints, unseen_by_op_modes, version

_SMALL_BYTES: Final = 1 << 20  # of a module's tensors that are copied once though no pass has written anything
_MOST_VALUES: Final = 10_000  # in the containers and objects of a module
_MOST_UNKNOWN: Final = 8  # passes in which a module is looked at that has not run
_MISSING: Final = object()
_IS_REMEMBERED: Final = "_shardwise_is_remembered"
_NOT_STATE: Final = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"})
_NOT_STATE_PREFIXES: Final = ("_forward_", "_backward_", "_state_dict_", "_load_state_dict_", "_shardwise_", "forward")
_CONSTANTS: Final = (int, float, complex, str, bytes, type(None), type, ModuleType, FunctionType, MethodType, nn.Module)
_COPIED: Final = (set, np.ndarray, np.random.RandomState, np.random.Generator, random.Random, torch.Generator)


@dataclass(eq=False)
class _Place:
    """One dict of attributes of a module.

    Attributes:
        attributes: the dict itself.
        owner: the id of the module.
        is_known: a pass in which the module ran has shown what it writes.
        written: names of the attributes whose contents a pass has changed.
        rebound: names whose tensors a pass has replaced by others, and not written into.
        is_rare: the code of the module's class writes nothing here; hooks may.
        is_silent: a tensor here was written with no new version, as through `.data`.
    """

    attributes: dict[str, Any]
    owner: int
    is_known: bool = False
    written: set[str] = field(default_factory=set)
    rebound: set[str] = field(default_factory=set)
    is_rare: bool = False
    is_silent: bool = False


class ForwardState:
    """Watches what the forwards of a module write.

    Args:
        module: its submodules are watched too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._places: list[_Place] = []
        self._copies: dict[int, _TensorBefore] = {}  # the newest of each tensor, by its id
        self._num_copied = 0
        self._writes = False
        self._num_passes = 0
        self._streams: tuple[Stream, ...] = ()

    @contextmanager
    def first(self) -> Iterator[PassRecord]:
        """Watch the first pass of a forward inside the context; the record given repeats it."""
        is_new = not self._places
        if is_new:
            self._places = list(_places(self.module))
        copies, self._copies = self._copies, {}
        self._num_copied = sum(each.value.nbytes for each in copies.values())
        streams = STREAMS if is_new else self._streams
        record = PassRecord([self._before(place, copies) for place in self._places], streams)
        unknown = [place for place in self._places if not place.is_known]
        token = _UNDER_WAY.set((*_UNDER_WAY.get(), record))
        try:
            with ExitStack() as stack:
                ran = stack.enter_context(modules_that_run()) if unknown else []
                yield record
        finally:
            _UNDER_WAY.reset(token)
        self._writes |= record.close()
        if record.streams:
            self._streams = tuple(each for each in STREAMS if each in self._streams or each in record.streams)
        if unknown:
            self._learn(unknown, record, {id(self.module), *map(id, ran)})

    def _learn(self, unknown: Sequence[_Place], record: PassRecord, ran: set[int]) -> None:
        """Take it that the modules that ran write from now on what they have written."""
        self._num_passes += 1
        for place in unknown:
            place.is_known = place.owner in ran or self._num_passes >= _MOST_UNKNOWN
        self._places = [
            place
            for place in self._places
            if not (place.is_known and place.is_rare) or place.written or place.rebound or id(place) in record.places
        ]
        if self._writes or not all(place.is_known for place in unknown):
            return
        num_bytes = 0
        for key, each in [*self._copies.items()]:
            num_bytes += each.value.nbytes
            if num_bytes > _SMALL_BYTES:
                del self._copies[key]
                num_bytes -= each.value.nbytes

    def _before(self, place: _Place, copies: dict[int, _TensorBefore]) -> _PlaceBefore:
        values = place.attributes.copy()
        known: dict[str, _Before] = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                if name not in place.rebound:
                    known[name] = self._tensor_before(value, copies, not place.is_known, place.is_silent)
            elif (not place.is_known or name in place.written) and _is_state(name):
                known[name] = _before(value, [_MOST_VALUES])
        return _PlaceBefore(place, values, known)

    def _tensor_before(
        self, tensor: Tensor, copies: dict[int, _TensorBefore], is_new: bool, is_silent: bool
    ) -> _TensorBefore:
        """Return a tensor's values, of which the copy of an earlier pass serves until something writes them."""
        made = self._copies.get(id(tensor)) or copies.get(id(tensor))
        if made is None or made.value is not tensor or made.version != _version(tensor) or is_silent:
            is_copied = is_new or self._writes or self._num_copied + tensor.nbytes <= _SMALL_BYTES
            self._num_copied += tensor.nbytes if is_copied and id(tensor) not in copies else 0
            made = _TensorBefore(tensor, _copied(tensor) if is_copied else None)
        made.compares = is_new or is_silent
        if made.kept is not None:
            self._copies[id(tensor)] = made
        return made


class _Before:
    """Holds a value as it was before a first pass."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def differs(self, now: Any) -> bool:
        """Say whether the value after the pass is another, or has other contents."""
        return now is not self.value

    def remake(self, made: dict[int, Any]) -> Any:
        """Return the value for a second pass, which may write into it.

        Args:
            made: the values of this second pass so far, by the ids of those that they stand for: what several places
                have stays one value.
        """
        if id(self.value) not in made:
            made[id(self.value)] = self._new(made)
        return made[id(self.value)]

    def _new(self, made: dict[int, Any]) -> Any:
        return self.value


class _TensorBefore(_Before):
    """Holds a tensor, and a copy of its values where there is one.

    Args:
        value: the tensor.
        kept: the copy, or None.
        compares: whether values tell that it was written, beside its version.
    """

    def __init__(self, value: Tensor, kept: Tensor | None, compares: bool = True) -> None:
        super().__init__(value)
        self.version, self.kept, self.compares = _version(value), kept, compares

    def is_written(self) -> bool:
        """Say whether something has been written into the tensor since."""
        return _version(self.value) != self.version or (self.compares and not _is_equal(self.value, self.kept))

    def is_silent(self) -> bool:
        """Say whether that has left the version as it was."""
        return _version(self.value) == self.version and self.is_written()

    def differs(self, now: Any) -> bool:
        return now is not self.value or self.is_written()

    def _new(self, made: dict[int, Any]) -> Any:
        if self.kept is not None:
            return _copied(self.kept).requires_grad_(self.value.requires_grad)
        if self.is_written():
            raise EngineError(
                "state-written-late",
                f"a recomputed forward has written into a tensor of shape {tuple(self.value.shape)} after forwards that"
                " wrote nothing, so that its recomputation cannot read what was there; write it in the first forward "
                "too, or set recompute.mode=none",
            )
        return self.value


class _TreeBefore(_Before):
    """Holds a container or an object, and what is in it."""

    def __init__(self, value: Any, budget: list[int]) -> None:
        super().__init__(value)
        self.parts = [(key, _before(part, budget)) for key, part in _parts(value)]

    def differs(self, now: Any) -> bool:
        if now is not self.value:
            return True
        parts = _parts(now)
        return len(parts) != len(self.parts) or any(
            key != key_before or before.differs(part)
            for (key, part), (key_before, before) in zip(parts, self.parts, strict=True)
        )

    def _new(self, made: dict[int, Any]) -> Any:
        return _of_parts(self.value, [(key, before.remake(made)) for key, before in self.parts])


class _CopyBefore(_Before):
    """Holds an array, a set or a generator by a copy."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.kept = _clone(value)

    def differs(self, now: Any) -> bool:
        return now is not self.value or _contents(now) != _contents(self.kept)

    def _new(self, made: dict[int, Any]) -> Any:
        return _clone(self.kept)


def _before(value: Any, budget: list[int]) -> _Before:
    budget[0] -= 1
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return _TensorBefore(value, _copied(value))
    if isinstance(value, _CONSTANTS) or budget[0] < 0:
        return _Before(value)
    if isinstance(value, _COPIED):
        return _CopyBefore(value)
    return _TreeBefore(value, budget) if _has_parts(value) else _Before(value)


def _has_parts(value: Any) -> bool:
    if isinstance(value, list | tuple | dict | deque):
        return True
    return hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch", "shardwise", "functools"))


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return [*value.items()]
    return [*enumerate(value)] if isinstance(value, list | tuple | deque) else [*vars(value).items()]


def _of_parts(value: Any, parts: list[tuple[Any, Any]]) -> Any:
    """Return a new container or object like `value` with other parts."""
    if isinstance(value, tuple):
        items = [part for _, part in parts]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    made = copy.copy(value)
    if isinstance(value, list | deque):
        made.clear()
        made.extend(part for _, part in parts)
        return made
    attributes = made if isinstance(value, dict) else vars(made)
    attributes.clear()
    attributes.update(parts)
    return made


def _clone(value: Any) -> Any:
    return value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value)


def _contents(value: Any) -> Any:
    """Return what can be compared of a value of `_COPIED`."""
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, value.tobytes()
    if isinstance(value, np.random.RandomState):
        _, words, *others = value.get_state(legacy=True)
        return words.tobytes(), others  # type: ignore[union-attr]
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    return value.getstate() if isinstance(value, random.Random) else value


def _is_state(name: str) -> bool:
    return name not in _NOT_STATE and not name.startswith(_NOT_STATE_PREFIXES)


def _places(root: nn.Module) -> Iterator[_Place]:
    """Yield the attributes of a module, its submodules, and modules that these hold in lists and do not register."""
    seen = {id(each): each for each in root.modules()}
    for module in [*seen.values()]:
        for value in vars(module).values():
            for part in value if isinstance(value, list | tuple) else ():
                if isinstance(part, nn.Module):
                    seen.setdefault(id(part), part)
    for module in seen.values():
        yield _Place(vars(module), id(module), is_rare=type(module).__module__.startswith("torch."))
        if module._buffers:
            yield _Place(module._buffers, id(module))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version(tensor)


def _copied(tensor: Tensor) -> Tensor:
    with torch.no_grad(), unseen_by_op_modes():
        return tensor.detach().clone()


def _is_equal(one: Tensor, other: Tensor | None) -> bool:
    if other is None or is_fake(one) or one.is_meta or one.shape != other.shape:
        return True
    with torch.no_grad(), unseen_by_op_modes():
        equal = one == other
        return bool((equal | ((one != one) & (other != other))).all())  # nan stays nan


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
        get: returns its state.
        put: sets its state.
        seed: begins it from a seed.
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
        place: whose they are.
        values: by name.
        known: the values whose contents are looked at too.
    """

    place: _Place
    values: dict[str, Any]
    known: dict[str, _Before]

    def changes(self) -> dict[str, _Before]:
        """Return what the pass has changed, as it was before; `_MISSING` for what was not there."""
        now, found = self.place.attributes, {}
        for name, before in self.known.items():
            value = now.get(name, _MISSING)
            if not before.differs(value):
                continue
            found[name] = _unlinked(before)
            if isinstance(before, _TensorBefore):
                self.place.is_silent |= before.is_silent()
                if value is not before.value and not before.is_written():
                    self.place.rebound.add(name)
            else:
                self.place.written.add(name)
        if len(now) == len(self.values) and all(map(is_, now.values(), self.values.values())):
            return found
        for name in {**self.values, **now}:
            value = self.values.get(name, _MISSING)
            if name not in found and _is_state(name) and now.get(name, _MISSING) is not value:
                found[name] = _unlinked(_Before(value))
        return found


def _unlinked(before: _Before) -> _Before:
    """Return it without the graph of a tensor, which has ended: a second pass reads its values, if anything."""
    value = before.value
    if not isinstance(value, Tensor) or (isinstance(before, _TensorBefore) and before.is_written()):
        return before
    return _Before(value if value.grad_fn is None else value.detach().requires_grad_())


class PassRecord:
    """Holds what a first pass has changed, as it was before.

    Args:
        before: the places as they are before it.
        streams: the streams of random numbers that it may draw from.
    """

    def __init__(self, before: list[_PlaceBefore], streams: Sequence[Stream]) -> None:
        self._before = before
        self._changes: list[tuple[dict[str, Any], dict[str, _Before]]] = []
        self.places: set[int] = set()  # ids of those that it has written into
        self.streams = {stream: stream.get() for stream in streams}
        self._generators: dict[torch.Generator, Tensor] = {}
        self._numbers: dict[str, list[int]] = {}
        self._is_closed = False

    def note(self, generator: torch.Generator) -> None:
        """Keep the state of a generator that is about to be drawn from."""
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()

    def put_back(self) -> None:
        """Give the generators the states that they had."""
        for generator, state in self._generators.items():
            generator.set_state(state)

    def keep(self, name: str, number: int) -> None:
        """Keep a number that the first pass has found for something; the second is to find it again."""
        self._numbers.setdefault(name, []).append(number)

    def close(self) -> bool:
        """End the first pass; return whether it has written anything."""
        found = [(each.place, each.changes()) for each in self._before]
        self._changes = [(place.attributes, changes) for place, changes in found if changes]
        self.places = {id(place) for place, changes in found if changes}
        self._before = []
        self.streams = {
            stream: state
            for stream, state in self.streams.items()
            if stream.contents(stream.get()) != stream.contents(state)
        }
        self._is_closed = True
        return bool(self._changes)

    def repeating(
        self, function: Callable[..., Any], around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Callable[..., Any]:
        """Return the function of the first pass, of which every call after that is a second pass, inside `around`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_closed:
                return function(*args, **kwargs)
            if around is nullcontext and not (self._changes or self.streams or self._generators or self._numbers):
                return function(*args, **kwargs)
            with self.second(), around():
                return function(*args, **kwargs)

        setattr(call, _IS_REMEMBERED, True)
        return call

    @contextmanager
    def second(self) -> Iterator[None]:
        """Give modules and generators inside the context what they had before the first pass."""
        made: dict[int, Any] = {}
        with ExitStack() as undo:
            for attributes, changes in self._changes:
                undo.callback(_put, attributes, {name: attributes.get(name, _MISSING) for name in changes})
                _put(attributes, {name: each.remake(made) for name, each in changes.items()})
            for stream, state in self.streams.items():
                undo.callback(stream.put, stream.get())
                stream.put(state)
            for generator, state in self._generators.items():
                undo.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            token = _REPEATED.set({name: iter(numbers) for name, numbers in self._numbers.items()})
            undo.callback(_REPEATED.reset, token)
            yield


def _put(attributes: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is _MISSING:
            attributes.pop(name, None)
        else:
            attributes[name] = value


_UNDER_WAY: Final[ContextVar[tuple[PassRecord, ...]]] = ContextVar("shardwise_first_passes", default=())


_REPEATED: Final[ContextVar[dict[str, Iterator[int]]]] = ContextVar("shardwise_second_pass", default={})  # noqa: B039


def same_again(name: str, make: Callable[[], int]) -> int:
    """Return a new number of this name; in a second pass the one that the first pass has got at this place."""
    found = next(_REPEATED.get().get(name, iter(())), None)
    number = make() if found is None else found
    for record in _UNDER_WAY.get():
        record.keep(name, number)
    return number


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
        model: whose forward calls them.
        around: called at a first pass; returns what opens the context for its second passes.
    """

    def __init__(self, model: nn.Module, around: Callable[[], Callable[[], AbstractContextManager[None]]]) -> None:
        self._model, self._around = model, around
        self._states: dict[int, ForwardState] = {}  # by id of the first of the modules, which each state keeps

    def watching(self) -> AbstractContextManager[None]:
        """Return a context inside which calls of `torch.utils.checkpoint.checkpoint` are watched."""
        return replaced_checkpoints(self._first)

    @contextmanager
    def _first(self, function: Callable[..., Any], args: Sequence[Any]) -> Iterator[Callable[..., Any]]:
        """Watch the first pass of a checkpointed function inside the context; the function given repeats it."""
        if hasattr(function, _IS_REMEMBERED):
            yield function
            return
        modules = [each for part in (function, *args) for each in _modules_of(part, depth=4)] or [self._model]
        inner = {id(child) for each in modules for child in each.modules() if child is not each}
        with ExitStack() as stack:
            for module in {id(each): each for each in modules if id(each) not in inner}.values():
                state = self._states.setdefault(id(module), ForwardState(module))
                function = stack.enter_context(state.first()).repeating(function, self._around())
            yield function


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
