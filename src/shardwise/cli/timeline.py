"""Run the command `shardwise timeline`: it simulates and draws a config's pipeline schedule, and a run under it.

Nothing is started and torch is not imported: a schedule is a value, and a recorded run is a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from shardwise.cli.command import FILE, OutputFile, as_written, settings, split
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.config.untrusted_files import UntrustedFileError, read_json
from shardwise.config.written_files import write_asked
from shardwise.report import page, timeline_text
from shardwise.report.chrome_trace import chrome_trace, read_chrome_trace
from shardwise.report.console import Terminal, write_line
from shardwise.report.panel import TerminalPanel
from shardwise.report.planned import MAX_S, PlanNote, planned
from shardwise.schedule import ScheduleError, TimedAction
from shardwise.schedule.simulate import OpTimes, mean_times

# A trace of this size has about a quarter of a million actions.
_MAX_TRACE_BYTES = 64 * 2**20


@click.command(
    epilog=as_written("""
examples:
  shardwise timeline my.toml                                in the terminal
  shardwise timeline my.toml pipeline.schedule=zb-h1 mesh.pp=8 batch.accumulation=32
  shardwise timeline my.toml --backward-weight-s 0.7 --transfer-s 0.1 --html plan.html
  shardwise timeline my.toml --recorded trace.json --html both.html
  shardwise timeline my.toml --chrome-trace plan.json       for ui.perfetto.dev
""")
)
@settings()
@click.option("--forward-s", type=float, metavar="S", help="seconds of a forward")
@click.option("--backward-input-s", type=float, metavar="S", help="seconds of the gradient of the input")
@click.option("--backward-weight-s", type=float, metavar="S", help="seconds of the gradient of the weights")
@click.option("--transfer-s", type=float, metavar="S", help="seconds that a value takes between ranks (default: 0)")
@click.option("--recorded", type=FILE, help="a run's Chrome trace, drawn under the plan")
@click.option("--html", type=OutputFile(), help="write it as a page with zoom and search")
@click.option("--chrome-trace", type=OutputFile(), help="write the plan for Perfetto")
@click.option("--text", is_flag=True, help="draw in the terminal, even where a file is written")
def timeline(settings: Sequence[str], recorded: Path | None, text: bool, **given: Any) -> int:
    """Draw the pipeline schedule of a config, stages over time, with its bubble.

    Times are those of one micro-batch on one rank, all its stages together; a backward that is not split takes those of
    both gradients. Where one is not given, it is the recorded run's mean, else what the planner noted in the file that
    `shardwise plan --write` wrote, else 1 s.
    """
    path, assignments = split(settings)
    config = (Config.from_toml(path) if path is not None else Config()).override(assignments)
    actions = _read_recorded(recorded) if recorded is not None else None
    noted = None if path is None else _noted_times(path, config)
    panels = [planned(config, _op_times(given, actions, noted))]
    if actions is not None:
        panels.append(TerminalPanel(f"recorded: {recorded}", actions))
    files: list[tuple[Path | None, Callable[[], str]]] = [
        (given["html"], lambda: page.draw([_source(panels)])),
        (given["chrome_trace"], lambda: json.dumps(chrome_trace(panels[0].actions))),
    ]
    wanted = [(file, make) for file, make in files if file is not None]
    for file, make in wanted:
        write_asked(file, make())
        write_line(f"wrote {file}")
    if text or not wanted:
        console = Terminal(highlight=False)
        drawing = timeline_text.draw(panels, console.width)
        # The console decides whether there are colours: it knows terminals and NO_COLOR.
        console.print(drawing, soft_wrap=True, end="")
    return 0


def _noted_times(path: str, config: Config) -> OpTimes | None:
    note = PlanNote.of(Path(path).read_text(encoding="utf-8"))
    return None if note is None else note.times_of(config)


def _op_times(arguments: Mapping[str, Any], recorded: Sequence[TimedAction] | None, noted: OpTimes | None) -> OpTimes:
    default = mean_times(recorded) if recorded is not None else noted or OpTimes()
    names = [op_field.name for op_field in fields(OpTimes)]
    times = {name: arguments[name] for name in names if arguments[name] is not None}
    for name, value in times.items():
        if not 0 <= value <= MAX_S:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError("op-time-range", f"{option} {value:g} is no duration; give seconds, from 0 to {MAX_S:g}")
    return replace(default, **times)


def _source(panels: Sequence[TerminalPanel]) -> page.Source:
    chart = page.source(panels[0].title, "a timeline", "")
    chart["timelines"] = page.timelines(panels)
    return chart


def _read_recorded(path: Path) -> tuple[TimedAction, ...]:
    try:
        return read_chrome_trace(read_json(path, "give the trace that a run wrote", max_bytes=_MAX_TRACE_BYTES))
    except (UntrustedFileError, ScheduleError) as error:
        raise ConfigError(error.code, f"--recorded {path}: {error}") from None
