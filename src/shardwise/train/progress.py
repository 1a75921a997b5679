"""Shows a run while it trains: a frozen state, its picture, and the live display that draws it.

The picture is a pure function of the state and a size. Speed and the loss curve are smoothed, and say so.

>>> header = Header(model="tiny, 6.0 M parameters", layout="ZeRO-2 over 2 ranks", batch="8 samples", data="a text")
>>> record = StepRecord(step=1, loss=8.3, count=4096, grad_norm=2.0, lr=1e-4, skipped=False, step_s=0.5,
...                     tokens_per_s=8192.0, memory_bytes={})
>>> state = Progress(header, total_steps=400).after_step(record)
>>> plain_line(state)
'step 1/400  loss 8.3000  lr 1.00e-04  grad norm 2.00  tokens/s 8,192 (smoothed)  eta 3:20'
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from types import MappingProxyType
from typing import Final, Self

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.planner.render import bar_of
from shardwise.planner.results import MEMORY_PARTS, Marks, MemoryPart, parts_of
from shardwise.report.console import Escaped
from shardwise.runtime.format import format_bytes, format_clock
from shardwise.runtime.memory_tracker import Category
from shardwise.train.metrics import WORDS, StepRecord
from shardwise.train.rank_watch import RanksMemory, SlowStep

CURVE_POINTS = 240
_SMOOTHING = 0.9
_PAIRED = 70
_MAX_WIDTH = 140
_LABEL_WIDTH = 13
_MIN_ROWS, _MAX_ROWS = 3, 10
_NUM_PLAIN_LINES = 20
_REFRESH_S = 0.25
# The colours of `shardwise plan` for the same things.
_MARKS: Final[Marks] = MappingProxyType(
    {category.value: MEMORY_PARTS[parts_of(category)[0]] for category in Category}
    | {Category.OTHER.value: MemoryPart("x", "white")}
)

Point = tuple[int, float]


@dataclass(frozen=True)
class Header:
    """Holds the lines that do not change during a run; empty ones are left out."""

    model: str
    layout: str
    tiers: str = ""
    batch: str = ""
    data: str = ""
    resumed: str = ""


@dataclass(frozen=True)
class Progress:
    """Holds the state of a run after some step.

    Attributes:
        step: the last step taken; `first_step` where this run has taken none.
        first_step: how many steps were taken before this run.
        loss: the last step's loss, as it is recorded.
        trend: the loss smoothed over about ten steps.
        losses: steps, and the trend after each; at even intervals, about CURVE_POINTS at most.
        eval_loss: the last step after which held-out data were evaluated, and their loss.
        tokens_per_s: tokens a second of all ranks together, smoothed.
        mfu: share of the devices' peak FLOP/s at that speed; None where that is not known.
        memory: of all ranks at their peaks; None before it was measured.
        slow: the last step that took long; None where there was none.
        num_tokens: that this run has taken, and that counted.
        activity: the work in progress that is not a step; empty during steps.
        values: the last numbers of the script's own.
    """

    header: Header
    total_steps: int
    step: int = 0
    first_step: int = 0
    loss: float = math.nan
    trend: float = math.nan
    losses: tuple[Point, ...] = ()
    eval_loss: Point | None = None
    lr: float = 0.0
    grad_norm: float = math.nan
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float | None = None
    memory: RanksMemory | None = None
    slow: SlowStep | None = None
    num_tokens: float = 0.0
    elapsed_s: float = 0.0
    activity: str = ""
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_taken(self) -> int:
        """Return how many steps this run has taken."""
        return self.step - self.first_step

    @property
    def eta_s(self) -> float:
        """Return the seconds that the remaining steps take at the present rate."""
        return (self.total_steps - self.step) * self.step_s

    @property
    def mean_tokens_per_s(self) -> float:
        """Return the tokens a second over all steps of this run."""
        return self.num_tokens / self.elapsed_s if self.elapsed_s else 0.0

    def after_step(self, record: StepRecord) -> Self:
        """Return the state after one more step."""
        number = record.step - self.first_step
        # A loss that an fp16 overflow left infinite would stay in the average for ever.
        trend = _smoothed(self.trend, record.loss, number) if math.isfinite(record.loss) else self.trend
        stride = 1 << max(0, math.ceil(math.log2(number / CURVE_POINTS)))
        shown = (loss for loss in self.losses if (loss[0] - self.first_step - 1) % stride == 0)
        return replace(
            self,
            step=record.step,
            loss=record.loss,
            trend=trend,
            losses=(*shown, (record.step, trend)),
            eval_loss=self.eval_loss if record.eval_loss is None else (record.step, record.eval_loss),
            lr=record.lr,
            grad_norm=record.grad_norm,
            step_s=_smoothed(self.step_s, record.step_s, number),
            tokens_per_s=_smoothed(self.tokens_per_s, record.tokens_per_s, number),
            num_tokens=self.num_tokens + record.count,
            elapsed_s=self.elapsed_s + record.step_s,
            activity="",
            values={**self.values, **(record.values or {})},
        )


def _smoothed(average: float, value: float, number: int) -> float:
    """Return an average over about ten values, over fewer at the start; `value` is the `number`-th one, from 1."""
    weight = min(_SMOOTHING, 1.0 - 1.0 / number)
    return value if weight == 0.0 or math.isnan(average) else weight * average + (1.0 - weight) * value


def render(state: Progress, width: int, height: int = 24, *, is_coloured: bool = True) -> RenderableType:
    """Draw a state.

    Args:
        height: lines there are; a higher terminal has a higher curve.
    """
    width = min(width, _MAX_WIDTH) - 2
    header = labelled()
    for label, value in _header_rows(state.header):
        header.add_row(label, Text(value, style="bold" if label == "model" else ""))
    top: list[RenderableType] = [header, "", _bar_line(state, width), "", _figures(state, width), ""]
    memory = _memory(state, width, is_coloured)
    num_lines = len(Console(width=width, file=io.StringIO()).render_lines(Group(*top, memory), pad=False))
    # The cursor needs a line, and so do the curve's title and its steps.
    rows = min(_MAX_ROWS, height - num_lines - 3)
    lines = curve(state.losses, width, rows) if state.num_taken > 1 and rows >= _MIN_ROWS else []
    title = [Text(f"{WORDS['loss']}, smoothed over about 10 steps", style="dim")] if lines else []
    return Padding(Group(*top, *title, *lines, memory), (0, 1), expand=False)


def labelled() -> Table:
    """Return an empty table of labels and values; all such tables line up."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", width=_LABEL_WIDTH)
    return grid


