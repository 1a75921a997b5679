"""Folders of runs that never were, with the files that `shardwise train` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.config.resolve import Config
from shardwise.report.chrome_trace import chrome_trace
from shardwise.schedule import insert_transfers, pipeline_step, simulate
from shardwise.schedule.simulate import OpTimes
from shardwise.train.metrics import StepRecord, to_json_line

PREDICTED = {"parameters": 1000, "optimizer": 3000}
MEASURED = {"parameters": 1000, "optimizer": 2000, "activations": 500}


def record(step: int, **changed: Any) -> StepRecord:
    """Return a step whose loss is 10 less a hundredth of its number."""
    values: dict[str, Any] = {"step": step, "loss": 10.0 - step / 100, "count": 64.0, "grad_norm": 1.0, "lr": 1e-3}
    values |= {"skipped": False, "step_s": 0.5, "tokens_per_s": 128.0, "memory_bytes": MEASURED}
    return StepRecord(**(values | changed))


def write_steps(folder: Path, num_steps: int, **changed: Any) -> None:
    """Write the metrics of steps 1 to `num_steps`, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (to_json_line(record(step, **changed)) for step in range(1, num_steps + 1))
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def write_run(folder: Path, num_steps: int = 20, *settings: str) -> None:
    """Write a whole run of two pipeline ranks and three micro-batches."""
    write_steps(folder, num_steps, peak_bytes=MEASURED, expert_skew=[1.25, 3.0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(to_json_line(record(num_steps + 1, eval_loss=9.5, expert_skew=[1.25, 5.1])) + "\n")
    config = Config().override(["mesh.pp=2", "batch.accumulation=3", f"run.steps={num_steps + 1}", *settings])
    (folder / "config.json").write_text(config.to_json())
    memory = {"step": 3, "limit_bytes": 8000, "ranks": [MEASURED, {"parameters": 4000}]}
    (folder / "memory.json").write_text(json.dumps(memory))
    parts = {"compute": 0.3, "bubble": 0.2}
    prediction = {"predicted": {"peak": PREDICTED, "parts": parts}, "measured": {"parts": {"compute": 0.5}}}
    (folder / "prediction.json").write_text(json.dumps(prediction))
    (folder / "environment.json").write_text(json.dumps({"versions": {"torch": "2.13"}, "device": "cpu"}))
    wire = {"steps": 20, "axes": [{"axis": "dp_shard", "op": "all_gather", "bytes": 2048.0}]}
    (folder / "wire.json").write_text(json.dumps(wire))
    schedule = insert_transfers(pipeline_step("1f1b", 2, 3, 1))
    actions = simulate(schedule, OpTimes(0.1, 0.1, 0.1, 0.01).cost(1))
    (folder / "timeline.json").write_text(json.dumps(chrome_trace(actions)))
