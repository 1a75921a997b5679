"""Host time, kernels and host waits of a step beside DDP's and FSDP2's, with kernels that cost next to nothing.

On a GPU the host only enqueues. Where it needs longer for a unit than the unit's kernels run, the GPU waits for it.
Here tensors are tiny, and collectives return at once (torch's "fake" process group, two ranks), so what is left is host
time: Python, autograd and dispatch. All systems train one decoder in one process and take turns. What the plain model
takes is subtracted, but for the optimizer. The engine's communicators are those of NCCL, which block nothing.

    unit       microseconds of forward and backward a block, beyond the plain block: the slope over depth
    pass       microseconds of a forward and backward, beyond the plain model's
    optimizer  microseconds from the last gradient to the new parameters: clipping, step, gradients dropped
    kernels    operators a step that launch one: views, allocations and collectives do not count
    waits      where the host waits for the device, a step

Time is the thread's on the CPU; figures are medians over rounds. Kernels are counted on the CPU, kernels and waits also
on the virtual CUDA device of `tests/device`, in a process of its own (`--virtual`). The peers' loops read no loss; the
engine returns it with each step.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --rounds 30 --dtypes bf16 --json host_time.json
    python benchmarks/host_time.py --virtual
    python benchmarks/host_time.py --profile shardwise-3
"""

# Annotations are not postponed: DDP reads those of its hook.

import argparse
import cProfile
import dataclasses
import gc
import itertools
import json
import os
import platform
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from peers import costless_shape, language_loss, mean_loss
from shardwise.comm.backends import NcclComm
from shardwise.comm.collectives import Comm, CommResources, RankPlace
from shardwise.config.resolve import Config
from shardwise.construction.scan import build_layout
from shardwise.engine.build import EngineInputs
from shardwise.engine.engine import Engine
from shardwise.layout.mesh_shape import MeshShape
from shardwise.models import Decoder
from shardwise.runtime.memory_tracker import MemoryTracker

NUM_RANKS = 2
DEPTHS = (4, 16)
NUM_WARMUP = 4
CLIP_NORM = 1.0
TOKENS = (1, 4)  # [B, S]
VIRTUAL_DEPTH = 4
Part = Callable[[], None]


@dataclass(frozen=True)
class Setting:
    """What all systems of a run have in common."""

    depth: int
    dtype: str
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a constant)

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bf16"

    def model(self) -> Decoder:
        torch.manual_seed(0)
        return Decoder(costless_shape(self.depth))

    def tokens(self) -> Tensor:
        return torch.zeros(TOKENS, dtype=torch.int64, device=self.device)

    def system(self, model: nn.Module) -> "System":
        """A loop as users write it."""
        optimizer, tokens = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), self.tokens()

        def run_pass() -> None:
            mean_loss(model(tokens), tokens).backward()

        def run_optimizer() -> None:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()

        return System(run_pass, run_optimizer)


@dataclass(frozen=True)
class System:
    """One system over one model: both parts of a step."""

    run_pass: Part
    run_optimizer: Part


class FreeFactory:
    """NCCL's communicators over process groups whose collectives return at once."""

    store = None
    examples: Mapping[int, Any] | None = None

    def __init__(self, mesh: MeshShape) -> None:
        self.rank, self._mesh = 0, mesh

    def comm(self, axes: tuple[str, ...], use: str, resources: CommResources, axis: str) -> Comm:
        ranks = self._mesh.ranks_along(axes, self.rank)
        group = dist.group.WORLD if len(ranks) == NUM_RANKS else dist.new_group([0])
        return NcclComm(RankPlace(self._mesh.index_along(axes, self.rank), len(ranks), axis, ranks), resources, group)

    def comm_among(self, *_: Any) -> None:
        return None

    def close(self) -> None:
        pass


def make_plain(setting: Setting) -> System:
    model = setting.model().to(setting.device)
    return setting.system(model.bfloat16() if setting.is_bf16 else model)


def make_ddp(setting: Setting) -> System:
    model = setting.model().to(setting.device)
    wrapped = nn.parallel.DistributedDataParallel(
        model.bfloat16() if setting.is_bf16 else model, gradient_as_bucket_view=True
    )
    wrapped.register_comm_hook(None, done_at_once)
    return setting.system(wrapped)


