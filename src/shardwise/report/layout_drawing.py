"""Draw block layouts, for the terminal and as SVG: rows of queries, columns of keys, from the top left.

Where a layout has more blocks than cells fit, a cell stands for several blocks and is shaded by the share that is
visible; a share above 0 always shows.

>>> print(terminal([LayoutPanel("", ((1, 0, 0), (0.5, 1, 0), (0.01, 0, 1)))], width=80, is_causal=True).plain)
██
▒▒██
░░··██
<BLANKLINE>
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.style import Style
from rich.text import Text

SHADES = "·░▒▓█"
_GAP = 3


@dataclass(frozen=True)
class LayoutPanel:
    """Hold one drawing: a title, and the visible share of each cell, 0 to 1, rows of queries from the top."""

    title: str
    shares: Sequence[Sequence[float]]


def cells_across(width: int, num_panels: int) -> int:
    """Return the cells across a panel so that all panels fit side by side, or one a row where they would be tiny."""
    beside = (width - _GAP * (num_panels - 1)) // num_panels // 2
    return max(8, min(40, beside if beside >= 16 else width // 2))


def terminal(panels: Sequence[LayoutPanel], width: int, *, is_causal: bool) -> Text:
    """Draw panels beside each other where they fit, two characters a cell.

    Args:
        panels: panels with equal numbers of cells.
        width: columns of the terminal.
        is_causal: leave the cells above the diagonal blank, instead of drawing them as not visible.
    """
    panel_width = max(2 * len(panels[0].shares), *(len(panel.title) for panel in panels))
    per_row = max(1, (width + _GAP) // (panel_width + _GAP))
    text = Text()
    for first in range(0, len(panels), per_row):
        row = panels[first : first + per_row]
        if any(panel.title for panel in row):
            titles = (panel.title.ljust(panel_width) for panel in row)
            text.append((" " * _GAP).join(titles).rstrip() + "\n", Style(dim=True))
        for index in range(len(row[0].shares)):
            lines = (_line(panel.shares[index], index if is_causal else None).ljust(panel_width) for panel in row)
            text.append((" " * _GAP).join(lines).rstrip() + "\n")
    text.highlight_regex(f"{SHADES[0]}+", Style(dim=True))
    return text


def _line(shares: Sequence[float], last: int | None) -> str:
    return "".join(2 * _shade(share) for share in (shares if last is None else shares[: last + 1]))


def _shade(share: float) -> str:
    if share <= 0.0:
        return SHADES[0]
    return SHADES[-1] if share >= 1.0 else SHADES[1 + min(2, int(3 * share))]


def svg(panels: Sequence[LayoutPanel], lines: Sequence[str], *, is_causal: bool) -> str:
    """Draw panels beside each other and `lines` of text under them as SVG; `is_causal` as in `terminal`."""
    beside = len(panels) * (max(2 * len(panels[0].shares), *(len(panel.title) for panel in panels)) + _GAP)
    console = Console(record=True, width=max([beside, *map(len, lines)]), file=io.StringIO(), highlight=False)
    console.print(terminal(panels, console.width, is_causal=is_causal))
    for line in lines:
        console.print(line, markup=False)
    return console.export_svg(title="shardwise attention show")
