"""Measure this machine as training uses it: kernels, copies, collectives and the disk, with all ranks at work at once.

`shardwise doctor` takes a glance at it; `--calibrate` fills the tables from which the planner prices. Ranks share the
hardware, so as many as a job has measure at the same time, each with its threads. They are started as for training, so
what hangs or crashes is a rank and not the doctor; each runs `be_calibrator` and writes rows, of which `profile_of`
makes a profile. A time is the median of several calls.

    profile, failure = calibrate("cpu", num_ranks=2, environ=os.environ, folder=Path("runs"))
"""

from __future__ import annotations

import io
import json
import math
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.backends import process_group_comm
from shardwise.comm.collectives import Comm, CommResources
from shardwise.config.sections import DeviceName
from shardwise.launch.environment import RankEnv
from shardwise.launch.host import usable_bytes
from shardwise.launch.local import launch_local
from shardwise.launch.process_group import start_process_group
from shardwise.models.decoder import DecoderBlock, DecoderLinear, RMSNorm, lm_loss, rope_tables
from shardwise.models.decoder_attention import attend_densely
from shardwise.models.presets import DecoderConfig
from shardwise.offload.disk_bench import SwapSpeed, measure_swap
from shardwise.planner.hardware import CPU
from shardwise.planner.profile import TABLES, Profile
from shardwise.report.console import write_line
from shardwise.runtime.device import current_device, device_name, kind_of, numbers_on, synchronize, total_bytes
from shardwise.runtime.memory_tracker import first_line

Row = Mapping[str, Any]

OPS: Final = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
SIZES_BYTES: Final = (4 * 2**10, 64 * 2**10, 2**20, 8 * 2**20, 64 * 2**20)
RESULTS: Final = "rows.jsonl"
LIMIT_S: Final = 280.0
_SHORT_LIMIT_S: Final = 60.0
# So many times all is measured, and the median counts: it leaves out load that lasts half a minute.
_NUM_ROUNDS: Final = 3
# One measurement takes about so long.
_BUDGET_S: Final = 0.04
# The ranks need this time to import torch and meet, on top of their measurements.
_START_S: Final = 60.0
_COLLECTIVE_TIMEOUT_S: Final = 60.0
# Shapes for which a call is expected to take more seconds are left out.
_MAX_CALL_S: Final = 0.3
_MIN_CALLS, _MAX_CALLS = 3, 200
# A collective's time varies more from call to call than a kernel's, so it needs more calls.
MIN_COLLECTIVES: Final = 9
# A synchronisation of a GPU takes longer than a small kernel, so this many calls share one.
_CALLS_A_SYNC: Final = 10
# A call runs up to so many blocks in a row: one small block alone would find its weights in the caches, while in
# training other blocks have used the caches since.
_MAX_CHAINED: Final = 4
_NUMEL: Final = 4 * 2**20
# A fused Adam step reads weight, gradient and two moments, writes weight and moments, and makes a 16-bit copy.
_STEP_BYTES_A_PARAMETER: Final = 30
_COPY_BYTES: Final = 64 * 2**20
# Square matrices of this size are multiplied before a collective, or while it runs.
_PRODUCT_SIZE: Final = 512
# So many bytes are gathered to see how much of the time computation hides.
_HIDDEN_BYTES: Final = 16 * 2**20
_MEASURED: Final = frozenset({"seconds", "forward_s", "backward_s", "speed"})
"""These columns of a row differ from round to round; the others say what was measured."""


@dataclass(frozen=True)
class Shapes:
    """Lists the shapes that are measured: those of small decoder layers, and on a GPU those of large ones.

    Attributes:
        blocks: (hidden size, feed-forward size, heads) of each decoder layer.
        seq_lens: tokens of one sequence, which is one micro-batch.
        vocab_sizes: of the heads; without them only products are measured.
    """

    blocks: tuple[tuple[int, int, int], ...]
    seq_lens: tuple[int, ...]
    vocab_sizes: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


_DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
_SMALL: Final = ((320, 896, 4), (512, 1536, 8))
_CPU_BLOCKS: Final = (*_SMALL, (768, 2048, 12), (1024, 2816, 16), (2048, 5632, 32))
_GPU_BLOCKS: Final = ((1024, 2816, 16), (2048, 5632, 16), (4096, 14336, 32), (8192, 28672, 64))
SHAPES: Final[Mapping[tuple[str, str], Shapes]] = {
    ("glance", "cpu"): Shapes(((1024, 1024, 8),), (1024,)),
    ("glance", "gpu"): Shapes(((8192, 8192, 64),), (8192,), dtypes=tuple(_DTYPE_NAMES)),
    ("quick", "cpu"): Shapes(_SMALL, (128, 512), (4096,)),
    ("quick", "gpu"): Shapes(_SMALL, (128, 512), (4096,)),
    ("whole", "cpu"): Shapes(_CPU_BLOCKS, (128, 512, 2048), (4096, 16384)),
    ("whole", "gpu"): Shapes(_GPU_BLOCKS, (1024, 4096, 8192), (32_000, 128_256), tuple(_DTYPE_NAMES)),
}
"""The shapes by what is asked for and the device: a glance has one large product."""


@dataclass(frozen=True)
class Measurements:
    """Holds what a glance measured.

    Attributes:
        ranks: what each rank found, while all were at work.
        disk: of the folder of the runs; None where it failed.
        swap: of the folder for states on NVMe.
        failures: why a probe failed, by its name.
    """

    ranks: tuple[Profile, ...] = ()
    disk: SwapSpeed | None = None
    swap: SwapSpeed | None = None
    failures: Mapping[str, str] = field(default_factory=dict)


def calibrate(
    device_kind: DeviceName, num_ranks: int, environ: Mapping[str, str], folder: Path, *, quick: bool = False
) -> tuple[Profile, str | None]:
    """Measure in separate processes; return the profile, and why it is incomplete, or None.

    Args:
        num_ranks: the ranks that work at once.
        folder: a folder on the disk that is measured.
        quick: measure few and small shapes, once; the profile is poor.
    """
    rows, failure = measure_on_ranks((device_kind, num_ranks, folder.resolve(), "quick" if quick else "whole"), environ)
    return profile_of(rows, num_ranks), failure


def glance(
    device_kind: DeviceName, num_ranks: int, environ: Mapping[str, str]
) -> tuple[tuple[Profile, ...], str | None]:
    """Measure what each rank reaches, in about ten seconds; the arguments and the reason are those of `calibrate`."""
    rows, failure = measure_on_ranks((device_kind, num_ranks, ".", "glance"), environ)
    ranks = sorted({row["rank"] for row in rows})
    return tuple(profile_of([row for row in rows if row["rank"] == rank], num_ranks) for rank in ranks), failure


def measure_on_ranks(
    what: tuple[DeviceName, int, Path | str, str],
    environ: Mapping[str, str],
    *,
    argv: Sequence[str] = ("-m", "shardwise.cli", "doctor", "--be-calibrator"),
    timeout_s: float = _COLLECTIVE_TIMEOUT_S,
) -> tuple[list[dict[str, Any]], str | None]:
    """Start ranks; return the rows that they wrote, and why these are incomplete, or None. Call it on the main thread.

    Args:
        what: the device, the number of ranks, the folder whose disk is measured, and the extent.
        argv: a rank's arguments after the interpreter; the folder of the rows, and `what` without the number, follow.
        timeout_s: seconds after which a rank that is stopped ends all.
    """
    device_kind, num_ranks, disk, extent = what
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as name, redirect_stderr(io.StringIO()) as said:
        exit_code = launch_local(
            [*argv, name, device_kind, str(disk), extent],
            num_ranks,
            Path(name),
            environ=environ,
            timeout_s=timeout_s,
            grace_s=1.0,
            failure_grace_s=1.0,
        )
        results = Path(name, RESULTS)
        lines = results.read_text().splitlines() if results.exists() else []
    if exit_code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    failure = said.getvalue().partition("\n")[0].removeprefix("shardwise: ") if exit_code else None
    # A rank that was killed may have left half a line.
    return [json.loads(line) for line in lines if line.endswith("}")], failure


