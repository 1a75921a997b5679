"""The watchdog says, while the run hangs, which rank waits for which collective, and which rank the others wait for.

A thread of each rank looks once a second whether this rank waits too long in a collective. If so it raises an alarm
through the store; the threads of all ranks answer with what their main thread does, also where that sleeps or loops;
and the lowest rank that waits combines the answers and logs one report. A rank whose collective fails asks in the same
way, so that its error names the cause.

The thread has only weak references to the engine's comm log and timeline, and never waits long for the store: where
that is silent it says what it knows of its own rank. It ends with the engine, with the interpreter, or silently with
the store.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import torch
import torch.distributed as dist

from shardwise.comm.agreement import listed
from shardwise.comm.consistency import divergence
from shardwise.comm.records import Collective, CollectiveEvent, CollectiveNote, CommLog
from shardwise.comm.store import PatientStore, StoreSilentError
from shardwise.config.resolve import RunConfig
from shardwise.runtime.clock import AwakeClock
from shardwise.runtime.device import use_device
from shardwise.runtime.timeline import Timeline

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
        patience_s: seconds that a collective may take.
    """

    # [Note: Alarms go through the store]
    # While a rank hangs, its main thread is inside a collective, and another collective would be matched with the wrong
    # one. So the thread asks through the store, which needs no other rank to come along except the one that holds it.
    # It touches no tensor and no process group.
    def __init__(
        self,
        store: dist.Store,
        comm_log: CommLog,
        timeline: Timeline,
        world_size: int,
        patience_s: float,
        device: torch.device,
    ) -> None:
        self._store = PatientStore(store, _ANSWER_S)
        self._rank = comm_log.rank
        self._world_size = world_size
        self._patience_s = patience_s
        self._comm_log = weakref.ref(comm_log)
        self._timeline = weakref.ref(timeline)
        self._main_thread = threading.get_ident()
        self._start_s = time.monotonic()
        self._head: tuple[Collective, float] | None = None
        self._clock = AwakeClock(gap_s=2 * self._poll_s)
        self._seen: tuple[CollectiveEvent, float] | None = None
        self._failed: Collective | None = None
        self.has_noted = False  # a failure of this rank, for the others
        self._raised: set[str] = set()
        self._reported: set[str] = set()
        self._num_alarms = 0
        self._pending: dict[int, tuple[float, CollectiveEvent]] = {}
        self._wake = threading.Event()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, args=(device,), name="shardwise-watchdog", daemon=True)
        comm_log.explain = self.explain
        # At the interpreter's end too: a daemon thread inside the store's C++ would abort the process then.
        self._finalizer = weakref.finalize(comm_log, self._end)
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
        """Note a failure for the ranks that will wait for this one in vain; an empty text removes the note."""
        self.has_noted = bool(text)
        with suppress(RuntimeError):  # the store may have gone
            self._store.set(f"failed/{self._rank}", f" {text}")  # some stores take what is empty for missing
            self._store.add("num_failures", 1 if text else 0)

    def _noted_failure(self) -> str | None:
        """Return what the first rank with a failure has noted."""
        for rank in range(self._world_size):
            if self._store.check([key := f"failed/{rank}"]) and (text := self._store.get(key).decode().strip()):
                return f"rank {rank} has failed: {text}"
        return None

    def explain(self, call: Collective) -> str | None:
        """Ask all ranks why `call` has failed; None if they do not know. It takes seconds, unless a rank has noted it.

        Call it on the thread that is in `call`; the watchdog's own thread answers for this rank at the same time.
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
    def _poll_s(self) -> float:
        return min(_POLL_S, self._patience_s / 4)

    @property
    def _answer_s(self) -> float:
        """Return for how many seconds after an alarm an answer may come."""
        return self._poll_s + _ANSWER_S

    def _end(self) -> None:
        self._has_ended = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def _run(self, device: torch.device) -> None:
        use_device(device)  # of the events that it asks
        try:
            while not self._has_ended:
                self._wake.wait(_QUICK_POLL_S if self._pending else self._poll_s)
                self._wake.clear()
                if not self._has_ended:
                    self._look()
        except RuntimeError as error:
            log.debug("the watchdog of rank %d ends with its store: %s", self._rank, error)

    def _look(self) -> None:
        comm_log = self._comm_log()
        if comm_log is None:
            return
        moment = self._moment(comm_log)
        waited_s = self._waited_s(moment)
        try:
            if moment is not None and waited_s > self._patience_s:
                self._raise_alarm(_key(moment.call))
            if waited_s > 0 and comm_log.enqueued and not comm_log.has_failed:
                self._hang_up_after_failure(comm_log)
            number = self._store.add("num_alarms", 0)
            if number > self._num_alarms:
                self._num_alarms = number
                self._answer(number, comm_log, moment, waited_s)
            for number, (deadline_s, answered) in list(self._pending.items()):
                has_all = self._store.add(f"num_answers/{number}", 0) >= self._world_size
                if has_all or time.monotonic() > deadline_s:
                    del self._pending[number]
                    if self._store.get(f"lowest/{number}").decode() == str(self._rank):
                        self._report(number, is_over=self._moment(comm_log) != answered)
        except StoreSilentError as error:
            if moment is not None and waited_s > self._patience_s and (key := _key(moment.call)) not in self._reported:
                self._reported.add(key)
                own = self._own_report(comm_log, moment)
                log.error("shardwise: rank %d is %s: %s\n%s", self._rank, own.state(), error, "\n".join(details(own)))

    def _waited_s(self, moment: CollectiveEvent | None) -> float:
        """Return for how many seconds this rank has been seen in a collective while this thread was awake.

        A rank that was stopped itself wakes in a collective that is old by the clock, and healthy.
        """
        now_s = self._clock.now_s()
        if moment is None or self._seen is None or self._seen[0] != moment:
            self._seen = None if moment is None else (moment, now_s)
        return 0.0 if self._seen is None else now_s - self._seen[1]

    def _moment(self, comm_log: CommLog) -> CollectiveEvent | None:
        """Return the collective that holds this rank up, and since when.

        The host only enqueues collectives on the device. There it is the oldest one that is not done, counted from when
        it became the oldest, because a host may be far ahead of a device that is only busy.
        """
        inside = comm_log.inside
        if not comm_log.enqueued:
            return inside
        while comm_log.enqueued and comm_log.enqueued[0][1].is_reached():
            comm_log.enqueued.popleft()
        call = comm_log.enqueued[0][0] if comm_log.enqueued else None
        if call is None or self._head is None or self._head[0] is not call:
            self._head = None if call is None else (call, time.monotonic())
        return None if self._head is None else CollectiveEvent(*self._head, self._main_thread)

    # [Note: A failure elsewhere ends what the device waits for]
    # The host may block until the device has done a collective that never ends, as a rank that it needs has failed, and
    # no time-out of ours ends that. So this thread, which is awake, aborts the communicators: their kernels end with
    # whatever is there, the host goes on, and `has_failed` says that no result is to be used.
    def _hang_up_after_failure(self, comm_log: CommLog) -> None:
        if self._store.add("num_failures", 0) > 0 and (failure := self._noted_failure()) is not None:
            log.error("rank %d ends what it waits for: %s", self._rank, failure)
            comm_log.hang_up()

    def _raise_alarm(self, key: str) -> None:
        """Raise the alarm, once for each key, whichever rank comes first."""
        if key in self._raised:
            return
        if self._store.compare_set(f"stuck/{key}", "", str(self._rank)).decode() == str(self._rank):
            self._store.add("num_alarms", 1)
        self._raised.add(key)
        self._wake.set()

    def _answer(self, number: int, comm_log: CommLog, moment: CollectiveEvent | None, waited_s: float) -> None:
        report = self._own_report(comm_log, moment)
        log.info("alarm %d: rank %d is %s\n%s", number, self._rank, report.state(), "\n".join(details(report)))
        self._store.set(f"answer/{number}/{self._rank}", report.to_json())
        # A rank that has only just entered its collective is not held up, and has nothing to report.
        if moment is not None and (report.has_failed or waited_s > self._patience_s / 2):
            self._raised.add(_key(moment.call))
            self._pending[number] = time.monotonic() + self._answer_s, moment
            self._lower(f"lowest/{number}")
        # The count goes last: once all have counted in, the rank that reports finds every answer, and knows whether it
        # is the lowest.
        self._store.add(f"num_answers/{number}", 1)

    def _lower(self, key: str) -> None:
        """Set the number under `key` to the lowest of the ranks that call this."""
        known = ""
        while known == "" or int(known) > self._rank:
            known = self._store.compare_set(key, known, str(self._rank)).decode()

    def _report(self, number: int, is_over: bool) -> None:
        """Gather the answers on one rank, publish the diagnosis and log the report, unless the wait is over."""
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
        # Ranks that fail say so themselves; after the wait is over, the answers are of different moments.
        level = logging.INFO if failed else logging.DEBUG if is_over else logging.ERROR
        log.log(level, "%s", render(reports, self._rank))

    def _own_report(self, comm_log: CommLog, moment: CollectiveEvent | None) -> RankReport:
        now_s = time.monotonic()
        timeline = self._timeline()
        actions = timeline.latest(_NUM_ACTIONS) if timeline is not None else ()
        place, stack = _stack_of(self._main_thread if moment is None else moment.thread)
        left = comm_log.left
        return RankReport(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            inside=moment.call.note() if moment is not None else None,
            inside_s=now_s - moment.at_s if moment is not None else 0.0,
            members=moment.call.group.ranks if moment is not None else (),
            positions=dict(comm_log.positions),
            recent=tuple(call.note() for call in comm_log.recent.copy()),
            idle_s=now_s - (left.at_s if left is not None else self._start_s),
            actions=tuple(f"{action.action} {1e3 * action.duration_s:.0f} ms" for action in actions),
            place=place,
            stack=stack,
            has_failed=moment is not None and moment.call is self._failed,
        )


def watch(
    store: dist.Store | None, comm_log: CommLog, timeline: Timeline, run: RunConfig, device: torch.device
) -> Watchdog | None:
    """Start to watch an engine's collectives; call it on the thread that trains.

    Args:
        store: of the engine; None where there is one rank, which never waits for another.
        run: has the patience; at most half of the time-out counts, as more would be too late.
    """
    if store is None or run.watchdog_s == 0:
        return None
    return Watchdog(store, comm_log, timeline, dist.get_world_size(), min(run.watchdog_s, run.timeout_s / 2), device)


def _key(call: Collective) -> str:
    return f"{call.group.key}/{call.position}"


def _stack_of(thread: int) -> tuple[str, tuple[str, ...]]:
    """Return the innermost line of user code on a thread, and its stack without torch's frames, innermost last."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "the end of its thread", ()
    # No source is read: the disk may be what hangs.
    frames = [(each.f_code.co_filename, line, each.f_code.co_name) for each, line in traceback.walk_stack(frame)][::-1]
    library = str(Path(__file__).parent)
    own = [frame for frame in frames if not _is_torch_or_python(frame[0]) and not frame[0].startswith(library)]
    path, line, name = (own or frames)[-1]
    shown = [each for each in frames[:-_NUM_INNERMOST] if not _is_torch_or_python(each[0])] + frames[-_NUM_INNERMOST:]
    stack = tuple(f"{path}:{line} in {name}" for path, line, name in shown[-_MAX_FRAMES:])
    return f"{Path(path).name}:{line} in {name}", stack


