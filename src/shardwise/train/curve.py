"""Draws a curve in a terminal: dots of braille, with the values at its left and the steps under it.

>>> for line in curve([(1, 8.0), (50, 4.0), (100, 2.0)], width=32, height=4):
...     print(line.plain)
8.00 ┤⠉⠒⠤⢄⡀
     │    ⠈⠉⠒⠤⢄⡀
     │         ⠈⠉⠒⠤⠤⣀⣀⡀
2.00 ┤                ⠈⠉⠉⠑⠒⠒⠤⠤⢄⣀
     └ step 1 ────────────── 100
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

Point = tuple[int, float]

_BLANK = 0x2800
# The bits of a braille character, by row and column of its dots.
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
MARK = "◆"


def with_point(points: Sequence[Point], point: Point, first_step: int, most: int) -> tuple[Point, ...]:
    """Return the points of a curve with one more, and no more than about `most` of them, at even intervals.

    >>> points = ()
    >>> for step in range(1, 101):
    ...     points = with_point(points, (step, 1.0), first_step=0, most=10)
    >>> [step for step, _ in points]
    [1, 17, 33, 49, 65, 81, 97, 100]

    Args:
        points: at even intervals, the newest last.
        point: the step after the newest, and its value.
        first_step: from which steps are counted.
        most: points to keep.
    """
    num_steps = point[0] - first_step
    stride = 1 << max(0, math.ceil(math.log2(num_steps / most)))
    return (*(each for each in points if (each[0] - first_step - 1) % stride == 0), point)


def curve(points: Sequence[Point], width: int, height: int, marks: Sequence[Point] = ()) -> list[Text]:
    """Draw a curve; values that are not finite are left out.

    Args:
        points: steps, rising, and values.
        width: of all, in characters.
        height: of the curve alone, in lines; one more has the steps.
        marks: points that stand by themselves.
    """
    points = [point for point in points if math.isfinite(point[1])]
    marks = [mark for mark in marks if math.isfinite(mark[1]) and points and mark[0] >= points[0][0]]
    if not points or height < 2:
        return []
    values = [value for _, value in (*points, *marks)]
    low, high = min(values), max(values)
    if high - low < 1e-3 * abs(high):  # a line amid the picture
        margin = 0.01 * abs(high) + 1e-9
        low, high = low - margin, high + margin
    digits = min(6, max(2, 1 + math.ceil(-math.log10(high - low))))
    labels = {row: f"{high - (high - low) * row / (height - 1):.{digits}f}" for row in _labelled(height)}
    left = max(map(len, labels.values()))
    num_columns = max(4, width - left - 2)
    first, last = points[0][0], points[-1][0]
    per_dot = max(1, last - first) / (2 * num_columns - 1)

    def row_of(value: float, num_rows: int) -> int:
        return min(num_rows - 1, max(0, round((high - value) / (high - low) * (num_rows - 1))))

    dots = [((step - first) / per_dot, row_of(value, 4 * height)) for step, value in points]
    cells = _dots(dots, num_columns, height)
    rows = [[(chr(_BLANK + cell) if cell else " ") for cell in row] for row in cells]
    for step, value in marks:
        column = min(num_columns - 1, int((step - first) / per_dot / 2))
        rows[row_of(value, height)][column] = MARK
    lines = []
    for number, row in enumerate(rows):
        axis = f"{labels.get(number, ''):>{left}} {'┤' if number in labels else '│'}"
        line = Text.assemble((axis, "dim"), ("".join(row).rstrip(), "cyan"))
        line.highlight_regex(MARK, "magenta")
        lines.append(line)
    ends = f" step {first} ", f" {last}"
    rule = "─" * max(1, num_columns - len(ends[0]) - len(ends[1]))
    return [*lines, Text(f"{'':>{left}} └{ends[0]}{rule}{ends[1]}", style="dim")]


def _labelled(height: int) -> list[int]:
    """Return the rows that have a label: the first, the last, and the middle one where there is one."""
    return [0, (height - 1) // 2, height - 1] if height % 2 and height > 3 else [0, height - 1]


def _dots(points: Sequence[tuple[float, int]], num_columns: int, height: int) -> list[list[int]]:
    """Return the bits of each character of a line through points, which are in dots."""
    cells = [[0] * num_columns for _ in range(height)]

    def put(x: int, y: int) -> None:
        if 0 <= x < 2 * num_columns:
            cells[y // 4][x // 2] |= _BITS[y % 4][x % 2]

    put(round(points[0][0]), points[0][1])
    for (x0, y0), (x1, y1) in pairwise(points):
        num_dots = max(1, round(x1) - round(x0), abs(y1 - y0))
        for number in range(num_dots + 1):
            share = number / num_dots
            put(round(x0 + share * (x1 - x0)), round(y0 + share * (y1 - y0)))
    return cells
