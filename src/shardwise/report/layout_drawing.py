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

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rich.style import Style
from rich.text import Text

SHADES = "·░▒▓█"
_GAP = 3
_SIDE = 480
_MARGIN = 16
_TITLE_HEIGHT = 28
_LINE_HEIGHT = 19
_CHAR_WIDTH = 8
_STYLE = """\
rect { shape-rendering: crispEdges; }
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #14181f; }
.title { font-weight: 600; }
.figures { font: 12px ui-monospace, "DejaVu Sans Mono", monospace; }
.paper { fill: #ffffff; }
.none { fill: #eceff3; }
.seen { fill: #2f6fb7; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6eaf0; }
  .paper { fill: #14181f; }
  .none { fill: #232a34; }
  .seen { fill: #6ea3dd; }
}
"""


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


def svg(panels: Sequence[LayoutPanel], lines: Sequence[str]) -> str:
    """Draw panels beside each other, lines of text under them; a cell's share is its opacity and its tooltip."""
    width = _MARGIN + max(len(panels) * (_SIDE + _MARGIN), max(map(len, lines), default=0) * _CHAR_WIDTH)
    height = _TITLE_HEIGHT + _SIDE + 2 * _MARGIN + _LINE_HEIGHT * len(lines)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
    ]
    for index, panel in enumerate(panels):
        left = _MARGIN + index * (_SIDE + _MARGIN)
        drawn.append(f'<text class="title" x="{left}" y="{_TITLE_HEIGHT - 8}">{escape(panel.title)}</text>')
        drawn += [f'<g transform="translate({left} {_TITLE_HEIGHT})">', *_cells(panel), "</g>"]
    for index, line in enumerate(lines):
        baseline = _TITLE_HEIGHT + _SIDE + _MARGIN + _LINE_HEIGHT * (index + 0.5)
        drawn.append(f'<text class="figures" x="{_MARGIN}" y="{baseline:g}" xml:space="preserve">{escape(line)}</text>')
    return "\n".join([*drawn, "</svg>\n"])


def _cells(panel: LayoutPanel) -> list[str]:
    """Return the cells of a panel; neighbours in a row with the same share are one rectangle."""
    size = _SIDE / len(panel.shares)
    drawn = [f'<rect class="none" width="{_SIDE}" height="{_SIDE}"/>']
    for row, shares in enumerate(panel.shares):
        start = 0
        for column in range(1, len(shares) + 1):
            if column < len(shares) and shares[column] == shares[start]:
                continue
            if shares[start] > 0:
                # Without a minimum opacity, one visible block of many would not be seen.
                opacity = "" if shares[start] >= 1 else f' fill-opacity="{0.25 + 0.75 * shares[start]:.3g}"'
                place = f'x="{start * size:.4g}" y="{row * size:.4g}"'
                drawn.append(
                    f'<rect class="seen" {place} width="{(column - start) * size:.4g}" height="{size:.4g}"{opacity}>'
                    f"<title>row {row}, columns {start} to {column - 1}: {100 * shares[start]:.3g} %</title></rect>"
                )
            start = column
    return drawn
