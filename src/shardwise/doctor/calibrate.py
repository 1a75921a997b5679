"""Measures this machine as training uses it, for the planner (`shardwise doctor --calibrate`).

As many ranks as a job has work at once, each with its threads, since they share the hardware. Everything is measured in
a few rounds, and the median counts: it leaves out load that lasts half a minute, but not the machine's usual noise,
which training meets too. As in `collective_bench`, `calibrate` starts a launcher as a child process and makes a profile
of what its ranks write; each rank runs `be_calibrator`.

    profile, failure = calibrate("cpu", num_ranks=2, environ=os.environ, folder=Path("runs"))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any, Final

import torch
import torch.distributed as dist

from shardwise.comm.collectives import Comm
from shardwise.doctor import kernel_bench as kernels
from shardwise.doctor.collective_bench import RESULTS, DeviceKind, comm_over, join_peers, measure_on_ranks
from shardwise.doctor.kernel_bench import RankTimer
from shardwise.doctor.system_info import read_memory
from shardwise.launch.environment import RankEnv
from shardwise.offload.disk_bench import measure_swap
from shardwise.planner.hardware import CPU
from shardwise.planner.profile import TABLES, CollectiveTime, Profile
from shardwise.runtime.memory_tracker import first_line

SIZES_BYTES: Final = (4 * 2**10, 64 * 2**10, 2**20, 8 * 2**20, 64 * 2**20)
OPS: Final = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
LIMIT_S: Final = 280.0
_QUICK_LIMIT_S: Final = 40.0
_BUDGET_S, _QUICK_BUDGET_S = 0.04, 0.02
_NUM_ROUNDS: Final = 3
# The ranks need this time to import torch and meet, on top of their measurements.
_START_S: Final = 60.0
_COLLECTIVE_TIMEOUT_S: Final = 60.0
# Square matrices of this size are multiplied before a collective, or while it runs.
_PRODUCT_SIZE: Final = 512
# A collective's time varies more from call to call than a kernel's, so it needs more calls.
MIN_COLLECTIVES: Final = 9
# So many bytes are gathered to see how much of the time computation hides.
_HIDDEN_BYTES: Final = 16 * 2**20
_MAX_PRODUCTS: Final = 200
_COPIES: Final = "copies_bytes_per_s"
_MEASURED: Final = frozenset({"seconds", "forward_s", "backward_s", "speed"})
"""These columns differ from round to round; the others say what was measured."""


def calibrate(
    device_kind: DeviceKind,
    num_ranks: int,
    environ: Mapping[str, str],
    folder: Path,
    *,
    quick: bool = False,
    argv: Sequence[str] = ("-m", "shardwise.cli", "doctor", "--launch-calibrators"),
) -> tuple[Profile, str | None]:
    """Measure in separate processes; return the profile, and why it is incomplete, or None.

    Args:
        device_kind: the device that computes, "cpu" or "cuda".
        num_ranks: the ranks that work at once.
        environ: the environment that they inherit.
        folder: a folder on the disk that is measured.
        quick: measure few and small shapes, as a test; the profile is poor.
        argv: the launcher's arguments after the interpreter.
    """
    limit_s = (_QUICK_LIMIT_S if quick else LIMIT_S) + _START_S
    arguments = (device_kind, str(num_ranks), str(folder.resolve()), "quick" if quick else "whole")
    rows, failure = measure_on_ranks(argv, arguments, environ, limit_s)
    return profile_of(rows, num_ranks), failure


def profile_of(rows: Iterable[Mapping[str, Any]], num_ranks: int) -> Profile:
    """Make a profile of what the ranks wrote: each row has the name of a field, and a row of a table or a value.

    The median of repeated measurements counts.

    >>> profile_of([{"field": "call_s", "value": each} for each in (2.0, 9.0, 3.0)], num_ranks=2).call_s
    3.0
    """
    memory = read_memory()
    total_bytes = min(memory.total_bytes, memory.limit_bytes or memory.total_bytes)
    values: dict[str, Any] = {"device": CPU, "num_threads": 1, "memory_bytes": float(total_bytes)}
    tables: dict[str, list[Any]] = {name: [] for name in TABLES}
    for field, value in _medians(rows):
        if field in tables:
            tables[field].append(TABLES[field](**value))
        elif field == _COPIES:
            values[field] = (*values.get(field, ()), tuple(value.values()))
        else:
            values[field] = value
    values |= {name: tuple(table) for name, table in tables.items()}
    return Profile(num_ranks=num_ranks, host_memory_bytes=float(total_bytes), **values)


def _medians(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield (field, median value), once for each measurement, in the order in which they first appear."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        field, value = row["field"], row["value"]
        described = [each for each in value.items() if each[0] not in _MEASURED] if isinstance(value, dict) else []
        found.setdefault((field, *described), []).append(value)
    for (field, *_), values in found.items():
        if isinstance(values[0], dict):
            yield field, {name: median_low([value[name] for value in values]) for name in values[0]}
        else:
            yield field, median_low(values)


def be_calibrator(env: RankEnv, folder: Path, device_kind: DeviceKind, disk: Path, *, quick: bool) -> None:
    """Run as one of the ranks: measure with the others; rank 0 writes each result as soon as it has it.

    Args:
        env: which rank this is.
        folder: the folder into which rank 0 writes `RESULTS`.
        device_kind: the device that computes, "cpu" or "cuda".
        disk: a folder on the disk that is measured.
        quick: measure few and small shapes, once.

    Raises:
        LaunchError: the ranks did not meet.
        CommError: a collective failed or hung.
    """
    comm = join_peers(env, device_kind, _COLLECTIVE_TIMEOUT_S)
    watch = RankTimer(comm, _QUICK_BUDGET_S if quick else _BUDGET_S, _QUICK_LIMIT_S if quick else LIMIT_S)
    sizes = kernels.QUICK_SIZES if quick else kernels.CPU_SIZES if device_kind == CPU else kernels.GPU_SIZES
    known = {each.name for each in fields(Profile)}
    groups = rank_groups(watch.comm, env)
    for _ in range(1 if quick else _NUM_ROUNDS):
        if watch.is_late():
            break
        for field, value in _measurements(watch, groups, device_kind, sizes, disk):
            if env.rank == 0:
                assert field in known, field
                with (folder / RESULTS).open("a") as results:
                    results.write(json.dumps({"field": field, "value": value}) + "\n")


def _measurements(
    watch: RankTimer, groups: Sequence[Comm], device_kind: DeviceKind, sizes: kernels.BenchSizes, disk: Path
) -> Iterator[tuple[str, Any]]:
    """Yield (field, value), the most important ones first, in case the time runs out."""
    yield "num_threads", torch.get_num_threads()
    yield "torch_version", torch.__version__
    if device_kind == "cuda":
        yield "device", torch.cuda.get_device_name()
        yield "memory_bytes", float(torch.cuda.get_device_properties(watch.comm.device).total_memory)
    yield from kernels.speeds(watch).items()
    for way, speed in kernels.copy_speeds(watch).items():
        yield _COPIES, {"way": way, "speed": speed}
    if watch.comm.world_size > 1:
        for collective in time_collectives(watch, groups):
            yield "collectives", asdict(collective)
        yield "hidden_share", measure_hidden_share(watch)
    yield from _disk_speeds(watch.comm.rank, disk)
    for block in kernels.block_times(watch, sizes):
        yield "blocks", asdict(block)
    for head in kernels.head_times(watch, sizes):
        yield "heads", asdict(head)
    for attention in kernels.attention_times(watch, sizes):
        yield "attentions", asdict(attention)
    for matmul in kernels.matmul_times(watch, sizes):
        yield "matmuls", asdict(matmul)


def rank_groups(comm: Comm, env: RankEnv) -> list[Comm]:
    """Return collectives among all ranks and, if there are more than two, among pairs, which all work at once."""
    if env.world_size <= 2 or env.world_size % 2:
        return [comm]
    pairs = [(first, first + 1) for first in range(0, env.world_size, 2)]
    groups = [dist.new_group(list(pair)) for pair in pairs]
    pair = pairs[env.rank // 2]
    return [comm, comm_over(groups[env.rank // 2], comm.device, _COLLECTIVE_TIMEOUT_S, pair)]


def time_collectives(watch: RankTimer, groups: Sequence[Comm]) -> Iterator[CollectiveTime]:
    """Time each collective after some computation, as in training: ranks arrive at different times, with cold caches.

    On CPUs two ranks then take two to three times as long for 2 MiB. A GPU's queue is filled in advance, so there the
    collectives follow each other directly.
    """
    before = [] if watch.comm.device.type == "cuda" else [partial(_compute, _factor(watch.comm.device), 1)]
    for comm in groups:
        for num_bytes in SIZES_BYTES:
            for op in OPS:
                *_, seconds = watch.times_s(*before, _caller(comm, op, num_bytes), min_calls=MIN_COLLECTIVES)
                yield CollectiveTime(op=op, num_ranks=comm.world_size, num_bytes=num_bytes, seconds=seconds)


def _caller(comm: Comm, op: str, num_bytes: int) -> Callable[[], None]:
    """Return a call of a collective on an fp32 buffer of `num_bytes`; "send" is a message to a neighbour."""
    ranks, me = comm.world_size, comm.rank
    full = torch.zeros(num_bytes // 4 // ranks * ranks, device=comm.device)  # [n * s]
    own = torch.zeros(full.numel() // ranks, device=comm.device)  # [s]
    parts, received = full.chunk(ranks), torch.zeros_like(full).chunk(ranks)
    others = [rank for rank in range(ranks) if rank != me]
    # Messages go around a ring, so each rank sends once and receives once; in a pair that is one message each way.
    to, source = (me + 1) % ranks, (me - 1) % ranks
    starts: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: comm.all_gather(full, op),
        "reduce_scatter": lambda: comm.reduce_scatter(full, own, accumulate=False, name=op),
        "all_reduce": lambda: comm.all_reduce(full, torch.float32, op),
        "all_to_all": lambda: comm.exchange(
            {rank: [parts[rank]] for rank in others}, {rank: [received[rank]] for rank in others}, op
        ),
        "send": lambda: comm.exchange({to: [full]}, {source: [_like(full)]}, op),
    }
    return lambda: starts[op]().wait()


def _like(full: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(full)


def measure_hidden_share(watch: RankTimer) -> float:
    """Return the share of a gather's time that is hidden by matrix products that take equally long."""
    comm = watch.comm
    full = torch.zeros(_HIDDEN_BYTES // 4, device=comm.device)  # [n * s]
    full = full[: full.numel() // comm.world_size * comm.world_size]
    factor = _factor(comm.device)

    def gather() -> None:
        comm.all_gather(full, "alone").wait()

    def both(count: int) -> None:
        pending = comm.all_gather(full, "beside")
        _compute(factor, count)
        pending.wait()

    count = max(1, min(_MAX_PRODUCTS, round(watch.time_s(gather) / watch.time_s(partial(_compute, factor, 1)))))
    compute = partial(_compute, factor, count)
    compute_s, gather_s, both_s = watch.times_s(compute, gather, partial(both, count), min_calls=MIN_COLLECTIVES)
    return max(0.0, min(1.0, (gather_s + compute_s - both_s) / min(gather_s, compute_s)))


def _factor(device: torch.device) -> torch.Tensor:
    return torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device)  # [n, n]


def _compute(factor: torch.Tensor, count: int) -> None:
    for _ in range(count):
        torch.mm(factor, factor)


def _disk_speeds(rank: int, disk: Path) -> Iterator[tuple[str, float]]:
    """Yield each rank's disk speeds while all ranks use the disk; nothing where it cannot be used."""
    try:
        speed = measure_swap(disk, rank)
    except (OSError, RuntimeError) as error:
        print(f"the disk of {disk} was not measured: {first_line(error)}", flush=True)
        return
    yield "disk_read_bytes_per_s", speed.read_bytes_per_s
    yield "disk_write_bytes_per_s", speed.write_bytes_per_s
