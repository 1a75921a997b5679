"""Seconds of saving and loading 1 GB of state, beside the bare disk and torch's DCP, on two CPU ranks over gloo.

A decoder of 12 layers in fp32 with AdamW's states. For each operation the systems take turns in an order that rotates
from round to round, and ratios are taken within a round, as in `step_time.py`. Every save ends on the disk (fsync).
`warm`: the files are in the page cache; `cold`: they are not (the disk may have a cache of its own). `save aside`: how
long a save in the background holds up training.

    python benchmarks/checkpoint.py --quick
    python benchmarks/checkpoint.py --folder /scratch --json checkpoint.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpoint_peers import CHECKPOINT_PEERS, OPERATIONS, CheckpointWorkload, Sample, serve, serve_alone
from pairs import Pair, Record
from peers import FP32
from step_time import MB, machine, ratio

SAVE, BACKGROUND = "save", "save aside"
WARM, COLD, ALONE = "load warm", "load cold", "load from 1 rank"
UNABLE = {"raw": (BACKGROUND, ALONE), "dd": tuple(each for each in OPERATIONS if each != SAVE)}
LARGE, SMALL = "12 x 768", "2 x 128"
QUICK = {"model": SMALL, "rounds": 1}
MIN_OF_RAW, MAX_OF_DCP, MAX_SHARE = 0.8, 1.0, 0.05


@dataclass
class Row(Record):
    """One system under one operation; figures by round, the worst rank's. The first round warms up."""

    first: dict[str, float] = field(default_factory=dict)
    figures: list[dict[str, float]] = field(default_factory=list)

    def add(self, samples: Sequence[Sample], *, is_first: bool) -> None:
        """Keep a turn's samples, one a rank."""
        worst = {name: max(sample.figures[name] for sample in samples) for name in samples[0].figures}
        if is_first:
            self.first = {"seconds": max(sample.seconds for sample in samples), **worst}
        else:
            self.figures.append(worst)
            self.rounds.append([[sample.seconds for sample in samples]])

    def figure(self, name: str) -> float | None:
        """The median over rounds; of memory the most of all, the first round too."""
        values = [figures[name] for figures in self.figures if name in figures]
        if name == "peak_bytes" and values:
            return max(*values, self.first[name])
        return statistics.median(values) if values else None


Rows = Mapping[str, Row]


def able(system: str, operation: str) -> bool:
    """Whether a system knows an operation."""
    return operation not in UNABLE.get(system, ())


def measure(
    pairs: Mapping[str, Pair], operation: str, workload: CheckpointWorkload, num_rounds: int, console: Console
) -> Rows:
    """All systems that know an operation, round by round."""
    systems = [system for system in pairs if able(system, operation)]
    rows = {system: Row(system, CHECKPOINT_PEERS[system].recipes[FP32]) for system in systems}
    for index in range(num_rounds + 1):
        first = index % len(systems)
        for system in systems[first:] + systems[:first]:
            rows[system].add(pairs[system].ask(operation), is_first=index == 0)
        taken = ", ".join(f"{system} {row.rounds[-1][0][0]:.3f} s" for system, row in rows.items() if row.rounds)
        console.print(f"{operation}, round {index} of {num_rounds}: {taken or 'warm-up'}", highlight=False)
    return rows


