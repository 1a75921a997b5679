"""Define `TerminalPanel`, one timeline of timed actions, and the words, colours and figures that all drawings share.

>>> panel = TerminalPanel("plan", [TimedAction(Action.parse("0F0"), rank=1, start_s=2.0, end_s=3.0, stream="compute")])
>>> panel.start_s, panel.makespan_s, panel.idle_fractions
(2.0, 1.0, {1: 0.0})
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple

from shardwise.schedule import (
    COMPUTATIONS,
    STREAMS,
    Action,
    ActionKind,
    TimedAction,
    bubble_fraction,
    busy_s,
    makespan_s,
    rank_bubble_s,
    rank_span_s,
)

COMPUTE: Final = STREAMS[ActionKind.FORWARD]
# Times are sums of floats: a value that is below a round number by less than this counts as that number.
_ROUNDING = 1 + 1e-9
_ZERO = 1e-9
_MANY = 1e4
_DARK_INK, _LIGHT_INK = "#14181f", "#ffffff"
_LIGHTEST = 0.75
_MID_LUMINANCE = 150


class Look(NamedTuple):
    """Says how drawings show a kind of action: its word, its character in a cell, its colour."""

    word: str
    symbol: str
    colour: str


LOOKS: Final[Mapping[ActionKind, Look]] = MappingProxyType(
    {
        ActionKind.FORWARD: Look("forward", "F", "#2f6fb7"),
        ActionKind.RECOMPUTE: Look("recomputed forward", "R", "#8a6fc8"),
        ActionKind.BACKWARD: Look("backward", "B", "#2b8a5a"),
        ActionKind.BACKWARD_INPUT: Look("input gradient", "I", "#1f9aa0"),
        ActionKind.BACKWARD_WEIGHT: Look("weight gradient", "W", "#d99a1c"),
        ActionKind.SEND: Look("send", "", "#c2557f"),
        ActionKind.RECEIVE: Look("receive", "", "#e59ab8"),
        ActionKind.UNSHARD: Look("unshard", "", "#7d8794"),
        ActionKind.RESHARD: Look("reshard", "", "#b4bcc6"),
        ActionKind.REDUCE: Look("reduce", "", "#5a4a42"),
        ActionKind.FETCH: Look("fetch", "", "#6fae3d"),
        ActionKind.EVICT: Look("evict", "", "#a8772f"),
        ActionKind.STEP: Look("optimizer step", "S", "#c8452e"),
    }
)


@dataclass(frozen=True)
class TerminalPanel:
    """Hold one timeline and its title.

    Args:
        title: a line that says what it shows.
        actions: actions of all its ranks, in any order; their clock may begin anywhere.
        formula_s: the bubble of a closed form, in seconds, shown beside `span_bubble_s`; None where no form holds.
    """

    title: str
    actions: Sequence[TimedAction]
    formula_s: float | None = None

    @cached_property
    def start_s(self) -> float:
        """Return when the first action starts, on the actions' clock, in seconds."""
        return min((timed.start_s for timed in self.actions), default=0.0)

    @cached_property
    def makespan_s(self) -> float:
        """Return the seconds from the first start to the last end."""
        return makespan_s(self.actions)

    @cached_property
    def rows(self) -> dict[int, list[TimedAction]]:
        """Return the actions of each rank in the order of their starts, ranks ascending."""
        rows: dict[int, list[TimedAction]] = {rank: [] for rank in sorted({timed.rank for timed in self.actions})}
        for timed in sorted(self.actions, key=lambda each: (each.start_s, each.end_s)):
            rows[timed.rank].append(timed)
        return rows

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Return the streams in which time is spent: computations first, then those of `STREAMS`, then others."""
        order = list(dict.fromkeys(STREAMS.values()))
        used = {timed.stream for timed in self.actions if timed.duration_s > 0} | {COMPUTE}
        return tuple(sorted(used, key=lambda stream: (order.index(stream) if stream in order else len(order), stream)))

    @cached_property
    def stages(self) -> dict[int, tuple[int, ...]]:
        """Return the stages that each rank computes, in order."""
        return {
            rank: tuple(sorted({timed.action.stage for timed in row if timed.action.kind in COMPUTATIONS}))
            for rank, row in self.rows.items()
        }

    @cached_property
    def num_chunks(self) -> int:
        """Return the most stages that a rank computes; at least 1."""
        return max([1, *map(len, self.stages.values())])

    def chunk(self, timed: TimedAction) -> int:
        """Return the index of an action's stage among its rank's; 0 for a stage on which the rank computes nothing."""
        stages = self.stages[timed.rank]
        return stages.index(timed.action.stage) if timed.action.stage in stages else 0

    @cached_property
    def idle_fractions(self) -> dict[int, float]:
        """Return each rank's bubble: the share of the makespan in which it computes nothing; `bubble` is the mean."""
        busy = dict.fromkeys(self.rows, 0.0) | busy_s(self.actions)
        return {rank: 1.0 - seconds / self.makespan_s if self.makespan_s > 0 else 0.0 for rank, seconds in busy.items()}

    @property
    def bubble(self) -> float:
        """Return the share of the makespan in which a rank computes nothing, a mean over the ranks."""
        return bubble_fraction(self.actions)

    @cached_property
    def spans_s(self) -> dict[int, tuple[float, float]]:
        """Return each rank's seconds from its first computation to its last one's end, and the idle ones of them."""
        return {rank: (rank_span_s(row, rank), rank_bubble_s(row, rank)) for rank, row in self.rows.items()}

    @property
    def bubble_line(self) -> str:
        """Return the line with the bubble of the drawing, and with the formula's where that is known."""
        span_bubble_s = max(self.spans_s.values(), default=(0.0, 0.0))[1]  # of the rank with the longest span
        within, formula = (
            format_tick_s(bubble_s or 0.0, self.makespan_s) for bubble_s in (span_bubble_s, self.formula_s)
        )
        drawn = f"{100 * self.bubble:.1f} % of {format_tick_s(self.makespan_s)}; within a rank's span {within}"
        return drawn if self.formula_s is None else f"{drawn}, by the formula {formula}"


