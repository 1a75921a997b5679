"""Values and protocols go in and out of an engine besides tensors: results of a step or evaluation, a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Folder = str | Path | None


class Scheduler(Protocol):
    """Names what a learning-rate schedule has in common with torch's."""

    def step(self) -> None:
        """Advance by one optimizer step."""


@dataclass(frozen=True)
class StepResult:
    """Holds the result of one optimizer step, over all ranks.

    Attributes:
        step: its number; the first step of a run is 1.
        loss: the mean over everything that counts, over ranks and micro-batches.
        count: how much counted, such as target tokens.
        grad_norm: of the mean gradient, before clipping.
        lr: of the first parameter group, as used in this step.
        skipped: parameters and optimizer are as they were, since nothing counted on any rank (`count` is 0), an fp16
            gradient overflowed, or a value was not finite under `run.on_nonfinite="skip"`.
        expert_skew: of each layer of experts, the tokens of the fullest one over their mean; empty where not counted.
    """

    step: int
    loss: float
    count: float
    grad_norm: float
    lr: float
    skipped: bool
    loss_scale: float
    expert_skew: tuple[float, ...] = ()


@dataclass(frozen=True)
class EvalResult:
    """Holds the mean loss over everything that counts, over ranks and batches, and the count; both are 0 where nothing
    does.
    """

    loss: float
    count: float
