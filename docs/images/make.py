"""Draws the pictures of the documents: what commands show, by the code that shows it.

python docs/images/make.py train runs/<a run>    a run's display, from that run's own records
python docs/images/make.py plan                  a plan beside a config of the user's own
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console, RenderableType

from shardwise.planner.explain import reasons_of
from shardwise.planner.hardware import parse_cluster
from shardwise.planner.render import plan_view
from shardwise.planner.request import Question, read_model
from shardwise.planner.search import Pricer, search
from shardwise.train.imported_plan import named_batch, split_for
from shardwise.train.metrics import StepRecord
from shardwise.train.progress import Header, Progress, render
from shardwise.train.rank_watch import RanksMemory

WIDTH = 100
HERE = Path(__file__).parent
YOURS = HERE.parents[1] / "examples" / "ds_config.json"


def plan_picture() -> str:
    """What `shardwise plan --model llama-7b --compare examples/ds_config.json --cluster a100-40:8` prints."""
    cluster = parse_cluster("a100-40:8")
    asked = Question(read_model("llama-7b"), cluster, None, named_batch(str(YOURS), cluster.num_gpus)).ask()
    pricer = Pricer(asked.job)
    yours = pricer.price(split_for(str(YOURS), asked.job).config)
    plan = search(asked.job, asked.space, pricer=pricer)
    reasons = reasons_of(plan, pricer, yours=yours)
    view = plan_view(plan, reasons, notes=asked.notes)
    return _picture(view, "shardwise plan")


def train_picture(run: Path) -> str:
    """What the display of a run showed at three quarters of its steps."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    header = Header(
        model="tiny, 5.98 M parameters, 4 layers of 320",
        layout="2 ranks: ZeRO-2 over 2, micro-batch 2, CPU, bf16 with fp32 master",
        batch="global batch 4 = 2 samples a micro-batch x 1 accumulation x 2 data-parallel ranks, 256 tokens each",
        data="the source of Python 3.11's standard library, 2.8 M tokens",
    )
    state = Progress(header, total_steps=len(records))
    for record in records[: len(records) * 3 // 4]:
        state = state.after_step(StepRecord(**record))
    kept = json.loads((run / "memory.json").read_text())
    state = replace(state, memory=RanksMemory(kept["step"], kept["limit_bytes"], tuple(kept["ranks"])))
    return _picture(render(state, WIDTH, height=30), "shardwise train")


def _picture(view: RenderableType, title: str) -> str:
    console = Console(record=True, width=WIDTH, force_terminal=True, file=io.StringIO())
    console.print(view)
    return console.export_svg(title=title)


if __name__ == "__main__":
    if sys.argv[1] == "plan":
        (HERE / "plan.svg").write_text(plan_picture())
    else:
        (HERE / "train.svg").write_text(train_picture(Path(sys.argv[2])))
