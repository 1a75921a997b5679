"""Starts the ranks of a test of DeepSpeed's suite, in place of the suite's own pool of processes.

The pool waits for all ranks, so that a rank that raises while the others are in a collective is "hanged", and then
pytest ends with all tests that follow. Here the first rank that raises ends the test with its traceback, and a rank
that does not end says where it stands. The ranks are forks of one process that has torch and the drop-in already.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import pytest
import torch.distributed as dist

# What a rank imports in the end, which the ranks' parent has imported once.
PRELOADED: Final = (
    "unit.common",
    "unit.simple_model",
    "torch._dynamo",
    "shardwise.compat.deepspeed.start",
    "shardwise.engine.engine",
    "shardwise.checkpoint",
)
GRACE: Final = 3.0  # seconds in which the other ranks may say why they fail too


def replace_pool() -> None:
    """Start the ranks of DeepSpeed's tests by `launch`, where its harness is loaded."""
    common = sys.modules.get("unit.common")
    if common is not None:
        common.DistributedExec._launch_procs = launch


def launch(test: Any, num_ranks: int, init_method: str) -> None:
    """Run a test on so many ranks; it has the arguments of `DistributedExec._launch_procs`."""
    common = sys.modules["unit.common"]
    shown = common.get_accelerator().device_count()
    if shown < num_ranks:
        pytest.skip(f"not enough devices: {num_ranks} required, {shown} available")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            given = (test, rank, num_ranks, port, init_method, sender, f"{folder}/{rank}")
            processes.append(context.Process(target=run_rank, args=given, daemon=not test.non_daemonic_procs))
            processes[-1].start()
            sender.close()
            ends.append(receiver)
        try:
            answers = collect(ends, test.exec_timeout)
            if None in answers:
                stuck = [rank for rank, answer in enumerate(answers) if answer is None]
                failures = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if answer is not None]
                stacks = [f"rank {rank} stands at\n{stack_of(processes[rank], folder, rank)}" for rank in stuck]
                answers = [("failed", "\n".join([f"does not end within {test.exec_timeout} s", *failures, *stacks]))]
        finally:
            for process in processes:
                process.kill()
                process.join()
    failures = [text for kind, text in filter(None, answers) if kind == "failed"]
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)
    for kind, text in filter(None, answers):
        if kind == "skipped":
            pytest.skip(text)


def free_port() -> str:
    """Return a port that no one has; the suite's own takes the same ones in two runs at once."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def collect(ends: list[Connection], limit: float) -> list[tuple[str, str] | None]:
    """Return what each rank has said, the first failure first; None of one that does not end."""
    answers: dict[Connection, tuple[str, str]] = {}
    until = time.monotonic() + limit
    while (waiting := [end for end in ends if end not in answers]) and time.monotonic() < until:
        for end in wait(waiting, until - time.monotonic()):
            assert isinstance(end, Connection)
            try:
                answers[end] = end.recv()
            except EOFError:
                answers[end] = ("failed", "the rank's process died")
            if answers[end][0] == "failed":
                until = min(until, time.monotonic() + GRACE)
    failed = [answer for answer in answers.values() if answer[0] == "failed"]
    return failed or [answers.get(end) for end in ends]  # type: ignore[return-value]


def stack_of(process: Any, folder: str, rank: int) -> str:
    """Return where a rank stands, the innermost call last."""
    if process.is_alive():
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
    path = Path(folder, str(rank))
    lines = path.read_text().splitlines() if path.exists() else []
    main = next((at for at, line in enumerate(lines) if line.startswith("Current thread")), 0)
    return "\n".join(reversed(lines[main:][:25]))


def reduce_boolean_flags(flag: bool, op: Callable[[list[bool]], bool] = all) -> bool:
    """Return what holds of all ranks' flags, as the suite's own, whose tensors without a dimension gloo refuses."""
    if not dist.is_initialized():
        return flag
    flags = [False] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return op(flags)


def run_rank(test: Any, rank: int, num_ranks: int, port: str, init_method: str, end: Connection, dump: str) -> None:
    """Run one rank, and say through `end` how it went."""
    stacks = open(dump, "w")  # noqa: SIM115 (the signal's handler writes into it)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    for name in ("unit.common", type(test).__module__):  # a test's module has imported it already
        if hasattr(sys.modules[name], "reduce_boolean_flags"):
            sys.modules[name].reduce_boolean_flags = reduce_boolean_flags  # type: ignore[attr-defined]
    test.non_daemonic_procs = False  # then the message of a skip is returned
    try:
        skipped = test._dist_run(rank, num_ranks, port, init_method)
        end.send(("skipped", skipped) if skipped else ("passed", ""))
        test._dist_destroy()
    except BaseException as error:
        last = f"{type(error).__name__}: {error}".strip()
        end.send(("failed", f"{last}\nrank {rank}\n{traceback.format_exc()}"))
