"""Shows the end of a run: its figures beside those to compare them with, a sample, and where its files are.

The text is a pure function of a `RunOutcome`. `progress` shows the run while it trains.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.checkpoint.manifest import CheckpointError
from shardwise.config.errors import printable_lines
from shardwise.runtime.format import format_bytes, format_clock, format_s
from shardwise.runtime.memory_tracker import MemorySnapshot
from shardwise.train.checkpoints import SavedCheckpoint, go_on_command
from shardwise.train.loop import Sample
from shardwise.train.metrics import WORDS
from shardwise.train.prediction import StepFigures
from shardwise.train.progress import Progress, labelled

_LABEL_WIDTH = 15
# Parts that take a smaller share of a step are not shown.
_LEAST_SHARE = 0.005


@dataclass(frozen=True)
class RunOutcome:
    """Holds a run's outcome, which `render_outcome` draws; what a run has not done is None or empty.

    Attributes:
        stopped_by: what asked it to stop before the last step, "" where that is not known, None where nothing did.
        sample: the text that the model wrote.
        saved: the checkpoints of the run, on rank 0 alone.
        failure: the error of the last save.
        pipeline: a line about the pipeline's bubble.
        dropped_sinks: a line for each sink that failed.
        host: memory of the host tier; None where all states are stored on the device.
        prediction: what the planner predicted for rank 0 before the first step.
        measured: what was measured in its place.
        page: the run as a page, in its folder.
        says_how_to_go_on: whether the summary does; after a stop the local launcher has the last word.
    """

    state: Progress
    folder: Path | None = None
    loss_unit: str = " nats a token"
    stopped_by: str | None = None
    sample: Sample | None = None
    saved: SavedCheckpoint | None = None
    failure: CheckpointError | None = None
    exported: Path | None = None
    pipeline: str = ""
    dropped_sinks: Sequence[str] = ()
    host: MemorySnapshot | None = None
    prediction: StepFigures | None = None
    measured: StepFigures | None = None
    page: Path | None = None
    says_how_to_go_on: bool = True


def render_outcome(outcome: RunOutcome) -> RenderableType:
    """Draw the summary; it adapts to any width, but paths and commands are never cropped, since they are copied."""
    grid = labelled()
    for name, value in _rows(outcome):
        grid.add_row(name, value)
    lines = [
        Text.assemble(" ", (label.ljust(_LABEL_WIDTH), "dim"), (text, "bold"), no_wrap=True, overflow="ignore")
        for label, text in _to_copy(outcome)
    ]
    return Group("", Padding(grid, (0, 1), expand=False), "", *lines)


def _to_copy(outcome: RunOutcome) -> Iterator[tuple[str, str]]:
    saved, exported, state = outcome.saved, outcome.exported, outcome.state
    if saved is not None:
        more = f" run.steps={2 * state.step}" if state.step >= state.total_steps else ""
        if outcome.says_how_to_go_on:
            yield "to go on", f"{go_on_command(saved.root, outcome.folder)}{more}"
        if exported is None:
            yield "to export", f"shardwise checkpoint export {shlex.quote(str(saved.root))} hf"
    if exported is not None:
        yield "to use", f'AutoModelForCausalLM.from_pretrained("{exported}")'
    if outcome.page is not None:
        yield "report", str(outcome.page)
    if outcome.folder is not None:
        yield "run folder", str(outcome.folder)


def _rows(outcome: RunOutcome) -> Iterator[tuple[str, RenderableType]]:
    state = outcome.state
    if outcome.stopped_by is not None:
        by = f" by {outcome.stopped_by}" if outcome.stopped_by else ""
        yield "stopped", f"at step {state.step} of {state.total_steps}{by}"
    elif state.num_taken == 0:
        yield "steps", f"all {state.step} were taken before; a larger run.steps takes more"
    if state.eval_loss is not None and outcome.stopped_by is None:
        step, loss = state.eval_loss
        after = "" if step == state.step else f", after step {step}"
        yield WORDS["eval_loss"], Text.assemble((f"{loss:.4f}", "bold"), outcome.loss_unit, after)
    elif state.num_taken:
        yield WORDS["loss"], f"{state.loss:.4f}{outcome.loss_unit} in the last step"
    if state.num_taken:
        steps = f"{state.num_taken} steps in {format_clock(state.elapsed_s)}"
        yield WORDS["tokens_per_s"], f"{state.mean_tokens_per_s:,.0f} on average, {steps}"
        if outcome.pipeline:
            yield "pipeline", outcome.pipeline
    yield from _planner_rows(outcome)
    if outcome.host is not None:
        yield "host's peak", _sizes(outcome.host.peak_live_bytes)
    if (saved := outcome.saved) is not None:
        others = f", {saved.num_checkpoints} kept" if saved.num_checkpoints > 1 else ""
        yield "checkpoints", f"{saved.newest.name}, {format_bytes(saved.num_bytes)}{others}"
    for line in outcome.dropped_sinks:
        yield "not recorded", Text(line, style="yellow")
    if outcome.sample is not None:
        yield "", ""
        yield "prompt", Text(printable_lines(outcome.sample.prompt))
        yield "sample", Text(printable_lines(outcome.sample.text))


def _planner_rows(outcome: RunOutcome) -> Iterator[tuple[str, RenderableType]]:
    """Yield what was predicted of memory and time beside what was measured."""
    prediction, measured = outcome.prediction, outcome.measured
    if prediction is None or measured is None or outcome.folder is None:
        if outcome.state.memory is not None:
            yield WORDS["peak_bytes"], _sizes(outcome.state.memory.ranks[0])
        return
    if peak := measured.peak:
        names = sorted((name for name in peak if peak[name] or prediction.peak.get(name)), key=lambda name: -peak[name])
        sizes = [(name, prediction.peak.get(name), peak[name]) for name in names]
        totals = ("all", sum(prediction.peak.values()), sum(peak.values()))
        yield WORDS["peak_bytes"], _beside([*sizes, totals], format_bytes)
    step_s = measured.step_s or 0.0
    if prediction.parts and measured.parts:
        parts = [(name, seconds, measured.parts[name]) for name, seconds in prediction.parts.items()]
        shown = [row for row in parts if max(row[1:]) >= _LEAST_SHARE * step_s]
        yield "a step", _beside([*shown, ("all", prediction.step_s or 0.0, step_s)], format_s)
    if prediction.note:
        yield "planner", Text(prediction.note)
    elif prediction.high_s and step_s and not prediction.low_s <= step_s <= prediction.high_s:
        span = f"{format_s(prediction.low_s)} to {format_s(prediction.high_s)} were expected of a step"
        yield "planner", Text(f"{span}; shardwise doctor --calibrate measures this machine again")


def _sizes(held: Mapping[Any, int]) -> str:
    by_size = sorted(((size, str(name)) for name, size in held.items() if size), reverse=True)
    parts = ", ".join(f"{name} {format_bytes(size)}" for size, name in by_size)
    return f"{format_bytes(sum(held.values()))}: {parts}"


def _beside(rows: Sequence[tuple[str, Any, Any]], words: Callable[[Any], str]) -> Table:
    """Return a table of what was predicted beside what was measured; None is not known."""
    table = Table.grid(padding=(0, 3))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_row("on rank 0", "predicted", "measured", style="dim")
    for name, *values in rows:
        table.add_row(name, *("-" if value is None else words(value) for value in values))
    return table