def _limit_s(extent: str) -> float:
    return LIMIT_S if extent == "whole" else _SHORT_LIMIT_S


def profile_of(rows: Iterable[Row], num_ranks: int) -> Profile:
    """Make a profile of what the ranks wrote: each row has the name of a field, and a row of a table or a value.

    The median of repeated measurements counts.

    >>> profile_of([{"field": "call_s", "value": each} for each in (2.0, 9.0, 3.0)], num_ranks=2).call_s
    3.0
    """
    memory_bytes = float(usable_bytes())
    values: dict[str, Any] = {"device": CPU, "num_threads": 1, "memory_bytes": memory_bytes}
    tables: dict[str, list[Any]] = {name: [] for name in TABLES}
    for name, value in _medians(rows):
        if name in tables:
            tables[name].append(TABLES[name](**value))
        elif name == "copies_bytes_per_s":
            values[name] = (*values.get(name, ()), (value["way"], value["speed"]))
        else:
            values[name] = value
    values |= {name: tuple(table) for name, table in tables.items()}
    return Profile(num_ranks=num_ranks, host_memory_bytes=memory_bytes, **values)


def _medians(rows: Iterable[Row]) -> Iterator[tuple[str, Any]]:
    """Yield (field, median value), once for each measurement, in the order in which they first appear."""
    merged: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        name, value = row["field"], row["value"]
        described = [item for item in value.items() if item[0] not in _MEASURED] if isinstance(value, dict) else []
        merged.setdefault((name, *described), []).append(value)
    for (name, *_), values in merged.items():
        if isinstance(values[0], dict):
            yield name, {key: statistics.median_low([value[key] for value in values]) for key in values[0]}
        else:
            yield name, statistics.median_low(values)


def be_calibrator(env: RankEnv, folder: Path, device_kind: DeviceName, disk: Path, extent: str) -> None:
    """Run as one of the ranks: measure with the others, and write each result as soon as it is there.

    Args:
        folder: the folder to whose `RESULTS` results are appended.
        disk: a folder on the disk that is measured.
        extent: how much is measured: "glance", "quick" or "whole".

    Raises:
        LaunchError: the ranks did not meet.
        CommError: a collective failed or hung.
    """
    signal.alarm(math.ceil(_limit_s(extent) + _START_S))  # kills this rank, even where a driver hangs
    start_process_group(env, device_kind, _COLLECTIVE_TIMEOUT_S)
    row = kind_of(device_kind)
    device = current_device(row)
    timer = RankTimer(_comm(dist.group.WORLD, device), _limit_s(extent), is_own=extent == "glance")
    groups, shapes = rank_groups(timer.comm), SHAPES[extent, "cpu" if row.is_cpu else "gpu"]
    for _ in range(_NUM_ROUNDS if extent == "whole" else 1):
        for name, value in () if timer.is_late() else _measurements(timer, groups, shapes, disk):
            if env.rank == 0 or extent == "glance":
                with (folder / RESULTS).open("a") as results:
                    results.write(json.dumps({"rank": env.rank, "field": name, "value": value}) + "\n")


def _comm(group: Any, device: torch.device, ranks: tuple[int, ...] = ()) -> Comm:
    return process_group_comm(group, "doctor", CommResources.alone(device, _COLLECTIVE_TIMEOUT_S), ranks)


def rank_groups(comm: Comm) -> list[Comm]:
    """Return collectives among all ranks and, if there are more than two, among pairs, which all work at once."""
    if comm.world_size <= 2 or comm.world_size % 2:
        return [comm]
    pairs = [(first, first + 1) for first in range(0, comm.world_size, 2)]
    groups = [dist.new_group(list(pair)) for pair in pairs]
    own_pair = comm.rank // 2
    return [comm, _comm(groups[own_pair], comm.device, pairs[own_pair])]


