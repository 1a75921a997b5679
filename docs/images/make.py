"""Draws the picture of a run's display from that run's own records.

python docs/images/make.py runs/<a run> docs/images/train.svg
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from rich.console import Console

from shardwise.train.progress import Header, Progress, render

WIDTH = 100


def main(run: Path, picture: Path) -> None:
    """Replay the records of `run` up to three quarters of its steps and write what the display showed then."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    header = Header(
        model="tiny, 6.0 M parameters, 4 layers of 320",
        layout="ZeRO-2 over 2 ranks, CPU, bf16 with fp32 master",
        batch="global batch 4 = 2 samples a micro-batch x 1 accumulation x 2 data-parallel ranks, 256 tokens each",
        data="the source of Python 3.11's standard library, 2.8 M tokens",
    )
    state = Progress(header, total_steps=len(records))
    for record in records[: len(records) * 3 // 4]:
        fields = ("step", "loss", "lr", "grad_norm", "step_s", "tokens_per_s")
        state = state.after_step(**{name: record[name] for name in fields})
        if record.get("peak_bytes"):
            state = state.with_memory({name: size for name, size in record["peak_bytes"].items() if size})
    console = Console(record=True, width=WIDTH, force_terminal=True, file=io.StringIO())
    console.print(render(state, WIDTH))
    picture.write_text(console.export_svg(title="shardwise train"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
