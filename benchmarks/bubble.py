"""The bubble of each pipeline schedule in a real run, beside its formula's: stages that sleep instead of computing.

Real processes over gloo run the real engine; only the work of a stage is a sleep, so that the cores are free however
many ranks there are. A block sleeps in its forward, in the gradient of its input and in that of its weight, which
zero-bubble schedules put off. A rank sleeps as long for one micro-batch whether it has one stage or several.

The bubble is what the rank with the longest span stands still in between its first computation and its last; where the
formula does not hold for these times or counts, it is that of the simulated schedule. "As timed" is the bubble of the
schedule simulated with the time that operations did take, hooks and Python included: what is missing from there to the
measured one are messages, and ranks that did not wake in time.

    python benchmarks/bubble.py --quick                             # 20 ms an operation
    python benchmarks/bubble.py --ranks 4 --micro-batches 8 --json bubble.json
    python benchmarks/bubble.py --schedules 1f1b,zb-h1 --forward-ms 100 --input-ms 120 --weight-ms 80
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd import Function

import shardwise
from shardwise.runtime.weight_grad_queue import WeightGradSink, weight_sink
from shardwise.schedule import COMPUTATIONS, RECIPES, Action, ActionKind, ScheduleError, TimedAction, simulate
from shardwise.schedule.formulas import bubble_s
from shardwise.schedule.pipelines import pipeline_step, placement_of
from shardwise.schedule.simulate import rank_bubble_s, rank_span_s
from step_time import machine

AIM = 0.03
QUICK_MS = 20.0
WIDTH = 4


Measured = tuple[float, float, dict[str, float]]
"""Of a step: bubble and span of the rank with the longest span, and medians of an operation by kind; seconds."""


@dataclass(frozen=True)
class Times:
    """Seconds that a rank takes for one micro-batch, all its stages together."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def whole_s(self) -> float:
        """Of one micro-batch."""
        return self.forward_s + self.input_s + self.weight_s

    def of_stage(self, num_stages: int) -> Times:
        """Of one of a rank's stages."""
        return Times(self.forward_s / num_stages, self.input_s / num_stages, self.weight_s / num_stages)


@dataclass(frozen=True)
class Case:
    """One schedule on so many ranks; `virtual_stages` is what the config says."""

    schedule: str
    num_ranks: int
    num_micro_batches: int
    virtual_stages: int
    times: Times

    @property
    def stages_per_rank(self) -> int:
        """As the schedule places them."""
        return placement_of(self.schedule, self.num_ranks, self.virtual_stages).stages_per_rank

    def config(self) -> dict[str, Any]:
        """Of the engine; a block a stage."""
        num_stages = self.num_ranks * self.stages_per_rank
        return {
            "run": {"device": "cpu"},
            "mesh": {"pp": self.num_ranks},
            "batch": {"micro_size": 1, "accumulation": self.num_micro_batches},
            "pipeline": {
                "schedule": self.schedule,
                "virtual_stages": self.virtual_stages,
                "cut": [f"blocks.{stage}" for stage in range(1, num_stages)],
            },
        }

    def expected_s(self) -> tuple[float, bool]:
        """Seconds of the bubble, and whether by formula; by simulation otherwise."""
        times = self.times
        try:
            counts = self.num_ranks, self.num_micro_batches, self.virtual_stages
            return bubble_s(self.schedule, *counts, times.forward_s, times.input_s, times.weight_s), True
        except ScheduleError:
            schedule = pipeline_step(self.schedule, *counts)
            return _longest(simulate(schedule, lambda rank, action: self._seconds(action)))[0], False

    def bubble_as_timed_s(self, median_s: Mapping[str, float]) -> float:
        """Seconds of the bubble where each kind of operation takes so long."""
        schedule = pipeline_step(self.schedule, self.num_ranks, self.num_micro_batches, self.virtual_stages)
        return _longest(simulate(schedule, lambda rank, action: median_s.get(action.kind.value, 0.0)))[0]

    def _seconds(self, action: Action) -> float:
        stage = self.times.of_stage(self.stages_per_rank)
        return {
            ActionKind.FORWARD: stage.forward_s,
            ActionKind.BACKWARD: stage.input_s + stage.weight_s,
            ActionKind.BACKWARD_INPUT: stage.input_s,
            ActionKind.BACKWARD_WEIGHT: stage.weight_s,
        }.get(action.kind, 0.0)


