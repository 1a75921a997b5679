"""Draw a place in a schedule: ranks down, time slots across, an arrow at the place.

Each action takes one slot, as soon as the one before it in its row and all it waits for have had theirs. A RECEIVE
only posts, so it waits for nothing; the computation that uses it waits for the SEND. Actions that cannot run are in
parentheses at the end of their row. Where the schedule is large, only a window around the place is drawn.

>>> from shardwise.schedule.actions import Schedule
>>> from shardwise.schedule.dependencies import dependencies
>>> schedule = Schedule.parse("rank 0: 0F0 0F1 0B0 0B1\\nrank 1: 1F0 1B0 1F1 1B1")
>>> print(*drawn(schedule, ((1, 2),), dependencies(schedule)), sep="\\n")
slot     0    1    2    3    4    5
rank 0  0F0  0F1   .   0B0   .   0B1
rank 1   .   1F0  1B0  1F1  1B1   .
                       ^^^ action 2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.schedule.actions import Action, ActionKind, Schedule
from shardwise.schedule.dependencies import Follows, Position, execution_order

MAX_WIDTH = 100  # characters of a drawn line, without the notes after its end
_MAX_ROWS = 16
_NUM_NEIGHBOURS = 2  # rows drawn to each side of an arrow where there are more
_MAX_WINDOWS = 2
_GAP = "  "


def drawn(schedule: Schedule, places: Sequence[Position], follows: Follows) -> list[str]:
    """Return the lines of a grid with an arrow at each of the places that fit; no lines for no places.

    Args:
        places: the first decides what is drawn.
    """
    grid = _ScheduleGrid.of(schedule, follows)
    lines: list[str] = []
    waiting = list(places)
    for _ in range(_MAX_WINDOWS):
        if waiting:
            window = grid.window(waiting)
            lines += [""] * bool(lines) + list(grid.lines(window, waiting))
            waiting = [position for position in waiting if not window.shows(position, grid.slot_of[position])]
    return lines


@dataclass(frozen=True)
class _GridWindow:
    """Hold the rows to draw, and the slots with their widths."""

    rows: Sequence[int]
    widths: Mapping[int, int]

    def shows(self, place: Position, slot: int) -> bool:
        return place[0] in self.rows and slot in self.widths


@dataclass(frozen=True)
class _ScheduleGrid:
    """Hold the slot of each action, and by rank and slot the index and the text of the action there."""

    slot_of: Mapping[Position, int]
    cells: Sequence[Mapping[int, tuple[int, str]]]

    @classmethod
    def of(cls, schedule: Schedule, follows: Follows) -> _ScheduleGrid:
        waits_for = _waits(schedule, follows)
        order, blocked = execution_order(schedule, waits_for)
        slot_of: dict[Position, int] = {}
        for meeting in order:
            slot = 1 + max((slot_of[before] for member in meeting for before in waits_for[member]), default=-1)
            slot_of.update(dict.fromkeys(meeting, slot))
        cells: list[dict[int, tuple[int, str]]] = []
        for rank, row in enumerate(schedule.ranks):
            cells.append({})
            for index, action in enumerate(row):
                position = rank, index
                slot_of.setdefault(position, 1 + slot_of.get((rank, index - 1), -1))
                cells[-1][slot_of[position]] = index, f"({action})" if position in blocked else str(action)
        return cls(slot_of, cells)

    def window(self, places: Sequence[Position]) -> _GridWindow:
        """Return the rows and slots around the first place, with the other places' rows where they fit."""
        rows = _rows(len(self.cells), places)
        slot = self.slot_of[places[0]]
        budget = MAX_WIDTH - len(_label(max(rows))) - 2 * len(_GAP + "...")
        widths = {slot: self._width(rows, slot)}
        num_slots = 1 + max(self.slot_of.values())
        for distance in range(1, num_slots):
            for neighbour in (slot - distance, slot + distance):
                width = self._width(rows, neighbour)
                if sum(widths.values()) + len(_GAP) * (len(widths) + 1) + width > budget:
                    return _GridWindow(rows, dict(sorted(widths.items())))
                if width:
                    widths[neighbour] = width
        return _GridWindow(rows, dict(sorted(widths.items())))

    def _width(self, rows: Sequence[int], slot: int) -> int:
        """Return the width of a slot's column; 0 where no action of these rows is in it."""
        width = max((len(self.cells[rank][slot][1]) for rank in rows if slot in self.cells[rank]), default=0)
        return max(width, len(str(slot))) if width else 0

    def lines(self, window: _GridWindow, places: Sequence[Position]) -> Iterator[str]:
        """Yield the slots' numbers, then each row, with a line of arrows under it where it has a place."""
        size = len(_label(max(window.rows)))
        begins = _GAP + ("..." + _GAP) * (min(window.widths) > 0)
        head = _GAP.join(str(slot).center(width) for slot, width in window.widths.items()).rstrip()
        texts = (self._text(rank, slot) for rank in window.rows for slot in window.widths)
        note = f"{_GAP}( ) cannot run" if any(text.startswith("(") for text in texts) else ""
        yield "slot".ljust(size) + " " * len(begins) + head + note
        previous = -1
        for rank in window.rows:
            if rank != previous + 1:
                yield "..."
            previous = rank
            yield from self._row(_label(rank).ljust(size) + begins, rank, window, places)
        if previous + 1 < len(self.cells):
            yield "..."

    def _row(self, line: str, rank: int, window: _GridWindow, places: Sequence[Position]) -> Iterator[str]:
        carets, indices = "", []
        for slot, width in window.widths.items():
            text = self._text(rank, slot)
            cell = text.center(width)
            index, _ = self.cells[rank].get(slot, (None, ""))
            if (rank, index) in places:
                name = text.strip("()")
                carets = carets.ljust(len(line) + cell.index(name)) + "^" * len(name)
                indices.append(f"action {index}")
            line += cell + _GAP
        goes_on = max(window.widths) < max(self.cells[rank], default=-1)
        yield line + "..." if goes_on else line.rstrip()
        if carets:
            yield f"{carets} {', '.join(indices)}"

    def _text(self, rank: int, slot: int) -> str:
        return self.cells[rank].get(slot, (None, "."))[1]


def _label(rank: int) -> str:
    return f"rank {rank}"


def _rows(num_ranks: int, places: Sequence[Position]) -> list[int]:
    if num_ranks <= _MAX_ROWS:
        return list(range(num_ranks))
    rows: set[int] = set()
    for rank, _ in places:
        near = range(max(0, rank - _NUM_NEIGHBOURS), min(num_ranks, rank + _NUM_NEIGHBOURS + 1))
        if len(rows | set(near)) <= _MAX_ROWS:
            rows |= set(near)
    return sorted(rows)


def _waits(schedule: Schedule, follows: Follows) -> dict[Position, tuple[Position, ...]]:
    """Return what each action waits for: rows run in order, and what follows a RECEIVE waits for its SEND."""
    waits: dict[Position, tuple[Position, ...]] = {}
    for position, before in follows.items():
        rank, index = position
        row: Sequence[Action] = schedule.ranks[rank]
        needed = {(rank, index - 1)} if index else set()
        if row[index].kind is not ActionKind.RECEIVE:
            for other in before:
                if schedule.ranks[other[0]][other[1]].kind is ActionKind.RECEIVE:
                    needed.update(before_it for before_it in follows[other] if before_it[0] != other[0])
                needed.add(other)
        waits[position] = tuple(needed)
    return waits
