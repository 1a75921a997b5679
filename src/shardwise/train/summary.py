"""What is said when a run is over: its figures beside those to compare them with, a sample, where it all is.

Pure: an `Outcome` and a width give the text. Not here: the display while it trains (`progress`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.memory import MemorySnapshot, format_bytes
from shardwise.train.loop import AtRest, Sample
from shardwise.train.progress import clock

_LABEL_WIDTH = 13


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        num_steps: taken, of `total_steps`.
        stopped_by: what asked it to stop before the last step, "" where that is not known, None where nothing did.
        train_loss: smoothed, of the last step; None before the first.
        eval_loss: on held-out data, nats a token; None where it was not evaluated.
        unigram_loss: on the same tokens.
        elapsed_s: of the steps.
        tokens_per_s: of all ranks, over all steps.
        peak: of the last step whose memory was measured.
    """

    folder: Path
    num_steps: int
    total_steps: int
    elapsed_s: float
    tokens_per_s: float
    at_rest: Sequence[AtRest]
    peak: MemorySnapshot | None = None
    stopped_by: str | None = None
    train_loss: float | None = None
    eval_loss: float | None = None
    unigram_loss: float | None = None
    sample: Sample | None = None


def render_outcome(outcome: Outcome) -> RenderableType:
    """The summary, at whatever width it is printed."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", width=_LABEL_WIDTH)
    for name, value in _rows(outcome):
        grid.add_row(name, value)
    # A path is for copying: it must not be broken into lines.
    label = ("run folder".ljust(_LABEL_WIDTH + 2), "dim")
    folder = Text.assemble(label, (str(outcome.folder), "bold"), no_wrap=True, overflow="ignore")
    return Group("", Padding(grid, (0, 1), expand=False), "", Padding(folder, (0, 1), expand=False))


def _rows(outcome: Outcome) -> Iterator[tuple[str, RenderableType]]:
    if outcome.stopped_by is not None:
        by = f" by {outcome.stopped_by}" if outcome.stopped_by else ""
        yield "stopped", f"at step {outcome.num_steps} of {outcome.total_steps}{by}"
    if outcome.eval_loss is not None:
        yield "held-out loss", Text.assemble((f"{outcome.eval_loss:.3f}", "bold"), " nats a token")
        if outcome.unigram_loss is not None:
            yield "to compare", f"{outcome.unigram_loss:.3f} for token frequencies alone, on the same tokens"
    elif outcome.train_loss is not None:
        yield "train loss", f"{outcome.train_loss:.3f} nats a token"
    if outcome.num_steps:
        steps = f"{outcome.num_steps} steps in {clock(outcome.elapsed_s)}"
        yield "speed", f"{outcome.tokens_per_s:,.0f} tokens/s, {steps}"
        yield "at rest", _at_rest_table(outcome.at_rest)
    if outcome.peak is not None:
        by_size = sorted(((size, name) for name, size in outcome.peak.peak_live_bytes.items() if size), reverse=True)
        parts = ", ".join(f"{name} {format_bytes(size)}" for size, name in by_size)
        yield "peak", f"{format_bytes(outcome.peak.peak_bytes)}: {parts}"
    if outcome.sample is not None:
        yield "", ""
        yield "prompt", Text(outcome.sample.prompt)
        yield "sample", Text(outcome.sample.text)


def _at_rest_table(states: Sequence[AtRest]) -> Table:
    table = Table.grid(padding=(0, 3))
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify)
    table.add_row("on rank 0", "predicted", "measured", style="dim")
    for state in states:
        table.add_row(state.name, format_bytes(state.predicted_bytes), format_bytes(state.measured_bytes))
    return table
