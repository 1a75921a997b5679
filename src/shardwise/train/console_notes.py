"""Writes a run's notes about tiers (which states are stored where, how fast the disk is) and about its pipeline."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from shardwise.config.resolve import Config, Tier
from shardwise.engine.engine import Engine
from shardwise.layout.layout import Layout
from shardwise.layout.stage_partition import find_partition
from shardwise.offload.disk_bench import USEFUL_BYTES_PER_S, measure_swap, passes_s, step_s
from shardwise.offload.nvme import SwapError
from shardwise.runtime.format import format_bytes, format_s
from shardwise.schedule import TimedAction, bubble_share, placement_of, rank_bubble_s, rank_span_s
from shardwise.schedule.simulate import OpTimes, mean_times
from shardwise.train.loop import Trainer
from shardwise.train.recording import gather_timeline

_NAMES: tuple[tuple[Tier, str], ...] = (("device", "device"), ("host", "host"), ("nvme", "NVMe"))
_ROLES = (("param", "parameters"), ("grad", "gradients"), ("optimizer", "optimizer"))

log = logging.getLogger("shardwise")


def tiers_line(layout: Layout) -> str:
    """Return the bytes of rank 0's states by tier as text; empty where all are stored on the device."""
    by_tier = layout.bytes_by_tier()
    if not by_tier.keys() - {"device"}:
        return ""
    parts = []
    for tier, place in _NAMES:
        held = by_tier.get(tier, {})
        states = ", ".join(f"{name} {format_bytes(held[role])}" for role, name in _ROLES if held.get(role))
        parts += [f"{place}: {states}"] if states else []
    return "; ".join(parts)


def measure_disk(engine: Engine, rank: int) -> str:
    """Measure the disk that stores states and return what it means for a step; empty without states on NVMe.

    It takes less than a second. Every rank calls it at the same time, so each measures its share of a common disk.
    """
    path = engine.config.tiers.nvme_path
    if path is None or "nvme" not in engine.layout.bytes_by_tier():
        return ""
    try:
        speed = measure_swap(Path(path), rank)
    except SwapError as error:  # its own files the engine has made by now
        log.warning("the disk was not measured: %s", error)
        return f"the disk of {path} was not measured: {error}"
    read_rate, write_rate = speed.read_bytes_per_s, speed.write_bytes_per_s
    rates = f"reads {read_rate / 1e9:.2f} GB/s and writes {write_rate / 1e9:.2f} GB/s a rank"
    if engine.device.type == "cuda" and min(read_rate, write_rate) < USEFUL_BYTES_PER_S:  # a CPU needs less
        rates += f", less than the {USEFUL_BYTES_PER_S / 1e9:g} that a GPU needs"
    optimizer_s = step_s(engine.layout, read_rate, write_rate)
    others_s = passes_s(engine.layout, engine.config.batch.accumulation or 1, read_rate, write_rate)
    times = [f"{format_s(optimizer_s)} for the optimizer"] if optimizer_s else []
    times += [f"{format_s(others_s)} for the forward and backward"] if others_s else []
    return f"{speed.path} {rates}; of each step the disk works at most {' and '.join(times)}"


def plan_note(trainer: Trainer) -> str:
    """Return the table of the pipeline's stages and the schedule's predicted bubble; empty without a pipeline."""
    config = trainer.config
    if config.mesh.pp == 1:
        return ""
    return f"{find_partition(trainer.model.skeleton(), config).describe()}\n{schedule_line(config)}"


def schedule_line(config: Config) -> str:
    """Return a line that names the config's schedule and the bubble that its formula gives."""
    num_micro_batches, num_stages = config.batch.accumulation or 1, _stages_per_rank(config)
    stages = f" x {num_stages} stages" if num_stages > 1 else ""
    micro_batches = "1 micro-batch" if num_micro_batches == 1 else f"{num_micro_batches} micro-batches"
    what = f"{config.pipeline.schedule} over {config.mesh.pp} ranks{stages}, {micro_batches}"
    share = _formula_share(config, OpTimes())
    if share is None:
        return f"{what}: its bubble has no formula for such numbers; shardwise timeline simulates it"
    return f"{what}: bubble {share:.1%} of a rank's step, were F = B = W and transfers free".replace("%", " %")


def measured_note(trainer: Trainer) -> str:
    """Return a line with the last step's bubble and the one that the formula gives for the measured times.

    All ranks call it. The line is empty without a pipeline, and where this run has taken no step.
    """
    engine = trainer.engine
    if engine.layout.pipeline is None or engine.num_steps == trainer.first_step:
        return ""
    actions = gather_timeline(engine)
    formula = _formula_share(engine.config, mean_times(actions))
    said = "no formula for these times" if formula is None else f"{formula:.1%} by formula for the times measured"
    return f"bubble of the last step: {measured_share(actions):.1%} of the longest rank's, {said}".replace("%", " %")


def measured_share(actions: Sequence[TimedAction]) -> float:
    """Return the bubble of the rank with the longest span, as a share of that span."""
    spans_s = {each.rank: rank_span_s(actions, each.rank) for each in actions}
    longest = max(spans_s, key=spans_s.__getitem__)
    return rank_bubble_s(actions, longest) / spans_s[longest] if spans_s[longest] > 0 else 0.0


def _formula_share(config: Config, times: OpTimes) -> float | None:
    """Return the formula's bubble as a share of a rank's span; None where there is no formula."""
    num_micro_batches = config.batch.accumulation or 1
    return bubble_share(config.pipeline.schedule, config.mesh.pp, num_micro_batches, _stages_per_rank(config), times)


def _stages_per_rank(config: Config) -> int:
    return placement_of(config.pipeline.schedule, config.mesh.pp, config.pipeline.virtual_stages).stages_per_rank
