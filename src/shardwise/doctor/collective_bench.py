"""What collectives cost between processes of this machine: the library's own, over gloo or NCCL.

Two sides. `measure_collectives` starts a launcher as a child and reads what it leaves; the launcher starts the ranks
as it does for training; each rank is `be_peer`. So whatever hangs or dies, it is not the doctor, and the child ends
within its time.

    collectives, failure = measure_collectives("cpu", num_ranks=2, environ=os.environ)
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardwise.comm.backends import ProcessGroupBackend
from shardwise.comm.collectives import Comm
from shardwise.doctor.measure import CollectiveSpeed
from shardwise.launch.environment import LAUNCHER_FD, RankEnv
from shardwise.launch.process_group import start_process_group
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.streams import Streams

DeviceKind = Literal["cpu", "cuda"]

OPS = ("all_gather", "reduce_scatter", "all_reduce")
SIZES_BYTES = (4 * 2**10, 256 * 2**10, 16 * 2**20)
RESULTS = "collectives.jsonl"
_BUDGET_S = 0.12
_MAX_CALLS = 300
# For the ranks to import torch, meet and measure; they need a few seconds.
_TIMEOUT_S = 60.0
_COLLECTIVE_TIMEOUT_S = 20.0
# The launcher gives its ranks less.
_GRACE_S = 4.0


def measure_collectives(
    device_kind: DeviceKind,
    num_ranks: int,
    environ: Mapping[str, str],
    *,
    timeout_s: float = _TIMEOUT_S,
    argv: Sequence[str] = ("-m", "shardwise.cli", "doctor", "--launch-peers"),
) -> tuple[tuple[CollectiveSpeed, ...], str | None]:
    """Measure on processes of their own and return what was measured, and why that is not all, if it is not.

    Args:
        device_kind: gloo on the CPU, or NCCL on GPUs.
        num_ranks: processes to start.
        environ: what they inherit.
        timeout_s: after which they are ended.
        argv: of the launcher, behind the interpreter; gets the folder, the device and the number of ranks.
    """
    rows, failure = measure_on_ranks(argv, (device_kind, str(num_ranks)), environ, timeout_s)
    return tuple(CollectiveSpeed(**row) for row in rows), failure


def measure_on_ranks(
    argv: Sequence[str], arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float
) -> tuple[list[dict[str, Any]], str | None]:
    """Start a launcher as a child and return the rows that its ranks left, and why they are not all, if so.

    Args:
        argv: of the launcher, behind the interpreter; gets a folder for the rows, `RESULTS` in it, and then
        arguments: as they are.
        environ: what it inherits.
        timeout_s: after which it is ended.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as folder:
        exit_code, said = _run([sys.executable, *argv, folder, *arguments], environ, timeout_s)
        results = Path(folder, RESULTS)
        lines = results.read_text().splitlines() if results.exists() else []
        # A rank that was killed may have left half a line.
        rows = [json.loads(line) for line in lines if line.endswith("}")]
    if exit_code == 0:
        return rows, None
    if exit_code is None:
        return rows, f"did not end within {timeout_s:g} s"
    lines = said.strip().splitlines()
    return rows, lines[0].removeprefix("shardwise: ") if lines else f"exited with code {exit_code}"


def join_peers(env: RankEnv, device_kind: DeviceKind, timeout_s: float = _COLLECTIVE_TIMEOUT_S) -> Comm:
    """Meet the other ranks and return the library's collectives among all of them.

    Raises:
        LaunchError: the ranks did not meet.
    """
    start_process_group(env, device_kind, timeout_s)
    group = dist.group.WORLD
    assert group is not None, "the process group stands by now"
    device = torch.device("cuda", torch.cuda.current_device()) if device_kind == "cuda" else torch.device("cpu")
    return comm_over(group, device, timeout_s)


def comm_over(
    group: dist.ProcessGroup, device: torch.device, timeout_s: float, ranks: tuple[int, ...] | None = None
) -> Comm:
    """The library's collectives over a process group; `ranks` of the world, where it is not all of it."""
    return Comm(
        ProcessGroupBackend(group, device),
        "doctor",
        device,
        timeout_s,
        Streams(device),
        BufferPool(device),
        ranks=ranks,
    )


def be_peer(env: RankEnv, folder: Path, device_kind: DeviceKind) -> None:
    """Be one of the ranks: time every collective at every size; rank 0 writes the results.

    Raises:
        LaunchError: the ranks did not meet.
        CommError: a collective failed or hung.
    """
    comm = join_peers(env, device_kind)
    for num_bytes in SIZES_BYTES:
        for op in OPS:
            call_s = _time_op(comm, op, num_bytes)
            if env.rank == 0:
                passes = 2 if op == "all_reduce" else 1
                sent_bytes = passes * num_bytes * (env.world_size - 1) / env.world_size
                backend = "nccl" if device_kind == "cuda" else "gloo"
                result = CollectiveSpeed(backend, env.world_size, op, num_bytes, call_s, sent_bytes / call_s)
                with (folder / RESULTS).open("a") as results:
                    results.write(json.dumps(asdict(result)) + "\n")


def _time_op(comm: Comm, op: str, num_bytes: int) -> float:
    """The median time of a call, that of the slowest rank."""
    call = _caller(comm, op, num_bytes)
    for _ in range(2):
        call()
    # All ranks must make the same number of calls, whatever their clocks say.
    num_calls = int(_BUDGET_S / slowest(comm, _median_s(call, 3)))
    return slowest(comm, _median_s(call, max(3, min(_MAX_CALLS, num_calls))))


def _median_s(call: Callable[[], None], num_calls: int) -> float:
    times_s = []
    for _ in range(num_calls):
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


def slowest(comm: Comm, call_s: float) -> float:
    """The largest of what each rank says; all ranks call it."""
    return slowest_of_each(comm, [call_s])[0]


def slowest_of_each(comm: Comm, calls_s: Sequence[float]) -> list[float]:
    """The same of several values, one by one."""
    return comm.max_scalars(torch.tensor(calls_s, dtype=torch.float64, device=comm.device), "doctor")


def _caller(comm: Comm, op: str, num_bytes: int) -> Callable[[], None]:
    full = torch.zeros(num_bytes // 4 // comm.world_size * comm.world_size, device=comm.device)
    own = torch.zeros(full.numel() // comm.world_size, device=comm.device)

    def call() -> None:
        if op == "all_gather":
            pending = comm.all_gather(full, op)
        elif op == "reduce_scatter":
            pending = comm.reduce_scatter(full, own, accumulate=False, name=op)
        else:
            pending = comm.all_reduce(full, torch.float32, op)
        pending.wait()
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)

    return call


def _run(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> tuple[int | None, str]:
    """The exit code, None where the time ran out, and what was said on stderr; nothing is left running."""
    read_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            # As for a rank: the child ends when the pipe does, that is with this process, however it ends.
            env={**environ, LAUNCHER_FD: str(read_fd)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[read_fd],
            start_new_session=True,
        )
        try:
            _, said = process.communicate(timeout=timeout_s)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            _stop(process)
            if process.stderr is not None:
                process.stderr.close()
    finally:
        os.close(read_fd)
        os.close(write_fd)


def _stop(process: subprocess.Popen[str]) -> None:
    """End a launcher: it ends its ranks, which are sessions of their own, if it is asked."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
