"""Hold the seconds that the computations of a micro-batch take on a rank: given to `simulate`, or read from a run.

>>> from shardwise.schedule.actions import Action
>>> forward, backward = (Action.parse(text) for text in ("0F0", "0B0"))
>>> mean_times([TimedAction(forward, 0, 0.0, 1.0, "compute"), TimedAction(backward, 0, 1.0, 4.0, "compute")])
OpTimes(forward_s=1.0, backward_input_s=1.5, backward_weight_s=1.5, transfer_s=0.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.schedule.actions import COMPUTATIONS, ActionKind, TimedAction
from shardwise.schedule.simulate import Cost


@dataclass(frozen=True)
class OpTimes:
    """Hold the seconds that a rank takes for one micro-batch, all its stages together, and that a transfer takes."""

    forward_s: float = 1.0
    backward_input_s: float = 1.0
    backward_weight_s: float = 1.0
    transfer_s: float = 0.0

    def cost(self, num_stages: int) -> Cost:
        """Return the cost function for `simulate` of ranks with `num_stages` equal stages; other kinds cost 0."""
        seconds = {
            ActionKind.FORWARD: self.forward_s / num_stages,
            ActionKind.BACKWARD: (self.backward_input_s + self.backward_weight_s) / num_stages,
            ActionKind.BACKWARD_INPUT: self.backward_input_s / num_stages,
            ActionKind.BACKWARD_WEIGHT: self.backward_weight_s / num_stages,
            ActionKind.SEND: self.transfer_s,
        }
        return lambda rank, action: seconds.get(action.kind, 0.0)


def mean_times(actions: Sequence[TimedAction]) -> OpTimes:
    """Return the mean times of a recorded run; a backward that was not split counts half for each gradient."""
    computations = [each for each in actions if each.action.kind in COMPUTATIONS]
    num_passes = len({(each.rank, each.action.micro_batch) for each in computations})

    def mean_s(kind: ActionKind) -> float:
        return sum(each.duration_s for each in computations if each.action.kind is kind) / max(1, num_passes)

    half_s = mean_s(ActionKind.BACKWARD) / 2
    return OpTimes(
        forward_s=mean_s(ActionKind.FORWARD),
        # Recomputation is part of the backward.
        backward_input_s=half_s + mean_s(ActionKind.BACKWARD_INPUT) + mean_s(ActionKind.RECOMPUTE),
        backward_weight_s=half_s + mean_s(ActionKind.BACKWARD_WEIGHT),
    )
