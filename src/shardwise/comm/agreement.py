"""Ranks agree through the store alone, so that it does not mix with collectives: all raise, or all go on.

In a round every rank works and reports the outcome, the first rank judges all reports, and every rank gets the verdict:
so the traffic grows with the ranks, not with their square. How long a big write takes is unknown, so ranks show that
they make progress, and are given up only when they have shown none for the time-out. One rank needs no store.

    rank 0   work -> report --.            judge -> verdict --+--> until all have read it
    rank 1   work -> report --+--> store --'                  +--> the same text, or the same failures
    rank 2   (absent)       --' given up after the time-out   +-->

Ranks that come to different calls in one round all raise. A rank that skips a call, which the others have given up,
takes part again from its next call on.

>>> agreement = Agreement(None, (0,), rank=0, timeout_s=5.0)
>>> agreement.run("write", lambda: "12 bytes", lambda reports: f"rank 0 has written {reports[0]}").text
'rank 0 has written 12 bytes'
>>> agreement.run("write", lambda: str(1 // 0)).failures[0].text
'ZeroDivisionError: integer division or modulo by zero'
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Self

import torch.distributed as dist

from shardwise.comm.records import CommError, MissingRankError
from shardwise.comm.store import StoreSilentError
from shardwise.config.errors import CodedError, code_of
from shardwise.runtime.clock import AwakeClock

# Makes one verdict of the reports by rank; it runs on the first rank.
Judge = Callable[[Mapping[int, str]], str]

_ABSENT, _STORE = "absent", "store"
_GIVEN_UP: Final = "given-up"
_PROGRESS_S: Final = 1.0
_MIN_SLEEP_S, _MAX_SLEEP_S = 5e-5, 5e-2
_READ_S: Final = 5.0  # the first rank waits so long for the others, which only read the verdict
_PART: Final = 2**22  # torch's store takes no value of more than 8 MiB; JSON has one byte for each character
_PARTS: Final = "parts"  # begins a value that lists the keys of its parts, and no JSON


class Failure(NamedTuple):
    """Says why a round failed on a rank.

    Attributes:
        kind: the class of its error; "absent" where it has shown no progress; "store" where the store does not answer.
    """

    rank: int
    kind: str
    code: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """Holds what all ranks hear of a round: the judge's text, or the failures.

    Attributes:
        name: what the round was called by, which tells rounds apart that ranks come to.
        subject: what the ranks come to, for messages, as the first rank names it.
        error: the one that this rank has raised, or met in the store.
    """

    name: str
    subject: str
    text: str = ""
    failures: tuple[Failure, ...] = ()
    error: Exception | None = field(default=None, compare=False)

    @classmethod
    def of(cls, name: str, subject: str, rank: int, work: Callable[[], str]) -> Self:
        """Do a rank's work and return the outcome."""
        try:
            return cls(name, subject, work())
        except Exception as error:
            named = "" if isinstance(error, CodedError) else f"{type(error).__name__}: "
            text = f"{named}{error}".partition("\n")[0]
            failure = Failure(rank, type(error).__name__, code_of(error, "rank-failed"), text)
            return cls(name, subject, failures=(failure,), error=error)

    @property
    def num_absent(self) -> int:
        """Return how many ranks were given up."""
        return sum(failure.kind == _ABSENT for failure in self.failures)

    @property
    def is_without_store(self) -> bool:
        """Say whether this rank could not ask the store."""
        return any(failure.kind == _STORE for failure in self.failures)

    def ranks_beside(self, failure: Failure) -> str:
        """Return the ranks of all other failures, as words."""
        return listed(other.rank for other in self.failures if other is not failure)

    def checked(self) -> str:
        """Return the text.

        Raises:
            CommError: the round has failed.
        """
        if not self.failures:
            return self.text
        first = self.failures[0]
        ranks = listed(failure.rank for failure in self.failures[: self.num_absent or None])
        if self.num_absent:
            fix = "or allow more time with run.timeout_s"
            raise MissingRankError("rank-missing", f"{ranks} did not come to {self.subject}: {first.text}, {fix}")
        if self.is_without_store:
            code = self.error.code if isinstance(self.error, StoreSilentError) else first.code
            raise MissingRankError(code, f"{first.text}; {ranks} were to come to {self.subject}") from None
        raise CommError(first.code, f"{ranks} failed in {self.subject}: {first.text}") from self.error


