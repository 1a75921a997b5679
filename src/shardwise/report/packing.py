"""Pack columns of numbers into short texts for a page: bytes of equal place together, gzip, base64.

Neighbouring numbers differ little, so their high bytes are runs of equal values, which compress to almost nothing.
`assets/decode.js` reads them.

>>> whole = packed("i", [1, 2, 3])
>>> whole["type"], whole["length"]
('i', 3)
"""

from __future__ import annotations

import base64
import gzip
import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Literal

from shardwise.report.palette import fill, ink
from shardwise.report.panel import SYMBOLS, WORDS, TerminalPanel, word_of
from shardwise.schedule import TimedAction

_WIDTH: Final = 4
_NONE: Final = -1
# A timeline is first stored as finely as this many ticks a makespan allow, then more coarsely until it fits.
_FINE_TICKS, _COARSE_TICKS = 2**24, 2**18
# A recorded action takes at least so many characters in fine ticks; without enough of them, these are not tried.
_FINE_CHARS: Final = 3


def packed(kind: Literal["i", "f"], values: Iterable[float]) -> dict[str, Any]:
    """Return integers ("i") or floats ("f") of 32 bits as the page's script reads them."""
    column = array(kind, values)
    if sys.byteorder == "big":
        column.byteswap()
    raw = column.tobytes()
    planes = b"".join(raw[place::_WIDTH] for place in range(_WIDTH))
    return {"type": kind, "length": len(column), "data": base64.b64encode(gzip.compress(planes, 6, mtime=0)).decode()}


def num_chars(value: Any) -> int:
    """Count the characters of the packed columns within a value."""
    if isinstance(value, dict):
        return len(value["data"]) if "data" in value else sum(map(num_chars, value.values()))
    return sum(map(num_chars, value)) if isinstance(value, list | tuple) else 0


@dataclass(frozen=True)
class _Detail:
    """Say how much of a timeline is stored: ticks of its makespan, its thin rows, one of how many ranks."""

    num_ticks: int
    has_streams: bool = True
    every: int = 1


def packed_timeline(panel: TerminalPanel, max_chars: int) -> dict[str, Any]:
    """Return a timeline for the page, as finely as `max_chars` characters allow; it says what was left out.

    Args:
        panel: the timeline; actions that take no time are left out.
        max_chars: characters that its columns may take together.
    """
    details = chain(
        (_Detail(_FINE_TICKS), _Detail(_COARSE_TICKS), _Detail(_COARSE_TICKS, has_streams=False)),
        (_Detail(_COARSE_TICKS, has_streams=False, every=2**power) for power in range(1, 20)),
    )
    for detail in details:
        if detail.num_ticks == _FINE_TICKS and len(panel.actions) * _FINE_CHARS > max_chars:
            continue
        columns = _columns(panel, detail)
        if num_chars(columns) <= max_chars:
            break
    left_out = [] if detail.has_streams else [f"transfers and collectives ({', '.join(panel.streams[1:])})"]
    left_out += [] if detail.every == 1 else [f"all ranks but every {detail.every}th"]
    kept = list(panel.rows)[:: detail.every]
    return {
        "title": panel.title,
        "bubble": panel.bubble_line,
        "makespan_s": panel.makespan_s,
        "num_ticks": detail.num_ticks,
        "num_chunks": panel.num_chunks,
        "streams": panel.streams if detail.has_streams else panel.streams[:1],
        "left_out": left_out,
        "idle": packed("f", (panel.idle_fractions[rank] for rank in kept)),
        "span_idle_s": packed("f", (panel.spans_s[rank][1] for rank in kept)),
        **columns,
    }


def _columns(panel: TerminalPanel, detail: _Detail) -> dict[str, Any]:
    """Return a row for each rank and stream; an action is its gap to the one before it, and its length, in ticks."""
    ticks_per_s = detail.num_ticks / panel.makespan_s if panel.makespan_s > 0 else 0.0
    streams = panel.streams if detail.has_streams else panel.streams[:1]
    groups: dict[str, int] = {}
    kinds: dict[str, int] = {}
    ranks = list(panel.rows)[:: detail.every]
    rows = [
        [each for each in panel.rows[rank] if each.stream == stream and each.duration_s > 0]
        for rank in ranks
        for stream in streams
    ]
    gaps, lengths = array("i"), array("i")
    for row in rows:
        end = 0
        for each in row:
            start = round((each.start_s - panel.start_s) * ticks_per_s)
            gaps.append(start - end)
            end = max(round((each.end_s - panel.start_s) * ticks_per_s), start)
            lengths.append(end - start)
    every: Sequence[TimedAction] = [each for row in rows for each in row]
    # Thousands of timed actions share one action, whose word and group need to be looked up once.
    words = {each: _index(kinds, word_of(each)) for each in {timed.action: None for timed in every}}
    names = {each: _index(groups, each.group) for each in words}
    return {
        "ranks": packed("i", ranks),
        "counts": packed("i", map(len, rows)),
        "gap": packed("i", gaps),
        "long": packed("i", lengths),
        "kind": packed("i", (words[each.action] for each in every)),
        "stage": packed("i", (each.action.stage for each in every)),
        "chunk": packed("i", (panel.chunk(each) for each in every)),
        "micro_batch": packed("i", (_or_none(each.action.micro_batch) for each in every)),
        "group": packed("i", (names[each.action] for each in every)),
        "group_names": list(groups),
        "kinds": [_kind(word, panel) for word in kinds],
    }


def _kind(word: str, panel: TerminalPanel) -> dict[str, Any]:
    """Return what the page says of a kind of action, and its colours, with the ink on them, by chunk."""
    kind = next(kind for kind, name in WORDS.items() if word.startswith(name))
    colours = [fill(kind, chunk, panel.num_chunks) for chunk in range(panel.num_chunks)]
    return {"word": word, "symbol": SYMBOLS.get(kind, ""), "colours": [[each, ink(each)] for each in colours]}


def _or_none(number: int | None) -> int:
    return _NONE if number is None else number


def _index(names: dict[str, int], name: str | None) -> int:
    return _NONE if name is None else names.setdefault(name, len(names))


def buckets(values: Sequence[float], size: int) -> dict[str, Any]:
    """Return the means of each `size` values, and their least and largest where a bucket has several values.

    What is not finite (NaN) is left out of its bucket; a bucket of nothing else is NaN.
    """
    if size == 1:
        return {"mean": packed("f", values)}
    chunks = (values[first : first + size] for first in range(0, len(values), size))
    finite = [[each for each in chunk if math.isfinite(each)] or [math.nan] for chunk in chunks]
    return {
        "mean": packed("f", (sum(chunk) / len(chunk) for chunk in finite)),
        "low": packed("f", map(min, finite)),
        "high": packed("f", map(max, finite)),
    }
