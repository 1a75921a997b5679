"""Read what a page shows of a run from its folder, whatever is there: it may have just begun, or been killed."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.config.untrusted_files import UntrustedFileError, open_regular, read_json
from shardwise.report import page
from shardwise.report.chrome_trace import read_chrome_trace
from shardwise.report.packing import buckets, packed
from shardwise.report.page import absent, fact
from shardwise.report.panel import TerminalPanel
from shardwise.report.planned import MAX_CELLS, planned
from shardwise.runtime.format import format_bytes, format_clock, format_s
from shardwise.schedule import ScheduleError
from shardwise.schedule.simulate import OpTimes, mean_times

METRICS_NAME: Final = "metrics.jsonl"
CONFIG_NAME: Final = "config.json"
WIRE_NAME: Final = "wire.json"
PAGE_NAME: Final = "report.html"
TIMELINE_NAME: Final = "timeline.json"
PREDICTION_NAME: Final = "prediction.json"
_QUICK_CELLS: Final = 5_000
_METRICS: Final = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu")
OWN_VALUES: Final = "values/"  # before the names of a script's own numbers
_MOST_COLUMNS: Final = 24
_MOST_KEY_CHARS: Final = 64
_CHARS_A_VALUE: Final = 5.0
_MAX_JSON_BYTES: Final = 2**26
# A line has some 600 bytes, and a dozen brackets; a larger one is none that a run wrote.
_MAX_LINE_BYTES: Final = 2**20
_MAX_BRACKETS: Final = 1_000
# Of longer metrics every so many pieces are read, so that a page takes seconds.
_MAX_METRICS_BYTES: Final = 2**27
_PIECE_BYTES: Final = 2**20
_MAX_STEP: Final = 2**53
_MAX_NUMBER: Final = 3.4e38
_SHARE_OF_CURVES: Final = 0.4
_MACHINE: Final = ("versions", "device", "world_size")


@dataclass
class _Steps:
    """Hold what the lines of a run's metrics say, by column."""

    columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in ("step", *_METRICS)})
    step_s: array[float] = field(default_factory=lambda: array("d"))
    held_out: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    memory: dict[str, float] = field(default_factory=dict)
    skew: tuple[list[float], list[float], int] = ([], [], 0)  # by layer: of the last step, sums, and of how many
    num_damaged: int = 0
    every: int = 1

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line; raise ValueError where it is that of no step."""
        step = _number(line.get("step"))
        if not (0 <= step <= _MAX_STEP and step == round(step)):
            raise ValueError("the step is none")
        for name, column in self.columns.items():
            column.append(_number(line.get(name)))
        values = line.get("values")
        for name, value in values.items() if isinstance(values, Mapping) else ():
            key = f"{OWN_VALUES}{name}"[:_MOST_KEY_CHARS]
            if key not in self.columns and len(self.columns) < _MOST_COLUMNS:
                self.columns[key] = array("d", [math.nan]) * len(self.columns["step"])
            if key in self.columns:
                self.columns[key][-1] = _number(value)
        self.step_s.append(_number(line.get("step_s")))
        if "eval_loss" in line:
            self.held_out[0].append(_number(line.get("step")))
            self.held_out[1].append(_number(line["eval_loss"]))
        self.memory = _sizes(line.get("peak_bytes")) or self.memory
        self._add_skew(line.get("expert_skew"))

    def _add_skew(self, given: Any) -> None:
        layers = [_number(value) for value in given] if isinstance(given, list) else []
        if layers and all(map(math.isfinite, layers)):
            _, sums, num = self.skew if len(self.skew[1]) == len(layers) else ([], [0.0] * len(layers), 0)
            self.skew = layers, [a + b for a, b in zip(sums, layers, strict=True)], num + 1

    @property
    def num(self) -> int:
        return len(self.step_s)


def write_run_page(folder: Path) -> Path:
    """Write the page of a run into its folder, without a schedule that takes seconds to simulate; return its path."""
    path = folder / PAGE_NAME
    page.write(path, [run_source(folder, page.share_of(1), _QUICK_CELLS)])
    return path


def is_run(folder: Path) -> bool:
    """Say whether a folder is that of a run: it has the config of one, which other folders have too, or its steps."""
    values = _read(folder / CONFIG_NAME, [])
    is_ours = all(isinstance(values.get(section), Mapping) for section in ("run", "model", "data"))
    return is_ours or _read_steps(folder / METRICS_NAME, []).num > 0


def run_source(folder: Path, max_bytes: int, max_cells: int = MAX_CELLS) -> page.Source:
    """Return what a page shows of a run.

    Args:
        folder: the run's folder; every file of it may be absent or half written.
        max_bytes: the size of what is returned; longer curves and timelines are aggregated.
        max_cells: the most forwards of a planned schedule, which takes time to simulate.
    """
    unread: list[str] = []
    steps = _read_steps(folder / METRICS_NAME, unread)
    values, prediction = _read(folder / CONFIG_NAME, unread), _read(folder / PREDICTION_NAME, unread)
    memory, environment = _read(folder / "memory.json", unread), _read(folder / "environment.json", unread)
    wire, recorded = _read(folder / WIRE_NAME, unread), _read(folder / TIMELINE_NAME, unread)
    config = None
    try:
        config = Config.from_dict(values) if values else None
    except ConfigError as error:
        unread.append(f"{CONFIG_NAME}: {error}")
    source = page.source(folder.resolve().name, "; ".join(["run", *(f"not read: {reason}" for reason in unread)]), "")
    source["facts"] = list(_facts(steps, config, memory, prediction))
    source["curves"] = _curves(steps, _SHARE_OF_CURVES * max_bytes)
    source["memory"] = _memory(steps, memory, prediction)
    source["parts"] = _parts(prediction)
    last, sums, num = steps.skew
    if num:
        source["experts"] = {"rows": [(value, total / num) for value, total in zip(last, sums, strict=True)]}
    source["wire"] = _wire(wire)
    left = max_bytes - len(json.dumps(source))
    source["timelines"] = _timelines(recorded, config, left - left // 8, max_cells)
    lacking = absent(f"the folder has no {CONFIG_NAME} that can be read")
    source["config"] = page.config_section(values) if values else lacking
    shown = environment or {key: prediction[key] for key in _MACHINE if key in prediction}
    lacking = absent("the folder has neither environment.json nor prediction.json")
    source["environment"] = {"keys": page.flat(shown)} if shown else lacking
    return source


def _read(path: Path, unread: list[str]) -> dict[str, Any]:
    """Return the object in a JSON file; empty where there is none, and `unread` says why where there is something."""
    if not os.path.lexists(path):
        return {}
    try:
        value = read_json(path, "", max_bytes=_MAX_JSON_BYTES, folder=path.parent)
    except UntrustedFileError as error:
        unread.append(str(error).replace(str(path), path.name).rstrip("; "))
        return {}
    if not isinstance(value, dict):
        unread.append(f"{path.name} is no JSON object")
    return value if isinstance(value, dict) else {}


def _read_steps(path: Path, unread: list[str]) -> _Steps:
    steps = _Steps()
    if not os.path.lexists(path):
        return steps
    try:
        file = open(open_regular(path, path.parent), "rb")  # noqa: SIM115 (an error of reading is another one)
    except OSError as error:
        unread.append(f"{path.name}: {error.strerror}")
        return steps
    with file:
        num_bytes = os.fstat(file.fileno()).st_size
        steps.every = max(1, -(-num_bytes // _MAX_METRICS_BYTES))
        if steps.every > 1:
            unread.append(f"{path.name} beyond every {steps.every}th MiB of its {format_bytes(num_bytes)}")
        for line in _lines(file, num_bytes, steps.every):
            is_whole = line.endswith(b"\n")
            try:
                if len(line) == _MAX_LINE_BYTES or line.count(b"[") + line.count(b"{") > _MAX_BRACKETS:
                    raise ValueError("no run wrote it")
                steps.add(json.loads(line))
            except (ValueError, AttributeError, RecursionError):
                # The last line of a run that goes on may be half written.
                steps.num_damaged += is_whole
    return steps


def _lines(file: BinaryIO, num_bytes: int, every: int) -> Iterator[bytes]:
    """Yield the lines of a file, or of every so many of its pieces."""
    for start in range(0, max(1, num_bytes), _PIECE_BYTES * every):
        file.seek(max(0, start - 1))
        if start:
            file.readline(_MAX_LINE_BYTES)  # the end of one that began before
        while file.tell() < start + _PIECE_BYTES and (line := file.readline(_MAX_LINE_BYTES)):
            yield line


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= _MAX_NUMBER else math.nan


def _sizes(value: Any) -> dict[str, float]:
    """Return the numbers above 0 of what should be a dict of them."""
    if not isinstance(value, Mapping):
        return {}
    return {str(name): number for name, size in value.items() if 0 < (number := _number(size)) < math.inf}


def _facts(
    steps: _Steps, config: Config | None, memory: Mapping[str, Any], prediction: Mapping[str, Any]
) -> Iterator[dict[str, str]]:
    """Yield the figures of the page's head."""
    if not steps.num:
        yield fact("steps", "none yet")
        return
    columns = steps.columns
    total = f"of {config.run.steps:,}" if config is not None else ""
    yield fact("step", f"{columns['step'][-1]:,.0f}", total)
    yield fact("loss", f"{columns['loss'][-1]:.4f}", "of the last step, nats a token")
    if steps.held_out[0]:
        yield fact("held-out loss", f"{steps.held_out[1][-1]:.4f}", f"after step {steps.held_out[0][-1]:,.0f}")
    yield fact("speed", f"{_late_median(columns['tokens_per_s']):,.0f}", "tokens/s, median of the last tenth")
    if any(map(math.isfinite, columns["mfu"])):
        yield fact("MFU", f"{100 * _late_median(columns['mfu']):.1f} %", "model FLOPs of the devices' peak")
    predicted_s = sum(_sizes(_within(prediction, "predicted", "parts")).values())
    median_s = _late_median(steps.step_s)
    yield fact("a step", format_s(median_s), f"predicted {format_s(predicted_s)}" if predicted_s else "median")
    ranks = [sum(sizes.values()) for sizes in _ranks_of(memory)] or [sum(steps.memory.values())]
    limit = _number(memory.get("limit_bytes"))
    if max(ranks) > 0:
        yield fact("peak memory", format_bytes(max(ranks)), f"of {format_bytes(limit)}" if limit > 0 else "a rank")
    yield fact("time", format_clock(sum(filter(math.isfinite, steps.step_s))), "all steps together")


