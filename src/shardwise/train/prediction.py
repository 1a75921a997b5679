"""Keeps in a run's folder what the planner predicted before the first step, and what the run then measured.

Nothing here may end a run: a prediction that fails is logged in one line, and the run goes on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from shardwise.config.written_files import write_whole
from shardwise.launch.host import usable_bytes
from shardwise.planner.hardware import CPU, Cluster, cluster_of, known_gpu
from shardwise.planner.profile import find_profile
from shardwise.planner.results import TIMELINE_PARTS, by_timeline_part, parts_of
from shardwise.planner.search import Pricer
from shardwise.report.page import installed
from shardwise.report.run_folder import PREDICTION_NAME
from shardwise.runtime.device import device_name, kind_of, num_devices
from shardwise.runtime.memory_tracker import Category
from shardwise.schedule.actions import COMPUTATIONS, ActionKind, TimedAction
from shardwise.train.loop import Trainer
from shardwise.train.needs import planned_job, sizes_cluster

SCHEMA: Final = 1

_PART_OF: Final[Mapping[ActionKind, str]] = MappingProxyType(
    {
        **dict.fromkeys(COMPUTATIONS, "compute"),
        ActionKind.RESHARD: "compute",
        ActionKind.STEP: "step",
        ActionKind.UNSHARD: "data",
        ActionKind.REDUCE: "data",
        ActionKind.SEND: "bubble",
        ActionKind.RECEIVE: "bubble",
        ActionKind.FETCH: "offload",
        ActionKind.EVICT: "offload",
    }
)
# Where several run at once, only the first one counts: it hides the others.
_BY_RANK: Final = ("compute", "step", "data", "offload", "bubble")

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class StepFigures:
    """Holds memory and time of a step of rank 0, as the planner predicts them or as a run measures them.

    Attributes:
        peak: bytes of the device at its peak, by the memory tracker's category.
        parts: seconds of a step by part; empty where they are not known.
        step_s: seconds of a step, measured as the median of the steps that no meter slowed; None where not known.
        low_s: the least seconds expected of a step.
        high_s: the most seconds expected of a step.
        note: what would make a prediction better.
    """

    peak: Mapping[str, int]
    parts: Mapping[str, float]
    step_s: float | None = None
    low_s: float = 0.0
    high_s: float = 0.0
    note: str = ""


def predict(trainer: Trainer, folder: Path, cache: Path | None) -> StepFigures | None:
    """Ask the planner about a run, and keep the answer in its folder; log a warning and return None if it fails.

    Args:
        trainer: the run's trainer, before its first step.
        cache: the folder that profiles are kept in; None where it is not known.
    """
    try:
        cluster, note = planned_cluster(trainer, cache)
        prediction = _priced(trainer, cluster, note)
        with suppress(OSError):  # which is said of other files
            _write(trainer, folder, prediction, None)
    except Exception as error:  # of whatever kind: a run is worth more than what is said of it
        log.warning("the planner cannot say what this run takes: %s: %s", type(error).__name__, error)
        return None
    return prediction


def compare(
    trainer: Trainer, folder: Path, prediction: StepFigures | None, step_s: Sequence[float]
) -> StepFigures | None:
    """Keep what was measured beside what was predicted; log a warning and return None if that fails.

    Args:
        trainer: the run's trainer, after its last step.
        prediction: what `predict` returned; None where there is nothing to compare with.
        step_s: seconds of the steps that no meter slowed.
    """
    if prediction is None:
        return None
    try:
        measured = measured_step(trainer, step_s)
    except Exception as error:
        log.warning("what this run took is not known: %s: %s", type(error).__name__, error)
        return None
    try:
        _write(trainer, folder, prediction, measured)
    except OSError as error:
        log.warning("what this run took is not kept: %s", error)
    return measured


def exposed_s(actions: Iterable[TimedAction]) -> dict[str, float]:
    """Return seconds of a rank's step by part; each moment counts once, so what runs beside computing is hidden.

    >>> from shardwise.schedule.actions import Action
    >>> forward = TimedAction(Action.parse("0F0"), 0, 0.0, 2.0, "compute")
    >>> reduce = TimedAction(Action.parse("0REDUCE"), 0, 1.0, 5.0, "reduce")
    >>> exposed_s([forward, reduce])
    {'compute': 2.0, 'data': 3.0}
    """
    events = []
    for action in actions:
        part_name = _PART_OF[action.action.kind]
        events += [(action.start_s, 1, part_name), (action.end_s, -1, part_name)]
    running = dict.fromkeys(_BY_RANK, 0)
    seconds: dict[str, float] = {}
    before_s = 0.0
    for time_s, change, part_name in sorted(events):
        shown = next((name for name in _BY_RANK if running[name]), None)
        if shown is not None and time_s > before_s:
            seconds[shown] = seconds.get(shown, 0.0) + time_s - before_s
        running[part_name] += change
        before_s = time_s
    return seconds


def planned_cluster(trainer: Trainer, cache: Path | None) -> tuple[Cluster, str]:
    """Return this machine as a cluster, and a note on what is not known about it."""
    device, num_ranks = trainer.engine.device, trainer.engine.comm.world_size
    name = _device_name(device)
    profile = None if cache is None else find_profile(cache, name, num_ranks)
    if profile is not None:
        return cluster_of(profile, num_ranks), ""
    note = "this machine's speed was not measured: shardwise doctor --calibrate lets the planner say times, too"
    if not kind_of(device).is_cpu and (gpu := known_gpu(name)) is not None:
        num_local = min(num_ranks, num_devices(kind_of(device)))
        cluster = Cluster(gpu=gpu, num_gpus=num_ranks, gpus_per_node=num_local, nic_bytes_per_s=gpu.nic_bytes_per_s)
        return cluster, "times are of data sheets; shardwise doctor --calibrate measures this machine"
    return sizes_cluster(num_ranks, usable_bytes() / num_ranks), note


def _priced(trainer: Trainer, cluster: Cluster, note: str) -> StepFigures:
    config = trainer.config
    job = planned_job(config, cluster, trainer.model.vocab_size)
    price = Pricer(job).price(config)
    memory = price.memory.ranks[0]
    is_known = cluster.profile is not None or not cluster.gpu.is_cpu
    parts_by_category = {category: parts_of(category) for category in Category}
    parts_by_category[Category.ACTIVATIONS] += parts_by_category.pop(Category.OTHER)  # which the tracker cannot tell
    return StepFigures(
        peak={category.value: round(memory.bytes_of(*parts)) for category, parts in parts_by_category.items()},
        parts=by_timeline_part(price.time.parts) if is_known else {},
        step_s=price.time.step_s if is_known else None,
        low_s=price.time.low_s if is_known else 0.0,
        high_s=price.time.high_s if is_known else 0.0,
        note=note,
    )


def measured_step(trainer: Trainer, step_s: Sequence[float]) -> StepFigures:
    """Return what the run took: bytes by category, and the parts of the median of the timed steps, if there are any."""
    peak = (
        {}
        if trainer.peak is None
        else {category.value: size for category, size in trainer.peak.peak_live_bytes.items()}
    )
    if not step_s:
        return StepFigures(peak, {})
    median_s = sorted(step_s)[len(step_s) // 2]
    last = exposed_s(trainer.engine.timeline)
    # The timeline is the last step's; its parts are scaled to the median step.
    scale = median_s / max(step_s[-1], 1e-9)
    parts = {name: scale * last.get(name, 0.0) for name in TIMELINE_PARTS}
    parts["other"] = max(median_s - sum(parts.values()), 0.0)
    return StepFigures(peak, parts, median_s)


def _write(trainer: Trainer, folder: Path, prediction: StepFigures, measured: StepFigures | None) -> None:
    """Write both, and all that another prediction of the same run needs."""
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "versions": {"shardwise": installed("shardwise") or "", "torch": torch.__version__},
        "device": _device_name(trainer.engine.device),
        "world_size": trainer.engine.comm.world_size,
        "vocab_size": trainer.model.vocab_size,
        "config": trainer.config.model_dump(mode="json"),
        "predicted": asdict(prediction),
        "measured": None if measured is None else asdict(measured),
    }
    write_whole(folder / PREDICTION_NAME, json.dumps(values, indent=1) + "\n")


def _device_name(device: torch.device) -> str:
    return CPU if kind_of(device).is_cpu else device_name(device)
