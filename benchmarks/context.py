"""Seconds of forward and backward, and memory, of one sequence over two CPU ranks, beside one process and torch.

A decoder of four layers, hidden size 256, 8 heads of 64 and 4 KV heads, in fp32 over gloo, one thread a rank; sequences
grow. `each` is the whole sequence on both ranks, one thread each; `one` is one process with both threads; `hand`, for
dense attention, gathers keys and values and masks torch's attention. Systems take turns as in `step_time.py`; ratios
are taken within a round. The losses must agree. Memory is the tracker's, of ranks simulated over fake tensors
(`shardwise.simulate`), so lengths are not bound by this machine.

    python benchmarks/context.py --quick
    python benchmarks/context.py --json context.json
    python benchmarks/context.py --attention window --lengths 16384 --systems each,ring
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import shardwise
from context_peers import CONTEXT_PEERS, STRUCTURES, ContextWorkload, context_config, shape_of
from shardwise.models import Decoder, lm_loss
from shardwise.runtime.format import format_bytes
from shardwise.runtime.memory_tracker import Category
from step_time import (
    Records,
    keep_results,
    measure,
    names,
    parse_known_systems,
    parser_of,
    ratio,
    results_table,
    start_report,
)

MEMORY_AIM = 0.10  # how far a rank's activations may be from 1 / cp of one process's
QUICK = {"lengths": ["512"], "memory_lengths": ["2048"], "degrees": ["4"], "rounds": 2, "steps": 1, "warmup": 1}


def activation_bytes(seq_len: int, attention: str, degree: int, transport: str) -> int:
    """The most bytes of activations that a rank holds in a step, the embedding and the head's loss included."""
    context = {"transport": transport} if degree > 1 else {}
    config = context_config(context, micro_size=1, num_ranks=degree)
    config["attention"] = STRUCTURES[attention].model_dump(exclude_none=True)
    shape = shape_of(attention, seq_len)
    simulation = shardwise.simulate(
        lambda: Decoder(shape, device="meta"),
        config,
        lambda: (torch.zeros(1, seq_len, dtype=torch.int64), torch.zeros(1, seq_len, dtype=torch.int64)),
        loss_fn=lambda logits, batch: lm_loss(logits, batch[1]),
        rank=0,
        world_size=degree,
    )
    return simulation.peak.peak_live_bytes[Category.ACTIVATIONS]


def memory_table(options: argparse.Namespace) -> tuple[Table, list[dict[str, Any]]]:
    """Activations a rank by length and degree, and how far from 1 / cp of one process's."""
    table = Table(title=f"activations a rank, {options.attention} attention, micro-batch 1, fp32")
    degrees = [1, *map(int, options.degrees)]
    for heading in ("tokens", "transport", *(f"cp={degree}" for degree in degrees)):
        table.add_column(heading, justify="right")
    rows = []
    for seq_len in map(int, options.memory_lengths):
        whole = activation_bytes(seq_len, options.attention, 1, transport="none")
        for transport in ("ring", "all-gather", "ulysses"):
            # Ulysses shares KV heads where the ranks are more; 8 heads are no more than 8 ranks.
            parts = [activation_bytes(seq_len, options.attention, degree, transport) for degree in degrees[1:]]
            found = [whole, *parts]
            off = [num_bytes * degree / found[0] - 1 for num_bytes, degree in zip(found, degrees, strict=True)]
            cells = [f"{format_bytes(num_bytes)} ({each:+.1%})" for num_bytes, each in zip(found, off, strict=True)]
            table.add_row(f"{seq_len:,}", transport, *cells)
            rows.append({"num_tokens": seq_len, "transport": transport, "activation_bytes": found})
    return table, rows


def aim_lines(records: Records) -> list[str]:
    """Each system's time beside that of one process, with one thread and with two, and of an all-gather by hand."""
    lines = []
    for name in records:
        if name in ("each", "one", "torch", "hand"):
            continue
        parts = [
            f"{found:.3f} of {peer}" for peer in ("each", "one") if (found := ratio(records, name, peer)) is not None
        ]
        lines.append(f"{name}: {', '.join(parts)}" if parts else f"{name}: nothing to compare with")
    return lines


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; `--quick` changes the defaults, so other flags still count."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="short sequences, few steps: does it run?")
    parser.add_argument("--attention", choices=list(STRUCTURES), default="dense")
    parser.add_argument("--lengths", type=names, default=["2048", "4096", "8192", "16384"], help="tokens, timed")
    parser.add_argument("--memory-lengths", type=names, default=["16384", "65536"], help="tokens, simulated")
    parser.add_argument("--degrees", type=names, default=["2", "4", "8"], help="of cp, simulated beside one process")
    parser.add_argument("--systems", type=names, default=list(CONTEXT_PEERS), help=", ".join(CONTEXT_PEERS))
    parser.add_argument("--versus", type=names, default=["each", "one"], help="systems to show ratios to")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each system")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the first turn, not measured")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until a silent rank is given up")
    parser.add_argument("--json", type=Path, help="where to write everything measured, after each workload")
    return parse_known_systems(parser, arguments, QUICK, CONTEXT_PEERS)


def main(arguments: Sequence[str]) -> None:
    """Print the memory, then measure each length; print its table, and write the file."""
    options = parse_options(arguments)
    console, content = start_report(arguments)
    table, content["memory"] = memory_table(options)
    console.print(table)
    for seq_len in map(int, options.lengths):
        workload = ContextWorkload("4 x 256", "fp32", seq_len, 1, attention=options.attention)
        records = measure(workload, options.systems, options, console)
        console.print(results_table(workload, records, options.versus))
        for line in aim_lines(records):
            console.print(line, highlight=False)
        for record in records.values():
            if record.failure is not None:
                reason = record.failure.strip().splitlines()[-1]
                console.print(f"{record.system} failed: {reason}", highlight=False, markup=False)
        keep_results(content, workload, records, options)


if __name__ == "__main__":
    main(sys.argv[1:])
