"""Programs of Python that begin in a process that has imported torch and the library, not in an empty interpreter.

They differ from those of a terminal in this alone: a start takes a tenth of a second and not the seconds of imports.
What such a program starts (a launcher its ranks, torchrun its workers) begins in the same way, as its child.

    @pytest.mark.usefixtures("warm_python")  # from here on `subprocess.Popen` and `subprocess.run` are such starts
    def test_a_run(): ...

`/proc` shows the environment and the command of the process that they come from.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import inspect
import io
import itertools
import json
import logging
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing import process as processes
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from harness.pool import one_thread, template

_MODULES = (
    *("shardwise.cli.main", "shardwise.cli.train", "shardwise.train.run", "shardwise.planner.memory"),
    *("shardwise.launch.local", "torch.distributed.run", "torch.utils.tensorboard", "multiprocessing.queues"),
)
_ASK_FOR_DEEPSPEED = ("accelerate", "peft", "transformers")  # at their import
_BECOME_PARENT_OF_ORPHANS = 36  # prctl's PR_SET_CHILD_SUBREAPER
_RealPopen = subprocess.Popen
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Program:
    """What a started interpreter is given.

    Attributes:
        words: its arguments: `-m module ...`, `-c code ...` or `script ...`.
        numbers: which descriptors it has; the first three are of stdin, stdout and stderr, whatever their numbers.
    """

    words: list[str]
    folder: str
    environ: dict[str, str]
    has_session: bool
    numbers: list[int] = field(default_factory=list)


class WarmPython:
    """The process that programs are forked from; it is a fork of the one that ranks of the pool come from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        context = template()
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        with one_thread():
            self._process.start()
        theirs.close()
        self._socket = socket.socket(fileno=os.dup(ours.fileno()))
        ours.close()

    def close(self) -> None:
        self._socket.close()
        self._process.join()

    def start(self, program: _Program, descriptors: Sequence[int]) -> int:
        """Start a program as a child of this process, and return its id."""
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(_BECOME_PARENT_OF_ORPHANS, 1, 0, 0, 0)
            text = json.dumps(vars(program)).encode()
            socket.send_fds(self._socket, [len(text).to_bytes(8, "little")], list(descriptors))
            self._socket.sendall(text)
            pid = int.from_bytes(_received(self._socket, 8), "little")
            prctl(_BECOME_PARENT_OF_ORPHANS, 0, 0, 0, 0)
        return pid

    def popen(self) -> type[subprocess.Popen[Any]]:
        """A class for `subprocess.Popen` that starts programs of Python here, and all others as ever."""
        return _popen(self.start)


def _popen(start: Callable[[_Program, Sequence[int]], int]) -> type[subprocess.Popen[Any]]:
    class Popen(_RealPopen):  # type: ignore[type-arg]
        def _execute_child(self, *given: Any) -> None:
            asked = _SIGNATURE.bind(self, *given).arguments
            command = asked["args"]
            is_python = not asked["shell"] and not isinstance(command, str) and os.fspath(command[0]) == sys.executable
            if not is_python or asked["preexec_fn"] or not _is_known([*map(os.fspath, command[1:])]):
                super()._execute_child(*given)  # type: ignore[misc]
                return
            streams = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            descriptors = [number if each == -1 else each for number, each in enumerate(streams)]
            kept = [number for number in asked["pass_fds"] if number > 2]
            environ = os.environ if asked["env"] is None else asked["env"]
            program = _Program(
                [os.fspath(word) for word in command[1:]],
                os.fspath(asked["cwd"] or os.getcwd()),
                {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()},
                bool(asked["start_new_session"]),
                [0, 1, 2, *kept],
            )
            self.pid = start(program, [*descriptors, *kept])
            self._child_created = True
            pairs = (("p2cread", "p2cwrite"), ("c2pwrite", "c2pread"), ("errwrite", "errread"))
            for each in {asked[theirs] for theirs, ours in pairs if asked[ours] != -1}:  # made for the child alone
                os.close(each)
            if (null := getattr(self, "_devnull", None)) is not None:
                os.close(null)
            self._closed_child_pipe_fds = True

    return Popen


def _is_known(words: Sequence[str]) -> bool:
    """Whether this file knows all options of the interpreter among the words: torchrun starts with `-u`."""
    first = next((word for word in words if word != "-u"), "-")
    return first in ("-m", "-c") or not first.startswith("-")


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        more = connection.recv(num_bytes - len(found))
        if not more:
            raise EOFError
        found += more
    return found


