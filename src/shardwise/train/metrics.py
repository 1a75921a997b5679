"""Defines the numbers that are kept of each step, and writes them where people look: JSONL, TensorBoard, W&B, MLflow.

Each number has one name, in files, on screens and in sinks. A sink that raises never stops training: it is logged once,
dropped, and named at the end of the run. Where Weights & Biases and MLflow write is up to their own settings
(`WANDB_MODE=offline`, `MLFLOW_TRACKING_URI`, ...).

>>> record = StepRecord(step=1, loss=8.25, count=4096, grad_norm=2.0, lr=1e-4, skipped=False, step_s=0.5,
...                     tokens_per_s=8192.0, memory_bytes={"parameters": 1024})
>>> json.loads(to_json_line(record))["memory_bytes"]
{'parameters': 1024}
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardwise.config.arguments import checked
from shardwise.config.written_files import open_end
from shardwise.engine.engine import Engine
from shardwise.report.page import flat

METRICS_NAME: Final = "metrics.jsonl"
MULT_PROB_ERROR: Final = 1.05
TENSORBOARD_NAME: Final = "tensorboard"
_MOST_PARAM_CHARS: Final = 500  # of a value, in MLflow

log = logging.getLogger("shardwise")

# What people read for each name of a file.
WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "loss": "loss",
        "eval_loss": "held-out loss",
        "lr": "lr",
        "grad_norm": "grad norm",
        "tokens_per_s": "tokens/s",
        "mfu": "MFU",
        "peak_bytes": "peak memory",
        "slow": "slow step",
    }
)
_SCALARS: Final = ("loss", "grad_norm", "lr", "tokens_per_s", "step_s", "eval_loss", "mfu")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Holds the numbers that are kept of one step; losses are nats a token, means over all ranks.

    Attributes:
        step: its number; the first step of a run is 1.
        count: target tokens that counted, over all ranks.
        grad_norm: the global gradient norm before clipping.
        skipped: whether an fp16 overflow left the parameters as they were.
        step_s: seconds of the whole step, reading the batch included.
        tokens_per_s: tokens a second of all ranks together, in this step alone.
        memory_bytes: bytes live on rank 0 after the step, by category.
        peak_bytes: bytes at the highest total within the step, by category; None where it was not measured.
        eval_loss: loss on held-out data after this step; None where it was not evaluated.
        mfu: share of the devices' peak FLOP/s in this step; None where it is not known.
        expert_skew: of each layer of experts, the tokens of the fullest over the mean; None where not counted.
        slow: of a step that took long, which `rank` the others waited for and in which `part`; else None.
        values: numbers of the script's own by name, such as a reward; None where it gave none.
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
    mfu: float | None = None
    expert_skew: Sequence[float] | None = None
    slow: Mapping[str, Any] | None = None
    values: Mapping[str, float] | None = None


def to_json_line(record: StepRecord) -> str:
    """Return the record as one line of strict JSON: unknown values are left out; those that are not finite are null."""
    present = {key: value for key, value in asdict(record).items() if value is not None}
    if record.values is not None:
        present["values"] = _finite(record.values)
    return json.dumps(_finite(present), allow_nan=False)


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the record's numbers by the names that they have everywhere, for sinks that take a number a name.

    >>> record = StepRecord(step=1, loss=8.25, count=4096, grad_norm=2.0, lr=1e-4, skipped=False, step_s=0.5,
    ...                     tokens_per_s=8192.0, memory_bytes={"parameters": 1024}, peak_bytes={"parameters": 2048})
    >>> [name for name in scalars(record) if name.endswith(("parameters", "total"))]
    ['memory_bytes/parameters', 'peak_bytes/parameters', 'peak_bytes/total']
    """
    numbers = {name: getattr(record, name) for name in _SCALARS}
    by_name = {name: value for name, value in numbers.items() if value is not None}
    for name, sizes in (("memory_bytes", record.memory_bytes), ("peak_bytes", record.peak_bytes or {})):
        by_name |= {f"{name}/{category}": num_bytes for category, num_bytes in sizes.items()}
    by_name |= {f"values/{name}": value for name, value in (record.values or {}).items()}
    by_name |= {f"expert_skew/{layer}": skew for layer, skew in enumerate(record.expert_skew or ())}
    return by_name | ({"peak_bytes/total": sum(record.peak_bytes.values())} if record.peak_bytes else {})


@checked
def token_mult_prob_error(
    engine: Engine, trained: Tensor, sampled: Tensor, mask: Tensor, *, limit: float = MULT_PROB_ERROR
) -> float:
    """Return by which factor the probabilities of tokens in training differ from those in generation: the mean of
    exp |difference of log-probabilities|, 1 where they agree, over the tokens of all ranks. All ranks call it.

    Above `limit` rank 0 logs a warning: what is trained is not what has sampled. Figure and limit are NeMo-RL's.

    Args:
        trained: log-probabilities by the engine, such as `engine.log_probs(batch).log_probs`.
        sampled: of the same shape, by what generated the tokens, at the same temperature.
        mask: 1 for each token that was sampled, 0 for those of the prompt and for padding.
    """
    factors = (trained.double() - sampled.to(trained.device).double()).abs().exp()
    sums = torch.stack([factors.where(mask.bool().to(trained.device), 0).sum(), mask.bool().sum().to(trained.device)])
    total, count = engine.parts.comms.data.sum_scalars(sums.to(engine.device), "token_mult_prob_error")
    error = total / count if count else 1.0
    if not error <= limit and engine.comm.rank == 0:
        log.warning(
            "token_mult_prob_error %.4f is above %g: the probabilities of training and of generation differ; compare "
            "weights, dtypes, temperature and padding of both sides",
            *(error, limit),
        )
    return error


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


