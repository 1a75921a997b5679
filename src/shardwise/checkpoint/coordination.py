"""Coordinates the ranks of one save, through the store alone, so that it does not mix with training's collectives.

A save is two rounds. In each, every rank works and reports the outcome, rank 0 judges all reports, and every rank gets
the verdict. A rank that fails reports it, and all raise the same error. How long a big write takes is unknown, so ranks
show that they make progress, and are given up only when they have shown none for the time-out. With one rank there is
no store, and the same code runs.

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

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import torch.distributed as dist

from shardwise.checkpoint.manifest import AbsentRankError, CheckpointError
from shardwise.comm.consistency import listed
from shardwise.comm.store import PatientStore
from shardwise.config.errors import code_of
from shardwise.runtime.clock import AwakeClock

_PROGRESS_S: Final = 1.0
_MIN_SLEEP_S, _MAX_SLEEP_S = 1e-3, 5e-2
# Seconds that rank 0 waits for the other ranks, which only read the verdicts from the store.
_READ_S: Final = 5.0
# torch's store closes the connection over a value of more than 8 MiB; a character has up to 4 bytes.
_CHUNK: Final = 2**20
# The first character of a report: so it is never empty, which some stores take for missing. After `f` and `a` follow
# the error's code, a space and its message.
_DONE, _FAILED, _ABSENT = "d", "f", "a"

log = logging.getLogger("shardwise")


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
        self._store = None if store is None else PatientStore(store, timeout_s, f"save/{number}")
        self._rank, self._ranks = rank, range(world_size)
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._reported: set[int] = set()
        self._subject = subject
        self._progress_s = min(_PROGRESS_S, timeout_s / 4)
        self._next_progress_s = 0.0
        self._verdicts: list[str] = []
        self._absent: list[int] = []

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
        note, cause = self._attempt(work)
        try:
            if self._rank == 0:
                verdict, judge_cause = self._judge(self._gather(name, note), judge)
                cause = cause or judge_cause
                self._put(f"{name}/verdict", verdict)
            else:
                self._put(f"{name}/{self._rank}", note)
                verdict = self._await_verdict(f"{name}/verdict")
        except RuntimeError as error:
            raise AbsentRankError(
                "store-gone",
                f"{self._subject} failed: the store does not answer ({_one_line(error)}); the process that holds it, "
                "mostly rank 0's or the launcher's, has died or is stopped",
            ) from error
        self._verdicts.append(f"{name}/verdict")
        if verdict[0] != _DONE:
            code, _, text = verdict[1:].partition(" ")
            raise (AbsentRankError if verdict[0] == _ABSENT else CheckpointError)(code, text) from cause
        return verdict[1:]

    def show_progress(self) -> None:
        """Show the other ranks, at most about once a second, that this rank makes progress."""
        now_s = time.monotonic()
        if self._store is not None and now_s >= self._next_progress_s:
            self._next_progress_s = now_s + self._progress_s
            self._store.add(f"progress/{self._rank}", 1)

    def finish(self) -> None:
        """End the rounds; the last call. Rank 0 waits until all have read the verdicts, and clears the store.

        Rank 0 may be about to end its process, and the store with it.
        """
        if self._store is None or self._absent:
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

    def _gather(self, name: str, own: str) -> dict[int, str]:
        """Return the reports of all ranks; for those that are given up, a report that says so."""
        keys = {rank: f"{name}/{rank}" for rank in self._ranks[1:]}
        absent = self._await(keys)
        notes = {rank: self._take(key) for rank, key in keys.items() if self._has(key)}
        self._absent = [rank for rank in absent if rank not in notes]
        return {0: own} | notes | {rank: self._absent_note(rank) for rank in self._absent}

    def _judge(
        self, notes: Mapping[int, str], judge: Callable[[Mapping[int, str]], str]
    ) -> tuple[str, Exception | None]:
        failed = {rank: note for rank, note in notes.items() if note[0] != _DONE}
        if not failed:
            return self._attempt(lambda: judge({rank: note[1:] for rank, note in notes.items()}))
        first, *others = failed
        kind = _ABSENT if self._absent else _FAILED
        return kind + failed[first][1:] + (f" (and on {listed(others)})" if others else ""), None

    def _await_verdict(self, key: str) -> str:
        if self._await({0: key}):
            self._absent = [0]
            return self._absent_note(0)
        return self._take(key, keep=True)

    def _await(self, keys: Mapping[int, str]) -> list[int]:
        """Wait until each rank has put its key; return early, with the ranks that have shown no progress."""
        if self._store is None:
            return []
        clock = AwakeClock(gap_s=2 * self._progress_s)
        next_look_s = 0.0
        seen = dict.fromkeys(keys, (-1, 0.0))
        while not self._store.check(list(keys.values())):
            now_s = clock.now_s()
            if now_s >= next_look_s:
                next_look_s = now_s + self._progress_s
                # Other ranks may be waiting for this one, which only waits for a third.
                self.show_progress()
                if absent := [rank for rank, key in keys.items() if self._is_absent(rank, key, seen, now_s)]:
                    return absent
            time.sleep(min(_MAX_SLEEP_S, max(_MIN_SLEEP_S, now_s / 16)))
        return []

    def _is_absent(self, rank: int, key: str, seen: dict[int, tuple[int, float]], now_s: float) -> bool:
        if self._store is None or self._has(key):
            return False
        count = self._store.add(f"progress/{rank}", 0)
        if count != seen[rank][0]:
            seen[rank] = count, now_s
        silent_s = now_s - seen[rank][1]
        if silent_s > self._patience_s and rank not in self._reported:
            self._reported.add(rank)
            log.error(
                "%s: rank %d waits for rank %d, which has shown no progress for %.0f s; see its log",
                self._subject,
                self._rank,
                rank,
                silent_s,
            )
        return silent_s > self._timeout_s

    def _attempt(self, work: Callable[[], str]) -> tuple[str, Exception | None]:
        """Do the work and return this rank's report: the outcome, or that it failed and why; and the error, if any."""
        try:
            return _DONE + work(), None
        except Exception as error:
            name = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            return self._failed(self._rank, code_of(error, "rank-failed"), f"{name}{_one_line(error)}"), error

    def _absent_note(self, rank: int) -> str:
        text = f"it has shown no progress for {self._timeout_s:g} s; see its log"
        return self._failed(rank, "rank-absent", text, _ABSENT)

    def _failed(self, rank: int, code: str, text: str, kind: str = _FAILED) -> str:
        return f"{kind}{code} {self._subject} failed on rank {rank}: {text}"

    def _has(self, key: str) -> bool:
        return self._store is not None and self._store.check([key])

    def _put(self, key: str, text: str) -> None:
        """Store a text of any length; the number of its chunks comes last, so that a reader of it finds them all."""
        if self._store is None:
            return
        starts = range(0, len(text), _CHUNK)
        for number, start in enumerate(starts):
            self._store.set(f"{key}/{number}", text[start : start + _CHUNK])
        self._store.set(key, str(len(starts)))

    def _take(self, key: str, keep: bool = False) -> str:
        """Read what `_put` has stored, and remove it."""
        if self._store is None:
            return ""
        keys = [f"{key}/{number}" for number in range(int(self._store.get(key)))]
        text = "".join(self._store.get(each).decode() for each in keys)
        for each in () if keep else (key, *keys):
            self._store.delete_key(each)
        return text


def _one_line(error: Exception) -> str:
    """Return the first line of an error's message; bytes of file names that are no text are escaped."""
    first: Iterable[str] = str(error).splitlines()[:1]
    return "".join(first).encode(errors="backslashreplace").decode()
