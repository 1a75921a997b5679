"""What keeps ranks waiting, told from what each says of itself. Pure: the watchdog asks, this judges and words it.

>>> gather = CallNote(14, "all_gather", "blocks.2", "dp_shard", "0.0", 14, 4096, "bf16")
>>> waiting = RankReport(0, "node1", 4711, inside=gather, inside_s=62.0, members=(0, 1), positions={"0.0": 14})
>>> before = CallNote(13, "all_gather", "blocks.1", "dp_shard", "0.0", 13, 4096, "bf16")
>>> computing = RankReport(1, "node1", 4712, positions={"0.0": 13}, recent=(before,), idle_s=62.4, place="train.py:31")
>>> print(diagnose({0: waiting, 1: computing}))
rank 1 has not started all_gather #14 of blocks.2: it is at train.py:31, 62 s after all_gather #13 of blocks.1
>>> print(diagnose({0: waiting, 1: None}))
rank 1 does not answer: it died, was stopped or hangs in native code; rank 0 waits for it in all_gather #14 of blocks.2
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from shardwise.agreement import divergence, listed
from shardwise.comm_books import CallNote

_NUM_CALLS, _NUM_DETAILED = 8, 4
_SILENT: Final = "it died, was stopped or hangs in native code"


@dataclass(frozen=True)
class RankReport:
    """What one rank says of itself.

    Attributes:
        rank: of the world.
        host: where it runs.
        pid: of its process.
        inside: the collective it is in, if any.
        inside_s: for how long.
        members: the ranks of that collective.
        positions: how many collectives each group of ranks has begun here, by the group's key.
        recent: its latest collectives, oldest first.
        idle_s: since it left the last one, or since its engine began.
        actions: its latest timed actions, oldest first.
        place: the innermost line of user code that it runs.
        stack: of its main thread, innermost last.
        has_failed: the collective has failed here, and the rank is about to raise.
        has_left: its engine is closed.
    """

    rank: int
    host: str
    pid: int
    inside: CallNote | None = None
    inside_s: float = 0.0
    members: tuple[int, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)
    recent: tuple[CallNote, ...] = ()
    idle_s: float = 0.0
    actions: tuple[str, ...] = ()
    place: str = "an unknown place"
    stack: tuple[str, ...] = ()
    has_failed: bool = False
    has_left: bool = False

    def to_json(self) -> str:
        """As it travels through the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        if values["inside"] is not None:
            values["inside"] = CallNote(**values["inside"])
        values["recent"] = tuple(CallNote(**note) for note in values["recent"])
        for key in ("members", "actions", "stack"):
            values[key] = tuple(values[key])
        return cls(**values)

    @property
    def state_s(self) -> float:
        """How long it has been inside the collective, or outside any."""
        return self.idle_s if self.inside is None else self.inside_s

    def state(self) -> str:
        """Where the rank is, in words."""
        if self.has_left:
            return "done, its engine closed"
        if self.inside is not None:
            return f"in {self.inside} for {self.inside_s:.0f} s"
        since = self.recent[-1].title if self.recent else "its engine began, and in no collective yet"
        return f"at {self.place}, {self.idle_s:.0f} s after {since}"

    def kind(self) -> tuple[object, ...]:
        """What ranks in the same state have in common."""
        return self.has_left, self.inside or (self.place, self.recent[-1:])


Reports = Mapping[int, RankReport | None]


def diagnose(reports: Reports) -> str:
    """Say in one line why ranks wait: where they diverged, else who keeps them waiting.

    Args:
        reports: of every rank of the world; None of those that do not answer.
    """
    waiting = {rank: report for rank, report in reports.items() if report is not None and report.inside is not None}
    if not waiting:
        return "no rank waits any more"
    diverged = _first_divergence(reports)
    if diverged:
        return diverged
    behind = list(dict.fromkeys(_behind(reports, waiting)))
    if behind:
        more = f"; and {len(behind) - _NUM_DETAILED} more ranks" if len(behind) > _NUM_DETAILED else ""
        return "; ".join(behind[:_NUM_DETAILED]) + more
    calls = {(report.inside.group, report.inside.position) for report in waiting.values() if report.inside}
    if len(calls) == 1:
        report = next(iter(waiting.values()))
        return f"all its ranks are in {report.inside}: the network or a device is stuck, or only slow"
    return "; ".join(f"rank {rank} waits in {report.inside}" for rank, report in list(waiting.items())[:_NUM_DETAILED])


def _first_divergence(reports: Reports) -> str:
    """Where ranks of one group first went to different collectives, as far as they remember."""
    notes_at: dict[tuple[str, int], dict[int, CallNote]] = {}
    for rank, report in reports.items():
        for note in report.recent if report is not None else ():
            notes_at.setdefault((note.group, note.position), {})[rank] = note
    texts = (divergence(notes_at[place]) for place in sorted(notes_at, key=lambda place: place[1]))
    return next((text for text in texts if text), "")


def _behind(reports: Reports, waiting: Mapping[int, RankReport]) -> Iterator[str]:
    """The ranks that are in no collective, or silent, and for which others wait."""
    for rank, report in reports.items():
        awaited = [each for each in waiting.values() if rank in each.members and each.inside is not None]
        calls = [each.inside for each in awaited if each.inside is not None]
        if not calls or rank in waiting:
            continue
        call = min(calls, key=lambda call: call.number)
        waiters = listed([each.rank for each in awaited])
        verb = "waits" if len(awaited) == 1 else "wait"
        if report is None:
            yield f"rank {rank} does not answer: {_SILENT}; {waiters} {verb} for it in {call.title}"
        elif report.has_left:
            yield f"rank {rank} has closed its engine; {waiters} {verb} for it in {call.title}"
        else:
            did = "has started" if report.positions.get(call.group, 0) >= call.position else "has not started"
            yield f"rank {rank} {did} {call.title}: it is {report.state()}"


def render(reports: Reports, reporter: int) -> str:
    """The whole report: the diagnosis, a line for each group of ranks in one state, and details of a few.

    Args:
        reports: as for `diagnose`.
        reporter: the rank that speaks.
    """
    own = reports[reporter]
    lines = [f"shardwise: rank {reporter} is {own.state() if own is not None else 'waiting'}: {diagnose(reports)}"]
    alike: dict[tuple[object, ...], list[RankReport]] = {}
    for _, report in sorted(reports.items()):
        if report is not None:
            alike.setdefault(report.kind(), []).append(report)
    for members in alike.values():
        longest = max(members, key=lambda report: report.state_s)
        lines.append(f"  {listed([report.rank for report in members])}: {longest.state()}")
    silent = [rank for rank, report in sorted(reports.items()) if report is None]
    if silent:
        lines.append(f"  {listed(silent)}: no answer; {_SILENT}")
    # One rank for each state, and first those that keep the others waiting.
    shown = sorted((members[0] for members in alike.values()), key=lambda report: report.inside is not None)
    for report in shown[:_NUM_DETAILED]:
        lines += details(report)
    return "\n".join(lines)


def details(report: RankReport) -> Iterator[str]:
    """Lines on one rank: its latest collectives and actions, and its stack."""
    if report.has_left:
        return
    yield f"  on rank {report.rank}, process {report.pid} on {report.host}:"
    yield f"    last collectives: {', '.join(note.title for note in report.recent[-_NUM_CALLS:]) or 'none'}"
    yield f"    last actions: {', '.join(report.actions) or 'none'}"
    yield "    its main thread, innermost last:"
    yield from (f"      {line}" for line in report.stack)