def _late_median(column: Sequence[float]) -> float:
    late = sorted(filter(math.isfinite, column[-max(1, len(column) // 10) :]))
    return late[len(late) // 2] if late else math.nan


def _within(value: Mapping[str, Any], key: str, inner: str) -> Any:
    item = value.get(key)
    return item.get(inner) if isinstance(item, Mapping) else None


def _curves(steps: _Steps, max_chars: float) -> dict[str, Any]:
    if not steps.num:
        return absent("no step was taken yet, or the folder has no metrics.jsonl; a later page shows them")
    present = [name for name in list(steps.columns)[1:] if any(map(math.isfinite, steps.columns[name]))]
    most = max_chars / _CHARS_A_VALUE
    # A bucket of one step is one value, of several it is three.
    is_whole = steps.num * (len(present) + 1) <= most
    size = 1 if is_whole else math.ceil(steps.num * (3 * len(present) + 1) / most)
    return {
        "num_steps": steps.num,
        "num_damaged": steps.num_damaged,
        "bucket": size,
        "step": buckets(steps.columns["step"], size)["mean"],
        "metrics": {name: buckets(steps.columns[name], size) for name in present},
        "held_out": {"step": packed("f", steps.held_out[0]), "value": packed("f", steps.held_out[1])},
    }


def _ranks_of(memory: Mapping[str, Any]) -> list[dict[str, float]]:
    ranks = memory.get("ranks")
    return [_sizes(sizes) for sizes in ranks] if isinstance(ranks, list) else []


def _memory(steps: _Steps, memory: Mapping[str, Any], prediction: Mapping[str, Any]) -> dict[str, Any]:
    measured = _ranks_of(memory) or ([steps.memory] if steps.memory else [])
    predicted = _sizes(_within(prediction, "predicted", "peak"))
    if not measured and not predicted:
        return absent("no step was measured yet; the memory of a run is measured in its first steps")
    rows = [{"name": f"rank {rank}", "measured": sizes} for rank, sizes in enumerate(measured)]
    if predicted:
        rows[:1] = [{"name": "rank 0", "measured": measured[0] if measured else {}, "predicted": predicted}]
    limit = _number(memory.get("limit_bytes"))
    notes = [] if predicted else ["no prediction.json, so nothing is predicted"]
    notes += [] if len(measured) != 1 else ["of rank 0 alone"]
    at = f", at step {memory['step']}" if memory.get("step") is not None else ""
    return {"rows": rows, "limit": limit if limit > 0 else None, "notes": notes, "when": f"peak within a step{at}"}


def _parts(prediction: Mapping[str, Any]) -> dict[str, Any]:
    rows = [(name, _sizes(_within(prediction, name, "parts"))) for name in ("predicted", "measured")]
    rows = [(name, parts) for name, parts in rows if parts]
    if not rows:
        why = "where a step's time goes is compared at a run's end, if the planner knew this machine's speed"
        return absent(f"{why}; shardwise doctor --calibrate measures it")
    return {"rows": rows}


def _wire(values: Mapping[str, Any]) -> dict[str, Any]:
    axes = values.get("axes")
    if not isinstance(axes, list) or not axes:
        return absent(
            "the folder has no wire.json: rank 0 counts from its second step on, and one rank alone sends nothing"
        )
    axes_known = [axis for axis in axes if isinstance(axis, Mapping) and math.isfinite(_number(axis.get("bytes")))]
    rows = [(str(axis.get("axis")), str(axis.get("op")), _number(axis["bytes"])) for axis in axes_known]
    return {"rows": rows, "note": "sent by rank 0, a mean over its steps"}


def _timelines(trace: Mapping[str, Any], config: Config | None, max_bytes: int, max_cells: int) -> dict[str, Any]:
    panels, notes = [], []
    try:
        recorded = read_chrome_trace(trace)
    except ScheduleError:
        recorded = ()
        notes.append("A run writes its last step's timeline at its end; run.record_timeline=N writes step N's.")
    try:
        if config is None:
            notes.append("No plan is drawn, since the folder has no config.json that can be read.")
        elif config.mesh.pp == 1:
            notes.append("No plan is drawn, since the run has no pipeline stages (mesh.pp = 1).")
        else:
            panels.append(planned(config, mean_times(recorded) if recorded else OpTimes(), max_cells))
            notes += [] if recorded else ["The plan takes 1 s for each pass, until a step is recorded."]
    except (ConfigError, ScheduleError) as error:
        notes.append(f"No plan is drawn: {error}.")
    if recorded:
        panels.append(TerminalPanel(f"recorded: {TIMELINE_NAME}", recorded))
    return page.timelines(panels, notes, max_bytes) if panels else absent(" ".join(notes))
