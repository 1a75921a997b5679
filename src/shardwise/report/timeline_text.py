"""Draw timelines for the terminal: a row a rank, time along the columns, a dot where the rank computes nothing.

Each column shows what fills most of it. A long timeline is first wrapped into a few bands, then scaled down. Only
computations are drawn; the page and the trace show transfers and collectives too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from rich.style import Style
from rich.text import Text

from shardwise.report.panel import COMPUTE, LOOKS, TerminalPanel, fill, format_tick_s, ink, ticks, typical_s
from shardwise.schedule import TimedAction

IDLE = "·"
_MAX_BANDS = 4
_MAX_CELL_COLUMNS = 6
_MIN_COLUMNS = 20
_TICK_COLUMNS = 9
_FUZZ = 1e-6
_DIM: Final = "dim"


@dataclass(frozen=True)
class _TextGrid:
    """Say how time maps to columns: columns a second, columns of a band, and columns of the label before it."""

    columns_per_s: float
    band_columns: int
    label_columns: int


def draw(panels: Sequence[TerminalPanel], width: int = 100) -> Text:
    """Draw timelines under each other, each with its bubble, and one legend."""
    label_columns = max(len(_label(panel, rank)) for panel in panels for rank in panel.rows or (0,))
    num_columns = max(_MIN_COLUMNS, width - label_columns)
    scale = min(_columns_per_s(panel, num_columns) for panel in panels)
    text = Text()
    for panel in panels:
        cell = round(scale * typical_s(panel))
        band_columns = num_columns - num_columns % cell if cell > 1 else num_columns
        _add_panel(text, panel, _TextGrid(scale, band_columns, label_columns))
    _add_legend(text, panels)
    return text


def _columns_per_s(panel: TerminalPanel, num_columns: int) -> float:
    """Return the scale: a typical cell is as wide as its label, or narrower where that takes too many bands."""
    if panel.makespan_s <= 0.0:
        return 1.0
    usual_s = typical_s(panel)
    num_cells = panel.makespan_s / usual_s
    label_columns = max((len(_names(panel, timed)[0]) for timed in panel.actions if timed.stream == COMPUTE), default=1)
    if panel.num_chunks > 1:
        label_columns += 1  # 0F10F2 cannot be read
    fitting = min(_MAX_CELL_COLUMNS, int(num_columns / num_cells + _FUZZ))
    if fitting >= label_columns:
        return fitting / usual_s
    for cell_columns in range(label_columns, 0, -1):
        if num_cells * cell_columns <= _MAX_BANDS * (num_columns - num_columns % cell_columns):
            return cell_columns / usual_s
    return _MAX_BANDS * num_columns / panel.makespan_s


def _add_panel(text: Text, panel: TerminalPanel, grid: _TextGrid) -> None:
    text.append(f"{panel.title}\n", Style(bold=True))
    num_columns = math.ceil(panel.makespan_s * grid.columns_per_s - _FUZZ)
    cells = {rank: _cells(panel, row, num_columns, grid.columns_per_s) for rank, row in panel.rows.items()}
    for first in range(0, num_columns, grid.band_columns):
        text.append(" " * grid.label_columns + _axis(panel, grid, first, num_columns) + "\n", _DIM)
        for rank in panel.rows:
            text.append(_label(panel, rank).ljust(grid.label_columns))
            _add_cells(text, panel, cells[rank][first : first + grid.band_columns])
            text.append("\n")
    text.append("bubble".ljust(grid.label_columns) + panel.bubble_line + "\n\n")


def _label(panel: TerminalPanel, rank: int) -> str:
    digits = len(str(max(panel.rows, default=0)))
    return f"rank {rank:>{digits}} {1.0 - panel.idle_fractions.get(rank, 1.0):>4.0%}  ".replace("%", " %")


def _axis(panel: TerminalPanel, grid: _TextGrid, first: int, num_columns: int) -> str:
    """Return the line of times above a band; each is where its column begins."""
    line = [" "] * (grid.band_columns + _TICK_COLUMNS)
    end = min(first + grid.band_columns, num_columns)
    max_num = max(2, int(panel.makespan_s * grid.columns_per_s / _TICK_COLUMNS))
    for tick_s in ticks(panel.makespan_s, max_num):
        column = round(tick_s * grid.columns_per_s)
        label = format_tick_s(tick_s, panel.makespan_s)
        if first <= column < end and column - first + len(label) <= grid.band_columns:
            line[column - first : column - first + len(label)] = label
    return "".join(line).rstrip()


def _cells(
    panel: TerminalPanel, row: Sequence[TimedAction], num_columns: int, columns_per_s: float
) -> list[TimedAction | None]:
    """Return for each column the action that fills most of it, or None where less than half of it is filled."""
    filled = [0.0] * num_columns
    largest: list[tuple[float, TimedAction | None]] = [(0.0, None)] * num_columns
    for timed in row:
        start, end = ((time_s - panel.start_s) * columns_per_s for time_s in (timed.start_s, timed.end_s))
        if timed.stream != COMPUTE:
            continue
        for column in range(int(start), min(num_columns, math.ceil(end))):
            share = min(end, column + 1) - max(start, column)
            filled[column] += share
            if share > largest[column][0] + _FUZZ:
                largest[column] = (share, timed)
    return [timed if fill >= 0.5 - _FUZZ else None for fill, (_, timed) in zip(filled, largest, strict=True)]


def _add_cells(text: Text, panel: TerminalPanel, columns: Sequence[TimedAction | None]) -> None:
    for timed, run in groupby(columns):
        length = len(list(run))
        if timed is None:
            text.append(IDLE * length, _DIM)
        else:
            name = next((name for name in _names(panel, timed) if len(name) <= length), "")
            colour = fill(timed.action.kind, panel.chunk(timed), panel.num_chunks)
            text.append(name.ljust(length), Style(color=ink(colour), bgcolor=colour))


def _names(panel: TerminalPanel, timed: TimedAction) -> tuple[str, ...]:
    """Return the texts that may be written into a cell, the longest first."""
    symbol = LOOKS[timed.action.kind].symbol
    number = "" if timed.action.micro_batch is None else str(timed.action.micro_batch)
    stage = str(timed.action.stage) if panel.num_chunks > 1 and number else ""
    return f"{stage}{symbol}{number}", f"{symbol}{number}", symbol


def _add_legend(text: Text, panels: Sequence[TerminalPanel]) -> None:
    used = {timed.action.kind for panel in panels for timed in panel.actions if timed.duration_s > 0}
    for kind, (word, symbol, colour) in LOOKS.items():
        if symbol and kind in used:
            text.append(f" {symbol} ", Style(color=ink(colour), bgcolor=colour))
            text.append(f" {word}   ")
    text.append(f" {IDLE} ", _DIM)
    text.append(" idle\n")
    if any(panel.num_chunks > 1 for panel in panels):
        text.append("2F0 is the forward of micro-batch 0 on stage 2; a rank's later stages are lighter\n", _DIM)
    else:
        text.append("F0 is the forward of micro-batch 0\n", _DIM)
