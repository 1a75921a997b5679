"""Shows the end of a run: its figures beside those to compare them with, a sample, and where its files are.

The text is a pure function of a `RunOutcome` and a width. `progress` shows the run while it trains.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.checkpoint.manifest import CheckpointError
from shardwise.runtime.format import format_bytes, format_clock, format_s
from shardwise.runtime.memory_tracker import MemorySnapshot
from shardwise.train.checkpoints import SavedCheckpoint
from shardwise.train.loop import Sample, StoredBytes
from shardwise.train.metrics import WORDS
from shardwise.train.prediction import MeasuredStep, PredictedStep

_LABEL_WIDTH = 13
# Parts that take a smaller share of a step are not shown.
_LEAST_SHARE = 0.005


@dataclass(frozen=True)
class RunEnding:
    """Holds the results of what a run does after its last step.

    Attributes:
        eval_loss: loss on held-out data of a run that had no step left to take; else None.
        sample: the text that the model wrote; None where it wrote none.
        saved: the checkpoints; None on other ranks than 0, and where nothing was saved.
        failure: the error of the last save; None where it succeeded.
        exported: the Hugging Face folder; None where none was written.
        pipeline: a line about the pipeline's bubble; empty without a pipeline.
    """

    eval_loss: float | None = None
    sample: Sample | None = None
    saved: SavedCheckpoint | None = None
    failure: CheckpointError | None = None
    exported: Path | None = None
    pipeline: str = ""


@dataclass(frozen=True)
class RunOutcome:
    """Holds a run's outcome, which `render_outcome` draws.

    Attributes:
        num_steps: steps taken, of `total_steps`; those of the run that was resumed count too.
        num_taken: steps that this run took.
        stopped_by: what asked it to stop before the last step, "" where that is not known, None where nothing did.
        train_loss: the last step's loss; None where this run took no step.
        eval_loss: loss on held-out data, nats a token; None where it was not evaluated.
        unigram_loss: loss of the token frequencies alone on the same tokens.
        elapsed_s: seconds that the steps took.
        tokens_per_s: tokens a second of all ranks, over all steps of this run.
        peak: memory of the last step in which it was measured.
        pipeline: as in `RunEnding`.
        dropped_sinks: a line for each sink that failed.
        loss_unit: follows a loss.
        prediction: what the planner predicted for rank 0 before the first step; None where it could not.
        measured: what was measured in its place; None without a prediction.
        host: memory of the host tier; None where all states are stored on the device.
        page: the run as a page, in its folder; None where it was not written.
    """

    folder: Path | None
    num_steps: int
    num_taken: int
    total_steps: int
    elapsed_s: float
    tokens_per_s: float
    at_rest: Sequence[StoredBytes]
    peak: MemorySnapshot | None = None
    host: MemorySnapshot | None = None
    stopped_by: str | None = None
    pipeline: str = ""
    train_loss: float | None = None
    eval_loss: float | None = None
    unigram_loss: float | None = None
    sample: Sample | None = None
    saved: SavedCheckpoint | None = None
    exported: Path | None = None
    dropped_sinks: Sequence[str] = ()
    loss_unit: str = " nats a token"
    prediction: PredictedStep | None = None
    measured: MeasuredStep | None = None
    page: Path | None = None


def render_outcome(outcome: RunOutcome) -> RenderableType:
    """Draw the summary; it adapts to any width, but paths and commands are never cropped, since they are copied."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", width=_LABEL_WIDTH)
    for name, value in _rows(outcome):
        grid.add_row(name, value)
    lines = [
        Text.assemble(" ", (label.ljust(_LABEL_WIDTH + 2), "dim"), (text, "bold"), no_wrap=True, overflow="ignore")
        for label, text in _to_copy(outcome)
    ]
    return Group("", Padding(grid, (0, 1), expand=False), "", *lines)


def _to_copy(outcome: RunOutcome) -> Iterator[tuple[str, str]]:
    saved = outcome.saved
    if saved is not None:
        # The folder of a run is shorter than that of its checkpoints, and does as well.
        place = str(saved.root.parent if saved.root.parent == outcome.folder else saved.root)
        more = f" run.steps={2 * outcome.num_steps}" if outcome.num_steps >= outcome.total_steps else ""
        yield "to go on", f"shardwise train --resume {shlex.quote(place)}{more}"
        if outcome.exported is None:
            yield "to export", f"shardwise checkpoint export {shlex.quote(str(saved.root))} hf"
    if outcome.exported is not None:
        yield "to use", f'AutoModelForCausalLM.from_pretrained("{outcome.exported}")'
    if outcome.page is not None:
        yield "report", str(outcome.page)
    if outcome.folder is not None:
        yield "run folder", str(outcome.folder)


