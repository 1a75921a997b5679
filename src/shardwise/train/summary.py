"""What is said when a run is over: its figures beside those to compare them with, a sample, where it all is.

Pure: an `RunOutcome` and a width give the text. Not here: the display while it trains (`progress`).
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
from shardwise.runtime.memory_tracker import MemorySnapshot, format_bytes
from shardwise.train.checkpoints import SavedCheckpoint
from shardwise.train.loop import BytesAtRest, Sample
from shardwise.train.prediction import MeasuredStep, PredictedStep
from shardwise.train.progress import clock

_LABEL_WIDTH = 13
# Of a step: parts that take less are not shown.
_LEAST_SHARE = 0.005


@dataclass(frozen=True)
class RunEnding:
    """What came after the last step.

    Attributes:
        eval_loss: of a run that had no step left to take, on held-out data.
        saved: the checkpoints; told to rank 0 alone.
        failure: of the last save.
        pipeline: what its ranks have waited; empty without one.
    """

    eval_loss: float | None = None
    sample: Sample | None = None
    saved: SavedCheckpoint | None = None
    failure: CheckpointError | None = None
    pipeline: str = ""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        num_steps: taken, of `total_steps`, those of the run that was resumed included.
        num_taken: by this run.
        stopped_by: what asked it to stop before the last step, "" where that is not known, None where nothing did.
        train_loss: of the last step; None before the first.
        eval_loss: on held-out data, nats a token; None where it was not evaluated.
        unigram_loss: on the same tokens.
        elapsed_s: of the steps.
        tokens_per_s: of all ranks, over all steps of this run.
        peak: of the last step whose memory was measured.
        pipeline: as in `RunEnding`.
        prediction: what the planner said of rank 0 before the first step; None where it could not.
        measured: what came of it.
        host: of the host tier; None where nothing rests off the device.
    """

    folder: Path
    num_steps: int
    num_taken: int
    total_steps: int
    elapsed_s: float
    tokens_per_s: float
    at_rest: Sequence[BytesAtRest]
    peak: MemorySnapshot | None = None
    host: MemorySnapshot | None = None
    stopped_by: str | None = None
    pipeline: str = ""
    train_loss: float | None = None
    eval_loss: float | None = None
    unigram_loss: float | None = None
    sample: Sample | None = None
    saved: SavedCheckpoint | None = None
    prediction: PredictedStep | None = None
    measured: MeasuredStep | None = None


def render_outcome(outcome: RunOutcome) -> RenderableType:
    """The summary, at whatever width it is printed; uncropped, since paths and commands are for copying."""
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
        place = str(outcome.folder if saved.root.parent == outcome.folder else saved.root)
        more = f" run.steps={2 * outcome.num_steps}" if outcome.num_steps >= outcome.total_steps else ""
        yield "to go on", f"shardwise train --resume {shlex.quote(place)}{more}"
        yield "to export", f"shardwise checkpoint export {shlex.quote(str(saved.root))} hf"
    yield "run folder", str(outcome.folder)


def _rows(outcome: RunOutcome) -> Iterator[tuple[str, RenderableType]]:
    if outcome.stopped_by is not None:
        by = f" by {outcome.stopped_by}" if outcome.stopped_by else ""
        yield "stopped", f"at step {outcome.num_steps} of {outcome.total_steps}{by}"
    elif outcome.num_taken == 0:
        yield "steps", f"all {outcome.num_steps} were taken before; a larger run.steps takes more"
    if outcome.eval_loss is not None:
        yield "eval loss", Text.assemble((f"{outcome.eval_loss:.4f}", "bold"), " nats a token of held-out text")
        if outcome.unigram_loss is not None:
            yield "to compare", f"{outcome.unigram_loss:.3f} for token frequencies alone, on the same tokens"
    elif outcome.train_loss is not None:
        yield "loss", f"{outcome.train_loss:.4f} nats a token in the last step"
    if outcome.num_taken:
        steps = f"{outcome.num_taken} steps in {clock(outcome.elapsed_s)}"
        yield "speed", f"{outcome.tokens_per_s:,.0f} tokens/s, {steps}"
        if outcome.pipeline:
            yield "pipeline", outcome.pipeline
        yield "at rest", _at_rest_table(outcome.at_rest)
    if outcome.prediction is not None and outcome.measured is not None and outcome.measured.peak:
        yield "peak", _beside(_peak_rows(outcome.prediction, outcome.measured))
    elif outcome.peak is not None:
        yield "peak", _peak_text(outcome.peak)
    if outcome.prediction is not None and outcome.measured is not None:
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
    if outcome.sample is not None:
        yield "", ""
        yield "prompt", Text(outcome.sample.prompt)
        yield "sample", Text(outcome.sample.text)


def _peak_text(peak: MemorySnapshot) -> str:
    by_size = sorted(((size, name) for name, size in peak.peak_live_bytes.items() if size), reverse=True)
    parts = ", ".join(f"{name} {format_bytes(size)}" for size, name in by_size)
    return f"{format_bytes(peak.peak_bytes)}: {parts}"


def _at_rest_table(states: Sequence[BytesAtRest]) -> Table:
    return _beside(
        (
            state.name,
            format_bytes(state.predicted_bytes),
            "-" if state.measured_bytes is None else format_bytes(state.measured_bytes),
        )
        for state in states
    )


def _beside(rows: Iterable[tuple[str, str, str]]) -> Table:
    """What was predicted, and what was measured."""
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
            yield name, _seconds(seconds), _seconds(found_s)
    yield "all", _seconds(prediction.step_s or 0.0), _seconds(measured.step_s or 0.0)


def _planner_words(prediction: PredictedStep, measured: MeasuredStep, runs: Path) -> str:
    """What would make the prediction better; nothing where the step is as it was expected."""
    if prediction.note or measured.step_s is None or not prediction.high_s:
        return prediction.note
    if prediction.low_s <= measured.step_s <= prediction.high_s:
        return ""
    span = f"{_seconds(prediction.low_s)} to {_seconds(prediction.high_s)}"
    return f"{span} were expected of a step; shardwise plan --refit {shlex.quote(str(runs))} learns from runs"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