def results_table(operation: str, workload: CheckpointWorkload, rows: Rows) -> Table:
    """One operation's figures."""
    table = Table(title=f"{operation}, {workload.state_bytes() / 1e9:.2f} GB")
    for heading in ("system", "recipe"):
        table.add_column(heading)
    headings = ["s", "quartiles", "first", "GB/s", "/ raw", "/ dcp", "MB above rest"]
    if operation == BACKGROUND:
        headings = ["s blocked", "quartiles", "first", "s in all", "blocked", "/ dcp", "steps beside it"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for system, row in rows.items():
        low, median, high = row.quartiles_s()
        cells = [f"{median:.3f}", f"{low:.3f} {high:.3f}", f"{row.first['seconds']:.3f}"]
        over_dcp = _shown(ratio(rows, system, "dcp"))
        if operation == BACKGROUND:
            share, slower = _shown(row.figure("share"), "{:.1%}"), _shown(row.figure("slower"), "x {:.2f}")
            cells += [_shown(row.figure("whole_s")), share, over_dcp, slower]
        else:
            peak_bytes = row.figure("peak_bytes")
            speed = f"{workload.state_bytes() / 1e9 / median:.2f}"
            peak_mb = None if peak_bytes is None else peak_bytes / MB
            cells += [speed, _shown(ratio(rows, system, "raw")), over_dcp, _shown(peak_mb, "{:.0f}")]
        table.add_row(system, row.recipe, *cells)
    return table


def _shown(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def aim_line(operation: str, rows: Rows) -> str | None:
    """What is aimed at beside what was reached; nothing where the other side did not run."""
    if operation == BACKGROUND:
        share = rows["shardwise"].figure("share") if "shardwise" in rows else None
        return None if share is None else _judged("blocked / save", share, MAX_SHARE, share <= MAX_SHARE)
    peer = "raw" if operation == SAVE else "dcp"
    over = ratio(rows, "shardwise", peer)
    if over is None:
        return None
    if operation == SAVE:
        return _judged("throughput / raw", 1 / over, MIN_OF_RAW, 1 / over >= MIN_OF_RAW)
    return _judged(f"time / {peer}", over, MAX_OF_DCP, over <= MAX_OF_DCP)


def _judged(what: str, reached: float, aim: float, is_reached: bool) -> str:
    return f"shardwise {what}: {reached:.3f}, aim {aim:.2f}, {'reached' if is_reached else 'missed'}"


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; `--quick` changes the defaults, so other flags still count."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--quick", action="store_true", help="a small model, one round: does it run?")
    parser.add_argument("--model", default=LARGE, help="layers x hidden size")
    for flag, known in (("--systems", CHECKPOINT_PEERS), ("--operations", OPERATIONS)):
        parser.add_argument(flag, type=names, default=list(known), help=", ".join(known))
    parser.add_argument("--rounds", type=int, default=7, help="turns of each system, after one that warms up")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the system's for temporary files if none")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until a silent rank is given up")
    parser.add_argument("--json", type=Path, help="where to write everything measured, after each operation")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    for wanted, known in ((options.systems, CHECKPOINT_PEERS), (options.operations, OPERATIONS)):
        if unknown := [name for name in wanted if name not in known]:
            parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    if COLD in options.operations or WARM in options.operations:
        options.operations = list(dict.fromkeys([SAVE, *options.operations]))  # which loads read
    return options


def start(system: str, workload: CheckpointWorkload, options: argparse.Namespace) -> Pair:
    """The two ranks of a system, and what a single rank has saved for them to load."""
    if ALONE in options.operations and able(system, ALONE):
        Pair(system, workload, options.timeout, serve_alone, num_ranks=1).close()
    return Pair(system, workload, options.timeout, serve)


def run(workload: CheckpointWorkload, systems: Sequence[str], options: argparse.Namespace, console: Console) -> None:
    """Measure every operation; print its table and aim, and write the file."""
    content: dict[str, Any] = {"machine": machine(), "options": vars(options), "results": []}
    console.print(", ".join(f"{key} {value}" for key, value in content["machine"].items()), highlight=False)
    pairs: dict[str, Pair] = {}
    try:
        for system in systems:
            if any(able(system, operation) for operation in options.operations):
                pairs[system] = start(system, workload, options)
        for operation in options.operations:
            rows = measure(pairs, operation, workload, options.rounds, console)
            console.print(results_table(operation, workload, rows))
            if (line := aim_line(operation, rows)) is not None:
                console.print(line, highlight=False)
            content["results"].append({"operation": operation, "systems": list(map(dataclasses.asdict, rows.values()))})
            if options.json:
                options.json.write_text(json.dumps(content, indent=1, default=str))
    finally:
        for pair in pairs.values():
            pair.close()


def main(arguments: Sequence[str]) -> None:
    """Measure in a folder that is gone afterwards."""
    options = parse_options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    systems = [system for system in options.systems if system != "dd" or shutil.which("dd")]
    with tempfile.TemporaryDirectory(prefix="shardwise-checkpoints-", dir=options.folder) as folder:
        workload = CheckpointWorkload(options.model, FP32, seq_len=16, micro_size=1, folder=folder)
        try:
            run(workload, systems, options, console)
        finally:
            for source in Path("/dev/shm").glob(f"{Path(folder).name}-*"):
                source.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
