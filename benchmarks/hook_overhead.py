"""What the engine costs on the host for each block, forward and backward together: hooks, driver, bookkeeping.

One process, one thread, one rank; stages 2 and 3 are forced, and collectives are free: a network that moves nothing and
returns at once. The figure is the slope over depth, so that what is paid once a pass is left out:

    ((engine at L2 blocks - engine at L1) - (plain at L2 - plain at L1)) / (L2 - L1)

The row `hooks` has the hooks alone: on blocks, inputs, outputs and parameters, which report to no engine.

Counted in the others: hooks; the driver; storage made and freed; the copy of the shard into the gathered buffer
(stage 3); the local sum after a reduction; pool, memory tracker, timeline, counts of collectives.
Not counted: what moves between ranks, the root's groups, the optimizer step. The plain model copies each gradient into
a buffer after its backward, as the engine's hooks do within theirs. Blocks are so small that their own arithmetic is
a few microseconds an op. Time is the thread's on the CPU, which other processes disturb less than the clock on the
wall. The systems take turns; each figure is the median over the rounds, with its quartiles.

    python benchmarks/hook_overhead.py                     # both stages, blocks of 2 and of 9 parameters
    python benchmarks/hook_overhead.py --profile 3         # where the time goes at stage 3, by function
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.comm.backends import SimulatedFactory
from shardwise.comm.collectives import Comm, CommResources
from shardwise.config.resolve import Config
from shardwise.construction.scan import build_layout
from shardwise.engine.build import EngineInputs
from shardwise.engine.engine import Engine
from shardwise.layout.mesh_shape import MeshShape
from shardwise.layout.zero_stages import STAGES
from shardwise.runtime.gradient_hooks import hook_gradient
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.runtime.module_hooks import hook_unit

WIDTH = 8
DEPTHS = (8, 40)
NUM_WARMUP = 10
DEVICE = torch.device("cpu")
Pass = Callable[[], None]
System = tuple[Pass, Pass]  # what is timed, and what follows it untimed


class FreeNetwork(SimulatedFactory):
    """A network of a lone rank whose tensors are real: every collective is done at once, and reads its own values."""

    def __init__(self) -> None:
        super().__init__(MeshShape(), 0, "gloo")

    def comm(self, axes: tuple[str, ...], use: str, resources: CommResources, axis: str) -> Comm:
        comm = super().comm(axes, use, resources, axis)
        comm.is_simulated = False
        return comm


class Block(nn.Module):
    """A chain of matrix products, each with a parameter of its own."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(WIDTH) for _ in range(num_params))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight  # [B, WIDTH]
        return x


def build_model(num_blocks: int, num_params: int) -> nn.Module:
    """Blocks in a row; the root has no parameter."""
    return nn.Sequential(*[Block(num_params) for _ in range(num_blocks)])


def plain(num_blocks: int, num_params: int) -> System:
    """Forward, backward, and the gradients copied out and dropped."""
    model = build_model(num_blocks, num_params)
    parameters = list(model.parameters())
    slots = [torch.zeros_like(parameter) for parameter in parameters]
    x = torch.ones(2, WIDTH)

    def run() -> None:
        model(x).sum().backward()
        for parameter, slot in zip(parameters, slots, strict=True):
            assert parameter.grad is not None
            slot.copy_(parameter.grad)
            parameter.grad = None

    return run, lambda: None


class Silent:
    """Events of units that do nothing; gradients are copied out."""

    def pre_forward(self, unit: None, is_recomputed: bool) -> None:
        pass

    def post_forward(self, unit: None, outputs: Sequence[Tensor], backward_follows: bool | None) -> None:
        pass

    def expect_input_gradients(self, unit: None, are_tracked: bool) -> None:
        pass

    def pre_backward(self, unit: None) -> None:
        pass

    def on_input_gradients(self, unit: None) -> None:
        pass

    def on_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        torch.zeros_like(parameter).copy_(gradient)