def _header_rows(header: Header) -> Iterator[tuple[str, str]]:
    labels = ("model", "layout", "at rest", "batch", "data", "resumed")
    return ((label, value) for label, value in zip(labels, astuple(header), strict=True) if value)


def _bar_line(state: Progress, width: int) -> Text:
    left = f"step {state.step}/{state.total_steps} "
    times = (
        f"{format_clock(state.elapsed_s)} gone, {format_clock(state.eta_s)} to go" if state.num_taken else "starting"
    )
    right = f" {state.activity or times}"
    bar = max(10, width - len(left) - len(right))
    done = bar * state.step // max(1, state.total_steps)
    return Text.assemble((left, "bold"), ("━" * done, "cyan"), ("─" * (bar - done), "bright_black"), right)


def _figures(state: Progress, width: int) -> RenderableType:
    """Show the numbers, two in a line where there is space, and the last slow step."""
    cells = [(WORDS[name], value if state.num_taken else Text()) for name, value in _numbers(state)]
    grid = labelled()
    if width < _PAIRED:
        for label, value in cells:
            grid.add_row(label, value)
    else:
        grid.add_column(width=19)
        grid.add_column(style="dim", width=_LABEL_WIDTH)
        for left, right in zip(cells[::2], cells[1::2], strict=True):
            grid.add_row(*left, *right)
    others = labelled()
    for name, number in state.values.items():
        others.add_row(name, f"{number:.4f}")
    if state.slow is not None:
        others.add_row(WORDS["slow"], Text(str(state.slow), style="yellow"))
    return Group(grid, others) if others.rows else grid


