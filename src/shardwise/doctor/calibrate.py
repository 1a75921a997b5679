"""`shardwise doctor --calibrate`: measures this machine as training uses it, for the planner.

As many ranks as a job has are at work at once, each with its threads, since neighbours contend. All is measured in a
few rounds, and the median counts: what else runs on a machine for half a minute is left out, but not its usual unrest,
which training meets too. Two sides, as in `peers`: `calibrate` starts a launcher as a child and makes a profile of what
its ranks leave; each rank is `be_calibrator`.

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
# For the ranks to import torch and meet, beside what they measure.
_START_S: Final = 60.0
_COLLECTIVE_TIMEOUT_S: Final = 60.0
# Of square matrices that are multiplied before a collective, or beside it.
_PRODUCT_SIZE: Final = 512
# When ranks meet in a collective differs more from call to call than what a kernel takes.
_MIN_COLLECTIVES: Final = 9
# Of what is gathered to see how much computing hides of it.
_HIDDEN_BYTES: Final = 16 * 2**20
_MAX_PRODUCTS: Final = 200
_COPIES: Final = "copies_bytes_per_s"
_MEASURED: Final = frozenset({"seconds", "forward_s", "backward_s", "speed"})
"""Columns that differ from round to round; the others say what was measured."""


def calibrate(
    device_kind: DeviceKind,
    num_ranks: int,
    environ: Mapping[str, str],
    folder: Path,
    *,
    quick: bool = False,
    argv: Sequence[str] = ("-m", "shardwise.cli", "doctor", "--launch-calibrators"),
) -> tuple[Profile, str | None]:
    """Measure on processes of their own; return the profile, and why it is not whole, if it is not.

    Args:
        device_kind: what computes.
        num_ranks: that are at work at once.
        environ: what they inherit.
        folder: whose disk is measured.
        quick: few and small shapes, to see that it works: the profile is poor.
        argv: of the launcher, behind the interpreter.
    """
    limit_s = (_QUICK_LIMIT_S if quick else LIMIT_S) + _START_S
    arguments = (device_kind, str(num_ranks), str(folder.resolve()), "quick" if quick else "whole")
    rows, failure = measure_on_ranks(argv, arguments, environ, limit_s)
    return profile_of(rows, num_ranks), failure


def profile_of(rows: Iterable[Mapping[str, Any]], num_ranks: int) -> Profile:
    """Make a profile of what the ranks wrote: each row has the name of a field, and a row of a table or a value.

    Of what was measured several times the median counts.

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
    """(field, value), once for each that was measured, in the order of the first time."""
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
    """Be one of the ranks: measure with the others; rank 0 writes down what was found, as it is found.

    Raises:
        LaunchError: the ranks did not meet.
        CommError: a collective failed or hung.
    """
    comm = join_peers(env, device_kind, _COLLECTIVE_TIMEOUT_S)
    watch = RankTimer(comm, _QUICK_BUDGET_S if quick else _BUDGET_S, _QUICK_LIMIT_S if quick else LIMIT_S)
    sizes = kernels.QUICK_SIZES if quick else kernels.CPU_SIZES if device_kind == CPU else kernels.GPU_SIZES
    known = {each.name for each in fields(Profile)}
    groups = _groups(watch.comm, env)
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
    """(field, value), the most important ones first, in case that the time runs out."""
    yield "num_threads", torch.get_num_threads()
    yield "torch_version", torch.__version__
    if device_kind == "cuda":
        yield "device", torch.cuda.get_device_name()
        yield "memory_bytes", float(torch.cuda.get_device_properties(watch.comm.device).total_memory)
    yield from kernels.speeds(watch).items()
    for way, speed in kernels.copy_speeds(watch).items():
        yield _COPIES, {"way": way, "speed": speed}
    if watch.comm.world_size > 1:
        for collective in _collective_times(watch, groups):
            yield "collectives", asdict(collective)
        yield "hidden_share", _hidden_share(watch)
    yield from _disk_speeds(watch.comm.rank, disk)
    for block in kernels.block_times(watch, sizes):
        yield "blocks", asdict(block)
    for head in kernels.head_times(watch, sizes):
        yield "heads", asdict(head)
    for attention in kernels.attention_times(watch, sizes):
        yield "attentions", asdict(attention)
    for matmul in kernels.matmul_times(watch, sizes):
        yield "matmuls", asdict(matmul)


def _groups(comm: Comm, env: RankEnv) -> list[Comm]:
    """All ranks, and neighbours where there are more than two: all pairs are at work at once."""
    if env.world_size <= 2 or env.world_size % 2:
        return [comm]
    pairs = [(first, first + 1) for first in range(0, env.world_size, 2)]
    groups = [dist.new_group(list(pair)) for pair in pairs]
    pair = pairs[env.rank // 2]
    return [comm, comm_over(groups[env.rank // 2], comm.device, _COLLECTIVE_TIMEOUT_S, pair)]


def _collective_times(watch: RankTimer, groups: Sequence[Comm]) -> Iterator[CollectiveTime]:
    """Each after some computing, as in training: ranks come one after the other then, and caches are cold.

    On CPUs two ranks then take two to three times as long for 2 MiB. A GPU's queue is filled ahead: there they follow
    each other at once.
    """
    before = [] if watch.comm.device.type == "cuda" else [partial(_compute, _factor(watch.comm.device), 1)]
    for comm in groups:
        for num_bytes in SIZES_BYTES:
            for op in OPS:
                *_, seconds = watch.times_s(*before, _caller(comm, op, num_bytes), min_calls=_MIN_COLLECTIVES)
                yield CollectiveTime(op=op, num_ranks=comm.world_size, num_bytes=num_bytes, seconds=seconds)


def _caller(comm: Comm, op: str, num_bytes: int) -> Callable[[], None]:
    """One call of the library's collective on a buffer of fp32, or of messages to a neighbour."""
    ranks, me = comm.world_size, comm.rank
    full = torch.zeros(num_bytes // 4 // ranks * ranks, device=comm.device)  # [n * s]
    own = torch.zeros(full.numel() // ranks, device=comm.device)  # [s]
    parts, received = full.chunk(ranks), torch.zeros_like(full).chunk(ranks)
    others = [rank for rank in range(ranks) if rank != me]
    # Around the circle, so that each rank sends once and receives once; half of a pair's is a message one way.
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


def _hidden_share(watch: RankTimer) -> float:
    """How much of a gather's time passes unnoticed while products are computed beside it, of as long as it takes."""
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
    compute_s, gather_s, both_s = watch.times_s(compute, gather, partial(both, count), min_calls=_MIN_COLLECTIVES)
    return max(0.0, min(1.0, (gather_s + compute_s - both_s) / min(gather_s, compute_s)))


def _factor(device: torch.device) -> torch.Tensor:
    return torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device)  # [n, n]


def _compute(factor: torch.Tensor, count: int) -> None:
    for _ in range(count):
        torch.mm(factor, factor)


def _disk_speeds(rank: int, disk: Path) -> Iterator[tuple[str, float]]:
    """Of each rank while all of them use the disk; nothing where it cannot be used."""
    try:
        speed = measure_swap(disk, rank)
    except (OSError, RuntimeError) as error:
        print(f"the disk of {disk} was not measured: {first_line(error)}", flush=True)
        return
    yield "disk_read_bytes_per_s", speed.read_bytes_per_s
    yield "disk_write_bytes_per_s", speed.write_bytes_per_s
