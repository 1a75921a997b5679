"""Steps and memory of real runs on this machine, beside what the planner said of them before.

Fifteen configs on CPU processes over gloo, one thread each: ZeRO stages 0 to 3, tensor, context and pipeline
parallelism, states on the host, on disk and in int8, recomputation, adapters of a Hugging Face model. The machine is
calibrated first (`shardwise doctor --calibrate`), by as many
ranks as a config has, unless profiles are given; nothing of the runs themselves goes into the predictions. The configs
take turns in an order that rotates; of five turns the median counts. Memory is the library's own memory tracker's, and
is said twice before: by the planner's formulas, and by the engine on fake tensors, as of a plan's finalists.

    python benchmarks/planner_machine.py --quick
    python benchmarks/planner_machine.py --json machine.json --markdown machine.md
    python benchmarks/planner_machine.py --profiles profiles --cases zero-3,tp-2
    python benchmarks/planner_machine.py --memory --markdown memory.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from pairs import Pair, SystemFailedError  # it gives the ranks one thread each
from peers import FP32, Peer, Workload, optimizer_section
from shardwise.config.resolve import Config
from shardwise.doctor.calibrate import calibrate
from shardwise.models import Decoder
from shardwise.planner.hardware import cluster_of
from shardwise.planner.profile import MatmulTime, Profile, find_profile, write_profile
from shardwise.planner.request import job_of
from shardwise.planner.results import Estimate
from shardwise.planner.search import Pricer
from shardwise.runtime.memory_tracker import Category
from shardwise.train.job_model import job_model
from shardwise.verify.finalists import peak_of
from step_time import machine, names, parser_of

STEP_AIM, ESTIMATE_AIM, PEAK_AIM = 0.15, 0.03, 0.01
MIB = 2**20
STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One config and how many ranks it has."""

    num_ranks: int = 2
    model: str = "25m"
    dtype: str = "bf16"
    seq_len: int = 256
    micro_size: int = 4
    accumulation: int = 1
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def values(self, folder: str) -> dict[str, Any]:
        """Return the whole config; `folder` is for what is stored on NVMe."""
        workload = Workload(self.model, self.dtype, self.seq_len, self.micro_size)
        sections: dict[str, dict[str, Any]] = {
            "model": {"preset": self.model},
            "data": {"seq_len": self.seq_len},
            "batch": {"micro_size": self.micro_size, "accumulation": self.accumulation},
            "precision": {"param": self.dtype},
            "optimizer": optimizer_section(workload),
            "scheduler": {"name": "constant"},
            "run": {"device": "cpu"},
            **{name: dict(section) for name, section in self.sections.items()},
        }
        if "nvme" in sections.get("tiers", {}).values():
            sections["tiers"]["nvme_path"] = folder
        if "lora" in sections:
            sections["model"] = {"path": str(huggingface_folder(Path(folder)))}
        return sections

    def config(self, folder: str) -> Config:
        """As the engine gets it."""
        return Config.from_dict(self.values(folder))