def done_at_once(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Stand for the sum of a bucket: the fake group's works have no result, which the reducer asks for."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def make_fsdp2(setting: Setting, reshard: bool, prefetch: bool) -> System:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    model = setting.model().to(setting.device)
    mesh = DeviceMesh(setting.device.type, list(range(NUM_RANKS)))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if setting.is_bf16 else None,
        reduce_dtype=torch.float32 if setting.is_bf16 else None,
        cast_forward_inputs=False,
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    blocks = [block for block in model.blocks if isinstance(block, FSDPModule)]
    for before, after in itertools.pairwise(blocks) if prefetch else ():
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    return setting.system(model)


def make_engine(setting: Setting, stage: int, overlap: bool = True) -> System:
    """The engine as a loop without `train_step` calls it, so that its parts can be timed."""
    config = Config.from_dict(
        {
            "precision": {"param": setting.dtype, "reduce": "fp32"},
            "zero": {"stage": stage, "overlap": overlap},
            "optimizer": {"name": "adamw", "lr": 1e-4, "decay_1d": True, "clip_norm": CLIP_NORM},
            "scheduler": {"name": "constant"},
            # A sum that moves nothing may leave anything.
            "run": {"device": setting.device.type, "on_nonfinite": "skip"},
        }
    ).resolve(world_size=NUM_RANKS)
    model = setting.model()
    layout, memory = build_layout(model, config), MemoryTracker(setting.device)
    inputs = EngineInputs(model, config, layout, memory, FreeFactory(layout.mesh), loss_fn=language_loss)
    engine, tokens = Engine(inputs), setting.tokens()

    def run_pass() -> None:
        engine.backward(engine(tokens))

    def run_optimizer() -> None:
        engine.step()

    return System(run_pass, run_optimizer)


MAKERS: Mapping[str, Callable[[Setting], System]] = {
    "plain": make_plain,
    "ddp": make_ddp,
    "fsdp2-2": partial(make_fsdp2, reshard=False, prefetch=False),
    "fsdp2-3": partial(make_fsdp2, reshard=True, prefetch=False),
    "fsdp2-3-prefetch": partial(make_fsdp2, reshard=True, prefetch=True),
    **{f"shardwise-{stage}": partial(make_engine, stage=stage) for stage in range(4)},
    "shardwise-3-no-overlap": partial(make_engine, stage=3, overlap=False),
}
PEER_OF = {
    "shardwise-0": "ddp",
    "shardwise-1": "fsdp2-2",
    "shardwise-2": "fsdp2-2",
    "shardwise-3": "fsdp2-3",
    "shardwise-3-no-overlap": "fsdp2-3",
}


class KernelCount(TorchDispatchMode):
    """Counts the operators that launch a kernel."""

    WITHOUT = frozenset(
        (
            *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "detach"),
            *("_local_scalar_dense", "lift_fresh", "is_pinned", "record_stream", "_unsafe_view"),
        )
    )

    def __init__(self) -> None:
        super().__init__()
        self.num_kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if namespace in ("aten", "fsdp") and not is_view and name not in self.WITHOUT:
            self.num_kernels[name] += 1
        return func(*args, **(kwargs or {}))


def count_kernels(system: System) -> dict[str, Counter[str]]:
    """Kernels of a step's parts, by operator."""
    found = {}
    for part in ("run_pass", "run_optimizer"):
        with KernelCount() as count:
            getattr(system, part)()
        found[part] = count.num_kernels
    return found


@dataclass(frozen=True)
class HostTime:
    """What one system takes; the peer's figures are in its own row."""

    system: str
    unit_us: float
    pass_us: float
    optimizer_us: float
    num_pass_kernels: int
    num_optimizer_kernels: int


def timed_us(part: Part) -> float:
    start_ns = time.thread_time_ns()
    part()
    return (time.thread_time_ns() - start_ns) / 1e3


def measure(names: Sequence[str], dtype: str, num_rounds: int) -> list[HostTime]:
    """Let all systems take turns, both depths of each."""
    systems = {(name, depth): MAKERS[name](Setting(depth, dtype)) for name in names for depth in DEPTHS}
    passes: dict[tuple[str, int], list[float]] = {key: [] for key in systems}
    optimizers: dict[tuple[str, int], list[float]] = {key: [] for key in systems}
    gc.collect()
    gc.disable()  # a collection in one of them would be the others' gain
    for index in range(num_rounds + NUM_WARMUP):
        for key, system in systems.items():
            pass_us, optimizer_us = timed_us(system.run_pass), timed_us(system.run_optimizer)
            if index >= NUM_WARMUP:
                passes[key].append(pass_us)
                optimizers[key].append(optimizer_us)
        gc.collect()
    gc.enable()
    few, many = DEPTHS
    rows = []
    for name in names:
        beyond = [
            [own - base for own, base in zip(passes[name, depth], passes["plain", depth], strict=True)]
            for depth in DEPTHS
        ]
        slopes = [(high - low) / (many - few) for low, high in zip(*beyond, strict=True)]
        kernels = count_kernels(systems[name, many])
        rows.append(
            HostTime(
                name,
                statistics.median(slopes if name != "plain" else [0.0]),
                statistics.median(beyond[1] if name != "plain" else passes[name, many]),
                statistics.median(optimizers[name, many]),
                kernels["run_pass"].total(),
                kernels["run_optimizer"].total(),
            )
        )
    return rows


