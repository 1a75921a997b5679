"""This module is the border for wrong calls: it checks what public functions are given by their annotations.

A public function costs one line, `@checked`. Each argument that is given is compared with its annotation: classes,
unions, choices (`Literal`), ranges (`Annotated[int, Field(ge=1)]`), elements of lists and tables, protocols by the
names they have, functions by the number of arguments they take. What no one wrote, such as a default, is not looked
at, and an iterator is never read. Numbers of numpy become Python's, and other kinds of paths become a `Path`.

>>> from pydantic import Field
>>> @checked
... def keep(last: Annotated[int, Field(ge=1)] | None = None, folders: Sequence[str] = ()) -> None: ...
>>> keep(3, ["a"])
>>> keep("3")
Traceback (most recent call last):
    ...
shardwise.config.errors.ConfigError: keep: last='3' is a str; give an int of at least 1, or None
>>> keep(0)
Traceback (most recent call last):
    ...
shardwise.config.errors.ConfigError: keep: last=0 is out of range; give an int of at least 1, or None
>>> keep(lasst=1)
Traceback (most recent call last):
    ...
shardwise.config.errors.ConfigError: keep: there is no argument lasst; did you mean last?
"""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, ParamSpec, Protocol, TypeVar, get_args, get_origin

P = ParamSpec("P")
R = TypeVar("R")

NO_CLASS: Final = "no class"
"""Marks, in `Annotated`, a function that cannot be a class: calling that would only make an object."""

FOLDER_NAME: Final = "folder name"
"""Marks, in `Annotated`, a text that names one folder: a path would lead out of the folder that has it."""

OWN_RULE: Final = "own rule"
"""Marks, in `Annotated`, an argument that its function refuses itself, with a code of its own."""

_TYPE, _RANGE, _CHOICE = "wrong-argument", "argument-range", "argument-choice"
_MAX_SHOWN: Final = 60
_PLAIN: Final = (str, bytes, bool, int, float, type(None))
_LIMITS: Final[Mapping[str, str]] = types.MappingProxyType(
    {"ge": "of at least {:g}", "gt": "of more than {:g}", "le": "at most {:g}", "lt": "less than {:g}"}
)


class _RefusedError(Exception):
    """A value is not what a rule takes.

    Args:
        code: says which kind of rule that is.
        place: of the value inside the argument, such as "[2]"; empty for the argument itself.
        value: what is there, where there is a place.
        words: what may be there, as a message says it.
    """

    def __init__(self, code: str, place: str = "", value: Any = None, words: str = "") -> None:
        super().__init__(code, place, value, words)
        self.code, self.place, self.value, self.words = code, place, value, words


def _take_inside(rule: Rule | None, place: str, value: Any) -> None:
    """Check a value inside an argument, and let the error say where it is."""
    if rule is not None:
        try:
            rule.take(value)
        except _RefusedError as refused:
            inner = (refused.value, refused.words) if refused.place else (value, rule.words)
            raise _RefusedError(refused.code, place + refused.place, *inner) from None


class Rule(Protocol):
    """Says what one argument may be."""

    words: str

    def take(self, value: Any) -> Any:
        """Return the value, or what it stands for; raise `_RefusedError` with a code for a wrong one."""


class _OfClass:
    def __init__(self, kind: type) -> None:
        self.kind = kind = getattr(kind, "TAKEN_FROM", kind)
        self.words = "None" if kind is type(None) else with_article(kind.__name__)

    def take(self, value: Any) -> Any:
        if isinstance(value, self.kind):
            return value
        raise _RefusedError(_TYPE)


class _Flag:
    words = "True or False"

    def take(self, value: Any) -> bool:
        # Numpy's, whose class is not known here, and 0 and 1, which mean the same everywhere.
        if isinstance(value, bool) or (type(value).__name__ in ("bool", "bool_", "int") and value in (0, 1)):
            return bool(value)
        raise _RefusedError(_TYPE)


