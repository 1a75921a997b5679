"""The local launcher starts the ranks of one machine as processes and watches them to their end. It does not know what
they compute.

Each rank is a session of its own, so that the terminal's Ctrl-C reaches only the launcher, which then asks all ranks to
stop (SIGTERM), waits, and kills those that are left. Rank 0's stdout is the launcher's; all other output goes to a log
per rank. When a rank dies, or stays stopped (SIGSTOP), the launcher ends the others and says which rank it was and why.
The launcher holds the store through which the ranks meet, so that no rank can freeze it.

    exit_code = launch_local(["-m", "shardwise.cli", "train"], 2, Path("runs/1"))
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

from shardwise.config.errors import ConfigError, printable_lines
from shardwise.config.sections import AskedDevice
from shardwise.config.written_files import open_end, write_whole
from shardwise.launch import checks
from shardwise.launch.environment import LAUNCHER_FD, LAUNCHER_PATIENCE_S, NUM_QUEUES, QUEUES_NAME
from shardwise.launch.exit_report import RankExit, exit_code, first_cause, lost_peer, report, stopped_note
from shardwise.launch.host import num_cores
from shardwise.runtime.clock import StopDetector, is_stopped

# Settings of CUDA's allocator; torch reads one of these variables, and the first is its name in torch >= 2.9.
ALLOC_CONF_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE_SEGMENTS = "expandable_segments:True"
_LOOPBACK: Mapping[str, str] = MappingProxyType({"linux": "lo", "darwin": "lo0"})

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Within this time a signal repeats the first: a shell and its terminal, or a wrapper, may each send one.
_REPEAT_S = 0.5
# A rank that lost its peer may be seen to end before the peer does: the peer is waited for so long.
_SETTLE_S = 0.5
_POLL_S = 0.05
_LOOK_S = 1.0
# The others notice by themselves that a rank is stopped, and know more about it: they get this much more time.
_NOTICE_S = 3.0
_SHOW_CURSOR = "\x1b[?25h"


class _Signalled(NamedTuple):
    signum: signal.Signals
    at_s: float


class _Phase(Enum):
    """RUNNING -> (SETTLING ->) STOPPING -> KILLED; each may be left early, as soon as no rank lives."""

    RUNNING = auto()
    SETTLING = auto()  # a rank lost its peer; the peer's own end is waited for
    STOPPING = auto()  # SIGTERM was sent
    KILLED = auto()  # SIGKILL was sent


def default_num_ranks(device: AskedDevice) -> int:
    """Return one rank for each GPU; without GPUs two where there are two cores, else one.

    Raises:
        ConfigError: a kind of GPU was asked for and there is none.
    """
    num_gpus = 0
    if device != "cpu":
        from shardwise.runtime.device import choose_kind, num_devices  # torch takes seconds, and a CPU needs none here

        num_gpus = num_devices(choose_kind(device))
    return num_gpus or min(2, num_cores())


def launch_local(
    argv: Sequence[str],
    num_ranks: int,
    log_dir: Path,
    *,
    threads_per_rank: int | None = None,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
    grace_s: float = 15.0,
    failure_grace_s: float = 3.0,
) -> int:
    """Run `python *argv` as ranks 0 to num_ranks - 1 with torchrun's environment and return when all have ended.

    Call it on the main thread: it handles SIGINT, SIGTERM and SIGHUP until it returns. The first of them asks the ranks
    to stop; a second one kills them.

    Args:
        argv: the arguments of the interpreter: `["-m", module, ...]` or `[script, ...]`.
        log_dir: gets `rank-N.log`, stdout and stderr; of rank 0 only stderr, since its stdout is this process's.
        threads_per_rank: OMP_NUM_THREADS; None for what `environ` says, else an equal share of the cores.
        environ: the environment that the ranks inherit; None for this process's.
        timeout_s: seconds that the ranks wait for each other. A rank that is stopped for longer ends the run, and so
            does this process.
        grace_s: seconds from the request to stop to the kill.
        failure_grace_s: the same for the ranks that are left when one died.

    Returns:
        0, or the exit code of the rank that died first, or 128 + the number of the signal that stopped the run.
    """
    if num_ranks < 1:
        raise ConfigError("num-ranks-below-one", f"num_ranks={num_ranks} starts nothing; give at least 1")
    checks.count(num_ranks, "num_ranks", 1, checks.MOST_RANKS)
    inherited = os.environ if environ is None else environ
    rank_environ = _common_environ(inherited, num_ranks, threads_per_rank)
    rank_environ[LAUNCHER_PATIENCE_S] = str(timeout_s)
    log_dir.mkdir(parents=True, exist_ok=True)
    with _stop_signals() as received, _Ranks(log_dir) as ranks:
        ranks.start([sys.executable, *argv], num_ranks, rank_environ)
        watch = _Watch(ranks, received, (grace_s, failure_grace_s), timeout_s + _NOTICE_S)
        watch.run()
    return _conclude(watch)


def _common_environ(inherited: Mapping[str, str], num_ranks: int, threads_per_rank: int | None) -> dict[str, str]:
    environ = dict(inherited)
    if threads_per_rank is not None:
        environ["OMP_NUM_THREADS"] = str(threads_per_rank)
    else:
        environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    # A rank that is killed must leave in its log what it printed, and one that crashes in C++ where it was.
    environ.setdefault("PYTHONUNBUFFERED", "1")
    environ.setdefault("PYTHONFAULTHANDLER", "1")
    # Blocks of changing sizes come and go: segments of a fixed size would be left half empty. On CPU it means nothing.
    if not any(name in environ for name in ALLOC_CONF_NAMES):
        environ[ALLOC_CONF_NAMES[0]] = EXPANDABLE_SEGMENTS
    environ.setdefault(QUEUES_NAME, str(NUM_QUEUES))
    # All ranks are here: gloo, which has no authentication, need not listen where other machines can reach it.
    if sys.platform in _LOOPBACK:
        environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK[sys.platform])
    environ.update(WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1")
    return environ


class _Ranks:
    """Holds the processes from start to end; none of them outlives the context."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.alive: set[int] = set()
        self.killed: set[int] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watches: list[StopDetector] = []
        self._store: Any = None
        # Ranks hold the reading end: it ends when this process does, even by kill -9 (`signals.exit_with_parent`).
        self._read_fd, self._write_fd = os.pipe()

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        # The whole process groups: children of a dead rank may still live.
        if self.alive or any(process.returncode for process in self._processes):
            self.kill()
        for process in self._processes:
            process.wait()
        self._store = None
        os.close(self._read_fd)
        os.close(self._write_fd)

    def log_path(self, rank: int) -> Path:
        return self.log_dir / f"rank-{rank}.log"

    def start(self, command: Sequence[str], num_ranks: int, environ: Mapping[str, str]) -> None:
        """Start all ranks, and hold the store in which they meet; it listens on this machine alone."""
        with socket.create_server(("127.0.0.1", 0), backlog=max(128, num_ranks)) as meeting:
            common = {**environ, "MASTER_PORT": str(meeting.getsockname()[1]), LAUNCHER_FD: str(self._read_fd)}
            for rank in range(num_ranks):
                self._start_rank(rank, command, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            if num_ranks > 1:
                # The ranks are importing it too at this time, and wait at the socket.
                from torch.distributed import TCPStore

                port = meeting.getsockname()[1]
                self._store = TCPStore(
                    "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=meeting.detach()
                )

    def _start_rank(self, rank: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        write_whole(self.log_path(rank), b"")
        with open_end(self.log_path(rank)) as log:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log,
                stderr=log,
                pass_fds=[self._read_fd],
                start_new_session=True,
            )
        self._processes.append(process)
        self._watches.append(StopDetector(process.pid, gap_s=2 * _LOOK_S))
        self.alive.add(rank)

    def fetch_ended(self) -> list[tuple[int, int]]:
        """Return (rank, return code) of the ranks that have ended since the last call."""
        ended = [(rank, code) for rank in sorted(self.alive) if (code := self._processes[rank].poll()) is not None]
        self.alive.difference_update(rank for rank, _ in ended)
        return ended

    def stopped(self) -> dict[int, float]:
        """Return for how many seconds each of the living ranks that are stopped has been seen in that state."""
        seen = {rank: self._watches[rank].stopped_s() for rank in sorted(self.alive)}
        return {rank: stopped_s for rank, stopped_s in seen.items() if stopped_s is not None}

    def terminate(self, wakes: bool) -> None:
        """Send SIGTERM to the living ranks; they end their own children.

        Args:
            wakes: True lets a stopped rank go on and receive the signal; False kills it, as the others are gone.
        """
        for rank in self.alive:
            process = self._processes[rank]
            if not wakes and is_stopped(process.pid):
                self._kill(rank)
            process.terminate()
            process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL to the ranks and all that they started."""
        for rank in range(len(self._processes)):
            self._kill(rank)

    def _kill(self, rank: int) -> None:
        self.killed.add(rank)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[rank].pid, signal.SIGKILL)


class _Watch:
    """Follows the ranks to their end, and decides when they are asked to stop and when they are killed."""

    def __init__(
        self, ranks: _Ranks, received: deque[_Signalled], graces_s: tuple[float, float], stopped_limit_s: float
    ) -> None:
        self.exits: list[RankExit] = []
        self.signalled: _Signalled | None = None
        self.stopped: dict[int, float] = {}
        self.has_given_up = False
        self.killed_ranks: list[int] = []
        self._ranks = ranks
        self._received = received
        self._grace_s, self._failure_grace_s = graces_s
        self._stopped_limit_s = stopped_limit_s
        self._phase = _Phase.RUNNING
        self._deadline_s = math.inf
        self._next_look_s = 0.0

    def run(self) -> None:
        """Return when every rank has ended."""
        while self._ranks.alive:
            # This sleeps and does not wait: the system may hand a signal to another thread and leave this one, on
            # which handlers run, asleep.
            time.sleep(_POLL_S)
            for rank, returncode in self._ranks.fetch_ended():
                sent = [signal.SIGTERM] if self._phase in (_Phase.STOPPING, _Phase.KILLED) else []
                sent += [signal.SIGKILL] if rank in self._ranks.killed else []
                self._on_end(RankExit(rank, returncode, self._ranks.log_path(rank), tuple(sent)))
            while self._received:
                self._on_signal(self._received.popleft())
            now_s = time.monotonic()
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + _LOOK_S
                self._look_for_stopped()
            if now_s >= self._deadline_s:
                self._on_deadline()

    def _look_for_stopped(self) -> None:
        stopped = self._ranks.stopped()
        if stopped or self._phase in (_Phase.RUNNING, _Phase.SETTLING):  # later it may be this process that woke them
            self.stopped = stopped
        if max(stopped.values(), default=0.0) > self._stopped_limit_s and not self.has_given_up:
            self.has_given_up = True
            self._stop(self._failure_grace_s)

    def _on_end(self, rank_exit: RankExit) -> None:
        self.exits.append(rank_exit)
        if self._phase is _Phase.STOPPING and (rank_exit.failed or rank_exit.returncode < 0):
            # The others may wait for the dead one: the long grace has no use.
            self._deadline_s = min(self._deadline_s, time.monotonic() + self._failure_grace_s)
        elif not rank_exit.failed:
            return
        elif self._phase is _Phase.RUNNING and lost_peer(rank_exit):
            self._phase = _Phase.SETTLING
            self._deadline_s = time.monotonic() + _SETTLE_S
        elif self._phase is not _Phase.KILLED and not lost_peer(rank_exit):
            self._stop(self._failure_grace_s)

    def _on_signal(self, event: _Signalled) -> None:
        if self.signalled is None:
            self.signalled = event
            if self._phase in (_Phase.RUNNING, _Phase.SETTLING):
                _say(f"shardwise: {event.signum.name}: the ranks stop after this step; once more kills them")
                self._stop(self._grace_s, wakes=True)
        # A closing terminal sends SIGHUP more than once; that is no request to kill.
        elif event.signum is not signal.SIGHUP and event.at_s - self.signalled.at_s > _REPEAT_S:
            self._kill()

    def _on_deadline(self) -> None:
        if self._phase is _Phase.SETTLING:
            self._stop(self._failure_grace_s)
        else:
            self._kill()

    def _stop(self, grace_s: float, wakes: bool = False) -> None:
        if self._phase in (_Phase.RUNNING, _Phase.SETTLING):  # some may have been woken since the last look
            self.stopped = self._ranks.stopped()
        self._phase = _Phase.STOPPING
        self._deadline_s = time.monotonic() + grace_s
        self._ranks.terminate(wakes)

    def _kill(self) -> None:
        self._phase = _Phase.KILLED
        self._deadline_s = math.inf
        self.killed_ranks = sorted(self._ranks.alive)
        self._ranks.kill()


def _conclude(watch: _Watch) -> int:
    """Say what went wrong, if anything did, and return the launcher's exit code."""
    cause = first_cause(watch.exits)
    if cause is not None or watch.killed_ranks or watch.signalled is not None:
        _restore_terminal()
    if watch.stopped and (cause is not None or watch.signalled is not None or watch.has_given_up):
        _say(stopped_note(watch.stopped))
    if watch.signalled is not None and watch.killed_ranks:
        _say(f"shardwise: killed, not having stopped in time: ranks {', '.join(map(str, watch.killed_ranks))}")
    if cause is not None:
        _say(report(cause))
        return exit_code(cause.returncode)
    if watch.signalled is None:
        return int(watch.has_given_up)
    return 128 + watch.signalled.signum


def _restore_terminal() -> None:
    """Show the cursor and end the line that a killed live display has left."""
    if sys.stdout.isatty():
        with contextlib.suppress(OSError):
            print(_SHOW_CURSOR, flush=True)


def _say(message: str) -> None:
    # After SIGHUP the terminal may be gone; the ranks must still be stopped.
    with contextlib.suppress(OSError, ValueError):
        print(printable_lines(message), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _stop_signals() -> Iterator[deque[_Signalled]]:
    """Collect stop signals, and put the old handlers back at the end; an ignored signal (nohup) stays ignored."""
    received: deque[_Signalled] = deque()

    def receive(signum: int, _frame: FrameType | None) -> None:
        received.append(_Signalled(signal.Signals(signum), time.monotonic()))

    handled = [signum for signum in _STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    previous = {signum: signal.signal(signum, receive) for signum in handled}
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
