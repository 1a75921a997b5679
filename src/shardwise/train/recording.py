"""Gathers the timeline of a pipeline's last step from all of its ranks, on one clock, and writes it to a file.

    engine.train_step(batches)
    shardwise.save_timeline(engine, "timeline.json")    # all ranks call it

`shardwise timeline config.toml --recorded timeline.json` draws it under the plan, and ui.perfetto.dev opens it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from shardwise.engine.engine import Engine
from shardwise.report.chrome_trace import chrome_trace
from shardwise.schedule import Action, TimedAction
from shardwise.zero.state_access import exchange_texts


def gather_timeline(engine: Engine) -> tuple[TimedAction, ...]:
    """Return the timed actions of the last step on all ranks of this rank's pipeline; the first starts at 0 s.

    All ranks call it. Ranks are numbered along the pipeline. A small all-reduce aligns their clocks, so they agree to
    within the time that it takes.

    Args:
        engine: an engine that has taken a step; without `mesh.pp` only this rank's actions are returned.

    Raises:
        RuntimeError: the engine simulates the other ranks.
    """
    engine.step_context.refuse_if_simulated()
    comm = engine.step_context.comms.pipeline
    comm.max_scalars(torch.zeros(1, dtype=torch.float64, device=engine.device), "clocks of the timeline")
    here_s = time.perf_counter()
    rows = [(str(each.action), each.start_s - here_s, each.end_s - here_s, each.stream) for each in engine.timeline]
    gathered = [
        TimedAction(Action.parse(action), rank, start_s, end_s, stream)
        for rank, text in enumerate(exchange_texts(comm, json.dumps(rows), "timeline"))
        for action, start_s, end_s, stream in json.loads(text)
    ]
    first_s = min((each.start_s for each in gathered), default=0.0)
    return tuple(
        TimedAction(each.action, each.rank, each.start_s - first_s, each.end_s - first_s, each.stream)
        for each in gathered
    )


def save_timeline(engine: Engine, path: str | Path) -> None:
    """Write the last step's timeline as a Chrome trace; all ranks call it, and rank 0 writes that of its pipeline.

    Args:
        engine: as for `gather_timeline`.
        path: the file, in a folder that exists.

    Raises:
        OSError: rank 0 cannot write it.
    """
    actions = gather_timeline(engine)
    if engine.comm.comm_log.rank == 0:
        Path(path).write_text(json.dumps(chrome_trace(actions)), encoding="utf-8")
