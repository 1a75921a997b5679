"""Shows and records a loop of the user's own as `shardwise train` does its own: panel, metrics, sinks, slow steps.

    with shardwise.progress(engine, steps=400, folder="runs/a") as run:
        for batches in run.steps(loader):
            run.log(engine.train_step(batches))

Every rank runs the same lines; rank 0 shows and writes. `run.sinks` and `run.profile_steps` of the engine's config
count here too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

import torch
from rich.console import Console

from shardwise.config.resolve import ConfigError, batch_equation
from shardwise.engine.engine import Engine
from shardwise.engine.types import StepResult
from shardwise.runtime.format import format_count
from shardwise.train.console_notes import tiers_line
from shardwise.train.loop import METER_EVERY, NUM_FIRST_METERED, peak_flops
from shardwise.train.metrics import record_of
from shardwise.train.profile import ProfileWindow
from shardwise.train.progress import Header, Progress
from shardwise.train.rank0_logger import StepLogger
from shardwise.train.rank_watch import RankWatch
from shardwise.train.setup import CONFIG_NAME, layout_line
from shardwise.train.sinks import METRICS_NAME, RunInfo, SinkSet
from shardwise.train.summary import RunOutcome, render_outcome

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
        self._first_step = engine.num_steps
        self._logger: StepLogger | None = None
        self._meter = ExitStack()
        self._is_metered = False
        self._start_s = time.perf_counter()

    def __enter__(self) -> Self:
        engine, config = self._engine, self._engine.config
        if engine.comm.rank == 0:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / CONFIG_NAME).write_text(config.to_json() + "\n", encoding="utf-8")
            sinks = SinkSet.of(config.run.sinks, self._folder)
            name = "" if self._folder is None else self._folder.name
            sinks.start(config.model_dump(mode="json"), RunInfo(name, self._folder, self._first_step))
            for line in sinks.failures:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            state = Progress(_header(engine), self._num_steps, step=self._first_step, first_step=self._first_step)
            self._logger = StepLogger(state, self._console, sinks, self._mfu)
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
                self._console.print(render_outcome(self._outcome(self._logger)), crop=False)

    def steps(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Yield what a loader yields, pass after pass, until the last step is taken or the loader has no more.

        Args:
            loader: of what one step takes; a pass that yields nothing is the last.
        """
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
        engine = self._engine
        step_s = max(1e-9, engine.step_context.timeline.clock.closed_s - self._start_s)
        self._meter.close()
        record = replace(record_of(result, step_s, engine.memory.snapshot(), self._is_metered), eval_loss=eval_loss)
        facts = self._watch.see(record.step, step_s, record.peak_bytes)
        if self._logger is not None:
            self._logger.see(record, facts)
        self._begin()

    def _begin(self) -> None:
        """Prepare for the next step: the memory of some is metered, which slows them on the CPU."""
        number, memory = self._engine.num_steps + 1, self._engine.memory
        self._window.between(number - 1)
        has_more = number <= self._num_steps
        self._is_metered = has_more and (number - self._first_step <= NUM_FIRST_METERED or number % METER_EVERY == 0)
        if self._is_metered:
            memory.reset_peak()
            self._meter.enter_context(memory.meter())
        self._start_s = time.perf_counter()

    def _mfu(self, tokens_per_s: float) -> float | None:
        device = self._engine.device
        if self._flops_per_token is None or device.type != "cuda":
            return None
        peak = peak_flops(torch.cuda.get_device_name(device))
        flops = self._flops_per_token * tokens_per_s
        return None if peak is None else flops / (peak * self._engine.comm.world_size)

    def _outcome(self, logger: StepLogger) -> RunOutcome:
        state = logger.state
        return RunOutcome(
            folder=self._folder,
            num_steps=state.step,
            num_taken=state.num_taken,
            total_steps=state.total_steps,
            elapsed_s=state.elapsed_s,
            tokens_per_s=logger.tokens_per_s,
            at_rest=(),
            train_loss=state.loss if state.num_taken else None,
            eval_loss=state.eval_losses[-1][1] if state.eval_losses else None,
            dropped_sinks=logger.failures,
            loss_unit="",
        )


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


def _header(engine: Engine) -> Header:
    config, mesh, layout = engine.config, engine.layout.mesh, engine.layout
    num_params = sum(place.numel for group in layout.model_groups for place in group.params)
    device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "CPU"
    return Header(
        model=f"{type(engine.model).__name__}, {format_count(num_params)} parameters",
        layout=f"{layout_line(config, mesh)}, {device}, {config.precision.param}",
        batch=batch_equation(config.batch, mesh.num_data_ranks, mesh.pp > 1),
        tiers=tiers_line(layout),
    )