class Agreement:
    """Runs rounds among ranks of the world, of which all make the same calls in the same order.

    Args:
        store: of the engine, the same on all ranks; None where the others are not there.
        rank: of this process in the world.
        timeout_s: seconds without progress after which a rank is given up.
        part: of the store's keys, for these rounds alone.
    """

    def __init__(
        self, store: dist.Store | None, ranks: Iterable[int], rank: int, timeout_s: float, part: str = "agreement"
    ) -> None:
        self.ranks, self.rank, self.timeout_s = tuple(ranks), rank, timeout_s
        self._store = store if len(self.ranks) > 1 else None
        self._part, self._num_rounds, self._next_progress_s = part, 0, 0.0
        self._keys: list[str] = []  # put or read by this rank in a round

    @property
    def is_shared(self) -> bool:
        """Say whether other ranks take part."""
        return self._store is not None

    @property
    def _progress_s(self) -> float:
        return min(_PROGRESS_S, self.timeout_s / 4)

    def run(
        self,
        name: str,
        work: Callable[[], str],
        judge: Judge | None = None,
        subject: str = "",
        begins: bool = False,
    ) -> Verdict:
        """Do this rank's work, which returns its report, wait for the other ranks, and return the verdict for all.

        Where this rank is interrupted, the others need not wait for it.

        Args:
            name: of the round, the same on all ranks.
            judge: called once all have worked; None takes the first rank's report for the verdict.
            subject: what the ranks come to, for messages; without one it is the name.
            begins: what the ranks come to begins with this round: where the others have given up one of this name, this
                rank has skipped it. Otherwise it comes to that one too late, and fails as they have.
        """
        if self._store is None:
            return self._judged({self.rank: Verdict.of(name, subject or name, self.rank, work)}, judge)
        report = Verdict(name, subject or name)
        try:
            key = self._next_round(self._store, name, begins)
            try:
                report = Verdict.of(name, report.subject, self.rank, work)
                return self._exchange(self._store, key, report, judge)
            except (KeyboardInterrupt, SystemExit) as error:
                text = f"it was interrupted by {type(error).__name__}"
                self._fail(self._store, key, report, CommError("rank-interrupted", text))
                raise
        except RuntimeError as error:
            failures = tuple(Failure(rank, _STORE, "store-gone", str(error)) for rank in self.ranks)
            return Verdict(name, report.subject, failures=failures, error=error)

    def leave(self, name: str, error: Exception, subject: str = "") -> None:
        """Fail the next round on all ranks, without waiting for them: this rank cannot work in it.

        Args:
            name: of the round, and so is `subject`.
        """
        if self._store is not None:
            self._num_rounds += 1
            key = f"{self._part}/{self._num_rounds - 1}"
            self._fail(self._store, key, Verdict(name, subject or name), error)

    def _fail(self, store: dist.Store, key: str, report: Verdict, error: Exception) -> None:
        """Report that this rank has failed in a round."""

        def fail() -> str:
            raise error

        is_first = self.rank == self.ranks[0]
        failed = Verdict.of(report.name, report.subject, self.rank, fail)
        with suppress(RuntimeError):  # the process that holds the store may have ended
            self._put(store, f"{key}/{'verdict' if is_first else self.rank}", failed)
            store.add(f"{key}/read", not is_first)

    # [Note: Rounds that a rank has skipped]
    # Rounds have numbers, so a rank that has skipped one would count one less for ever: it would wait in a round
    # that they have given up, and they in the next one. So who gives a round up says so, and one that comes to another
    # call, or to the beginning of one, counts on to where the others are.
    def _next_round(self, store: dist.Store, name: str, begins: bool) -> str:
        """Return the key of the next round."""
        while store.check([given_up := f"{self._part}/{self._num_rounds}/{_GIVEN_UP}"]) and (
            begins or store.get(given_up) != name.encode()
        ):
            self._num_rounds += 1
        self._num_rounds += 1
        return f"{self._part}/{self._num_rounds - 1}"

    def compare(self, subject: str, note: str, judge: Judge) -> str:
        """Return the verdict on the notes of all ranks.

        Args:
            subject: what the ranks come to, for messages.

        Raises:
            MissingRankError: not all have come in time, or the store does not answer.
        """
        return self.run("notes", lambda: note, judge, subject).checked()

    def show_progress(self) -> None:
        """Show the other ranks, at most about once a second, that this rank makes progress."""
        if self._store is not None and time.monotonic() >= self._next_progress_s:
            self._next_progress_s = time.monotonic() + self._progress_s
            self._store.add(self._progress_key(self.rank), 1)

    def _progress_key(self, rank: int) -> str:
        return f"{self._part}/progress/{rank}"

    def _exchange(self, store: dist.Store, key: str, report: Verdict, judge: Judge | None) -> Verdict:
        first, *others = self.ranks
        self._keys.clear()
        if self.rank != first:
            self._put(store, f"{key}/{self.rank}", report)
            verdict = self._receive(store, {first: f"{key}/verdict"}, report)[first]
            if verdict.num_absent:
                store.set(f"{key}/{_GIVEN_UP}", report.name)  # see [Note: Rounds that a rank has skipped]
                self._put(store, f"{key}/{self.rank}", verdict)  # so that the first rank fails too, if it comes later
            with suppress(RuntimeError):  # the process that holds the store may have ended
                store.add(f"{key}/read", 1)
            return replace(verdict, error=report.error)
        reports = {first: report, **self._receive(store, {rank: f"{key}/{rank}" for rank in others}, report)}
        verdict = self._judged(reports, judge)
        if verdict.num_absent:
            store.set(f"{key}/{_GIVEN_UP}", report.name)
        self._put(store, f"{key}/verdict", verdict)
        with suppress(RuntimeError):
            self._let_read(store, f"{key}/read", len(others) - verdict.num_absent)
        return verdict

    def _judged(self, reports: Mapping[int, Verdict], judge: Judge | None) -> Verdict:
        own = reports[self.rank]
        failures = list(dict.fromkeys(failure for report in reports.values() for failure in report.failures))
        if failures:
            failures.sort(key=lambda failure: (failure.kind != _ABSENT, failure.rank))
            return replace(own, text="", failures=tuple(failures))
        texts = {rank: report.text for rank, report in reports.items()}

        def judged() -> str:
            if odd := [rank for rank, report in reports.items() if report.name != own.name]:
                text = f"{listed(odd)} came to {reports[odd[0]].subject} instead; let all ranks make the same calls"
                raise CommError("calls-differ", text)
            return texts[self.rank] if judge is None else judge(texts)

        return Verdict.of(own.name, own.subject, self.rank, judged)

    def _let_read(self, store: dist.Store, key: str, num_readers: int) -> None:
        """Wait until the others have read the verdict, since this process may end with the store; then delete it."""
        clock = AwakeClock(gap_s=2 * self._progress_s)
        while store.add(key, 0) < num_readers:
            if (waited_s := clock.now_s()) > min(_READ_S, self.timeout_s):
                return
            time.sleep(_sleep_s(waited_s))
        if num_readers == len(self.ranks) - 1:  # else the one that was given up may come and read it
            for name in (*self._keys, key, *map(self._progress_key, self.ranks)):
                store.delete_key(name)

    def _receive(self, store: dist.Store, keys: Mapping[int, str], report: Verdict) -> dict[int, Verdict]:
        """Wait for what ranks put under keys; for a rank that has shown no progress for too long, that it is absent."""
        clock, next_look_s = AwakeClock(gap_s=2 * self._progress_s), self._progress_s
        seen, lost = dict.fromkeys(keys, (0, 0.0)), dict[int, Verdict]()
        while not lost and not store.check([*keys.values()]):
            if (now_s := clock.now_s()) >= next_look_s:
                next_look_s = now_s + self._progress_s
                self.show_progress()  # others may be waiting for this one, which only waits for a third
                for rank in [rank for rank, key in keys.items() if not store.check([key])]:
                    count = store.add(self._progress_key(rank), 0)
                    seen[rank] = seen[rank] if count == seen[rank][0] else (count, now_s)
                    if now_s - seen[rank][1] > self.timeout_s:
                        text = f"it has shown no progress for {self.timeout_s:g} s; see its log"
                        lost[rank] = replace(report, failures=(Failure(rank, _ABSENT, "rank-absent", text),))
            time.sleep(_sleep_s(now_s))
        return lost | {rank: self._take(store, key) for rank, key in keys.items() if store.check([key])}

    def _put(self, store: dist.Store, key: str, verdict: Verdict) -> None:
        """Store a verdict of any length; the list of its parts comes last, so that a reader finds them all."""
        text = json.dumps([verdict.name, verdict.subject, verdict.text, verdict.failures])
        if len(text) > _PART:
            parts = {f"{key}/{start}": text[start : start + _PART] for start in range(0, len(text), _PART)}
            for name, value in parts.items():
                store.set(name, value)
            self._keys += parts
            text = _PARTS + json.dumps([*parts])
        store.set(key, text)
        self._keys.append(key)

    def _take(self, store: dist.Store, key: str) -> Verdict:
        """Read what `_put` has stored."""
        text = store.get(key)
        self._keys.append(key)
        if text.startswith(_PARTS.encode()):
            parts = json.loads(text.removeprefix(_PARTS.encode()))
            self._keys += parts
            text = b"".join(map(store.get, parts))
        name, subject, said, failures = json.loads(text)
        return Verdict(name, subject, said, tuple(Failure(*failure) for failure in failures))