Write: TypeAlias = Callable[[StepRecord], None]
Sink: TypeAlias = Callable[[Mapping[str, Any], RunInfo], AbstractContextManager[Write]]


@contextmanager
def jsonl(config: Mapping[str, Any], run: RunInfo) -> Iterator[Write]:
    """Write a line of JSON a step to `metrics.jsonl`; a run that is killed keeps every step that it took."""
    folder = run.folder or Path()
    with open_end(folder / METRICS_NAME, is_new=not run.first_step) as lines:  # a new run's is new

        def write(record: StepRecord) -> None:
            lines.write(f"{to_json_line(record)}\n".encode())
            lines.flush()

        yield write


@contextmanager
def tensorboard(config: Mapping[str, Any], run: RunInfo) -> Iterator[Write]:
    """Write TensorBoard events to the folder `tensorboard` of a run."""
    events: Any = None

    def write(record: StepRecord) -> None:
        nonlocal events
        if events is None:  # torch takes seconds to import its writer, for which the first step does not wait
            from torch.utils.tensorboard import SummaryWriter

            events = SummaryWriter(str((run.folder or Path()) / TENSORBOARD_NAME), flush_secs=10)
        for name, value in scalars(record).items():
            events.add_scalar(name, value, record.step)

    yield write
    if events is not None:
        events.close()


@contextmanager
def wandb(config: Mapping[str, Any], run: RunInfo) -> Iterator[Write]:
    """Write a run of Weights & Biases; its files are in the run's folder."""
    import wandb

    settings = wandb.Settings(console="off")  # or it takes stdout, on which the display draws
    folder = None if run.folder is None else str(run.folder)
    theirs = wandb.init(dir=folder, name=run.name or None, config=dict(config), settings=settings)
    yield lambda record: theirs.log(scalars(record), step=record.step)
    theirs.finish()


@contextmanager
def mlflow(config: Mapping[str, Any], run: RunInfo) -> Iterator[Write]:
    """Write a run of MLflow, or into the run that the process has begun already, with the config as parameters."""
    import mlflow

    is_own = mlflow.active_run() is None
    if is_own:
        mlflow.start_run(run_name=run.name or None)
    mlflow.log_params({key: value[:_MOST_PARAM_CHARS] for key, value in flat(config).items()})
    yield lambda record: mlflow.log_metrics(scalars(record), step=record.step)
    if is_own:
        mlflow.end_run()


SINKS: Final[Mapping[str, Sink]] = MappingProxyType(
    {"jsonl": jsonl, "tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
)
_NEEDS_FOLDER: Final = ("jsonl", "tensorboard")
_INSTALL: Final[Mapping[str, str]] = MappingProxyType({"wandb": "wandb", "mlflow": "mlflow-skinny"})


class SinkSet:
    """Writes the steps of a run to several sinks; what raises is dropped and named by `failures`.

    TensorBoard is on by default and no dependency, so where it is not installed the log alone says so.

    Args:
        names: of the sinks; without a folder those that write files there are left out.
    """

    def __init__(self, names: Sequence[str], config: Mapping[str, Any], run: RunInfo) -> None:
        self._sinks: dict[str, tuple[AbstractContextManager[Write], Write]] = {}
        self._failures: dict[str, str] = {}
        for name in names:
            if name in _NEEDS_FOLDER and run.folder is None:
                continue
            if name == "tensorboard" and find_spec("tensorboard") is None:
                log.warning("no TensorBoard events: pip install tensorboard for them")
                continue
            with self._dropping(name, "at the start"):
                sink = SINKS[name](config, run)
                self._sinks[name] = sink, sink.__enter__()

    @property
    def failures(self) -> tuple[str, ...]:
        """Return a line for each sink that was dropped."""
        return tuple(f"{name}: {failure}" for name, failure in self._failures.items())

    def write(self, record: StepRecord) -> None:
        """Write a step to all of them; the next step waits for it."""
        for name, (_, write) in list(self._sinks.items()):
            with self._dropping(name, f"in step {record.step}"):
                write(record)

    def close(self) -> None:
        """Write what is left and close all of them; a second call does nothing."""
        for name in list(self._sinks):
            with self._dropping(name, "at the end"):
                self._sinks.pop(name)[0].__exit__(None, None, None)

    @contextmanager
    def _dropping(self, name: str, when: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of whatever kind: a run is worth more than what is written of it
            if name in self._sinks:
                with suppress(Exception):
                    self._sinks.pop(name)[0].__exit__(None, None, None)
            hint = f"; pip install {_INSTALL[name]}" if isinstance(error, ImportError) and name in _INSTALL else ""
            text = str(error).strip().partition("\n")[0]
            self._failures[name] = f"dropped {when}: {type(error).__name__}: {text}{hint}"
            log.warning("%s", self.failures[-1])