def word_of(action: Action) -> str:
    """Return the word of an action's kind, and what it sends or receives."""
    return LOOKS[action.kind].word + (f" {action.payload.name.lower()}" if action.payload is not None else "")


def describe(action: Action) -> str:
    """Describe an action in words.

    >>> describe(Action(ActionKind.FORWARD, stage=1, micro_batch=2))
    'forward of stage 1, micro-batch 2'
    """
    group = f", {action.group}" if action.group is not None else ""
    micro_batch = f", micro-batch {action.micro_batch}" if action.micro_batch is not None else ""
    return f"{word_of(action)} of stage {action.stage}{group}{micro_batch}"


def fill(kind: ActionKind, chunk: int = 0, num_chunks: int = 1) -> str:
    """Return the colour of an action as `#rrggbb`, lighter for each later stage.

    >>> fill(ActionKind.FORWARD), fill(ActionKind.FORWARD, chunk=1, num_chunks=2)
    ('#2f6fb7', '#97b7db')

    Args:
        chunk: which of its rank's stages it belongs to, from 0.
        num_chunks: the most stages that a rank has.
    """
    white = chunk / num_chunks if num_chunks <= 2 else _LIGHTEST * chunk / (num_chunks - 1)
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02x}" for channel in _channels(LOOKS[kind].colour))


def ink(colour: str) -> str:
    """Return a colour for text that can be read on `colour`."""
    red, green, blue = _channels(colour)
    return _DARK_INK if 0.299 * red + 0.587 * green + 0.114 * blue > _MID_LUMINANCE else _LIGHT_INK


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def typical_s(panel: TerminalPanel) -> float:
    """Return the seconds of a typical short computation, which set the scale of a drawing; without one, the makespan.

    It is the lower quartile: the fastest computation of a recorded run may be an outlier.
    """
    durations = sorted(
        timed.duration_s for timed in panel.actions if timed.action.kind in COMPUTATIONS and timed.duration_s > 0
    )
    return durations[len(durations) // 4] if durations else panel.makespan_s


def format_tick_s(seconds: float, span_s: float | None = None) -> str:
    """Format seconds in the unit that suits `span_s`, by default the unit that suits them.

    >>> format_tick_s(12.0), format_tick_s(0.0125), format_tick_s(0.5, span_s=20.0), format_tick_s(3e-6)
    ('12 s', '12.5 ms', '0.5 s', '3 µs')
    """
    span_s = seconds if span_s is None else span_s
    factor, unit = (1.0, "s") if span_s >= 1.0 or span_s <= 0.0 else (1e3, "ms") if span_s >= 1e-3 else (1e6, "µs")
    # A value far below the span is a zero with rounding errors.
    value = seconds * factor if abs(seconds) > _ZERO * span_s else 0.0
    return f"{value:.0f} {unit}" if value >= _MANY else f"{value:.4g} {unit}"


def ticks(span_s: float, max_num: int) -> list[float]:
    """Return at most `max_num` round times from 0 up to `span_s`: 1, 2 or 5 times a power of ten apart.

    >>> ticks(12.0, 5)
    [0.0, 5.0, 10.0]
    """
    if span_s <= 0.0 or max_num < 2:
        return [0.0]
    exponent = math.floor(math.log10(span_s))
    steps = (factor * 10.0**power for power in range(exponent - 3, exponent + 2) for factor in (1, 2, 5))
    step = next(step for step in steps if int(span_s / step * _ROUNDING) + 1 <= max_num)
    # Through text, so that no tick reads 0.30000000000000004.
    return [float(f"{step * index:.6g}") for index in range(int(span_s / step * _ROUNDING) + 1)]
