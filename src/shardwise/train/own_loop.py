"""Shows and records a loop of the user's own as `shardwise train` does its own: panel, metrics, sinks, slow steps.

    with shardwise.progress(engine, steps=400, folder="runs/a") as run:
        for batches in run.steps(loader):
            run.log(engine.train_step(batches))

Every rank runs the same lines; rank 0 shows and writes. `run.sinks` and `run.profile_steps` of the engine's config
count here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

from rich.console import Console

from shardwise.config.resolve import ConfigError
from shardwise.engine.engine import Engine
from shardwise.engine.types import StepResult
from shardwise.runtime.format import format_count
from shardwise.train.loop import StepMeter, mfu_of
from shardwise.train.metrics import METRICS_NAME, RunInfo, SinkSet
from shardwise.train.progress import Progress, say
from shardwise.train.rank0_logger import StepLogger, header_of
from shardwise.train.rank_watch import RankWatch
from shardwise.train.recording import ProfileWindow
from shardwise.train.setup import CONFIG_NAME
from shardwise.train.summary import render_outcome

Item = TypeVar("Item")


class OwnRun:
    """Follows a loop of the user's own; made by `progress`, and used as a context manager on every rank.

    Args:
        engine: that takes the steps.
        steps: the number of the last step, counted from 1 over all runs.
        folder: for the run's files; None writes none.
        flops_per_token: of forward and backward, for MFU; None where it is not known.
        console: on which rank 0 draws.
    """

    def __init__(
        self, engine: Engine, steps: int, folder: Path | None, flops_per_token: float | None, console: Console
    ) -> None:
        self._engine = engine
        self._num_steps = steps
        self._folder = folder
        self._flops_per_token = flops_per_token
        self._console = console
        self._logger: StepLogger | None = None
        self._meter = StepMeter(engine)

    def __enter__(self) -> Self:
        engine, config = self._engine, self._engine.config
        if engine.comm.rank == 0:
            self._logger = self._start_logger()
        self._watch = RankWatch(engine, self._folder)
        self._window = ProfileWindow(config.run.profile_steps, self._folder, engine)
        self._begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._meter.close()
        if error is None:
            self._window.close()
        if self._logger is not None:
            self._logger.close()
            if error is None:
                evaluated = self._logger.state.eval_loss
                outcome = self._logger.outcome(self._folder, evaluated and evaluated[1], loss_unit="")
                self._console.print(render_outcome(outcome), crop=False)

    def steps(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Yield what a loader yields, pass after pass, until the last step is taken or a pass yields nothing."""
        is_over = False
        while not is_over and self._engine.num_steps < self._num_steps:
            is_over = True
            for batches in loader:
                is_over = False
                yield batches
                if self._engine.num_steps >= self._num_steps:
                    return

    def announce(self, activity: str) -> None:
        """Show work that is not a step, such as an evaluation."""
        if self._logger is not None:
            self._logger.announce(activity)

    def log(self, result: StepResult, eval_loss: float | None = None) -> None:
        """Record the step just taken; every rank calls it after each step.

        Args:
            result: what `engine.train_step` or `engine.step` returned.
            eval_loss: on held-out data after the step, such as `engine.eval_step(batches).loss`; None without one.
        """
        record = replace(self._meter.end(result), eval_loss=eval_loss)
        facts = self._watch.see(record.step, record.step_s, record.peak_bytes)
        if self._logger is not None:
            self._logger.see(record, facts)
        self._begin()

    def _begin(self) -> None:
        self._window.between(self._engine.num_steps)
        self._meter.begin(may_meter=self._engine.num_steps < self._num_steps)

    def _start_logger(self) -> StepLogger:
        engine, config, folder = self._engine, self._engine.config, self._folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CONFIG_NAME).write_text(config.to_json() + "\n", encoding="utf-8")
        sinks, first_step = SinkSet.of(config.run.sinks, folder), engine.num_steps
        name = "" if folder is None else folder.name
        sinks.start(config.model_dump(mode="json"), RunInfo(name, folder, first_step))
        for line in sinks.failures:
            say(self._console, line)
        num_params = sum(place.numel for group in engine.layout.model_groups for place in group.params)
        header = header_of(engine, f"{type(engine.model).__name__}, {format_count(num_params)} parameters")
        state = Progress(header, self._num_steps, step=first_step, first_step=first_step)
        return StepLogger(state, self._console, sinks, self._mfu)

    def _mfu(self, tokens_per_s: float) -> float | None:
        flops = self._flops_per_token
        return None if flops is None else mfu_of(self._engine, flops * tokens_per_s)


def progress(
    engine: Engine,
    steps: int | None = None,
    folder: str | Path | None = None,
    *,
    flops_per_token: float | None = None,
    console: Console | None = None,
) -> OwnRun:
    """Show and record a loop of your own; use it as a context manager on every rank.

    Args:
        engine: that takes the steps; one that has loaded a checkpoint goes on counting from there.
        steps: the number of the last step; None for `run.steps`.
        folder: for `metrics.jsonl`, TensorBoard events, `memory.json` and profiles; None writes none of them.
        flops_per_token: of forward and backward, for MFU: about 6 x parameters; None shows no MFU.
        console: of rich, to draw on; None for stdout.

    Raises:
        ConfigError: the folder has the metrics of another run, and the engine has taken no step.
    """
    place = None if folder is None else Path(folder).expanduser()
    # Rank 0 alone looks: another rank might find what rank 0 has begun to write.
    is_taken = engine.comm.rank == 0 and place is not None and (place / METRICS_NAME).exists()
    if engine.step_context.holds_anywhere(is_taken, "the folder's metrics") and engine.num_steps == 0:
        raise ConfigError(
            "folder-of-another-run",
            f"folder={place} has the metrics of another run; name a new folder, or load its checkpoint first to go on",
        )
    return OwnRun(engine, steps or engine.config.run.steps, place, flops_per_token, console or Console())
