"""Records some steps with torch.profiler, into a file for each rank that Perfetto and TensorBoard open."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from shardwise.engine.engine import Engine
from shardwise.zero.param_group import ParamState

PROFILE_NAME: Final = "profile"

log = logging.getLogger("shardwise")


class ProfileWindow:
    """Records the steps of a window; what fails is logged once, and the run goes on.

    Args:
        steps: the first and the last step; None records nothing.
        folder: of the run; None records nothing.
        engine: that takes the steps.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path | None, engine: Engine) -> None:
        self._steps = steps if folder is not None else None
        self._path = (folder or Path()) / PROFILE_NAME / f"rank-{engine.comm.rank}.pt.trace.json.gz"
        self._engine = engine
        self._profile: profile | None = None

    def between(self, num_steps: int) -> None:
        """Begin or end the window between two steps.

        Args:
            num_steps: how many steps were taken.
        """
        if self._steps is None:
            return
        first, last = self._steps
        if self._profile is not None and num_steps >= last:
            self.close()
        elif self._profile is None and first <= num_steps + 1 <= last:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            try:
                self._settle()
                self._profile = profile(activities=activities)
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
        for group in self._engine.step_context.states().sharding.groups:
            if group.state is ParamState.UNSHARDING:
                group.wait()