class _Number:
    def __init__(self, kind: type[int] | type[float], limits: Mapping[str, float]) -> None:
        self.kind, self.limits = kind, limits
        self.base = numbers.Integral if kind is int else numbers.Real
        said = [_LIMITS[key].format(limit) for key, limit in limits.items()]
        self.words = " ".join(["an int" if kind is int else "a number", " and ".join(said)]).strip()

    def take(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, self.base):
            raise _RefusedError(_TYPE)
        number: Any = value if isinstance(value, int) else self.kind(typing.cast(Any, value))
        for key, limit in self.limits.items():
            inside = {"ge": number >= limit, "gt": number > limit, "le": number <= limit, "lt": number < limit}
            if not inside[key]:  # so that NaN is outside
                raise _RefusedError(_RANGE)
        return number


class _Choice:
    def __init__(self, choices: Sequence[Any]) -> None:
        self.choices = choices
        self.words = f"one of {', '.join(map(repr, choices))}" if len(choices) > 1 else repr(choices[0])

    def take(self, value: Any) -> Any:
        if any(type(value) is type(choice) and value == choice for choice in self.choices):
            return value
        raise _RefusedError(_CHOICE if isinstance(value, str) else _TYPE)


class _PathName:
    words = "a path (a str or a Path)"

    def take(self, value: Any) -> Any:
        try:
            text = os.fspath(value)
        except TypeError:
            raise _RefusedError(_TYPE) from None
        if not isinstance(text, str):
            raise _RefusedError(_TYPE)
        if "\0" in text:
            raise _RefusedError(_CHOICE)
        return value if isinstance(value, str | Path) else Path(text)


class _FolderName:
    words = "the name of a folder, as a str without / and .."

    def take(self, value: Any) -> Any:
        if not isinstance(value, str):
            raise _RefusedError(_TYPE)
        if "\0" in value or value == ".." or Path(value).name != value:
            raise _RefusedError(_CHOICE)
        return value


class _AnyOf:
    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules
        words = dict.fromkeys(rule.words for rule in sorted(rules, key=lambda each: each.words == "None"))
        *others, last = words
        self.words = f"{', '.join(others)}{',' if last == 'None' else ''} or {last}" if others else last

    def take(self, value: Any) -> Any:
        nearest = _RefusedError(_TYPE)
        for rule in self.rules:
            try:
                return rule.take(value)
            except _RefusedError as refused:
                if refused.place or (refused.code != _TYPE and not nearest.place):
                    nearest = refused
        raise nearest


class _Elements:
    """Takes a list or its like; a str is none, though Python would take its characters one by one."""

    def __init__(self, kind: type, element: Rule | None) -> None:
        self.kind, self.element = kind, element
        self.words = "a list" if kind is not collections.abc.Iterable else "an iterable"
        self.words += "" if element is None else f" of elements that are each {element.words}"

    def take(self, value: Any) -> Any:
        if type(value) in (list, tuple) and self.element is None:
            return value
        if isinstance(value, str | bytes | bytearray | type):
            raise _RefusedError(_TYPE)
        if self.kind is collections.abc.Iterable:
            fits = isinstance(value, Iterable) or hasattr(value, "__getitem__")
        else:
            is_like = hasattr(value, "__len__") and hasattr(value, "__getitem__")
            is_like |= self.kind is collections.abc.Collection and isinstance(value, collections.abc.Collection)
            fits = is_like and not isinstance(value, Mapping)
        if not fits:
            raise _RefusedError(_TYPE)
        if self.element is not None and isinstance(value, list | tuple | set | frozenset):
            for index, element in enumerate(value):
                _take_inside(self.element, f"[{index}]", element)
        return value


class _Fixed:
    def __init__(self, elements: Sequence[Rule | None]) -> None:
        self.elements = elements
        said = ["anything" if element is None else element.words for element in elements]
        self.words = f"a tuple of {' and '.join(said)}"

    def take(self, value: Any) -> Any:
        if not isinstance(value, tuple | list) or len(value) != len(self.elements):
            raise _RefusedError(_TYPE)
        for index, (rule, element) in enumerate(zip(self.elements, value, strict=True)):
            _take_inside(rule, f"[{index}]", element)
        return value


