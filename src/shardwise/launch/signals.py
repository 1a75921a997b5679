"""A rank handles signals, and the end of the launcher that started it, with this module. No torch, no process group.

>>> stop = StopFlag()
>>> bool(stop)
False
>>> stop.request(signal.SIGTERM)
>>> bool(stop), stop.signal_name
(True, 'SIGTERM')
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from shardwise.config.errors import ConfigError
from shardwise.launch.environment import LAUNCHER_FD, LAUNCHER_PATIENCE_S
from shardwise.runtime.clock import StopDetector

# One signal reaches a rank under torchrun twice: from the terminal or from Slurm, and from the agent.
_REPEAT_S = 2.0
_LOOK_S = 1.0
# A rank that must end at once may still close its files.
_CLOSING_S = 1.0


class StopFlag:
    """A stop flag is False until a signal asks the rank to stop, and True from then on.

    Signals reach the ranks at different moments: the ranks must agree on the step after which they stop (a maximum
    over the ranks), or one waits in a collective that the others never enter.

    Args:
        in_steps: signals that only ask to stop while the flag is `armed`, and kill at all other times. Python handles a
            signal between two lines of its own, so never while it waits for a rank that has died; and before the first
            step there is nothing to lose.
    """

    def __init__(self, in_steps: Sequence[signal.Signals] = ()) -> None:
        self._in_steps = tuple(in_steps)
        self._signum: int | None = None
        self._requested_at_s = 0.0
        self._is_saving = False

    def __bool__(self) -> bool:
        return self._signum is not None

    @property
    def signal_name(self) -> str | None:
        """Return the signal that asked first, such as SIGTERM."""
        return None if self._signum is None else signal.Signals(self._signum).name

    def request(self, signum: int) -> None:
        """Ask to stop; a request within two seconds changes nothing, a later one interrupts at once."""
        if self._signum is None:
            self._signum, self._requested_at_s = signum, time.monotonic()
        elif time.monotonic() - self._requested_at_s > _REPEAT_S:
            raise KeyboardInterrupt

    def listen(self, signals: Sequence[signal.Signals]) -> None:
        """Let `signals` ask to stop from now on; one that this process ignores stays ignored."""
        for signum in signals:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._handle)

    @contextlib.contextmanager
    def armed(self, timeout_s: float = math.inf) -> Iterator[None]:
        """Let no signal kill the process while a loop takes steps and reads the flag; enter it on the main thread.

        Python runs a handler between two lines of its own, so not while a step waits in native code. A thread receives
        the signals too. It ends the process at once at a second request, or when the first one is older than
        `timeout_s` and the process is not `saving`.
        """
        before = {signum: signal.getsignal(signum) for signum in self._in_steps}
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        wakeup_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(read_fd, timeout_s), name="shardwise-signals", daemon=True).start()
        self.listen(self._in_steps)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(wakeup_fd)
            os.close(write_fd)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Keep the time-out of `armed` from ending this process inside: writing has a time-out of its own."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self.request(signum)

    def _hear(self, read_fd: int, timeout_s: float) -> None:
        first: tuple[int, float] | None = None
        while True:
            heard = os.read(read_fd, 64) if select.select([read_fd], [], [], first and _LOOK_S)[0] else None
            if heard == b"":  # no longer armed
                os.close(read_fd)
                return
            now_s = time.monotonic()
            asked = [signum for signum in heard or b"" if signum in self._in_steps]
            if first is None:
                first = (asked[0], now_s) if asked else None
            elif asked and now_s - first[1] > _REPEAT_S:
                time.sleep(_CLOSING_S)
                _end(first[0], "it was asked to stop once more")
            elif now_s - first[1] > timeout_s and not self._is_saving:
                _end(first[0], f"its step did not end within run.timeout_s={timeout_s:g} of the signal")


def _end(signum: int, why: str) -> None:
    name = signal.Signals(signum).name
    with contextlib.suppress(OSError):
        os.write(2, f"shardwise: this rank was stopped by {name} and ends at once: {why}\n".encode())
    os._exit(128 + signum)


def install_stop_signal() -> StopFlag:
    """Return a flag that Ctrl-C, SIGTERM and SIGUSR1 set while it is `armed`; until then they kill.

    Call it on the main thread.

    A signal that this process ignores (a background job's SIGINT) stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own would print where it was
    return StopFlag(in_steps=(signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))


def watch_signals(names: Sequence[str]) -> StopFlag:
    """Return a flag that signals set from now on. Call it on the main thread.

    Raises:
        ConfigError: a name is no signal's, or this is another thread, where Python installs no handler.
    """
    signal_names = signal.Signals.__members__
    if unknown := [name for name in names if name not in signal_names]:
        raise ConfigError("signal-unknown", f"{unknown[0]} is no signal here; give names such as SIGTERM, SIGUSR1")
    if fixed := [name for name in names if signal_names[name] in (signal.SIGKILL, signal.SIGSTOP)]:
        raise ConfigError("signal-not-handled", f"{fixed[0]} reaches no program; give names such as SIGTERM, SIGUSR1")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("signals-off-main", "signals are watched on the main thread only; call it there")
    stop = StopFlag()
    stop.listen([signal_names[name] for name in names])
    return stop


def exit_with_parent(environ: Mapping[str, str]) -> None:
    """Kill this rank and its own children when the local launcher dies for any reason; call it first of all.

    Do the same when the launcher has been stopped for longer than the time in the environment: it holds the store, and
    receives no signal. Do nothing under any other launcher, nor in a child of a rank: it has the variables without the
    pipe, and there may be another file under the pipe's number.
    """
    if (launcher_fd := _pipe_of(environ.get(LAUNCHER_FD, ""))) is None:
        return
    try:
        patience_s = float(environ.get(LAUNCHER_PATIENCE_S, "inf"))
    except ValueError:
        patience_s = math.inf
    watched = launcher_fd, patience_s
    threading.Thread(target=_kill_without_launcher, args=watched, name="exit-with-parent", daemon=True).start()


def _pipe_of(text: str) -> int | None:
    """Return the descriptor of a pipe, beside the three of every process, whose number a text is; None for no such."""
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < 3:
        return None
    try:
        return int(text) if stat.S_ISFIFO(os.fstat(int(text)).st_mode) else None
    except OSError:
        return None


def _kill_without_launcher(launcher_fd: int, patience_s: float) -> None:
    launcher = StopDetector(os.getppid(), gap_s=2 * _LOOK_S)
    why = "died"
    # The launcher holds the only writing end and never writes: there is something to read when it has ended.
    while not select.select([launcher_fd], [], [], _LOOK_S)[0]:
        if (stopped_s := launcher.stopped_s()) is not None and stopped_s > patience_s:
            why = f"has been stopped for {stopped_s:.0f} s"
            break
    with contextlib.suppress(OSError):
        os.write(2, f"shardwise: the launcher {why}; this rank ends with it\n".encode())
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
