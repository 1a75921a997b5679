"""Seconds a step and peak memory of Shardwise beside DDP, FSDP2 and DeepSpeed, on two CPU ranks over gloo.

Each system lives in its own pair of processes, one thread each. The pairs take turns in an order that rotates
from round to round, so that all meet the same machine; a pair whose turn it is not sleeps on a pipe. Ratios are
taken within a round. It does not measure GPUs, nor more than two ranks.

    python benchmarks/step_time.py --quick
    python benchmarks/step_time.py --models 25m --dtypes bf16 --systems ddp,fsdp2,shardwise-3 --json out.json
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pairs import Record, Residents
from peers import NUM_RANKS, PEERS, Workload

MB = 1e6
COMPUTE_BOUND_SEQ_LEN = 256
NUM_LOSSES_SHOWN = 3
QUICK = {"models": ["tiny"], "dtypes": ["bf16"], "seqs": ["32"], "rounds": 2, "steps": 2, "warmup": 1}


@dataclass(frozen=True)
class Aim:
    """How long a system's step should take at most, as a ratio to a peer's."""

    system: str
    peer: str
    compute_bound: float
    communication_bound: float

    def limit(self, workload: Workload) -> float:
        """The ratio for a workload's sequence length."""
        return self.compute_bound if workload.seq_len >= COMPUTE_BOUND_SEQ_LEN else self.communication_bound


DDP = ("ddp", "ddp-pure", "ddp-master")
AIMS = (
    *(Aim("shardwise-0", peer, 1.00, 1.00) for peer in DDP),
    *(Aim("shardwise-1", peer, 1.02, 1.02) for peer in DDP),
    *(Aim("shardwise-2", peer, 1.02, 1.02) for peer in DDP),
    *(Aim("shardwise-3", peer, 0.92, 0.72) for peer in ("fsdp2", "fsdp2-fp32-reduce", "deepspeed-3")),
)

Records = Mapping[str, Record]


def measure(workload: Workload, systems: list[str], options: argparse.Namespace, console: Console) -> Records:
    """All systems under one workload, round by round."""
    records = {system: Record(system, workload.peers[system].recipes[workload.dtype]) for system in systems}
    residents = Residents(workload, options.steps, options.warmup, options.timeout)
    try:
        for index in range(options.rounds):
            first = index % len(systems)
            for system in systems[first:] + systems[:first]:
                record = records[system]
                if record.failure is None:
                    residents.take_turn(record)
                    outcome = record.failure or f"{record.quartiles_s()[1]:.3f} s"
                    line = f"{workload}, round {index + 1} of {options.rounds}, {system}: {outcome}"
                    console.print(line, highlight=False, markup=False)
    finally:
        residents.close()
    return records


def summarize(record: Record, records: Records, versus: Sequence[str]) -> dict[str, Any]:
    """One system's row: median, spread, peaks, and ratios to those of the systems in `versus` that ran."""
    if record.failure is not None:
        return {}
    low, median, high = record.quartiles_s()
    return {
        "median_s": median,
        "quartiles_s": (low, high),
        "ratios": {name: ratio(records, record.system, name) for name in versus},
        "over_local": ratio(records, record.system, "local"),
        "build_peak_mb": record.build_peak_bytes / MB,
        "step_peak_mb": record.step_peak_bytes / MB,
    }


def ratio(records: Records, system: str, peer: str) -> float | None:
    """One system's step time over another's; nothing where either did not run to the end."""
    own, other = records.get(system), records.get(peer)
    if own is None or other is None or own.failure or other.failure:
        return None
    return own.ratio(other)


def results_table(workload: Workload, records: Records, versus: Sequence[str]) -> Table:
    """One workload's summaries; `over local` is what communication and sharding add to a plain step."""
    table = Table(title=f"{workload}, micro-batch {workload.micro_size}, {NUM_RANKS} ranks")
    table.add_column("system")
    table.add_column("recipe")
    ratio_headings = [f"/ {name}" for name in versus]
    for heading in ("s a step", "quartiles", *ratio_headings, "over local", "MB at build", "MB in steps"):
        table.add_column(heading, justify="right")
    table.add_column("first losses")
    for record in records.values():
        row = summarize(record, records, versus)
        if not row:
            table.add_row(record.system, record.recipe, "failed")
            continue
        table.add_row(
            record.system,
            record.recipe,
            f"{row['median_s']:.3f}",
            "{:.3f} {:.3f}".format(*row["quartiles_s"]),
            *("-" if value is None else f"{value:.3f}" for value in row["ratios"].values()),
            "-" if row["over_local"] is None else f"{row['over_local'] - 1:+.1%}",
            f"{row['build_peak_mb']:.0f}",
            f"{row['step_peak_mb']:.0f}",
            " ".join(f"{loss:.4f}" for loss in record.losses[:NUM_LOSSES_SHOWN]),
        )
    return table


def aim_lines(workload: Workload, records: Records) -> list[str]:
    """What is aimed at beside what was reached, for the systems that ran."""
    lines = []
    for aim in AIMS:
        reached, limit = ratio(records, aim.system, aim.peer), aim.limit(workload)
        if reached is not None:
            verdict = "reached" if reached <= limit else "missed"
            lines.append(f"{aim.system} / {aim.peer}: {reached:.3f}, aim {limit:.2f}, {verdict}")
    return lines + memory_lines(records)


