"""Takes pytrees of tensors apart for sending and puts them together again; nothing that is received is executed.

A `PytreeSpec` says all that a receiver must know before the tensors arrive: the nested containers with their plain
values (None, numbers, strings, dtypes, sizes), and each tensor's shape, dtype and whether it requires a gradient.
Containers are those that torch's pytree has registered, and named tuples. Both ends name a type by its qualified name;
the receiver looks it up among the types that it knows, and imports none.

>>> spec, tensors = take_apart({"hidden": torch.ones(2, 3), "past": (None, 7)})
>>> spec.tensors
(TensorPart(shape=(2, 3), dtype=torch.float32, requires_grad=False),)
>>> put_together(PytreeSpec.from_json(spec.to_json()), tensors)["past"]
(None, 7)
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn

from shardwise.config.errors import ConfigError
from shardwise.runtime.torch_private import container_types, pytree_node

# Of the nodes of a tree, a tensor is 0, a plain value a list of one, and a container a list of three.
_TENSOR: Final = 0
_ALIGNMENT: Final = 16
_COMMON: Mapping[str, type] = MappingProxyType({f"builtins.{kind.__name__}": kind for kind in (dict, list, tuple)})


class TensorPart(NamedTuple):
    """Describes one tensor of a spec."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PytreeSpec:
    """Describes a value but for the elements of its tensors.

    Attributes:
        tree: its containers and plain values as JSON.
        tensors: in the order in which they are sent.
    """

    tree: str
    tensors: tuple[TensorPart, ...]

    @cached_property
    def offsets(self) -> list[int]:
        """Return where each tensor begins in a message that holds all of them, and where the last one ends."""
        return [0, *accumulate(-(-part.num_bytes // _ALIGNMENT) * _ALIGNMENT for part in self.tensors)]

    def to_json(self) -> str:
        """Return the text that is sent."""
        tensors = [[part.shape, str(part.dtype).removeprefix("torch."), part.requires_grad] for part in self.tensors]
        return json.dumps([self.tree, tensors])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        tree, tensors = json.loads(text)
        return cls(tree, tuple(TensorPart(tuple(shape), _dtype(name), flag) for shape, name, flag in tensors))


def take_apart(value: Any) -> tuple[PytreeSpec, list[Tensor]]:
    """Return the spec of a pytree, and its tensors in their order.

    Raises:
        ConfigError: it holds what is neither tensor, nor plain, nor a container that torch's pytree knows.
    """
    tensors: list[Tensor] = []
    tree = json.dumps(_flatten(value, "value", tensors))
    parts = tuple(TensorPart(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors)
    return PytreeSpec(tree, parts), tensors


def put_together(spec: PytreeSpec, tensors: Sequence[Tensor], types: Iterable[type] = ()) -> Any:
    """Return the value that `take_apart` took apart.

    Args:
        tensors: in the order of the spec.
        types: container types that may occur beside those of torch's pytree: named tuples.

    Raises:
        ConfigError: it has a container of a type that is not known here.
    """
    return _unflatten(_parsed(spec.tree), iter(tensors), tuple(types))


@lru_cache(maxsize=64)
def _parsed(tree: str) -> Any:
    return json.loads(tree)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a pytree in the order of `take_apart`."""
    if isinstance(value, Tensor):
        return [value]
    # Most are of these types: to look a type up takes longer.
    if type(value) is dict:
        value = [*value.values()]
    children = value if type(value) in (tuple, list) else (_open(value) or ((), None))[0]
    return [tensor for child in children for tensor in tensors_in(child)]


def containers_in(value: Any) -> set[type]:
    """Return the types of containers that a pytree holds."""
    opened = _open(value)
    return set() if opened is None else {type(value)}.union(*map(containers_in, opened[0]))


def named_tuples_of(model: nn.Module) -> tuple[type, ...]:
    """Return the named tuples defined in the Python modules of a model's classes: its blocks may return these.

    >>> nn.utils.rnn.PackedSequence in named_tuples_of(nn.LSTM(2, 2))
    True
    """
    places = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    found = (each for place in sorted(places) for each in [*vars(sys.modules.get(place, object)).values()])
    return tuple(dict.fromkeys(each for each in found if isinstance(each, type) and _is_named_tuple(each)))


def _flatten(value: Any, path: str, tensors: list[Tensor]) -> Any:
    """Return the JSON of a value's containers and plain values, and append its tensors to the list."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            raise ConfigError(
                "boundary-tensor-layout",
                f"{path}, which stages of the pipeline pass on, is a tensor of layout {value.layout}; "
                "cut the model where dense tensors pass",
            )
        tensors.append(value)
        return _TENSOR
    opened = _open(value)
    if opened is None:
        return [_encode(value, path)]
    children, context = opened
    keys = context if isinstance(context, list) and len(context) == len(children) else range(len(children))
    packed = [_flatten(child, f"{path}[{key!r}]", tensors) for key, child in zip(keys, children, strict=True)]
    return [_name_of(type(value)), _encode(context, path), packed]


def _open(value: Any) -> tuple[list[Any], Any] | None:
    """Return a container's children, and what else its type needs to make it from them; None for a leaf."""
    kind = type(value)
    if _is_named_tuple(kind):
        return list(value), None
    node = None if kind is torch.Size else pytree_node(kind)  # torch's pytree would make a tuple of a Size
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), context


def _unflatten(tree: Any, tensors: Iterator[Tensor], types: tuple[type, ...]) -> Any:
    if tree == _TENSOR:
        return next(tensors)
    if len(tree) == 1:
        return _decode(tree[0], types)
    name, context, packed = tree
    kind = _look_up(name, types)
    children = [_unflatten(child, tensors, types) for child in packed]
    if _is_named_tuple(kind):
        return kind(*children)
    node = pytree_node(kind)
    if node is None:
        raise _unknown(name)
    return node.unflatten_fn(children, _decode(context, types))


def _encode(value: Any, path: str) -> Any:
    """Return a plain value or a container's context as JSON; what JSON cannot say is a pair of a word and JSON."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple, torch.Size):
        return [type(value).__name__, [_encode(item, path) for item in value]]
    if type(value) is dict:
        return ["dict", [[_encode(key, path), _encode(item, path)] for key, item in value.items()]]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, type):
        return ["type", _name_of(value)]
    raise ConfigError(
        "boundary-value-type",
        f"{path}, which stages of the pipeline pass on, is a {_name_of(type(value))}; pass tensors, plain values, and "
        "containers that torch's pytree knows, or register the type there",
    )


def _decode(value: Any, types: tuple[type, ...]) -> Any:
    if not isinstance(value, list):
        return value
    word, content = value
    if word == "dict":
        return {_decode(key, types): _decode(item, types) for key, item in content}
    if word == "dtype":
        return _dtype(content)
    if word == "type":
        return _look_up(content, types)
    values = [_decode(item, types) for item in content]
    return values if word == "list" else tuple(values) if word == "tuple" else torch.Size(values)


def _look_up(name: str, types: tuple[type, ...]) -> type:
    kinds = _COMMON if name in _COMMON else {_name_of(kind): kind for kind in (*container_types(), *types)}
    if name not in kinds:
        raise _unknown(name)
    return kinds[name]


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        "boundary-type-unknown",
        f"a stage of the pipeline has sent a {name}, which this rank does not know; register it with torch's pytree "
        "on every rank, or let the block return a tuple or a dict",
    )


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(
            "boundary-dtype-unknown",
            f"a stage of the pipeline has sent dtype {name!r}, unknown here; run one torch on all ranks",
        )
    return found
