"""Seconds and resident memory that building a model takes: plainly, and inside `shardwise.init()`.

Each way runs in a fresh process with one thread; the figure is the kernel's high-water mark beyond what the process had
held before. Nothing is trained.

    python benchmarks/construction.py --model 1b
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from step_time import machine

BUILD = """
import contextlib, json, resource, sys, time, torch, shardwise
from shardwise.models import Decoder
from shardwise.models.presets import preset
torch.set_num_threads(1)
context = {contexts}[sys.argv[1]]
config = preset(sys.argv[2])
with shardwise.init():  # imports what it needs
    torch.nn.Linear(1, 1)
before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
start_s = time.perf_counter()
with context():
    model = Decoder(config)
print(json.dumps({{
    "build_s": time.perf_counter() - start_s,
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before_mib,
    "num_params": sum(parameter.numel() for parameter in model.parameters()),
}}))
"""
CONTEXTS: Mapping[str, str] = {
    "plainly": "contextlib.nullcontext",
    "shardwise.init()": "shardwise.init",
    "shardwise.init(seed=0)": "lambda: shardwise.init(seed=0)",
}


def measure(way: str, model: str) -> dict[str, float]:
    """What one way of building takes, in a process of its own."""
    contexts = "{" + ", ".join(f"{key!r}: {value}" for key, value in CONTEXTS.items()) + "}"
    command = [sys.executable, "-c", BUILD.format(contexts=contexts), way, model]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main(arguments: Sequence[str]) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="1b", help="a preset of shardwise.models")
    options = parser.parse_args(arguments)
    console = Console()
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), highlight=False)
    results = {way: measure(way, options.model) for way in CONTEXTS}
    table = Table(
        "built", title=f"{options.model}, {next(iter(results.values()))['num_params'] / 1e9:.2f} B parameters"
    )
    for heading in ("s", "peak MiB"):
        table.add_column(heading, justify="right")
    for way, found in results.items():
        table.add_row(way, f"{found['build_s']:.2f}", f"{found['peak_mib']:.0f}")
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
