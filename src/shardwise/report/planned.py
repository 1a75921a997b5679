"""Simulate a config's pipeline schedule, and read what a page shows of a plan from the planner's answer.

Times of a schedule are given, measured, or noted in the file of a plan.

>>> note = PlanNote("h100:512", 8, 128, OpTimes(0.03, 0.03, 0.025, 0.001))
>>> PlanNote.of(f"[mesh]\\n{note.line}\\n") == note
True
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, resolve_batch
from shardwise.config.validate import wrong_schedule_size
from shardwise.report import page
from shardwise.report.page import absent, fact
from shardwise.report.panel import TerminalPanel
from shardwise.runtime.format import format_bytes, format_s
from shardwise.schedule import ScheduleError, bubble_s, insert_transfers, pipeline_step, placement_of, simulate
from shardwise.schedule.simulate import OpTimes

_GIB = 2**30
MAX_CELLS: Final = 70_000
"""The most forwards of a schedule that is drawn: a larger one takes minutes to simulate."""
MAX_S: Final = 1e6
"""The longest time of a micro-batch."""
HERE: Final = "here"
"""The cluster of a plan for the machine on which it was made."""
_NOTE: Final = re.compile(r"^# planned for (\S+): (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class PlanNote:
    """Hold what a planned config's file says in a comment: its cluster, and the planner's times of a micro-batch.

    Attributes:
        cluster: as `--cluster` takes it, or `HERE`.
        times: of a micro-batch on a rank, a mean over the ranks.
    """

    cluster: str
    num_ranks: int
    num_micro_batches: int
    times: OpTimes

    @property
    def line(self) -> str:
        """Return the comment."""
        times = " ".join(f"{name}={seconds:.6g}" for name, seconds in asdict(self.times).items())
        counts = f"pp={self.num_ranks} num_micro_batches={self.num_micro_batches}"
        return f"# planned for {self.cluster}: {counts} {times}"

    @classmethod
    def of(cls, text: str) -> Self | None:
        """Read the comment of a file's text; None where it has none."""
        note = _NOTE.search(text)
        try:
            numbers = dict(setting.split("=") for setting in note[2].split()) if note else {}
            num_ranks, num_micro_batches = int(numbers.pop("pp")), int(numbers.pop("num_micro_batches"))
            times = _op_times(numbers)
        except (KeyError, TypeError, ValueError):
            return None
        return None if note is None else cls(note[1], num_ranks, num_micro_batches, times)

    def times_of(self, config: Config) -> OpTimes | None:
        """Return the times where they are those of a config; None where its pipeline was changed since."""
        try:
            is_same = (config.mesh.pp, num_micro_batches_of(config)) == (self.num_ranks, self.num_micro_batches)
        except ConfigError:
            return None
        return self.times if is_same else None


def _op_times(values: Mapping[str, Any]) -> OpTimes:
    """Return times that a file gives; raise ValueError, TypeError or OverflowError where they are none."""
    seconds = {name: float(value) for name, value in values.items()}
    if not all(0 <= duration_s <= MAX_S for duration_s in seconds.values()):
        raise ValueError("a time is no duration")
    return OpTimes(**seconds)


def planned(config: Config, op_times: OpTimes, max_cells: int = MAX_CELLS) -> TerminalPanel:
    """Simulate the schedule of a config with given times; return it with the bubble that its formula gives.

    Args:
        config: gives the schedule and its sizes.
        op_times: of a micro-batch on each rank.
        max_cells: the most forwards that are simulated.

    Raises:
        ConfigError: the number of micro-batches does not follow from the config alone, or there are more forwards.
        ScheduleError: the schedule cannot take these ranks, stages or micro-batches.
    """
    recipe, num_ranks, num_micro_batches = config.pipeline.schedule, config.mesh.pp, num_micro_batches_of(config)
    for code, message in wrong_schedule_size(num_micro_batches, config.pipeline, config.mesh, max_cells):
        raise ConfigError(code, message)
    schedule = pipeline_step(recipe, num_ranks, num_micro_batches, config.pipeline.virtual_stages)
    num_stages = placement_of(recipe, num_ranks, config.pipeline.virtual_stages).stages_per_rank
    actions = simulate(insert_transfers(schedule), op_times.cost(num_stages))
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}" + (f" x {num_stages} stages" if num_stages > 1 else "")
    title = f"{recipe}, planned: {ranks}, {num_micro_batches} micro-batch{'es' * (num_micro_batches > 1)}"
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