def _is_torch_or_python(path: str) -> bool:
    if "site-packages" in path or "dist-packages" in path:
        return path.startswith(str(Path(torch.__file__).parent))
    return path.startswith((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen"))


_NUM_CALLS, _NUM_DETAILED = 8, 4
_SILENT: Final = "it died, was stopped or hangs in native code"


@dataclass(frozen=True)
class RankReport:
    """Holds what one rank reports of itself.

    Attributes:
        inside: the collective it is in, if any.
        positions: how many collectives each group of ranks has begun here, by the group's key.
        idle_s: seconds since it left the last one, or since its engine began.
        actions: its latest timed actions, oldest first.
        place: the innermost line of user code that it runs.
        stack: of its main thread, innermost last.
        has_failed: the collective has failed here, and the rank is about to raise.
    """

    rank: int
    host: str
    pid: int
    inside: CollectiveNote | None = None
    inside_s: float = 0.0
    members: tuple[int, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)
    recent: tuple[CollectiveNote, ...] = ()
    idle_s: float = 0.0
    actions: tuple[str, ...] = ()
    place: str = "an unknown place"
    stack: tuple[str, ...] = ()
    has_failed: bool = False
    has_left: bool = False

    def to_json(self) -> str:
        """Return the report as JSON text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        if values["inside"] is not None:
            values["inside"] = CollectiveNote(**values["inside"])
        values["recent"] = tuple(CollectiveNote(**note) for note in values["recent"])
        for key in ("members", "actions", "stack"):
            values[key] = tuple(values[key])
        return cls(**values)

    @property
    def state_s(self) -> float:
        """Return for how many seconds it has been inside the collective, or outside any."""
        return self.idle_s if self.inside is None else self.inside_s

    def state(self) -> str:
        """Say in words where the rank is."""
        if self.has_left:
            return "done, its engine closed"
        if self.inside is not None:
            return f"in {self.inside} for {self.inside_s:.0f} s"
        since = self.recent[-1].title if self.recent else "its engine began, and in no collective yet"
        return f"at {self.place}, {self.idle_s:.0f} s after {since}"

    def kind(self) -> tuple[object, ...]:
        """Return a key that ranks in the same state have in common."""
        return self.has_left, self.inside or (self.place, self.recent[-1:])


Reports = Mapping[int, RankReport | None]


def diagnose(reports: Reports) -> str:
    """Say in one line why ranks wait: where they diverged, else which rank keeps them waiting.

    Args:
        reports: of every rank of the world; None of those that do not answer.
    """
    waiting = {rank: report for rank, report in reports.items() if report is not None and report.inside is not None}
    if not waiting:
        return "no rank waits any more"
    diverged = _first_divergence(reports)
    if diverged:
        return diverged
    late = list(dict.fromkeys(_late_ranks(reports, waiting)))
    if late:
        more = f"; and {len(late) - _NUM_DETAILED} more ranks" if len(late) > _NUM_DETAILED else ""
        return "; ".join(late[:_NUM_DETAILED]) + more
    calls = {(report.inside.group, report.inside.position) for report in waiting.values() if report.inside}
    if len(calls) == 1:
        report = next(iter(waiting.values()))
        return f"all its ranks are in {report.inside}: the network or a device is stuck, or only slow"
    return "; ".join(f"rank {rank} waits in {report.inside}" for rank, report in list(waiting.items())[:_NUM_DETAILED])


def _first_divergence(reports: Reports) -> str:
    """Say where ranks of one group first went to different collectives, within what they remember."""
    notes_at: dict[tuple[str, int], dict[int, CollectiveNote]] = {}
    for rank, report in reports.items():
        for note in report.recent if report is not None else ():
            notes_at.setdefault((note.group, note.position), {})[rank] = note
    texts = (divergence(notes_at[place]) for place in sorted(notes_at, key=lambda place: place[1]))
    return next((text for text in texts if text), "")


def _late_ranks(reports: Reports, waiting: Mapping[int, RankReport]) -> Iterator[str]:
    """Describe the ranks that are in no collective, or silent, and for which others wait."""
    for rank, report in reports.items():
        awaited = [waiter for waiter in waiting.values() if rank in waiter.members and waiter.inside is not None]
        calls = [waiter.inside for waiter in awaited if waiter.inside is not None]
        if not calls or rank in waiting:
            continue
        call = min(calls, key=lambda call: call.number)
        waiters = listed([waiter.rank for waiter in awaited])
        verb = "waits" if len(awaited) == 1 else "wait"
        if report is None:
            yield f"rank {rank} does not answer: {_SILENT}; {waiters} {verb} for it in {call.title}"
        elif report.has_left:
            yield f"rank {rank} has closed its engine; {waiters} {verb} for it in {call.title}"
        else:
            did = "has started" if report.positions.get(call.group, 0) >= call.position else "has not started"
            yield f"rank {rank} {did} {call.title}: it is {report.state()}"


def render(reports: Reports, reporter: int) -> str:
    """Format the whole report: the diagnosis, a line for each group of ranks in one state, and details of a few."""
    own = reports[reporter]
    lines = [f"shardwise: rank {reporter} is {own.state() if own is not None else 'waiting'}: {diagnose(reports)}"]
    by_state: dict[tuple[object, ...], list[RankReport]] = {}
    for _, report in sorted(reports.items()):
        if report is not None:
            by_state.setdefault(report.kind(), []).append(report)
    for members in by_state.values():
        longest = max(members, key=lambda report: report.state_s)
        lines.append(f"  {listed([report.rank for report in members])}: {longest.state()}")
    silent = [rank for rank, report in sorted(reports.items()) if report is None]
    if silent:
        lines.append(f"  {listed(silent)}: no answer; {_SILENT}")
    # One rank for each state; first those that keep the others waiting.
    shown = sorted((members[0] for members in by_state.values()), key=lambda report: report.inside is not None)
    for report in shown[:_NUM_DETAILED]:
        lines += details(report)
    return "\n".join(lines)


def details(report: RankReport) -> Iterator[str]:
    """Yield lines on one rank: its latest collectives and actions, and its stack."""
    if report.has_left:
        return
    yield f"  on rank {report.rank}, process {report.pid} on {report.host}:"
    yield f"    last collectives: {', '.join(note.title for note in report.recent[-_NUM_CALLS:]) or 'none'}"
    yield f"    last actions: {', '.join(report.actions) or 'none'}"
    yield "    its main thread, innermost last:"
    yield from (f"      {line}" for line in report.stack)
