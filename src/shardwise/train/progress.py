"""Shows a run while it trains: a frozen state, its picture, and the live display that draws it.

The picture is a pure function of the state and a width, so it can be tested and put into a document without a run.
`metrics` keeps a run's numbers, and `summary` shows its end.

>>> header = Header(model="tiny, 6.0 M parameters", layout="ZeRO-2 over 2 ranks", batch="8 samples", data="a text")
>>> state = Progress(header, total_steps=400).after_step(
...     step=1, loss=8.3, lr=1e-4, grad_norm=2.0, step_s=0.5, tokens_per_s=8192.0)
>>> plain_line(state)
'step 1/400  loss 8.3000  lr 1.00e-04  grad norm 2.00  8,192 tokens/s  eta 3:20'
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.runtime.format import format_bytes, format_clock

SPARK_POINTS = 40
_SPARK_LEVELS = "▁▂▃▄▅▆▇█"
_SMOOTHING = 0.9
_WIDE = 110
_MAX_WIDTH = 132
_LABEL_WIDTH = 11
_FIGURES_WIDTH = 62
_NUM_PLAIN_LINES = 20
_REFRESH_S = 0.25


@dataclass(frozen=True)
class Header:
    """Holds the lines that do not change during a run.

    `resumed` is empty where the run started afresh, `tiers` where all states are stored on the device.
    """

    model: str
    layout: str
    batch: str
    data: str
    resumed: str = ""
    tiers: str = ""


@dataclass(frozen=True)
class Progress:
    """Holds the state of a run after some step.

    Attributes:
        step: the last step taken; `first_step` where this run has taken none.
        first_step: how many steps were taken before this run.
        loss: the last step's loss, as it is recorded.
        trend: the loss smoothed over about ten steps.
        losses: the trend at even intervals of this run so far, at most SPARK_POINTS.
        tokens_per_s: tokens a second of all ranks together, smoothed.
        mfu: share of the devices' peak FLOP/s; None where that is not known.
        peak_step: the step in which the memory was measured.
        peak_bytes: bytes on rank 0 by category at the highest total within that step; None before it was measured.
        activity: the work in progress that is not a step; empty during steps.
    """

    header: Header
    total_steps: int
    step: int = 0
    first_step: int = 0
    loss: float = math.nan
    trend: float = math.nan
    losses: tuple[float, ...] = ()
    lr: float = 0.0
    grad_norm: float = math.nan
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float | None = None
    peak_step: int = 0
    peak_bytes: Mapping[str, int] | None = None
    elapsed_s: float = 0.0
    activity: str = ""

    @property
    def num_taken(self) -> int:
        """Return how many steps this run has taken."""
        return self.step - self.first_step

    @property
    def eta_s(self) -> float:
        """Return the seconds that the remaining steps take at the present rate."""
        return (self.total_steps - self.step) * self.step_s

    def after_step(
        self, *, step: int, loss: float, lr: float, grad_norm: float, step_s: float, tokens_per_s: float
    ) -> Self:
        """Return the state after one more step.

        Args:
            step: its number, counted from 1 over all runs.
            loss: its loss; one that is not finite leaves the trend as it is.
            lr: its learning rate.
            grad_norm: the global gradient norm before clipping.
            step_s: seconds that it took.
            tokens_per_s: tokens a second of all ranks together.
        """
        number, num_steps = step - self.first_step, self.total_steps - self.first_step
        # A loss that an fp16 overflow left infinite would stay in the average for ever.
        trend = _smoothed(self.trend, loss, number) if math.isfinite(loss) else self.trend
        point = (number - 1) * SPARK_POINTS // max(num_steps, SPARK_POINTS)
        return replace(
            self,
            step=step,
            loss=loss,
            trend=trend,
            losses=(*self.losses[:point], trend),
            lr=lr,
            grad_norm=grad_norm,
            step_s=_smoothed(self.step_s, step_s, number),
            tokens_per_s=_smoothed(self.tokens_per_s, tokens_per_s, number),
            elapsed_s=self.elapsed_s + step_s,
            activity="",
        )

    def with_memory(self, peak_bytes: Mapping[str, int]) -> Self:
        """Return the state with the peak memory of the step just taken."""
        return replace(self, peak_step=self.step, peak_bytes=peak_bytes)


def _smoothed(average: float, value: float, number: int) -> float:
    """Return an average over about ten values, over fewer at the start; `value` is the `number`-th one, from 1."""
    weight = min(_SMOOTHING, 1.0 - 1.0 / number)
    return value if weight == 0.0 or math.isnan(average) else weight * average + (1.0 - weight) * value


def render(state: Progress, width: int) -> RenderableType:
    """Draw a state.

    Args:
        state: the run's state.
        width: columns there are; from 110 on, the memory is drawn beside the figures.
    """
    is_wide = width >= _WIDE
    width = min(width, _MAX_WIDTH) - 2
    memory = _memory_table(state, width - _FIGURES_WIDTH if is_wide else width)
    body: list[RenderableType] = [_figures(state), "", memory]
    if is_wide:
        columns = Table.grid()
        columns.add_column(width=_FIGURES_WIDTH)
        columns.add_row(_figures(state), memory)
        body = [columns]
    return Padding(Group(_header(state.header), "", _bar_line(state, width), "", *body), (0, 1), expand=False)


def _grid() -> Table:
    """Return an empty table of labels and values; all such tables line up."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", width=_LABEL_WIDTH)
    return grid


def _header(header: Header) -> Table:
    grid = _grid()
    grid.add_row("model", Text(header.model, style="bold"))
    grid.add_row("layout", Text(header.layout))
    if header.tiers:
        grid.add_row("at rest", Text(header.tiers))
    grid.add_row("batch", Text(header.batch))
    grid.add_row("data", Text(header.data))
    if header.resumed:
        grid.add_row("resumed", Text(header.resumed))
    return grid