def plan_source(name: str, answer: Mapping[str, Any], config: Mapping[str, Any] | None, max_bytes: int) -> page.Source:
    """Return what a page shows of a plan.

    Args:
        answer: what `shardwise plan --json` writes; of several layouts the best is shown.
        config: the planned config; None where only the answer is there.
        max_bytes: the size of what is returned.

    Raises:
        ConfigError: the answer is none, or has no layout that fits.
    """
    try:
        best = answer.get("best", [answer])
        price, job = best[0], answer["job"]
        facts = list(_facts(price, job))
        limit = (price["peak_gib"] + price["margin_gib"]) * _GIB
        rows = [
            {"name": f"pipeline rank {rank['pipeline_rank']}", "predicted": _known(rank["peak_bytes"])}
            for rank in price["ranks"]
        ]
        parts = _known(price["parts_s"])
        layout = str(price["layout"])
        values = price.get("micro_batch_s")
        times = None if values is None else _op_times(values)
        wire = [["data", str(op), size] for op, size in _known(price.get("sent_bytes") or {}).items()]
        if not math.isfinite(limit):
            raise ValueError("the device's memory")
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ConfigError(
            "no-plan-answer", f"{name} holds no layout; give what shardwise plan --json or --write wrote"
        ) from None
    shown = page.source(name, layout, "")
    shown["facts"] = facts
    shown["memory"] = {"rows": rows, "limit": limit, "notes": [], "when": "peak within a step, by pipeline rank"}
    shown["parts"] = {"rows": [("predicted", parts)]}
    shown["wire"] = absent("one rank alone sends nothing; shardwise plan --dry-run counts every axis")
    if wire:
        note = "sent by a rank of the fullest pipeline rank in a step, for parameters and gradients"
        shown["wire"] = {"rows": wire, "note": f"{note}; shardwise plan --dry-run counts every axis"}
    shown["timelines"] = _timeline(_pipeline_of(price), times, max_bytes)
    lacking = absent("an answer has no config: give the file that shardwise plan --write wrote")
    shown["config"] = lacking if config is None else page.config_section(config)
    cluster = {key: job[key] for key in ("gpu", "num_gpus", "gpus_per_node", "seq_len", "global_batch") if key in job}
    shown["environment"] = {"keys": page.flat({"planned for": cluster})}
    return shown


def _timeline(config: Config | None, times: OpTimes | None, max_bytes: int) -> dict[str, Any]:
    """Return the section of a timeline, by the planner's times of a micro-batch, or 1 s a pass without them."""
    if config is None or config.mesh.pp == 1:
        return absent("a schedule is drawn of a config with pipeline stages (mesh.pp > 1)")
    note = "Each rank takes the planner's mean times of a micro-batch; gathers, reductions and steps are not drawn."
    try:
        panel = planned(config, times or OpTimes())
    except (ConfigError, ScheduleError) as error:
        return absent(f"the schedule is not drawn: {error}")
    notes = [note] if times else ["The planner's times are not known, so each pass takes 1 s."]
    return page.timelines([panel], notes, max_bytes)


def _pipeline_of(price: Mapping[str, Any]) -> Config | None:
    """Return the pipeline of a layout as a config: its schedule and sizes, and nothing else."""
    try:
        config = price["config"]
        return Config.from_dict(
            {
                "mesh": {"pp": config["mesh"]["pp"]},
                "pipeline": {key: config["pipeline"][key] for key in ("schedule", "virtual_stages")},
                "batch": {"accumulation": config["batch"]["accumulation"]},
            }
        )
    except (ConfigError, KeyError, TypeError):
        return None


def _facts(price: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    low_s, high_s = price["low_s"], price["high_s"]
    yield fact("a step", format_s(price["step_s"]), f"{format_s(low_s)} to {format_s(high_s)} expected")
    yield fact("speed", f"{price['tokens_per_s_per_gpu'] * job['num_gpus']:,.0f}", "tokens/s of all devices")
    if price["mfu"] is not None:
        yield fact("MFU", f"{100 * price['mfu']:.1f} %", "model FLOPs of the devices' peak")
    limit = (price["peak_gib"] + price["margin_gib"]) * _GIB
    yield fact("peak memory", format_bytes(price["peak_gib"] * _GIB), f"of {format_bytes(limit)}, fullest rank")
    if price["bubble_rate"] is not None:
        yield fact("bubble", f"{100 * price['bubble_rate']:.1f} %", "of the pipeline's span")
    yield fact("devices", f"{job['num_gpus']:,}", str(job["gpu"]))


def _known(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: float(size) for name, size in sizes.items() if 0 < size < math.inf}
