"""One AdamW step on one GPU over parameters in a few or many pieces: the kernel of int8 states, and torch's optimizers.

`ms` is the GPU's time a step, `host` that until all of it is enqueued: where the host takes longer, the GPU waits.
`GB/s` is what the step must read and write over its time. `one launch` steps all pieces, which lie next to each other,
as one. bitsandbytes is measured where it is installed.

    python benchmarks/gpu_optimizer.py --json gpu_optimizer.json
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.layout.codec import codec_of
from shardwise.layout.precision import BLOCK_NUMEL
from shardwise.offload.cpu_optimizer import StepPiece, step_pieces
from shardwise.optim.rules import rule_of

DEVICE = torch.device("cuda", 0)
PARAMS_AND_GRADS = 4 + 4 + 4  # bytes an element: fp32 parameters are read and written, gradients read
STATES = {"int8": 4 * (1 + 4 / BLOCK_NUMEL), "bf16": 8.0, "fp32": 16.0}  # two, each read and written
Step = Callable[[], object]
Measured = tuple[str, int, float, Step]
"""A name, the number of pieces, the bytes that one pass reads and writes, and the call."""


@dataclass(frozen=True)
class Row:
    """One optimizer's medians."""

    system: str
    num_pieces: int
    ms: float
    host_ms: float
    gb_per_s: float


@dataclass(frozen=True)
class Flats:
    """Parameters and gradients in one block of memory each, cut into equal pieces."""

    params: Tensor
    grads: Tensor
    num_pieces: int

    def options(self) -> dict[str, Any]:
        return self.optimizer().param_groups[0]

    def optimizer(self, **kinds: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.1, **kinds)

    def parameters(self) -> list[nn.Parameter]:
        parameters = [nn.Parameter(piece) for piece in self.params.chunk(self.num_pieces)]
        for parameter, grad in zip(parameters, self.grads.chunk(self.num_pieces), strict=True):
            parameter.grad = grad
        return parameters

    def pieces(self, states: str, num_pieces: int) -> list[StepPiece]:
        """What the library steps, with states of this precision."""
        numel, options = self.params.numel() // num_pieces, self.options()
        return [
            StepPiece(options, param, grad, kept_states(states, numel), 3.0, False, None)
            for param, grad in zip(self.params.chunk(num_pieces), self.grads.chunk(num_pieces), strict=True)
        ]


def kept_states(states: str, numel: int) -> dict[str, Any]:
    made = {}
    for name in ("exp_avg", "exp_avg_sq"):
        codec = codec_of(name, states)
        assert codec is not None, "these states are encoded"
        made[name] = codec.empty(numel, DEVICE)
    return made


def systems_of(flats: Flats) -> Iterator[tuple[str, str, Step]]:
    """Each system's name, its states, and its step; one after the other, as each holds memory."""
    from shardwise.zero import triton_step

    rule = rule_of(flats.optimizer())

    def by_kernel(pieces: list[StepPiece]) -> None:
        for piece in pieces:
            triton_step.step_piece(rule.kind, piece, 1.0)

    pieces = flats.pieces("int8", flats.num_pieces)
    yield "int8 kernel", "int8", lambda pieces=pieces: by_kernel(pieces)
    if flats.num_pieces > 1:
        pieces = flats.pieces("int8", 1)
        yield "int8 kernel, one launch", "int8", lambda pieces=pieces: by_kernel(pieces)
    pieces = flats.pieces("bf16", flats.num_pieces)
    yield "bf16, torch's operations", "bf16", lambda pieces=pieces: step_pieces(rule, pieces, 1.0)
    del pieces
    for name, kinds in (("torch fused", {"fused": True}), ("torch foreach", {"foreach": True})):
        yield name, "fp32", flats.optimizer(**kinds).step
    if importlib.util.find_spec("bitsandbytes"):
        bitsandbytes: Any = importlib.import_module("bitsandbytes")
        yield "bitsandbytes 8 bit", "int8", bitsandbytes.optim.AdamW8bit(flats.parameters(), lr=1e-4).step


def measure(step: Step, num_runs: int) -> tuple[float, float]:
    """Median milliseconds of the GPU and of the host."""
    for _ in range(2):
        step()
    times, host_times = [], []
    for _ in range(num_runs):
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        start_s = time.perf_counter()
        marks[0].record()
        step()
        marks[1].record()
        host_times.append((time.perf_counter() - start_s) * 1e3)
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]))
    return statistics.median(times), statistics.median(host_times)


def report(groups: Iterable[Iterable[Measured]], options: argparse.Namespace) -> None:
    """Measure call by call, group by group; what was measured is on the disk after each.

    Args:
        options: `numel`, `runs` and `json`, as `main` has them.
    """
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows: list[Row] = []
    print(f"{machine['gpu']}, torch {machine['torch']}, {options.numel:.1e} elements")
    print(f"{'call':<40}{'pieces':>7}{'ms':>10}{'host':>10}{'GB/s':>8}")
    for calls in groups:
        for name, num_pieces, num_bytes, call in calls:
            ms, host_ms = measure(call, options.runs)
            rows.append(Row(name, num_pieces, ms, host_ms, num_bytes / max(ms, 1e-6) / 1e6))
            print(f"{name:<40}{num_pieces:>7}{ms:>10.3f}{host_ms:>10.3f}{rows[-1].gb_per_s:>8.0f}", flush=True)
            if options.json:
                options.json.write_text(
                    json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2)
                )
        torch.cuda.empty_cache()


def steps(numel: int, num_pieces: int) -> Iterator[Measured]:
    """The steps of all systems over so many pieces."""
    numel = numel // num_pieces // BLOCK_NUMEL * BLOCK_NUMEL * num_pieces
    flats = Flats(torch.zeros(numel, device=DEVICE), torch.full((numel,), 1e-3, device=DEVICE), num_pieces)
    for name, states, step in systems_of(flats):
        yield name, num_pieces, numel * (PARAMS_AND_GRADS + STATES[states]), step


def main() -> None:
    """Measure each system over few and over many pieces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=10**9)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pieces", default="1,300")
    options = parser.parse_args()
    report((steps(options.numel, int(num_pieces)) for num_pieces in options.pieces.split(",")), options)


if __name__ == "__main__":
    main()
