"""Writes a run's numbers to files: a line of JSON a step, TensorBoard events, and the last step's timeline.

The display is in `progress`. A line is given to the system before the next step begins, so a run that is killed keeps
every step it took.

>>> record = StepRecord(step=1, loss=8.25, count=4096, grad_norm=2.0, lr=1e-4, skipped=False, step_s=0.5,
...                     tokens_per_s=8192.0, memory_bytes={"parameters": 1024})
>>> json.loads(to_json_line(record))["memory_bytes"]
{'parameters': 1024}
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardwise.schedule.actions import TimedAction

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Holds the numbers that are kept of one step; losses are nats a token, means over all ranks.

    Attributes:
        step: its number, from 1.
        count: target tokens that counted, over all ranks.
        grad_norm: the global gradient norm before clipping.
        skipped: whether an fp16 overflow left the parameters as they were.
        step_s: seconds of the whole step, reading the batch included.
        tokens_per_s: tokens a second of all ranks together.
        memory_bytes: bytes live on rank 0 after the step, by category.
        peak_bytes: bytes at the highest total within the step, by category; None where it was not measured.
        eval_loss: loss on held-out data after this step; None where it was not evaluated.
    """

    step: int
    loss: float
    count: float
    grad_norm: float
    lr: float
    skipped: bool
    step_s: float
    tokens_per_s: float
    memory_bytes: Mapping[str, int]
    peak_bytes: Mapping[str, int] | None = None
    eval_loss: float | None = None


def to_json_line(record: StepRecord) -> str:
    """Return the record as one line of strict JSON: unknown values are left out; those that are not finite are null."""
    known = {key: value for key, value in asdict(record).items() if value is not None}
    return json.dumps({key: _finite(value) for key, value in known.items()}, allow_nan=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsWriter:
    """Writes `metrics.jsonl` and the folder `tensorboard` of a run, from its first step to its end.

    Args:
        folder: the run's folder; it holds neither yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines = (folder / METRICS_NAME).open("x", encoding="utf-8")
        self._events: Any = None
        self._has_events = True

    def write(self, record: StepRecord) -> None:
        """Write one step.

        Raises:
            OSError: the disk is full.
        """
        self._lines.write(to_json_line(record) + "\n")
        self._lines.flush()
        if self._events is None and self._has_events:
            self._events = self._open_events()
        if self._events is not None:
            for tag, value in _scalars(record):
                self._events.add_scalar(tag, value, record.step)

    def close(self) -> None:
        """Flush both; a second call does nothing."""
        self._lines.close()
        if self._events is not None:
            events, self._events = self._events, None
            events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_events(self) -> Any:
        # Imported after the first step, so that no step waits for it; a run without tensorboard still has its lines.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            self._has_events = False
            log.warning("no TensorBoard events: %s; install tensorboard for them", error)
            return None
        return SummaryWriter(str(self._folder / TENSORBOARD_NAME), flush_secs=10)


def _scalars(record: StepRecord) -> Iterable[tuple[str, float]]:
    yield "train/loss", record.loss
    yield "train/grad_norm", record.grad_norm
    yield "train/lr", record.lr
    yield "speed/tokens_per_s", record.tokens_per_s
    yield "speed/step_s", record.step_s
    if record.eval_loss is not None:
        yield "train/eval_loss", record.eval_loss
    for category, num_bytes in record.memory_bytes.items():
        yield f"memory_bytes/{category}", num_bytes
    if record.peak_bytes is not None:
        yield "memory_bytes/peak", sum(record.peak_bytes.values())


def write_timeline(path: Path, actions: Iterable[TimedAction]) -> None:
    """Write one line of JSON for each timed action; times are seconds since the first one began."""
    timed = list(actions)
    origin_s = min((each.start_s for each in timed), default=0.0)
    lines = [
        json.dumps(
            {
                "rank": each.rank,
                "lane": each.stream,
                "action": str(each.action),
                "start_s": round(each.start_s - origin_s, 6),
                "end_s": round(each.end_s - origin_s, 6),
            }
        )
        for each in timed
    ]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
