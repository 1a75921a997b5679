"""Writes the numbers of each step where people look at them: JSONL, TensorBoard, Weights & Biases, MLflow.

A sink is three methods. One that raises never stops training: it is logged once, dropped, and named at the end of the
run. All use the names of `metrics.scalars`. Where Weights & Biases and MLflow write is up to their own settings
(`WANDB_MODE=offline`, `MLFLOW_TRACKING_URI`, ...).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TextIO

from shardwise.report.page import flat
from shardwise.train.metrics import StepRecord, scalars, to_json_line

METRICS_NAME: Final = "metrics.jsonl"
TENSORBOARD_NAME: Final = "tensorboard"
_MOST_PARAM_CHARS: Final = 500  # of a value, in MLflow

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class RunInfo:
    """Describes a run to its sinks.

    Attributes:
        name: of the run; "" leaves it to the sink.
        folder: of the run's files; None where it has none.
        first_step: steps that were taken before; a run that goes on adds to the files that it finds.
    """

    name: str
    folder: Path | None
    first_step: int = 0


class Sink:
    """Takes the numbers of a run, on rank 0; this one takes none."""

    def start(self, config: Mapping[str, Any], run: RunInfo) -> None:
        """Open what is written to, before the first step."""

    def write(self, record: StepRecord) -> None:
        """Write one step; the next waits for it."""

    def close(self) -> None:
        """Write what is left, after the last step."""


class JsonlSink(Sink):
    """Writes a line of JSON a step to `metrics.jsonl`; a run that is killed keeps every step that it took."""

    _lines: TextIO

    def start(self, config: Mapping[str, Any], run: RunInfo) -> None:
        if run.folder is not None:  # a new run must not find the file
            self._lines = (run.folder / METRICS_NAME).open("a" if run.first_step else "x", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        self._lines.write(to_json_line(record) + "\n")
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()


class TensorBoardSink(Sink):
    """Writes TensorBoard events to the folder `tensorboard` of a run."""

    _events: Any = None

    def start(self, config: Mapping[str, Any], run: RunInfo) -> None:
        self._folder = (run.folder or Path()) / TENSORBOARD_NAME

    def write(self, record: StepRecord) -> None:
        if self._events is None:  # torch takes seconds to import its writer, for which the first step does not wait
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(self._folder), flush_secs=10)
        for name, value in scalars(record).items():
            self._events.add_scalar(name, value, record.step)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


class WandbSink(Sink):
    """Writes a run of Weights & Biases; its files are in the run's folder."""

    def start(self, config: Mapping[str, Any], run: RunInfo) -> None:
        import wandb

        settings = wandb.Settings(console="off")  # or it takes stdout, on which the display draws
        folder = None if run.folder is None else str(run.folder)
        self._run = wandb.init(dir=folder, name=run.name or None, config=dict(config), settings=settings)

    def write(self, record: StepRecord) -> None:
        self._run.log(scalars(record), step=record.step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink(Sink):
    """Writes a run of MLflow, or into the run that the process has begun already, with the config as parameters."""

    def start(self, config: Mapping[str, Any], run: RunInfo) -> None:
        import mlflow

        self._mlflow = mlflow
        self._is_own = mlflow.active_run() is None
        if self._is_own:
            mlflow.start_run(run_name=run.name or None)
        mlflow.log_params({key: value[:_MOST_PARAM_CHARS] for key, value in flat(config).items()})

    def write(self, record: StepRecord) -> None:
        self._mlflow.log_metrics(scalars(record), step=record.step)

    def close(self) -> None:
        if self._is_own:
            self._mlflow.end_run()


SINKS: Final[Mapping[str, Callable[[], Sink]]] = MappingProxyType(
    {"jsonl": JsonlSink, "tensorboard": TensorBoardSink, "wandb": WandbSink, "mlflow": MlflowSink}
)
_NEEDS_FOLDER: Final = ("jsonl", "tensorboard")
_INSTALL: Final[Mapping[str, str]] = MappingProxyType({"wandb": "wandb", "mlflow": "mlflow-skinny"})


class SinkSet:
    """Writes to several sinks; what raises is dropped and named by `failures`.

    Args:
        sinks: by name.
    """

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)
        self._failures: dict[str, str] = {}

    @classmethod
    def of(cls, names: Sequence[str], folder: Path | None) -> SinkSet:
        """Make the sinks of some names; without a folder those that write files there are left out.

        TensorBoard is on by default and no dependency, so where it is not installed the log alone says so.
        """
        names = [name for name in names if folder is not None or name not in _NEEDS_FOLDER]
        if "tensorboard" in names and find_spec("tensorboard") is None:
            names.remove("tensorboard")
            log.warning("no TensorBoard events: pip install tensorboard for them")
        return cls({name: SINKS[name]() for name in names})

    @property
    def failures(self) -> tuple[str, ...]:
        """Return a line for each sink that was dropped."""
        return tuple(f"{name}: {words}" for name, words in self._failures.items())

    def start(self, config: Mapping[str, Any], run: RunInfo) -> None:
        """Start all of them; arguments as for `Sink.start`."""
        self._each("at the start", lambda sink: sink.start(config, run))

    def write(self, record: StepRecord) -> None:
        """Write a step to all of them."""
        self._each(f"in step {record.step}", lambda sink: sink.write(record))

    def close(self) -> None:
        """Close all of them; a second call does nothing."""
        self._each("at the end", lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, when: str, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # of whatever kind: a run is worth more than what is written of it
                del self._sinks[name]
                with suppress(Exception):
                    sink.close()
                hint = f"; pip install {_INSTALL[name]}" if isinstance(error, ImportError) and name in _INSTALL else ""
                text = str(error).strip().partition("\n")[0]
                self._failures[name] = f"dropped {when}: {type(error).__name__}: {text}{hint}"
                log.warning("%s", self.failures[-1])
