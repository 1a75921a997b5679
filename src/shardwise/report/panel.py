"""What is drawn: a `TerminalPanel` of timed actions, and what every drawing says about one, whatever its form.

>>> panel = TerminalPanel("plan", [TimedAction(Action.parse("0F0"), rank=1, start_s=2.0, end_s=3.0, lane="compute")])
>>> panel.start_s, panel.makespan_s, panel.idle_fractions
(2.0, 1.0, {1: 0.0})
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from shardwise.schedule import (
    COMPUTATIONS,
    LANES,
    Action,
    ActionKind,
    TimedAction,
    bubble_fraction,
    makespan_s,
    rank_bubble_s,
    rank_span_s,
)

COMPUTE = LANES[ActionKind.FORWARD]
# Times are sums of floats: what misses the next round number by less than this has reached it.
_ROUNDING = 1 + 1e-9
_ZERO = 1e-9
_MANY = 1e4

LETTERS: Mapping[ActionKind, str] = MappingProxyType(
    {
        ActionKind.FORWARD: "F",
        ActionKind.RECOMPUTE: "R",
        ActionKind.BACKWARD: "B",
        ActionKind.BACKWARD_INPUT: "I",
        ActionKind.BACKWARD_WEIGHT: "W",
        ActionKind.STEP: "S",
    }
)
"""One letter for each kind that a drawing writes into its cells."""

WORDS: Mapping[ActionKind, str] = MappingProxyType(
    {
        ActionKind.FORWARD: "forward",
        ActionKind.RECOMPUTE: "recomputed forward",
        ActionKind.BACKWARD: "backward",
        ActionKind.BACKWARD_INPUT: "input gradient",
        ActionKind.BACKWARD_WEIGHT: "weight gradient",
        ActionKind.SEND: "send",
        ActionKind.RECEIVE: "receive",
        ActionKind.UNSHARD: "unshard",
        ActionKind.RESHARD: "reshard",
        ActionKind.REDUCE: "reduce",
        ActionKind.FETCH: "fetch",
        ActionKind.EVICT: "evict",
        ActionKind.STEP: "optimizer step",
    }
)


@dataclass(frozen=True)
class TerminalPanel:
    """One timeline under its title.

    Args:
        title: a line that says what it is.
        actions: of all its ranks, in any order; their clock may begin anywhere.
        formula_s: the bubble that a closed form gives, in seconds, to be told beside `span_bubble_s`.
    """

    title: str
    actions: Sequence[TimedAction]
    formula_s: float | None = None

    @cached_property
    def start_s(self) -> float:
        """When the first action starts, on the actions' clock."""
        return min((each.start_s for each in self.actions), default=0.0)

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return makespan_s(self.actions)

    @cached_property
    def rows(self) -> dict[int, list[TimedAction]]:
        """The actions of each rank by their starts, ranks in order."""
        rows: dict[int, list[TimedAction]] = {rank: [] for rank in sorted({each.rank for each in self.actions})}
        for each in sorted(self.actions, key=lambda each: (each.start_s, each.end_s)):
            rows[each.rank].append(each)
        return rows

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The lanes in which time is spent, computations first, then as `LANES` has them, then the rest."""
        known = list(dict.fromkeys(LANES.values()))
        used = {each.lane for each in self.actions if each.duration_s > 0} | {COMPUTE}
        return tuple(sorted(used, key=lambda lane: (known.index(lane) if lane in known else len(known), lane)))

    @cached_property
    def kinds(self) -> tuple[ActionKind, ...]:
        """The kinds on which time is spent, in the order of `ActionKind`."""
        used = {each.action.kind for each in self.actions if each.duration_s > 0}
        return tuple(kind for kind in ActionKind if kind in used)

    @cached_property
    def stages(self) -> dict[int, tuple[int, ...]]:
        """The stages that each rank computes, in order."""
        return {
            rank: tuple(sorted({each.action.stage for each in row if each.action.kind in COMPUTATIONS}))
            for rank, row in self.rows.items()
        }

    @cached_property
    def num_chunks(self) -> int:
        """The most stages that a rank computes; at least 1."""
        return max([1, *map(len, self.stages.values())])

    def chunk(self, timed: TimedAction) -> int:
        """Which of its rank's stages an action belongs to; 0 for a stage on which the rank computes nothing."""
        stages = self.stages[timed.rank]
        return stages.index(timed.action.stage) if timed.action.stage in stages else 0

    @cached_property
    def idle_fractions(self) -> dict[int, float]:
        """The bubble of each rank: the share of the makespan in which it computes nothing; their mean is `bubble`."""
        busy_s = dict.fromkeys(self.rows, 0.0)
        for each in self.actions:
            if each.lane == COMPUTE:
                busy_s[each.rank] += each.duration_s
        return {rank: 1.0 - busy / self.makespan_s if self.makespan_s > 0 else 0.0 for rank, busy in busy_s.items()}

    @property
    def bubble(self) -> float:
        """The share of the makespan in which a rank computes nothing, a mean over the ranks."""
        return bubble_fraction(self.actions)

    @cached_property
    def spans_s(self) -> dict[int, tuple[float, float]]:
        """For each rank the seconds from its first computation to its last one's end, and the idle ones of them.

        The second is the bubble of which `shardwise.schedule.formulas` speaks: ranks need not begin and end together.
        """
        return {rank: (rank_span_s(row, rank), rank_bubble_s(row, rank)) for rank, row in self.rows.items()}

    @property
    def span_bubble_s(self) -> float:
        """The idle seconds of the rank with the longest span, within that span."""
        return max(self.spans_s.values(), default=(0.0, 0.0))[1]

    @property
    def bubble_line(self) -> str:
        """The bubble on the drawing, and the formula's where that is known."""
        within, formula = (format_s(each or 0.0, self.makespan_s) for each in (self.span_bubble_s, self.formula_s))
        drawn = f"{percent(self.bubble)} of {format_s(self.makespan_s)}; within a rank's span {within}"
        return drawn if self.formula_s is None else f"{drawn}, by the formula {formula}"