def _rows(outcome: RunOutcome) -> Iterator[tuple[str, RenderableType]]:
    if outcome.stopped_by is not None:
        by = f" by {outcome.stopped_by}" if outcome.stopped_by else ""
        yield "stopped", f"at step {outcome.num_steps} of {outcome.total_steps}{by}"
    elif outcome.num_taken == 0:
        yield "steps", f"all {outcome.num_steps} were taken before; a larger run.steps takes more"
    if outcome.eval_loss is not None:
        yield WORDS["eval_loss"], Text.assemble((f"{outcome.eval_loss:.4f}", "bold"), outcome.loss_unit)
        if outcome.unigram_loss is not None:
            yield "to compare", f"{outcome.unigram_loss:.3f} for token frequencies alone, on the same tokens"
    elif outcome.train_loss is not None:
        yield WORDS["loss"], f"{outcome.train_loss:.4f}{outcome.loss_unit} in the last step"
    if outcome.num_taken:
        steps = f"{outcome.num_taken} steps in {format_clock(outcome.elapsed_s)}"
        yield WORDS["tokens_per_s"], f"{outcome.tokens_per_s:,.0f} on average, {steps}"
        if outcome.pipeline:
            yield "pipeline", outcome.pipeline
        if outcome.at_rest:
            yield "at rest", _at_rest_table(outcome.at_rest)
    if outcome.prediction is not None and outcome.measured is not None and outcome.measured.peak:
        yield WORDS["peak_bytes"], _beside(_peak_rows(outcome.prediction, outcome.measured))
    elif outcome.peak is not None:
        yield WORDS["peak_bytes"], _peak_text(outcome.peak)
    if outcome.prediction is not None and outcome.measured is not None and outcome.folder is not None:
        if outcome.prediction.parts and outcome.measured.parts:
            yield "a step", _beside(_time_rows(outcome.prediction, outcome.measured))
        if words := _planner_words(outcome.prediction, outcome.measured, outcome.folder.parent):
            yield "planner", Text(words)
    if outcome.host is not None:
        yield "host's peak", _peak_text(outcome.host)
    if outcome.saved is not None:
        saved = outcome.saved
        others = f", {saved.num_checkpoints} kept" if saved.num_checkpoints > 1 else ""
        yield "checkpoints", f"{saved.newest.name}, {format_bytes(saved.num_bytes)}{others}"
    for line in outcome.dropped_sinks:
        yield "not recorded", Text(line, style="yellow")
    if outcome.sample is not None:
        yield "", ""
        yield "prompt", Text(outcome.sample.prompt)
        yield "sample", Text(outcome.sample.text)


def _peak_text(peak: MemorySnapshot) -> str:
    by_size = sorted(((size, name) for name, size in peak.peak_live_bytes.items() if size), reverse=True)
    parts = ", ".join(f"{name} {format_bytes(size)}" for size, name in by_size)
    return f"{format_bytes(peak.peak_bytes)}: {parts}"


def _at_rest_table(states: Sequence[StoredBytes]) -> Table:
    return _beside(
        (
            state.name,
            format_bytes(state.predicted_bytes),
            "-" if state.measured_bytes is None else format_bytes(state.measured_bytes),
        )
        for state in states
    )


def _beside(rows: Iterable[tuple[str, str, str]]) -> Table:
    """Return a table of what was predicted beside what was measured."""
    table = Table.grid(padding=(0, 3))
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify)
    table.add_row("on rank 0", "predicted", "measured", style="dim")
    for row in rows:
        table.add_row(*row)
    return table


def _peak_rows(prediction: PredictedStep, measured: MeasuredStep) -> Iterator[tuple[str, str, str]]:
    names = [name for name in measured.peak if measured.peak[name] or prediction.peak.get(name)]
    for name in sorted(names, key=lambda name: -measured.peak[name]):
        said = format_bytes(prediction.peak[name]) if name in prediction.peak else "-"
        yield name, said, format_bytes(measured.peak[name])
    yield "all", format_bytes(sum(prediction.peak.values())), format_bytes(sum(measured.peak.values()))


def _time_rows(prediction: PredictedStep, measured: MeasuredStep) -> Iterator[tuple[str, str, str]]:
    for name, seconds in prediction.parts.items():
        found_s = measured.parts[name]
        if max(seconds, found_s) >= _LEAST_SHARE * (measured.step_s or 0.0):
            yield name, format_s(seconds), format_s(found_s)
    yield "all", format_s(prediction.step_s or 0.0), format_s(measured.step_s or 0.0)


def _planner_words(prediction: PredictedStep, measured: MeasuredStep, runs: Path) -> str:
    """Say what would make the prediction better; empty where the step took as long as expected."""
    if prediction.note or measured.step_s is None or not prediction.high_s:
        return prediction.note
    if prediction.low_s <= measured.step_s <= prediction.high_s:
        return ""
    span = f"{format_s(prediction.low_s)} to {format_s(prediction.high_s)}"
    return f"{span} were expected of a step; shardwise plan --refit {shlex.quote(str(runs))} learns from runs"
