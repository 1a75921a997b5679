"""Shows the steps of rank 0, gives them to sinks, keeps `report.html` up to date, and collects the run's outcome.

The other ranks have no logger.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from shardwise.comm.records import CollectiveCount
from shardwise.config.resolve import batch_equation
from shardwise.engine.engine import Engine
from shardwise.report.page import write_whole
from shardwise.report.run_folder import WIRE_NAME, write_run_page
from shardwise.runtime.format import format_count
from shardwise.train.checkpoints import Resumed
from shardwise.train.loop import Trainer
from shardwise.train.metrics import SinkSet, StepRecord
from shardwise.train.prediction import StepFigures, compare
from shardwise.train.progress import Display, Header, Progress
from shardwise.train.rank_watch import StepFacts
from shardwise.train.setup import layout_line, sparse_words, tiers_line
from shardwise.train.summary import RunEnding, RunOutcome

EVERY_S: Final = 30.0
_LARGEST_SHARE: Final = 0.02
_LOWEST_PRIORITY: Final = 19

log = logging.getLogger("shardwise")


class RunPage:
    """Refreshes the page of a run on rank 0, from its first step to its end, and counts what it sends for the page.

    A process of the lowest priority reads the run's files and writes the page, so a step never waits for it. It is
    started at most every `every_s`, and so rarely that it takes 2 % of one core at most. Nothing here ends a run.

    Args:
        folder: the run's folder.
        counts: what this rank has sent so far, by axis and op; they grow while it trains.
        every_s: the least seconds between two pages.
    """

    def __init__(
        self, folder: Path, counts: Mapping[tuple[str, str], CollectiveCount], every_s: float = EVERY_S
    ) -> None:
        self._folder = folder
        self._counts = counts
        self._every_s = every_s
        self._first: dict[tuple[str, str], int] = {}
        self._num_steps = -1
        self._child: subprocess.Popen[bytes] | None = None
        self._started_s = time.monotonic()
        self._due_s = self._started_s + every_s

    def see_step(self) -> None:
        """Count a step; start to write the page if it is due."""
        self._num_steps += 1
        if self._num_steps == 0:  # what was sent before and in the first step is setup, too
            self._first = {key: count.wire_bytes for key, count in self._counts.items()}
        now_s = time.monotonic()
        if self._child is not None and self._child.poll() is not None:
            self._due_s = self._started_s + max(self._every_s, (now_s - self._started_s) / _LARGEST_SHARE)
            self._child = None
        if self._child is None and now_s >= self._due_s:
            self._started_s = now_s
            self._start()

    def finish(self) -> Path | None:
        """Write the last page, and return its path; None where it cannot be written."""
        try:
            if self._child is not None:
                self._child.wait()
            self._write_counts()
            return write_run_page(self._folder)
        except Exception as error:  # of whatever kind: a run is worth more than its page
            log.warning("the page of this run is not written: %s: %s", type(error).__name__, error)
            return None

    def _start(self) -> None:
        try:
            self._write_counts()
            argv = [sys.executable, "-m", "shardwise.report.run_folder", str(self._folder)]
            nowhere = subprocess.DEVNULL
            self._child = subprocess.Popen(argv, stdin=nowhere, stdout=nowhere, stderr=nowhere)
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._child.pid, _LOWEST_PRIORITY)
        except OSError as error:
            self._due_s = float("inf")
            log.warning("the page of this run is written at its end alone: %s", error)

    def _write_counts(self) -> None:
        if self._num_steps < 1:
            return
        axes = [
            {"axis": axis, "op": op, "bytes": (count.wire_bytes - self._first.get((axis, op), 0)) / self._num_steps}
            for (axis, op), count in self._counts.items()
        ]
        write_whole(self._folder / WIRE_NAME, json.dumps({"steps": self._num_steps, "axes": axes}) + "\n")


class StepLogger:
    """Shows and records the steps of rank 0.

    Args:
        state: the run's state before its first step.
        console: the console that shows the steps.
        sinks: that take the steps; they are started.
        mfu: returns the share of the devices' peak FLOP/s at a number of tokens a second; None where it is not known.
        is_stopped: once it is true nothing more is drawn, since other messages follow on the terminal.
        page: is kept up to date; None writes none.

    Attributes:
        state: of the run now.
        step_s: seconds of the steps that no meter slowed.
    """

    def __init__(
        self,
        state: Progress,
        console: Console,
        sinks: SinkSet,
        mfu: Callable[[float], float | None] = lambda tokens_per_s: None,
        is_stopped: Callable[[], bool] = lambda: False,
        page: RunPage | None = None,
    ) -> None:
        self.state = state
        self.step_s: list[float] = []
        self._num_tokens = 0.0
        self._sinks = sinks
        self._mfu = mfu
        self._is_stopped = is_stopped
        self._page = page
        self._display = Display(console, state)

    def announce(self, activity: str) -> None:
        """Show work that is not a step, such as an evaluation."""
        self._show(replace(self.state, activity=activity))

    def see(self, record: StepRecord, facts: StepFacts) -> None:
        """Record and show one step, with what all ranks together found in `facts`."""
        slow = None if facts.slow is None else facts.slow.to_dict()
        self._sinks.write(replace(record, mfu=self._mfu(record.tokens_per_s), slow=slow))
        if self._page is not None:
            self._page.see_step()
        self._num_tokens += record.count
        if record.peak_bytes is None:
            self.step_s.append(record.step_s)
        state = self.state.after_step(record)
        memory, last_slow = facts.memory or state.memory, facts.slow or state.slow
        self._show(replace(state, mfu=self._mfu(state.tokens_per_s), memory=memory, slow=last_slow))

    def close(self) -> None:
        """Draw the last picture, which stays on the terminal, and close the sinks."""
        if not self._is_stopped():
            self._display.close()
        self._sinks.close()

    def outcome(self, folder: Path | None, eval_loss: float | None, **more: Any) -> RunOutcome:
        """Return what `render_outcome` shows at the end, and write the last page; `more` are fields of `RunOutcome`."""
        return RunOutcome(
            state=self.state,
            folder=folder,
            tokens_per_s=self._num_tokens / self.state.elapsed_s if self.state.elapsed_s else 0.0,
            eval_loss=eval_loss,
            dropped_sinks=self._sinks.failures,
            page=None if self._page is None else self._page.finish(),
            **more,
        )

    def _show(self, state: Progress) -> None:
        self.state = state
        if not self._is_stopped():
            self._display.show(state)


def header_of(engine: Engine, model: str, tokens: str = "", data: str = "", resumed: str = "") -> Header:
    """Return the lines above a run's figures.

    Args:
        engine: that takes the steps.
        model: words on the model.
        tokens: words on a sample, which follow the batch.
        data: words on the data.
        resumed: words on the checkpoint that the run goes on from.
    """
    config, mesh = engine.config, engine.layout.mesh
    device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "CPU"
    master = " with fp32 master" if config.precision.param in ("bf16", "fp16") else ""
    return Header(
        model=model,
        layout=f"{layout_line(config, mesh)}, {device}, {config.precision.param}{master}",
        tiers=tiers_line(engine.layout),
        batch=batch_equation(config.batch, mesh.num_data_ranks, mesh.pp > 1) + tokens,
        data=data,
        resumed=resumed,
    )


def first_state(trainer: Trainer, resumed: Resumed | None) -> Progress:
    """Return the state of a run before its first step; `resumed` is the checkpoint that it goes on from, if any."""
    config, first_step = trainer.config, trainer.first_step
    header = header_of(
        trainer.engine,
        model=f"{trainer.model.words}{sparse_words(config, trainer.model.num_heads)}",
        tokens=f", {config.data.seq_len} tokens each",
        data=f"{trainer.data.source}, {format_count(trainer.data.num_tokens)} tokens",
        resumed="" if resumed is None else f"from step {resumed.step} of {resumed.path.parent}",
    )
    return Progress(header, config.run.steps, step=first_step, first_step=first_step)


def outcome_of(
    trainer: Trainer,
    logger: StepLogger,
    folder: Path,
    prediction: StepFigures | None,
    ending: RunEnding,
    stopped_by: str | None,
) -> RunOutcome:
    """Collect what `render_outcome` shows at the end of a run of `shardwise train`.

    Args:
        trainer: of the run.
        logger: that has seen its steps; it is closed.
        folder: of the run.
        prediction: what the planner predicted for the run; None where it could not.
        ending: what the run did after its last step.
        stopped_by: as in `RunOutcome`.
    """
    state = logger.state
    is_evaluated = state.eval_loss is not None and state.eval_loss[0] == state.step
    eval_loss = state.eval_loss[1] if state.eval_loss is not None and is_evaluated else ending.eval_loss
    measured = compare(trainer, folder, prediction, logger.step_s)  # which the page shows
    return logger.outcome(
        folder,
        eval_loss,
        ending=ending,
        stopped_by=stopped_by,
        unigram_loss=None if eval_loss is None else trainer.unigram_loss(),
        peak=trainer.peak,
        host=trainer.host,
        prediction=prediction,
        measured=measured,
    )
