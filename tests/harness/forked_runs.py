"""Runs of `shardwise` whose launcher and ranks are forked from a process that has imported what they need.

They differ from those of a terminal in this alone: a start takes a tenth of a second and not the seconds of torch's
import, on a busy machine many more. The launcher's ranks are forked from it where it would start an interpreter.

    with Nursery() as nursery:
        launcher = nursery.start(["train", "run.steps=4"], folder, folder / "said")
        assert launcher.wait(100) == 0
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, NoReturn, Self

_PRELOAD = (
    *("torch.distributed", "torch._dynamo"),
    *("shardwise.cli.main", "shardwise.cli.train", "shardwise.train.run", "shardwise.planner.memory"),
)
_HUGGING_FACE = ("transformers.modeling_utils", "transformers.models.llama.modeling_llama", "peft")


@dataclass(frozen=True)
class ForkedRun:
    """The launcher of a run, with what the harness uses of `subprocess.Popen`."""

    pid: int
    poll: Callable[[], int | None]

    def wait(self, timeout_s: float = 100.0) -> int:
        deadline_s = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("shardwise", timeout_s)
            time.sleep(0.02)
        return code


class Nursery:
    """The process that runs are forked from.

    Args:
        with_hugging_face: whether it has imported that, too, of which some runs train a model.
    """

    def __init__(self, with_hugging_face: bool = True) -> None:
        self._modules = [*_PRELOAD, *(_HUGGING_FACE if with_hugging_face else ())]
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.forked_runs", *self._modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate()

    def start(self, argv: Sequence[str], folder: Path, said: Path, slow_disk_s: float = 0.0) -> ForkedRun:
        """Run `shardwise` in a folder, with what it says in the file `said`; each rank's flush takes so long."""
        request = {"argv": list(argv), "folder": str(folder), "said": str(said), "slow_disk_s": slow_disk_s}
        said.touch()
        pid = self._ask(request)
        return ForkedRun(pid, lambda: self._code_of(pid))

    def _code_of(self, pid: int) -> int | None:
        if pid not in self._codes and (code := self._ask({"pid": pid})) is not None:
            self._codes[pid] = code
        return self._codes.get(pid)

    def _ask(self, request: Mapping[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            return json.loads(stdout.readline())


def _serve() -> None:
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                _be_launcher(request)
        print(json.dumps(answer), flush=True)


def _be_launcher(request: Mapping[str, Any]) -> NoReturn:
    from shardwise.launch import local

    os.chdir(request["folder"])
    said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def popen(command: Sequence[str], env: Mapping[str, str], **streams: Any) -> _ForkedRank:
        return _ForkedRank(command, env, streams, request["slow_disk_s"])

    local.subprocess = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
    _become(["shardwise", *request["argv"]], (said, said), (), dict(os.environ))


class _ForkedRank:
    """What the launcher uses of `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], streams: Mapping[str, Any], slow_disk_s: float
    ) -> None:
        self.returncode: int | None = None
        assert list(command[1:3]) == ["-m", "shardwise.cli"]
        self.pid = os.fork()
        if self.pid == 0:
            flush = os.fsync

            def slowly(descriptor: int) -> None:
                time.sleep(slow_disk_s)
                flush(descriptor)

            os.fsync = slowly
            stdout, stderr = streams["stdout"], streams["stderr"]
            outputs = (1 if stdout is None else stdout.fileno(), stderr.fileno())
            _become(["shardwise", *command[3:]], outputs, streams["pass_fds"], env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _become(argv: list[str], outputs: tuple[int, int], kept: Sequence[int], environ: Mapping[str, str]) -> NoReturn:
    """Be as an interpreter that has just been started, run the command line, and end."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, *outputs)):
        os.dup2(descriptor, number)
    for each in Path("/proc/self/fd").iterdir():
        if int(each.name) > 2 and int(each.name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(each.name))
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = argv
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    faulthandler.enable()
    logging.getLogger().handlers.clear()
    code: Any = 1
    try:
        from shardwise.cli.main import main

        code = main(argv[1:])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    _serve()
