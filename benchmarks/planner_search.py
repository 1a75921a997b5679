"""Seconds until the planner has answered a whole question: the search, and why its winner wins.

Each question is asked in a process of its own, so nothing is warm but what it warms itself; imports are timed apart.
CPU seconds stand beside the wall's, since they tell of a machine that did other things too.

    python benchmarks/planner_search.py --quick
    python benchmarks/planner_search.py --json planner_search.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from step_time import machine

ASK = """
import json, sys, time
start_s = time.perf_counter()
import torch
torch_s = time.perf_counter() - start_s
from shardwise.planner.plan import plan
import_s = time.perf_counter() - start_s - torch_s
question = json.loads(sys.argv[1])
start_s, start_cpu_s = time.perf_counter(), time.process_time()
found = plan(question["model"], question["cluster"], global_batch=question["global_batch"], seq_len=question["seq_len"])
wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
print(json.dumps({
    "torch_s": torch_s, "import_s": import_s, "wall_s": wall_s, "search_s": found.result.elapsed_s, "cpu_s": cpu_s,
    "num_outlines": found.result.num_candidates, "num_priced": found.result.num_priced,
    "is_proven": found.result.is_proven, "best": repr(found.best), "wins": found.reasons.wins,
}))
"""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the planner is asked.

    Attributes:
        model, cluster: as `shardwise plan` takes them; or a model that `MODELS` has, by its name there.
        aim_s: the most CPU seconds that it may take; None where there is no aim.
    """

    model: str
    cluster: str
    global_batch: int
    seq_len: int = 8192
    aim_s: float | None = None


# Of its config.json, what says its sizes.
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
}
MODELS = {"qwen3-235b-a22b": QWEN3_235B}
QUESTIONS = (
    Question(model="llama-3-8b", cluster="h100:8", global_batch=64, aim_s=2.0),
    Question(model="llama-3-70b", cluster="h100:512", global_batch=1024),
    Question(model="qwen3-235b-a22b", cluster="h100:512", global_batch=1024, seq_len=4096, aim_s=10.0),
    Question(model="llama-405b", cluster="h100:16384", global_batch=2048, aim_s=7.0),
    Question(model="llama-405b", cluster="h100:100000", global_batch=100_000, aim_s=40.0),
)


def ask(question: Question) -> dict[str, Any]:
    """What one answer takes, in a process of its own."""
    with TemporaryDirectory() as folder:
        asked = asdict(question)
        if question.model in MODELS:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(MODELS[question.model]), encoding="utf-8")
            asked["model"] = str(path)
        finished = subprocess.run([sys.executable, "-c", ASK, json.dumps(asked)], capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"{question.model} on {question.cluster} failed:\n{finished.stderr[-2000:]}")
    return {**asdict(question), **json.loads(finished.stdout)}


def show(console: Console, answers: Sequence[dict[str, Any]]) -> None:
    """Print a table, and below it each answer."""
    table = Table("model", "cluster", "batch", title="seconds of a whole answer, imports apart")
    for heading in ("candidates", "estimates", "wall s", "search alone", "CPU s", "aim", "proven"):
        table.add_column(heading, justify="right")
    for answer in answers:
        aim_s = answer["aim_s"]
        table.add_row(
            answer["model"],
            answer["cluster"],
            f"{answer['global_batch']:,}",
            f"{answer['num_outlines']:,}",
            f"{answer['num_priced']:,}",
            f"{answer['wall_s']:.1f}",
            f"{answer['search_s']:.1f}",
            f"{answer['cpu_s']:.1f}",
            "" if aim_s is None else f"{aim_s:.0f}, {'reached' if answer['cpu_s'] <= aim_s else 'missed'}",
            "yes" if answer["is_proven"] else "no",
        )
    console.print(table)
    for answer in answers:
        console.print(f"{answer['model']} on {answer['cluster']}: {answer['best']}", highlight=False, markup=False)


def main(arguments: Sequence[str]) -> None:
    """Ask, print, and keep what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first question alone")
    parser.add_argument("--json", type=Path, help="where to keep what was measured")
    options = parser.parse_args(arguments)
    console = Console(width=120)
    found_machine = machine()
    console.print(", ".join(f"{key} {value}" for key, value in found_machine.items()), highlight=False)
    answers = [ask(question) for question in (QUESTIONS[:1] if options.quick else QUESTIONS)]
    show(console, answers)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": found_machine, "results": answers}, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
