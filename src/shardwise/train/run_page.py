"""Keeps `report.html` in a run's folder up to date while the run trains, and counts what rank 0 sends for it.

A process of the lowest priority reads the run's files and writes the page, so a step never waits for it. It is started
at most every half minute, and so rarely that it takes 2 % of one core at most. Nothing here may end a run.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from shardwise.comm.records import CollectiveCount
from shardwise.report.page import write_whole
from shardwise.report.run_folder import WIRE_NAME, write_run_page

EVERY_S: Final = 30.0
_LARGEST_SHARE: Final = 0.02
_LOWEST_PRIORITY: Final = 19

log = logging.getLogger("shardwise")


class RunPage:
    """Refreshes the page of a run on rank 0, from its first step to its end.

    Args:
        folder: the run's folder.
        counts: what this rank has sent so far, by axis and op; they grow while it trains.
        every_s: the least seconds between two pages.
    """

    def __init__(
        self, folder: Path, counts: Mapping[tuple[str, str], CollectiveCount], every_s: float = EVERY_S
    ) -> None:
        self._folder = folder
        self._counts = counts
        self._every_s = every_s
        self._first: dict[tuple[str, str], int] = {}
        self._num_steps = -1
        self._child: subprocess.Popen[bytes] | None = None
        self._started_s = time.monotonic()
        self._due_s = self._started_s + every_s

    def see_step(self) -> None:
        """Count a step; start to write the page if it is due."""
        self._num_steps += 1
        if self._num_steps == 0:  # what was sent before and in the first step is setup, too
            self._first = {key: count.wire_bytes for key, count in self._counts.items()}
        now_s = time.monotonic()
        if self._child is not None and self._child.poll() is not None:
            self._due_s = self._started_s + max(self._every_s, (now_s - self._started_s) / _LARGEST_SHARE)
            self._child = None
        if self._child is None and now_s >= self._due_s:
            self._started_s = now_s
            self._start()

    def finish(self) -> Path | None:
        """Write the last page, and return its path; None where it cannot be written."""
        try:
            if self._child is not None:
                self._child.wait()
            self._write_counts()
            return write_run_page(self._folder)
        except Exception as error:  # of whatever kind: a run is worth more than its page
            log.warning("the page of this run is not written: %s: %s", type(error).__name__, error)
            return None

    def _start(self) -> None:
        try:
            self._write_counts()
            argv = [sys.executable, "-m", "shardwise.report.run_folder", str(self._folder)]
            nowhere = subprocess.DEVNULL
            self._child = subprocess.Popen(argv, stdin=nowhere, stdout=nowhere, stderr=nowhere)
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._child.pid, _LOWEST_PRIORITY)
        except OSError as error:
            self._due_s = float("inf")
            log.warning("the page of this run is written at its end alone: %s", error)

    def _write_counts(self) -> None:
        if self._num_steps < 1:
            return
        axes = [
            {"axis": axis, "op": op, "bytes": (count.wire_bytes - self._first.get((axis, op), 0)) / self._num_steps}
            for (axis, op), count in self._counts.items()
        ]
        write_whole(self._folder / WIRE_NAME, json.dumps({"steps": self._num_steps, "axes": axes}) + "\n")
