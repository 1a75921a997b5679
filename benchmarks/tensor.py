"""Seconds of forward and backward, split over two CPU ranks by Shardwise, by torch's DTensor and by hand.

Twelve layers of hidden size 512 over gloo, one thread a rank, with sequence parallelism (`-sp`) and without; no
optimizer step. Systems take turns as in `step_time.py`, and ratios are taken within a round. The losses must agree.

    python benchmarks/tensor.py --quick
    python benchmarks/tensor.py --json tensor.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from step_time import (
    Records,
    measure,
    names,
    parse_known_systems,
    parser_of,
    ratio,
    report,
    start_report,
)
from tensor_peers import TENSOR_PEERS, TensorWorkload

LARGE, SMALL = (4, 256), (1, 16)  # micro-batch, tokens a sequence
AIMS = {LARGE: 0.9, SMALL: 0.6}  # of DTensor's time, at most
QUICK = {"rounds": 2, "steps": 1, "warmup": 1}


def aim_lines(workload: TensorWorkload, records: Records) -> list[str]:
    """What is aimed at beside what was reached, for the systems that ran."""
    limit = AIMS[workload.micro_size, workload.seq_len]
    lines = []
    for suffix in ("", "-sp"):
        reached = ratio(records, f"shardwise{suffix}", f"torch{suffix}")
        if reached is not None:
            verdict = "reached" if reached <= limit else "missed"
            lines.append(f"shardwise{suffix} / torch{suffix}: {reached:.3f}, aim {limit:.2f}, {verdict}")
    return lines


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; `--quick` changes the defaults, so other flags still count."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps: does it run?")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--systems", type=names, default=list(TENSOR_PEERS), help=", ".join(TENSOR_PEERS))
    parser.add_argument("--versus", type=names, default=["torch", "hand"], help="systems to show ratios to")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each system")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn; ten times as many of the small ones")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first turn, not measured")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until a silent rank is given up")
    parser.add_argument("--json", type=Path, help="where to write everything measured, after each workload")
    return parse_known_systems(parser, arguments, QUICK, TENSOR_PEERS)


def main(arguments: Sequence[str]) -> None:
    """Measure both workloads; print their tables and the aims, and write the file."""
    options = parse_options(arguments)
    console, content = start_report(arguments)
    for micro_size, seq_len in (LARGE, SMALL):
        workload = TensorWorkload("12 x 512", options.dtype, seq_len, micro_size)
        num_steps = options.steps * (10 if (micro_size, seq_len) == SMALL else 1)
        turns = argparse.Namespace(**{**vars(options), "steps": num_steps})
        records = measure(workload, options.systems, turns, console)
        report(workload, records, options, aim_lines(workload, records), content, console)


if __name__ == "__main__":
    main(sys.argv[1:])
