"""Seconds a step of a mixture of experts on two CPU ranks: experts whole, gathered for their use, or divided.

Mixtral of transformers with four layers of hidden size 256, in fp32 over gloo, one thread a rank: 8 and 64 experts, 256
and 32 tokens a sequence. Systems take turns as in `step_time.py`, and ratios are taken within a round. Then the shares
of the parts of a step with `mesh.ep=2`: of its fastest step, by clocks around them.

    python benchmarks/experts.py --quick
    python benchmarks/experts.py --json experts.json
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from expert_peers import EXPERT_PEERS, ExpertWorkload, serve_parts, shares
from pairs import Pair
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

AIM = 0.9  # of the fastest other system's time, at most
QUICK = {"experts": ["8"], "seqs": ["32"], "rounds": 2, "steps": 1, "warmup": 1}


def aim_line(records: Records) -> str:
    """What is aimed at beside what was reached."""
    others = {peer: ratio(records, "shardwise-ep", peer) for peer in records if peer != "shardwise-ep"}
    reached = {peer: value for peer, value in others.items() if value is not None}
    if not reached:
        return "no other system ran"
    peer = max(reached, key=lambda name: reached[name])
    verdict = "reached" if reached[peer] <= AIM else "missed"
    return f"shardwise-ep / {peer}, the fastest other: {reached[peer]:.3f}, aim {AIM:.2f}, {verdict}"


def share_line(workload: ExpertWorkload, num_steps: int, timeout_s: float) -> str:
    """Which part of a step is dispatch, and how uneven the rows of the ranks are."""
    pair = Pair("shardwise-ep", workload, timeout_s, serve_parts)
    try:
        pair.ask(2)
        steps = list(zip(*pair.ask(num_steps), strict=True))
    finally:
        pair.close()
    fastest = min(steps, key=lambda ranks: max(times["step"][0] for times in ranks))
    found = shares(list(fastest))
    skew = found.pop("skew")
    of_step = ", ".join(f"{part} {100 * share:.1f} %" for part, share in found.items())
    return f"shardwise-ep, of its fastest step: {of_step}; rows of the fuller rank over the mean {skew:.2f}"


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; `--quick` changes the defaults, so other flags still count."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps: does it run?")
    parser.add_argument("--experts", type=names, default=["8", "64"], help="experts of a layer")
    parser.add_argument("--seqs", type=names, default=["256", "32"], help="tokens a sequence")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences a rank")
    parser.add_argument("--systems", type=names, default=list(EXPERT_PEERS), help=", ".join(EXPERT_PEERS))
    parser.add_argument("--versus", type=names, default=["shardwise-2", "transformers-ep"], help="to show ratios to")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each system")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first turn, not measured")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until a silent rank is given up")
    parser.add_argument("--json", type=Path, help="where to write everything measured, after each workload")
    return parse_known_systems(parser, arguments, QUICK, EXPERT_PEERS)


def main(arguments: Sequence[str]) -> None:
    """Measure each workload; print its table and the aim, and write the file."""
    options = parse_options(arguments)
    console, content = start_report(arguments)
    for num_experts, seq_len in itertools.product(map(int, options.experts), map(int, options.seqs)):
        workload = ExpertWorkload("mixtral", "fp32", seq_len, options.micro_batch, num_experts=num_experts)
        records = measure(workload, options.systems, options, console)
        lines = [aim_line(records), share_line(workload, options.rounds * options.steps, options.timeout)]
        report(workload, records, options, lines, content, console)


if __name__ == "__main__":
    main(sys.argv[1:])