def _serve(connection: Connection) -> None:
    os.setsid()  # the terminal's Ctrl-C is for pytest
    for name in _MODULES:
        with contextlib.suppress(ImportError):  # an extra
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    printed = _RealPopen(
        [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"], env=plain, stdout=subprocess.PIPE
    ).communicate()[0]
    path: list[str] = json.loads(printed)
    asked = socket.socket(fileno=os.dup(connection.fileno()))
    connection.close()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            head, descriptors, _, _ = socket.recv_fds(asked, 8, 64)
            if not head:
                return
            given = json.loads(_received(asked, int.from_bytes(head, "little")))
            # The grandchild of one that has ended is the child of the process that asked.
            reading, writing = os.pipe()
            between = os.fork()
            if between == 0:
                pid = os.fork()
                if pid == 0:
                    _become(_Program(**given), descriptors, path)
                os.write(writing, pid.to_bytes(8, "little"))
                os._exit(0)
            os.waitpid(between, 0)
            asked.sendall(os.read(reading, 8))
            for each in (reading, writing, *descriptors):
                os.close(each)


def _become(program: _Program, descriptors: Sequence[int], path: Sequence[str]) -> NoReturn:
    """Be as an interpreter that has just been started, run the program, and end."""
    if program.has_session:
        os.setsid()
    _place(descriptors, program.numbers)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _be_started(program, path)
    start_directly = _starter(path)
    popen = _popen(start_directly)
    for module in [each for each in sys.modules.values() if getattr(each, "__dict__", {}).get("Popen") is not None]:
        if vars(module)["Popen"] in (_RealPopen, subprocess.Popen) and module.__name__ != __name__:
            vars(module)["Popen"] = popen
    os.execvpe = _exec(os.execvpe, path)  # type: ignore[assignment]
    os._exit(_end_of([*itertools.dropwhile(lambda word: word == "-u", program.words)]))


def _starter(path: Sequence[str]) -> Callable[[_Program, Sequence[int]], int]:
    def start(program: _Program, descriptors: Sequence[int]) -> int:
        pid = os.fork()
        if pid == 0:
            _become(program, descriptors, path)
        return pid

    return start


def _exec(real: Callable[..., NoReturn], path: Sequence[str]) -> Callable[..., NoReturn]:
    def execvpe(file: str, args: Sequence[str], env: Mapping[str, str]) -> NoReturn:
        if file != sys.executable:
            real(file, args, env)
        inherited = [0, 1, 2]
        _become(_Program([*args[1:]], str(Path.cwd()), {**env}, False, inherited), inherited, path)

    return execvpe


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Have the descriptors under these numbers, and no other."""
    high = [os.dup2(each, 500 + at, inheritable=False) for at, each in enumerate(descriptors)]
    for each in Path("/proc/self/fd").iterdir():
        if int(each.name) < 500 or int(each.name) >= 500 + len(high):
            with contextlib.suppress(OSError):
                os.close(int(each.name))
    for number, each in zip(numbers, high, strict=True):
        os.dup2(each, number)
        os.close(each)


def _be_started(program: _Program, path: Sequence[str]) -> None:
    import torch

    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environ)
    given = [each for each in program.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [*given, *path]
    if importlib.util.find_spec("deepspeed") is not None:
        for name in [name for name in sys.modules if name.partition(".")[0] in _ASK_FOR_DEEPSPEED]:
            del sys.modules[name]
    is_unbuffered = program.words[0] == "-u" or bool(program.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            open(number, "wb", 0 if is_unbuffered else -1, closefd=False),  # noqa: SIM115
            encoding="utf-8",
            errors="surrogateescape" if number == 1 else "backslashreplace",
            line_buffering=number == 2 or os.isatty(number),
            write_through=is_unbuffered,
        )
        for number in (1, 2)
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    multiprocessing.current_process().name = "MainProcess"
    processes._parent_process = None  # type: ignore[attr-defined]
    # They would write to, and close, descriptors that have been others' since.
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    forkserver._forkserver.__init__()  # type: ignore[misc]
    logging.getLogger().handlers.clear()
    torch.set_num_threads(int(program.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    (faulthandler.enable if program.environ.get("PYTHONFAULTHANDLER") else faulthandler.disable)()
    sys.modules.pop("sitecustomize", None)
    if any((Path(each) / "sitecustomize.py").exists() for each in given):
        importlib.import_module("sitecustomize")


def _end_of(words: Sequence[str]) -> int:
    """Run what the interpreter is given, and all that an interpreter does at its end; return the exit code."""
    code: Any = 0
    try:
        _run(words)
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        trace = error.__traceback__
        for _ in range(2):  # the two frames of this file
            trace = trace and trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    return (code or 0) & 0xFF


def _run(words: Sequence[str]) -> None:
    if words[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[2:]], [""]
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif words[0] == "-m":
        sys.argv, sys.path[:0] = ["-m", *words[2:]], [os.getcwd()]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # it has been imported
            _, spec, code = runpy._get_module_details(words[1])  # type: ignore[attr-defined]
        main = types.ModuleType("__main__")
        vars(main).update(__spec__=spec, __file__=spec.origin, __package__=spec.parent, __builtins__=__builtins__)
        sys.modules["__main__"], sys.argv[0] = main, spec.origin
        exec(code, main.__dict__)
    else:
        sys.argv, sys.path[:0] = list(words), [str(Path(words[0]).resolve().parent)]
        main = types.ModuleType("__main__")
        vars(main).update(__file__=words[0], __builtins__=__builtins__)
        sys.modules["__main__"] = main
        exec(compile(Path(words[0]).read_text(), words[0], "exec"), main.__dict__)
