"""Seconds from `python` to the first step: what imports cost beyond torch's, and what `initialize` costs.

Each import is timed in fresh processes, each `initialize` on two ranks with everything imported. It measures no step.

    python benchmarks/startup.py --model 100m --systems shardwise-3,fsdp2
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from pairs import Pair
from peers import PEERS, Workload
from shardwise.launch.as_deepspeed import deepspeed_environment
from step_time import is_installed, machine, runnable

TIMED_IMPORT = "import time, torch; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
IMPORTS: Mapping[str, tuple[str, str]] = {
    "import shardwise": ("shardwise", "import shardwise"),
    "import shardwise, with its engine": ("shardwise", "import shardwise.engine.initialize"),
    "import FSDP2": ("torch", "import torch.distributed.fsdp"),
    "import deepspeed": ("deepspeed", "import deepspeed"),
    "import deepspeed, which Shardwise answers": (
        "shardwise",
        f"import sys; sys.path.insert(0, {deepspeed_environment({})['PYTHONPATH']!r}); import deepspeed",
    ),
    "first torch optimizer (imports torch's compiler)": ("torch", "torch.optim.AdamW([torch.zeros(1)])"),
}
AIMS_S = {
    "import shardwise, with its engine": 0.5,
    "import deepspeed, which Shardwise answers": 0.2,
    **{f"initialize shardwise-{stage}": 1.0 for stage in range(4)},
}


def import_s(statement: str) -> float:
    """Seconds that a statement takes in a fresh process that has imported torch."""
    command = [sys.executable, "-c", TIMED_IMPORT.format(statement)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.split()[-1])


def initialize_s(system: str, workload: Workload) -> float:
    """Seconds that building a system takes on the slower of its ranks."""
    pair = Pair(system, workload, timeout_s=300.0)
    pair.close()
    return max(rank.initialize_s for rank in pair.ready)


def main(arguments: Sequence[str]) -> None:
    """Measure in rounds, then print medians and aims."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="100m", help="a preset of shardwise.models")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    console = Console()
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), highlight=False)
    workload = Workload(options.model, options.dtype, seq_len=32, micro_size=4)
    systems = runnable(options.systems, console)
    seconds: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, (package, statement) in IMPORTS.items():
            if is_installed(package):
                seconds.setdefault(name, []).append(import_s(statement))
        for system in systems:
            seconds.setdefault(f"initialize {system}", []).append(initialize_s(system, workload))
    console.print(table(f"Start-up, {options.model} {options.dtype}", seconds))


def table(title: str, seconds: Mapping[str, Sequence[float]]) -> Table:
    """Medians and spreads, beside the aims where there are some."""
    result = Table("what", title=title)
    for heading in ("median s", "min-max", "aim"):
        result.add_column(heading, justify="right")
    for name, samples in seconds.items():
        aim = f"{AIMS_S[name]:.1f}" if name in AIMS_S else ""
        result.add_row(name, f"{statistics.median(samples):.2f}", f"{min(samples):.2f}-{max(samples):.2f}", aim)
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
