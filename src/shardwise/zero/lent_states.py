"""Show a user the states that the library stores off the device, or encoded, where torch's optimizer has its own.

`optimizer.state[parameter]` is a dict as ever: its tensors are read from where they are stored once they are asked for.
What was changed, replaced or cleared there is taken over before the next step, read or save.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor

from shardwise.runtime.torch_private import version

Read = Callable[[str], Tensor]


class LentStates(dict[str, Any]):
    """Is the states of one parameter's piece.

    Args:
        read: returns a state's values, as they are or as a copy.
    """

    def __init__(self, names: Iterable[str], read: Read) -> None:
        super().__init__(dict.fromkeys(names))
        self._read = read
        self._lent: dict[str, tuple[Tensor, int]] = {}

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if value is None:
            value = self._read(name)
            self._lent[name] = (value, version(value))
            super().__setitem__(name, value)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """Return a state, or the default."""
        if name not in self:
            return default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a state, which starts afresh then."""
        value = self.get(name, *default)
        super().pop(name, *default)
        return value

    def values(self) -> Any:
        """Return all states."""
        return [self[name] for name in self]

    def items(self) -> Any:
        """Return all states with their names."""
        return [(name, self[name]) for name in self]

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return a state, which is the default from now on where there is none."""
        if name not in self:
            self[name] = default
        return self[name]

    def popitem(self) -> tuple[str, Any]:
        """Remove the last state, which starts afresh then."""
        name = list(self)[-1]
        return name, self.pop(name)

    def copy(self) -> dict[str, Any]:
        """Return the states in a dict of their own."""
        return dict(self.items())

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # `dict(states)` and `{**states}` ask for each state where this is not dict's own

    def __eq__(self, other: object) -> bool:
        return self.copy() == other

    __hash__ = None

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return self.copy() | dict(other)

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return dict(other) | self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or a file has the values, not the engine. Of dicts, torch.load takes this one from a file.
        return OrderedDict, (), None, None, iter(self.items())

    def take_changes(self) -> Mapping[str, Any]:
        """Return the states that were changed or replaced since the last call; all are read again from then on."""
        changed: dict[str, Any] = {}
        for name in self:
            value = super().__getitem__(name)
            lent, seen = self._lent.get(name, (None, 0))
            if value is not None and (value is not lent or version(lent) != seen):
                changed[name] = value
            super().__setitem__(name, None)
        self._lent.clear()
        return changed
