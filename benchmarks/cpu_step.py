"""Seconds of the optimizer's step on the host: in blocks with its casts, beside what takes them in passes of their own.

All ways step the same AdamW over so many parameters, in one process, in an order that rotates from round to round:

- `fused alone`: torch's fused AdamW of fp32 parameters and gradients; nothing is cast or scaled.
- `shardwise`: bf16 gradients widened and scaled, the step, the bf16 parameters narrowed, in threads of its own.
  `shardwise, fp32 grads` widens none; `shardwise, factor 1` has nothing to scale; `shardwise, torch's threads` shares
  each operation instead of the blocks.
- `passes`: the same with torch's fused AdamW, each in a pass over all parameters.
- `deepspeed`: the same with DeepSpeed's CPUAdam, which is compiled at first use and skipped with a word where it
  cannot be.
- `copy` and `triad`: what the memory does, with 8 and 12 bytes an element.

    python benchmarks/cpu_step.py --rounds 15
    python benchmarks/cpu_step.py --threads 2 --json cpu_step.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from shardwise.offload.cpu_optimizer import StepPiece, StepThreads, step_pieces
from shardwise.optim.rules import rule_of
from step_time import machine

STEP_BYTES = 28  # a parameter of an fp32 step: master and two moments read and written, gradient read
FACTOR = 0.3
OPTIONS: Mapping[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FUSED, SHARDWISE, DEEPSPEED = "fused alone", "shardwise", "deepspeed"

Way = Callable[[], object]


@dataclass(frozen=True)
class Tensors:
    """What all ways step, 1-D."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    bf16_grad: Tensor
    param: Tensor

    @classmethod
    def of(cls, numel: int) -> Tensors:
        """Random values, which no kernel can skip; every page has been touched."""
        grad = torch.randn(1024, generator=torch.Generator().manual_seed(0)).repeat(-(-numel // 1024))[:numel]
        return cls(
            grad * 0.02, grad * 0.1, grad**2, grad, grad.bfloat16(), torch.zeros_like(grad, dtype=torch.bfloat16)
        )


def shardwise_way(tensors: Tensors, grad: Tensor, factor: float = FACTOR, threads: StepThreads | None = None) -> Way:
    """The step in blocks, shared by `threads`."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True, **OPTIONS)
    states = {"exp_avg": tensors.exp_avg, "exp_avg_sq": tensors.exp_avg_sq}
    (group,) = optimizer.param_groups
    piece = StepPiece(group, tensors.master, grad, states, 10, False, tensors.param)
    return lambda: step_pieces(rule_of(optimizer), [piece], factor, threads)


def fused_way(tensors: Tensors) -> Way:
    """Torch's fused step of fp32 parameters and gradients, alone."""
    return _stepping(tensors, tensors.grad).step


def passes_way(tensors: Tensors, optimizer: torch.optim.Optimizer, wide: Tensor) -> Way:
    """Casts and scaling of everything around an optimizer's step on `wide`, its gradient."""

    def step() -> None:
        wide.copy_(tensors.bf16_grad).mul_(FACTOR)
        optimizer.step()
        tensors.param.copy_(tensors.master)

    return step


def deepspeed_way(tensors: Tensors) -> Way:
    """The same around DeepSpeed's CPUAdam.

    Raises:
        Exception: whatever the missing package, or the compiler, has to say.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    master, wide = _parameter(tensors, torch.zeros_like(tensors.grad))
    optimizer = DeepSpeedCPUAdam([master], adamw_mode=True, **OPTIONS)
    return passes_way(tensors, optimizer, wide)


def _stepping(tensors: Tensors, grad: Tensor) -> torch.optim.Optimizer:
    return torch.optim.AdamW([_parameter(tensors, grad)[0]], fused=True, **OPTIONS)


def _parameter(tensors: Tensors, grad: Tensor) -> tuple[nn.Parameter, Tensor]:
    parameter = nn.Parameter(tensors.master)
    parameter.grad = grad
    return parameter, grad


def ways(numel: int, console: Console, *, with_deepspeed: bool = True) -> dict[str, Way]:
    """All that can be measured here, by name."""
    tensors = Tensors.of(numel)
    threads = StepThreads()
    other, wide = torch.zeros_like(tensors.grad), torch.zeros_like(tensors.grad)
    found: dict[str, Way] = {
        FUSED: fused_way(tensors),
        SHARDWISE: shardwise_way(tensors, tensors.bf16_grad, threads=threads),
        "shardwise, factor 1": shardwise_way(tensors, tensors.bf16_grad, 1.0, threads),
        "shardwise, fp32 grads": shardwise_way(tensors, tensors.grad, threads=threads),
        "shardwise, torch's threads": shardwise_way(tensors, tensors.bf16_grad),
        "passes": passes_way(tensors, _stepping(tensors, wide), wide),
        "copy": lambda: other.copy_(tensors.grad),
        "triad": lambda: torch.add(tensors.grad, tensors.exp_avg_sq, alpha=2.0, out=other),
    }
    if not with_deepspeed:
        return found
    try:
        found[DEEPSPEED] = deepspeed_way(tensors)
    except Exception as error:  # it fails in many ways where there is no compiler
        console.print(f"skipped {DEEPSPEED}: {type(error).__name__}: {error}", highlight=False)
    return found


def measure(found: Mapping[str, Way], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, after one that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    names = list(found)
    for number in range(num_rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start_s = time.perf_counter()
            found[name]()
            if number:
                seconds[name].append(time.perf_counter() - start_s)
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], name: str, base: str) -> float:
    """A way's time over another's: the median of the rounds' ratios."""
    return statistics.median(own / other for own, other in zip(seconds[name], seconds[base], strict=True))


def table_of(seconds: Mapping[str, Sequence[float]], numel: int) -> Table:
    """A row for each way; GB/s at the bytes that its step alone needs, casts not counted."""
    table = Table("way", title=f"AdamW on {numel / 1e6:.0f}M parameters")
    for heading in ("ms", "fastest", "GB/s", f"{FUSED} / it", "it / deepspeed"):
        table.add_column(heading, justify="right")
    for name, own in seconds.items():
        num_bytes = numel * {"copy": 8, "triad": 12}.get(name, STEP_BYTES)
        is_step = name not in ("copy", "triad")
        median_s = statistics.median(own)
        against = [
            f"{1 / ratio(seconds, name, FUSED):.2f}" if is_step else "",
            f"{ratio(seconds, name, DEEPSPEED):.2f}" if is_step and DEEPSPEED in seconds else "",
        ]
        table.add_row(
            name, f"{1e3 * median_s:.1f}", f"{1e3 * min(own):.1f}", f"{num_bytes / median_s / 1e9:.1f}", *against
        )
    return table


def main(arguments: Sequence[str]) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-deepspeed", dest="deepspeed", action="store_false", help="compile and run none of it")
    parser.add_argument("--json", type=Path, help="where to write the seconds of all rounds")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for DeepSpeed's own threads
    torch.set_num_threads(options.threads)
    console = Console()
    facts = machine() | {"threads": str(options.threads)}
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), highlight=False)
    seconds = measure(ways(options.numel, console, with_deepspeed=options.deepspeed), options.rounds)
    console.print(table_of(seconds, options.numel))
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "numel": options.numel, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
