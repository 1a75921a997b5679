"""Step time, MFU and peak memory of one training step on one GPU: plain torch, DDP, FSDP2, every stage of Shardwise.

One GPU has no other rank, so this shows what the machinery costs: stage 0 is what one rank really runs, and stages
1 to 3 are forced: the rank holds a shard, which is gathered, reduced and released by NCCL among itself, as FSDP2 does
on a mesh of one. `tp2` is one of two ranks that split each layer, with collectives that move
nothing: beside half of stage 0 it shows what splitting costs the host, and its loss means nothing. With `+compile` each
block is compiled by torch.compile as one graph. All systems run alternately, in one process, on the same batches; each
is built, timed and torn down in every round.

    python benchmarks/gpu_step.py --models 350m --rounds 3 --steps 10
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness.echo import LoneFactory, one_rank_shards
from shardwise.comm.backends import SimulatedFactory
from shardwise.comm.collectives import Comm, CommResources
from shardwise.config.resolve import Config
from shardwise.construction.scan import build_layout
from shardwise.engine.build import EngineInputs
from shardwise.engine.engine import Engine
from shardwise.launch.process_group import ensure_process_group
from shardwise.layout.zero_stages import STAGES
from shardwise.models.decoder import Decoder, lm_loss
from shardwise.models.presets import DecoderConfig, preset
from shardwise.models.shape import flops_per_token
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.tensor.plan_layout import plan_layout

DEVICE = torch.device("cuda", 0)
PEAK_BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
Step = Callable[[torch.Tensor], float]


@dataclass(frozen=True)
class Case:
    """What is trained: `seq_len` tokens a sample, `micro_size` samples a step, one micro-batch."""

    model: str
    seq_len: int
    micro_size: int


@dataclass(frozen=True)
class Timing:
    """One system in one round."""

    system: str
    step_s: float
    peak_gib: float
    reserved_gib: float
    last_loss: float


def plain(config: DecoderConfig, *, compiled: bool) -> tuple[Step, Callable[[], None]]:
    """fp32 parameters under autocast: the plainest mixed precision in torch, and the most common."""
    model = _model(config, compiled)
    return _autocast_step(model, _adamw(model)), lambda: None


def ddp(config: DecoderConfig, *, compiled: bool) -> tuple[Step, Callable[[], None]]:
    """The same through DistributedDataParallel, whose buckets NCCL sums among one rank."""
    model = DistributedDataParallel(_model(config, compiled), device_ids=[0], gradient_as_bucket_view=True)
    return _autocast_step(model, _adamw(model)), lambda: None


def _autocast_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: torch.Tensor) -> float:
        with torch.autocast("cuda", torch.bfloat16):
            total, count = lm_loss(model(tokens[:, :-1]), tokens[:, 1:])
        return _update(total / count, optimizer)

    return step


def _model(config: DecoderConfig, compiled: bool) -> Decoder:
    """The device draws the weights: the host would take longer than all steps."""
    with DEVICE:
        model = Decoder(config)
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True)
    return model


def fsdp2(config: DecoderConfig, *, compiled: bool) -> tuple[Step, Callable[[], None]]:
    """FSDP2 with bf16 parameters over fp32 masters, reduction in fp32, one group a block."""
    model = _model(config, compiled)
    mesh = init_device_mesh("cuda", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = _adamw(model)

    def step(tokens: torch.Tensor) -> float:
        total, count = lm_loss(model(tokens[:, :-1]), tokens[:, 1:])
        return _update(total / count, optimizer)

    return step, lambda: None


def ours(stage: int) -> Callable[..., tuple[Step, Callable[[], None]]]:
    """Shardwise with bf16 parameters over fp32 masters, the given stage's machinery at work on one rank."""

    def build(config: DecoderConfig, *, compiled: bool) -> tuple[Step, Callable[[], None]]:
        resolved = Config.from_dict(
            {
                "zero": {"stage": stage},
                "precision": {"param": "bf16"},
                "compile": {"enabled": compiled},
                "optimizer": {"clip_norm": None, "decay_1d": True},
                "scheduler": {"name": "constant"},
                "run": {"device": "cuda"},
            }
        ).resolve(world_size=1)
        model = _model(config, compiled=False)  # the engine compiles
        layout = replace(build_layout(model, resolved), stage=STAGES[stage])
        ends = ExitStack()
        if stage:
            ends.enter_context(one_rank_shards())
        engine = Engine(
            EngineInputs(
                model,
                resolved,
                layout,
                MemoryTracker(DEVICE),
                LoneFactory(),
                loss_fn=lambda output, batch: lm_loss(output, batch[1]),
            )
        )
        ends.callback(engine.close)
        return lambda tokens: engine.train_step([(tokens[:, :-1], tokens[:, 1:])]).loss, ends.close

    return build


class SilentNetwork(SimulatedFactory):
    """A simulated network whose tensors are real."""

    def comm(self, axes: tuple[str, ...], use: str, resources: CommResources, axis: str) -> Comm:
        comm = super().comm(axes, use, resources, axis)
        comm.is_simulated = False
        return comm


