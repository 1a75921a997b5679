"""Shows and records the steps of a run, be it of `shardwise train` or of a loop of the user's own.

    with shardwise.progress(engine, steps=400, folder="runs/a") as run:
        for batches in run.steps(loader):
            run.log(engine.train_step(batches))

Every rank runs the same lines; rank 0 shows and writes. `run.sinks` and `run.profile_steps` of the config count.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

from rich.console import Console

from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import batch_equation
from shardwise.config.sections import Positive, PositiveFloat
from shardwise.config.written_files import write_whole
from shardwise.engine.engine import Engine
from shardwise.engine.types import StepResult
from shardwise.report.console import Escaped, Terminal
from shardwise.report.run_folder import WIRE_NAME, write_run_page
from shardwise.runtime.device import device_name
from shardwise.runtime.format import format_count
from shardwise.train.loop import StepMeter, mfu_of
from shardwise.train.metrics import METRICS_NAME, RunInfo, SinkSet, StepRecord
from shardwise.train.progress import Display, Header, Progress, say
from shardwise.train.rank_watch import RankWatch
from shardwise.train.recording import ProfileWindow
from shardwise.train.setup import CONFIG_NAME, layout_line, precision_line, tiers_line
from shardwise.train.summary import RunOutcome, render_outcome

Item = TypeVar("Item")

log = logging.getLogger("shardwise")


class RunRecorder:
    """Follows the steps of a run; it is used as a context manager on every rank.

    Args:
        state: of the run before its first step.
        folder: for the run's files; None writes none.
        console: on which rank 0 draws; other ranks draw nothing.
        mfu: returns the share of the devices' peak FLOP/s at a number of tokens a second; None where it is not known.
        is_stopped: once it is true nothing more is drawn, since other messages follow on the terminal.

    Attributes:
        state: of the run now, on rank 0.
        step_s: seconds of the steps that no meter slowed.
    """

    def __init__(
        self,
        engine: Engine,
        state: Progress,
        folder: Path | None,
        console: Console,
        mfu: Callable[[float], float | None],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.state = state
        self.step_s: list[float] = []
        self._engine = engine
        self._folder = folder
        self._console = console
        self._mfu = mfu
        self._is_stopped = is_stopped
        self._meter = StepMeter(engine)
        self._sinks = SinkSet((), {}, RunInfo("", folder))
        self._display: Display | None = None
        self._setup_bytes: dict[tuple[str, str], int] | None = None
        self._unwritten: dict[str, str] = {}

    def __enter__(self) -> Self:
        engine, folder, config = self._engine, self._folder, self._engine.config
        if engine.comm.rank == 0:
            run = RunInfo("" if folder is None else folder.name, folder, self.state.first_step)
            self._sinks = SinkSet(config.run.sinks, config.model_dump(mode="json"), run)
            for line in self._sinks.failures:
                say(self._console, line)
            self._display = Display(self._console, self.state)
        self._watch = RankWatch(engine, folder)
        self._window = ProfileWindow(config.run.profile_steps, folder, engine)
        self._window.between(engine.num_steps)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._meter.close()
        if error is None:
            self._window.close()
        if self._display is not None and not self._is_stopped():
            self._display.close()
        self._sinks.close()

    def begin(self) -> None:
        """Begin to measure the next step of a loop that calls `log`."""
        self._meter.begin(may_meter=self._engine.num_steps < self.state.total_steps)

    @checked
    def steps(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Yield what a loader yields, pass after pass, until the last step is taken or a pass yields nothing."""
        is_over = False
        while not is_over and self._engine.num_steps < self.state.total_steps:
            is_over = True
            for batches in loader:
                is_over = False
                yield batches
                if self._engine.num_steps >= self.state.total_steps:
                    return

    def announce(self, activity: str) -> None:
        """Show work that is not a step, such as an evaluation."""
        if self._display is None:
            log.info("%s", activity)
        self._show(replace(self.state, activity=activity))

    def say(self, line: str) -> None:
        """Print a line on rank 0, after which nothing more is drawn."""
        if self._display is not None:
            say(self._console, line)

    def note(self, line: str) -> None:
        """Log a line about the run, and show it on rank 0, where the figures go on below it."""
        log.warning("%s", line)
        if self._display is not None:
            self._display.note(line)

    def keep(self, name: str, write: Callable[[], object]) -> None:
        """Write a file of the run's folder; where the system refuses, say so once: the run goes on without the file."""
        try:
            write()
        except OSError as error:
            if name not in self._unwritten:
                self._unwritten[name] = f"{name}: {error.strerror or error}"
                self.note(f"not written: {self._folder}/{self._unwritten[name]}; the run goes on without it")

    @checked
    def log(
        self, result: StepResult, eval_loss: float | None = None, values: Mapping[str, float] | None = None
    ) -> None:
        """Record the step just taken; every rank calls it after each step.

        Args:
            eval_loss: on held-out data after the step, such as `engine.eval_step(batches).loss`; None without one.
            values: numbers of your own by name, such as a reward: those of rank 0 are shown and written.
        """
        self.see(replace(self._meter.end(result), eval_loss=eval_loss, values=values))
        self.begin()

    def see(self, record: StepRecord) -> None:
        """Record a step that has been measured; every rank calls it."""
        facts = self._watch.see(record.step, record.step_s, record.peak_bytes)
        self._window.between(record.step)
        if self._setup_bytes is None:  # what was sent before and in the first step is setup, too
            self._setup_bytes = {key: count.wire_bytes for key, count in self._engine.comm.comm_log.counts.items()}
        if self._display is None:
            return
        if facts.memory is not None and self._folder is not None:
            self._write_wire(self._folder)
        slow = None if facts.slow is None else facts.slow.to_dict()
        num_dropped = len(self._sinks.failures)
        self._sinks.write(replace(record, mfu=self._mfu(record.tokens_per_s), slow=slow))
        for line in self._sinks.failures[num_dropped:]:
            self.note(f"not recorded from now on: {line}; the run goes on without it")
        if record.peak_bytes is None:
            self.step_s.append(record.step_s)
        state = self.state.after_step(record)
        memory, last_slow = facts.memory or state.memory, facts.slow or state.slow
        self._show(replace(state, mfu=self._mfu(state.tokens_per_s), memory=memory, slow=last_slow))

    def outcome(self, outcome: RunOutcome) -> RunOutcome:
        """Return the outcome with what the recorder knows, and write the page; rank 0 calls it at the run's end."""
        unwritten = (*self._sinks.failures, *self._unwritten.values())
        return replace(outcome, state=self.state, dropped_sinks=unwritten, page=self._write_page())

    def _show(self, state: Progress) -> None:
        self.state = state
        if self._display is not None and not self._is_stopped():
            self._display.show(state)

    def _write_wire(self, folder: Path) -> None:
        """Write the bytes that rank 0 sends in a step, for the page."""
        num_steps, before = self._engine.num_steps - self.state.first_step - 1, self._setup_bytes or {}
        if num_steps > 0:
            axes = [
                {"axis": axis, "op": op, "bytes": (count.wire_bytes - before.get((axis, op), 0)) / num_steps}
                for (axis, op), count in self._engine.comm.comm_log.counts.items()
            ]
            text = json.dumps({"steps": num_steps, "axes": axes}) + "\n"
            self.keep(WIRE_NAME, lambda: write_whole(folder / WIRE_NAME, text))

    def _write_page(self) -> Path | None:
        """Write the page and return its path; None where it cannot be written."""
        if self._folder is None:
            return None
        try:
            self._write_wire(self._folder)
            return write_run_page(self._folder)
        except Exception as error:  # of whatever kind: a run is worth more than its page
            log.warning("the page of this run is not written: %s: %s", type(error).__name__, error)
            return None