def _sleep_s(waited_s: float) -> float:
    """Return how long to sleep between two looks: a short wait ends soon, a long one costs little."""
    return min(_MAX_SLEEP_S, max(_MIN_SLEEP_S, waited_s / 16))


@contextmanager
def all_or_none(agreement: Agreement, part: str) -> Iterator[None]:
    """Run a part of the start on each rank; after it either all ranks go on, or all raise.

    Raises:
        CommError: another rank has failed, or not all have come in time; a rank that failed raises its own error.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error

    def report() -> str:
        if failure is not None:
            raise failure
        return ""

    verdict = agreement.run(part, report, subject="shardwise.initialize")
    if failure is not None:
        raise failure
    try:
        verdict.checked()
    except CommError as error:
        raise CommError("other-rank-start", str(error)) from None


def odd_ranks(notes: Mapping[int, str]) -> str:
    """Return the ranks whose notes are others than the first rank's, in words; empty where there are none.

    >>> odd_ranks({0: "a", 1: "b", 2: "a"}), odd_ranks({0: "a", 1: "a"})
    ('rank 1', '')
    """
    odd = [rank for rank in sorted(notes) if notes[rank] != notes[min(notes)]]
    return listed(odd) if odd else ""


def listed(ranks: Iterable[int], num_shown: int = 8) -> str:
    """Format ranks in words.

    >>> listed([3]), listed(range(3)), listed(range(12), num_shown=2)
    ('rank 3', 'ranks 0, 1, 2', 'ranks 0, 1 and 10 more')
    """
    numbers = list(ranks)
    shown = ", ".join(map(str, numbers[:num_shown]))
    more = f" and {len(numbers) - num_shown} more" if len(numbers) > num_shown else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}{more}"
