"""Defines the numbers that are kept of each step, and the one name that each has: in files, on screens, in sinks.

>>> record = StepRecord(step=1, loss=8.25, count=4096, grad_norm=2.0, lr=1e-4, skipped=False, step_s=0.5,
...                     tokens_per_s=8192.0, memory_bytes={"parameters": 1024})
>>> json.loads(to_json_line(record))["memory_bytes"]
{'parameters': 1024}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final

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


def to_json_line(record: StepRecord) -> str:
    """Return the record as one line of strict JSON: unknown values are left out; those that are not finite are null."""
    known = {key: value for key, value in asdict(record).items() if value is not None}
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in known.items()}
    return json.dumps(finite, allow_nan=False)


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the record's numbers by the names that they have everywhere, for sinks that take a number a name.

    >>> record = StepRecord(step=1, loss=8.25, count=4096, grad_norm=2.0, lr=1e-4, skipped=False, step_s=0.5,
    ...                     tokens_per_s=8192.0, memory_bytes={"parameters": 1024}, peak_bytes={"parameters": 2048})
    >>> [name for name in scalars(record) if name.endswith(("parameters", "total"))]
    ['memory_bytes/parameters', 'peak_bytes/parameters', 'peak_bytes/total']
    """
    numbers = {name: getattr(record, name) for name in _SCALARS}
    found = {name: value for name, value in numbers.items() if value is not None}
    for name, sizes in (("memory_bytes", record.memory_bytes), ("peak_bytes", record.peak_bytes or {})):
        found |= {f"{name}/{category}": num_bytes for category, num_bytes in sizes.items()}
    return found | ({"peak_bytes/total": sum(record.peak_bytes.values())} if record.peak_bytes else {})