def split(sequence_parallel: bool) -> Callable[..., tuple[Step, Callable[[], None]]]:
    """One rank of tp=2, with bf16 parameters, over links that move nothing."""

    def build(config: DecoderConfig, *, compiled: bool) -> tuple[Step, Callable[[], None]]:
        resolved = Config.from_dict(
            {
                "mesh": {"tp": 2},
                "tensor": {"sequence_parallel": sequence_parallel},
                "zero": {"stage": 0},
                "precision": {"param": "bf16"},
                "compile": {"enabled": compiled},
                "optimizer": {"clip_norm": None, "decay_1d": True},
                "scheduler": {"name": "constant"},
                "run": {"device": DEVICE.type},
            }
        ).resolve(world_size=2)
        model = _model(config, compiled=False)
        layout = plan_layout(model, resolved)
        engine = Engine(
            EngineInputs(
                model,
                resolved,
                layout,
                MemoryTracker(DEVICE),
                SilentNetwork(layout.mesh, 0, "nccl"),
                loss_fn=lambda output, batch: lm_loss(output, batch[1]),
            )
        )
        return lambda tokens: engine.train_step([(tokens[:, :-1], tokens[:, 1:])]).loss, engine.close

    return build


SYSTEMS = {
    "plain": plain,
    "ddp": ddp,
    "fsdp2": fsdp2,
    **{f"shardwise-{stage}": ours(stage) for stage in range(4)},
    "tp2": split(sequence_parallel=False),
    "tp2-sp": split(sequence_parallel=True),
}


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def _update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def measure(system: str, case: Case, num_steps: int, num_warmup: int) -> Timing:
    """Build a system, run it, and tear it down."""
    config = replace(preset(case.model), max_seq_len=case.seq_len)
    torch.manual_seed(0)
    name, _, suffix = system.partition("+")
    step, close = SYSTEMS[name](config, compiled=suffix == "compile")
    generator = torch.Generator().manual_seed(0)
    shape = (case.micro_size, case.seq_len + 1)
    batches = [torch.randint(config.vocab_size, shape, generator=generator).to(DEVICE) for _ in range(4)]
    loss = 0.0
    times = []
    for index in range(num_warmup + num_steps):
        if index == num_warmup:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        loss = step(batches[index % len(batches)])
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    close()
    del step, close
    gc.collect()
    torch.cuda.empty_cache()
    return Timing(system, statistics.median(times[num_warmup:]), peak / 2**30, reserved / 2**30, loss)


def report(case: Case, timings: list[Timing]) -> None:
    """Print medians over the rounds, and ratios to FSDP2."""
    config = preset(case.model)
    flops = flops_per_token(config, case.seq_len) * case.micro_size * case.seq_len
    name = torch.cuda.get_device_name()
    peak_flops = next((value for key, value in PEAK_BF16_FLOPS.items() if key in name), None)
    print(f"\n{case.model}, {case.micro_size} x {case.seq_len} tokens, bf16, {name}, torch {torch.__version__}")
    print(f"{'system':<21}{'s/step':>9}{'vs fsdp2':>10}{'tokens/s':>11}{'MFU':>7}", end="")
    print(f"{'peak GiB':>10}{'reserved':>10}{'loss':>9}")
    by_system: dict[str, list[Timing]] = {}
    for timing in timings:
        by_system.setdefault(timing.system, []).append(timing)
    medians = {system: statistics.median(each.step_s for each in rows) for system, rows in by_system.items()}
    for system, rows in by_system.items():
        step_s = medians[system]
        mfu = f"{flops / step_s / peak_flops:6.1%}" if peak_flops else "     -"
        ratio = step_s / medians["fsdp2"] if "fsdp2" in medians else float("nan")
        print(
            f"{system:<21}{step_s:>9.4f}{ratio:>10.3f}{case.micro_size * case.seq_len / step_s:>11.0f}{mfu:>7}"
            f"{rows[-1].peak_gib:>10.2f}{rows[-1].reserved_gib:>10.2f}{rows[-1].last_loss:>9.4f}"
        )


def main() -> None:
    """Run all systems alternately and print a table a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="350m:2048:8,1b:2048:4", help="model:seq_len:micro_size, comma-separated")
    parser.add_argument(
        "--systems",
        default=",".join([*SYSTEMS, *(f"{name}+compile" for name in SYSTEMS)]),
        help="+compile compiles blocks",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ensure_process_group("cuda", timeout_s=120.0)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "host": platform.machine()}
    results: list[dict[str, Any]] = []
    for text in options.models.split(","):
        model, seq_len, micro_size = text.split(":")
        case = Case(model, int(seq_len), int(micro_size))
        systems = options.systems.split(",")
        timings: list[Timing] = []
        failed: dict[str, str] = {}
        results.append({"case": asdict(case), "timings": [], "failed": failed})
        for turn in range(options.rounds):
            for system in systems[turn % len(systems) :] + systems[: turn % len(systems)]:
                try:
                    timings.append(measure(system, case, options.steps, options.warmup))
                except Exception as error:  # what a system cannot do is a result
                    failed[system] = f"{type(error).__name__}: {str(error)[:300]}"
                    print(f"{system} failed: {failed[system]}", flush=True)
                results[-1]["timings"] = [asdict(timing) for timing in timings]
                if options.json:  # what was measured stays, whatever comes next
                    options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2))
        timings.sort(key=lambda timing: systems.index(timing.system))
        report(case, timings)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