def table_of(rows: Sequence[HostTime], dtype: str) -> Table:
    table = Table(title=f"{dtype}, {DEPTHS[1]} blocks of 9 parameters; plain's own pass in its row")
    for heading in ("system", "us a unit", "us a pass", "us an optimizer step", "kernels a pass", "of the optimizer"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    table.add_column("/ peer: unit, pass, optimizer, kernels")
    by_name = {row.system: row for row in rows}
    for row in rows:
        peer = by_name.get(PEER_OF.get(row.system, ""))
        table.add_row(
            row.system,
            *(f"{value:.0f}" for value in (row.unit_us, row.pass_us, row.optimizer_us)),
            *(f"{value}" for value in (row.num_pass_kernels, row.num_optimizer_kernels)),
            "" if peer is None else f"{peer.system}: " + ", ".join(f"{value:.2f}" for value in ratios(row, peer)),
        )
    return table


def ratios(row: HostTime, peer: HostTime) -> tuple[float, ...]:
    num_own = row.num_pass_kernels + row.num_optimizer_kernels
    num_others = peer.num_pass_kernels + peer.num_optimizer_kernels
    return (
        row.unit_us / peer.unit_us,
        row.pass_us / peer.pass_us,
        row.optimizer_us / peer.optimizer_us,
        num_own / num_others,
    )


def profile(name: str, dtype: str, part: str, num_passes: int = 60) -> None:
    """Print the functions that take most of a part, by their own time."""
    system = MAKERS[name](Setting(DEPTHS[1], dtype))
    for _ in range(NUM_WARMUP):
        system.run_pass()
        system.run_optimizer()
    profiler = cProfile.Profile()
    for _ in range(num_passes):
        for each in ("run_pass", "run_optimizer"):
            if each == part:
                profiler.enable()
            getattr(system, each)()
            profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


@dataclass(frozen=True)
class DeviceCount:
    """What a step of a system asks of the virtual device."""

    system: str
    num_pass_kernels: int
    num_optimizer_kernels: int
    waits: tuple[str, ...]


def count_on_device(names: Sequence[str], dtype: str) -> list[DeviceCount]:
    """Count kernels and waits of the host on the virtual device, which this process has from then on."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from device.virtual import install

    scheduler = install()
    setting = Setting(VIRTUAL_DEPTH, dtype, torch.device("cuda", 0))
    rows = []
    for name in names:
        system, waits = MAKERS[name](setting), list[str]()
        scheduler.on_wait = lambda why, _, waits=waits: waits.append(why)
        for _ in range(NUM_WARMUP):
            system.run_pass()
            system.run_optimizer()
        waits.clear()
        scheduler.kernels.clear()
        system.run_pass()
        num_pass_kernels = scheduler.kernels.total()
        system.run_optimizer()
        rows.append(DeviceCount(name, num_pass_kernels, scheduler.kernels.total() - num_pass_kernels, tuple(waits)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(MAKERS))
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", metavar="SYSTEM", help="print where the time of its optimizer step goes")
    parser.add_argument("--pass", dest="of_pass", action="store_true", help="profile forward and backward instead")
    parser.add_argument("--kernels", metavar="SYSTEM", help="print its operators")
    parser.add_argument("--virtual", action="store_true", help="count kernels and waits on the virtual CUDA device")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    dtypes = options.dtypes.split(",")
    if options.virtual:
        names = [name for name in options.systems.split(",") if name != "ddp"]  # its reducer asks real works
        for row in (row for dtype in dtypes for row in count_on_device(names, dtype)):
            print(json.dumps(dataclasses.asdict(row)))
        return
    if options.profile is not None:
        profile(options.profile, dtypes[0], "run_pass" if options.of_pass else "run_optimizer")
        return
    if options.kernels is not None:
        system = MAKERS[options.kernels](Setting(DEPTHS[1], dtypes[0]))
        for _ in range(NUM_WARMUP):
            system.run_pass()
            system.run_optimizer()
        for part, kernels in count_kernels(system).items():
            print(part, *(f"{number} {name}" for name, number in kernels.most_common()), sep="\n  ")
        return
    console = Console()
    machine = f"{platform.processor() or platform.machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    console.print(machine)
    names = ["plain", *(name for name in options.systems.split(",") if name != "plain")]
    found = {dtype: measure(names, dtype, options.rounds) for dtype in dtypes}
    for dtype, rows in found.items():
        console.print(table_of(rows, dtype))
    if options.json is not None:
        rows_of = {dtype: [dataclasses.asdict(row) for row in rows] for dtype, rows in found.items()}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows_of}, indent=1))


if __name__ == "__main__":
    main()
