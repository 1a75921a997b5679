"""Records steps: the timeline of a pipeline's last step, on one clock for its ranks, and windows of torch.profiler.

    engine.train_step(batches)
    shardwise.save_timeline(engine, "timeline.json")    # all ranks call it

`shardwise timeline config.toml --recorded timeline.json` draws it under the plan, and ui.perfetto.dev opens it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torch.profiler import profile, supported_activities

from shardwise.comm.merged import exchange_texts
from shardwise.config.arguments import checked
from shardwise.config.written_files import write_whole
from shardwise.engine.engine import Engine
from shardwise.report.chrome_trace import chrome_trace
from shardwise.runtime.device import numbers_on
from shardwise.schedule import Action, TimedAction
from shardwise.zero.flat_buffer import ParamState

PROFILE_NAME: Final = "profile"

log = logging.getLogger("shardwise")


def gather_timeline(engine: Engine) -> tuple[TimedAction, ...]:
    """Return the timed actions of the last step on all ranks of this rank's pipeline; the first starts at 0 s.

    All ranks call it. Ranks are numbered along the pipeline. A small all-reduce aligns their clocks, so they agree to
    within the time that it takes.

    Args:
        engine: an engine that has taken a step; without `mesh.pp` only this rank's actions are returned.

    Raises:
        RuntimeError: the engine simulates the other ranks.
    """
    engine.parts.refuse_if_simulated()
    comm = engine.parts.comms.pipeline
    comm.max_scalars(numbers_on(engine.device, [0.0]), "clocks of the timeline")
    here_s = time.perf_counter()
    rows = [
        (str(timed.action), timed.start_s - here_s, timed.end_s - here_s, timed.stream) for timed in engine.timeline
    ]
    gathered = [
        TimedAction(Action.parse(action), rank, start_s, end_s, stream)
        for rank, text in enumerate(exchange_texts(comm, json.dumps(rows), "timeline"))
        for action, start_s, end_s, stream in json.loads(text)
    ]
    first_s = min((timed.start_s for timed in gathered), default=0.0)
    return tuple(
        TimedAction(timed.action, timed.rank, timed.start_s - first_s, timed.end_s - first_s, timed.stream)
        for timed in gathered
    )


@checked
def save_timeline(engine: Engine, path: str | Path) -> None:
    """Write the last step's timeline as a Chrome trace; all ranks call it, and rank 0 writes that of its pipeline.

    Args:
        path: the file, in a folder that exists.

    Raises:
        OSError: rank 0 cannot write it.
    """
    write_timeline(engine, path, gather_timeline(engine))


def write_timeline(engine: Engine, path: str | Path, actions: Sequence[TimedAction]) -> None:
    """Write `actions` to `path` as a Chrome trace, on rank 0 of the `engine` alone."""
    if engine.comm.comm_log.rank == 0:
        write_whole(path, json.dumps(chrome_trace(actions)))


class ProfileWindow:
    """Records the steps of a window; what fails is logged once, and the run goes on.

    Args:
        steps: the first and the last step; None records nothing.
        folder: of the run; None records nothing.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path | None, engine: Engine) -> None:
        self._steps = steps if folder is not None else None
        self._path = (folder or Path()) / PROFILE_NAME / f"rank-{engine.comm.rank}.pt.trace.json.gz"
        self._engine = engine
        self._profile: profile | None = None

    def between(self, num_steps: int) -> None:
        """Begin or end the window after `num_steps` steps."""
        if self._steps is None:
            return
        first, last = self._steps
        if self._profile is not None and num_steps >= last:
            self.close()
        elif self._profile is None and first <= num_steps + 1 <= last:
            try:
                self._settle()
                self._profile = profile(activities=supported_activities())
                self._profile.start()
            except RuntimeError as error:  # another profiler is on
                self._profile = self._steps = None
                log.warning("steps %d to %d are not profiled: %s", first, last, error)

    def close(self) -> None:
        """End a window that is open, and write its file."""
        recorded, self._profile, self._steps = self._profile, None, None
        if recorded is None:
            return
        try:
            self._settle()
            recorded.stop()
            self._path.parent.mkdir(exist_ok=True)
            recorded.export_chrome_trace(str(self._path))
        except (RuntimeError, OSError) as error:
            log.warning("%s is not written: %s", self._path, error)

    def _settle(self) -> None:
        """Wait for the collectives that a step leaves under way; one that outlives a profile corrupts its memory."""
        for group in self._engine.parts.states().sharding.groups:
            if group.state is ParamState.UNSHARDING:
                group.wait()
