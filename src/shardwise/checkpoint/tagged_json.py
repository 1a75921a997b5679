"""Keep values of Python in JSON with their types, without pickle: what is read back is what was given.

What JSON itself gives back the same stays as it is. All else becomes `{"__tagged__": [node, ...]}`: a node is a number,
a text, a bool, None, or a list of the name of a kind and its parts, where the parts of a container are the numbers of
earlier nodes. So nothing nests, what occurs twice is written once, and the last node is the value. Reading looks kinds
up in a table and calls no code that a file names: a class of the user is taken if it is imported already, and filled
without its constructor.

>>> from_json(to_json({"shape": (2, 3), 7: {"seen"}}, "extra"), "extra")
{'shape': (2, 3), 7: {'seen'}}
>>> to_json({"loss": [0.5, None]}, "extra")
{'loss': [0.5, None]}
>>> to_json({"hooks": [print]}, "extra")
Traceback (most recent call last):
    ...
shardwise.checkpoint.tagged_json.NoWordError: extra['hooks'][0] is a builtin_function_or_method
"""

from __future__ import annotations

import base64
import dataclasses
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.checkpoint.shared_values import TooManyValuesError, ValueCounter
from shardwise.runtime.torch_private import plain_torch_functions

TAGGED: Final = "__tagged__"
# How earlier versions wrote the tensors of `client_state`; a dict of the user's that looks the same gets a tag.
_EARLIER_TENSOR: Final = "__tensor__"
_MOST_BYTES: Final = 64 * 2**20  # of one tensor or array: larger ones belong into a file of their own
_PLAIN_DEPTH: Final = 32
_PLAIN_BITS: Final = 64
# Deeper than any writer goes, which itself is recursive.
_MOST_DEPTH: Final = 1000
_MANY_SCALARS: Final = 1 << 22
# Values, where one that occurs several times counts each time: what prints, hashes or copies them walks over all.
_MANY_VALUES: Final = 1 << 24
# Of a number: the time of a division grows with the square.
_MOST_NUMBER_BITS: Final = 1 << 16


class NoWordError(TypeError):
    """There is no word for a value; the message begins with where it is."""


def to_json(value: Any, name: str) -> Any:
    """Return a value as JSON has it.

    Args:
        value: any tree of Python's, torch's and numpy's own types.

    Raises:
        NoWordError: some value in it would not come back as it was given.
    """
    if _is_plain(value, set()):
        return value
    writer = _Writer()
    try:
        writer.node(value, name)
    except RecursionError:
        raise NoWordError(f"{name} is nested too deeply") from None
    return {TAGGED: writer.nodes}


def from_json(value: Any, name: str) -> Any:
    """Return what `to_json` was given; `name` is for messages.

    Raises:
        ValueError: it is none that `to_json` has written, or the class of a value is not imported.
    """
    if not isinstance(value, dict) or value.keys() != {TAGGED}:
        try:
            return _with_earlier_tensors(value)
        except Exception as error:  # whatever torch makes of the values of a damaged tensor
            raise ValueError(f"{name} cannot be read ({type(error).__name__}: {error})") from None
    values: list[Any] = []
    nodes = value[TAGGED]
    try:
        sizes = _Sizes()
        for node in nodes:
            sizes.add(node)
            values.append(_read(node, values) if isinstance(node, list) else node)
        return values[-1]
    except ClassMissingError:
        raise
    except Exception as error:  # whatever a damaged file makes of the types' own functions
        raise ValueError(f"node {len(values)} of {name} cannot be read ({type(error).__name__}: {error})") from None


