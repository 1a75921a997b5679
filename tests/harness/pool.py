"""Gloo ranks for tests: worker processes that start once a session and run module-level functions.

Not a launcher: of the library it knows the name. Every call gets a fresh default process group (10-50 ms), so
subgroups and meshes of one test never reach the next; the processes, and what they have imported, stay. A
failed call ends its workers and the next call forks new ones, which takes milliseconds because a template
process has torch and the library imported.

    def add_ranks(rank: int, world_size: int, start: float) -> float:
        total = torch.tensor(start + rank)
        dist.all_reduce(total)
        return total.item()

    def test_add_ranks(ranks):
        assert ranks(2).run(add_ranks, 1.0) == [3.0, 3.0]

Functions, arguments and results are sent by pickle. A tensor that is a view carries its whole storage: return a
clone. `assert` in a worker is plain Python: return the values and compare them in the test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.config.errors import CodedError

MAX_RANKS = 8
# Bounds of a hang: on a machine that is slow, busy or asleep for a while nothing comes near them.
CALL_TIMEOUT_S = 180.0
GROUP_TIMEOUT_S = 120.0
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0  # for faulthandler to write the stacks, or for a dead rank's exit code to come
GRACE_S = 2.0  # how long the other ranks may take to notice that one has failed, where a test needs no word of theirs
LOG_LINES = 40

# The template process imports these once; the first optimizer imports torch._dynamo, which takes a second, and a
# rank that had to import the last two itself would take another. What is not installed is passed over.
_PRELOAD = [
    "torch.distributed",
    "torch._dynamo",
    "numpy",
    "pytest",
    "shardwise.engine.engine",
    "transformers.modeling_utils",
]
_READY = "ready"


class RankError(RuntimeError):
    """A call failed: `rank` was the cause, by an exception of class `kind` or because it "died" or "hung".

    `code` is the exception's, if it has one.
    """

    def __init__(self, text: str, rank: int, kind: str, code: str = "") -> None:
        super().__init__(text)
        self.rank = rank
        self.kind = kind
        self.code = code


@dataclass(frozen=True)
class _Call:
    group: str
    rank: int
    world_size: int
    sys_path: list[str]
    payload: bytes  # pickled (fn, args)


@dataclass(frozen=True)
class _Result:
    payload: bytes


@dataclass(frozen=True)
class _Failure:
    rank: int
    kind: str  # the exception's class, or "died", "hung", "stopped"
    summary: str
    details: str  # the traceback, and what the rank has printed
    code: str = ""  # of the exception


@dataclass(frozen=True)
class _Worker:
    process: ForkServerProcess
    connection: Connection
    log: Path

    def is_ready(self) -> bool:
        """Wait until the worker can take a call; False when it died or hangs in its last teardown."""
        try:
            return self.connection.poll(START_TIMEOUT_S) and self.connection.recv() == _READY
        except (EOFError, OSError):
            return False

    def abort(self) -> None:
        """End the process, whatever it does; faulthandler first writes its stacks to the log."""
        pid = self.process.pid
        if pid is not None and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)

    def end(self, is_aborted: bool = False) -> None:
        """End the process and wait for its end; a second abort would cut off the stacks that the first one writes."""
        if not is_aborted:
            self.abort()
        self.process.join(END_TIMEOUT_S)
        self.process.kill()
        self.process.join()
        self.connection.close()

    def log_tail(self) -> str:
        """The last lines that the worker, or faulthandler, has printed in this call."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if not line.startswith("Extension modules:")][-LOG_LINES:])