class _Table:
    def __init__(self, key: Rule | None, value: Rule | None) -> None:
        self.key, self.value = key, value
        self.words = "a dict" if value is None else f"a dict with values that are each {value.words}"

    def take(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _RefusedError(_TYPE)
        for key, item in value.items() if self.key is not None or self.value is not None else ():
            _take_inside(self.key, f", the key {_short(key)}", key)
            _take_inside(self.value, f"[{_short(key)}]", item)
        return value


class _Function:
    def __init__(self, arguments: Any, may_be_class: bool) -> None:
        self.number = len(arguments) if isinstance(arguments, list) else None
        self.may_be_class = may_be_class
        number = f" of {self.number} argument{'s' * (self.number != 1)}" if self.number is not None else ""
        self.words = f"a function{number}" + ("" if may_be_class else " (no class)")

    def take(self, value: Any) -> Any:
        if not callable(value) or (isinstance(value, type) and not self.may_be_class):
            raise _RefusedError(_TYPE)
        if self.number is not None:
            try:
                signature = inspect.signature(value)
            except (TypeError, ValueError):  # of a function in C
                return value
            try:
                signature.bind(*range(self.number))
            except TypeError:
                raise _RefusedError(_TYPE) from None
        return value


class _Trait:
    def __init__(self, protocol: Any) -> None:
        bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False) and base is not Protocol]
        named = {name for base in bases for name in vars(base) if inspect.isfunction(vars(base)[name])}
        self.names = sorted(name for name in named if not hasattr(_Trivial, name))
        self.words = f"an object with {' and '.join(self.names)}"

    def take(self, value: Any) -> Any:
        if isinstance(value, type | str | bytes) or not all(hasattr(value, name) for name in self.names):
            raise _RefusedError(_TYPE)
        return value


class _Trivial(Protocol):
    pass


