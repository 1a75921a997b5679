"""Values known at some points, read off between them.

>>> surface = Surface([((64.0, 64.0), (1.0,)), ((512.0, 64.0), (4.0,))])
>>> surface.at(64.0, 64.0), surface.at(1e9, 1e-9)
((1.0,), (4.0,))
>>> 1.0 < surface.at(128.0, 64.0)[0] < 2.0
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[tuple[float, ...], tuple[float, ...]]


class Surface:
    """Positive values over positive coordinates; in logarithms, the nearer a point is, the more it weighs.

    Weights fall with the fourth power of the distance (Shepard 1968), so that many far points do not drown a near one.
    What lies beyond the points counts as if it lay at the edge of their box.

    Args:
        points: coordinates and values, at least one.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = [(tuple(map(math.log, where)), tuple(map(math.log, values))) for where, values in points]
        columns = list(zip(*(where for where, _ in self._points), strict=True))
        self._low, self._high = [min(column) for column in columns], [max(column) for column in columns]

    def at(self, *where: float) -> tuple[float, ...]:
        """The values at some coordinates, between the least and the greatest known."""
        bounds = zip(map(math.log, where), self._low, self._high, strict=True)
        logs = [min(max(each, low), high) for each, low, high in bounds]
        distances = [sum((a - b) ** 2 for a, b in zip(known, logs, strict=True)) for known, _ in self._points]
        if min(distances) < 1e-12:
            return tuple(map(math.exp, self._points[distances.index(min(distances))][1]))
        weights = [1 / distance**2 for distance in distances]
        total = sum(weights)
        sums = zip(
            *([w * value for value in values] for w, (_, values) in zip(weights, self._points, strict=True)),
            strict=True,
        )
        return tuple(math.exp(sum(column) / total) for column in sums)
