"""Holds values as they are before a forward: attributes of modules, and the containers among its arguments.

>>> state = {"x": torch.ones(2)}
>>> before = value_before(state, Walk())
>>> state["y"] = torch.zeros(2)
>>> before.differs(state)
True
>>> sorted(before.remake({}))
['x']
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.config.errors import EngineError
from shardwise.runtime.torch_private import is_fake, unseen_by_op_modes, version

CONSTANTS: Final = (int, float, complex, str, bytes, type(None), type, ModuleType, FunctionType, MethodType, nn.Module)
_MOST_VALUES: Final = 10_000  # in the containers and objects that one walk visits
_COPIED: Final = (set, np.ndarray, np.random.RandomState, np.random.Generator, random.Random, torch.Generator)


@dataclass
class Walk:
    """Holds what a walk through containers and objects knows.

    Attributes:
        copies: it copies the values of tensors.
        num_left: values that it may still visit.
        seen: the containers and objects that it has met, by id.
    """

    copies: bool = True
    num_left: int = _MOST_VALUES
    seen: dict[int, ValueBefore] = field(default_factory=dict)


class ValueBefore:
    """Holds a value as it was before a first pass."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def differs(self, now: Any) -> bool:
        """Say whether the value after the pass is another, or has other contents."""
        return now is not self.value

    def remake(self, made: dict[int, Any]) -> Any:
        """Return the value for a second pass, which may write into it.

        Args:
            made: those that are made already, by the id of what they are made of: what is one value stays one.
        """
        key = id(self.value)
        if key not in made:
            made[key] = self._made(made)
        return made[key]

    def _made(self, made: dict[int, Any]) -> Any:
        return self.value


class TensorBefore(ValueBefore):
    """Holds a tensor, and a copy of its values where there is one.

    Args:
        compares: whether values tell that it was written, beside its version.
    """

    def __init__(self, value: Tensor, kept: Tensor | None, compares: bool) -> None:
        super().__init__(value)
        self.version, self.kept, self.compares = tensor_version(value), kept, compares

    def is_written(self) -> bool:
        """Say whether something has been written into the tensor since."""
        return tensor_version(self.value) != self.version or (self.compares and not _is_equal(self.value, self.kept))

    def is_silent(self) -> bool:
        """Say whether that has left the version as it was."""
        return tensor_version(self.value) == self.version and self.is_written()

    def differs(self, now: Any) -> bool:
        return now is not self.value or self.is_written()

    def _made(self, made: dict[int, Any]) -> Any:
        if self.kept is not None:
            return copied(self.kept).requires_grad_(self.value.requires_grad)
        if self.is_written():
            raise EngineError(
                "state-written-late",
                f"a tensor of shape {tuple(self.value.shape)} that a recomputed forward reads was written in place "
                "after that forward, or in it and not in the first one, so that the recomputation cannot read what "
                "was there; make a new tensor in place of writing into this one, write it in the first forward too, "
                "or set recompute.mode=none",
            )
        return self.value


class _TreeBefore(ValueBefore):
    """Holds a container or an object, and what is in it."""

    def __init__(self, value: Any, walk: Walk) -> None:
        super().__init__(value)
        walk.seen[id(value)] = self
        self.parts = [(key, value_before(part, walk)) for key, part in _parts(value)]

    def differs(self, now: Any) -> bool:
        if now is not self.value:
            return True
        parts = _parts(now)
        return len(parts) != len(self.parts) or any(
            key != key_before or before.differs(part)
            for (key, part), (key_before, before) in zip(parts, self.parts, strict=True)
        )

    def remake(self, made: dict[int, Any]) -> Any:
        key = id(self.value)
        if key in made:
            return made[key]
        if isinstance(self.value, tuple):
            items = [before.remake(made) for _, before in self.parts]
            made[key] = type(self.value)(*items) if hasattr(self.value, "_fields") else tuple(items)
            return made[key]
        made[key] = new = copy.copy(self.value)  # known before its parts, which may refer to it
        parts = [(name, before.remake(made)) for name, before in self.parts]
        if isinstance(new, list | deque):
            new.clear()
            new.extend(part for _, part in parts)
            return new
        attributes = new if isinstance(new, dict) else vars(new)
        attributes.clear()
        attributes.update(parts)
        return new


