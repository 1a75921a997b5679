"""What one rank holds and sends in a step, of a real rank and of a simulated one: to be equal."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.waiting import settled
from shardwise import Engine, Simulation
from shardwise.comm.records import Collective
from shardwise.runtime.memory_tracker import Category


@dataclass(frozen=True)
class Measured:
    """What one rank held and sent in a step, not its first."""

    at_rest: dict[Category, int]
    peak: dict[Category, int]
    calls: tuple[Collective, ...]
    actions: tuple[str, ...]


def measure_steps(engine: Engine, steps: Sequence[Sequence[Any]]) -> Measured:
    """Take real steps over the micro-batches of each, the first of them unseen, and close the engine.

    gloo's threads may hold a buffer for a moment longer, so the lowest of several steps is taken.
    """
    engine.train_step(steps[0])
    calls: tuple[Collective, ...] = ()
    at_rest: list[dict[Category, int]] = []
    peaks = []
    engine.parts.state.before_update = lambda: at_rest.append(_settled(engine))
    for batches in steps[1:]:
        engine.comm.comm_log.recent = deque()
        engine.memory.reset_peak()
        with engine.memory.meter():
            engine.train_step(batches)
        peaks.append(engine.memory.snapshot())
        calls = calls or tuple(engine.comm.comm_log.recent)
    actions = tuple(str(timed.action) for timed in engine.timeline)
    engine.close()
    lowest = min(peaks, key=lambda snapshot: snapshot.peak_bytes)
    lowest_at_rest = min(at_rest, key=lambda live_bytes: sum(live_bytes.values()))
    return Measured(lowest_at_rest, dict(lowest.peak_live_bytes), calls, actions)


def simulated(simulation: Simulation) -> Measured:
    """The same of a simulated rank."""
    return Measured(
        dict(simulation.at_rest.live_bytes),
        dict(simulation.peak.peak_live_bytes),
        simulation.calls,
        tuple(str(timed.action) for timed in simulation.actions),
    )


def _settled(engine: Engine) -> dict[Category, int]:
    return settled(lambda: dict(engine.memory.snapshot().live_bytes))
