"""Coordinates the ranks of one save, through the store alone, so that it does not mix with training's collectives.

A save is two rounds. In each, every rank works and reports the outcome, rank 0 judges all reports, and every rank gets
the verdict: all raise the same error. How long a big write takes is unknown, so ranks show that they make progress, and
are given up only when they have shown none for the time-out. One rank runs the same code.

>>> rounds = StoreBarrier(None, 0, rank=0, world_size=1, timeout_s=5.0, subject="checkpoint of step 7")
>>> rounds.run("write", lambda: "12 bytes", lambda said: f"rank 0 has written {said[0]}")
'rank 0 has written 12 bytes'
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import torch.distributed as dist

from shardwise.checkpoint.manifest import AbsentRankError, CheckpointError
from shardwise.comm.consistency import listed
from shardwise.comm.store import PatientStore
from shardwise.config.errors import code_of
from shardwise.runtime.clock import AwakeClock

_ABSENT: Final = "rank-absent"
_PROGRESS_S, _MIN_SLEEP_S, _MAX_SLEEP_S = 1.0, 1e-3, 5e-2
_END_S: Final = 5.0  # rank 0 waits so long for the other ranks, which only read the last verdict
_PART: Final = 2**22  # torch's store takes no value of more than 8 MiB; JSON has one byte for each character


class _Report(NamedTuple):
    """Holds the text of a success, or an error's code and message."""

    text: str
    code: str = ""


class StoreBarrier:
    """Counts the rounds of one save, on one rank; only the thread that saves uses it.

    Args:
        store: of the engine, the same on all ranks; None where there is one rank.
        number: of the save, the same on all ranks.
        timeout_s: seconds without progress after which a rank is given up.
    """

    def __init__(
        self, store: dist.Store | None, number: int, rank: int, world_size: int, timeout_s: float, subject: str
    ) -> None:
        # One rank has a store of its own, so that the same code runs.
        self._store = dist.HashStore() if store is None else PatientStore(store, timeout_s, f"save/{number}")
        self._rank, self._ranks, self._subject, self._timeout_s = rank, range(world_size), subject, timeout_s
        self._progress_s, self._next_progress_s = min(_PROGRESS_S, timeout_s / 4), 0.0
        self._keys: list[str] = []  # put or read by this rank

    def run(self, name: str, work: Callable[[], str], judge: Callable[[Mapping[int, str]], str]) -> str:
        """Do this rank's work, wait for the other ranks, and return the verdict, the same on all ranks.

        Args:
            work: does this rank's work; returns its report.
            judge: runs on rank 0 only, once all have worked, with the reports by rank; returns the verdict.

        Raises:
            CheckpointError: the work failed on a rank, or the judgement failed.
            AbsentRankError: a rank shows no progress, or the store is gone.
        """
        own, cause = self._attempt(work)
        try:
            if self._rank:
                self._put(f"{name}/{self._rank}", own)
                verdict = self._receive(name, self._timeout_s)[0]
            else:
                reports = {0: own} | self._receive(name, self._timeout_s)
                if failed := sorted((each.code != _ABSENT, rank) for rank, each in reports.items() if each.code):
                    first, *others = (rank for _, rank in failed)
                    also = f" (and on {listed(others)})" if others else ""
                    verdict = _Report(reports[first].text + also, reports[first].code)
                else:
                    verdict, cause = self._attempt(lambda: judge({rank: each.text for rank, each in reports.items()}))
                self._put(f"{name}/verdict", verdict)
        except RuntimeError as error:
            text = f"{self._subject} failed: the store does not answer; the process that holds it, mostly rank 0's or "
            raise AbsentRankError("store-gone", f"{text}the launcher's, has died or is stopped ({error})") from error
        if verdict.code:
            raise (AbsentRankError if verdict.code == _ABSENT else CheckpointError)(*reversed(verdict)) from cause
        return verdict.text

    def show_progress(self) -> None:
        """Show the other ranks, at most about once a second, that this rank makes progress."""
        if time.monotonic() >= self._next_progress_s:
            self._next_progress_s = time.monotonic() + self._progress_s
            self._store.add(f"progress/{self._rank}", 1)

    def finish(self) -> None:
        """End the rounds; the last call. Rank 0, whose process may end with the store, waits until all have read."""
        with suppress(RuntimeError):  # the process that holds the store has ended before this one
            if self._rank:
                self._put(f"end/{self._rank}", _Report(""))
                return
            if not any(end.code for end in self._receive("end", min(_END_S, self._timeout_s)).values()):
                for key in (*self._keys, *(f"progress/{rank}" for rank in self._ranks)):
                    self._store.delete_key(key)

    def _receive(self, name: str, timeout_s: float) -> dict[int, _Report]:
        """Wait for rank 0's verdict, on rank 0 for all reports, or until a rank has shown no progress for too long."""
        keys = {0: f"{name}/verdict"} if self._rank else {rank: f"{name}/{rank}" for rank in self._ranks[1:]}
        clock, next_look_s = AwakeClock(gap_s=2 * self._progress_s), 0.0
        seen, lost = dict.fromkeys(keys, (-1, 0.0)), dict[int, _Report]()
        while keys and not lost and not self._store.check([*keys.values()]):
            if (now_s := clock.now_s()) >= next_look_s:
                next_look_s = now_s + self._progress_s
                self.show_progress()  # others may be waiting for this one, which only waits for a third
                for rank in [rank for rank, key in keys.items() if not self._store.check([key])]:
                    count = self._store.add(f"progress/{rank}", 0)
                    seen[rank] = seen[rank] if count == seen[rank][0] else (count, now_s)
                    if now_s - seen[rank][1] > timeout_s:
                        why = f"it has shown no progress for {timeout_s:g} s; see its log"
                        lost[rank] = _Report(f"{self._subject} failed on rank {rank}: {why}", _ABSENT)
            time.sleep(min(_MAX_SLEEP_S, max(_MIN_SLEEP_S, now_s / 16)))
        return lost | {rank: self._take(key) for rank, key in keys.items() if self._store.check([key])}

    def _attempt(self, work: Callable[[], str]) -> tuple[_Report, Exception | None]:
        """Do the work and return this rank's report: the outcome, or that it failed and why; and the error, if any."""
        try:
            return _Report(work()), None
        except Exception as error:
            name = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            text = f"{self._subject} failed on rank {self._rank}: {name}{error}".partition("\n")[0]
            return _Report(text, code_of(error, "rank-failed")), error

    def _put(self, key: str, report: _Report) -> None:
        """Store a report of any length; the list of its parts comes last, so that a reader finds them all."""
        text = json.dumps(report)
        parts = {f"{key}/{start}": text[start : start + _PART] for start in range(0, len(text), _PART)}
        for name, value in (parts | {key: json.dumps([*parts])}).items():
            self._store.set(name, value)
            self._keys.append(name)

    def _take(self, key: str) -> _Report:
        """Read what `_put` has stored."""
        parts = json.loads(self._store.get(key))
        self._keys += (key, *parts)
        return _Report(*json.loads(b"".join(map(self._store.get, parts))))