def describe(action: Action) -> str:
    """An action in words.

    >>> describe(Action(ActionKind.FORWARD, stage=1, micro_batch=2))
    'forward of stage 1, micro-batch 2'
    >>> describe(Action.parse("1SEND_F0"))
    'send activation of stage 1, micro-batch 0'
    """
    payload = f" {action.payload.name.lower()}" if action.payload is not None else ""
    group = f", {action.group}" if action.group is not None else ""
    micro_batch = f", micro-batch {action.micro_batch}" if action.micro_batch is not None else ""
    return f"{WORDS[action.kind]}{payload} of stage {action.stage}{group}{micro_batch}"


def typical_s(panel: TerminalPanel) -> float:
    """Seconds of a short but usual computation, by which a drawing chooses its scale; without one, the makespan.

    The lower quartile: the fastest of a recorded run may be a stray.
    """
    durations = sorted(
        each.duration_s for each in panel.actions if each.action.kind in COMPUTATIONS and each.duration_s > 0
    )
    return durations[len(durations) // 4] if durations else panel.makespan_s


def percent(fraction: float) -> str:
    """A share, with one digit behind the point.

    >>> percent(0.2727)
    '27.3 %'
    """
    return f"{100 * fraction:.1f} %"


def format_s(seconds: float, span_s: float | None = None) -> str:
    """Seconds in the unit that suits `span_s`, by default their own.

    >>> format_s(12.0), format_s(0.0125), format_s(0.5, span_s=20.0), format_s(3e-6)
    ('12 s', '12.5 ms', '0.5 s', '3 µs')
    """
    span_s = seconds if span_s is None else span_s
    factor, unit = (1.0, "s") if span_s >= 1.0 or span_s <= 0.0 else (1e3, "ms") if span_s >= 1e-3 else (1e6, "µs")
    # What is far below the span is the rounding of a zero.
    value = seconds * factor if abs(seconds) > _ZERO * span_s else 0.0
    return f"{value:.0f} {unit}" if value >= _MANY else f"{value:.4g} {unit}"


def ticks(span_s: float, max_num: int) -> list[float]:
    """At most `max_num` round times from 0 up to `span_s`: 1, 2 or 5 times a power of ten apart.

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