class _AgainBefore(ValueBefore):
    """Holds a container or an object that the walk has met at another place."""

    def __init__(self, value: Any, first: ValueBefore) -> None:
        super().__init__(value)
        self._first = first

    def _made(self, made: dict[int, Any]) -> Any:
        return self._first.remake(made)


class _CopyBefore(ValueBefore):
    """Holds an array, a set or a generator by a copy."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.kept = _clone(value)

    def differs(self, now: Any) -> bool:
        return now is not self.value or _contents(now) != _contents(self.kept)

    def _made(self, made: dict[int, Any]) -> Any:
        return _clone(self.kept)


class ArgumentsBefore:
    """Holds the containers and objects among the arguments of a first pass, as they were before it.

    Args:
        copies: whether to copy the values of the tensors in them.
        left_out: types of containers that are not held.
    """

    def __init__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], copies: bool, left_out: tuple[type, ...] = ()
    ) -> None:
        walk = Walk(copies)
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        self._held = {
            place: value_before(value, walk)
            for place, value in given
            if not isinstance(value, _FLAT) and type(value) not in left_out
        }
        self._walk = walk

    def close(self) -> bool:
        """End the first pass; return whether it has written into a tensor."""
        tensors = [each for each in self._walk.seen.values() if isinstance(each, TensorBefore)]
        is_written = any(tensor.is_written() for tensor in tensors)
        for each in tensors:
            each.compares = False
            if not is_written:
                each.kept = None
        return is_written

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a second pass with containers of its own."""
        if not self._held:
            return args, kwargs
        made: dict[int, Any] = {}
        own = {place: before.remake(made) for place, before in self._held.items()}
        return (
            tuple(own.get(index, value) for index, value in enumerate(args)),
            {name: own.get(name, value) for name, value in kwargs.items()},
        )


_FLAT: Final = (Tensor, *CONSTANTS)


def value_before(value: Any, walk: Walk) -> ValueBefore:
    """Hold a value as it is."""
    if isinstance(value, CONSTANTS):
        return ValueBefore(value)
    if (first := walk.seen.get(id(value))) is not None:
        return _AgainBefore(value, first)
    walk.num_left -= 1
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        walk.seen[id(value)] = held = TensorBefore(value, copied(value) if walk.copies else None, walk.copies)
        return held
    if walk.num_left < 0:
        return ValueBefore(value)
    if isinstance(value, _COPIED):
        walk.seen[id(value)] = made = _CopyBefore(value)
        return made
    return _TreeBefore(value, walk) if _has_parts(value) else ValueBefore(value)


def is_small_container(value: Any) -> bool:
    """Say whether looking into a value each time costs next to nothing."""
    return type(value) in (list, dict, deque, set) and len(value) <= 16


def tensor_version(tensor: Tensor) -> int:
    """Return how often the tensor has been written in place."""
    return 0 if tensor.is_inference() else version(tensor)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy that no graph and no mode sees."""
    with torch.no_grad(), unseen_by_op_modes():
        return tensor.detach().clone()


def _has_parts(value: Any) -> bool:
    if isinstance(value, list | tuple | dict | deque):
        return True
    return hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch", "shardwise", "functools"))


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return [*value.items()]
    return [*enumerate(value)] if isinstance(value, list | tuple | deque) else [*vars(value).items()]


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


def _is_equal(one: Tensor, other: Tensor | None) -> bool:
    if other is None or is_fake(one) or one.is_meta or one.shape != other.shape:
        return True
    with torch.no_grad(), unseen_by_op_modes():
        equal = one == other
        return bool((equal | ((one != one) & (other != other))).all())  # nan stays nan