def header_of(engine: Engine, model: str, tokens: str = "", data: str = "", resumed: str = "") -> Header:
    """Return the lines above a run's figures.

    Args:
        tokens: words on a sample, which follow the batch.
        resumed: words on the checkpoint that the run goes on from.
    """
    config, mesh = engine.config, engine.layout.mesh
    device = device_name(engine.device)
    return Header(
        model=model,
        layout=f"{layout_line(config, mesh.world_size)}, {device}, {precision_line(config.precision)}",
        tiers=tiers_line(engine.layout),
        batch=batch_equation(config.batch, mesh.num_data_ranks, mesh.pp > 1) + tokens,
        data=data,
        resumed=resumed,
    )


@checked
def progress(
    engine: Engine,
    steps: Positive | None = None,
    folder: str | Path | None = None,
    *,
    flops_per_token: PositiveFloat | None = None,
    console: Console | None = None,
) -> AbstractContextManager[RunRecorder]:
    """Show and record a loop of your own; use it as a context manager on every rank.

    Args:
        engine: that takes the steps; one that has loaded a checkpoint goes on counting from there.
        steps: the number of the last step, counted from 1 over all runs; None for `run.steps`.
        folder: for `metrics.jsonl`, TensorBoard events, profiles and `report.html`; None writes none of them.
        flops_per_token: of forward and backward, for MFU: about 6 x parameters; None shows no MFU.
        console: of rich, to draw on; None for stdout.

    Raises:
        ConfigError: the folder has the metrics of another run, and the engine has taken no step.
    """
    root = None if folder is None else Path(folder).expanduser()
    # Rank 0 alone looks: another rank might find what rank 0 has begun to write.
    is_taken = engine.comm.rank == 0 and root is not None and (root / METRICS_NAME).exists()
    if engine.parts.holds_anywhere(is_taken, "the folder's metrics") and engine.num_steps == 0:
        raise ConfigError(
            "folder-of-another-run",
            f"folder={root} has the metrics of another run; name a new folder, or load its checkpoint first to go on",
        )

    def mfu(tokens_per_s: float) -> float | None:
        return None if flops_per_token is None else mfu_of(engine, flops_per_token * tokens_per_s)

    num_params = sum(param.numel for group in engine.layout.model_groups for param in group.params)
    header = header_of(engine, f"{type(engine.model).__name__}, {format_count(num_params)} parameters")
    first_step = engine.num_steps
    state = Progress(header, steps or engine.config.run.steps, step=first_step, first_step=first_step)
    console = console or Terminal()
    return _own_run(RunRecorder(engine, state, root, console, mfu), engine, root, console)


@contextmanager
def _own_run(recorder: RunRecorder, engine: Engine, folder: Path | None, console: Console) -> Iterator[RunRecorder]:
    if engine.comm.rank == 0 and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG_NAME, engine.config.to_json() + "\n")
    with recorder:
        recorder.begin()
        yield recorder
    if engine.comm.rank == 0:
        outcome = recorder.outcome(RunOutcome(recorder.state, folder, loss_unit=""))
        console.print(Escaped(render_outcome(outcome)), crop=False)