class Sleep(Function):
    """`x + weight`; sleeps in forward and backward, and for the weight's gradient wherever that is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor | None, block: SleepingBlock, sink: WeightGradSink | None
    ) -> Tensor:
        ctx.block, ctx.sink = block, sink
        time.sleep(block.times.forward_s)
        return x + block.weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        times = ctx.block.times

        def weight_gradient() -> list[Tensor]:
            time.sleep(times.weight_s)
            return [grad.sum(0)]

        time.sleep(times.input_s)
        if ctx.sink is None:
            return grad, torch.zeros(1), *weight_gradient(), None, None
        ctx.sink.defer((ctx.block.weight,), weight_gradient, (grad,))
        return grad, torch.zeros(1), None, None, None


class SleepingBlock(nn.Module):
    """A stage's whole work; the gate gives the first stage, whose input needs no gradient, a backward all the same."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self.times = times
        self.gate = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # [1, WIDTH]
        sink = weight_sink(x)
        # An edge to a parameter that carries no gradient would fire its hooks all the same.
        return Sleep.apply(x, self.gate, self.weight if sink is None else None, self, sink)


class SleepingModel(nn.Module):
    """A block a stage."""

    def __init__(self, num_stages: int, times: Times) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SleepingBlock(times) for _ in range(num_stages))

    def forward(self, x: Tensor) -> Tensor:  # [1, WIDTH]
        for block in self.blocks:
            x = block(x)
        return x


def measure_case(case: Case, num_steps: int) -> list[list[TimedAction]]:
    """This rank's computations in each step, after one that warms up."""
    num_per_rank = case.stages_per_rank
    model = SleepingModel(case.num_ranks * num_per_rank, case.times.of_stage(num_per_rank))
    batches = [torch.zeros(1, WIDTH) for _ in range(case.num_micro_batches)]
    steps = []
    with shardwise.initialize(model, case.config(), loss_fn=lambda output, batch: output.square().mean()) as engine:
        for number in range(num_steps + 1):
            engine.train_step(batches)
            if number:
                # Of stages alone: blocks inside them are recorded too, by the name of their group.
                steps.append(
                    [each for each in engine.timeline if each.action.kind in COMPUTATIONS and not each.action.group]
                )
    return steps


