"""Runs the command `shardwise timeline`: it simulates and draws a config's pipeline schedule, and a run under it.

Nothing is started and torch is not imported: a schedule is a value, and a recorded run is a file. As in
`shardwise.cli.main`, errors are one line and an exit code: 2 for what the user can fix, 1 for a disk that fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from shardwise.config.resolve import Config, ConfigError
from shardwise.config.untrusted_files import UntrustedFileError, read_json
from shardwise.report import page, timeline_svg, timeline_text
from shardwise.report.chrome_trace import chrome_trace, read_chrome_trace
from shardwise.report.console import Terminal, refuse
from shardwise.report.panel import TerminalPanel
from shardwise.report.planned import PlanNote, planned
from shardwise.schedule import ScheduleError, TimedAction
from shardwise.schedule.simulate import OpTimes, mean_times

_EXAMPLES = """\
Times are those of one micro-batch on one rank, all its stages together; a backward that is not split takes those of
both gradients. Where one is not given, it is the recorded run's mean, else what the planner noted in the file that
`shardwise plan --write` wrote, else 1 s.

examples:
  shardwise timeline my.toml                                in the terminal
  shardwise timeline my.toml pipeline.schedule=zb-h1 mesh.pp=8 batch.accumulation=32
  shardwise timeline my.toml --backward-weight-s 0.7 --transfer-s 0.1 --html plan.html
  shardwise timeline my.toml --recorded trace.json --html both.html
  shardwise timeline my.toml --chrome-trace plan.json       for ui.perfetto.dev
"""

# A trace of this size has about a quarter of a million actions.
_MAX_TRACE_BYTES = 64 * 2**20

_MAX_S = 1e6

Split = Callable[[Sequence[str]], tuple[str | None, list[str]]]
"""Splits a command's settings into its config file, if there is one, and the assignments."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], split: Split) -> None:
    """Add `timeline` to the commands of `shardwise`."""
    parser = commands.add_parser(
        "timeline",
        help="draw the pipeline schedule of a config, and a recorded run under it",
        description="Draw the pipeline schedule of a config, stages over time, with its bubble.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="*", metavar="config.toml | key=value", help="as for train")
    for name, what in (
        ("forward", "of a forward"),
        ("backward-input", "of the gradient of the input"),
        ("backward-weight", "of the gradient of the weights"),
        ("transfer", "that a value takes between two ranks (default: 0)"),
    ):
        parser.add_argument(f"--{name}-s", type=float, metavar="S", help=f"seconds {what}")
    parser.add_argument("--recorded", type=Path, metavar="FILE", help="a run's Chrome trace, drawn under the plan")
    parser.add_argument("--own-axes", action="store_true", help="give plan and run each its own scale of time")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the drawing as SVG")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page with zoom and search")
    parser.add_argument("--chrome-trace", type=Path, metavar="FILE", help="write the plan for Perfetto")
    parser.add_argument("--text", action="store_true", help="draw in the terminal, even where a file is written")
    parser.set_defaults(run=partial(_timeline, split=split))


def _timeline(arguments: argparse.Namespace, split: Split) -> int:
    try:
        path, assignments = split(arguments.settings)
        config = (Config.from_toml(path) if path is not None else Config()).override(assignments)
        recorded = _read_recorded(arguments.recorded) if arguments.recorded is not None else None
        noted = None if path is None else _noted_times(path, config)
        panels = [planned(config, _op_times(arguments, recorded, noted))]
    except (ConfigError, ScheduleError) as error:
        return refuse(error)
    if recorded is not None:
        panels.append(TerminalPanel(f"recorded: {arguments.recorded}", recorded))
    try:
        has_written = _write(arguments, panels)
    except OSError as error:
        print(f"shardwise: cannot write {error.filename}: {error.strerror}; give the path of a file", file=sys.stderr)
        return 1
    if arguments.text or not has_written:
        console = Terminal(highlight=False)
        drawing = timeline_text.draw(panels, console.width, same_axis=not arguments.own_axes)
        # The console decides whether there are colours: it knows terminals and NO_COLOR.
        console.print(drawing, soft_wrap=True, end="")
    return 0


def _noted_times(path: str, config: Config) -> OpTimes | None:
    note = PlanNote.of(Path(path).read_text(encoding="utf-8"))
    return None if note is None else note.times_of(config)


def _op_times(arguments: argparse.Namespace, recorded: Sequence[TimedAction] | None, noted: OpTimes | None) -> OpTimes:
    default = mean_times(recorded) if recorded is not None else noted or OpTimes()
    names = [each.name for each in fields(OpTimes)]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    for name, value in given.items():
        if not 0 <= value <= _MAX_S:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError("op-time-range", f"{option} {value:g} is no duration; give seconds, from 0 to {_MAX_S:g}")
    return replace(default, **given)


def _source(panels: Sequence[TerminalPanel]) -> page.Source:
    found = page.source(panels[0].title, "a timeline", "")
    found["timelines"] = page.timelines(panels)
    return found


def _read_recorded(path: Path) -> tuple[TimedAction, ...]:
    try:
        return read_chrome_trace(read_json(path, "give the trace that a run wrote", max_bytes=_MAX_TRACE_BYTES))
    except (UntrustedFileError, ScheduleError) as error:
        raise ConfigError(error.code, f"--recorded {path}: {error}") from None


def _write(arguments: argparse.Namespace, panels: Sequence[TerminalPanel]) -> bool:
    """Write the files that are asked for, and say whether there was any."""
    same_axis = not arguments.own_axes
    texts: list[tuple[Path | None, Callable[[], str]]] = [
        (arguments.svg, lambda: timeline_svg.draw(panels, same_axis=same_axis)),
        (arguments.html, lambda: page.draw([_source(panels)], same_axis=same_axis)),
        (arguments.chrome_trace, lambda: json.dumps(chrome_trace(panels[0].actions))),
    ]
    for path, make in texts:
        if path is not None:
            path.write_text(make(), encoding="utf-8")
            print(f"wrote {path}")
    return any(path is not None for path, _ in texts)
