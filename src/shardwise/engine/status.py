"""The status of an engine says whether it can train, evaluate, save or only load.

>>> status = EngineStatus(check_host=lambda: None)
>>> status.begin_load(with_states=False)
>>> status.integrity.value
'weights mixed'
>>> status.end_load(with_states=False)
>>> status.check()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from shardwise.config.errors import EngineError
from shardwise.runtime.torch_private import in_backward
from shardwise.zero.memory_release import MemoryRelease


class Integrity(Enum):
    """Says what a load or a step that was cut off has left mixed, and so what must be loaded."""

    WHOLE = "whole"
    WEIGHTS_MIXED = "weights mixed"  # the weights of one step: any whole checkpoint
    ALL_MIXED = "all mixed"  # optimizer states too: a checkpoint that has them


@dataclass
class StopRequests:
    """Knows which ranks were asked to stop; they add what they know to a sum over the ranks that is taken anyway.

    Attributes:
        num_asked: ranks that were, at the last sum.
        rank_sum: the sum of their numbers, so the rank where it is one.
    """

    is_asked: Callable[[], bool] = bool
    num_asked: int = 0
    rank_sum: int = 0

    def to_sum(self, rank: int) -> tuple[float, float]:
        """Return what this rank adds to the sum."""
        is_asked = self.is_asked()
        return float(is_asked), float(is_asked * rank)

    def take(self, summed: Sequence[float]) -> list[float]:
        """Take the sum of `to_sum` from the end of a vector, and return the others."""
        *others, num_asked, rank_sum = summed
        self.num_asked, self.rank_sum = int(num_asked), int(rank_sum)
        return others


class EngineStatus:
    """Tracks whether an engine is open, its states whole and in place, its gradients complete.

    Each method that changes it is one transition. `check` and `check_present` raise where it does not allow a call.

    Args:
        check_host: raises what the thread that works on the host has failed with.

    Attributes:
        is_in_backward: a backward is under way, or has raised.
        away: the states that are offloaded until `reload`; None where all are in place.
    """

    def __init__(self, check_host: Callable[[], None]) -> None:
        self._check_host = check_host
        self._is_closed = self.is_in_backward = False
        self.away: MemoryRelease | None = None
        self.integrity = Integrity.WHOLE

    def close(self) -> bool:
        """Close it for good, and say whether it was open."""
        was_open, self._is_closed = not self._is_closed, True
        return was_open

    def begin_backward(self) -> None:
        """Note that gradients are incomplete until `end_backward`."""
        self.is_in_backward = True

    def end_backward(self) -> None:
        """Note that gradients are complete, or have been dropped."""
        self.is_in_backward = False

    def release(self, states: MemoryRelease) -> None:
        """Note that states are away."""
        self.away = states

    def restore(self) -> None:
        """Bring the states back that are away."""
        if self.away is not None:
            self.away.restore()
            self.away = None

    def mix(self) -> None:
        """Note that some states are of one step and others of another, until all are loaded."""
        self.integrity = Integrity.ALL_MIXED

    def begin_load(self, with_states: bool) -> None:
        """Note that what is loaded is mixed until `end_load`; `with_states` if optimizer states are loaded too."""
        if with_states:
            self.mix()
        elif self.integrity is Integrity.WHOLE:
            self.integrity = Integrity.WEIGHTS_MIXED

    def end_load(self, with_states: bool) -> None:
        """Note that all is read; weights alone cannot repair what is mixed in the optimizer's states."""
        if with_states or self.integrity is Integrity.WEIGHTS_MIXED:
            self.integrity = Integrity.WHOLE

    def check_present(self, params_suffice: bool = False) -> None:
        """Raise where the engine is closed or states are away; parameters are enough where they `params_suffice`.

        Raises:
            EngineError: it names what is away.
        """
        if self._is_closed:
            raise EngineError("engine-closed", "the engine is closed; call shardwise.initialize for a new one")
        if self.away is not None:
            self.away.refuse(params_suffice)

    def check(self, params_suffice: bool = False) -> None:
        """Raise where the engine can be used only after another call; parameters may suffice as in `check_present`.

        Raises:
            EngineError: it names that call.
            HostWorkError: the thread that works on the host has failed.
        """
        self.check_present(params_suffice)
        if self.is_in_backward and not in_backward():
            raise EngineError(
                "gradients-incomplete",
                "the last backward raised and left gradients incomplete; call engine.zero_grad() first",
            )
        if self.integrity is not Integrity.WHOLE:
            raise EngineError(
                "states-mixed",
                "states are mixed, since the last load or step was cut off midway; load a checkpoint that is whole",
            )
        self._check_host()
