"""Times the library's collectives between processes of this machine, over gloo or NCCL.

`measure_collectives` starts a launcher as a child process and reads its results; the launcher starts the ranks as it
does for training; each rank runs `be_peer`. So a hang or a crash cannot stop the doctor, and the child ends within its
time.

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

from shardwise.comm.backends import process_group_comm
from shardwise.comm.collectives import Comm, CommResources
from shardwise.doctor.measure import CollectiveSpeed
from shardwise.launch.environment import LAUNCHER_FD, RankEnv
from shardwise.launch.process_group import start_process_group

DeviceKind = Literal["cpu", "cuda"]

OPS = ("all_gather", "reduce_scatter", "all_reduce")
SIZES_BYTES = (4 * 2**10, 256 * 2**10, 16 * 2**20)
RESULTS = "collectives.jsonl"
_BUDGET_S = 0.12
_MAX_CALLS = 300
# The ranks get this time to import torch, meet and measure; they need a few seconds.
_TIMEOUT_S = 60.0
_COLLECTIVE_TIMEOUT_S = 20.0
# The launcher gets this time to end its ranks, to which it gives less.
_GRACE_S = 4.0


def measure_collectives(
    device_kind: DeviceKind,
    num_ranks: int,
    environ: Mapping[str, str],
    *,
    timeout_s: float = _TIMEOUT_S,
    argv: Sequence[str] = ("-m", "shardwise.cli", "doctor", "--launch-peers"),
) -> tuple[tuple[CollectiveSpeed, ...], str | None]:
    """Measure in separate processes; return what was measured, and why that is incomplete, or None.

    Args:
        device_kind: "cpu" for gloo on the CPU, "cuda" for NCCL on GPUs.
        num_ranks: the processes to start.
        environ: the environment that they inherit.
        timeout_s: the seconds after which they are ended.
        argv: the launcher's arguments after the interpreter; the folder, the device and the number of ranks follow.
    """
    rows, failure = measure_on_ranks(argv, (device_kind, str(num_ranks)), environ, timeout_s)
    return tuple(CollectiveSpeed(**row) for row in rows), failure


def measure_on_ranks(
    argv: Sequence[str], arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float
) -> tuple[list[dict[str, Any]], str | None]:
    """Start a launcher as a child process; return the rows that its ranks wrote, and why they are incomplete, or None.

    Args:
        argv: the launcher's arguments after the interpreter; a folder, in which the ranks write `RESULTS`, follows.
        arguments: further arguments, which follow the folder.
        environ: the environment that it inherits.
        timeout_s: the seconds after which it is ended.
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

    Args:
        env: which rank this is.
        device_kind: "cpu" for gloo on the CPU, "cuda" for NCCL on GPUs.
        timeout_s: the seconds after which a collective fails.

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
    """Return the library's collectives over a process group.

    Args:
        group: the process group.
        device: the device of the tensors.
        timeout_s: the seconds after which a collective fails.
        ranks: the group's ranks in the world; None for all of them.
    """
    return process_group_comm(group, "doctor", CommResources.alone(device, timeout_s), ranks or ())


def be_peer(env: RankEnv, folder: Path, device_kind: DeviceKind) -> None:
    """Run as one of the ranks: time every collective at every size; rank 0 writes the results.

    Args:
        env: which rank this is.
        folder: the folder into which rank 0 writes `RESULTS`.
        device_kind: "cpu" for gloo on the CPU, "cuda" for NCCL on GPUs.

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
    """Return the median time of a call, that of the slowest rank."""
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
    """Return the largest of the ranks' values; all ranks call it."""
    return slowest_of_each(comm, [call_s])[0]


def slowest_of_each(comm: Comm, calls_s: Sequence[float]) -> list[float]:
    """Return, for each of several values, the largest of the ranks'; all ranks call it."""
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
    """Run a command; return its exit code, None where the time ran out, and its stderr; nothing is left running."""
    read_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            # As for a rank, the child ends when this pipe closes, so it ends with this process, however that ends.
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
    """Signal a launcher to end its ranks, which run in their own sessions, and itself; kill it if it does not."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
