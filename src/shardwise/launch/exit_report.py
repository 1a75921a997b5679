"""This module says why a rank died, from its exit code and its log, and which of several deaths came first. It reads
logs and is pure otherwise.

>>> print(describe_exit(-signal.SIGKILL, []))
killed by SIGKILL: out of memory, or kill -9
>>> print(describe_exit(1, ["Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: no such data"]))
exited with code 1: ValueError: no such data
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.config.written_files import is_full

NUM_SHOWN_LINES = 15
_TAIL_BYTES = 65_536
_REFUSED = 2  # the exit code of what a user can mend in the config
_MAX_LINE_CHARS = 300
_NOTHING_SAID = "(empty: it ended while it started, before it had anything to say)"

_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?")  # torch's excepthook puts it before each line of a traceback
_SIGNAL_MEANINGS: Mapping[int, str] = {
    signal.SIGKILL: "out of memory, or kill -9",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted by a C++ error",
    signal.SIGBUS: "bus error: /dev/shm or a disk may be full",
    signal.SIGALRM: "its time was over",
}
# Errors of a rank that only lost its peer.
_LOST_PEER = re.compile(
    r"connection (reset|closed|refused)|broken pipe|another rank (has )?died|rank 0 .* went away|pair closure"
    r"|rank \d+ failed in \w+ #\d+ of "
    r"|gloo/transport|remote process exited|communicator was aborted|failed to recv|socket timeout"
    r"|DistNetworkError|DistStoreError|ncclRemoteError",
    re.IGNORECASE,
)
# Before the traceback of a thread, or of what fails while objects are deleted.
_NOT_THE_END = re.compile(r"Exception (ignored )?in\b")
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d [\d:,.]+ \w+ \w+: ")
# What this library says: a line of its log, an error with its code, the end of a rank.
_CODED = re.compile(r"\[[a-z\d]+(-[a-z\d]+)+\]$")
_SAID = re.compile(rf"{_LOG_PREFIX.pattern}|{_CODED.pattern}|^rank \d+ failed: |^out of memory")
_NOISE = re.compile(r"^\s|^\[W\d|[Ww]arning: |leaked .* objects|^Exception (ignored )?in\b|^Traceback ")


@dataclass(frozen=True)
class RankExit:
    """Holds how a rank's process ended; `sent` are the signals that the launcher had sent it by then."""

    rank: int
    returncode: int
    log_path: Path
    sent: tuple[signal.Signals, ...] = ()

    @property
    def failed(self) -> bool:
        """Say whether it ended with an error and not by a signal that was sent, nor with that signal as exit code."""
        return self.returncode != 0 and exit_code(self.returncode) not in [128 + signum for signum in self.sent]


def first_cause(exits: Iterable[RankExit]) -> RankExit | None:
    """Return the first of `exits`, in order of time, that failed by itself; else the first that failed by losing a
    peer.

    A rank that loses a peer after all were asked to stop has not failed.
    """
    lost = None
    for rank_exit in exits:
        if not rank_exit.failed:
            continue
        if not lost_peer(rank_exit):
            return rank_exit
        if lost is None and not rank_exit.sent:
            lost = rank_exit
    return lost


def lost_peer(rank_exit: RankExit) -> bool:
    """Say whether a rank failed because its connection to another did."""
    return rank_exit.returncode > 0 and _LOST_PEER.search(_reason(tail(rank_exit.log_path))) is not None


def describe_exit(returncode: int, log_lines: Sequence[str]) -> str:
    """Say in one line why a process ended: the signal and what it usually means, or the exception's last line."""
    if returncode < 0:
        number = -returncode
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        meaning = _SIGNAL_MEANINGS.get(number)
        return f"killed by {name}: {meaning}" if meaning else f"killed by {name}"
    reason = _reason(log_lines)
    return f"exited with code {returncode}: {reason}" if reason else f"exited with code {returncode}"


def report(rank_exit: RankExit) -> str:
    """Format a report: the rank, the reason, where its log is and the log's last lines; of a refusal that alone."""
    lines = tail(rank_exit.log_path)
    if rank_exit.returncode == _REFUSED and _CODED.search(refusal := _reason(lines)):
        return f"shardwise: {refusal}"
    shown = [line[:_MAX_LINE_CHARS] for line in lines[-NUM_SHOWN_LINES:]] or [_NOTHING_SAID]
    heading = f"shardwise: rank {rank_exit.rank} {describe_exit(rank_exit.returncode, lines)}"
    cut = ["its disk is full, so the log may lack its end"] if is_full(rank_exit.log_path.parent) else []
    return "\n".join([heading, f"the end of its log, {rank_exit.log_path}:", *(f"  | {line}" for line in shown), *cut])


def stopped_note(stopped: Mapping[int, float]) -> str:
    """Say which ranks were stopped when the run ended, and for how long.

    >>> stopped_note({1: 12.3})
    'shardwise: rank 1 was stopped (SIGSTOP or Ctrl-Z) for 12 s when the run ended; the others waited for it'
    """
    texts = [f"rank {rank} was stopped (SIGSTOP or Ctrl-Z) for {for_s:.0f} s" for rank, for_s in stopped.items()]
    return f"shardwise: {', '.join(texts)} when the run ended; the others waited for it"


def exit_code(returncode: int) -> int:
    """Convert a process's return code to what a shell shows: 128 + the signal's number for a death by signal."""
    return 128 - returncode if returncode < 0 else returncode


def tail(log_path: Path) -> list[str]:
    """Return the last lines of a log that are not empty; none where there is no log."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _reason(log_lines: Sequence[str]) -> str:
    """Return the exception that ended the process, else the last line that says something.

    The traceback of a thread, and one after which the process has said more, did not end it.
    """
    lines = [_RANK_PREFIX.sub("", line) for line in log_lines]
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    starts = [index for index in starts if index == 0 or not _NOT_THE_END.match(lines[index - 1])]
    if starts:
        after = lines[starts[-1] + 1 :]
        end = next((index for index, line in enumerate(after) if not line.startswith(" ")), len(after))
        if not any(map(_SAID.search, after[end + 1 :])):
            return "".join(after[end : end + 1])  # empty where the log was cut off
    said = [line for line in lines if not _NOISE.search(line)] or lines
    return _LOG_PREFIX.sub("", said[-1]) if said else ""