def memory_lines(records: Records) -> list[str]:
    """The same for memory: stage 3 should hold less at its peak than any system of others."""
    peaks = {system: record.peak_bytes for system, record in records.items() if record.failure is None}
    own = peaks.get("shardwise-3")
    others = {system: peak for system, peak in peaks.items() if PEERS[system].package != "shardwise.engine.engine"}
    others.pop("local", None)
    if own is None or not others:
        return []
    least = min(others, key=others.__getitem__)
    verdict = "reached" if own <= others[least] else "missed"
    return [f"shardwise-3 peak: {own / MB:.0f} MB, aim {others[least] / MB:.0f} ({least}, the least), {verdict}"]


def machine() -> dict[str, str]:
    """The machine, what else it is doing, and the versions that a result depends on."""
    cpu_info = Path("/proc/cpuinfo").read_text()
    packages = [package for package in ("torch", "shardwise", "deepspeed") if is_installed(package)]
    return {
        "cpu": cpu_info.partition("model name")[2].partition(":")[2].partition("\n")[0].strip(),
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
    } | {package: importlib.metadata.version(package) for package in packages}


def is_installed(package: str) -> bool:
    """Whether a package, or a module of one, can be imported."""
    return importlib.util.find_spec(package) is not None


def runnable(systems: list[str], console: Console) -> list[str]:
    """The systems whose package is installed; the others are named with the reason."""
    missing = [system for system in systems if not is_installed(PEERS[system].package)]
    for system in missing:
        console.print(f"skipped {system}: {PEERS[system].package} is not installed")
    return [system for system in systems if system not in missing]


def names(text: str) -> list[str]:
    """The parts of an option's value that are parted by commas."""
    return text.split(",")


def parser_of(documentation: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a script's documentation."""
    summary, _, details = (documentation or "").partition("\n\n")
    return argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; `--quick` changes the defaults, so other flags still count."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps: does it run?")
    parser.add_argument("--models", type=names, default=["25m", "100m"], help="presets of shardwise.models")
    parser.add_argument("--dtypes", type=names, default=["bf16", "fp32"])
    parser.add_argument("--seqs", type=names, default=["256", "32"], help="tokens a sequence")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences a rank")
    parser.add_argument("--systems", type=names, default=list(PEERS), help=", ".join(PEERS))
    parser.add_argument("--versus", type=names, default=["ddp", "fsdp2"], help="systems to show ratios to")
    parser.add_argument("--clip", type=float, help="clip gradients to this norm, in every system")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each system")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first turn, not measured")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds until a silent rank is given up")
    parser.add_argument("--json", type=Path, help="where to write everything measured, after each workload")
    return parse_known_systems(parser, arguments, QUICK, PEERS)


def parse_known_systems(
    parser: argparse.ArgumentParser, arguments: Sequence[str], quick: Mapping[str, Any], peers: Mapping[str, Any]
) -> argparse.Namespace:
    """Parse; `--quick` changes the defaults to `quick`, and systems that are none of `peers` are refused."""
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**quick)
    options = parser.parse_args(arguments)
    for system in (*options.systems, *options.versus):
        if system not in peers:
            parser.error(f"{system} is not a system; systems are {', '.join(peers)}")
    return options


def keep_results(content: dict[str, Any], workload: Any, records: Records, options: argparse.Namespace) -> None:
    """Add a workload's results to the content, and write the file if one is wanted."""
    rows = [dataclasses.asdict(record) | summarize(record, records, options.versus) for record in records.values()]
    content["results"].append({"workload": dataclasses.asdict(workload), "systems": rows})
    if options.json:
        options.json.write_text(json.dumps(content, indent=1))


def start_report(arguments: Sequence[str]) -> tuple[Console, dict[str, Any]]:
    """Print the machine; return where to print, and the content of the file."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    content: dict[str, Any] = {"machine": machine(), "arguments": arguments, "results": []}
    console.print(", ".join(f"{key} {value}" for key, value in content["machine"].items()), highlight=False)
    return console, content


def report(
    workload: Workload,
    records: Records,
    options: argparse.Namespace,
    lines: Iterable[str],
    content: dict[str, Any],
    console: Console,
) -> None:
    """Print a workload's table, the lines beside it and what has failed, and keep its results."""
    console.print(results_table(workload, records, options.versus))
    for line in lines:
        console.print(line, highlight=False)
    for record in records.values():
        if record.failure is not None:
            console.print(f"{record.system} failed: {record.failure}", highlight=False, markup=False)
    keep_results(content, workload, records, options)


def main(arguments: Sequence[str]) -> None:
    """Measure each workload in turn; print its table and the aims, and write the file."""
    options = parse_options(arguments)
    console, content = start_report(arguments)
    systems = runnable(options.systems, console)
    for name, dtype, seq_len in itertools.product(options.models, options.dtypes, map(int, options.seqs)):
        workload = Workload(name, dtype, seq_len, options.micro_batch, options.clip)
        able = [system for system in systems if dtype in PEERS[system].recipes]
        records = measure(workload, able, options, console)
        console.print(results_table(workload, records, options.versus))
        for line in aim_lines(workload, records):
            console.print(line, highlight=False)
        keep_results(content, workload, records, options)


if __name__ == "__main__":
    main(sys.argv[1:])
