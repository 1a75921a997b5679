"""What states off the device cost: the step on the host, the disk through the tier, whole steps beside DeepSpeed.

- `cpu`: the optimizer's step on the host, as in `cpu_step.py`, beside fused AdamW alone and DeepSpeed's CPUAdam.
- `disk`: what the step reads and writes a second, beside fio, or a bare loop where there is none, by the same blocks
  and as many at a time.
- `step`: a whole step with states on NVMe over the larger of the same step with these states in host memory and the
  time for its bytes at the disk's bandwidth, measured in the same round by the bare loop: read bytes by read bandwidth
  plus written bytes by write bandwidth.
- `peers`: seconds a step and peak memory beside DeepSpeed's offload.

Systems take turns as in `step_time.py`; the first step of a turn is not counted, since what a step leaves to the
background the next one waits for. It measures no GPU: "device" and "host" are one memory here, and what crosses is
copied. DeepSpeed's rows need a compiler, those with NVMe libaio with its headers.

    python benchmarks/offload.py --quick
    python benchmarks/offload.py --sections disk,step --folder /nvme --json offload.json
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import cpu_step
from disk_peers import fio_bandwidth, raw_bandwidth
from offload_peers import DEEPSPEED, OFFLOAD_PEERS, SHARDWISE, OffloadWorkload, TierDisk, layout_of, serve_turns
from pairs import Record, Residents
from shardwise.offload.io_threads import BLOCK_BYTES, NUM_THREADS
from step_time import MB, machine, names, parse_known_systems, parser_of, ratio

GB = 1e9
SECTIONS = ("cpu", "disk", "step", "peers")
QUICK = {
    "models": ["tiny"],
    "seqs": ["32"],
    "ranks": ["1"],
    "rounds": 1,
    "steps": 2,
    "warmup": 1,
    "disk_mib": 192,
    "numel": 5_000_000,
}
FUSED_SHARE, DEEPSPEED_TIME = 0.7, 0.8
DISK_SHARE = 0.95
STEP_RATIO = 1.15
# A system with states on NVMe, and the same with these states in host memory.
ON_HOST = {
    "shardwise-2 nvme": "shardwise-2 host",
    "shardwise-3 nvme": "shardwise-3 host",
    "shardwise-3 all nvme": "shardwise-3 host",
}
# Bytes a second, read and written.
Bandwidth = tuple[float, float]


def aim_line(name: str, reached: float, aim: float, *, at_least: bool = False) -> str:
    """What is aimed at beside what was reached."""
    verdict = "reached" if (reached >= aim if at_least else reached <= aim) else "missed"
    return f"{name}: {reached:.2f}, aim {'>=' if at_least else '<='} {aim:.2f}, {verdict}"


def show_cpu(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """The optimizer's step alone."""
    seconds = cpu_step.measure(cpu_step.ways(options.numel, console), options.rounds)
    console.print(cpu_step.table_of(seconds, options.numel))
    share = 1 / cpu_step.ratio(seconds, cpu_step.SHARDWISE, cpu_step.FUSED)
    console.print(aim_line("fused AdamW alone / shardwise with casts", share, FUSED_SHARE, at_least=True))
    if cpu_step.DEEPSPEED in seconds:
        time = cpu_step.ratio(seconds, cpu_step.SHARDWISE, cpu_step.DEEPSPEED)
        console.print(aim_line("shardwise / deepspeed", time, DEEPSPEED_TIME))
    return {"numel": options.numel, "seconds": seconds}


