"""Coordinates the ranks of one save, through the store alone, so that it does not mix with training's collectives.

A save is two rounds. In each, every rank works and reports the outcome, rank 0 judges all reports, and every rank gets
the verdict. A rank that fails reports it, and all raise the same error. How long a big write takes is unknown, so ranks
show that they make progress, and are given up only when they have shown none for the time-out. One rank runs
the same code.

>>> rounds = StoreBarrier(None, 0, rank=0, world_size=1, timeout_s=5.0, subject="checkpoint of step 7")
>>> rounds.run("write", lambda: "12 bytes", lambda said: f"rank 0 has written {said[0]}")
'rank 0 has written 12 bytes'
>>> rounds.run("commit", lambda: str(1 // 0), lambda said: "")
Traceback (most recent call last):
    ...
shardwise.checkpoint.manifest.CheckpointError: checkpoint of step 7 failed on rank 0: ZeroDivisionError: integer \
division or modulo by zero
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch.distributed as dist

from shardwise.checkpoint.manifest import AbsentRankError, CheckpointError
from shardwise.comm.consistency import listed
from shardwise.comm.store import PatientStore
from shardwise.config.errors import code_of
from shardwise.runtime.clock import AwakeClock

_PROGRESS_S: Final = 1.0
_MIN_SLEEP_S, _MAX_SLEEP_S = 1e-3, 5e-2
_READ_S: Final = 5.0  # rank 0 waits so long for the other ranks, which only read the verdicts from the store
_CHUNK: Final = 2**20  # torch's store takes no value of more than 8 MiB; a character has up to 4 bytes
log = logging.getLogger("shardwise")


class _Report(NamedTuple):
    """Holds the text of a success, or an error's code and message; `is_absent` of a rank that shows no progress."""

    text: str
    code: str = ""
    is_absent: bool = False