def hooks_alone(num_blocks: int, num_params: int) -> System:
    """The engine's hooks on blocks, inputs, outputs and parameters, which report nothing but gradients."""
    model = build_model(num_blocks, num_params)
    for block in model:
        hook_unit(block, Silent(), None)
    for parameter in model.parameters():
        hook_gradient(parameter, Silent)
    x = torch.ones(2, WIDTH)
    return lambda: model(x).sum().backward(), lambda: None


def engine(stage: int, num_blocks: int, num_params: int) -> System:
    """The engine's forward and backward, which ends with every gradient reduced."""
    config = Config.from_dict({"zero": {"stage": stage}, "run": {"device": "cpu"}}).resolve(world_size=1)
    model = build_model(num_blocks, num_params)
    layout = replace(build_layout(model, config), stage=STAGES[stage])
    built = Engine(
        EngineInputs(
            model,
            config,
            layout,
            MemoryTracker(DEVICE),
            FreeNetwork(),
            loss_fn=lambda output, batch: (output.sum(), 1),
        )
    )
    x = torch.ones(2, WIDTH)

    def after() -> None:
        built.zero_grad()
        built.parts.state.num_steps += 1  # in the first step a forward is watched for what it draws

    return lambda: built.backward(built(x)), after


@dataclass(frozen=True)
class Overhead:
    """Microseconds a block: the engine's own, as quartiles over the rounds, and what the plain model takes."""

    system: str
    num_params: int
    plain_us: float
    quartiles_us: list[float]


def timed_us(system: System) -> float:
    """One pass."""
    run, after = system
    start_s = time.thread_time()
    run()
    elapsed_s = time.thread_time() - start_s
    after()
    return elapsed_s * 1e6


def measure(stages: list[int], num_params: int, num_rounds: int) -> list[Overhead]:
    """Run all systems in turn; a round's figure is the difference of its slopes."""
    makers = {"plain": plain, "hooks": hooks_alone, **{f"stage {stage}": partial(engine, stage) for stage in stages}}
    systems = {(name, depth): make(depth, num_params) for name, make in makers.items() for depth in DEPTHS}
    slopes: dict[str, list[float]] = {name: [] for name in makers}
    gc.collect()
    gc.disable()  # a collection in one of the passes would be the other's gain
    for index in range(num_rounds + NUM_WARMUP):
        times_us = {key: timed_us(system) for key, system in systems.items()}
        if index >= NUM_WARMUP:
            for name, values in slopes.items():
                values.append((times_us[name, DEPTHS[1]] - times_us[name, DEPTHS[0]]) / (DEPTHS[1] - DEPTHS[0]))
    gc.enable()
    return [
        Overhead(
            name,
            num_params,
            statistics.median(slopes["plain"]),
            statistics.quantiles([own - base for own, base in zip(slopes[name], slopes["plain"], strict=True)], n=4),
        )
        for name in slopes
        if name != "plain"
    ]


def profile(stage: int, num_params: int, num_passes: int) -> None:
    """Print the functions of the library that take most, by their own time."""
    run, after = engine(stage, DEPTHS[1], num_params)
    for _ in range(NUM_WARMUP):
        run()
        after()
    profiler = cProfile.Profile()
    for _ in range(num_passes):
        profiler.enable()
        run()
        profiler.disable()
        after()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    """Print a table, or a profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="2,3")
    parser.add_argument("--params", default="2,9", help="parameters a block: 9 as in a Llama block")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--profile", type=int, metavar="STAGE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_params = [int(text) for text in options.params.split(",")]
    if options.profile is not None:
        profile(options.profile, num_params[0], num_passes=100)
        return
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    print(f"{'system':>8}{'params':>8}{'plain us':>10}{'overhead us a block (quartiles)':>34}")
    for number in num_params:
        for row in measure([int(text) for text in options.stages.split(",")], number, options.rounds):
            low, middle, high = row.quartiles_us
            print(f"{row.system:>8}{row.num_params:>8}{row.plain_us:>10.1f}{middle:>16.1f}  ({low:.1f} - {high:.1f})")


if __name__ == "__main__":
    main()