def run_rank(rank: int, cases: Sequence[Case], num_steps: int, folder: str) -> None:
    """One rank of all cases; rank 0 leaves what all measured in the folder."""
    torch.set_num_threads(1)
    num_ranks = cases[0].num_ranks
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    for index, case in enumerate(cases):
        gathered: list[Any] = [None] * num_ranks
        dist.all_gather_object(gathered, measure_case(case, num_steps))
        if rank == 0:
            steps = [[each for row in rows for each in row] for rows in zip(*gathered, strict=True)]
            measured = [(*_longest(step), _medians_s(step)) for step in steps]
            Path(folder, f"{index}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def _longest(timed: Sequence[TimedAction]) -> tuple[float, float]:
    """Bubble and span, in seconds, of the rank with the longest span."""
    ranks = sorted({each.rank for each in timed})
    longest = max(ranks, key=lambda rank: rank_span_s(timed, rank))
    return rank_bubble_s(timed, longest), rank_span_s(timed, longest)


def _medians_s(timed: Sequence[TimedAction]) -> dict[str, float]:
    """Seconds of an operation, by kind."""
    spans_s: dict[str, list[float]] = {}
    for each in timed:
        spans_s.setdefault(each.action.kind.value, []).append(each.end_s - each.start_s)
    return {kind: statistics.median(times) for kind, times in spans_s.items()}


def measure(cases: Sequence[Case], num_steps: int) -> list[list[Measured]]:
    """Each case and step.

    Raises:
        RuntimeError: a rank failed; its traceback is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bubble-") as folder:
        arguments = (cases, num_steps, folder)
        ranks = [
            context.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(cases[0].num_ranks)
        ]
        for process in ranks:
            process.start()
        while any(process.is_alive() for process in ranks) and not any(process.exitcode for process in ranks):
            time.sleep(0.1)
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
        if failed:
            for process in ranks:
                process.kill()
            raise RuntimeError(f"rank {failed[0]} failed; its traceback stands above")
        return [json.loads(Path(folder, f"{index}.json").read_text()) for index in range(len(cases))]


def summarize(case: Case, steps: Sequence[Measured]) -> dict[str, Any]:
    """The row of a case: seconds, and how far bubble and span are off as shares of the expected ones."""
    measured_s = statistics.median(bubble for bubble, _, _ in steps)
    span_s = statistics.median(span for _, span, _ in steps)
    expected_s, is_formula = case.expected_s()
    ideal_s = case.num_micro_batches * case.times.whole_s
    return dataclasses.asdict(case) | {
        "bubble_s": measured_s,
        "expected_s": expected_s,
        "is_formula": is_formula,
        "as_timed_s": statistics.median(case.bubble_as_timed_s(medians_s) for _, _, medians_s in steps),
        "bubble_off": measured_s / expected_s - 1 if expected_s else None,
        "share": measured_s / span_s,
        "expected_share": expected_s / (ideal_s + expected_s),
        "span_off": span_s / (ideal_s + expected_s) - 1,
        "steps": list(steps),
    }


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each schedule."""
    first = rows[0]
    times = ", ".join(
        f"{name} {1e3 * first['times'][f'{key}_s']:.0f} ms" for name, key in zip("FBW", _KEYS, strict=True)
    )
    title = f"p = {first['num_ranks']}, m = {first['num_micro_batches']}, {times}"
    table = Table("schedule", title=title)
    for heading in (
        "v",
        "bubble ms",
        "as timed",
        "expected",
        "by",
        "off",
        "share of span",
        "expected",
        "span off",
        f"aim {AIM:.0%}",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        off = row["span_off"] if row["bubble_off"] is None else row["bubble_off"]
        table.add_row(
            row["schedule"],
            str(row["stages_per_rank"]),
            f"{1e3 * row['bubble_s']:.1f}",
            f"{1e3 * row['as_timed_s']:.1f}",
            f"{1e3 * row['expected_s']:.1f}",
            "formula" if row["is_formula"] else "simulation",
            "" if row["bubble_off"] is None else f"{row['bubble_off']:+.1%}",
            f"{row['share']:.1%}",
            f"{row['expected_share']:.1%}",
            f"{row['span_off']:+.1%}",
            "met" if abs(off) <= AIM else "missed",
        )
    return table


_KEYS = ("forward", "input", "weight")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schedules", default=",".join(RECIPES), help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--virtual-stages", type=int, default=2, help="of the interleaved schedule")
    for key in _KEYS:
        parser.add_argument(f"--{key}-ms", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that warms up")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MS:.0f} ms an operation, one step")
    parser.add_argument("--json", type=Path, help="where to write the bubbles of all steps")
    options = parser.parse_args(arguments)
    options.schedules = options.schedules.split(",")
    if unknown := [name for name in options.schedules if name not in RECIPES]:
        parser.error(f"--schedules: {unknown[0]!r} is none of {', '.join(RECIPES)}")
    if options.quick:
        options.steps = 1
        options.forward_ms = options.input_ms = options.weight_ms = QUICK_MS
    return options


def main(arguments: Sequence[str]) -> None:
    """Print a table."""
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    facts = machine()
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), highlight=False)
    times = Times(options.forward_ms / 1e3, options.input_ms / 1e3, options.weight_ms / 1e3)
    virtual = {
        name: options.virtual_stages if recipe.is_interleaved else recipe.min_virtual_stages
        for name, recipe in RECIPES.items()
    }
    cases = [Case(name, options.ranks, options.micro_batches, virtual[name], times) for name in options.schedules]
    measured = measure(cases, options.steps)
    rows = [
        summarize(case, steps) | {"stages_per_rank": case.stages_per_rank}
        for case, steps in zip(cases, measured, strict=True)
    ]
    console.print(table_of(rows))
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
