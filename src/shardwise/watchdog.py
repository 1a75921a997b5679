"""The watchdog: says which rank waits for which collective, and which rank is behind, while the run hangs.

A thread of each rank looks once a second whether this rank waits too long in a collective. If so it raises an alarm
through the store; the threads of all ranks answer with what their main thread does, also where that sleeps or loops;
and the lowest rank that waits puts the answers together (`shardwise.diagnosis`) and logs one report. A rank whose
collective fails asks in the same way, so that its error names the cause.

The thread reaches the engine's books and timeline through weak references only, and never waits long for the store:
where that is silent it says what it knows of its own rank. It ends with the engine, with the interpreter, or quietly
with the store.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from shardwise.awake import AwakeClock
from shardwise.comm_books import Call, CommBooks, Moment
from shardwise.config import RunConfig
from shardwise.diagnosis import RankReport, details, diagnose, render
from shardwise.store import PatientStore, StoreSilentError
from shardwise.timeline import Timeline

_POLL_S: Final = 1.0
_QUICK_POLL_S: Final = 0.1
_ANSWER_S: Final = 1.0
_NUM_ACTIONS: Final = 8
_MAX_FRAMES: Final = 24
_NUM_INNERMOST: Final = 3

log = logging.getLogger("shardwise")


class Watchdog:
    """Watches the collectives of one engine on one rank; `watch` makes and starts it.

    Args:
        store: of the engine, the same on all ranks.
        books: of the engine.
        timeline: of the engine.
        world_size: how many ranks answer.
        patience_s: how long a collective may take.
    """

    def __init__(
        self, store: dist.Store, books: CommBooks, timeline: Timeline, world_size: int, patience_s: float
    ) -> None:
        self._store = PatientStore(store, _ANSWER_S)
        self._rank = books.rank
        self._world_size = world_size
        self._patience_s = patience_s
        self._poll_s = min(_POLL_S, patience_s / 4)
        self._books = weakref.ref(books)
        self._timeline = weakref.ref(timeline)
        self._main_thread = threading.get_ident()
        self._start_s = time.monotonic()
        self._head: tuple[Call, float] | None = None
        self._clock = AwakeClock(gap_s=2 * self._poll_s)
        self._seen: tuple[Moment, float] | None = None
        self._failed: Call | None = None
        self._raised: set[str] = set()
        self._told: set[str] = set()
        self._num_alarms = 0
        self._pending: dict[int, tuple[float, Moment]] = {}
        self._wake = threading.Event()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="shardwise-watchdog", daemon=True)
        books.explain = self.explain
        # At the interpreter's end too: a daemon thread inside the store's C++ would abort the process then.
        self._finalizer = weakref.finalize(books, self._end)
        self._thread.start()

    def close(self) -> None:
        """End the watch, and let the other ranks know."""
        if self._finalizer.detach() is not None:
            self._end()
            try:
                self._store.set(f"answer/left/{self._rank}", "")
            except RuntimeError:
                log.debug("the store has gone before the watchdog of rank %d", self._rank)
            self._store.close()

    def note_failure(self, text: str) -> None:
        """Let the ranks that will wait for this one in vain know why; an empty text takes that back."""
        with suppress(RuntimeError):  # the store may have gone
            self._store.set(f"failed/{self._rank}", f" {text}")  # some stores take what is empty for missing

    def _noted_failure(self) -> str | None:
        """What the first rank that has failed has said."""
        for rank in range(self._world_size):
            if self._store.check([key := f"failed/{rank}"]) and (text := self._store.get(key).decode().strip()):
                return f"rank {rank} has failed: {text}"
        return None

    def explain(self, call: Call) -> str | None:
        """Ask all ranks why `call` has failed; None where that cannot be told. Takes seconds, unless one has said so.

        Called on the thread that is in `call`; the watchdog's own thread answers for this rank meanwhile.
        """
        deadline_s = time.monotonic() + 2 * self._answer_s + 2 * self._poll_s
        self._failed = call
        key = f"diagnosis/{_key(call)}"
        while True:
            try:
                if (failure := self._noted_failure()) is not None:
                    return failure
                # The state at the failure counts, not what was reported while the rank waited.
                self._raise_alarm(f"{_key(call)}/failed")
                while time.monotonic() < deadline_s and self._thread.is_alive():
                    if self._store.check([key]):
                        return self._store.get(key).decode()
                    time.sleep(_QUICK_POLL_S / 2)
                return None
            except StoreSilentError as error:
                if time.monotonic() > deadline_s:
                    return str(error)
            except RuntimeError:
                return (
                    "the store does not answer: the process that holds it, mostly rank 0's or the launcher's, has died"
                )

    @property
    def _answer_s(self) -> float:
        """How long after an alarm an answer may come."""
        return self._poll_s + _ANSWER_S

    def _end(self) -> None:
        self._has_ended = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        try:
            while not self._has_ended:
                self._wake.wait(_QUICK_POLL_S if self._pending else self._poll_s)
                self._wake.clear()
                if not self._has_ended:
                    self._look()
        except RuntimeError as error:
            log.debug("the watchdog of rank %d ends with its store: %s", self._rank, error)

    def _look(self) -> None:
        books = self._books()
        if books is None:
            return
        moment = self._moment(books)
        waited_s = self._waited_s(moment)
        try:
            if moment is not None and waited_s > self._patience_s:
                self._raise_alarm(_key(moment.call))
            number = self._store.add("num_alarms", 0)
            if number > self._num_alarms:
                self._num_alarms = number
                self._answer(number, books, moment, waited_s)
            for number, (deadline_s, answered) in list(self._pending.items()):
                has_all = self._store.add(f"num_answers/{number}", 0) >= self._world_size
                if has_all or time.monotonic() > deadline_s:
                    del self._pending[number]
                    if self._store.get(f"lowest/{number}").decode() == str(self._rank):
                        self._report(number, is_over=self._moment(books) != answered)
        except StoreSilentError as error:
            if moment is not None and waited_s > self._patience_s and (key := _key(moment.call)) not in self._told:
                self._told.add(key)
                own = self._own_report(books, moment)
                log.error("shardwise: rank %d is %s: %s\n%s", self._rank, own.state(), error, "\n".join(details(own)))

    def _waited_s(self, moment: Moment | None) -> float:
        """For how long this rank has been seen in a collective while this thread was awake.

        A rank that was stopped itself comes back to a collective that is old by the clock, and well.
        """
        now_s = self._clock.now_s()
        if moment is None or self._seen is None or self._seen[0] != moment:
            self._seen = None if moment is None else (moment, now_s)
        return 0.0 if self._seen is None else now_s - self._seen[1]

    def _moment(self, books: CommBooks) -> Moment | None:
        """The collective that holds this rank up, and since when.

        The host only enqueues collectives on the device: there it is the oldest one that is not done, since it became
        the oldest, because a host may be far ahead of a device that is only busy.
        """
        inside = books.inside
        if not books.enqueued:
            return inside
        while books.enqueued and books.enqueued[0][1].is_reached():
            books.enqueued.popleft()
        call = books.enqueued[0][0] if books.enqueued else None
        if call is None or self._head is None or self._head[0] is not call:
            self._head = None if call is None else (call, time.monotonic())
        return None if self._head is None else Moment(*self._head, self._main_thread)

    def _raise_alarm(self, key: str) -> None:
        """Raise the alarm, once for each key, whichever rank comes first."""
        if key in self._raised:
            return
        if self._store.compare_set(f"stuck/{key}", "", str(self._rank)).decode() == str(self._rank):
            self._store.add("num_alarms", 1)
        self._raised.add(key)
        self._wake.set()

    def _answer(self, number: int, books: CommBooks, moment: Moment | None, waited_s: float) -> None:
        report = self._own_report(books, moment)
        log.info("alarm %d: rank %d is %s\n%s", number, self._rank, report.state(), "\n".join(details(report)))
        self._store.set(f"answer/{number}/{self._rank}", report.to_json())
        # A rank that has but entered its collective is not held up, and has nothing to report.
        if moment is not None and (report.has_failed or waited_s > self._patience_s / 2):
            self._raised.add(_key(moment.call))
            self._pending[number] = time.monotonic() + self._answer_s, moment
            self._lower(f"lowest/{number}")
        self._store.add(f"num_answers/{number}", 1)

    def _lower(self, key: str) -> None:
        """Make the number under `key` the lowest of those of the ranks that do so."""
        known = ""
        while known == "" or int(known) > self._rank:
            known = self._store.compare_set(key, known, str(self._rank)).decode()

    def _report(self, number: int, is_over: bool) -> None:
        """On one rank: gather the answers, publish the diagnosis and log the report, unless the wait is over."""
        reports: dict[int, RankReport | None] = {}
        for rank in range(self._world_size):
            key = f"answer/{number}/{rank}"
            reports[rank] = None
            if self._store.check([key]):
                reports[rank] = RankReport.from_json(self._store.get(key).decode())
                self._store.delete_key(key)
            elif self._store.check([f"answer/left/{rank}"]):
                reports[rank] = RankReport(rank, "", 0, has_left=True)
        failed = [report.inside for report in reports.values() if report is not None and report.has_failed]
        for call in failed:
            if call is not None:
                self._store.set(f"diagnosis/{call.group}/{call.position}", diagnose(reports))
        # Ranks that fail say so themselves; where the wait is over, the answers are of different moments.
        level = logging.INFO if failed else logging.DEBUG if is_over else logging.ERROR
        log.log(level, "%s", render(reports, self._rank))

    def _own_report(self, books: CommBooks, moment: Moment | None) -> RankReport:
        now_s = time.monotonic()
        timeline = self._timeline()
        actions = timeline.latest(_NUM_ACTIONS) if timeline is not None else ()
        place, stack = _stack_of(self._main_thread if moment is None else moment.thread)
        left = books.left
        return RankReport(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            inside=moment.call.note() if moment is not None else None,
            inside_s=now_s - moment.at_s if moment is not None else 0.0,
            members=moment.call.group.ranks if moment is not None else (),
            positions=dict(books.positions),
            recent=tuple(call.note() for call in books.recent.copy()),
            idle_s=now_s - (left.at_s if left is not None else self._start_s),
            actions=tuple(f"{each.action} {1e3 * each.duration_s:.0f} ms" for each in actions),
            place=place,
            stack=stack,
            has_failed=moment is not None and moment.call is self._failed,
        )


def watch(store: dist.Store | None, books: CommBooks, timeline: Timeline, run: RunConfig) -> Watchdog | None:
    """Start to watch an engine's collectives; call it on the thread that trains.

    Args:
        store: of the engine; None where there is one rank, which never waits for another.
        books: of the engine's collectives.
        timeline: of its actions.
        run: the patience; never more than half of the time-out, when it would be too late.
    """
    if store is None or run.watchdog_s == 0:
        return None
    return Watchdog(store, books, timeline, dist.get_world_size(), watch_patience_s(run))


def watch_patience_s(run: RunConfig) -> float:
    """Return for how long a rank waits for others before it says so; no end where the watchdog is off."""
    return min(run.watchdog_s, run.timeout_s / 2) if run.watchdog_s else math.inf


def _key(call: Call) -> str:
    return f"{call.group.key}/{call.position}"


def _stack_of(thread: int) -> tuple[str, tuple[str, ...]]:
    """The innermost line of user code on a thread, and its stack without torch's inner frames, innermost last."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "the end of its thread", ()
    # No source is read: the disk may be what hangs.
    frames = [(each.f_code.co_filename, line, each.f_code.co_name) for each, line in traceback.walk_stack(frame)][::-1]
    library = str(Path(__file__).parent)
    own = [each for each in frames if not _is_torch_or_python(each[0]) and not each[0].startswith(library)]
    path, line, name = (own or frames)[-1]
    shown = [each for each in frames[:-_NUM_INNERMOST] if not _is_torch_or_python(each[0])] + frames[-_NUM_INNERMOST:]
    stack = tuple(f"{path}:{line} in {name}" for path, line, name in shown[-_MAX_FRAMES:])
    return f"{Path(path).name}:{line} in {name}", stack


def _is_torch_or_python(path: str) -> bool:
    if "site-packages" in path or "dist-packages" in path:
        return path.startswith(str(Path(torch.__file__).parent))
    return path.startswith((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen"))