def show_disk(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """The tier beside fio and the bare loop, round by round."""
    num_bytes = options.disk_mib * 2**20 // (3 * BLOCK_BYTES) * 3 * BLOCK_BYTES
    tier = TierDisk(folder, num_bytes)

    def through_tier() -> Bandwidth:
        written = tier.bandwidth(is_read=False, is_written=True)
        return tier.bandwidth(is_read=True, is_written=False), written

    ways: dict[str, Callable[[], Bandwidth | None]] = {
        "tier": through_tier,
        "fio": lambda: fio_bandwidth(folder, BLOCK_BYTES, NUM_THREADS, num_bytes),
        "bare loop": lambda: raw_bandwidth(folder, BLOCK_BYTES, NUM_THREADS, num_bytes),
    }
    found: dict[str, list[Bandwidth]] = {}
    both: list[float] = []
    try:
        for index in range(options.rounds + 1):  # the first warms up
            first = index % len(ways)
            for name in [*ways][first:] + [*ways][:first]:
                bandwidth = ways[name]()
                if index and bandwidth is not None:
                    found.setdefault(name, []).append(bandwidth)
            if index:
                both.append(tier.bandwidth(is_read=True, is_written=True))
    finally:
        tier.close()
    table = Table("", title=f"disk, {num_bytes / MB:.0f} MB by {BLOCK_BYTES >> 20} MiB, {NUM_THREADS} at a time")
    for heading in ("read GB/s", "write GB/s", "tier / it, read", "write"):
        table.add_column(heading, justify="right")
    for name, own in found.items():
        against = [_disk_ratio(found["tier"], own, index) for index in range(2)]
        medians = [statistics.median(each[index] for each in own) / GB for index in range(2)]
        table.add_row(name, *(f"{each:.2f}" for each in (*medians, *against)))
    console.print(table)
    console.print(f"tier, reading and writing at once: {statistics.median(both) / GB:.2f} GB/s together")
    peer = "fio" if "fio" in found else "bare loop"
    for index, kind in enumerate(("read", "write")):
        reached = _disk_ratio(found["tier"], found[peer], index)
        console.print(aim_line(f"{kind}, tier / {peer}", reached, DISK_SHARE, at_least=True))
    return {"num_bytes": num_bytes, "bandwidths": found, "both": both}


def _disk_ratio(own: Sequence[Bandwidth], other: Sequence[Bandwidth], index: int) -> float:
    return statistics.median(each[index] / peer[index] for each, peer in zip(own, other, strict=True))


def take_turns(
    workload: OffloadWorkload,
    systems: Sequence[str],
    options: argparse.Namespace,
    console: Console,
    between: Callable[[], None] = lambda: None,
) -> dict[str, Record]:
    """All systems under one workload, round by round; `between` runs before each round."""
    records = {system: Record(system, OFFLOAD_PEERS[system].recipes[workload.dtype]) for system in systems}
    residents = Residents(
        workload, options.steps, options.warmup, options.timeout, serve=serve_turns, num_ranks=workload.num_ranks
    )
    try:
        for index in range(options.rounds):
            between()
            first = index % len(systems)
            for system in [*systems[first:], *systems[:first]]:
                record = records[system]
                if record.failure is None:
                    residents.take_turn(record)
                    outcome = record.failure or f"{record.quartiles_s()[1]:.3f} s"
                    console.print(f"{workload}, round {index + 1}, {system}: {outcome}", highlight=False, markup=False)
    finally:
        residents.close()
    return records


def results_table(workload: OffloadWorkload, records: Mapping[str, Record], versus: Sequence[str]) -> Table:
    """A row for each system."""
    table = Table("system", title=f"{workload}, micro-batch {workload.micro_size}, {workload.num_ranks} ranks")
    for heading in ("s a step", "quartiles", *(f"/ {name}" for name in versus), "MB in steps", "first losses"):
        table.add_column(heading, justify="right")
    for system, record in records.items():
        if record.failure is not None:
            table.add_row(system, "failed")
            continue
        low, median_s, high = record.quartiles_s()
        ratios = [ratio(records, system, name) for name in versus]
        table.add_row(
            system,
            f"{median_s:.3f}",
            f"{low:.3f} {high:.3f}",
            *("-" if each is None else f"{each:.3f}" for each in ratios),
            f"{record.step_peak_bytes / MB:.0f}",
            " ".join(f"{loss:.4f}" for loss in record.losses[:3]),
        )
    return table


def show_step(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Whole steps with NVMe against what the disk and the computing need by themselves."""
    content: dict[str, Any] = {}
    for name, seq_len in itertools.product(options.models, map(int, options.seqs)):
        workload = OffloadWorkload(name, options.dtype, seq_len, options.micro_batch, options.clip, 1, str(folder))
        bandwidths: list[Bandwidth] = []
        num_bytes = options.disk_mib * 2**20 // (NUM_THREADS * BLOCK_BYTES) * NUM_THREADS * BLOCK_BYTES

        def measure_disk(num_bytes: int = num_bytes, bandwidths: list[Bandwidth] = bandwidths) -> None:
            bandwidths.append(raw_bandwidth(folder, BLOCK_BYTES, NUM_THREADS, num_bytes))

        compared = {system: host for system, host in ON_HOST.items() if system in options.systems}
        systems = list(dict.fromkeys(itertools.chain(compared.values(), compared)))
        records = take_turns(workload, systems, options, console, measure_disk)
        console.print(results_table(workload, records, list(dict.fromkeys(compared.values()))))
        read, written = (statistics.median(each[index] for each in bandwidths) / GB for index in range(2))
        console.print(f"disk: {read:.2f} GB/s read, {written:.2f} GB/s written")
        for system, host in compared.items():
            if records[system].failure is None and records[host].failure is None:
                bounds = _bounds(workload, system, bandwidths, records[host])
                own = records[system].round_medians_s()
                reached = statistics.median(each / max(bound) for each, bound in zip(own, bounds, strict=True))
                computing, moving = (statistics.median(bound[index] for bound in bounds) for index in range(2))
                line = f"{system} / max(computing {computing:.3f} s, read + write {moving:.3f} s)"
                console.print(aim_line(line, reached, STEP_RATIO))
        content[str(workload)] = {
            "bandwidths": bandwidths,
            "systems": [dataclasses.asdict(record) for record in records.values()],
        }
    return content


def _bounds(
    workload: OffloadWorkload, system: str, bandwidths: Sequence[Bandwidth], host: Record
) -> list[tuple[float, float]]:
    """By round: the step with the states in host memory, and the disk's time for their bytes."""
    across = layout_of(workload, system).bytes_across(1)
    read_bytes, written_bytes = across.get(("nvme", "host"), 0), across.get(("host", "nvme"), 0)
    return [
        (computing_s, read_bytes / read + written_bytes / written)
        for computing_s, (read, written) in zip(host.round_medians_s(), bandwidths, strict=True)
    ]


def show_peers(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Beside DeepSpeed's offload."""
    content: dict[str, Any] = {}
    for name, seq_len, num_ranks in itertools.product(options.models, map(int, options.seqs), map(int, options.ranks)):
        workload = OffloadWorkload(
            name, options.dtype, seq_len, options.micro_batch, options.clip, num_ranks, str(folder)
        )
        records = take_turns(workload, options.systems, options, console)
        console.print(results_table(workload, records, options.versus))
        content[f"{workload}, {num_ranks} ranks"] = [dataclasses.asdict(record) for record in records.values()]
    return content


SHOWN = {"cpu": show_cpu, "disk": show_disk, "step": show_step, "peers": show_peers}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; `--quick` changes the defaults, so other flags still count."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps: does it run?")
    parser.add_argument("--sections", type=names, default=SECTIONS, help=", ".join(SECTIONS))
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a new one where temporary files go")
    parser.add_argument("--disk-mib", type=int, default=768, help="of the files that `disk` and `step` read and write")
    parser.add_argument("--numel", type=int, default=50_000_000, help="parameters that `cpu` steps")
    parser.add_argument("--models", type=names, default=["100m"], help="presets of shardwise.models")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--seqs", type=names, default=["256", "32"], help="tokens a sequence")
    parser.add_argument("--ranks", type=names, default=["1", "2"], help="of `peers`")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences a rank")
    parser.add_argument("--systems", type=names, default=[*SHARDWISE, *DEEPSPEED], help=", ".join(OFFLOAD_PEERS))
    parser.add_argument("--versus", type=names, default=[*DEEPSPEED], help="systems to show ratios to")
    parser.add_argument("--clip", type=float, help="clip gradients to this norm, in every system")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each system")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn that are counted")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first turn, not measured")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds until a silent rank is given up")
    parser.add_argument("--json", type=Path, help="where to write everything measured, after each section")
    return parse_known_systems(parser, arguments, QUICK, OFFLOAD_PEERS)


def main(arguments: Sequence[str]) -> None:
    """Measure each section in turn; print its table and the aims, and write the file."""
    options = parse_options(arguments)
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 160)
    content: dict[str, Any] = {"machine": machine(), "arguments": arguments, "results": {}}
    if options.folder is not None:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="offload-", dir=options.folder) as folder:
        for section in options.sections:
            facts = machine() | {"section": section}
            console.print(", ".join(f"{key} {value}" for key, value in facts.items()), highlight=False)
            content["results"][section] = SHOWN[section](options, Path(folder), console)
            if options.json:
                options.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