def _bar_line(state: Progress, width: int) -> Text:
    left = f"step {state.step}/{state.total_steps} "
    right = (
        f" {format_clock(state.elapsed_s)} gone, {format_clock(state.eta_s)} to go" if state.num_taken else " starting"
    )
    right = f" {state.activity}" if state.activity else right
    bar = max(10, width - len(left) - len(right))
    done = bar * state.step // max(1, state.total_steps)
    return Text.assemble((left, "bold"), ("━" * done, "cyan"), ("─" * (bar - done), "bright_black"), right)


def _figures(state: Progress) -> Table:
    grid = _grid()
    if state.num_taken == 0:
        for label in ("loss", "lr", "grad norm", "speed"):
            grid.add_row(label, "")
        return grid
    mfu = "" if state.mfu is None else f", {state.mfu:.0%} of peak (MFU)"
    grid.add_row("loss", Text.assemble((f"{state.loss:.4f}  ", "bold"), (sparkline(state.losses), "cyan")))
    grid.add_row("lr", f"{state.lr:.2e}")
    grid.add_row("grad norm", f"{state.grad_norm:.2f}")
    grid.add_row("speed", f"{state.tokens_per_s:,.0f} tokens/s{mfu}")
    return grid


def _memory_table(state: Progress, width: int) -> Table:
    grid = _grid()
    if state.peak_bytes is None:
        grid.add_row("memory", Text("measured in the first steps", style="dim"))
        return grid
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    by_size = sorted(((num_bytes, name) for name, num_bytes in state.peak_bytes.items() if num_bytes), reverse=True)
    total_bytes, largest_bytes = sum(num_bytes for num_bytes, _ in by_size), by_size[0][0] if by_size else 1
    bar_width = max(1, width - _LABEL_WIDTH - 2 - 2 - len("1000.00 MiB"))
    title = f"at the peak of step {state.peak_step}, rank 0" if bar_width > 30 else f"peak, step {state.peak_step}"
    grid.add_row("memory", title, Text(format_bytes(total_bytes), style="bold"))
    for num_bytes, name in by_size:
        bar = "█" * max(1, round(bar_width * num_bytes / largest_bytes))
        grid.add_row(name, Text(bar, style="cyan"), format_bytes(num_bytes))
    return grid


def sparkline(values: Sequence[float]) -> str:
    """Draw values as a row of bars, scaled from the lowest to the highest.

    >>> sparkline([4.0, 3.0, 2.0, 1.0])
    '█▆▃▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(_SPARK_LEVELS) - 1
    return "".join(_SPARK_LEVELS[round(top * (value - low) / span) if span else 0] for value in finite)


def plain_line(state: Progress) -> str:
    """Write the state as a line of ASCII, for logs and pipes."""
    parts = [
        f"step {state.step}/{state.total_steps}",
        f"loss {state.loss:.4f}",
        f"lr {state.lr:.2e}",
        f"grad norm {state.grad_norm:.2f}",
        f"{state.tokens_per_s:,.0f} tokens/s",
    ]
    if state.mfu is not None:
        parts.append(f"MFU {state.mfu:.0%}")
    if state.peak_bytes is not None:
        parts.append(f"peak {format_bytes(sum(state.peak_bytes.values()))}")
    return "  ".join([*parts, f"eta {format_clock(state.eta_s)}"])


class Display:
    """Shows states: drawn in place on a terminal, else as a plain line now and then.

    Each picture is one write over the picture before, so it neither flickers nor scrolls. The cursor stays below the
    picture. Do not call `show` after something else has written to the terminal.

    Args:
        console: the console to draw on.
        state: the first state.
    """

    def __init__(self, console: Console, state: Progress) -> None:
        self._console = console
        self._is_plain = not console.is_terminal or console.is_dumb_terminal or console.options.ascii_only
        self._state = state
        self._drawn_size: tuple[int, int] | None = None
        self._num_drawn_lines = 0
        self._drawn_at_s = -math.inf
        if self._is_plain:
            header = state.header
            tiers = [f"at rest: {header.tiers}"] if header.tiers else []
            resumed = [f"resumed {header.resumed}"] if header.resumed else []
            for line in (header.model, header.layout, *tiers, header.batch, header.data, *resumed):
                self._print(line)
        else:
            self._draw()

    def show(self, state: Progress) -> None:
        """Show a state; the terminal is redrawn at most four times a second, and always after the last step."""
        self._state = state
        is_last = state.step == state.total_steps
        if not self._is_plain:
            if state.activity or is_last or time.monotonic() - self._drawn_at_s >= _REFRESH_S:
                self._draw()
        elif state.activity:
            self._print(state.activity)
        elif is_last or state.num_taken == 1 or state.step % max(1, state.total_steps // _NUM_PLAIN_LINES) == 0:
            self._print(plain_line(state))

    def close(self) -> None:
        """Draw the last state without its activity; the picture stays on the terminal."""
        if not self._is_plain:
            self._state = replace(self._state, activity="")
            self._draw()

    def _draw(self) -> None:
        self._drawn_at_s = time.monotonic()
        size = (self._console.width, self._console.height)
        with self._console.capture() as capture:
            self._console.print(render(self._state, self._console.width))
        # Lines that scrolled out at the top cannot be drawn again.
        lines = capture.get().splitlines()[: max(1, self._console.height - 1)]
        # A terminal that was resized has wrapped the old lines differently, so the picture starts again below them.
        up = f"\x1b[{self._num_drawn_lines}F" if size == self._drawn_size else ""
        self._console.file.write(up + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
        self._console.file.flush()
        self._num_drawn_lines, self._drawn_size = len(lines), size

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
