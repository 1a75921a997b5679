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
from typing import Any, Final, Literal

from shardwise.report.panel import LOOKS, TerminalPanel, fill, ink, word_of
from shardwise.schedule import TimedAction

_WIDTH: Final = 4
_NONE: Final = -1
_NUM_TICKS: Final = 2**20
"""So finely are the times of a makespan stored."""


def packed(kind: Literal["i", "f"], values: Iterable[float]) -> dict[str, Any]:
    """Return integers ("i") or floats ("f") of 32 bits as the page's script reads them."""
    column = array(kind, values)
    if sys.byteorder == "big":
        column.byteswap()
    raw = column.tobytes()
    planes = b"".join(raw[byte::_WIDTH] for byte in range(_WIDTH))
    return {"type": kind, "length": len(column), "data": base64.b64encode(gzip.compress(planes, 6, mtime=0)).decode()}


def num_chars(value: Any) -> int:
    """Count the characters of the packed columns within a value."""
    if isinstance(value, dict):
        return len(value["data"]) if "data" in value else sum(map(num_chars, value.values()))
    return sum(map(num_chars, value)) if isinstance(value, list | tuple) else 0


def packed_timeline(panel: TerminalPanel, max_chars: int) -> dict[str, Any]:
    """Return a timeline for the page, with as much as `max_chars` characters allow; it says what was left out."""
    for streams, every in [(panel.streams, 1), *((panel.streams[:1], 2**power) for power in range(20))]:
        ranks = list(panel.rows)[::every]
        columns = _columns(panel, ranks, streams)
        if num_chars(columns) <= max_chars:
            break
    dropped = panel.streams[len(streams) :]
    left_out = [f"transfers and collectives ({', '.join(dropped)})"] if dropped else []
    left_out += [] if every == 1 else [f"all ranks but every {every}th"]
    return {
        "title": panel.title,
        "bubble": panel.bubble_line,
        "makespan_s": panel.makespan_s,
        "num_ticks": _NUM_TICKS,
        "num_chunks": panel.num_chunks,
        "streams": streams,
        "left_out": left_out,
        "idle": packed("f", (panel.idle_fractions[rank] for rank in ranks)),
        "span_idle_s": packed("f", (panel.spans_s[rank][1] for rank in ranks)),
        **columns,
    }


def _columns(panel: TerminalPanel, ranks: Sequence[int], streams: Sequence[str]) -> dict[str, Any]:
    """Return a row for each rank and stream; an action is its gap to the one before it, and its length, in ticks."""
    ticks_per_s = _NUM_TICKS / panel.makespan_s if panel.makespan_s > 0 else 0.0
    rows = [
        [timed for timed in panel.rows[rank] if timed.stream == stream and timed.duration_s > 0]
        for rank in ranks
        for stream in streams
    ]
    gaps, lengths = array("i"), array("i")
    for row in rows:
        end = 0
        for span in row:
            start = round((span.start_s - panel.start_s) * ticks_per_s)
            gaps.append(start - end)
            end = max(round((span.end_s - panel.start_s) * ticks_per_s), start)
            lengths.append(end - start)
    every: Sequence[TimedAction] = [timed for row in rows for timed in row]
    # Thousands of timed actions share one action, whose word and group need to be looked up once.
    actions = list(dict.fromkeys(timed.action for timed in every))
    groups: dict[str, int] = {}
    kinds: dict[str, int] = {}
    kind_of = {action: kinds.setdefault(word_of(action), len(kinds)) for action in actions}
    names = {
        action: _NONE if action.group is None else groups.setdefault(action.group, len(groups)) for action in actions
    }
    looks = {word_of(action): LOOKS[action.kind] for action in actions}
    fills = {
        word_of(action): [fill(action.kind, at, panel.num_chunks) for at in range(panel.num_chunks)]
        for action in actions
    }
    numbers = (timed.action.micro_batch for timed in every)
    return {
        "ranks": packed("i", ranks),
        "counts": packed("i", map(len, rows)),
        "gap": packed("i", gaps),
        "long": packed("i", lengths),
        "kind": packed("i", (kind_of[timed.action] for timed in every)),
        "stage": packed("i", (timed.action.stage for timed in every)),
        "chunk": packed("i", (panel.chunk(timed) for timed in every)),
        "micro_batch": packed("i", (_NONE if number is None else number for number in numbers)),
        "group": packed("i", (names[timed.action] for timed in every)),
        "group_names": list(groups),
        "kinds": [
            {"word": word, "symbol": looks[word].symbol, "colours": [[colour, ink(colour)] for colour in fills[word]]}
            for word in kinds
        ],
    }


def buckets(values: Sequence[float], size: int) -> dict[str, Any]:
    """Return the means of each `size` values, and their least and largest where a bucket has several values.

    What is not finite (NaN) is left out of its bucket; a bucket of nothing else is NaN.
    """
    if size == 1:
        return {"mean": packed("f", values)}
    chunks = (values[first : first + size] for first in range(0, len(values), size))
    finite = [[value for value in chunk if math.isfinite(value)] or [math.nan] for chunk in chunks]
    return {
        "mean": packed("f", (sum(chunk) / len(chunk) for chunk in finite)),
        "low": packed("f", map(min, finite)),
        "high": packed("f", map(max, finite)),
    }