def _numbers(state: Progress) -> Iterator[tuple[str, Text]]:
    """Yield the names and values of the last step's numbers, an even number of them."""
    yield "loss", Text(f"{state.loss:.4f}", style="bold")
    yield "eval_loss", Text("{1:.4f}, step {0}".format(*state.eval_loss) if state.eval_loss else "not yet evaluated")
    yield "lr", Text(f"{state.lr:.2e}")
    yield "grad_norm", Text(f"{state.grad_norm:.2f}")
    yield "tokens_per_s", Text(f"{state.tokens_per_s:,.0f}, smoothed")
    yield "mfu", Text("not known: no peak FLOP/s" if state.mfu is None else f"{state.mfu:.0%}, smoothed")


def curve(points: Sequence[Point], width: int, height: int) -> list[Text]:
    """Draw a curve in blocks, with its largest and least value at the left and its first and last step under it.

    >>> for line in curve([(1, 8.0), (50, 4.0), (100, 2.0)], width=30, height=3):
    ...     print(line.plain)
    8.00 ┤█▇▅▄▃▁
         │███████▇▅▄▃▁
    2.00 ┤██████████████▇▆▆▅▄▄▃▂▂▁
         └ step 1 ──────────── 100

    Args:
        points: steps, rising, and values; those that are not finite are left out.
        height: of the curve alone, in lines.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite or height < 2:
        return []
    steps, values = zip(*finite, strict=True)
    low, span = min(values), max(max(values) - min(values), 1e-3 * abs(max(values)) + 1e-9)
    digits = min(6, max(2, 1 + math.ceil(-math.log10(span))))
    labels = {0: f"{max(values):.{digits}f}", height - 1: f"{low:.{digits}f}"}
    left = max(map(len, labels.values()))
    num_columns = max(4, width - left - 2)
    shares = (np.interp(np.linspace(steps[0], steps[-1], num_columns), steps, values) - low) / span
    eighths = 1 + np.rint(shares * (8 * height - 1)).astype(int)
    lines = []
    for row in range(height):
        cells = "".join(" ▁▂▃▄▅▆▇█"[eighth] for eighth in np.clip(eighths - 8 * (height - 1 - row), 0, 8))
        axis = f"{labels.get(row, ''):>{left}} {'┤' if row in labels else '│'}"
        lines.append(Text.assemble((axis, "dim"), (cells.rstrip(), "cyan")))
    ends = f" step {steps[0]} ", f" {steps[-1]}"
    rule = "─" * max(1, num_columns - len(ends[0]) - len(ends[1]))
    return [*lines, Text(f"{'':>{left}} └{ends[0]}{rule}{ends[1]}", style="dim")]


def _memory(state: Progress, width: int, is_coloured: bool) -> Table:
    """Show how near the fullest rank is to the end of its memory, and what fills it."""
    grid, memory = labelled(), state.memory
    if memory is None:
        grid.add_row(WORDS["peak_bytes"], Text("measured in the first steps", style="dim"))
        return grid
    sizes = {name: size for name, size in memory.ranks[memory.fullest].items() if size}
    whole_bytes = memory.total_bytes(memory.fullest)
    text = Text(format_bytes(whole_bytes), style="bold")
    if memory.share is not None and memory.limit_bytes is not None:
        style = "bold red" if memory.share > 0.95 else "bold yellow" if memory.share > 0.85 else ""
        text.append(f" of {format_bytes(memory.limit_bytes)} ({memory.share:.0%})", style=style)
    num_ranks = len(memory.ranks)
    text.append(f", step {memory.step}" + (f", rank {memory.fullest} of {num_ranks}" if num_ranks > 1 else ""))
    bar_width = max(8, width - _LABEL_WIDTH - 2)
    grid.add_row(WORDS["peak_bytes"], text)
    grid.add_row("", bar_of(sizes, _MARKS, memory.limit_bytes or whole_bytes, bar_width, is_coloured=is_coloured))
    line = Text()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        sign, colour, _ = _MARKS[name]
        item = Text.assemble(("■" if is_coloured else sign, colour), f" {name} {format_bytes(sizes[name])}")
        if line and len(line) + 2 + len(item) > bar_width:  # lines break between items only
            grid.add_row("", line)
            line = Text()
        line = Text("  ").join([line, item]) if line else item
    grid.add_row("", line)
    return grid


def plain_line(state: Progress) -> str:
    """Write the state as a line of ASCII, for logs and pipes."""
    parts = [
        f"step {state.step}/{state.total_steps}",
        f"loss {state.loss:.4f}",
        f"lr {state.lr:.2e}",
        f"grad norm {state.grad_norm:.2f}",
        f"{WORDS['tokens_per_s']} {state.tokens_per_s:,.0f} (smoothed)",
    ]
    if state.eval_loss is not None and state.eval_loss[0] == state.step:
        parts.insert(2, f"{WORDS['eval_loss']} {state.eval_loss[1]:.4f}")
    if state.mfu is not None:
        parts.append(f"{WORDS['mfu']} {state.mfu:.0%}")
    parts += [f"{name} {value:.4f}" for name, value in state.values.items()]
    if (memory := state.memory) is not None:
        share = "" if memory.share is None else f" ({memory.share:.0%})"
        parts.append(f"{WORDS['peak_bytes']} {format_bytes(memory.total_bytes(memory.fullest))}{share}")
    return "  ".join([*parts, f"eta {format_clock(state.eta_s)}"])


class Display:
    """Shows states: drawn in place on a terminal, else as a plain line now and then.

    Each picture is one write over the picture before, so it neither flickers nor scrolls, and a rank that is killed
    leaves the cursor visible, which rich's Live hides. Do not call `show` after something else has written to the
    terminal.
    """

    def __init__(self, console: Console, state: Progress) -> None:
        self._console = console
        self._is_plain = not console.is_terminal or console.is_dumb_terminal or console.options.ascii_only
        self._state = state
        self._drawn_size: tuple[int, int] | None = None
        self._num_drawn_lines = 0
        self._drawn_at_s = -math.inf
        if not self._is_plain:
            self._draw()
            return
        for label, value in _header_rows(state.header):
            say(
                self._console,
                f"{label}: {value}" if label == "at rest" else f"{label} {value}" if label == "resumed" else value,
            )

    def show(self, state: Progress) -> None:
        """Show a state; the terminal is redrawn at most four times a second, and always after the last step."""
        self._state = state
        is_last = state.step == state.total_steps
        if not self._is_plain:
            if state.activity or is_last or time.monotonic() - self._drawn_at_s >= _REFRESH_S:
                self._draw()
            return
        if state.activity:
            say(self._console, state.activity)
            return
        if is_last or state.num_taken == 1 or state.step % max(1, state.total_steps // _NUM_PLAIN_LINES) == 0:
            say(self._console, plain_line(state))
        if state.slow is not None and state.slow.step == state.step:
            say(self._console, str(state.slow))

    def note(self, line: str) -> None:
        """Print a line that stays; on a terminal above the picture, which is drawn again below it."""
        if self._is_plain:
            say(self._console, line)
            return
        self._console.file.write(f"\x1b[{self._num_drawn_lines}F\x1b[J" if self._num_drawn_lines else "")
        say(self._console, line)
        self._num_drawn_lines, self._drawn_size = 0, None
        self._draw()

    def close(self) -> None:
        """Draw the last state without its activity; the picture stays on the terminal."""
        if not self._is_plain:
            self._state = replace(self._state, activity="")
            self._draw()

    def _draw(self) -> None:
        self._drawn_at_s = time.monotonic()
        size = (self._console.width, self._console.height)
        with self._console.capture() as capture:
            is_coloured = self._console.color_system is not None
            self._console.print(Escaped(render(self._state, *size, is_coloured=is_coloured)))
        # Lines that scrolled out at the top cannot be drawn again.
        lines = capture.get().splitlines()[: max(1, self._console.height - 1)]
        # A terminal that was resized has wrapped the old lines differently, so the picture starts again below them.
        up = f"\x1b[{self._num_drawn_lines}F" if size == self._drawn_size else ""
        self._console.file.write(up + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
        self._console.file.flush()
        self._num_drawn_lines, self._drawn_size = len(lines), size


def say(console: Console, line: str) -> None:
    """Print a line as it is: a path may hold brackets, which rich would take for markup."""
    console.print(Escaped(Text(line)), highlight=False, soft_wrap=True)