class StoreBarrier:
    """Counts the rounds of one save, on one rank; only the thread that saves uses it.

    Args:
        store: of the engine, the same on all ranks; None where there is one rank.
        number: of the save, the same on all ranks.
        rank: of this process.
        world_size: how many ranks save.
        timeout_s: seconds without progress after which a rank is given up.
        subject: what is saved, for messages.
        patience_s: seconds without progress after which a rank is named in the log.
    """

    def __init__(
        self,
        store: dist.Store | None,
        number: int,
        rank: int,
        world_size: int,
        timeout_s: float,
        subject: str,
        patience_s: float = math.inf,
    ) -> None:
        # One rank has a store of its own, so that the same code runs.
        patient = None if store is None else PatientStore(store, timeout_s, f"save/{number}")
        self._store: dist.Store = dist.HashStore() if patient is None else patient
        self._rank, self._ranks, self._subject = rank, range(world_size), subject
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._progress_s, self._next_progress_s = min(_PROGRESS_S, timeout_s / 4), 0.0
        self._verdicts: list[str] = []
        self._has_lost = False

    def run(self, name: str, work: Callable[[], str], judge: Callable[[Mapping[int, str]], str]) -> str:
        """Do this rank's work, wait for the other ranks, and return the verdict, the same on all ranks.

        Args:
            name: of the round.
            work: does this rank's work; returns its report.
            judge: runs on rank 0 only, once all have worked, with the reports by rank; returns the verdict.

        Raises:
            CheckpointError: the work failed on a rank, or the judgement failed.
            AbsentRankError: a rank shows no progress, or the store is gone.
        """
        own, cause = self._attempt(work)
        key = f"{name}/verdict"
        self._verdicts.append(key)
        try:
            if self._rank == 0:
                reports = {0: own} | self._receive({rank: f"{name}/{rank}" for rank in self._ranks[1:]})
                failed = {rank: each for rank, each in reports.items() if each.code}
                if failed:
                    first, *others = failed
                    text = failed[first].text + (f" (and on {listed(others)})" if others else "")
                    verdict = _Report(text, failed[first].code, self._has_lost)
                else:
                    verdict, cause = self._attempt(lambda: judge({rank: each.text for rank, each in reports.items()}))
                self._put(key, verdict)
            else:
                self._put(f"{name}/{self._rank}", own)
                verdict = self._receive({0: key}, keep=True)[0]
        except RuntimeError as error:
            raise AbsentRankError(
                "store-gone",
                f"{self._subject} failed: the store does not answer ({_one_line(error)}); the process that holds it, "
                "mostly rank 0's or the launcher's, has died or is stopped",
            ) from error
        if verdict.code:
            raise (AbsentRankError if verdict.is_absent else CheckpointError)(verdict.code, verdict.text) from cause
        return verdict.text

    def show_progress(self) -> None:
        """Show the other ranks, at most about once a second, that this rank makes progress."""
        if time.monotonic() >= self._next_progress_s:
            self._next_progress_s = time.monotonic() + self._progress_s
            self._store.add(f"progress/{self._rank}", 1)

    def finish(self) -> None:
        """End the rounds; the last call. Rank 0, whose process may end with the store, waits until all have read."""
        if self._has_lost:
            return
        try:
            if self._rank:
                self._store.add("num_read", 1)
                return
            deadline_s = time.monotonic() + min(_READ_S, self._timeout_s)
            while self._store.add("num_read", 0) < len(self._ranks) - 1:
                if time.monotonic() > deadline_s:
                    return
                time.sleep(_MIN_SLEEP_S)
            for key in self._verdicts:
                self._take(key)
            for key in ("num_read", *(f"progress/{rank}" for rank in self._ranks)):
                self._store.delete_key(key)
        except RuntimeError:  # the process that holds the store has ended before this one
            return

    def _receive(self, keys: Mapping[int, str], keep: bool = False) -> dict[int, _Report]:
        """Wait until each rank has put its report; return early once a rank has shown no progress for the time-out."""
        clock, next_look_s = AwakeClock(gap_s=2 * self._progress_s), 0.0
        seen, named, lost = dict.fromkeys(keys, (-1, 0.0)), set[int](), list[int]()
        while keys and not lost and not self._store.check([*keys.values()]):
            now_s = clock.now_s()
            if now_s >= next_look_s:
                next_look_s = now_s + self._progress_s
                self.show_progress()  # others may be waiting for this one, which only waits for a third
                for rank in [rank for rank, key in keys.items() if not self._store.check([key])]:
                    count = self._store.add(f"progress/{rank}", 0)
                    seen[rank] = seen[rank] if count == seen[rank][0] else (count, now_s)
                    silent_s = now_s - seen[rank][1]
                    if silent_s > self._patience_s and rank not in named:
                        named.add(rank)
                        text = "%s: rank %d waits for rank %d, which has shown no progress for %.0f s; see its log"
                        log.error(text, self._subject, self._rank, rank, silent_s)
                    lost += [rank] if silent_s > self._timeout_s else []
            time.sleep(min(_MAX_SLEEP_S, max(_MIN_SLEEP_S, now_s / 16)))
        found = {rank: self._take(key, keep) for rank, key in keys.items() if self._store.check([key])}
        text = f"it has shown no progress for {self._timeout_s:g} s; see its log"
        absent = {rank: self._failed(rank, "rank-absent", text, is_absent=True) for rank in lost if rank not in found}
        self._has_lost = self._has_lost or bool(absent)
        return found | absent

    def _attempt(self, work: Callable[[], str]) -> tuple[_Report, Exception | None]:
        """Do the work and return this rank's report: the outcome, or that it failed and why; and the error, if any."""
        try:
            return _Report(work()), None
        except Exception as error:
            name = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            return self._failed(self._rank, code_of(error, "rank-failed"), f"{name}{_one_line(error)}"), error

    def _failed(self, rank: int, code: str, text: str, is_absent: bool = False) -> _Report:
        return _Report(f"{self._subject} failed on rank {rank}: {text}", code, is_absent)

    def _put(self, key: str, report: _Report) -> None:
        """Store a report of any length; the number of its chunks comes last, so that a reader of it finds them all."""
        text = json.dumps(report)
        starts = range(0, len(text), _CHUNK)
        for number, start in enumerate(starts):
            self._store.set(f"{key}/{number}", text[start : start + _CHUNK])
        self._store.set(key, str(len(starts)))

    def _take(self, key: str, keep: bool = False) -> _Report:
        """Read what `_put` has stored, and remove it unless it is to be kept."""
        keys = [f"{key}/{number}" for number in range(int(self._store.get(key)))]
        report = _Report(*json.loads("".join(self._store.get(each).decode() for each in keys)))
        for each in () if keep else (key, *keys):
            self._store.delete_key(each)
        return report


def _one_line(error: Exception) -> str:
    """Return the first line of an error's message; bytes of file names that are no text are escaped."""
    return "".join(str(error).splitlines()[:1]).encode(errors="backslashreplace").decode()