class WorkerPool:
    """Up to `MAX_RANKS` workers, started when first needed; `pool(n).run(fn, *args)` uses the first n."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._num_calls = 0
        self._num_started = 0
        self._folder = Path(tempfile.mkdtemp(prefix="shardwise-ranks-"))
        self._store: dist.TCPStore | None = None

    def __call__(self, num_ranks: int) -> Ranks:
        if not 1 <= num_ranks <= MAX_RANKS:
            raise ValueError(f"num_ranks={num_ranks}: the pool has 1 to {MAX_RANKS} ranks")
        return Ranks(self, num_ranks)

    def run(
        self, num_ranks: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, grace_s: float
    ) -> list[Any]:
        """See `Ranks.run`."""
        payload = _pickle_call(fn, args)
        workers = self._ready_workers(num_ranks)
        self._num_calls += 1
        group = f"call{self._num_calls}"
        try:
            for rank, worker in workers.items():
                worker.connection.send(_Call(group, rank, num_ranks, list(sys.path), payload))
            results, failures = _collect(workers, timeout_s, grace_s)
        except BaseException:  # a test's own timeout, Ctrl-C: the workers are in the middle of something
            self._end(workers)
            raise
        if failures:
            self._end(workers)
            raise _error(failures, fn, num_ranks)
        for worker in workers.values():
            worker.connection.send(None)  # all have answered: now, and not before, they may leave the group
        return [pickle.loads(results[rank]) for rank in range(num_ranks)]

    def close(self) -> None:
        """End all workers; no call is running, so nothing is lost by ending them hard."""
        for worker in self._workers.values():
            worker.connection.close()
        for worker in self._workers.values():
            worker.process.join(GRACE_S)
            worker.end()
        self._workers.clear()
        self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ready_workers(self, num_ranks: int) -> dict[int, _Worker]:
        """Start what is missing, together; replace once what has died in the teardown of its last group."""
        ready: dict[int, _Worker] = {}
        for _ in range(2):
            missing = [rank for rank in range(num_ranks) if rank not in ready]
            waiting = {rank: self._workers.get(rank) or self._start() for rank in missing}
            self._workers |= waiting
            ready |= {rank: worker for rank, worker in waiting.items() if worker.is_ready()}
            failed = {rank: worker for rank, worker in waiting.items() if rank not in ready}
            self._end(failed)
        if failed:
            logs = "\n".join(worker.log_tail() for worker in failed.values())
            raise RuntimeError(f"workers of ranks {sorted(failed)} do not start; their logs:\n{logs}")
        return dict(sorted(ready.items()))

    def _start(self) -> _Worker:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = template()
        ours, theirs = context.Pipe()
        self._num_started += 1
        log = self._folder / f"worker{self._num_started}.log"
        log.touch()
        process = context.Process(target=_serve, args=(theirs, self._store.port, log), daemon=True)
        with one_thread():
            process.start()
        theirs.close()
        return _Worker(process, ours, log)

    def _end(self, workers: dict[int, _Worker]) -> None:
        for rank, worker in workers.items():
            worker.end()
            del self._workers[rank]


@dataclass(frozen=True)
class Ranks:
    """The first `num_ranks` workers of a pool."""

    pool: WorkerPool
    num_ranks: int

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = CALL_TIMEOUT_S, grace_s: float = GRACE_S
    ) -> list[Any]:
        """Run `fn(rank, world_size, *args)` on every rank and return the results by rank.

        `fn` is a module-level function. Each call has its own default process group, seed 0, one thread and
        default dtype float32. RankError is raised when a rank raises, dies, or has not answered after
        `timeout_s`; the others then have `grace_s` to say what they meet in its wake.
        """
        return self.pool.run(self.num_ranks, fn, args, timeout_s, grace_s)


def template() -> ForkServerContext:
    """The process that others are forked from, with what it imports when the first of them starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise ValueError(f"{name} cannot be pickled ({error}); use a module-level function") from error


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """An environment for the template in which libraries start no threads at import: fork loses threads."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(workers: dict[int, _Worker], timeout_s: float, grace_s: float) -> tuple[dict[int, bytes], list[_Failure]]:
    """The results by rank, the failures in order of arrival; when it returns, no rank is running."""
    results: dict[int, bytes] = {}
    failures: list[_Failure] = []
    pending: dict[Any, int] = {worker.connection: rank for rank, worker in workers.items()}
    deadline_s = time.monotonic() + timeout_s
    while pending and (ready := wait(list(pending), max(0.0, deadline_s - time.monotonic()))):
        for connection in ready:
            rank = pending.pop(connection)
            answer = _receive(workers[rank], rank)
            if isinstance(answer, _Result):
                results[rank] = answer.payload
                continue
            if not failures:
                deadline_s = min(deadline_s, time.monotonic() + grace_s)
            failures.append(answer)
            workers[rank].end()  # closes its sockets, so that ranks waiting for it fail at once
    kind = "stopped" if failures else "hung"
    summary = "was still running, and was stopped" if failures else f"has not answered in {timeout_s:g} s"
    for rank in pending.values():
        workers[rank].abort()  # all before the first ends: its end would wake those that wait for it
    for rank in pending.values():
        workers[rank].end(is_aborted=True)
        failures.append(_Failure(rank, kind, summary, workers[rank].log_tail()))
    return results, failures


def _receive(worker: _Worker, rank: int) -> _Result | _Failure:
    try:
        answer = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join(END_TIMEOUT_S)
        return _Failure(rank, "died", f"died with exit code {worker.process.exitcode}", worker.log_tail())
    if isinstance(answer, _Failure):
        return replace(answer, details=answer.details + worker.log_tail())
    return answer


def _error(failures: list[_Failure], fn: Callable[..., Any], num_ranks: int) -> RankError:
    """The cause first: a rank that died, else the first that failed; the others mostly fail in its wake."""
    cause = next((failure for failure in failures if failure.kind == "died"), failures[0])
    others = [failure for failure in failures if failure is not cause]
    name = f"{fn.__module__}.{fn.__qualname__}"
    lines = [f"{name}: rank {cause.rank} of {num_ranks} {cause.summary}", cause.details]
    for other in others:
        lines.append(f"rank {other.rank} of {num_ranks} {other.summary}")
        if cause.kind == "hung":  # every rank's stack is needed to see who waits for whom
            lines.append(other.details)
    return RankError("\n".join(line for line in lines if line), cause.rank, cause.kind, cause.code)


def _serve(connection: Connection, port: int, log: Path) -> None:
    """The worker's life: ready, call, answer, wait for all, leave the group, ready; ends with the pipe."""
    try:
        _set_up_process(log)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=GROUP_TIMEOUT_S))
        num_modules = 0
        while True:
            connection.send(_READY)
            connection.send(_answer(connection.recv(), store))
            connection.recv()
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()
            if len(sys.modules) > num_modules:  # what was imported stays: later collections take a millisecond again
                gc.freeze()
                num_modules = len(sys.modules)
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _set_up_process(log: Path) -> None:
    from harness.proofs import remember_proofs  # the template has imported what it needs, the test's process has not

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; pytest then closes the pool
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(file=2)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's own name need not resolve
    gc.freeze()  # what the template imported is never garbage
    remember_proofs(log.parent / "proofs")


def _answer(call: _Call, store: dist.Store) -> _Result | _Failure:
    os.ftruncate(1, 0)
    try:
        sys.path[:] = call.sys_path
        fn, args = pickle.loads(call.payload)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(call.group, store),
            rank=call.rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        torch.manual_seed(0)
        return _Result(pickle.dumps(fn(call.rank, call.world_size, *args)))
    except BaseException as error:  # SystemExit too: the worker must answer
        kind = type(error).__name__
        code = error.code if isinstance(error, CodedError) else ""
        return _Failure(call.rank, kind, f"raised {kind}: {error}", traceback.format_exc(), code)
    finally:
        sys.stdout.flush()