def huggingface_folder(folder: Path) -> Path:
    """Write a small Llama where there is none yet, and return its folder."""
    made = folder / "llama"
    if made.exists():
        return made
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 8192}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)).save_pretrained(made)
    return made


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "one rank": Case(num_ranks=1, dtype="fp32"),
        "zero-0": Case(sections={"zero": {"stage": 0}}),
        "zero-1": Case(model="100m", sections={"zero": {"stage": 1}}),
        "zero-2": Case(dtype="fp32", accumulation=2, sections={"zero": {"stage": 2}}),
        "zero-3": Case(sections={"zero": {"stage": 3}}),
        "zero-3 recompute": Case(model="100m", sections={"zero": {"stage": 3}, "recompute": {"mode": "full"}}),
        "optimizer on host": Case(sections={"zero": {"stage": 2}, "tiers": {"optimizer": "host", "grads": "host"}}),
        "params on disk": Case(
            sections={"zero": {"stage": 3}, "tiers": {"params": "nvme", "optimizer": "nvme", "grads": "host"}}
        ),
        "int8 states": Case(
            dtype="fp32", sections={"zero": {"stage": 2}, "precision": {"param": "fp32", "states": "int8"}}
        ),
        "lora": Case(sections={"zero": {"stage": 3}, "lora": {"rank": 8}}),
        "cp-2": Case(seq_len=512, micro_size=2, sections={"mesh": {"cp": 2}, "zero": {"stage": 3}}),
        "tp-2": Case(dtype="fp32", sections={"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}}),
        "pp-2 1f1b": Case(
            dtype="fp32", micro_size=2, accumulation=4, sections={"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}
        ),
        "pp-2 zb-h1": Case(
            model="100m", micro_size=1, accumulation=6, sections={"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}}
        ),
        "tp-2 dp-2": Case(num_ranks=4, micro_size=2, sections={"mesh": {"tp": 2}, "zero": {"stage": 1}}),
    }
)
QUICK = ("zero-3", "pp-2 1f1b")


@dataclass(frozen=True)
class MachineWorkload(Workload):
    """What one case trains, as `pairs` starts it."""

    case: str = ""
    folder: str = ""
    shape: str = ""

    @property
    def peers(self) -> Mapping[str, Peer]:
        """All cases, by name."""
        return dict.fromkeys(CASES, Peer({self.dtype: FP32}, _never, "shardwise.engine.engine"))


@dataclass
class Measured:
    """Of one case: seconds by turn, step and rank, and bytes by rank."""

    step_s: list[list[list[float]]] = field(default_factory=list)
    at_rest: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    failure: str | None = None

    @property
    def median_s(self) -> float:
        """Of the turns' medians of the slowest rank's steps."""
        return statistics.median(
            statistics.median(max(ranks) for ranks in zip(*turn, strict=True)) for turn in self.step_s
        )


def shrunk(case: Case, preset: str | None) -> Case:
    """The same of another model, for a quick look."""
    return case if preset is None else replace(case, model=preset, seq_len=64)


def serve(connection: Connection, system: str, workload: MachineWorkload, rank: int) -> None:
    """Be a rank of a case: steps by turn, and on the number -1 what memory holds."""
    case = shrunk(CASES[system], workload.shape or None)
    config = case.config(workload.folder)
    torch.manual_seed(0)
    model = job_model(config)
    engine = model.initialize(config)
    tokens = torch.randint(model.vocab_size, (case.micro_size, case.seq_len))  # [B, S]
    batches = [model.batch((tokens, tokens))] * case.accumulation
    connection.send(None)
    while num_steps := connection.recv():
        if num_steps < 0:
            engine.memory.reset_peak()
            with engine.memory.meter():
                engine.train_step(batches)
            here, host = engine.memory.snapshot(), engine.tiers.memory.snapshot()
            states = sum(part.live_bytes[category] for part in (here, host) for category in STATES)
            connection.send((states - counter_bytes(engine), here.peak_bytes))
            continue
        dist.barrier()
        seconds = []
        for _ in range(num_steps):
            start_s = time.perf_counter()
            engine.train_step(batches)
            seconds.append(time.perf_counter() - start_s)
        engine.tiers.wait_idle()
        connection.send(seconds)


def counter_bytes(engine: Any) -> int:
    """Of the optimizer's step counts, which the Layout leaves out."""
    values = [value for state in engine.optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.dim() == 0)


def predict(case: Case, profile: Profile, folder: str) -> Estimate:
    """What the planner says of a case, of a machine measured with as many ranks."""
    config = case.config(folder)
    cluster = cluster_of(profile, case.num_ranks)
    job = job_of(config, cluster)
    return Pricer(job).price(config.resolve(case.num_ranks))


def simulated(case: Case, price: Estimate, folder: str) -> float:
    """Bytes at the peak of the engine on fake tensors, as of a plan's finalists."""
    rank = price.memory.worst.pipeline_rank * case.num_ranks // price.config.mesh.pp
    return sum(peak_of(case.config(folder).model_dump_json(), case.num_ranks, rank).values())


def measure(name: str, options: argparse.Namespace, folder: str) -> Pair:
    """Start a case's processes and let them warm up."""
    case = shrunk(CASES[name], options.model)
    workload = MachineWorkload(
        case.model, case.dtype, case.seq_len, case.micro_size, case=name, folder=folder, shape=options.model or ""
    )
    pair = Pair(name, workload, options.timeout, serve, case.num_ranks)
    pair.ask(options.warmup)
    return pair


def run_all(options: argparse.Namespace, folder: str, console: Console) -> dict[str, Measured]:
    """All cases, turn by turn; a case's processes live for its turn, so that others have the memory."""
    measured = {name: Measured() for name in options.cases}
    for index in range(options.rounds):
        first = index % len(options.cases)
        for name in (*options.cases[first:], *options.cases[:first]):
            record = measured[name]
            if record.failure is not None:
                continue
            try:
                pair = measure(name, options, folder)
                record.step_s.append(pair.ask(options.steps))
                if index == 0:
                    record.at_rest, record.peak = map(list, zip(*pair.ask(-1), strict=True))
                pair.close()
                line = f"round {index + 1} of {options.rounds}, {name}: {record.median_s:.3f} s"
            except SystemFailedError as error:
                record.failure, line = str(error), f"{name} failed: {error}"
            console.print(line, highlight=False, markup=False)
    return measured


def profiles_of(options: argparse.Namespace, folder: Path, console: Console) -> dict[int, Profile]:
    """By number of ranks: kept ones, else measured now."""
    found: dict[int, Profile] = {}
    if options.memory:
        product = MatmulTime(dtype="fp32", m=1, n=1, k=1, seconds=1e-9)
        plain = Profile(device="cpu", num_ranks=1, num_threads=1, memory_bytes=1e12, matmuls=(product,))
        return {case.num_ranks: replace(plain, num_ranks=case.num_ranks) for case in CASES.values()}
    for num_ranks in sorted({CASES[name].num_ranks for name in options.cases}):
        kept = find_profile(folder, "cpu", num_ranks)
        if kept is None or kept.num_ranks != num_ranks:
            console.print(f"calibrating with {num_ranks} ranks", highlight=False)
            kept, failure = calibrate("cpu", num_ranks, os.environ, folder, quick=options.quick)
            if failure is not None:
                console.print(f"not all was measured: {failure}", highlight=False, markup=False)
            write_profile(kept, folder)
        found[num_ranks] = kept
    return found


def row_of(name: str, measured: Measured, price: Estimate, simulated_bytes: float) -> dict[str, Any]:
    """Predicted beside measured, the worst rank's memory; ratios are predicted by measured."""
    row: dict[str, Any] = {
        "case": name,
        "predicted_s": price.time.step_s,
        "parts_s": dict(price.time.parts),
        "failure": measured.failure,
    }
    if measured.failure is None:
        ranks = price.memory.ranks
        # The memory tracker sees the device and the host, not files.
        at_rest = max(sum(each.at_rest.values()) - each.elsewhere.get("nvme", 0) for each in ranks)
        estimated_bytes, measured_bytes = price.memory.worst.peak_bytes, max(measured.peak)
        row |= {
            "measured_s": measured.median_s,
            "rounds_s": measured.step_s,
            "step_error": price.time.step_s / measured.median_s - 1,
            "predicted_at_rest_bytes": at_rest,
            "measured_at_rest_bytes": max(measured.at_rest),
            "estimated_peak_bytes": estimated_bytes,
            "simulated_peak_bytes": simulated_bytes,
            "measured_peak_bytes": measured_bytes,
            "estimate_error": estimated_bytes / measured_bytes - 1,
            "peak_error": simulated_bytes / measured_bytes - 1,
        }
    return row


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Of one case, for people."""
    if row["failure"] is not None:
        return (row["case"], "failed")
    return (
        row["case"],
        f"{row['predicted_s']:.3f}",
        f"{row['measured_s']:.3f}",
        f"{row['step_error']:+.1%}",
        f"{(row['predicted_at_rest_bytes'] - row['measured_at_rest_bytes']) / MIB:+.3f}",
        f"{row['estimated_peak_bytes'] / MIB:.0f}",
        f"{row['estimate_error']:+.1%}",
        f"{row['simulated_peak_bytes'] / MIB:.0f}",
        f"{row['peak_error']:+.1%}",
        f"{row['measured_peak_bytes'] / MIB:.0f}",
    )


HEADINGS = (
    "config",
    "predicted s",
    "measured s",
    "error",
    "MiB at rest off by",
    "MiB at peak estimated",
    "error",
    "simulated",
    "error",
    "measured",
)
TIMES = slice(1, 4)  # of the headings


def verdicts(rows: Sequence[Mapping[str, Any]], *, with_times: bool) -> list[str]:
    """What is aimed at beside what was reached."""
    whole = [row for row in rows if row["failure"] is None]
    lines = []
    aims = [("estimate_error", ESTIMATE_AIM, "estimated peak"), ("peak_error", PEAK_AIM, "simulated peak")]
    for key, aim, what in ([("step_error", STEP_AIM, "step time")] if with_times else []) + aims:
        within = sum(abs(row[key]) <= aim for row in whole)
        worst = max((abs(row[key]) for row in whole), default=0.0)
        lines.append(f"{what} within {aim:.0%}: {within} of {len(rows)}, worst {worst:.1%}")
    return lines


def table_of(rows: Sequence[Mapping[str, Any]], *, with_times: bool) -> list[list[str]]:
    """Headings and a line for each row."""
    lines = [list(HEADINGS), *(list(cells(row)) for row in rows)]
    if not with_times:
        for line in lines:
            del line[TIMES]
    return lines


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table for docs/benchmarks.md."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; `--quick` changes the defaults, so other flags still count."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="two cases of the tiny model: does it run?")
    parser.add_argument("--cases", type=names, default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--memory", action="store_true", help="memory alone: no calibration, one step")
    parser.add_argument("--model", help="a preset for all cases instead of their own")
    parser.add_argument("--profiles", type=Path, help="where profiles are kept, or will be")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps before each turn, not measured")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until a silent rank is given up")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    parser.add_argument("--markdown", type=Path, help="where to write the table")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(cases=list(QUICK), model="tiny", rounds=1, steps=1, warmup=1)
    if parser.parse_args(arguments).memory:
        parser.set_defaults(rounds=1, steps=1, warmup=1)
    options = parser.parse_args(arguments)
    for name in options.cases:
        if name not in CASES:
            parser.error(f"{name} is not a case; cases are {', '.join(CASES)}")
    return options


def main(arguments: Sequence[str]) -> None:
    """Calibrate, predict, run, compare."""
    options = parse_options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    about = machine()
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), highlight=False)
    with tempfile.TemporaryDirectory(prefix="planner-machine-") as folder:
        profiles = profiles_of(options, options.profiles or Path(folder), console)
        prices = {
            name: predict(case, profiles[case.num_ranks], folder)
            for name in options.cases
            for case in [shrunk(CASES[name], options.model)]
        }
        peaks = {name: simulated(shrunk(CASES[name], options.model), prices[name], folder) for name in options.cases}
        measured = run_all(options, folder, console)
    rows = [row_of(name, measured[name], prices[name], peaks[name]) for name in options.cases]
    lines = table_of(rows, with_times=not options.memory)
    table = Table(*lines[0], title="the planner's predictions beside real runs")
    for shown in lines[1:]:
        table.add_row(*shown)
    console.print(table)
    for line in itertools.chain(
        verdicts(rows, with_times=not options.memory),
        (f"{row['case']}: {row['failure']}" for row in rows if row["failure"]),
    ):
        console.print(line, highlight=False, markup=False)
    if options.json:
        content = {"machine": about, "arguments": list(arguments), "results": rows}
        content["profiles"] = {count: asdict(profile) for count, profile in profiles.items()}
        options.json.write_text(json.dumps(content, indent=1))
    if options.markdown:
        options.markdown.write_text(markdown(lines))


def _never(model: Decoder, workload: Workload) -> Any:
    raise NotImplementedError("cases are built by `serve`")


if __name__ == "__main__":
    main(sys.argv[1:])
