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

from shardwise.config.resolve import Config, ConfigError, resolve_batch
from shardwise.config.untrusted_files import UntrustedFileError, read_json
from shardwise.config.validate import wrong_schedule_size
from shardwise.report import timeline_html, timeline_svg, timeline_text
from shardwise.report.chrome_trace import chrome_trace, read_chrome_trace
from shardwise.report.console import Terminal, refuse
from shardwise.report.panel import TerminalPanel
from shardwise.schedule import (
    ScheduleError,
    TimedAction,
    bubble_s,
    insert_transfers,
    pipeline_step,
    placement_of,
    simulate,
)
from shardwise.schedule.op_times import OpTimes, mean_times

_EXAMPLES = """\
Times are those of one micro-batch on one rank, all its stages together; a backward that is not split takes those of
both gradients. Where one is not given, it is the recorded run's mean, else 1 s.

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
_MAX_CELLS = 70_000

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
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page, with a table by rank")
    parser.add_argument("--chrome-trace", type=Path, metavar="FILE", help="write the plan for Perfetto")
    parser.add_argument("--text", action="store_true", help="draw in the terminal, even where a file is written")
    parser.set_defaults(run=partial(_timeline, split=split))


def _timeline(arguments: argparse.Namespace, split: Split) -> int:
    try:
        path, assignments = split(arguments.settings)
        config = (Config.from_toml(path) if path is not None else Config()).override(assignments)
        recorded = _read_recorded(arguments.recorded) if arguments.recorded is not None else None
        panels = [planned(config, _op_times(arguments, recorded))]
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


def planned(config: Config, op_times: OpTimes) -> TerminalPanel:
    """Simulate the schedule of a config with given times; return it with the bubble that its formula gives.

    Raises:
        ConfigError: the number of micro-batches does not follow from the config alone.
        ScheduleError: the schedule cannot take these ranks, stages or micro-batches.
    """
    recipe, num_ranks, num_micro_batches = config.pipeline.schedule, config.mesh.pp, num_micro_batches_of(config)
    for code, message in wrong_schedule_size(num_micro_batches, config.pipeline, config.mesh, _MAX_CELLS):
        raise ConfigError(code, message)
    schedule = pipeline_step(recipe, num_ranks, num_micro_batches, config.pipeline.virtual_stages)
    num_stages = placement_of(recipe, num_ranks, config.pipeline.virtual_stages).stages_per_rank
    actions = simulate(insert_transfers(schedule), op_times.cost(num_stages))
    stages = f" x {num_stages} stages" if num_stages > 1 else ""
    title = f"{recipe}, planned: {_count(num_ranks, 'rank')}{stages}, {_count(num_micro_batches, 'micro-batch')}"
    times_s = (op_times.forward_s, op_times.backward_input_s, op_times.backward_weight_s)
    try:
        formula_s = bubble_s(recipe, num_ranks, num_micro_batches, num_stages, *times_s)
    except ScheduleError:  # says that there is none for such numbers
        formula_s = None
    return TerminalPanel(title, actions, formula_s if op_times.transfer_s == 0.0 else None)


def num_micro_batches_of(config: Config) -> int:
    """Return the micro-batches a step.

    Raises:
        ConfigError: they follow from the number of data-parallel ranks, which the config does not give.
    """
    batch, mesh = config.batch, config.mesh
    if batch.accumulation is not None:
        return batch.accumulation
    if batch.global_size is None or batch.micro_size is None:
        return 1
    if mesh.dp_shard is None:
        raise ConfigError(
            "micro-batches-unknown",
            "batch.accumulation follows from the number of data-parallel ranks, which is known only in a run; add "
            "mesh.dp_shard=N or batch.accumulation=N",
        )
    accumulation = resolve_batch(batch, mesh.dp_shard * (mesh.dp_replicate or 1)).accumulation
    return accumulation or 1


def _op_times(arguments: argparse.Namespace, recorded: Sequence[TimedAction] | None) -> OpTimes:
    default = mean_times(recorded) if recorded is not None else OpTimes()
    names = [each.name for each in fields(OpTimes)]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    for name, value in given.items():
        if not 0 <= value <= _MAX_S:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError("op-time-range", f"{option} {value:g} is no duration; give seconds, from 0 to {_MAX_S:g}")
    return replace(default, **given)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


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
        (arguments.html, lambda: timeline_html.draw(panels, panels[0].title, same_axis=same_axis)),
        (arguments.chrome_trace, lambda: json.dumps(chrome_trace(panels[0].actions))),
    ]
    for path, make in texts:
        if path is not None:
            path.write_text(make(), encoding="utf-8")
            print(f"wrote {path}")
    return any(path is not None for path, _ in texts)