def _with_earlier_tensors(value: Any) -> Any:
    """Return a value that has no tags, with the tensors that earlier versions wrote into it."""
    if isinstance(value, list):
        return [_with_earlier_tensors(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_EARLIER_TENSOR}:
        match value[_EARLIER_TENSOR]:
            case [str() as dtype, values] if isinstance(kind := getattr(torch, dtype, None), torch.dtype):
                return torch.tensor(values, dtype=kind)
    return {key: _with_earlier_tensors(part) for key, part in value.items()}


class _Sizes:
    """Counts what is in the values of nodes, one after the other, before these are made."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._counter = ValueCounter(self._parts, _MANY_VALUES, _MOST_DEPTH, key_of=int)
        self._num_hashed = 0

    def add(self, node: Any) -> None:
        """Count one more node.

        Raises:
            ValueError: with this one there are too many values, or they are too deep.
        """
        self._nodes.append(node)
        size = self._counter.count(len(self._nodes) - 1)
        # A set and a mapping hash their members; a tuple in them is walked over each time.
        self._num_hashed += size if size > 1 and node[0] not in ("list", "tuple") else 0
        if self._num_hashed > _MANY_VALUES:
            raise TooManyValuesError(
                f"more than {_MANY_VALUES:,} values, those that occur repeatedly counted each time"
            )

    def _parts(self, number: int) -> list[int]:
        """Return the numbers of the earlier nodes that are the parts of a node."""
        parts = _part_numbers(self._nodes[number])
        return [part for part in parts if type(part) is int and 0 <= part < number]


def _part_numbers(node: Any) -> Sequence[Any]:
    """Return the numbers of the nodes that are the parts of a node."""
    if not isinstance(node, list) or not node or not isinstance(node[0], str):
        return ()
    kind = node[0]
    if kind in ("defaultdict", "deque"):
        return node[2:]
    if kind == "instance":
        return node[4:6]
    return node[1:] if kind in _CONTAINERS else ()


class ClassMissingError(ValueError):
    """The class of a value is not there, or is another."""


def _is_plain(value: Any, seen: set[int], depth: int = 0) -> bool:
    """Say whether JSON alone gives the value back; what occurs twice it does not."""
    kind = type(value)
    if kind in (str, float, bool, type(None)):
        return True
    if kind is int:
        return bool(value.bit_length() <= _PLAIN_BITS)
    if kind not in (list, dict) or depth > _PLAIN_DEPTH or id(value) in seen:
        return False
    seen.add(id(value))
    if kind is dict and (not all(type(key) is str for key in value) or value.keys() in ({TAGGED}, {_EARLIER_TENSOR})):
        return False
    parts: Iterable[Any] = value.values() if kind is dict else value
    return all(_is_plain(part, seen, depth + 1) for part in parts)


class _Writer:
    """Writes values as nodes, parts before what they are parts of."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self._sizes = _Sizes()
        self._number_of: dict[int, int] = {}
        self._open: set[int] = set()
        self._kept: list[Any] = []  # while its identity counts

    def node(self, value: Any, name: str) -> int:
        """Write a value, if it is not there yet, and return the number of its node."""
        kind = type(value)
        if kind in (str, float, bool, type(None)) or (kind is int and value.bit_length() <= _PLAIN_BITS):
            return self._append(value, name)
        if (number := self._number_of.get(id(value))) is not None:
            return number
        if id(value) in self._open:
            raise NoWordError(f"{name} contains itself")
        self._open.add(id(value))
        number = self._append(self._written(value, name), name)
        self._open.remove(id(value))
        self._number_of[id(value)] = number
        self._kept.append(value)
        return number

    def _append(self, node: Any, name: str) -> int:
        if len(self.nodes) >= _MANY_SCALARS:
            raise NoWordError(f"{name} comes after {_MANY_SCALARS:,} values, more than a checkpoint's JSON is for")
        try:
            self._sizes.add(node)
        except ValueError as error:
            raise NoWordError(f"{name} is {error}, more than a checkpoint's JSON is for") from None
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _written(self, value: Any, name: str) -> list[Any]:
        kind = type(value)
        if kind in _SEQUENCES:
            return [kind.__name__, *self._parts(value, name)]
        if kind in _MAPPINGS:
            return [kind.__name__, *self._items(value, name)]
        if kind is defaultdict:
            factory = value.default_factory
            if factory is not None and _FACTORIES.get(factory.__name__) is not factory:
                raise NoWordError(f"{name} is a defaultdict of {getattr(factory, '__qualname__', factory)}")
            return ["defaultdict", factory and factory.__name__, *self._items(value, name)]
        if kind is deque:
            return ["deque", value.maxlen, *self._parts(value, name)]
        if kind in _NAMESPACES:
            return [kind.__name__, *self._items(vars(value), name, is_attribute=True)]
        if (words := _words(value, name)) is not None:
            return words
        return self._instance(value, name)

    def _parts(self, values: Iterable[Any], name: str) -> list[int]:
        return [self.node(part, f"{name}[{place}]") for place, part in enumerate(values)]

    def _items(self, values: Mapping[Any, Any], name: str, is_attribute: bool = False) -> list[int]:
        found = []
        for key, part in values.items():
            found.append(self.node(key, f"the key {key!r} of {name}"))
            found.append(self.node(part, f"{name}.{key}" if is_attribute else f"{name}[{key!r}]"))
        return found

    def _instance(self, value: Any, name: str) -> list[Any]:
        """Write a value of a class of the user that can be filled without running code of the class."""
        kind = type(value)
        place = [kind.__module__, kind.__qualname__]
        if _class_at(*place) is not kind:
            raise NoWordError(f"{name} is a {kind.__qualname__}")
        if isinstance(value, Enum):
            return ["enum", *place, value.name]
        base = next((each for each in _BASES if issubclass(kind, each)), None)
        if base is tuple and not hasattr(kind, "_fields"):
            base = None
        if base is None and not dataclasses.is_dataclass(kind):
            raise NoWordError(f"{name} is a {kind.__qualname__}")
        if any(hasattr(base, "__slots__") and base.__slots__ for base in kind.__mro__):
            raise NoWordError(f"{name} is a {kind.__qualname__}, which has slots")
        content: Any = None
        if base is dict:
            content = dict(dict.items(value))
        elif base is list:
            content = list(list.__iter__(value))
        elif base is not None:
            content = base(value)
        state = dict(getattr(value, "__dict__", {}))
        self._kept += [content, state]
        return ["instance", *place, base and base.__name__, self.node(content, name), self.node(state, name)]


def _words(value: Any, name: str) -> list[Any] | None:
    """Write a value that has no parts; None where there is no word for its type."""
    kind = type(value)
    if kind in (Tensor, nn.Parameter):
        return _tensor_words(value, name)
    if isinstance(value, np.ndarray | np.generic):
        return _array_words(value, name)
    if kind in (int, Fraction):
        num_bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        if num_bits > _MOST_NUMBER_BITS:
            raise NoWordError(f"{name} is a number of more than {_MOST_NUMBER_BITS:,} bits")
    if kind is int:
        return ["int", hex(value)]
    if kind is Fraction:
        return ["Fraction", hex(value.numerator), hex(value.denominator)]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind in (bytes, bytearray):
        _check_size(len(value), name)
        return [kind.__name__, base64.b64encode(value).decode()]
    if kind in (range, slice) and all(type(each) in (int, type(None)) for each in _ends(value)):
        return [kind.__name__, *_ends(value)]
    if kind in (torch.dtype, torch.memory_format, torch.layout):
        return ["torch", str(value).removeprefix("torch.")]
    if kind is torch.Size:
        return ["Size", *value]
    if kind is timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if kind in (datetime, time) and value.tzinfo is not None:
        return _zone_words(value)
    if kind in (datetime, time, date):
        return [kind.__name__, value.isoformat(), None, getattr(value, "fold", 0)]
    text = _TEXTS.get(kind)
    return None if text is None else [text, str(value)]


def _ends(value: range | slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def _zone_words(value: datetime | time) -> list[Any] | None:
    zone = value.tzinfo
    local = value.replace(tzinfo=None).isoformat()
    if type(zone) is ZoneInfo and zone.key:
        return [type(value).__name__, local, zone.key, value.fold]
    if type(zone) is timezone:
        offset = zone.utcoffset(None)
        return [type(value).__name__, local, [offset.days, offset.seconds, offset.microseconds], value.fold]
    return None


def _tensor_words(value: Tensor, name: str) -> list[Any]:
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        raise NoWordError(f"{name} is a tensor that is sparse, quantized or on meta")
    _check_size(value.numel() * value.element_size(), name)
    with plain_torch_functions():
        own = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        data = own.view(torch.uint8).numpy().tobytes() if own.numel() else b""
    kind = "Parameter" if type(value) is nn.Parameter else "Tensor"
    dtype = str(value.dtype).removeprefix("torch.")
    return [kind, dtype, list(value.shape), base64.b64encode(data).decode(), value.requires_grad]


def _array_words(value: Any, name: str) -> list[Any]:
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        raise NoWordError(f"{name} is a {type(value).__qualname__}")
    if value.dtype.kind not in "biufcSUmM":
        raise NoWordError(f"{name} is an array of numpy's dtype {value.dtype}")
    _check_size(value.nbytes, name)
    data = base64.b64encode(value.tobytes()).decode()
    return ["ndarray" if isinstance(value, np.ndarray) else "scalar", value.dtype.str, list(value.shape), data]


def _check_size(num_bytes: int, name: str) -> None:
    if num_bytes > _MOST_BYTES:
        raise NoWordError(f"{name} has {num_bytes:,} bytes, more than the {_MOST_BYTES:,} that JSON is used for")


def _class_at(module: str, qualname: str) -> Any:
    """Return what has this name in a module that is imported already; None where there is none."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _read(node: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return the value of a node; its parts are among `values`."""
    kind, *given = node

    def part(number: Any) -> Any:
        if type(number) is not int or not 0 <= number < len(values):
            raise ValueError("a part comes after what it is a part of")
        return values[number]

    def items(numbers: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [(part(key), part(value)) for key, value in zip(numbers[::2], numbers[1::2], strict=True)]

    if (sequence := _SEQUENCE_OF.get(kind)) is not None:
        return sequence(map(part, given))
    if (mapping := _MAPPING_OF.get(kind)) is not None:
        return mapping(items(given))
    if kind == "defaultdict":
        return defaultdict(None if given[0] is None else _FACTORIES[given[0]], items(given[1:]))
    if kind == "deque":
        return deque(map(part, given[1:]), given[0])
    if (namespace := _NAMESPACE_OF.get(kind)) is not None:
        filled = namespace()
        vars(filled).update(items(given))
        return filled
    if kind == "instance":
        return _instance(given[:3], part(given[3]), part(given[4]))
    if kind == "enum":
        return _member(*given)
    return _READERS[kind](*given)


def _missing(module: str, qualname: str) -> ClassMissingError:
    return ClassMissingError(f"it has a {module}.{qualname}, which is not there; import {module} before you load")


def _member(module: str, qualname: str, name: str) -> Any:
    kind = _class_at(module, qualname)
    if not isinstance(kind, type) or not issubclass(kind, Enum) or name not in kind.__members__:
        raise _missing(module, qualname)
    return kind.__members__[name]


def _instance(place: Sequence[Any], content: Any, state: Mapping[str, Any]) -> Any:
    """Fill an object of a class that is imported, without running code of the class."""
    module, qualname, base_name = place
    kind, base = _class_at(module, qualname), _BASE_OF[base_name] if base_name is not None else object
    fits = isinstance(kind, type) and issubclass(kind, base) and (base is not object or dataclasses.is_dataclass(kind))
    if not fits or (base is tuple and not hasattr(kind, "_fields")):
        raise _missing(module, qualname)
    is_filled_later = base in (object, dict, list, set)
    new: Callable[..., Any] = base.__new__
    made = new(kind) if is_filled_later else new(kind, content)
    if base is dict:
        for key, value in content.items():
            dict.__setitem__(made, key, value)
    elif base is list:
        list.extend(made, content)
    elif base is set:
        set.update(made, content)
    if state:
        object.__getattribute__(made, "__dict__").update(state)
    return made


def _tensor(dtype: str, shape: Sequence[int], data: str, requires_grad: bool) -> Tensor:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise ValueError("no dtype")
    content = bytearray(base64.b64decode(data))
    flat = torch.frombuffer(content, dtype=torch.uint8).view(kind) if content else torch.empty(0, dtype=kind)
    found = flat.reshape(tuple(shape))
    return found.requires_grad_() if requires_grad else found


def _number(text: str) -> int:
    if len(text) > 3 + _MOST_NUMBER_BITS // 4:
        raise ValueError(f"a number of more than {_MOST_NUMBER_BITS:,} bits")
    return int(text, 16)


def _parameter(dtype: str, shape: Sequence[int], data: str, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(_tensor(dtype, shape, data, False), requires_grad)


def _array(dtype: str, shape: Sequence[int], data: str) -> Any:
    kind, content = np.dtype(dtype), base64.b64decode(data)
    if kind.hasobject or kind.names is not None:
        raise ValueError("no dtype of plain values")
    if kind.itemsize == 0 and not shape:  # an empty text
        return np.zeros((), kind)
    return np.frombuffer(content, kind).reshape(tuple(shape)).copy()


def _scalar(dtype: str, shape: Sequence[int], data: str) -> Any:
    return _array(dtype, shape, data)[()]


def _moment(kind: Any) -> Callable[..., Any]:
    def read(text: str, zone: str | list[int] | None, fold: int) -> Any:
        local = kind.fromisoformat(text)
        if isinstance(zone, list):
            days, seconds, microseconds = zone
            offset = timedelta(days, seconds, microseconds)
            return local.replace(tzinfo=timezone(offset) if offset else UTC, fold=fold)
        if zone is not None:
            return local.replace(tzinfo=ZoneInfo(zone), fold=fold)
        return local if kind is date else local.replace(fold=fold)

    return read


def _of_torch(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype | torch.memory_format | torch.layout):
        raise ValueError("no dtype, layout or memory format")
    return found


def _by_name(*kinds: Any) -> Mapping[str, Any]:
    return MappingProxyType({kind.__name__: kind for kind in kinds})


_SEQUENCE_OF: Final = _by_name(list, tuple, set, frozenset)
_MAPPING_OF: Final = MappingProxyType({**_by_name(dict, OrderedDict), "Counter": lambda items: Counter(dict(items))})
_NAMESPACE_OF: Final = _by_name(Namespace, SimpleNamespace)
_CONTAINERS: Final = frozenset((*_SEQUENCE_OF, *_MAPPING_OF, *_NAMESPACE_OF))
_SEQUENCES: Final = frozenset(_SEQUENCE_OF.values())
_MAPPINGS: Final = frozenset({dict, OrderedDict, Counter})
_NAMESPACES: Final = frozenset(_NAMESPACE_OF.values())
_FACTORIES: Final = _by_name(int, float, bool, complex, str, bytes, list, dict, set, tuple, deque, Counter, OrderedDict)
_BASES: Final = (dict, list, set, tuple, str, int, float)
_BASE_OF: Final = _by_name(*_BASES)
_TEXTS: Final = MappingProxyType(
    {
        torch.device: "device",
        PosixPath: "Path",
        PurePosixPath: "PurePosixPath",
        PureWindowsPath: "PureWindowsPath",
        Decimal: "Decimal",
        UUID: "UUID",
        ZoneInfo: "ZoneInfo",
    }
)
_READERS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        **_by_name(complex, range, slice, timedelta, Path, PurePosixPath, PureWindowsPath, Decimal, UUID),
        "ZoneInfo": ZoneInfo,
        "int": _number,
        # From text it would take any power of ten.
        "Fraction": lambda above, below: Fraction(_number(above), _number(below)),
        "bytes": base64.b64decode,
        "bytearray": lambda text: bytearray(base64.b64decode(text)),
        "Size": lambda *sizes: torch.Size(sizes),
        "device": torch.device,
        "torch": _of_torch,
        "Tensor": _tensor,
        "Parameter": _parameter,
        "ndarray": _array,
        "scalar": _scalar,
        "datetime": _moment(datetime),
        "date": _moment(date),
        "time": _moment(time),
    }
)
