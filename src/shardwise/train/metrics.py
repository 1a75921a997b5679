"""Defines the numbers that are kept of each step, and the one name that each has: in files, on screens, in sinks.

`sinks` writes them, `progress` and `summary` show them.

>>> record = StepRecord(step=1, loss=8.25, count=4096, grad_norm=2.0, lr=1e-4, skipped=False, step_s=0.5,
...                     tokens_per_s=8192.0, memory_bytes={"parameters": 1024})
>>> json.loads(to_json_line(record))["memory_bytes"]
{'parameters': 1024}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardwise.engine.types import StepResult
from shardwise.runtime.memory_tracker import MemorySnapshot
from shardwise.schedule.actions import TimedAction

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


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Holds the numbers that are kept of one step; losses are nats a token, means over all ranks.

    Attributes:
        step: its number, from 1.
        count: target tokens that counted, over all ranks.
        grad_norm: the global gradient norm before clipping.
        skipped: whether an fp16 overflow left the parameters as they were.
        step_s: seconds of the whole step, reading the batch included.
        tokens_per_s: tokens a second of all ranks together, in this step alone.
        memory_bytes: bytes live on rank 0 after the step, by category.
        peak_bytes: bytes at the highest total within the step, by category; None where it was not measured.
        eval_loss: loss on held-out data after this step; None where it was not evaluated.
        mfu: share of the devices' peak FLOP/s in this step; None where it is not known.
        slow: of a step that took long, which `rank` the others waited for and in which `part`; else None.
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
    slow: Mapping[str, Any] | None = None


def record_of(result: StepResult, step_s: float, snapshot: MemorySnapshot, is_metered: bool) -> StepRecord:
    """Return the record of a step.

    Args:
        result: of the engine.
        step_s: seconds of the whole step.
        snapshot: of the memory after the step.
        is_metered: whether the peak in the snapshot is the step's.
    """
    peak = {category.value: num_bytes for category, num_bytes in snapshot.peak_live_bytes.items()}
    return StepRecord(
        step=result.step,
        loss=result.loss,
        count=result.count,
        grad_norm=result.grad_norm,
        lr=result.lr,
        skipped=result.skipped,
        step_s=step_s,
        tokens_per_s=result.count / step_s,
        memory_bytes={category.value: num_bytes for category, num_bytes in snapshot.live_bytes.items()},
        peak_bytes=peak if is_metered else None,
    )


def to_json_line(record: StepRecord) -> str:
    """Return the record as one line of strict JSON: unknown values are left out; those that are not finite are null."""
    known = {key: value for key, value in asdict(record).items() if value is not None}
    return json.dumps({key: _finite(value) for key, value in known.items()}, allow_nan=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the record's numbers by the names that they have everywhere, for sinks that take a number a name.

    >>> record = StepRecord(step=1, loss=8.25, count=4096, grad_norm=2.0, lr=1e-4, skipped=False, step_s=0.5,
    ...                     tokens_per_s=8192.0, memory_bytes={"parameters": 1024}, peak_bytes={"parameters": 2048})
    >>> [name for name in scalars(record) if name.endswith(("parameters", "total"))]
    ['memory_bytes/parameters', 'peak_bytes/parameters', 'peak_bytes/total']
    """
    found: dict[str, float] = {
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "lr": record.lr,
        "tokens_per_s": record.tokens_per_s,
        "step_s": record.step_s,
    }
    found |= {f"memory_bytes/{category}": num_bytes for category, num_bytes in record.memory_bytes.items()}
    if record.peak_bytes is not None:
        found |= {f"peak_bytes/{category}": num_bytes for category, num_bytes in record.peak_bytes.items()}
        found["peak_bytes/total"] = sum(record.peak_bytes.values())
    if record.eval_loss is not None:
        found["eval_loss"] = record.eval_loss
    if record.mfu is not None:
        found["mfu"] = record.mfu
    return found


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