def rule_of(annotation: Any, marks: Sequence[Any] = ()) -> Rule | None:
    """Return the rule that an annotation, resolved and no text, states; None where anything goes.

    Args:
        marks: what an `Annotated` around it has.
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if OWN_RULE in marks:
        return None
    if origin is Annotated:
        return rule_of(parts[0], (*marks, *parts[1:]))
    if origin in (typing.Union, types.UnionType):
        return _union(parts, marks)
    if origin is Literal:
        return _Choice(parts)
    if annotation is None:
        return _OfClass(type(None))
    if FOLDER_NAME in marks:
        return _FolderName()
    if annotation is bool:
        return _Flag()
    if annotation in (int, float):
        return _Number(annotation, _limits(marks))
    container = origin or annotation
    if container is collections.abc.Callable:
        return _Function(parts[0] if parts else ..., NO_CLASS not in marks)
    if container is tuple and parts and parts[-1] is not ...:
        return _Fixed([rule_of(inner) for inner in parts])
    if container in (Sequence, Iterable, collections.abc.Collection, list, tuple):
        return _Elements(container, rule_of(parts[0]) if parts else None)
    if container in (Mapping, dict):
        return _Table(*(rule_of(inner) for inner in parts)) if parts else _Table(None, None)
    if not isinstance(container, type) or container in (object, Any):
        return None  # Any, a type variable
    return _Trait(container) if getattr(container, "_is_protocol", False) else _OfClass(container)


def _union(parts: Sequence[Any], marks: Sequence[Any]) -> Rule | None:
    rules = [] if Path not in parts else [_PathName()]
    named = [inner for inner in parts if not (rules and inner in (str, Path))]
    every = [*rules, *(rule_of(inner, marks) for inner in named)]
    return _AnyOf([rule for rule in every if rule is not None]) if None not in every else None


def _limits(marks: Sequence[Any]) -> dict[str, float]:
    limits = {}
    for mark in marks:
        for limit in getattr(mark, "metadata", (mark,)):  # of pydantic's Field
            limits.update({key: getattr(limit, key) for key in _LIMITS if hasattr(limit, key)})
    return limits


def check(function: str, name: str, value: Any, annotation: Any) -> None:
    """Check a value as `checked` does, where a function knows it only midway, such as what an iterator gave.

    Raises:
        ConfigError: it is something else.
    """
    rule = rule_of(annotation)
    if rule is not None:
        try:
            rule.take(value)
        except _RefusedError as refused:
            raise _refusal(function, name, value, rule, refused) from None


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check each call of a function, or each construction of a class, by its annotations, before it does anything.

    Under `contextmanager` and the like it stands outermost, so that a wrong call is refused where it is written.

    Raises:
        ConfigError: from the function: an argument is missing, unknown, or not what its annotation says.
    """
    if isinstance(function, type):
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    border = _Border(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        taken, named = border.take(args, kwargs)
        return function(*taken, **named)

    return call


class _Border:
    """Holds what the arguments of one function may be; it is read at the first call, when all names are there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self._function)

    @functools.cached_property
    def _positions(self) -> tuple[str, ...]:
        """Return the names of the arguments that may be given by position."""
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(parameter.name for parameter in self._signature.parameters.values() if parameter.kind in kinds)

    @functools.cached_property
    def _kinds(self) -> frozenset[Any]:
        return frozenset(parameter.kind for parameter in self._signature.parameters.values())

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        """Return the names of all arguments that have one of their own."""
        parameters = self._signature.parameters.values()
        return tuple(parameter.name for parameter in parameters if parameter.kind not in _VARIADIC)

    @functools.cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self._names)

    @functools.cached_property
    def _after(self) -> tuple[tuple[frozenset[str], frozenset[str]], ...]:
        """Return, by the number of arguments given by position, which must and which must not be given by name."""
        parameters = self._signature.parameters
        required = {name for name in self._names if parameters[name].default is inspect.Parameter.empty}
        by_position = [frozenset(self._positions[:number]) for number in range(len(self._positions) + 1)]
        return tuple((frozenset(required - names), names) for names in by_position)

    @functools.cached_property
    def _rules(self) -> dict[str, Rule]:
        hints = typing.get_type_hints(self._function, include_extras=True)
        rules = {name: rule_of(hints.get(name, Any)) for name in self._names}
        return {name: rule for name, rule in rules.items() if rule is not None}

    @functools.cached_property
    def _by_position(self) -> tuple[tuple[int, Rule], ...]:
        return tuple((index, self._rules[name]) for index, name in enumerate(self._positions) if name in self._rules)

    def _fits(self, num_given: int, names: collections.abc.KeysView[str]) -> bool:
        """Say whether Python would take the call."""
        num_places = len(self._after) - 1
        if num_given > num_places and inspect.Parameter.VAR_POSITIONAL not in self._kinds:
            return False
        required, taken = self._after[min(num_given, num_places)]
        if not names:
            return not required
        is_known = inspect.Parameter.VAR_KEYWORD in self._kinds or names <= self._known
        return required <= names and names.isdisjoint(taken) and is_known

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments of a call as the function gets them."""
        if not self._fits(len(args), kwargs.keys()):
            self._refuse_binding(args, kwargs)
        taken = list(args)
        for index, rule in self._by_position:
            if index < len(taken):
                taken[index] = self._taken(index, taken[index], rule)
        if not kwargs:
            return taken, kwargs
        named = {
            name: value if (argument_rule := self._rules.get(name)) is None else self._taken(name, value, argument_rule)
            for name, value in kwargs.items()
        }
        return taken, named

    def _taken(self, place: int | str, value: Any, rule: Rule) -> Any:
        try:
            return rule.take(value)
        except _RefusedError as refused:
            name = place if isinstance(place, str) else self._positions[place]
            raise _refusal(self._name, name, value, rule, refused) from None

    @property
    def _name(self) -> str:
        return self._function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__")

    def _refuse_binding(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
        """Raise for a call that Python would refuse, with what the function takes."""
        names = [name for name in self._names if name not in ("self", "cls")]
        takes = f"it takes {', '.join(names) or 'none'}"
        if unknown := [name for name in kwargs if name not in self._names]:
            close = difflib.get_close_matches(unknown[0], names, n=1)
            fix = f"did you mean {close[0]}?" if close else takes
            raise _error("unknown-argument", f"{self._name}: there is no argument {unknown[0]}; {fix}")
        required, taken = self._after[min(len(args), len(self._positions))]
        if twice := taken & kwargs.keys():
            raise _error("unknown-argument", f"{self._name}: {min(twice)} is given twice; {takes}")
        if missing := [name for name in names if name in required - kwargs.keys()]:
            verb, what = "is" if len(missing) == 1 else "are", " and ".join(missing)
            raise _error("missing-argument", f"{self._name}: {what} {verb} missing; {takes}")
        num_places = len([name for name in self._positions if name in names])
        number = len(args) - (len(self._positions) - num_places)
        fix = "give the others by name" if len(names) > num_places else takes
        raise _error(
            "unknown-argument", f"{self._name}: it takes {num_places} by position, and was given {number}; {fix}"
        )


_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _refusal(function: str, name: str, value: Any, rule: Rule, refused: _RefusedError) -> Exception:
    """Return the error for a value that a rule has refused: function, argument, value, what may be given."""
    accepted = refused.words if refused.place else rule.words
    name, value = name + refused.place, refused.value if refused.place else value
    said, fix = described(name, value), f"give {accepted}"
    if isinstance(value, str) and "\0" in value:
        said = f"{name}={_short(value)} has a NUL character"
    elif refused.code != _TYPE:
        said = f"{name}={_short(value)} is {'out of range' if refused.code == _RANGE else 'not known'}"
    elif inspect.isroutine(value) and "function" in accepted:
        said = f"{name} is the function {getattr(value, '__name__', '')}{_arguments_of(value)}"
    elif isinstance(value, type) and _is_named(value, accepted):
        fix += f"; {value.__name__}(...) makes one"
    return _error(refused.code, f"{function}: {said}; {fix}")


def _arguments_of(function: Any) -> str:
    try:
        return f"({', '.join(inspect.signature(function).parameters)})"
    except (TypeError, ValueError):  # of a function in C
        return ""


def _is_named(kind: type, words: str) -> bool:
    return any(base.__name__ in words.split() for base in kind.__mro__)


def _error(code: str, message: str) -> Exception:
    from shardwise.config.errors import ConfigError

    return ConfigError(code, message)


def described(name: str, value: Any) -> str:
    """Return an argument and what it is, in a few words: large values and those of foreign classes are not printed.

    >>> described("tag", 5), described("model", int), described("path", None)
    ('tag=5 is an int', 'model is the class int', 'path is None')
    """
    if value is None:
        return f"{name} is None"
    if isinstance(value, type):
        return f"{name} is the class {value.__name__}"
    type_name = with_article(type(value).__name__)
    is_plain = isinstance(value, _PLAIN) or (
        isinstance(value, list | tuple | dict | set) and all(isinstance(element, _PLAIN) for element in list(value)[:9])
    )
    return (
        f"{name}={_short(value)} is {type_name}"
        if is_plain and type(value).__repr__ in _REPRS
        else f"{name} is {type_name}"
    )


_REPRS: Final = tuple(plain_type.__repr__ for plain_type in (str, bytes, bool, int, float, list, tuple, dict, set))


def _short(value: Any) -> str:
    cut = value[:_MAX_SHOWN] if isinstance(value, str | bytes) else value
    if isinstance(value, list | tuple | set | dict) and len(value) > 9:
        return f"{len(value)} elements"
    try:
        text = repr(cut)
    except ValueError:  # an integer of too many digits
        return "a very long number"
    return text if len(text) <= _MAX_SHOWN and cut is value else f"{text[:_MAX_SHOWN]}..."


def with_article(noun: str) -> str:
    """Return a noun with its article.

    >>> with_article("int"), with_article("Module")
    ('an int', 'a Module')
    """
    return f"an {noun}" if noun[:1] in "aeioAEIO" else f"a {noun}"