class RankTimer:
    """Times calls on all ranks at once.

    Args:
        limit_s: seconds of all measurements; after them `is_late` is true, on all ranks or on none.
        is_own: whether a rank gets its own times; otherwise those of the slowest.
    """

    def __init__(self, comm: Comm, limit_s: float = math.inf, *, is_own: bool = False) -> None:
        self.comm = comm
        self.is_own = is_own
        self._deadline_s = time.perf_counter() + limit_s
        self._kind = kind_of(comm.device)

    def is_late(self) -> bool:
        """Say whether the time for all measurements is over; all ranks call it."""
        return self._slowest([time.perf_counter() - self._deadline_s])[0] > 0

    def _slowest(self, values: list[float]) -> list[float]:
        """Return, for each of several values, the largest of the ranks'; all ranks call it."""
        if self.comm.world_size == 1:
            return values
        return self.comm.max_scalars(numbers_on(self.comm.device, values), "doctor")

    def time_s(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call, the median of several; all ranks call it."""
        return self.times_s(call)[0]

    def times_s(self, *calls: Callable[[], object], min_calls: int = _MIN_CALLS) -> tuple[float, ...]:
        """Return the seconds of each of some calls that are made in turn: the second may use the first one's result."""
        group = _CALLS_A_SYNC if not self._kind.is_cpu and len(calls) == 1 else 1
        self._round(calls, group)
        rounds = [self._round(calls, group)]
        # All ranks must make the same number of calls, whatever their clocks say.
        num_rounds = int(_BUDGET_S / max(1e-9, self._slowest([sum(rounds[0])])[0]))
        rounds += [self._round(calls, group) for _ in range(max(min_calls, min(_MAX_CALLS, num_rounds)) - 1)]
        times = [seconds for round_s in rounds for seconds in round_s]
        times = times if self.is_own else self._slowest(times)
        return tuple(statistics.median(times[index :: len(calls)]) / group for index in range(len(calls)))

    def _round(self, calls: tuple[Callable[[], object], ...], group: int) -> list[float]:
        times = []
        for call in calls:
            start_s = time.perf_counter()
            for _ in range(group):
                call()
            synchronize(self.comm.device)
            times.append(time.perf_counter() - start_s)
        return times


def _measurements(timer: RankTimer, groups: Sequence[Comm], shapes: Shapes, disk: Path) -> Iterator[tuple[str, Any]]:
    """Yield (field, value), the most important ones first, in case the time runs out."""
    yield "num_threads", torch.get_num_threads()
    yield "torch_version", torch.__version__
    if not kind_of(timer.comm.device).is_cpu:
        yield "device", device_name(timer.comm.device)
        yield "memory_bytes", float(total_bytes(timer.comm.device))
    for way, speed in copy_speeds(timer).items():
        yield "copies_bytes_per_s", {"way": way, "speed": speed}
    if timer.comm.world_size > 1:
        for row in time_collectives(timer, groups):
            yield "collectives", row
    if not timer.is_own:  # a glance shows none of these
        yield from speeds(timer).items()
        yield from _disk_speeds(timer.comm.rank, disk)
        if timer.comm.world_size > 1:
            yield "hidden_share", measure_hidden_share(timer)
    yield from kernel_rows(timer, shapes)


def _disk_speeds(rank: int, disk: Path) -> Iterator[tuple[str, float]]:
    """Yield this rank's share of the disk's speeds; nothing where it cannot be used."""
    try:
        speed = measure_swap(disk, rank)
    except (OSError, RuntimeError) as error:
        write_line(f"the disk of {disk} was not measured: {first_line(error)}", to_stderr=True)
        return
    yield "disk_read_bytes_per_s", speed.read_bytes_per_s
    yield "disk_write_bytes_per_s", speed.write_bytes_per_s


def kernel_rows(timer: RankTimer, shapes: Shapes) -> Iterator[tuple[str, Row]]:
    """Yield the rows of the tables of blocks, heads, attention and products, without shapes that take too long."""
    wholes = (("blocks", _blocks), ("heads", _heads), ("attentions", _attentions))
    for table, cases in (*(wholes if shapes.vocab_sizes else ()), ("matmuls", _matmuls)):
        for dtype in shapes.dtypes:
            # The best rate so far, since a slow moment of the machine must not end a table.
            best_flops_per_s = 0.0
            for flops, measure in cases(timer, shapes, dtype):
                most_calls = _MAX_CALL_S * best_flops_per_s / flops if best_flops_per_s else math.inf
                if timer.is_late():
                    return
                if most_calls >= 1:
                    row = measure(most_calls)
                    best_flops_per_s = max(best_flops_per_s, flops / row.get("backward_s", row.get("seconds")))
                    yield table, {"dtype": _DTYPE_NAMES[dtype], **row}


Cases = Iterator[tuple[float, Callable[[float], Row]]]
"""Yields the FLOPs of a call, and what measures it, given how many such calls may follow each other."""


def _matmuls(timer: RankTimer, shapes: Shapes, dtype: torch.dtype) -> Cases:
    """Measure the products of decoder layers: forward, input gradient and weight gradient, the small ones first."""
    sizes = set()
    for (hidden, ffn, _), tokens in product(shapes.blocks, shapes.seq_lens):
        for n, k in ((hidden, hidden), (ffn, hidden), (hidden, ffn)):
            sizes |= {(tokens, n, k), (n, k, tokens)}
    for m, n, k in sorted(sizes, key=lambda each: (math.prod(each), each)):
        yield 2.0 * m * n * k, partial(_matmul, timer, dtype, (m, n, k), k in shapes.seq_lens)


def _matmul(timer: RankTimer, dtype: torch.dtype, shape: tuple[int, int, int], is_weight: bool, _: float) -> Row:
    """Time a product as autograd makes it: by a weight and by its transpose, or a transposed gradient by an input."""
    m, n, k = shape
    left, right = (torch.randn(*shape, device=timer.comm.device).to(dtype) for shape in ((m, k), (k, n)))
    turned_left, turned_right = left.t().contiguous().t(), right.t().contiguous().t()
    calls = [(turned_left, right)] if is_weight else [(left, turned_right), (left, right)]
    times = timer.times_s(*(partial(torch.mm, *factors) for factors in calls))
    return {"m": m, "n": n, "k": k, "seconds": statistics.mean(times)}


def _attentions(timer: RankTimer, shapes: Shapes, dtype: torch.dtype) -> Cases:
    """Measure the decoder's own dense attention, forward and backward."""
    for (hidden, _, heads), seq_len in product(shapes.blocks, shapes.seq_lens):
        yield 10.0 * hidden * seq_len**2, partial(_attention, timer, dtype, heads, hidden // heads, seq_len)


def _attention(timer: RankTimer, dtype: torch.dtype, heads: int, head_dim: int, seq_len: int, _: float) -> Row:
    shape = (1, heads, seq_len, head_dim)  # [1, H, S, D]
    qkv = tuple(torch.randn(shape, device=timer.comm.device, dtype=dtype, requires_grad=True) for _ in range(3))
    passes = _pass_times(timer, lambda q, k, v: attend_densely(q, k, v, 0), qkv)
    return {"num_heads": heads, "head_dim": head_dim, "seq_len": seq_len, **passes}


def _blocks(timer: RankTimer, shapes: Shapes, dtype: torch.dtype) -> Cases:
    """Measure whole decoder blocks; what products and attention do not explain is the time of element-wise kernels."""
    for shape, seq_len in product(shapes.blocks, shapes.seq_lens):
        hidden, ffn, _ = shape
        flops = 4.0 * seq_len * (4 * hidden**2 + 3 * hidden * ffn + hidden * seq_len)
        yield flops, partial(block_row, timer, dtype, seq_len, shape)


def block_row(timer: RankTimer, dtype: torch.dtype, seq_len: int, shape: tuple[int, int, int], most: float) -> Row:
    """Time the forward and the backward of one decoder block.

    Args:
        shape: hidden size, feed-forward size and heads.
        most: blocks that may run one after another in a measured call; the result is that of one.
    """
    hidden, ffn, heads = shape
    sizes: dict[str, Any] = {"hidden_size": hidden, "num_heads": heads, "num_kv_heads": heads, "ffn_size": ffn}
    sizes["head_dim"] = hidden // heads
    config = DecoderConfig(vocab_size=8, num_layers=1, max_seq_len=seq_len, **sizes)
    num_chained, device = int(min(_MAX_CHAINED, most)), timer.comm.device
    blocks = [DecoderBlock(config, device=device, dtype=dtype) for _ in range(num_chained)]
    x = torch.randn(1, seq_len, hidden, device=device, dtype=dtype, requires_grad=True)  # [1, S, E]
    rope = rope_tables(seq_len, config.head_dim, config.rope_theta, x)
    inputs = (x, *(parameter for block in blocks for parameter in block.parameters()))
    passes = _pass_times(timer, lambda x, *_: reduce(lambda x, block: block(x, rope), blocks, x), inputs)
    return {"seq_len": seq_len, **sizes, **{name: seconds / num_chained for name, seconds in passes.items()}}


def _heads(timer: RankTimer, shapes: Shapes, dtype: torch.dtype) -> Cases:
    """Measure the last norm, the head and the loss, forward and backward."""
    for (hidden, _, _), vocab_size, num_tokens in product(shapes.blocks, shapes.vocab_sizes, shapes.seq_lens):
        yield 4.0 * num_tokens * hidden * vocab_size, partial(_head, timer, dtype, hidden, vocab_size, num_tokens)


def _head(timer: RankTimer, dtype: torch.dtype, hidden: int, vocab_size: int, num_tokens: int, _: float) -> Row:
    factory: dict[str, Any] = {"device": timer.comm.device, "dtype": dtype}
    norm, head = RMSNorm(hidden, 1e-5, **factory), DecoderLinear(hidden, vocab_size, **factory)
    x = torch.randn(1, num_tokens, hidden, requires_grad=True, **factory)  # [1, S, E]
    targets = torch.randint(vocab_size, (1, num_tokens), device=timer.comm.device)  # [1, S]
    inputs = (x, norm.weight, head.weight)
    passes = _pass_times(timer, lambda x, *_: lm_loss(head(norm(x)), targets)[0], inputs)
    return {"num_tokens": num_tokens, "hidden_size": hidden, "vocab_size": vocab_size, **passes}


def _pass_times(timer: RankTimer, run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """Return the seconds of the forward and of the backward, which makes the gradients of all inputs."""
    made: list[Tensor] = []
    grad = torch.randn_like(run(*inputs))
    forward_s, backward_s = timer.times_s(
        lambda: made.append(run(*inputs)), lambda: torch.autograd.grad(made.pop(), inputs, grad)
    )
    return {"forward_s": forward_s, "backward_s": backward_s}


def speeds(timer: RankTimer) -> dict[str, float]:
    """Measure the speed of element-wise streams and of a fused step, and the time of a call, by the profile's field."""
    device = timer.comm.device
    left, right = (torch.randn(_NUMEL, device=device) for _ in range(2))  # [N]
    stream_s = timer.time_s(lambda: torch.mul(left, right))
    weight = torch.nn.Parameter(torch.randn(_NUMEL, device=device))  # [N]
    weight.grad = torch.randn_like(weight)
    narrow = torch.empty(_NUMEL, device=device, dtype=torch.bfloat16)  # [N]
    optimizer = torch.optim.AdamW([weight], fused=True)
    step_s = timer.time_s(lambda: (optimizer.step(), narrow.copy_(weight.detach())))
    small = torch.ones(8, 8, device=device, requires_grad=True)
    return {
        "stream_bytes_per_s": 3 * left.nbytes / stream_s,
        "step_bytes_per_s": _STEP_BYTES_A_PARAMETER * _NUMEL / step_s,
        "call_s": timer.time_s(lambda: F.linear(small, small)),
    }


def copy_speeds(timer: RankTimer) -> dict[str, float]:
    """Measure bytes a second of copies between memories, by the profile's name; with a GPU, host memory is pinned."""
    row = kind_of(timer.comm.device)
    hosts = [torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=row.pins) for _ in range(2)]
    ends = {"host->host": (hosts[0], hosts[1])}
    if not row.is_cpu:
        on_device = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=timer.comm.device)
        ends |= {"host->device": (hosts[0], on_device), "device->host": (on_device, hosts[1])}
    return {name: _COPY_BYTES / timer.time_s(partial(target.copy_, source)) for name, (source, target) in ends.items()}


def time_collectives(timer: RankTimer, groups: Sequence[Comm]) -> Iterator[Row]:
    """Time each collective after some computation, as in training: ranks arrive at different times, with cold caches.

    On CPUs two ranks then take two to three times as long for 2 MiB. A GPU's queue is filled in advance, so there the
    collectives follow each other directly.
    """
    device = timer.comm.device
    before = [] if kind_of(device).is_in_stream_order else [partial(_compute, _factor(device), 1)]
    for comm, num_bytes, op in product(groups, SIZES_BYTES, OPS):
        *_, seconds = timer.times_s(*before, _caller(comm, op, num_bytes), min_calls=MIN_COLLECTIVES)
        yield {"op": op, "num_ranks": comm.world_size, "num_bytes": num_bytes, "seconds": seconds}


def _caller(comm: Comm, op: str, num_bytes: int) -> Callable[[], None]:
    """Return a call of a collective on an fp32 buffer of `num_bytes`; "send" is a message to a neighbour."""
    ranks, me = comm.world_size, comm.rank
    full = torch.zeros(num_bytes // 4 // ranks * ranks, device=comm.device)  # [n * s]
    own_part = torch.zeros(full.numel() // ranks, device=comm.device)  # [s]
    parts, received = full.chunk(ranks), torch.zeros_like(full).chunk(ranks)
    others = [rank for rank in range(ranks) if rank != me]
    # Messages go around a ring, so each rank sends once and receives once; in a pair that is one message each way.
    to, source = (me + 1) % ranks, (me - 1) % ranks
    starts: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: comm.all_gather(full, op),
        "reduce_scatter": lambda: comm.reduce_scatter(full, own_part, accumulate=False, name=op),
        "all_reduce": lambda: comm.all_reduce(full, torch.float32, op),
        "all_to_all": lambda: comm.exchange(
            {rank: [parts[rank]] for rank in others}, {rank: [received[rank]] for rank in others}, op
        ),
        "send": lambda: comm.exchange({to: [full]}, {source: [torch.empty_like(full)]}, op),
    }
    return lambda: starts[op]().wait()


def measure_hidden_share(timer: RankTimer) -> float:
    """Return the share of a gather's time that is hidden by matrix products that take equally long."""
    comm = timer.comm
    full = torch.zeros(_HIDDEN_BYTES // 4 // comm.world_size * comm.world_size, device=comm.device)  # [n * s]
    factor = _factor(comm.device)

    def gather() -> None:
        comm.all_gather(full, "alone").wait()

    def both(count: int) -> None:
        pending = comm.all_gather(full, "beside")
        _compute(factor, count)
        pending.wait()

    count = max(1, min(_MAX_CALLS, round(timer.time_s(gather) / timer.time_s(partial(_compute, factor, 1)))))
    compute = partial(_compute, factor, count)
    compute_s, gather_s, both_s = timer.times_s(compute, gather, partial(both, count), min_calls=MIN_COLLECTIVES)
    return max(0.0, min(1.0, (gather_s + compute_s - both_s) / min(gather_s, compute_s)))


def _factor(device: torch.device) -> Tensor:
    return torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device)  # [n, n]


def _compute(factor: Tensor, count: int) -> None:
    for _ in range(count):
        torch.mm(factor, factor)
