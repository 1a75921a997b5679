"""Trains one rank, whose others echo it, on the virtual device in each order of streams: all must have the same bits.

    python -m device.orders "stage 3" pipeline      # cases whose names have a word; all without one
    python -m device.orders --seeds 3              # random orders too, three of them
    python -m device.orders --faults               # with faults planted: each must be seen; after the cases, if any
    python -m device.orders --list

Prints a JSON line a case. A difference is a race: on a GPU the numbers would depend on who is faster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from device.faults import FAULTS
from device.ranks import TIMEOUT_S, join, start_ranks
from device.virtual import install
from device.virtual.streams import Order, Scheduler
from harness.echo import EchoFactory, cancel_deviations
from harness.models import CASES as MODELS
from harness.models import ModelCase, Transformer, make_batches
from harness.tensor import make_case
from harness.training import make_config
from shardwise.attention.api import attention_backend
from shardwise.comm.backends import ProcessGroupFactory
from shardwise.comm.collectives import CommFactory
from shardwise.comm.mesh import Mesh, open_store
from shardwise.engine.build import EngineInputs
from shardwise.engine.engine import Engine
from shardwise.layout.mesh_shape import MeshShape
from shardwise.layout.zero_stages import STAGES
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.runtime.param_guard import ReleasedParameterError
from shardwise.schedule import RECIPES
from shardwise.tensor.plan_layout import plan_layout

DEVICE = torch.device("cuda", 0)
ORDERS: tuple[tuple[Order, int], ...] = (("lazy", 0), ("side-first", 0), ("compute-first", 0), ("random", 0))
QUICK_ORDERS = ORDERS[2:3]  # which alone shows each of the faults, as `--quick --faults` tests
Sections = Mapping[str, Mapping[str, Any]]
Act = Callable[[Engine, int, Path], None]


def train_only(engine: Engine, step: int, folder: Path) -> None:
    """Between steps nothing happens."""


def save_async(engine: Engine, step: int, folder: Path) -> None:
    """Save while training goes on."""
    engine.save(folder / "checkpoint", wait=False)


def save_now(engine: Engine, step: int, folder: Path) -> None:
    engine.save(folder / "checkpoint")


def read_state(engine: Engine, step: int, folder: Path) -> None:
    """Read all parameters, and write one."""
    with engine.gathered(write=True) as model:
        next(model.parameters()).data.mul_(1.0 + step / 64)


def hand_over(engine: Engine, step: int, folder: Path) -> None:
    """Leave the device to someone else, and come back."""
    with engine.offloaded():
        torch.full((4096,), float("nan"), device=DEVICE).add_(1)


@dataclass(frozen=True)
class Case:
    """A config to train, and what happens after each step."""

    name: str
    world_size: int
    sections: Sections = field(default_factory=dict)
    model: str = "transformer"
    num_micro_batches: int = 2
    act: Act = train_only
    has_echoes: bool = True  # False: all ranks train, as processes

    @property
    def dtype(self) -> torch.dtype:
        by_name = {"fp32": torch.float32, "bf16": torch.float32}
        return by_name.get(str(self.sections.get("precision", {}).get("param", "fp64")), torch.float64)


def zero(stage: int, **others: Mapping[str, Any]) -> Sections:
    return {"zero": {"stage": stage}, **others}


def pipeline(schedule: str) -> Sections:
    virtual_stages = RECIPES[schedule].min_virtual_stages
    return zero(2, mesh={"pp": 2}, pipeline={"schedule": schedule, "virtual_stages": virtual_stages})


HOST = {"params": "host", "grads": "host", "optimizer": "host"}
FP32 = {"param": "fp32"}
CASES = (
    *(Case(f"stage {stage}", 2, zero(stage)) for stage in (0, 1, 2)),
    *(
        Case(f"stage 3, recompute {mode}", 2, zero(3, recompute={"mode": mode}))
        for mode in ("none", "full", "selective")
    ),
    Case("stage 3, four ranks, bf16", 4, zero(3, precision={"param": "bf16"}), num_micro_batches=3),
    Case("stage 3, replicas", 4, zero(3, mesh={"dp_replicate": 2})),
    Case("stage 3, no overlap", 2, {"zero": {"stage": 3, "overlap": False}}),
    Case("stage 2, fp16", 2, zero(2, precision={"param": "fp16"})),
    Case("tp", 2, {"mesh": {"tp": 2}}, "decoder"),
    Case("tp, chunks that overlap", 2, {"mesh": {"tp": 2}, "tensor": {"overlap_chunks": 2}}, "decoder"),
    Case("tp, sequence parallel, stage 3", 4, zero(3, mesh={"tp": 2}, tensor={"sequence_parallel": True}), "decoder"),
    *(
        Case(f"cp {transport}", 2, zero(3, mesh={"cp": 2}, context={"transport": transport}, precision=FP32), "decoder")
        for transport in ("ring", "all-gather", "ulysses")
    ),
    *(
        Case(f"pp {schedule}", 2, pipeline(schedule), "deep", num_micro_batches=4, has_echoes=False)
        for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
    ),
    Case("pp and tp, stage 3", 4, zero(3, mesh={"pp": 2, "tp": 2}), "deep", num_micro_batches=4, has_echoes=False),
    Case("optimizer on the host", 2, zero(2, tiers={"optimizer": "host"})),
    Case("parameters on the host", 2, zero(3, tiers={"params": "host"}, precision={"param": "bf16"})),
    Case("everything on the host", 2, zero(3, tiers=HOST)),
    Case("NVMe", 2, zero(3, tiers={"params": "nvme", "optimizer": "nvme", "nvme_path": "."})),
    Case("activations on the host", 2, zero(3, recompute={"mode": "full"}, tiers={"activations": "host"}), "decoder"),
    Case("gathers in int8, sums in int8", 2, zero(3, precision={**FP32, "gather": "int8", "reduce": "int8"}), "wide"),
    Case(
        "gathers in fp8, sums in int4",
        2,
        zero(3, precision={**FP32, "gather": "fp8", "reduce": "int4", "reduce_feedback": True}),
        "wide",
    ),
    Case("states in bf16", 2, zero(2, precision={"param": "fp32", "states": "bf16"}), "decoder"),
    Case("Muon", 2, zero(3, optimizer={"name": "muon", "lr": 1e-2, "clip_norm": 0.05}), "decoder"),
    *(
        Case(
            f"saves, states {states}, {act.__name__}",
            1,
            zero(2, precision={**FP32, "states": states}),
            "wide",
            act=act,
        )
        for states, act in itertools.product(("master", "bf16", "int8"), (save_async, save_now))
    ),
    Case("state access", 2, zero(3), act=read_state),
    Case("memory handed over", 1, zero(3), act=hand_over),
)


@dataclass(frozen=True)
class Trained:
    """What one training gave, to the bit."""

    trace: list[float]
    parameters: dict[str, Tensor]
    num_kernels: int
    host_waits: dict[str, int]

    def differences(self, other: Trained) -> list[str]:
        named = ["losses and norms"] if self.trace != other.trace else []
        return named + [name for name, value in self.parameters.items() if not same(value, other.parameters[name])]


def wide_batch(seed: int, num_samples: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_samples, 64, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# Its weights have enough elements that they are sent, and their states stored, in codes; and it drops.
WIDE = ModelCase(
    "wide",
    lambda: nn.Sequential(nn.Linear(64, 96), nn.Dropout(0.1), nn.Linear(96, 64)),
    wide_batch,
    lambda output, batch: ((output - batch).square().sum(), torch.tensor(float(output.numel()))),
)


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


# Kernels are what takes time: two blocks, one of which is gathered while the other computes.
SHORT = replace(MODELS["transformer"], make=partial(Transformer, tied=True, num_blocks=2))


def model_case(case: Case) -> ModelCase:
    known = {**MODELS, SHORT.name: SHORT, WIDE.name: WIDE}
    return known[case.model] if case.model in known else make_case(case.model, num_layers=2)


def make_engine(case: Case, make_factory: Callable[[MeshShape], CommFactory]) -> Engine:
    overrides: dict[str, Any] = {"run": {"device": "cuda"}, "optimizer": {"clip_norm": 0.05}, **case.sections}
    config = make_config(case.num_micro_batches, overrides).resolve(case.world_size)
    torch.manual_seed(0)
    model = model_case(case).build(case.dtype)
    # One rank shards nothing, and its layout says stage 0.
    layout = replace(plan_layout(model, config, rank=int(os.environ.get("RANK", "0"))), stage=STAGES[config.zero.stage])
    factory, memory = make_factory(layout.mesh), MemoryTracker(DEVICE)
    return Engine(EngineInputs(model, config, layout, memory, factory, loss_fn=model_case(case).loss))


def train_rank(case: Case, make_factory: Callable[[MeshShape], CommFactory]) -> tuple[list[float], dict[str, Tensor]]:
    """Train two steps on one rank: losses and norms, and the parameters."""
    engine = make_engine(case, make_factory)
    if case.has_echoes:
        cancel_deviations(engine.parts.losses)
    trace = []
    count, dtype = case.num_micro_batches, case.dtype
    steps = make_batches(model_case(case), num_steps=2, world_size=1, num_micro_batches=count, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        for index, step in enumerate(steps):
            result = engine.train_step(step[0])
            trace += [float(result.loss), float(result.grad_norm)]
            case.act(engine, index, Path(folder))
        engine.finish_saves()
    parameters = {}
    with engine.gathered():
        for name, value in engine.module.named_parameters():
            with suppress(ReleasedParameterError):  # of another stage
                parameters[name] = value.detach().cpu().clone()
    engine.close()
    return trace, parameters


def factory_of(case: Case, mesh: MeshShape) -> CommFactory:
    if case.has_echoes:
        return EchoFactory(mesh, 0)
    return ProcessGroupFactory(Mesh(mesh, TIMEOUT_S), open_store(TIMEOUT_S))


def train(case: Case, scheduler: Scheduler, order: Order, seed: int) -> Trained:
    """Train this rank of a case, in an order of streams."""
    scheduler.restart(order, seed)
    with attention_backend("dense"):  # Triton's interpreter waits for the device at each launch: no race would show
        trace, parameters = train_rank(case, lambda mesh: factory_of(case, mesh))
    return Trained(trace, parameters, scheduler.kernels.total(), dict(scheduler.host_waits))


@dataclass(frozen=True)
class Verdict:
    """How a case went: `races` says by order what differs from the eager one, or what was raised."""

    name: str
    races: dict[str, str]
    num_kernels: int
    host_waits: dict[str, int]
    foreign_calls: dict[str, int] = field(default_factory=dict)  # of threads that have chosen no device


def judge(
    case: Case,
    scheduler: Scheduler,
    orders: Sequence[tuple[Order, int]],
    known: dict[str, Trained],
    is_enough: int = 99,
) -> Verdict:
    """Train in the eager order, unless what it gives is known, then in others, until some races are found."""
    races: dict[str, str] = {}
    try:
        if case.name not in known:
            known[case.name] = train(case, scheduler, "eager", 0)
        expected = known[case.name]
    except Exception as error:
        return Verdict(case.name, {"eager": describe(error)}, 0, {})
    for order, seed in orders:
        if len(races) == is_enough:
            break
        try:
            differences = expected.differences(train(case, scheduler, order, seed))
        except Exception as error:
            differences = [describe(error)]
        if differences:
            races[f"{order} {seed}"] = ", ".join(differences[:4])
    return Verdict(case.name, races, expected.num_kernels, expected.host_waits, dict(scheduler.foreign_calls))


def describe(error: Exception) -> str:
    frames = [f"{frame.filename.split('/')[-1]}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {str(error)[:300]} at {' '.join(frames[-4:])}"


@contextmanager
def working_folder() -> Iterator[None]:
    """What stores states writes into the current folder."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--quick", action="store_true", help="one order of each case and fault")
    parser.add_argument("--seeds", type=int, default=1, help="random orders of each case")
    parser.add_argument("--faults", action="store_true", help="plant faults, after the cases that are named")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [case for case in CASES if not options.words or any(word in case.name for word in options.words)]
    if options.list:
        print(*(case.name for case in chosen), sep="\n")
        return 0
    scheduler = install()
    rank = os.environ.get("RANK")
    if rank is not None:
        join()
    more: tuple[tuple[Order, int], ...] = tuple(("random", seed) for seed in range(1, options.seeds))
    orders = QUICK_ORDERS if options.quick else ORDERS + more
    known: dict[str, Trained] = {}
    with working_folder():
        for case in chosen if options.words or not options.faults else ():
            if case.has_echoes == (rank is None):
                print(json.dumps(asdict(judge(case, scheduler, orders, known))), flush=True)
        for fault in FAULTS if options.faults else ():
            (case,) = [case for case in CASES if case.name == fault.case]
            if case.name not in known:
                known[case.name] = train(case, scheduler, "eager", 0)
            with fault.plant():
                verdict = judge(case, scheduler, QUICK_ORDERS if options.quick else ORDERS, known, is_enough=1)
            print(json.dumps(asdict(replace(verdict, name=fault.name))), flush=True)
    if rank is None and not options.faults:
        for num_ranks in sorted({case.world_size for case in chosen if not case.has_echoes}):
            names = [case.name for case in chosen if not case.has_echoes and case.world_size == num_ranks]
            flags = ["--quick"] if options.quick else ["--seeds", str(options.seeds)]
            for process in start_ranks(num_ranks, "device.orders", [*flags, *names]):
                print(process.communicate()[0], end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
