"""Draw timelines as one self-contained SVG: rows of ranks, time from left to right, a tooltip for each action.

Under the computations of a rank its transfers and collectives are thin rows. An action that takes no time is not
drawn. The group `pinned` holds what a page may keep visible while it scrolls: titles, names of ranks and the legend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from shardwise.report.palette import fill, ink
from shardwise.report.panel import WORDS, TerminalPanel, describe, format_tick_s, percent, ticks, typical_s
from shardwise.schedule import ActionKind, TimedAction

_LABEL_WIDTH = 118
_MARGIN = 16
_MIN_WIDTH, _MAX_WIDTH = 900, 9000
_MIN_LEGEND_WIDTH = 1040
_CELL_WIDTH = 16
_MAX_CELL_WIDTH = 48
_TITLE_HEIGHT = 46
_AXIS_HEIGHT = 20
_ROW_HEIGHT = 22
_BASELINE = 15
_STREAM_HEIGHT = 6
_ROW_GAP = 5
_PANEL_GAP = 18
_LEGEND_HEIGHT = 30
_TICK_WIDTH = 90
_DIGIT_WIDTH = 6.5
# The least width at which the pointer still finds an action.
_MIN_ACTION_WIDTH = 0.5

_STYLE = """\
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #14181f; }
.title { font-size: 15px; font-weight: 600; }
.quiet { fill: #5b6470; }
.number { font-size: 11px; text-anchor: middle; pointer-events: none; }
.paper { fill: #ffffff; }
.idle { fill: #eceff3; }
.tick { stroke: #14181f; stroke-opacity: 0.12; }
.action:hover { stroke: #14181f; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6eaf0; }
  .quiet { fill: #9aa5b1; }
  .paper { fill: #14181f; }
  .idle { fill: #232a34; }
  .tick { stroke: #ffffff; stroke-opacity: 0.14; }
  .action:hover { stroke: #ffffff; }
}
"""


@dataclass(frozen=True)
class _RowPlace:
    """Hold where a panel is drawn, in pixels."""

    top: float
    per_s: float
    width: float

    def x(self, panel: TerminalPanel, time_s: float) -> float:
        return _LABEL_WIDTH + (time_s - panel.start_s) * self.per_s


def draw(panels: Sequence[TerminalPanel], *, same_axis: bool = True) -> str:
    """Draw timelines under each other, each with its bubble, and one legend.

    Args:
        panels: the timelines to draw.
        same_axis: use one scale for all panels, so that lengths can be compared; else each panel fills the width.
    """
    width = max(map(_width, panels))
    longest_s = max(panel.makespan_s for panel in panels)
    top = 0.0
    drawn: list[str] = []
    pinned: list[str] = []
    for panel in panels:
        span_s = longest_s if same_axis else panel.makespan_s
        place = _RowPlace(top, width / span_s if span_s > 0 else 0.0, width)
        drawn += _panel(panel, place)
        pinned += _pinned(panel, place)
        top += _TITLE_HEIGHT + _AXIS_HEIGHT + len(panel.rows) * _pitch(panel) + _PANEL_GAP
    whole_width = _LABEL_WIDTH + max(width, _MIN_LEGEND_WIDTH - _LABEL_WIDTH) + _MARGIN
    whole_height = top + _LEGEND_HEIGHT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole_width:.0f} {whole_height:.0f}"'
    return "\n".join(
        [
            f'{head} width="{whole_width:.0f}" height="{whole_height:.0f}" role="img">',
            f"<style>\n{_STYLE}</style>",
            f'<rect class="paper" width="{whole_width:.0f}" height="{whole_height:.0f}"/>',
            *drawn,
            '<g class="pinned">',
            *pinned,
            *_legend(panels, top),
            "</g>",
            "</svg>",
            "",
        ]
    )


def _width(panel: TerminalPanel) -> float:
    """Return the pixels of the time axis, so that a number fits into a typical cell, within limits."""
    usual_s = typical_s(panel)
    num_cells = panel.makespan_s / usual_s if usual_s > 0 else 1.0
    return min(_MAX_WIDTH, max(min(_MIN_WIDTH, num_cells * _MAX_CELL_WIDTH), num_cells * _CELL_WIDTH))


def _pitch(panel: TerminalPanel) -> float:
    """Return the pixels from one rank's row to the next."""
    return _ROW_HEIGHT + _STREAM_HEIGHT * (len(panel.streams) - 1) + _ROW_GAP


def _row_top(panel: TerminalPanel, place: _RowPlace, index: int) -> float:
    return place.top + _TITLE_HEIGHT + _AXIS_HEIGHT + index * _pitch(panel)


def _panel(panel: TerminalPanel, place: _RowPlace) -> Iterator[str]:
    """Draw the rows and the time axis."""
    end = place.x(panel, panel.start_s + panel.makespan_s)
    bottom = _row_top(panel, place, len(panel.rows)) - _ROW_GAP
    for index in range(len(panel.rows)):
        top = _row_top(panel, place, index)
        size = f'width="{end - _LABEL_WIDTH:.2f}" height="{_ROW_HEIGHT}"'
        yield f'<rect class="idle" x="{_LABEL_WIDTH}" y="{top:g}" {size}/>'
    axis_bottom = place.top + _TITLE_HEIGHT + _AXIS_HEIGHT - 4
    for tick_s in ticks(panel.makespan_s, max(2, int((end - _LABEL_WIDTH) / _TICK_WIDTH))):
        x = place.x(panel, panel.start_s + tick_s)
        label = format_tick_s(tick_s, panel.makespan_s)
        yield f'<text class="quiet" x="{x:.2f}" y="{axis_bottom - 3:g}">{label}</text>'
        yield f'<line class="tick" x1="{x:.2f}" y1="{axis_bottom:g}" x2="{x:.2f}" y2="{bottom:g}"/>'
    for index, row in enumerate(panel.rows.values()):
        for timed in row:
            if timed.duration_s > 0:
                yield from _action(panel, place, _row_top(panel, place, index), timed)


def _action(panel: TerminalPanel, place: _RowPlace, row_top: float, timed: TimedAction) -> Iterator[str]:
    kind = timed.action.kind
    stream = panel.streams.index(timed.stream)
    y = row_top if stream == 0 else row_top + _ROW_HEIGHT + _STREAM_HEIGHT * (stream - 1) + 1
    height = _ROW_HEIGHT if stream == 0 else _STREAM_HEIGHT - 1
    x, length = place.x(panel, timed.start_s), timed.duration_s * place.per_s
    # A gap to the next action separates neighbours of one kind.
    width = max(_MIN_ACTION_WIDTH, length - (1.0 if length > 4 else 0.0))
    colour = fill(kind, panel.chunk(timed), panel.num_chunks)
    yield (
        f'<rect class="action {kind.name.lower()}" x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height}" '
        f'fill="{colour}"><title>{escape(_hover(panel, timed))}</title></rect>'
    )
    number = "" if timed.action.micro_batch is None else str(timed.action.micro_batch)
    if stream == 0 and width >= len(number) * _DIGIT_WIDTH > 0:
        middle = f'x="{x + width / 2:.2f}" y="{y + _BASELINE:g}"'
        yield f'<text class="number" style="fill: {ink(colour)}" {middle}>{number}</text>'


def _hover(panel: TerminalPanel, timed: TimedAction) -> str:
    start_s, end_s = (
        format_tick_s(time_s - panel.start_s, panel.makespan_s) for time_s in (timed.start_s, timed.end_s)
    )
    length = format_tick_s(timed.duration_s)
    return f"{timed.action}: {describe(timed.action)}\nrank {timed.rank}, {start_s} to {end_s} ({length})"


def _pinned(panel: TerminalPanel, place: _RowPlace) -> Iterator[str]:
    """Draw title, bubble and the names of the ranks, with a background, since a page scrolls the rows under them."""
    top = _row_top(panel, place, 0) - _AXIS_HEIGHT
    height = len(panel.rows) * _pitch(panel) + _AXIS_HEIGHT
    yield f'<rect class="paper" y="{top:g}" width="{_LABEL_WIDTH - 4}" height="{height:g}"/>'
    yield f'<text class="title" x="{_MARGIN}" y="{place.top + 22:g}">{escape(panel.title)}</text>'
    yield f'<text class="quiet" x="{_MARGIN}" y="{place.top + 40:g}">bubble {escape(panel.bubble_line)}</text>'
    for index, rank in enumerate(panel.rows):
        y = _row_top(panel, place, index) + _BASELINE
        busy = percent(1.0 - panel.idle_fractions[rank])
        yield f'<text x="{_MARGIN}" y="{y:g}">rank {rank}</text>'
        yield f'<text class="quiet" text-anchor="end" x="{_LABEL_WIDTH - 8}" y="{y:g}">{busy}</text>'


def _legend(panels: Sequence[TerminalPanel], top: float) -> Iterator[str]:
    x = float(_MARGIN)
    for kind in ActionKind:
        if any(kind in panel.kinds for panel in panels):
            yield f'<rect x="{x:g}" y="{top:g}" width="14" height="14" fill="{fill(kind)}"/>'
            yield f'<text x="{x + 19:g}" y="{top + 11:g}">{WORDS[kind]}</text>'
            x += 19 + 7 * len(WORDS[kind]) + 14
    yield f'<rect class="idle" x="{x:g}" y="{top:g}" width="14" height="14"/>'
    shades = "; later stages of a rank are lighter" if any(panel.num_chunks > 1 for panel in panels) else ""
    yield f'<text x="{x + 19:g}" y="{top + 11:g}">idle{shades}</text>'
