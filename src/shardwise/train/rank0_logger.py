"""Shows the steps of rank 0, records them, and collects the run's outcome at the end.

The other ranks have no logger. `progress` and `summary` draw the pictures, `metrics` writes the files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from shardwise.config.resolve import batch_equation
from shardwise.launch.signals import StopFlag
from shardwise.runtime.format import format_count
from shardwise.train.checkpoints import Resumed
from shardwise.train.console_notes import tiers_line
from shardwise.train.loop import Trainer
from shardwise.train.metrics import MetricsWriter, StepRecord
from shardwise.train.prediction import PredictedStep, compare
from shardwise.train.progress import Display, Header, Progress
from shardwise.train.setup import layout_line, sparse_words
from shardwise.train.summary import RunEnding, RunOutcome


class RunLogger:
    """Shows and records the steps of rank 0.

    Args:
        trainer: the trainer that takes the steps.
        folder: the run's folder.
        console: the console that shows the steps.
        stop: once it is set, nothing more is drawn, since other messages follow on the terminal.
        resumed: the checkpoint that the run goes on from; None where it starts afresh.
        prediction: what the planner predicted for the run; None where it could not.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        console: Console,
        stop: StopFlag,
        resumed: Resumed | None = None,
        prediction: PredictedStep | None = None,
    ) -> None:
        self._trainer = trainer
        self._stop = stop
        first_step = trainer.first_step
        self._state = Progress(
            _header(trainer, resumed), trainer.config.run.steps, step=first_step, first_step=first_step
        )
        self._display = Display(console, self._state)
        self._writer = MetricsWriter(folder)
        self._folder = folder
        self._prediction = prediction
        self._step_s: list[float] = []  # of the steps that no meter slowed
        self._num_tokens = 0.0
        self._last: StepRecord | None = None

    def announce(self, activity: str) -> None:
        """Show work that is not a step, such as an evaluation."""
        self._show(replace(self._state, activity=activity))

    def see(self, record: StepRecord) -> None:
        """Record and show one step."""
        self._writer.write(record)
        self._last = record
        self._num_tokens += record.count
        state = self._state.after_step(
            step=record.step,
            loss=record.loss,
            lr=record.lr,
            grad_norm=record.grad_norm,
            step_s=record.step_s,
            tokens_per_s=record.tokens_per_s,
        )
        if record.peak_bytes is None:
            self._step_s.append(record.step_s)
        else:
            state = state.with_memory(record.peak_bytes)
        self._show(replace(state, mfu=self._trainer.mfu(state.tokens_per_s)))

    def close(self) -> None:
        """Flush the metrics and draw the last picture, which stays on the terminal."""
        self._writer.close()
        if not self._stop:
            self._display.close()

    def outcome(self, ending: RunEnding, stopped_by: str | None) -> RunOutcome:
        """Collect what `render_outcome` shows at the end of the run."""
        eval_loss = self._last.eval_loss if self._last is not None else ending.eval_loss
        elapsed_s = self._state.elapsed_s
        return RunOutcome(
            folder=self._folder,
            num_steps=self._state.step,
            num_taken=self._state.num_taken,
            total_steps=self._state.total_steps,
            elapsed_s=elapsed_s,
            tokens_per_s=self._num_tokens / elapsed_s if elapsed_s else 0.0,
            at_rest=self._trainer.at_rest(),
            peak=self._trainer.peak,
            host=self._trainer.host,
            stopped_by=stopped_by,
            pipeline=ending.pipeline,
            train_loss=self._state.loss if self._state.num_taken else None,
            eval_loss=eval_loss,
            unigram_loss=self._trainer.unigram_loss() if eval_loss is not None else None,
            sample=ending.sample,
            saved=ending.saved,
            exported=ending.exported,
            prediction=self._prediction,
            measured=compare(self._trainer, self._folder, self._prediction, self._step_s),
        )

    def _show(self, state: Progress) -> None:
        self._state = state
        if not self._stop:
            self._display.show(state)


def _header(trainer: Trainer, resumed: Resumed | None) -> Header:
    config, engine = trainer.config, trainer.engine
    is_half = config.precision.param in ("bf16", "fp16")
    device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "CPU"
    mesh = engine.layout.mesh
    layout = layout_line(config, mesh)
    equation = batch_equation(config.batch, mesh.num_data_ranks, mesh.pp > 1)
    return Header(
        model=f"{trainer.model.words}{sparse_words(config, trainer.model.num_heads)}",
        layout=f"{layout}, {device}, {config.precision.param}{' with fp32 master' if is_half else ''}",
        batch=f"{equation}, {config.data.seq_len} tokens each",
        data=f"{trainer.data.source}, {format_count(trainer.data.num_tokens)} tokens",
        tiers=tiers_line(engine.layout),
        resumed="" if resumed is None else f"from step {resumed.step} of {resumed.path.parent}",
    )
