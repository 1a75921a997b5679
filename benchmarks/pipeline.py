"""Seconds a step of pipelines over two CPU ranks: Shardwise, torch.distributed.pipelining and DeepSpeed.

The same decoder, cut between the same units, in fp32 over gloo, one thread a rank, fused AdamW. A step has 2048 tokens,
in 4 micro-batches or in 16. Systems take turns as in `step_time.py`, and ratios are taken within a round. The losses
must agree.

    python benchmarks/pipeline.py --quick
    python benchmarks/pipeline.py --json pipeline.json
    python benchmarks/pipeline.py --models 25m --micro-batches 16 --systems torch-1f1b,deepspeed-1f1b,shardwise-1f1b
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline_peers import PIPELINE_PEERS, SHARDWISE_SCHEDULES, PipelineWorkload, cut_of
from step_time import (
    Records,
    is_installed,
    measure,
    names,
    parse_known_systems,
    parser_of,
    ratio,
    report,
    start_report,
)

SHAPES = {4: (2, 256), 16: (1, 128)}  # micro-batch and tokens a sequence, by micro-batches a step
AIM = 0.95  # of the faster peer's time, at most
QUICK = {"models": ["tiny"], "rounds": 2, "steps": 1, "warmup": 1}


def aim_lines(records: Records) -> list[str]:
    """What is aimed at beside what was reached, schedule by schedule and for the fastest of each side."""
    medians = {name: record.quartiles_s()[1] for name, record in records.items() if record.failure is None}
    own = {name: median for name, median in medians.items() if name.startswith("shardwise-")}
    others = {name: median for name, median in medians.items() if name not in own}
    pairs = []
    for schedule in SHARDWISE_SCHEDULES:
        same = [name for name in others if name.endswith(f"-{schedule}")]
        if f"shardwise-{schedule}" in own and same:
            pairs.append((f"shardwise-{schedule}", min(same, key=others.__getitem__)))
    if own and others:
        fastest = min(own, key=own.__getitem__), min(others, key=others.__getitem__)
        pairs += [fastest] if fastest not in pairs else []
    lines = []
    for name, peer in pairs:
        reached = ratio(records, name, peer)
        if reached is not None:
            verdict = "reached" if reached <= AIM else "missed"
            lines.append(f"{name} / {peer}: {reached:.3f}, aim {AIM:.2f}, {verdict}")
    return lines


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; `--quick` changes the defaults, so other flags still count."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps: does it run?")
    parser.add_argument("--models", type=names, default=["25m", "100m"], help="presets of shardwise.models")
    counts = ", ".join(map(str, SHAPES))
    parser.add_argument("--micro-batches", type=names, default=[*map(str, SHAPES)], help=f"a step, of {counts}")
    parser.add_argument("--systems", type=names, default=list(PIPELINE_PEERS), help=", ".join(PIPELINE_PEERS))
    versus = ["torch-1f1b", "deepspeed-1f1b"]
    parser.add_argument("--versus", type=names, default=versus, help="systems to show ratios to")
    parser.add_argument("--seq", type=int, help="tokens of a sequence, where not those that fill a step")
    parser.add_argument("--clip", type=float, help="clip gradients to this norm, in every system")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each system")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first turn, not measured")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until a silent rank is given up")
    parser.add_argument("--json", type=Path, help="where to write everything measured, after each workload")
    options = parse_known_systems(parser, arguments, QUICK, PIPELINE_PEERS)
    if unknown := [count for count in options.micro_batches if count not in map(str, SHAPES)]:
        parser.error(f"--micro-batches: {unknown[0]} is none of {counts}")
    return options


def main(arguments: Sequence[str]) -> None:
    """Measure each workload in turn; print its cut, its table and the aims, and write the file."""
    options = parse_options(arguments)
    console, content = start_report(arguments)
    systems = [name for name in options.systems if is_installed(PIPELINE_PEERS[name].package)]
    for name in sorted(set(options.systems) - set(systems)):
        console.print(f"skipped {name}: {PIPELINE_PEERS[name].package} is not installed")
    for name, count in itertools.product(options.models, map(int, options.micro_batches)):
        micro_size, seq_len = SHAPES[count]
        workload = PipelineWorkload(name, "fp32", options.seq or seq_len, micro_size, options.clip, count)
        records = measure(workload, systems, options, console)
        console.print(f"two stages begin with {', '.join(units[0] for units in cut_of(workload, '1f1b'))}")
        report(workload, records, options, aim_lines(records), content, console)


if __name__ == "__main__":
    main(sys.argv[1:])
