"""Count what containers unpack to, where one that several others share counts each time.

A few nodes that share nodes may stand for a billion values, and a nesting may be deeper than any function of C
survives: what prints, hashes, copies or writes them walks over all, and cannot be interrupted. So files and states are
counted first. A node is whatever has parts: an object, or its number in a file.

>>> pair = [1, 2]
>>> counter = ValueCounter(lambda node: node if isinstance(node, list) else (), most_values=100, most_depth=10)
>>> counter.count([pair, pair])
7
>>> for _ in range(8):
...     pair = [pair, pair]
>>> counter.count(pair)
Traceback (most recent call last):
    ...
shardwise.checkpoint.shared_values.TooManyValuesError: more than 100 values, each counted as often as it occurs
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any


class TooManyValuesError(ValueError):
    """A node unpacks to too many values."""


class TooDeepError(ValueError):
    """A node is nested too deeply, or is in itself."""


class ValueCounter:
    """Counts the values of nodes; what is counted stays known, so each node is visited once.

    Args:
        parts_of: returns the nodes in a node; none for a plain value.
        most_values: that a node may unpack to.
        key_of: what tells nodes with parts apart, as long as they live.
    """

    def __init__(
        self,
        parts_of: Callable[[Any], Iterable[Any]],
        most_values: int,
        most_depth: int,
        key_of: Callable[[Any], Hashable] = id,
    ) -> None:
        self._parts_of = parts_of
        self._most_values = most_values
        self._most_depth = most_depth
        self._key_of = key_of
        self._known: dict[Hashable, tuple[int, int]] = {}  # values and depth
        self._kept: list[Any] = []  # an `id` is another's once its node is gone
        self._open: set[Hashable] = set()

    def count(self, node: Any) -> int:
        """Return how many values a node unpacks to, itself and those in it.

        Raises:
            TooManyValuesError: there are more than `most_values`.
            TooDeepError: they are deeper than `most_depth`.
        """
        return self._visit(node)[0]

    def _visit(self, node: Any) -> tuple[int, int]:
        parts = list(self._parts_of(node))
        if not parts:
            return 1, 1
        key = self._key_of(node)
        if key in self._known:
            return self._known[key]
        if key in self._open or len(self._open) >= self._most_depth:
            raise TooDeepError(f"nested deeper than {self._most_depth} levels")
        self._open.add(key)
        self._kept.append(node)
        total, deepest = 1, 0
        for part in parts:
            size, depth = self._visit(part)
            total, deepest = total + size, max(deepest, depth)
        self._open.remove(key)
        if total > self._most_values:
            raise TooManyValuesError(f"more than {self._most_values:,} values, each counted as often as it occurs")
        if deepest >= self._most_depth:
            raise TooDeepError(f"nested deeper than {self._most_depth} levels")
        self._known[key] = total, deepest + 1
        return self._known[key]
