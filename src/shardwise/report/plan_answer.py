"""Read what a page shows of a plan from the planner's answer, as `shardwise plan --json` writes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.config.resolve import Config, ConfigError
from shardwise.report import page
from shardwise.report.page import absent, fact
from shardwise.report.planned import planned
from shardwise.runtime.format import format_bytes, format_s
from shardwise.schedule import ScheduleError
from shardwise.schedule.simulate import OpTimes

_GIB = 2**30


def plan_source(name: str, answer: Mapping[str, Any], config: Mapping[str, Any] | None, max_bytes: int) -> page.Source:
    """Return what a page shows of a plan.

    Args:
        name: of the plan.
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
            {"name": f"pipeline rank {each['pipeline_rank']}", "predicted": _known(each["peak_bytes"])}
            for each in price["ranks"]
        ]
        parts = _known(price["parts_s"])
        layout = str(price["layout"])
        values = price.get("micro_batch_s")
        times = None if values is None else OpTimes(**{name: float(seconds) for name, seconds in values.items()})
        wire = [["data", str(op), size] for op, size in _known(price.get("sent_bytes") or {}).items()]
        if not math.isfinite(limit):
            raise ValueError("the device's memory")
    except (IndexError, KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            "no-plan-answer", f"{name} holds no layout; give what shardwise plan --json or --write wrote"
        ) from None
    found = page.source(name, layout, "")
    found["facts"] = facts
    found["memory"] = {"rows": rows, "limit": limit, "notes": [], "when": "peak within a step, by pipeline rank"}
    found["parts"] = {"rows": [("predicted", parts)]}
    found["wire"] = absent("one rank alone sends nothing; shardwise plan --dry-run counts every axis")
    if wire:
        note = "sent by a rank of the fullest pipeline rank in a step, for parameters and gradients"
        found["wire"] = {"rows": wire, "note": f"{note}; shardwise plan --dry-run counts every axis"}
    found["timelines"] = planned_timeline(_pipeline_of(price), times, max_bytes)
    found["config"] = absent("an answer has no config: give the file that shardwise plan --write wrote")
    if config is not None:
        found["config"] = page.config_section(config)
    cluster = {key: job[key] for key in ("gpu", "num_gpus", "gpus_per_node", "seq_len", "global_batch") if key in job}
    found["environment"] = {"keys": page.flat({"planned for": cluster})}
    return found


def planned_timeline(config: Config | None, times: OpTimes | None, max_bytes: int) -> dict[str, Any]:
    """Return the section of a plan's timeline.

    Args:
        config: gives the schedule; None where there is none.
        times: the planner's, of a micro-batch; None takes 1 s a pass.
        max_bytes: the size of what is returned.
    """
    if config is None or config.mesh.pp == 1:
        return absent("a schedule is drawn of a config with pipeline stages (mesh.pp > 1)")
    note = "Each rank takes the planner's mean times of a micro-batch; gathers, reductions and steps are not drawn."
    try:
        panel = planned(config, times or OpTimes())
    except (ConfigError, ScheduleError) as error:
        return absent(f"the schedule is not drawn: {error}")
    notes = [note] if times else ["The planner's times are not known, so each pass takes 1 s."]
    return page.timelines([panel], notes, max_bytes)


def config_source(name: str, config: Config, times: OpTimes | None, max_bytes: int) -> page.Source:
    """Return what a page shows of a config that has no price, since its cluster is not known.

    Args:
        name: of the config.
        config: what its file says.
        times: of a micro-batch; None takes 1 s a pass.
        max_bytes: the size of what is returned.
    """
    found = page.source(name, "a config", "its cluster is not known: add --cluster, such as --cluster h100:512")
    found["curves"] = absent("")
    found["timelines"] = planned_timeline(config, times, max_bytes)
    found["config"] = page.config_section(config.model_dump(mode="json"))
    return found


def _pipeline_of(price: Mapping[str, Any]) -> Config | None:
    """Return the pipeline of a layout as a config: its schedule and sizes, and nothing else."""
    try:
        strategy = price["strategy"]
        return Config.from_dict(
            {
                "mesh": {"pp": strategy["pp"]},
                "pipeline": {key: strategy[key] for key in ("schedule", "virtual_stages")},
                "batch": {"accumulation": strategy["num_micro_batches"]},
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
